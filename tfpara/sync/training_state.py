"""What training has made of a model, to go back to: all of it but the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpara.keras_model import optimizers, training_variables
from tfpara.sync.keras_hooks import build_optimizers


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
        variables = [*_components(model), *(_of_synchronizer(model) if shared else ())]
        # A tensor that is kept is copied by TensorFlow when its variable is next written.
        self._kept = [(variable, tf.identity(variable)) for variable in variables]

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


def _is_finite(value: Any) -> bool:
    # A sum is finite only if every term is: one pass, no temporary of the size.
    return bool(tf.math.is_finite(tf.reduce_sum(tf.cast(value, tf.float32))))


def _components(model: keras.Model) -> Iterator[tf.Variable]:
    """The plain variables of every local replica."""
    rates = {id(optimizer.learning_rate) for optimizer in optimizers(model)}
    local_results = model.distribute_strategy.experimental_local_results
    for name, variable in training_variables(model):
        if not name.startswith("metrics/") and id(variable) not in rates:
            yield from local_results(variable.value)


def _of_synchronizer(model: keras.Model) -> Iterator[tf.Variable]:
    """The plain variables of the global model, where replicas are synchronised."""
    strategy: Any = model.distribute_strategy
    if hasattr(strategy.extended, "synchronizer_of"):
        strategy.synchronize()
        with strategy.scope():
            yield from strategy.extended.synchronizer_of(model).moved_by_training()
