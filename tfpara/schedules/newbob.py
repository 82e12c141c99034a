"""Newbob: hold the learning rate while the held-out score improves, then halve it, then stop."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple


class NewbobState(NamedTuple):
    """The state of Newbob between epochs.

    Attributes:
        score: the score with which the next one is compared; None before the first.
        gain: the gain of the last epoch; None before there were two scores.
        fading: whether the rate falls at every epoch from now on.
        stopped: whether training is over.
        rejected: whether the last epoch's model is to be discarded.
    """

    score: float | None = None
    gain: float | None = None
    fading: bool = False
    stopped: bool = False
    rejected: bool = False


@dataclasses.dataclass(frozen=True)
class NewbobRule:
    """Decides when to lower the learning rate and when to stop, from a held-out score per epoch.

    An epoch's gain is the fall of a loss (or, with ``rising=True``, the rise of an accuracy) since
    the previous epoch; with ``relative=True`` it is divided by the previous score. The rate stays
    as long as the gain is at least `start`. The first gain below `start` begins the fading: from
    then on every epoch ends with rate ← factor · rate, until an epoch gains less than `stop`.

    * `NewbobRule.cross_entropy()`, the default: `start` 1 % and `stop` 0.1 %, relative (Li et al.
      2017, section 3.1).
    * `NewbobRule.accuracy()`: `start` 0.5 % and `stop` 0.1 % of all frames, absolute (Su et al.
      2015, section 5.6).

    As in Kaldi's nnet1 schedule, which the papers use, training never stops at the epoch that
    begins the fading.

    Args:
        start: gain below which the rate begins to fall, ≥ `stop`.
        stop: gain below which training ends once the rate is falling, ≥ 0.
        factor: factor of the rate, in (0, 1).
        rising: whether higher scores are better.
        relative: whether gains are divided by the previous score.
        reject_worse: whether an epoch without a better score is discarded, as in Kaldi's nnet1
            schedule. Then training returns to the beginning of the epoch, the epoch's gain counts
            as 0, and the next score is compared with the one before the epoch.

    Raises:
        ValueError: a value outside its range.

    Example:
        >>> rule = NewbobRule()
        >>> state = rule.update(rule.init(), 2.0)
        >>> state = rule.update(state, 1.99)  # a gain of 0.5 %, which is below `start`, 1 %
        >>> state.fading, state.stopped
        (True, False)
        >>> rule.update(state, 1.989).stopped  # a gain of 0.05 %, which is below `stop`, 0.1 %
        True
    """

    start: float = 0.01
    stop: float = 0.001
    factor: float = 0.5
    rising: bool = False
    relative: bool = True
    reject_worse: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.stop <= self.start < math.inf:
            raise ValueError(
                f"start={self.start!r} and stop={self.stop!r} must be gains with "
                "0 ≤ stop ≤ start: training may end only once the rate falls."
            )
        if not 0.0 < self.factor < 1.0:
            raise ValueError(f"factor={self.factor!r} must be in (0, 1). The usual value is 0.5.")

    @classmethod
    def cross_entropy(cls, reject_worse: bool = False) -> NewbobRule:
        """Returns the rule for a held-out cross-entropy: a relative fall of 1 %, then 0.1 %."""
        return cls(reject_worse=reject_worse)

    @classmethod
    def accuracy(cls, reject_worse: bool = False) -> NewbobRule:
        """Returns the rule for a held-out frame accuracy in [0, 1]: a rise of 0.005, then 0.001."""
        return cls(start=0.005, rising=True, relative=False, reject_worse=reject_worse)

    def init(self) -> NewbobState:
        """Returns the state before the first score."""
        return NewbobState()

    def update(self, state: NewbobState, score: float) -> NewbobState:
        """Returns the state after an epoch whose held-out score is `score`.

        The next epoch's rate is `factor` times the last one's if the new state is `fading` and not
        `stopped`. The first score of a run decides nothing; the next one is compared with it.

        Raises:
            ValueError: the score is not a finite number.
        """
        if not math.isfinite(score):
            raise ValueError(
                f"the held-out score is {score!r}: training has diverged. Lower the learning rate."
            )
        if state.score is None:
            return state._replace(score=score)
        gain = self._gain(state.score, score)
        rejected = self.reject_worse and gain <= 0.0
        counted = 0.0 if rejected else gain
        return NewbobState(
            score=state.score if rejected else score,
            gain=gain,
            fading=state.fading or counted < self.start,
            stopped=state.fading and counted < self.stop,
            rejected=rejected,
        )

    def _gain(self, before: float, after: float) -> float:
        gain = after - before if self.rising else before - after
        if self.relative:
            # If the former score is 0, there is no ratio. Then the gain is 0 for a better score,
            # and the (negative) difference for a worse score.
            gain = gain / abs(before) if before else min(gain, 0.0)
        return gain
