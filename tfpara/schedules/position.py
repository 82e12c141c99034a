"""Schedules that are functions of the position in the run alone.

The position is counted in epochs from 0: 2.25 is a quarter through the third epoch.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Exponential:
    """Exponential decay from a first to a last learning rate over a fixed number of epochs.

    One rate for each epoch e = 0 … E − 1:  first · (last / first)^(e / (E − 1)).
    With ``per_step=True``, at position p:   first · (last / first)^(p / E),
    which ends at `last` after the last minibatch. Later positions have the rate `last`.

    Without `per_step` you can also give it to `keras.callbacks.LearningRateScheduler`.

    Args:
        first: rate at position 0, > 0.
        epochs: E ≥ 1.
        last: the final rate, > 0. None: 0.01 · first (Su et al. 2015, section 5.6, with E = 15).
        per_step: whether the rate falls within epochs.

    Raises:
        ValueError: a value outside its range.
    """

    first: float
    epochs: int
    last: float | None = None
    per_step: bool = False

    def __post_init__(self) -> None:
        _check_positive("first", self.first)
        if self.last is not None:
            _check_positive("last", self.last)
        if not self.epochs >= 1:
            raise ValueError(f"epochs={self.epochs!r} must be at least 1.")

    def __call__(self, position: float) -> float:
        span = self.epochs if self.per_step else self.epochs - 1
        if not self.per_step:
            position = math.floor(position)
        share = min(position / span, 1.0) if span else 0.0
        ratio = 0.01 if self.last is None else self.last / self.first
        return self.first * ratio**share


@dataclasses.dataclass(frozen=True)
class Hand:
    """The learning rate falls by a fixed factor at every minibatch of a replica.

    After k minibatches it is first · factor^k (You & Xu 2014, section 4.1, "ASGD-hand"). The
    position gives k, so workers with more or fewer minibatches have the same rate.

    Args:
        first: rate of the first minibatch, > 0.
        steps_per_epoch: minibatches of a replica in an epoch, ≥ 1; with a `tfpara.AsyncStrategy`,
            of all workers together.
        factor: the factor of each minibatch, in (0, 1].

    Raises:
        ValueError: a value outside its range.
    """

    first: float
    steps_per_epoch: int
    factor: float = 0.999

    def __post_init__(self) -> None:
        _check_positive("first", self.first)
        if not self.steps_per_epoch >= 1:
            raise ValueError(f"steps_per_epoch={self.steps_per_epoch!r} must be at least 1.")
        if not 0.0 < self.factor <= 1.0:
            raise ValueError(f"factor={self.factor!r} must be in (0, 1]. The paper's is 0.999.")

    def __call__(self, position: float) -> float:
        return self.first * self.factor ** (position * self.steps_per_epoch)


class Segment(NamedTuple):
    """A part of an epoch, with one value.

    Attributes:
        first: number of the first sample, from 0 in the epoch.
        end: number of the sample after the last one.
        value: the value for these samples.
    """

    first: int
    end: int
    value: Any


class Piecewise:
    """A value that changes at given positions: `Piecewise({0: 64, 0.25: 256})`.

    Args:
        values: the values, each by the position in epochs from which it holds. Position 0 is
            required.

    Raises:
        ValueError: position 0 is missing, or a position is negative or infinite.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._positions = sorted(values)
        if not self._positions or self._positions[0] != 0:
            raise ValueError(
                f"positions {list(values)!r}: one must be 0, where the run begins, and none "
                "negative."
            )
        if not math.isfinite(self._positions[-1]):
            raise ValueError(f"positions {list(values)!r} must be finite numbers of epochs.")
        self._values = [values[p] for p in self._positions]

    def __call__(self, position: float) -> Any:
        if not position >= 0:
            raise ValueError(f"position={position!r} must be at least 0, where the run begins.")
        return self._values[bisect.bisect_right(self._positions, position) - 1]

    def __repr__(self) -> str:
        return f"Piecewise({dict(zip(self._positions, self._values, strict=True))!r})"

    def segments(self, epoch: int, num_samples: int) -> list[Segment]:
        """Returns the segments of an epoch of `num_samples` samples, cut where the value changes.

        Every sample is in one segment, and no segment is empty.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples!r} must be at least 1.")
        inside = [p for p in self._positions if epoch < p < epoch + 1]
        starts = [0, *(round((p - epoch) * num_samples) for p in inside)]
        values = [self(epoch), *(self(p) for p in inside)]
        ends = [*starts[1:], num_samples]
        return [
            Segment(first, end, value)
            for first, end, value in zip(starts, ends, values, strict=True)
            if end > first
        ]


def minibatch_sizes() -> Piecewise:
    """Returns the minibatch sizes of You & Xu (2014), section 4.3, by position.

    64 for the first quarter of the data, 256 for two epochs, then 1024.

    Example:
        >>> minibatch_sizes().segments(epoch=0, num_samples=1000)
        [Segment(first=0, end=250, value=64), Segment(first=250, end=1000, value=256)]
    """
    return Piecewise({0: 64, 0.25: 256, 2.25: 1024})


def linear_scaling(rate: float, num_replicas: int) -> float:
    """Returns the learning rate of N replicas under model averaging: N times that of one.

    Each of N replicas trains n/N of an epoch's n minibatches, and the mean of their models moves
    only as far as one replica does. So the mean moves 1/N as far as a single replica with all n
    minibatches (Su et al. 2015, section 5.6). An N times higher rate corrects this. Use it for
    `tfpara.BSP` only. With BMUF keep the rate of one replica, since block momentum already corrects
    this; with EASGD keep it too.

    Args:
        rate: the learning rate that one replica would have, > 0.
        num_replicas: N ≥ 1.

    Raises:
        ValueError: a value outside its range.
    """
    _check_positive("rate", rate)
    if not num_replicas >= 1:
        raise ValueError(f"num_replicas={num_replicas!r} must be at least 1.")
    return rate * num_replicas


def _check_positive(name: str, rate: float) -> None:
    if not 0.0 < rate < math.inf:
        raise ValueError(f"{name}={rate!r} must be a positive learning rate.")
