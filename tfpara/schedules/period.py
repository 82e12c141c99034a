"""Sync periods that follow the learning rate or the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from tfpara.whole_number import LARGEST_COUNT, checked_whole


@dataclasses.dataclass(frozen=True)
class Quadratic:
    """Sync periods that grow as the learning rate falls: the quadratic synchronisation rule.

        τ(p) = max(τ₀, ⌊(α / rate(p))²⌋)

    p is the position in epochs. Short periods early in training keep the replicas together. Long
    periods late, when the rate is small, need less communication and find solutions that generalise
    better. An epoch also ends with a sync. So with a period longer than an epoch, each epoch has
    one sync.

    Args:
        rate: position in epochs → learning rate, such as `Exponential` or a cosine; the same
            schedule as that of `tfpara.callbacks.LearningRate`.
        alpha: α > 0. With α = √τ₀ · (the highest rate) periods begin to grow at once. With a
            smaller α they do so when the rate has fallen to α / √τ₀.
        first: τ₀ ≥ 1, minibatches.

    Raises:
        TypeError: `rate` is not a function.
        ValueError: a value outside its range; or, from a call, a rate that is not positive.

    Source: Gu et al., "A quadratic synchronization rule for distributed deep learning" (ICLR 2024).

    Example:
        >>> period = Quadratic(lambda position: 0.1 / (1 + position), alpha=0.2, first=5)
        >>> [period(epoch) for epoch in range(4)]
        [5, 16, 36, 64]
    """

    rate: Callable[[float], float]
    alpha: float
    first: int

    def __post_init__(self) -> None:
        if not callable(self.rate):
            raise TypeError(
                f"rate={self.rate!r} must be a function of the position in epochs, such as "
                "schedules.Exponential(0.1, epochs=15)."
            )
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(
                f"alpha={self.alpha!r} must be a positive number; sqrt(first) times the highest "
                "learning rate is where periods begin to grow."
            )
        object.__setattr__(self, "first", checked_whole("first", self.first, of="minibatches"))

    def __call__(self, position: float) -> int:
        """Returns the sync period, in minibatches, at a position."""
        rate = self.rate(position)
        if not 0.0 < rate < math.inf:
            raise ValueError(
                f"the learning rate at epoch {position:g} is {rate!r}, and the period (alpha / "
                "rate)^2 needs a positive one. Let the schedule end above 0."
            )
        ratio = min(self.alpha / rate, math.sqrt(LARGEST_COUNT))
        return max(self.first, min(math.floor(ratio**2 * (1.0 + 1e-12)), LARGEST_COUNT))


class AdaCommState(NamedTuple):
    """State of AdaComm.

    Attributes:
        period: sync period in minibatches.
        first_loss: F₀, the loss of the first epoch; None before that epoch has ended.
    """

    period: int
    first_loss: float | None = None


@dataclasses.dataclass(frozen=True)
class AdaComm:
    """Sync periods that fall with the training loss: syncs are rare at first, and frequent later.

        τ ← ⌈√(F / F₀) τ₀⌉, or ⌈τ / 2⌉ if the former is not below the last τ

    This happens after each epoch. F is the mean training loss of the epoch, and F₀ that of the
    first epoch. In the end the period falls to 1 minibatch.

    Args:
        first: τ₀ ≥ 1, minibatches, the period of the first two epochs.

    Raises:
        ValueError: `first` is not a whole number of at least 1.

    Source: Wang & Joshi, "Adaptive communication strategies to achieve the best error-runtime
    trade-off in local-update SGD" (MLSys 2019), with an epoch as the interval.

    Example:
        >>> rule = AdaComm(20)
        >>> state = rule.update(rule.init(), loss=2.0)
        >>> state = rule.update(state, loss=0.5)  # 10 = √(0.5 / 2.0) · 20
        >>> state.period
        10
        >>> rule.update(state, loss=0.5).period  # With the same loss, the period is halved.
        5
    """

    first: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", checked_whole("first", self.first, of="minibatches"))

    def init(self) -> AdaCommState:
        """Returns the state before the first epoch."""
        return AdaCommState(self.first)

    def update(self, state: AdaCommState, loss: float) -> AdaCommState:
        """Returns the state after an epoch with this mean training loss.

        Raises:
            ValueError: the loss is not a finite number above 0.
        """
        if not 0.0 < loss < math.inf:
            raise ValueError(
                f"loss={loss!r}: AdaComm takes the square root of its ratio to the first one, so "
                "it must be a positive number. Use a loss that stays above 0, or fixed periods."
            )
        if state.first_loss is None:
            return AdaCommState(self.first, loss)
        period = math.ceil(math.sqrt(loss / state.first_loss) * self.first)
        if period >= state.period:
            period = math.ceil(state.period / 2)
        return AdaCommState(max(period, 1), state.first_loss)
