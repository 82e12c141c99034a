"""The variables of a Keras model that a sync works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.group import Group
from tfpara.replicas import ReplicaVariables


def strategy_of(model: keras.Model) -> tf.distribute.Strategy:
    """The strategy in whose scope the weights of a model were made, else the model itself.

    A model may be put together outside of the scope from layers of a trained one.
    """
    weights = getattr(model, "weights", [])  # Keras saves what is no model, too
    of_weights = (getattr(weight.value, "distribute_strategy", None) for weight in weights)
    own = getattr(model, "distribute_strategy", None)
    return next(filter(None, of_weights), None) or own or tf.distribute.get_strategy()


def build_optimizer(model: keras.Model) -> None:
    """Makes the compiled optimizer's slots, which its first step would make later."""
    for one in _parts(model):
        optimizer = getattr(one, "optimizer", None)
        if optimizer is not None and not optimizer.built and one.trainable_variables:
            with strategy_of(one).scope():
                optimizer.build(one.trainable_variables)


def unbuilt_optimizers(model: keras.Model) -> list[str]:
    """The attributes of a model that are optimizers without slots."""
    attributes = vars(model).items()
    return [k for k, v in attributes if isinstance(v, keras.optimizers.Optimizer) and not v.built]


def check_optimizers_built(model: keras.Model) -> None:
    """Makes sure that all of a model's optimizers have their slots.

    Raises:
        ValueError: one has not; the message has the line that makes them.
    """
    for name in unbuilt_optimizers(model):
        parts = [k for k, v in vars(model).items() if isinstance(v, keras.Model)]
        raise ValueError(
            f"the optimizer {name!r} of model {model.name!r} has no slots yet, so what is kept now "
            f"could not be put back. Before fit, in the scope, write model.{name}.build("
            "model.PART.trainable_variables), with the part that it trains "
            f"({', '.join(parts) or 'a layer'}); or remove it from the model if it trains none."
        )


def replica_variables(
    model: keras.Model,
    components_of: Callable[[Any], tuple[tf.Variable, ...]],
    rule: Any = None,
    local_state: str = "keep",
) -> ReplicaVariables:
    """The model's weights, averaged state and optimizer slots, by device.

    Args:
        model: built; its optimizer, if it has one, too.
        components_of: gives a distributed variable's component on each local device.
        rule: one that filters the moments of the local optimizer names its slots by
            `check_optimizer`.
        local_state: "keep", "reset" or "average": what a sync makes of the slots.

    Raises:
        ValueError: the rule, or the choice of `local_state`, does not work with the model's
            optimizer.
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
    slots = [slot for optimizer in optimizers(model) for slot in _slots(optimizer)]
    moments: list[Any] = []
    counting = _counting(optimizers(model), local_state)
    if hasattr(rule, "check_optimizer"):
        (optimizer,) = _only_optimizer(model)
        rule.check_optimizer(optimizer)
        # Keras' own lists, by its own index: the optimizer may have slots of frozen weights too.
        indices = [optimizer._get_variable_index(v) for v in weights]
        moments = [
            components([of_all[i] for i in indices])
            for of_all in (optimizer._momentums, optimizer._velocities)
        ]
        counting, slots = [optimizer], []
    return ReplicaVariables(
        weights=components(weights),
        weight_names=[v.path for v in weights],
        state=components(state),
        state_names=[v.path for v in state],
        slots=components([v for v, _ in slots]),
        slot_names=[v.path for v, _ in slots],
        slot_resets=[value for _, value in slots],
        moments=moments,
        counts=components([optimizer._iterations for optimizer in counting]),
        cycles=[optimizer.gradient_accumulation_steps or 1 for optimizer in counting],
        rates=components([o.learning_rate for o in optimizers(model) if _rate_can_be_set(o)]),
    )


def hyperparameters(model: keras.Model) -> dict[str, Any]:
    """What the model's optimizers were made with, by names for a message: equal on all workers.

    Of learning rates only schedules: a number is that of a moment. And what is a plain value.
    """
    found: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers(model)):
        label = f"optimizer {number + 1}" if number else "optimizer"
        found[label] = type(optimizer).__name__
        try:
            config = optimizer.get_config()
        except NotImplementedError:  # of a user's own class
            continue
        # What is behind `learning_rate`, which gives a schedule's value.
        schedule = isinstance(
            optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        )
        for key, value in config.items():
            if key != "name" and (key != "learning_rate" or schedule) and _is_plain(value):
                found[f"{label}'s {key}"] = value
    return found


def _rate_can_be_set(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "_learning_rate", None), keras.Variable)


def _is_plain(value: Any) -> bool:
    leaves = (bool, int, float, str, type(None))
    return all(isinstance(leaf, leaves) for leaf in keras.tree.flatten(value))


def _counting(found: Sequence[Any], local_state: str) -> list[Any]:
    """The optimizers whose number of steps goes with their slots when a sync writes these.

    Adam and others divide their moments by what these have seen by that number: moments that are
    set to 0 without it would be taken for old ones, and steps be several times the learning rate.

    Raises:
        ValueError: a reset would also set a learning-rate schedule back, or an optimizer has slots
            that do not start from a constant.
    """
    if local_state == "keep":
        return []
    if local_state == "average":
        return list(found)
    counting = []
    for optimizer in found:
        name = type(optimizer).__name__
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if "ScheduleFreeAdamW" in kinds:
            raise ValueError(
                f'local_state="reset": {name} keeps a second copy of the weights in its slots, '
                'which cannot be reset. Give local_state="keep" or "average".'
            )
        if kinds & _WITHOUT_COUNT:
            continue
        rate = getattr(optimizer, "_learning_rate", None)  # `learning_rate` would call a schedule.
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(
                f'local_state="reset" sets back the number of steps from which {name} corrects its '
                "moments, and from which its learning-rate schedule counts too. Give a number as "
                "the rate, and change it by a callback such as "
                'keras.callbacks.LearningRateScheduler; or give local_state="keep" or "average".'
            )
        counting.append(optimizer)
    return counting


# Keras' optimizers whose step does not depend on the number of steps before it.
_WITHOUT_COUNT = {"SGD", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion"}


def _only_optimizer(model: keras.Model) -> list[Any]:
    found = optimizers(model)
    if len(found) != 1:
        raise ValueError(
            f"the model has {len(found)} optimizers, and BMUFAdam filters the moments of one. "
            "Use tfpara.BMUF."
        )
    return found


def optimizers(model: keras.Model) -> list[Any]:
    """The optimizers of a model: the compiled one, and others that are its attributes.

    Those inside a LossScaleOptimizer or a MultiOptimizer stand for these.
    """
    inner = [getattr(o, "inner_optimizer", o) for o in _outer_optimizers(model)]
    # How Keras' MultiOptimizer keeps what it hands the weights to.
    inner = [one for o in inner for one in getattr(o, "_inner_optimizers", [o])]
    return list({id(o): o for o in inner}.values())


def _parts(model: keras.Model) -> list[keras.Model]:
    return [model, *(model.members if isinstance(model, Group) else [])]


def _outer_optimizers(model: keras.Model) -> list[Any]:
    found = [
        o for one in _parts(model) for o in (getattr(one, "optimizer", None), *vars(one).values())
    ]
    found += model.optimizers if isinstance(model, Group) else []
    return [o for o in found if isinstance(o, keras.optimizers.Optimizer)]


def check_optimizers_known(model: keras.Model, used: Sequence[Any], why: str) -> None:
    """Makes sure that the optimizers of a step are among those of the model it trains.

    Args:
        model: whose step was traced.
        used: the optimizers that took the step.
        why: what has to know the optimizers.

    Raises:
        ValueError: there is one more.
    """
    known = {id(optimizer) for optimizer in (*_outer_optimizers(model), *optimizers(model))}
    unknown = [optimizer.name for optimizer in used if id(optimizer) not in known]
    if unknown:
        raise ValueError(
            f"{why} has to know the optimizers, and {unknown[0]!r} is not known. Write "
            "strategy.track(model, optimizers=[...]) with all of a loop; for fit, make each an "
            "attribute of the model."
        )


def carried_states(model: keras.Model) -> list[keras.Variable]:
    """States that recurrent layers carry from batch to batch; Keras does not count them in."""
    # Also reaches layers inside layers, which `layers` does not.
    states = [getattr(layer, "states", None) or [] for layer in model._flatten_layers()]
    return [v for v in keras.tree.flatten(states) if isinstance(v, keras.Variable)]


def training_variables(model: keras.Model) -> Iterator[tuple[str, keras.Variable]]:
    """Every variable of the model, its optimizers and its metrics, by a name of its own.

    Names begin with "weights/", "state/", "optimizer/", "metrics/" or "carried/".
    """
    groups = {
        "weights": model.trainable_variables,
        "state": model.non_trainable_variables,
        "optimizer": [
            *getattr(model.optimizer, "variables", []),
            *(v for optimizer in optimizers(model) for v in optimizer.variables),
        ],
        "metrics": model.metrics_variables,
        "carried": carried_states(model),
    }
    seen = set()
    for group, variables in groups.items():
        for index, variable in enumerate(variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                yield f"{group}/{index}", variable


def _slots(optimizer: Any) -> list[tuple[keras.Variable, float]]:
    """The optimizer's per-weight state, with the value each starts from.

    Without what an optimizer marks `of_one_replica`: a sync neither averages nor resets that.
    """
    start = float(getattr(optimizer, "initial_accumulator_value", 0.0))
    # Nadam's product of its momenta so far: the only scalar that goes with the moments.
    product = getattr(optimizer, "_u_product", None)
    return [
        (v, 1.0 if v is product else start if v.path.endswith("accumulator") else 0.0)
        for v in optimizer.variables
        if v.value.dtype.is_floating
        and (v.value.shape.rank or v is product)
        and not v.path.endswith("gradient_accumulator")  # gradients under way are no momentum
        and not getattr(v, "of_one_replica", False)
    ]
