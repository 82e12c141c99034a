"""What all workers must agree on before they train together."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfpara.collectives import Collectives


class FingerprintError(ValueError):
    """Workers were started with different settings."""


def agree(settings: Mapping[str, object], collectives: Collectives, name: str) -> None:
    """Compares settings between workers.

    Args:
        settings: what has to be equal everywhere, by a key that the message can name. Values are
            compared by their JSON text.
        collectives: between the workers; every worker must call this with the same `name`.
        name: of the exchange.

    Raises:
        FingerprintError: on every worker, naming the keys that differ, and who has which value.
    """
    text = json.dumps(settings, default=repr, sort_keys=True).encode()
    lengths = collectives.all_gather(tf.constant([len(text)]), f"{name}/length").numpy()[:, 0]
    padded = np.zeros(int(lengths.max()), np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    table = collectives.all_gather(tf.constant(padded), f"{name}/text").numpy()
    everyone = [
        json.loads(bytes(row[:length].astype(np.uint8)))
        for row, length in zip(table, lengths, strict=True)
    ]
    differing = [
        f"{key}: " + ", ".join(f"worker {i} has {who.get(key)!r}" for i, who in enumerate(everyone))
        for key in sorted(set().union(*everyone))
        if any(who.get(key) != everyone[0].get(key) for who in everyone)
    ]
    if differing:
        raise FingerprintError(
            "the workers were started with different settings; start all of them with the same. "
            + "; ".join(differing)
        )
