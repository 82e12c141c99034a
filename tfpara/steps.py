"""A replica's step: its data, its number of samples, and skipping a step without samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpara.typing import Array, Nest


def skip_empty(fn: Callable[..., Nest]) -> Callable[..., Nest]:
    """Wraps `fn` so that it returns zeros if a replica's batch has no samples.

    If `fn` has not run before, it is traced, but not run, to find the shapes of its results.
    """

    # In eager mode the replicas run one after the other. This list has the results of the replicas
    # that have run so far. A replica without samples returns zeros of the same shapes.
    stepped: list[Nest] = []

    def guarded(*args: Nest, **kwargs: Nest) -> Nest:
        count = batch_size((args, kwargs))
        if tf.executing_eagerly():
            if count is None or int(count):
                stepped.append(fn(*args, **kwargs))
                return stepped[-1]
            if not stepped:
                return tf.function(skip_empty(getattr(fn, "python_function", fn)))(*args, **kwargs)
            like = tf.nest.map_structure(_tensor_or_none, stepped[0])
            return tf.nest.map_structure(_zeros_like_or_none, like)
        if count is None or (isinstance(count, int) and count):
            with after((args, kwargs)):
                return fn(*args, **kwargs)
        if isinstance(count, int):
            count = tf.constant(count)
            args, kwargs = tf.nest.map_structure(_open_if_empty, (args, kwargs))
        outputs = []  # without a type annotation, because AutoGraph could not convert one

        def step() -> Nest:
            outputs.append(tf.nest.map_structure(_tensor_or_none, fn(*args, **kwargs)))
            return outputs[0]

        def skip() -> Nest:
            return tf.nest.map_structure(_zeros_like_or_none, outputs[0])

        return tf.cond(count > 0, step, skip)

    return guarded


def _tensor_or_none(value: Array | float | None) -> tf.Tensor | None:
    return None if value is None else tf.convert_to_tensor(value)


def _zeros_like_or_none(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.zeros([d or 0 for d in tensor.shape], tensor.dtype)


def _of_open_batch(tensor: Nest) -> Nest:
    """Returns a tensor whose first axis has no static length; anything else as it is."""
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def _open_if_empty(leaf: Nest) -> Nest:
    empty = isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] == 0
    return _of_open_batch(leaf) if empty else leaf


def after(structure: Nest) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose operations run only once the tensors of `structure` are computed."""
    # Otherwise a step may count itself, and its optimizer may decay the weights, before the data
    # turn out to be at their end.
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(t)]
    return tf.control_dependencies(tensors)


def mapped(function: Callable[[Any], Any], structure: Nest) -> Nest:
    """Applies a function to the leaves of a structure, except to None, an input left out."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def batch_size(structure: Nest) -> int | tf.Tensor | None:
    """Returns the samples in a replica's batch: length of the first axis of the first tensor.

    Tensors without axes do not count. Returns None if there are no others.
    """
    for leaf in tf.nest.flatten(structure):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0:
            static = leaf.shape[0] if leaf.shape.rank is not None else None
            return static if static is not None else tf.shape(leaf)[0]
    return None


def reductions(loss: Any) -> set[str]:
    """Returns the reductions of a compiled loss's parts; outputs without a loss do not count."""
    parts = [one for one in keras.tree.flatten(loss) if one is not None]
    return {getattr(one, "reduction", "sum_over_batch_size") for one in parts}


def weight_of(minibatch: Nest, samples: int | tf.Tensor, loss: Any) -> int | tf.Tensor:
    """Returns the weight of a minibatch in the mean of the replicas: the divisor of its loss.

    With these weights every frame counts the same in the model, whichever replica has it: model
    averaging with plain SGD after every minibatch is one step on all replicas' minibatches
    together. The divisor depends on Keras' reduction. With "mean_with_sample_weight" it is the sum
    of the sample weights; with "sum_over_batch_size" or "mean" their number, padding included; with
    "sum" it is 1, or 0 without samples. If several outputs have sample weights of their own, their
    losses have different divisors, and no single number is exact: then the sum of all is returned.
    Without sample weights the result is `samples`, unless the reduction is "sum".
    """
    reduced = reductions(loss)
    if reduced == {"sum"}:
        return tf.cast(tf.convert_to_tensor(samples) > 0, tf.int32)
    weights = minibatch[2] if isinstance(minibatch, tuple) and len(minibatch) == 3 else None
    # In a step that the user has written, the third part of a minibatch may be something else than
    # sample weights. Ragged and sparse tensors cannot be sample weights, so they are ignored.
    no_weights = (type(None), tf.RaggedTensor, tf.SparseTensor)
    leaves = tf.nest.flatten(weights)
    weights = [tf.convert_to_tensor(leaf) for leaf in leaves if not isinstance(leaf, no_weights)]
    if not weights:
        return samples
    if reduced == {"mean_with_sample_weight"}:
        return tf.add_n([tf.reduce_sum(tf.cast(w, tf.float64)) for w in weights])
    return sum(tf.size(w) for w in weights)


def with_open_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` with a batch size that its spec leaves open.

    If all shapes are fixed and the last minibatches are fewer than the devices, TensorFlow leaves
    these minibatches out. With an open batch size it gives the other devices an empty minibatch.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in specs):
        return dataset
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset
    # `map` gives the parts of a plain tuple as separate arguments, but a NamedTuple as a whole.
    unpacked = type(dataset.element_spec) is tuple
    return dataset.map(
        lambda *element: tf.nest.map_structure(_of_open_batch, element if unpacked else element[0])
    )


def with_own_memory(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` with elements that are copies.

    Data of a Python function (`from_generator`, `PyDataset`) may lie in the memory of the caller's
    arrays. If a batch is divided between replicas, TensorFlow may write results into that memory.
    """

    def copied(tensor: tf.Tensor) -> tf.Tensor:
        opaque = tensor.dtype in (tf.variant, tf.resource) or tensor.dtype.is_quantized
        return tensor if opaque else tf.raw_ops.DeepCopy(x=tensor)

    @tf.autograph.experimental.do_not_convert
    def copy(*element: Nest) -> Nest:
        leaves = tf.nest.flatten(element, expand_composites=True)
        tensors = [copied(leaf) for leaf in leaves if leaf is not None]
        return tf.nest.pack_sequence_as(dataset.element_spec, tensors, expand_composites=True)

    return dataset.map(copy)


def without_tuner(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` with tf.data's autotuning off, unless its options set autotuning.

    The tuner's thread sleeps for longer and longer, and the iterator of several devices cannot wake
    it. The end of an epoch, and so the other workers, would wait for up to a minute.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
