"""The variables of a Keras model that a sync works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.synchronizer import ReplicaVariables


def replica_variables(
    model: keras.Model, components_of: Callable[[Any], tuple[tf.Variable, ...]]
) -> ReplicaVariables:
    """The model's weights, averaged state and optimizer slots, by device.

    Args:
        model: built; its optimizer, if it has one, too.
        components_of: gives a distributed variable's component on each local device.
    """

    def components(variables: Sequence[keras.Variable]) -> list[tuple[tf.Variable, ...]]:
        return [components_of(v.value) for v in variables]

    weights = model.trainable_variables
    state = [
        v
        for v in model.non_trainable_variables
        # A frozen weight is not state: it is trainable to TensorFlow, and does not move.
        if v.value.dtype.is_floating and not v.value.trainable
    ]
    slots = _slots(model.optimizer) if getattr(model, "optimizer", None) is not None else []
    return ReplicaVariables(
        weights=components(weights),
        weight_names=[v.path for v in weights],
        state=components(state),
        slots=components([v for v, _ in slots]),
        slot_resets=[value for _, value in slots],
    )


def _slots(optimizer: Any) -> list[tuple[keras.Variable, float]]:
    """The optimizer's per-weight state, with the value each starts from."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    start = float(getattr(inner, "initial_accumulator_value", 0.0))
    return [
        (v, start)
        for v in inner.variables
        if v.value.dtype.is_floating
        and v.value.shape.rank
        # Gradients under way and Keras' own moving average of the weights are not momentum.
        and not v.path.endswith(("gradient_accumulator", "average"))
    ]
