"""The choice among candidate learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence


def candidate_rates(rate: float, factors: Sequence[float]) -> list[float]:
    """Returns the candidates factor · rate in ascending order, each once.

    Args:
        rate: the present rate.
        factors: the factors.

    Raises:
        ValueError: there is no factor, or a candidate is not positive and finite.
    """
    if not factors:
        raise ValueError("factors is empty: there is no candidate rate. Give at least one.")
    rates = sorted({rate * factor for factor in factors})
    if not 0.0 < rates[0] <= rates[-1] < math.inf:
        raise ValueError(
            f"factors={list(factors)!r} of the learning rate {rate!r}: candidates must be positive."
        )
    return rates


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Deprecated, goes with version 0.4: returns the rate with the smallest finite loss.

    Of equal losses it takes the lowest rate.

    Args:
        rates: the rates that were tried.
        losses: the loss of each rate.

    Raises:
        ValueError: no loss is finite.
    """
    warnings.warn(
        "tfpara.schedules.best_rate is deprecated and goes with version 0.4: use "
        "min(zip(losses, rates))[1], without losses that are not finite.",
        FutureWarning,
        stacklevel=2,
    )
    finite = [(loss, rate) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if not finite:
        raise ValueError(
            f"every candidate rate diverged: {', '.join(f'{rate:g}' for rate in rates)}. Give "
            "lower ones."
        )
    return min(finite)[1]
