"""What all workers must agree on before they train together."""

from __future__ import annotations

from collections.abc import Mapping

from tfpara.collectives import Collectives
from tfpara.exchange import everyones


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
    everyone = everyones(settings, collectives, name)
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
