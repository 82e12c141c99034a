"""Texts and tensors that all workers tell each other."""

from __future__ import annotations

import json

import numpy as np
import tensorflow as tf

from tfpara.cluster.place import Purpose
from tfpara.sync.control import Control
from tfpara.typing import Json

# What the collectives carry, and in what they carry other dtypes without loss.
_CARRIED = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_CARRIED_AS = {tf.bfloat16: tf.float32} | dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


def everyones(value: Json, control: Control, purpose: Purpose) -> list[Json]:
    """What each worker has, by rank.

    Args:
        value: anything that JSON can carry; what it cannot is sent as its `repr`.
        control: between the workers; every worker must call this for the same purpose.
        purpose: of the exchange.
    """
    text = json.dumps(value, default=repr, sort_keys=True).encode()
    lengths = control.together(purpose, len(text))
    # Of few lengths, for TensorFlow keeps something for every shape that was sent.
    padded = np.zeros(1 << max(lengths).bit_length(), np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    table = control.collectives.all_gather(tf.constant(padded), "text").numpy()
    return [
        json.loads(bytes(row[:length].astype(np.uint8)))
        for row, length in zip(table, lengths, strict=True)
    ]


def joined(tensor: tf.Tensor, axis: int, control: Control, purpose: Purpose) -> tf.Tensor:
    """The workers' tensors, one after the other along an axis, by rank.

    Args:
        tensor: this worker's; of all but its size along `axis` the same on each worker.
        axis: along which they are joined.
        control: between the workers; every worker must call this for the same purpose.
        purpose: of the exchange.

    Raises:
        ValueError: on every worker, if they cannot be joined or sent.
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
    missing = max(lengths) - sizes[axis]
    padding = [[0, missing if k == axis else 0] for k in range(len(sizes))]
    rows = control.collectives.all_gather(tf.pad(tf.cast(tensor, dtype), padding), "rows")
    parts = [
        tf.gather(row, tf.range(length), axis=axis)
        for row, length in zip(tf.unstack(rows), lengths, strict=True)
    ]
    return tf.cast(tf.concat(parts, axis), tensor.dtype)
