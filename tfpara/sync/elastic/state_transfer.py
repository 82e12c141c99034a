"""Sends a worker's state to workers that are behind, or new, over the collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpara.collectives import TensorFlowCollectives
from tfpara.sync.one_sync.replicas import BUCKET_BYTES
from tfpara.sync.one_sync.state_vars import Slot


def hand_over(
    slots: Sequence[Slot], collectives: TensorFlowCollectives, source: int, receives: bool
) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Sends the values of slots; all workers call it, with the same slots in the same order.

    Nothing is written here: where the source is lost in between, no worker has a part of its state.

    Args:
        slots: what travels, in packs of up to `BUCKET_BYTES`.
        collectives: between the workers' hosts; Horovod's groups cannot change.
        source: rank of the worker that sends.
        receives: whether this worker takes the values over.

    Returns:
        The slots' variables with the values that they are to have; none if it does not.
    """
    received: list[tuple[tf.Variable, tf.Tensor]] = []
    for number, pack in enumerate(_packed(slots)):
        values = [slot.variable.read_value() for slot in pack]
        sizes = [value.shape.num_elements() for value in values]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
        got = tf.split(collectives.broadcast(flat, f"hand over/{number}", source), sizes)
        for slot, value in zip(pack, got if receives else (), strict=receives):
            received.append((slot.variable, tf.reshape(value, slot.variable.shape)))
    return received


def hand_over_arrays(
    arrays: Sequence[np.ndarray], collectives: TensorFlowCollectives, source: int
) -> list[np.ndarray]:
    """Returns the arrays of the worker with rank `source`; all call it, with arrays as large."""
    return [
        collectives.broadcast(tf.convert_to_tensor(array), f"hand over/array {n}", source).numpy()
        for n, array in enumerate(arrays)
    ]


def hand_over_text(text: str, collectives: TensorFlowCollectives, source: int) -> str:
    """Returns the text of the worker with rank `source`; all call it."""
    told = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    (size,) = hand_over_arrays([np.array([len(told)])], collectives, source)
    # Padded to a power of 2, since TensorFlow keeps some memory for every shape that was sent.
    padded = np.zeros(1 << int(size[0]).bit_length(), np.int32)
    padded[: len(told)] = told[: len(padded)]
    (got,) = hand_over_arrays([padded], collectives, source)
    return bytes(got[: size[0]].astype(np.uint8)).decode()


def _packed(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Slots of one type together, as many as fit into a bucket; larger ones alone."""
    packs: list[list[Slot]] = []
    for dtype in dict.fromkeys(slot.variable.dtype for slot in slots):
        size = BUCKET_BYTES
        for slot in slots:
            if slot.variable.dtype != dtype:
                continue
            number = slot.variable.shape.num_elements() * dtype.size
            if size + number > BUCKET_BYTES:
                packs.append([])
                size = 0
            packs[-1].append(slot)
            size += number
    return packs
