"""Messages between a worker and a parameter server, in which small tensors travel together.

TensorFlow fetches each tensor from another process by a separate call. Small tensors that travel
as one vector need fewer calls.
"""

from __future__ import annotations

import tensorflow as tf

from tfpara.typing import Nest

_SMALL_BYTES = 1 << 18


def sent(values: Nest, source: str | None, target: str | None) -> Nest:
    """Returns a nest with its tensors on the device `target`.

    Tensors of up to 256 KB travel as one vector for each type: floating-point numbers as they are,
    whole numbers and booleans as int64. They arrive unchanged.

    Args:
        values: a nest of tensors, or None in place of some.
        source: the device of the tensors; None: the device that runs the graph.
        target: the device to which the tensors are sent; None: as for `source`.
    """
    flat = tf.nest.flatten(values)
    together: dict[tf.DType, list[int]] = {}
    for place, value in enumerate(flat):
        if value is None:
            continue
        kind = _kind(value)
        if kind is not None:
            together.setdefault(kind, []).append(place)
            continue
        with tf.device(target):
            flat[place] = tf.identity(value)
    for kind, places in together.items():
        with tf.device(source):
            parts = [tf.reshape(tf.cast(flat[k], kind), [-1]) for k in places]
            vector = tf.concat(parts, 0)
        with tf.device(target):
            parts = tf.split(vector, [part.shape[0] for part in parts])
            for place, part in zip(places, parts, strict=True):
                like = flat[place]
                flat[place] = tf.cast(tf.reshape(part, like.shape), like.dtype)
    return tf.nest.pack_sequence_as(values, flat)


def _kind(value: tf.Tensor) -> tf.DType | None:
    """Returns the type of the vector in which a tensor travels; None: the tensor travels alone."""
    size, dtype = value.shape.num_elements(), value.dtype
    if size is None or size * dtype.size > _SMALL_BYTES:
        return None
    if dtype.is_floating:
        return dtype
    return tf.int64 if dtype.is_integer or dtype.is_bool else None
