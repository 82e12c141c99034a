"""A replica's step: its data, how many samples it has, and not taking it where it has none."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf


def skip_empty(fn: Any) -> Any:
    """`fn`, but not run where the replica's batch has no samples; its results are then zeros."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        count = batch_size((args, kwargs))
        if count is None or isinstance(count, int):
            with after((args, kwargs)):
                return fn(*args, **kwargs)
        if tf.executing_eagerly():
            return fn(*args, **kwargs) if int(count) else None
        outputs = []  # AutoGraph, which converts this with a user's step, knows no annotation.

        def step() -> Any:
            outputs.append(tf.nest.map_structure(_tensor_or_none, fn(*args, **kwargs)))
            return outputs[0]

        def skip() -> Any:
            return tf.nest.map_structure(_zeros_like_or_none, outputs[0])

        return tf.cond(count > 0, step, skip)

    return guarded


def _tensor_or_none(value: Any) -> tf.Tensor | None:
    return None if value is None else tf.convert_to_tensor(value)


def _zeros_like_or_none(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.zeros([d or 0 for d in tensor.shape], tensor.dtype)


def after(structure: Any) -> contextlib.AbstractContextManager:
    """Operations made inside run once the tensors of `structure` are there.

    Without it a step whose data turn out to be at their end would already have counted itself, and
    let an optimizer with weight decay write.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(t)]
    return tf.control_dependencies(tensors)


def batch_size(structure: Any) -> int | tf.Tensor | None:
    """Samples in a replica's batch: length of the first tensor's first axis; None without one."""
    for leaf in tf.nest.flatten(structure):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0:
            static = leaf.shape[0] if leaf.shape.rank is not None else None
            return static if static is not None else tf.shape(leaf)[0]
    return None


def without_tuner(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` without tf.data's tuner, unless its options ask for it.

    The iterator of several devices cannot wake the tuner's thread, which sleeps for longer and
    longer: the end of an epoch would wait for it, for up to a minute, and other workers with it.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
