"""Replacement of Keras' functions, and Keras' private modules in which they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

# `fit` and `evaluate` read their data with the class `TFEpochIterator` of this module.
from keras.src.backend.tensorflow import trainer as trainer

# All public functions for saving call functions of `legacy_h5_format` and `saving_lib`. So a
# replacement in these two modules also acts if a script has already imported a public function by
# name.
from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format
from keras.src.saving import saving_lib as saving_lib
from keras.src.trainers import data_adapters as data_adapters
from keras.src.trainers.data_adapters import array_slicing as array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils
from keras.src.utils import file_utils as file_utils

from tfpara.keras_model import strategy_of
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended

# The type of a function of Keras, or of its replacement.
Method: TypeAlias = Callable[..., Any]
_replaced: set[tuple[int, str, Callable[[Any], Any]]] = set()


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by `make(owner.name)`; the same call again changes nothing."""
    if (id(owner), name, make) not in _replaced:
        _replaced.add((id(owner), name, make))
        setattr(owner, name, make(getattr(owner, name)))


def for_ours(replacement: Method) -> Callable[[Method], Method]:
    """Limits a replacement to models of a `PeriodicSyncStrategy`; others keep Keras' function.

    `replacement` is called as `replacement(original, strategy, model, …)`.
    """

    def make(original: Method) -> Method:
        @functools.wraps(original)
        def calling(model: keras.Model, *args: object, **kwargs: object) -> object:
            strategy = strategy_of_ours(model)
            if strategy is None:
                return original(model, *args, **kwargs)
            return replacement(original, strategy, model, *args, **kwargs)

        return calling

    return make


def strategy_of_ours(model: keras.Model) -> Any:
    """Returns the `PeriodicSyncStrategy` of a model; None if it has another strategy, or none."""
    strategy = strategy_of(model)
    return strategy if isinstance(strategy.extended, PeriodicSyncExtended) else None
