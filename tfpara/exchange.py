"""Texts that all workers tell each other."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.collectives import Collectives


def everyones(value: Any, collectives: Collectives, name: str) -> list[Any]:
    """What each worker has, by rank.

    Args:
        value: anything that JSON can carry; what it cannot is sent as its `repr`.
        collectives: between the workers; every worker must call this with the same `name`.
        name: of the exchange.
    """
    text = json.dumps(value, default=repr, sort_keys=True).encode()
    lengths = collectives.all_gather(tf.constant([len(text)]), f"{name}/length").numpy()[:, 0]
    padded = np.zeros(int(lengths.max()), np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    table = collectives.all_gather(tf.constant(padded), f"{name}/text").numpy()
    return [
        json.loads(bytes(row[:length].astype(np.uint8)))
        for row, length in zip(table, lengths, strict=True)
    ]
