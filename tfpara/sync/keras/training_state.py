"""Copies of all that training changes, except learning rates, so that a run can go back to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara.keras_model import optimizers
from tfpara.strategy import HAS_WEIGHTS, Strategy
from tfpara.sync.keras.optimizer_steps import build_optimizers
from tfpara.sync.one_sync.state_vars import TRAVELLING, Kind, Slot, slots_of
from tfpara.typing import Json


class TrainingState:
    """A copy of all that training has changed, taken while blocks are closed.

    It holds what a checkpoint has of the replicas, and of the syncs or the parameter servers. It
    leaves out learning rates, metrics, and the counters of steps, syncs, bytes and pushes.

    The model must be built and compiled. Every worker must make the copy, and restore it, at the
    same point between epochs. `kept` are the variables and their values.
    """

    def __init__(self, model: keras.Model) -> None:
        self._strategy: Any = model.distribute_strategy
        strategy = self._strategy
        self._go_back = lambda: None
        if hasattr(strategy, "snapshot"):
            self._go_back = strategy.snapshot(model)  # puts the parameter servers' state back
        else:
            build_optimizers(model)
        if hasattr(strategy, "synchronize"):
            strategy.synchronize()  # in a run without parameter servers: closes the open block
        # `read_value` makes no copy. TensorFlow copies the value only when the variable is next
        # written, so until then the values take no memory.
        changing = _changing(model, _shared_slots(model))
        self.kept = [(variable, variable.read_value()) for variable in changing]

    def restore(self) -> None:
        """Puts everything back, bit for bit. Every worker must call it; it may be called again."""
        for variable, value in self.kept:
            variable.assign(value)
        self._go_back()
        models = getattr(self._strategy.extended, "models", None)  # AsyncStrategy has no `models`
        for synchronizer in models.synchronizers if models else ():
            synchronizer.was_put_back()


class EpochStart:
    """The training state at the begin of an epoch, also on workers that join within it.

    A joiner receives the state from another worker, without variables that each replica has for
    itself. Its replicas begin with these as replicas of any joiner do.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy: Any = Strategy.of(model)
        self._state: TrainingState | None = None
        self._taken: Sequence[np.ndarray] | None = None
        self._strategy.company.share_state("epoch start", self)

    def note(self) -> None:
        """Notes the state where an epoch begins, or keeps one taken over; all workers call it."""
        if self._taken is None:
            self._state = TrainingState(self._model)

    def go_back(self) -> None:
        """Puts the noted state back. All workers call it, while blocks are closed."""
        if self._taken is None:
            assert self._state is not None
            self._state.restore()
            return
        for variable, value in zip(self._travelling(), self._taken, strict=True):
            variable.assign(value)
        synchronizer = self._strategy.synchronizer_of(self._model)
        synchronizer.start_from(synchronizer.broadcast_point())

    def forget(self) -> None:
        """Frees the memory of the noted state."""
        self._state = self._taken = None

    # -- the state that a joining worker receives --------------------------------------------

    def get_state(self) -> dict[str, Json]:
        return {HAS_WEIGHTS: self._state is not None or self._taken is not None}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Does nothing: the state is the arrays of `weights`."""

    @property
    def weights(self) -> Sequence[np.ndarray]:
        """The arrays that joiners receive; if no state was noted, the present values instead."""
        if self._taken is not None:
            return self._taken
        kept = self._state.kept if self._state else []
        noted = {id(variable): value for variable, value in kept}
        return [noted.get(id(v), v.read_value()).numpy() for v in self._travelling()]

    @weights.setter
    def weights(self, weights: Sequence[np.ndarray]) -> None:
        # Weights arrive at joiners, and at members that have missed a sync. Only joiners need them:
        # the members were there when the epoch began, and have noted the state themselves.
        if self._strategy.company.joining:
            self._taken = weights

    def _travelling(self) -> list[tf.Variable]:
        slots = (slot for slot in _shared_slots(self._model) if slot.kind in TRAVELLING)
        return list(_changing(self._model, slots))


def _shared_slots(model: keras.Model) -> list[Slot]:
    """Returns the slots that a checkpoint has, and those of the rule's values that depend on N."""
    slots = slots_of(model)
    strategy: Any = model.distribute_strategy
    if hasattr(strategy, "synchronizer_of"):
        slots += strategy.synchronizer_of(model).graph.global_state.rule.slots()
    return slots


def _changing(model: keras.Model, slots: Iterable[Slot]) -> Iterator[tf.Variable]:
    """Yields the variables of slots that training changes, except rates and counters."""
    rates = _rates(model)
    for slot in slots:
        counter = slot.kind is Kind.WORKER or slot.kind.is_aggregated
        if not counter and not slot.empty and id(slot.variable) not in rates:
            yield slot.variable


def _rates(model: keras.Model) -> set[int]:
    """Returns the ids of the learning rates' components on the local devices."""
    rates = [optimizer.learning_rate for optimizer in optimizers(model)]
    local_results = model.distribute_strategy.experimental_local_results
    variables = [rate.value for rate in rates if isinstance(rate, keras.Variable)]
    return {id(component) for variable in variables for component in local_results(variable)}
