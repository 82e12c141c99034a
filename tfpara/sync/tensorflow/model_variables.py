"""The variables of a Keras model that a sync works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfpara.algorithms.keras_step import class_names
from tfpara.keras_model import (
    minibatches_of_a_step,
    optimizers,
    product_left_out,
    rate_can_be_set,
)
from tfpara.sync.one_sync.replicas import ReplicaVariables
from tfpara.sync.settings import Settings
from tfpara.typing import Variable


def replica_variables(
    model: keras.Model,
    components_of: Callable[[Variable], tuple[tf.Variable, ...]],
    settings: Settings,
) -> ReplicaVariables:
    """Returns the model's weights, averaged state and optimizer slots, by device.

    The model and its optimizers are built. `components_of` returns a distributed variable's
    component on each local device. A rule with a method `check_optimizer` filters the optimizer's
    moments. ValueError: the rule, or `local_state`, does not work with the optimizer.
    """

    def components(variables: Sequence[keras.Variable]) -> list[tuple[tf.Variable, ...]]:
        return [components_of(v.value) for v in variables]

    weights = model.trainable_variables
    others = [v for v in model.non_trainable_variables if v.value.dtype.is_floating]
    # A frozen weight (trainable for TensorFlow, but not for Keras) does not change in training, so
    # it is no part of the state.
    state = [v for v in others if not v.value.trainable]
    frozen = [v for v in others if v.value.trainable]
    local_state = settings.slots_at_sync
    written = [] if local_state == "keep" else optimizers(model)
    slots = [slot for optimizer in written for slot in _slots(optimizer)]
    moments: list[keras.Variable] = []
    # A sync makes the step counts of the optimizers in `counting` equal on all replicas, and sets
    # the step counts of the optimizers in `resetting` back to 0.
    counting = written if local_state == "average" else []
    resetting = _counting_moments(written) if local_state == "reset" else []
    if settings.balance is not False:
        # With `balance`, replicas take different numbers of steps, but follow one schedule of the
        # learning rate. The schedule computes the rate from an optimizer's step count. So syncs
        # also write the step counts of optimizers with a schedule.
        scheduled = [o for o in optimizers(model) if has_schedule(o) and o not in counting]
        counting = [*counting, *scheduled]
    rule = settings.rule
    if hasattr(rule, "check_optimizer"):
        found = optimizers(model)
        if len(found) != 1:
            raise ValueError(
                f"the model has {len(found)} optimizers, and BMUFAdam filters the moments of one. "
                "Use tfpara.BMUF."
            )
        optimizer = found[0]
        rule.check_optimizer(optimizer)
        # The optimizer may also have moments of frozen weights. So the moments of `weights` are
        # found by the index that Keras has for each weight.
        indices = [optimizer._get_variable_index(v) for v in weights]
        for weight, index in zip(weights, indices, strict=True):
            if optimizer._momentums[index] is None:  # true for the scales of a float8 layer
                raise ValueError(
                    f"the optimizer keeps no moments of {weight.path!r}, and BMUFAdam filters "
                    "those of each weight. Use tfpara.BMUF."
                )
        moments = [
            components([of_all[i] for i in indices])
            for of_all in (optimizer._momentums, optimizer._velocities)
        ]
        counting, slots = [optimizer], []
    return ReplicaVariables(
        weights=components(weights),
        weight_names=[v.path for v in weights],
        constraints=[v.constraint for v in weights],
        state=components(state),
        state_names=[v.path for v in state],
        slots=components([v for v, _ in slots]),
        slot_names=[v.path for v, _ in slots],
        slot_resets=[value for _, value in slots],
        local_state=local_state,
        frozen=components(frozen),
        moments=moments,
        counts=[(components_of(o._iterations.value), minibatches_of_a_step(o)) for o in counting],
        counts_to_reset=[
            (components_of(o._iterations.value), minibatches_of_a_step(o)) for o in resetting
        ],
        rates=components([o.learning_rate for o in optimizers(model) if rate_can_be_set(o)]),
    )


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer computes its learning rate from the number of its steps."""
    rate = getattr(optimizer, "_learning_rate", None)  # `learning_rate` would call the schedule
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


def _counting_moments(
    model_optimizers: Sequence[keras.optimizers.Optimizer],
) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers whose step count a sync resets together with their slots.

    Adam and others correct the bias of their moments by the step count. If moments were reset
    without the count, the correction would be missing, and steps would be several times the
    learning rate.
    """
    counting = []
    for optimizer in model_optimizers:
        name = type(optimizer).__name__
        kinds = class_names(optimizer)
        if "ScheduleFreeAdamW" in kinds:
            raise ValueError(
                f'local_state="reset": {name} keeps a second copy of the weights in its slots, '
                'which cannot be reset. Give local_state="keep" or "average".'
            )
        if kinds & _WITHOUT_COUNT:
            continue
        if has_schedule(optimizer):
            raise ValueError(
                f'local_state="reset" sets back the number of steps from which {name} corrects its '
                "moments, and from which its learning-rate schedule counts too. Give a number as "
                "the rate, and change it by a callback such as "
                'keras.callbacks.LearningRateScheduler; or give local_state="keep" or "average".'
            )
        counting.append(optimizer)
    return counting


# Keras' optimizers whose step does not depend on the number of steps before it.
_WITHOUT_COUNT = {"SGD", "RMSprop", "Adagrad", "Adadelta", "Lion"}


def check_ftrl(
    model_optimizers: Sequence[keras.optimizers.Optimizer], local_state: str, several: bool
) -> None:
    """Raises ValueError for Ftrl, if its next step would undo a sync.

    A step of Ftrl computes the weights anew from its slots, which have the gradients so far. So if
    a sync writes the weights alone, the next step takes each replica back to its own weights. If a
    sync resets the slots, the next step takes the weights to about 0. `several`: there are several
    replicas, now or later in an elastic run.
    """
    if local_state == "average" or (local_state != "reset" and not several):
        return
    for optimizer in model_optimizers:
        if "Ftrl" in class_names(optimizer):
            raise ValueError(
                f"local_state={local_state!r}: each step of {type(optimizer).__name__} "
                "computes the weights anew from its slots, and so would undo the sync before it. "
                'Give the strategy local_state="average", or take another optimizer.'
            )


def _slots(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, float]]:
    """Returns the optimizer's slots, each with its initial value.

    Variables with a true attribute `of_one_replica` are left out: a sync does not change them.
    """
    start = float(getattr(optimizer, "initial_accumulator_value", 0.0))
    # Most scalars of an optimizer, such as the learning rate, are no slots. There are two
    # exceptions. Nadam's `_u_product`, the product of all its momenta so far, belongs to its
    # moments. The slot of a scalar weight is a scalar, too; it is in one of the lists in which
    # Keras keeps a slot for each weight.
    product = getattr(optimizer, "_u_product", None)
    others = ("_variables", "_trainable_variables")
    lists = [v for name, v in vars(optimizer).items() if isinstance(v, list) and name not in others]
    listed = {id(slot) for slots in lists for slot in slots}
    return [
        (v, 1.0 if v is product else start if v.path.endswith("accumulator") else 0.0)
        for v in [*optimizer.variables, *product_left_out(optimizer)]
        if v.value.dtype.is_floating
        and (v.value.shape.rank or v is product or id(v) in listed)
        and not v.path.endswith("gradient_accumulator")  # it belongs to the step under way
        and not getattr(v, "of_one_replica", False)
    ]
