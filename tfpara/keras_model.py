"""The variables and optimizers of a Keras model, and the strategy to which it belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara.group import Group
from tfpara.typing import Json, Nest

# Optimizers whose step does not grow with the gradient. Some versions of Keras lack a few of them.
_NORMALISED = tuple(
    getattr(keras.optimizers, name)
    for name in (
        *("Adam", "Nadam", "Adamax", "RMSprop", "Adagrad", "Adadelta"),
        *("Adafactor", "Lion", "Lamb", "Muon", "ScheduleFreeAdamW"),
    )
    if hasattr(keras.optimizers, name)
)
_WITH_WORDS = (
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.TextVectorization,
)
_PLAIN = (bool, int, float, str, type(None))  # only settings of these types are compared


def strategy_of(model: keras.Model) -> tf.distribute.Strategy:
    """Returns the strategy of a model's weights, else the model's own, or else the current one."""
    # Keras also saves objects that are no models, so `model` may be an object without weights.
    weights = getattr(model, "weights", [])
    # They count first: a model may be made outside of a scope, from layers that were made in it.
    of_weights = (getattr(weight.value, "distribute_strategy", None) for weight in weights)
    own = getattr(model, "distribute_strategy", None)
    return next(filter(None, of_weights), None) or own or tf.distribute.get_strategy()


def build_optimizer(model: keras.Model) -> None:
    """Makes the compiled optimizer's slots now, instead of in its first step."""
    for one in _parts(model):
        optimizer = getattr(one, "optimizer", None)
        if optimizer is not None and not optimizer.built and one.trainable_variables:
            with strategy_of(one).scope():
                optimizer.build(one.trainable_variables)


def unbuilt_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers without slots among a model's attributes, by name."""
    return {name: one for name, one in _own_optimizers(model) if not one.built}


def check_optimizers_built(model: keras.Model) -> None:
    """Raises ValueError, with the code that makes them, if an optimizer of a model has no slots."""
    for name in unbuilt_optimizers(model):
        parts = [k for k, v in vars(model).items() if isinstance(v, keras.Model)]
        raise ValueError(
            f"the optimizer {name!r} of model {model.name!r} has no slots yet, so what is kept now "
            f"could not be put back. Before fit, in the scope, write model.{name}.build("
            "model.PART.trainable_variables), with the part that it trains "
            f"({', '.join(parts) or 'a layer'}); or remove it from the model if it trains none."
        )


def hyperparameters(model: keras.Model) -> dict[str, Json]:
    """Returns the settings of a model's optimizers, which must be equal on all workers.

    The keys are names for messages. Only settings with plain values are included. A learning rate
    is included only if it is a schedule: a number is only the present value, which may change.
    """
    found: dict[str, Json] = {}
    for number, optimizer in enumerate(optimizers(model)):
        label = f"optimizer {number + 1}" if number else "optimizer"
        found[label] = type(optimizer).__name__
        try:
            config = optimizer.get_config()
        except NotImplementedError:  # an optimizer that the user wrote may lack `get_config`
            continue
        # `_learning_rate` may be a schedule. The public property `learning_rate` would give only
        # the schedule's present value.
        schedule = isinstance(
            optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        )
        for key, value in config.items():
            plain = all(isinstance(leaf, _PLAIN) for leaf in keras.tree.flatten(value))
            if plain and key != "name" and (key != "learning_rate" or schedule):
                found[f"{label}'s {key}"] = value
    return found


def tables(model: keras.Model) -> dict[str, Json]:
    """Returns short texts on what layers have learned by `adapt` and keep outside of weights.

    These are the words of StringLookup, TextVectorization and the like, and the bins of
    Discretization. Layers are numbered within the model, since their names are not the same in each
    process.
    """
    found: dict[str, Json] = {}
    layers = [layer for part in _parts(model) for layer in part._flatten_layers()]
    for layer in layers:
        entries = getattr(layer, "bin_boundaries", None)
        if isinstance(layer, _WITH_WORDS):
            entries = layer.get_vocabulary()
        if entries is not None and len(entries):
            texts = [str(entry) for entry in entries]
            digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
            some = ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
            name = (
                f"table {len(found) + 1}, of {type(layer).__name__}, which adapt makes of its data"
            )
            found[name] = f"{some} ({len(texts)} entries, {digest})"
    return found


def rate_can_be_set(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the learning rate is a number, which can be set, and no schedule."""
    return isinstance(getattr(optimizer, "_learning_rate", None), keras.Variable)


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the innermost optimizers of a model: of the compiled one, and of its attributes."""
    inner = [getattr(o, "inner_optimizer", o) for o in _outer_optimizers(model)]
    # Keras' MultiOptimizer keeps the optimizers inside it in its attribute `_inner_optimizers`.
    inner = [one for o in inner for one in getattr(o, "_inner_optimizers", [o])]
    return list({id(o): o for o in inner}.values())


def _parts(model: keras.Model) -> list[keras.Model]:
    return [model, *(model.members if isinstance(model, Group) else [])]


def _own_optimizers(model: keras.Model) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    """Yields a model's optimizers, with names such as "a", "a[0]" or "a['b']".

    An optimizer may be an attribute, or in lists, tuples and dicts that are. Those of models that
    are attributes are left out: a pretrained part may have one that trains nothing here.
    """

    def within(name: str, value: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
        if isinstance(value, keras.optimizers.Optimizer):
            yield name, value
        elif isinstance(value, dict):
            for key, each in value.items():
                yield from within(f"{name}[{key!r}]", each)
        elif isinstance(value, list | tuple):
            for index, each in enumerate(value):
                yield from within(f"{name}[{index}]", each)

    for name, value in vars(model).items():
        # Attributes named `_self_…` are skipped, because TensorFlow lists trackable attributes
        # again in them. A group's list of optimizers is skipped, because `_outer_optimizers` adds
        # it after the optimizers of the group's members.
        of_group = isinstance(model, Group) and name == "optimizers"
        if not name.startswith("_self_") and not of_group:
            yield from within(name, value)


def _outer_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    found = []
    for one in _parts(model):
        found += [getattr(one, "optimizer", None), *(each for _, each in _own_optimizers(one))]
    found += model.optimizers if isinstance(model, Group) else []
    return [o for o in found if isinstance(o, keras.optimizers.Optimizer)]


def check_optimizers_known(
    model: keras.Model, used: Sequence[keras.optimizers.Optimizer], why: str
) -> None:
    """Raises ValueError unless the optimizers `used` in a step are among those of its model."""
    known = {id(optimizer) for optimizer in (*_outer_optimizers(model), *optimizers(model))}
    unknown = [optimizer.name for optimizer in used if id(optimizer) not in known]
    if unknown:
        raise ValueError(
            f"{why} has to know the optimizers, and {unknown[0]!r} is not known. Write "
            "strategy.track(model, optimizers=[...]) with all of a loop; for fit, make each an "
            "attribute of the model."
        )


def carried_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the states that recurrent layers carry, which are no variables of the model."""
    # `_flatten_layers` also yields layers inside other layers, which `model.layers` lacks.
    states = [getattr(layer, "states", None) or [] for layer in model._flatten_layers()]
    return [v for v in keras.tree.flatten(states) if isinstance(v, keras.Variable)]


def lookups(model: keras.Model) -> list[keras.layers.Embedding]:
    """Returns the Embedding layers, nested anywhere, whose call only takes rows of a table."""
    embedding = keras.layers.Embedding
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, embedding)]
    layers = [layer for layer in layers if layer.built and "call" not in vars(layer)]
    # Subclasses with another `call` may do more, such as serve as the output layer, too.
    return [layer for layer in layers if type(layer).call is embedding.call]


def parts_not_trained(
    model: keras.Model,
) -> tuple[list[keras.Variable], ...]:
    """Returns frozen weights, moving statistics, integers and seeds, but no carried states."""
    carried = {id(v) for v in carried_states(model)}
    frozen = [v for v in model.non_trainable_variables if v.value.trainable]
    others = [v for v in model.non_trainable_variables if not v.value.trainable]
    others = [v for v in others if id(v) not in carried]
    statistics = [v for v in others if v.value.dtype.is_floating]
    rest = [v for v in others if not v.value.dtype.is_floating]
    # The integers are, for example, the kernels of quantized layers.
    integers = [v for v in rest if not is_seed(v.path)]
    return frozen, statistics, integers, [v for v in rest if is_seed(v.path)]


def constrained(
    weights: Sequence[tf.Tensor], constraints: Sequence[Callable[[Any], Any] | None]
) -> list[tf.Tensor]:
    """Returns whole weights, of their variables' dtypes, with their Keras constraints applied."""
    return [
        weight if constraint is None else tf.convert_to_tensor(constraint(weight))
        for weight, constraint in zip(weights, constraints, strict=True)
    ]


def flat_log(log: Mapping[str, Nest]) -> dict[str, Nest]:
    """Returns a log with the entries of dicts, which a metric may return, as entries of its own."""
    flat: dict[str, Nest] = {}
    for name, value in log.items():
        flat |= flat_log(value) if isinstance(value, Mapping) else {name: value}
    return flat


def array_of(value: Nest) -> np.ndarray[Any, Any]:
    """Returns a value of a log as an array; of bfloat16 as float32, since a scalar makes none."""
    bfloat16 = tf.is_tensor(value) and value.dtype == tf.bfloat16
    return np.asarray(tf.cast(value, tf.float32) if bfloat16 else value)


def is_seed(name: str) -> bool:
    """Returns whether a variable with this name or path is the state of a `SeedGenerator`."""
    return "seed_generator_state" in name


def product_left_out(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns Nadam's product of its momenta if it is missing in `optimizer.variables`, else []."""
    # Keras leaves it out inside a LossScaleOptimizer, as `compile` makes under mixed_float16.
    product = getattr(optimizer, "_u_product", None)
    left_out = product is not None and all(v is not product for v in optimizer.variables)
    return [product] if left_out else []


def training_variables(model: keras.Model) -> Iterator[tuple[str, keras.Variable]]:
    """Yields every variable of the model, its optimizers and its metrics, with a unique name.

    Names begin with "weights/", "state/", "optimizer/", "product/", "metrics/" or "carried/".
    """
    groups = {
        "weights": model.trainable_variables,
        "state": model.non_trainable_variables,
        "optimizer": [
            *getattr(getattr(model, "optimizer", None), "variables", []),
            *(v for optimizer in optimizers(model) for v in optimizer.variables),
        ],
        "product": [v for optimizer in optimizers(model) for v in product_left_out(optimizer)],
        "metrics": model.metrics_variables,
        "carried": carried_states(model),
    }
    seen = set()
    for group, variables in groups.items():
        for index, variable in enumerate(variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                yield f"{group}/{index}", variable


def inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside a LossScaleOptimizer; any other optimizer as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def memory_of(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns SGD's momentum or Adam's β₁, the larger of Muon's two; 0 without one in [0, 1)."""
    own = inner(optimizer)
    given = [getattr(own, name, 0.0) for name in ("momentum", "beta_1", "adam_beta_1")]
    memories = [g for g in given if isinstance(g, int | float) and 0.0 <= g < 1.0]
    return float(max(memories, default=0.0))


def minibatches_of_a_step(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns the number of minibatches whose gradients an optimizer adds up for a step."""
    return optimizer.gradient_accumulation_steps or 1


def told_of_fit(
    optimizer: keras.optimizers.Optimizer, steps: float, fitted: float, factor: float
) -> str:
    """Returns a note that the local momentum was changed to fit the blocks; "" if it was not.

    In blocks of so many `steps` the optimizer has the momentum, or β₁, `fitted`; its learning rate
    is multiplied by `factor`.
    """
    momentum = memory_of(optimizer)
    if fitted == momentum and factor == 1.0:
        return ""
    name = "momentum" if hasattr(inner(optimizer), "momentum") else "beta_1"
    text = (
        "the rule has a momentum of its own. That of local "
        f"{type(inner(optimizer)).__name__} would reach from a block of {steps:g} steps "
        f"into the next, and count twice. So {name} is {fitted:.2g} in place of {momentum:g}"
    )
    if momentum_of(optimizer) and factor != 1.0:
        text += f", and each step {factor:.3g} times as large, which makes up for it"
    return f"{text}. The learning rate that you set need not change"


def momentum_of(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the momentum of SGD and its kin in [0, 1); 0 for others, or if it is no number."""
    return memory_of(optimizer) if isinstance(inner(optimizer), keras.optimizers.SGD) else 0.0


def memory_can_change(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer reads the value of `memory_of` anew in each step."""
    kinds = [keras.optimizers.SGD, keras.optimizers.Adam, getattr(keras.optimizers, "Muon", None)]
    steps = [kind.update_step for kind in kinds if kind]
    return memory_of(optimizer) > 0.0 and type(inner(optimizer)).update_step in steps


def is_normalised(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer's step does not grow with the gradient."""
    return isinstance(inner(optimizer), _NORMALISED)
