"""Copies of all that training changes, except the learning rate, to return to."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfpara.keras_model import optimizers
from tfpara.sync.keras_hooks import build_optimizers
from tfpara.sync.state import Kind, model_slots, slots_of
from tfpara.typing import Array


class TrainingState:
    """A copy of all that training has changed, taken while blocks are closed.

    It holds every replica's weights, statistics, random states, optimizer slots and step counts. It
    also holds the state that a checkpoint keeps of the syncs (the global model, its momentum and
    averages, rounding errors), or the state of the parameter servers. It leaves out learning rates,
    metrics, and the counters of steps, syncs, bytes and pushes.

    Every worker must make it, and restore it, at the same point between epochs.

    Args:
        model: a built and compiled model.
        shared: whether the state that replicas share is kept, besides their own variables.
    """

    def __init__(self, model: keras.Model, shared: bool = True) -> None:
        strategy: Any = model.distribute_strategy
        self._go_back = lambda: None
        if shared and hasattr(strategy, "snapshot"):
            self._go_back = strategy.snapshot(model)  # the parameter servers' state
        else:
            build_optimizers(model)
        if shared and hasattr(strategy, "synchronize"):
            strategy.synchronize()  # closes the block, in a run without parameter servers
        rates = _rates(model)
        # TensorFlow copies a tensor that is kept here when its variable is next written.
        self._kept = [
            (slot.variable, tf.identity(slot.variable))
            for slot in (slots_of if shared else model_slots)(model)
            if slot.kind not in (Kind.WORKER, Kind.SUM)
            and not slot.empty
            and id(slot.variable) not in rates
        ]

    def restore(self) -> None:
        """Puts everything back, bit for bit. It may be called again."""
        for variable, value in self._kept:
            variable.assign(value)
        self._go_back()

    def has_diverged(self) -> bool:
        """Returns whether a variable of this worker has become NaN or Inf since the copy."""
        return any(
            not _is_finite(variable) and _is_finite(value)
            for variable, value in self._kept
            if variable.dtype.is_floating
        )


def _is_finite(value: Array) -> bool:
    # A sum is finite only if all its terms are. It takes one pass and no memory.
    return bool(tf.math.is_finite(tf.reduce_sum(tf.cast(value, tf.float32))))


def _rates(model: keras.Model) -> set[int]:
    """Returns the ids of the learning rates' components on the local devices."""
    rates = [optimizer.learning_rate for optimizer in optimizers(model)]
    local_results = model.distribute_strategy.experimental_local_results
    variables = [rate.value for rate in rates if isinstance(rate, keras.Variable)]
    return {id(component) for variable in variables for component in local_results(variable)}
