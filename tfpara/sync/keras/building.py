"""Building a model from its first batch, of which only the shapes are used."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from tfpara.sync.keras.data_passes import Epochs
from tfpara.sync.keras.logs import has_own
from tfpara.sync.keras.optimizer_steps import element_specs
from tfpara.sync.keras.replacing import Method, for_ours
from tfpara.typing import Nest


@for_ours
def looking(
    build: Method, strategy: Any, model: keras.Model, iterator: Any = None, data_batch: Nest = None
) -> object:
    """Builds a model from a first batch, without beginning a pass over Python data."""
    if isinstance(iterator, Epochs):
        data_batch = iterator.data_adapter.first_minibatch()
    elif iterator is not None:
        for _, _, batches in iterator:
            data_batch = strategy.experimental_local_results(next(batches))[0]
            break
    built = build(model, data_batch=data_batch)
    if iterator is not None:
        # Keras has no public attribute for the dataset over which `fit` iterates.
        element_specs[model] = iterator._distributed_dataset.element_spec
    return built


@for_ours
def of_a_row(
    build: Method,
    strategy: Any,
    model: keras.Model,
    iterator: object = None,
    data_batch: Nest = None,
    **kwargs: object,
) -> object:
    """Builds a model from a batch's shapes, with one row at least.

    A worker may have no row of a small first batch, and Keras divides by the number of rows. A
    model with a step of its own, such as a GAN, may not be callable. Keras would not call it here
    without a strategy, so an error of the call is ignored.
    """
    if data_batch is not None:
        data_batch = keras.tree.map_structure(_with_a_row, data_batch)
    own = has_own(model, ("train_step", "test_step"))
    # If a suppressed error matters to the model's own step, that step raises it again.
    with contextlib.suppress(*([Exception] if own else [])):
        return build(model, iterator=iterator, data_batch=data_batch, **kwargs)
    return None


def _with_a_row(leaf: Any) -> Any:
    if len(getattr(leaf, "shape", ())) and leaf.shape[0] == 0:
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor((1, *leaf.shape[1:]), dtype)
    return leaf
