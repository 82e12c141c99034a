"""The overfitting guard, which stops when training and validation error move apart."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from tfpara.whole_number import checked_whole


class OverfittingState(NamedTuple):
    """The state of the guard between epochs.

    Attributes:
        smallest: the smallest gap so far; None before the first.
        epochs: number of open epochs (see `OverfittingRule`) in a row, the last epoch included.
        stopped: whether training is over.
    """

    smallest: float | None = None
    epochs: int = 0
    stopped: bool = False


@dataclasses.dataclass(frozen=True)
class OverfittingRule:
    """Stops when the gap between validation and training error has become too large.

    With gap = max(0, validation error − training error), an epoch is *open* if its gap exceeds the
    smallest one so far by more than `threshold`. `patience` open epochs in a row end training.

    A negative gap counts as 0. (At first the training error is larger than the validation error,
    because the training error is measured with dropout, and while the model still improves.)

    Tian et al. (2017), section 3.1, watch for "an apparent gap" of the frame error rates and give
    no number; this project chose threshold and patience.

    Args:
        threshold: largest growth of the gap, > 0, in units of the error (0.05 is 5 % of the
            frames).
        patience: number of open epochs in a row, ≥ 1.

    Raises:
        ValueError: a value outside its range.

    Example:
        >>> rule = OverfittingRule(threshold=0.05)
        >>> state = rule.update(rule.init(), training=0.30, validation=0.32)
        >>> state = rule.update(state, training=0.24, validation=0.31)  # gap 0.07 ≤ 0.02 + 0.05
        >>> rule.update(state, training=0.22, validation=0.31).stopped  # gap 0.09 > 0.02 + 0.05
        True
    """

    threshold: float = 0.05
    patience: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < math.inf:
            raise ValueError(
                f"threshold={self.threshold!r} must be positive: the gap always varies a little."
            )
        checked_whole("patience", self.patience, of="epochs")

    def init(self) -> OverfittingState:
        """Returns the state before the first epoch."""
        return OverfittingState()

    def update(
        self, state: OverfittingState, training: float, validation: float
    ) -> OverfittingState:
        """Returns the state after an epoch with these two errors.

        Raises:
            ValueError: an error is not a finite number.
        """
        if not (math.isfinite(training) and math.isfinite(validation)):
            raise ValueError(
                f"training error {training!r} and validation error {validation!r} must be finite: "
                "training has diverged. Lower the learning rate."
            )
        gap = max(0.0, validation - training)
        smallest = gap if state.smallest is None else min(gap, state.smallest)
        epochs = state.epochs + 1 if gap > smallest + self.threshold else 0
        return OverfittingState(smallest, epochs, epochs >= self.patience)
