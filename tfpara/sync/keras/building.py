"""Building a model from its first batch, of which only the shapes are used."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras

from tfpara.sync.keras.data_passes import Epochs
from tfpara.sync.keras.logs import has_own
from tfpara.sync.keras.optimizer_steps import element_specs
from tfpara.sync.keras.replacing import Method, strategy_of_ours
from tfpara.typing import Nest


def without_reading(build: Method) -> Method:
    """Replaces Keras' look at a first batch: it begins no pass over Python data."""

    @functools.wraps(build)
    def building(model: keras.Model, iterator: object = None, data_batch: Nest = None) -> object:
        if isinstance(iterator, Epochs):
            return build(model, data_batch=iterator.data_adapter.first_minibatch())
        return build(model, iterator=iterator, data_batch=data_batch)

    return building


def looking(build: Method) -> Method:
    """Replaces the method that builds a model from a first batch: it sees the shapes alone."""

    @functools.wraps(build)
    def building(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = strategy_of_ours(model)
        if strategy is None:
            return build(model, *args, **kwargs)
        with strategy.extended.looking():
            built = build(model, *args, **kwargs)
        iterator: Any = (*args, kwargs.get("iterator"))[0]
        if iterator is not None:
            # The dataset over which `fit` iterates has no public name.
            element_specs[model] = iterator._distributed_dataset.element_spec
        return built

    return building


def of_a_row(build: Method) -> Method:
    """Replaces Keras' building of a model from a batch's shapes: the batch has a row at least.

    Of a small first batch a worker may have no row, and Keras divides by their number. A model with
    steps of its own may not be callable, as a GAN is not. Without a strategy Keras does not try.
    """

    def with_a_row(leaf: Any) -> Any:
        if len(getattr(leaf, "shape", ())) and leaf.shape[0] == 0:
            dtype = keras.backend.standardize_dtype(leaf.dtype)
            return keras.KerasTensor((1, *leaf.shape[1:]), dtype)
        return leaf

    @functools.wraps(build)
    def building(
        model: keras.Model, iterator: object = None, data_batch: Nest = None, **kwargs: object
    ) -> object:
        if strategy_of_ours(model) is None:
            return build(model, iterator=iterator, data_batch=data_batch, **kwargs)
        if data_batch is not None:
            data_batch = keras.tree.map_structure(with_a_row, data_batch)
        own = has_own(model, ("train_step", "test_step"))
        # What is wrong with a model comes up again in its step.
        with contextlib.suppress(*([Exception] if own else [])):
            return build(model, iterator=iterator, data_batch=data_batch, **kwargs)
        return None

    return building
