"""What training has made of a model, to go back to: all of it but the learning rate."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfpara.keras_model import optimizers
from tfpara.sync.keras_hooks import build_optimizers
from tfpara.sync.state import Kind, model_slots, slots_of
from tfpara.typing import Array


class TrainingState:
    """A copy of all that training has changed, taken where blocks are closed.

    That is every replica's weights, statistics, random states and optimizer (slots and counts of
    steps); and, of a strategy, the global model with its momentum and averages, what rounding has
    left out, and what else a checkpoint keeps of them, or what the parameter servers hold. The
    learning rate is left out, and so are metrics and the counts of what has been done (steps,
    syncs, bytes, pushes).

    Every worker must make it, and restore it, at the same point: between epochs.

    Args:
        model: built and compiled.
        shared: whether what replicas share is kept too, and not their own variables alone.
    """

    def __init__(self, model: keras.Model, shared: bool = True) -> None:
        strategy: Any = model.distribute_strategy
        self._go_back = lambda: None
        if shared and hasattr(strategy, "snapshot"):
            self._go_back = strategy.snapshot(model)  # of the servers, which have the optimizer
        else:
            build_optimizers(model)
        if shared and hasattr(strategy, "synchronize"):
            strategy.synchronize()  # of a run without parameter servers
        rates = _rates(model)
        # A tensor that is kept is copied by TensorFlow when its variable is next written.
        self._kept = [
            (slot.variable, tf.identity(slot.variable))
            for slot in (slots_of if shared else model_slots)(model)
            if slot.kind not in (Kind.WORKER, Kind.SUM)
            and not slot.empty
            and id(slot.variable) not in rates
        ]

    def restore(self) -> None:
        """Puts everything back, bit for bit; can be done again."""
        for variable, value in self._kept:
            variable.assign(value)
        self._go_back()

    def has_diverged(self) -> bool:
        """Whether, on this worker, something is NaN or Inf now that was not."""
        return any(
            not _is_finite(variable) and _is_finite(value)
            for variable, value in self._kept
            if variable.dtype.is_floating
        )


def _is_finite(value: Array) -> bool:
    # A sum is finite only if every term is: one pass, no temporary of the size.
    return bool(tf.math.is_finite(tf.reduce_sum(tf.cast(value, tf.float32))))


def _rates(model: keras.Model) -> set[int]:
    """The ids of the learning rates' plain variables."""
    found = [optimizer.learning_rate for optimizer in optimizers(model)]
    local_results = model.distribute_strategy.experimental_local_results
    variables = [rate.value for rate in found if isinstance(rate, keras.Variable)]
    return {id(component) for variable in variables for component in local_results(variable)}
