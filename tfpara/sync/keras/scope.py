"""The check that the model which `fit` trains was made in the strategy's scope.

A weight of a model made outside of the scope is one plain variable, without a copy for each
replica. Keras trains such a model in this process alone, and a metric made outside counts there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfpara.typing import Variable

_LINES = (
    "Write\n    with strategy.scope():\n"
    "        model = …  # build it here, or call keras.models.load_model(…)\n"
    "        # Call adapt(…) of its layers here, too.\n"
    "        model.compile(…)"
)
_strategies: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def watch(strategy: tf.distribute.Strategy) -> None:
    """Registers a strategy, which must have the property `has_trained`, for `look`."""
    _strategies.add(strategy)


def look(model: keras.Model) -> None:
    """Raises ValueError for a model made partly in a scope; warns, once, of one made outside.

    There is no warning if another model was trained under a strategy.
    """
    if model.distribute_strategy in _strategies:
        check(model, model.distribute_strategy)
        return
    for strategy in _strategies:
        if any(_is_of(v, strategy) for _, variables in _parts(model) for v in variables):
            raise ValueError(
                f"model {model.name!r} was made outside of the strategy's scope, and compiled "
                f"inside: no weight would be synchronised. {_LINES}"
            )
    if model not in _warned and not any(strategy.has_trained for strategy in _strategies):
        _warned.add(model)
        warnings.warn(
            f"model {model.name!r} was made outside of the strategy's scope: each worker trains it "
            f"alone, and nothing is synchronised. {_LINES}",
            stacklevel=3,
        )


def check(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError if a weight, the optimizer or a metric was made outside of the scope.

    The metrics given to `compile` are known only after the first step was traced.
    """
    for what, variables in _parts(model):
        if not all(_is_of(variable, strategy) for variable in variables):
            raise ValueError(
                f"model {model.name!r}: {what} was made outside of the strategy's scope. {_LINES}"
            )


def _parts(model: keras.Model) -> Iterator[tuple[str, list[Variable]]]:
    """Yields the parts of a model that `fit` writes: a name for messages, and the variables."""
    for weight in model.weights:
        yield f"its weight {weight.path!r}", [weight]
    optimizer = getattr(model, "optimizer", None)
    yield "its optimizer (or all of compile)", getattr(optimizer, "variables", [])
    for variable in (v for metric in model.metrics for v in metric.variables):
        yield f"the metric {variable.path.split('/')[0]!r}", [variable]


def _is_of(variable: Variable, strategy: tf.distribute.Strategy) -> bool:
    value = getattr(variable, "value", variable)
    return strategy.extended.variable_created_in_scope(value)
