"""Exchanges of JSON values and tensors between all workers."""

from __future__ import annotations

import json

import numpy as np
import tensorflow as tf

from tfpara.cluster.call_site import Purpose
from tfpara.sync.workers.meetings import Control
from tfpara.typing import Json

# The dtypes that the collectives send. Tensors of the dtypes in `_CARRIED_AS` are converted to one
# of these dtypes without loss.
_CARRIED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_CARRIED_AS = {tf.bfloat16: tf.float32} | dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


def everyones(value: Json, control: Control, purpose: Purpose) -> list[Json]:
    """Returns every worker's JSON value, by rank. All workers must call it for the same purpose."""
    return control.whole(lambda: _everyones(value, control, purpose))


def _everyones(value: Json, control: Control, purpose: Purpose) -> list[Json]:
    text = json.dumps(value, default=repr, sort_keys=True).encode()
    lengths = control.together(purpose, len(text))
    # TensorFlow keeps memory for every shape that it has sent. So the text is padded to a power of
    # 2, and there are only few different shapes.
    padded = np.zeros(1 << max(lengths).bit_length(), np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    table = control.collectives.all_gather(tf.constant(padded), "text").numpy()
    return [
        json.loads(bytes(row[:length].astype(np.uint8)))
        for row, length in zip(table, lengths, strict=True)
    ]


def joined(tensor: tf.Tensor, axis: int, control: Control, purpose: Purpose) -> tf.Tensor:
    """Concatenates the workers' tensors along an axis, by rank.

    Every worker must call this for one purpose, with one dtype and, except along `axis`, one shape.

    Raises:
        ValueError: on every worker, if the tensors cannot be joined or sent.
    """
    axis = int(axis) % max(1, len(tensor.shape))
    sizes = list(tensor.shape)
    others = [size for k, size in enumerate(sizes) if k != axis]
    facts = everyones([tensor.dtype.name, others, sizes[axis]], control, purpose)
    if any(fact[:2] != facts[0][:2] for fact in facts):
        told = "; ".join(f"worker {r}: {d} {o}" for r, (d, o, _) in enumerate(facts))
        raise ValueError(f"tensors that differ beside axis {axis} cannot be gathered: {told}.")
    dtype = _CARRIED_AS.get(tensor.dtype, tensor.dtype)
    if dtype not in _CARRIED:
        raise ValueError(f"{dtype.name} cannot be gathered. Send numbers.")
    lengths = [length for _, _, length in facts]
    if 0 in others or not any(lengths):
        # There is nothing to send, and TensorFlow crashes where it gathers empty tensors.
        return tf.zeros([*sizes[:axis], sum(lengths), *sizes[axis + 1 :]], tensor.dtype)
    missing = max(lengths) - sizes[axis]
    padding = [[0, missing if k == axis else 0] for k in range(len(sizes))]
    rows = control.collectives.all_gather(tf.pad(tf.cast(tensor, dtype), padding), "rows")
    parts = [
        tf.gather(row, tf.range(length), axis=axis)
        for row, length in zip(tf.unstack(rows), lengths, strict=True)
    ]
    return tf.cast(tf.concat(parts, axis), tensor.dtype)
