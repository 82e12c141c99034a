"""The cost model of paper 003, equations 15 to 17: the speed-up of N replicas with a sync every τ
minibatches over one replica.

The paper writes the speed-up of an epoch as s = t_s / (f(t_s, N) + t_c) with f = α t_s / N, so
s = 1 / (α/N + t_c/t_s): t_s is the epoch's computation on one replica, t_c the time that its syncs
take, and α ≥ 1 how much slower a minibatch becomes when N replicas compute at once (they share
memory, or a minibatch no longer fills the device). Here an epoch has M minibatches of t seconds,
so t_s = M t. Each replica takes M/N of them, with a sync of c(N) seconds after every τ:
t_c = M c(N) / (N τ). Hence

    s(N, τ) = N / (α + c(N) / (τ t)).

Times are in seconds, sizes in bytes. No TensorFlow here.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfpara.whole_number import checked_whole

__all__ = ["Costs", "KnownError", "Link", "Plan", "calibrated_link", "choose", "known_error"]

# The longest sync period that `Costs.smallest_period` tries.
LONGEST_PERIOD = 10**6

# The error of `BMUF()` was above the error of one replica by these percentages. The keys are the
# number of replicas and the sync period. The runs had 40 minutes of speech and eight epochs
# (docs/study.md).
_ERRORS = {
    4: {5: 0.9, 20: 0.2, 80: 1.3},
    8: {5: 1.9, 20: 0.9, 80: 5.9},
    16: {5: 4.0, 20: 5.6, 80: 12.3},
}
# `overlap=True` adds these numbers to those in `_ERRORS`. They were measured on 20 minutes of
# speech (docs/syncs.md).
_OVERLAP_ADDS = {4: {5: 0.0, 20: 3.2, 80: 2.2}, 8: {20: 7.3}}
# `compression="int4"` adds these numbers to those in `_ERRORS`. They were measured on the same 20
# minutes of speech as `_OVERLAP_ADDS` (docs/study.md).
_INT4_ADDS = {4: {5: 0.0, 20: 0.0}, 8: {5: 0.3, 20: 0.0}}
# The longest sync period whose error is known.
LONGEST_KNOWN = 80
# `aggregation="auto"` shards the global state if the model has at least SHARDED_FROM_BYTES. The
# state of a smaller model needs little memory in comparison with the activations, and the messages
# of its syncs are too short to be divided. The limit is ALWAYS_SHARDED_FROM_BYTES instead if a
# reduce-scatter and an all-gather together take longer than an all-reduce, as among three or more
# workers without NCCL. Sharding then makes syncs slower on slow links, so the state is sharded only
# if it needs very much memory.
SHARDED_FROM_BYTES = 16 << 20
ALWAYS_SHARDED_FROM_BYTES = 1 << 30
# A link carries this many bytes for each byte of data, because each TCP packet of 1,500 bytes has
# headers.
_WITH_HEADERS = 1.045
# Among three or more workers without NCCL, a reduce-scatter and an all-gather together take this
# many times as long as an all-reduce of the same bytes. Their all-to-all fills the links less
# evenly. The factor measured with 4 and 8 workers at 100 Mbit/s was 1.14 to 1.18 in float32 and
# bf16, and 1.3 with int8 (docs/benchmarks.md).
_SCATTERED = 1.2
# The bits that are sent for a weight, by `compression`. Those of "int4" include its scales.
BITS = {"none": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4.5}
# The values of `compression` that `choose` tries by default.
COMPRESSIONS = ("none", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of one worker, which can send and receive at the same time.

    Args:
        bytes_per_second: speed in each direction.
        delay_seconds: time from sending a message to its arrival.

    Raises:
        ValueError: a speed that is not above 0, or a negative delay.
    """

    bytes_per_second: float
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check("bytes_per_second", self.bytes_per_second, above_zero=True)
        _check("delay_seconds", self.delay_seconds)

    @classmethod
    def of_mbit(cls, mbit: float, delay_ms: float = 0.0) -> Link:
        """Returns a link of `mbit` Mbit/s (millions of bits) with a delay in milliseconds.

        For 1,000 bytes of data the link carries 1,045 bytes, since packets have headers.
        """
        return cls(mbit * 1e6 / 8 / _WITH_HEADERS, delay_ms / 1e3)

    @property
    def mbit(self) -> float:
        """The speed in Mbit/s, as `of_mbit` takes it: the headers of packets included."""
        return self.bytes_per_second * 8 / 1e6 * _WITH_HEADERS

    def reduce_seconds(self, nbytes: float, num_workers: int) -> float:
        """Returns the time of an all-reduce, or of a reduce-scatter and an all-gather.

        Each worker sends 2(N − 1)/N of the buffer (paper 000, section 3.2), in 2(N − 1) messages
        of which each waits for the one before.
        """
        rounds = 2 * (num_workers - 1)
        return rounds / num_workers * nbytes / self.bytes_per_second + rounds * self.delay_seconds


@dataclasses.dataclass(frozen=True)
class Costs:
    """The measured costs of one model on one kind of machine.

    Args:
        step_seconds: t, the time of a minibatch on one replica that has its machine to itself.
        model_bytes: bytes of all weights as they are sent: 4 each without `compression`.
        link: the link between the workers.
        local_seconds: time of a sync without the transfer: packing, the rule, unpacking.
        slowdown: α of equation 16, at least 1: how many times as long a minibatch takes when all
            replicas train at once.
        overlap: whether a sync is sent while the next block trains.
        scattered: whether a sync is a reduce-scatter and an all-gather in place of an all-reduce,
            as with `aggregation="sharded"` and with compression.

    Raises:
        ValueError: a value outside its range.
    """

    step_seconds: float
    model_bytes: float
    link: Link
    local_seconds: float = 0.0
    slowdown: float = 1.0
    overlap: bool = False
    scattered: bool = False

    def __post_init__(self) -> None:
        _check("step_seconds", self.step_seconds, above_zero=True)
        _check("model_bytes", self.model_bytes, above_zero=True)
        _check("local_seconds", self.local_seconds)
        _check("slowdown", self.slowdown)
        if self.slowdown < 1.0:
            raise ValueError(
                f"slowdown={self.slowdown!r} must be at least 1: a minibatch does not get faster "
                "because others compute too. Measure the step of a single replica again."
            )

    def compressed(self, compression: str) -> Costs:
        """Returns the costs with this compression; those of this object are in float32."""
        nbytes = self.model_bytes * BITS[compression] / 32
        scattered = self.scattered or compression != "none"
        return dataclasses.replace(self, model_bytes=nbytes, scattered=scattered)

    def sync_seconds(self, num_workers: int) -> float:
        """Returns the time of one sync, c(N); 0 for a single worker.

        If it is `scattered`, sending takes 1.2 times as long among three or more workers. NCCL is
        not taken into account.
        """
        if checked_whole("num_workers", num_workers) == 1:
            return 0.0
        factor = _SCATTERED if self.scattered and num_workers > 2 else 1.0
        sending = factor * self.link.reduce_seconds(self.model_bytes, num_workers)
        return self.local_seconds + sending

    def block_seconds(self, num_workers: int, sync_period: int) -> float:
        """Returns the time from one sync to the next: τ minibatches, and what the sync adds.

        With `overlap` the transfer adds time only if it takes longer than the next block.
        """
        training = checked_whole("sync_period", sync_period) * self.step_seconds
        sync = self.sync_seconds(num_workers)
        if num_workers == 1:
            return training
        training *= self.slowdown
        if not self.overlap:
            return training + sync
        return max(training, sync - self.local_seconds) + self.local_seconds

    def speedup(self, num_workers: int, sync_period: int) -> float:
        """Returns the speed-up over one replica, s(N, τ): equation 17."""
        alone = num_workers * sync_period * self.step_seconds
        return alone / self.block_seconds(num_workers, sync_period)

    def loss(self, num_workers: int, sync_period: int) -> float:
        """Returns the share of the speed that the syncs cost; 0 if they cost nothing."""
        if num_workers == 1:
            return 0.0
        return 1.0 - self.speedup(num_workers, sync_period) * self.slowdown / num_workers

    def smallest_period(self, num_workers: int, loss: float = 0.05) -> int | None:
        """Returns the smallest τ at which the syncs cost less than `loss`; None if above 10^6.

        Raises:
            ValueError: `loss` is not between 0 and 1.
        """
        if not 0.0 < loss < 1.0:
            raise ValueError(f"loss={loss!r} must be a share between 0 and 1, such as 0.05.")
        # The loss falls as τ grows, so a bisection finds the smallest τ with a loss below `loss`.
        periods = range(1, LONGEST_PERIOD + 1)
        found = bisect.bisect(periods, False, key=lambda tau: self.loss(num_workers, tau) < loss)
        return periods[found] if found < len(periods) else None


class KnownError(NamedTuple):
    """An error that was measured.

    Attributes:
        replicas: N.
        period: τ, minibatches.
        percent: by how many % it is above the error of one replica.
    """

    replicas: int
    period: int
    percent: float


def known_error(
    num_workers: int, sync_period: int, overlap: bool = False, compression: str = "none"
) -> KnownError | None:
    """Returns the measured error for N and τ, or the error of a similar case that is no better.

    If N was not measured, the error is that of the next larger N. If τ was not measured, it is the
    larger error of two periods: the next shorter and the next longer one.

    Returns None if only fewer replicas or shorter periods were measured, or if these options were
    not measured together.

    Args:
        num_workers: N.
        sync_period: τ, minibatches.
        overlap: whether syncs are sent while the next block trains. The error that overlap adds was
            measured in shorter runs, in which errors differ more.
        compression: format of the bytes between workers. The error that "int4" adds was measured in
            shorter runs, too. Other formats count as "none".
    """
    adds: dict[int, dict[int, float]] = {}
    if compression == "int4":
        if overlap:
            return None
        adds = _INT4_ADDS
    elif overlap:
        adds = _OVERLAP_ADDS
    for replicas, measured in sorted((adds or _ERRORS).items()):
        longer = [period for period in measured if period >= sync_period]
        if replicas < num_workers or not longer:
            continue
        shorter = [period for period in measured if period <= sync_period]
        around = min(longer), max(shorter, default=min(longer))
        added = measured if adds else dict.fromkeys(measured, 0.0)
        errors = [
            KnownError(replicas, period, round(_ERRORS[replicas][period] + added[period], 1))
            for period in around
        ]
        return max(errors, key=lambda error: error.percent)
    return None


class Plan(NamedTuple):
    """A period and options for a number of workers, with their speed and error.

    Attributes:
        workers: N.
        sync_period: τ, minibatches.
        overlap: whether syncs are sent while the next block trains.
        compression: format of the bytes between workers, as `PeriodicSyncStrategy` takes it.
        aggregation: "sharded" or "replicated", as `aggregation="auto"` chooses it.
        speedup: predicted speed-up over one worker.
        loss: share of the speed that the syncs cost.
        error: the result of `known_error`.
        is_enough: whether loss and error are both within the limits.
    """

    workers: int
    sync_period: int
    overlap: bool
    compression: str
    aggregation: str
    speedup: float
    loss: float
    error: KnownError | None
    is_enough: bool


def choose(
    costs: Costs,
    num_workers: int,
    *,
    loss: float = 0.05,
    error_percent: float = 5.0,
    overlaps: Sequence[bool] = (False, True),
    compressions: Sequence[str] = COMPRESSIONS,
) -> Plan:
    """Returns the first options that are within both limits, and their shortest such period.

    All `compressions` are tried in their order, first without overlap and then with overlap,
    because the next sync corrects rounding errors, but not the errors of late syncs. No period is
    longer than the longest whose error is known. If no options are within both limits, the result
    is the first of those within the limit of the error that are less than 1 % slower than the
    fastest of them.

    Args:
        costs: the costs with float32 on the link, and without overlap.
        num_workers: N.
        loss: share of the speed that the syncs may cost.
        error_percent: by how many % the error may be above one replica's.
        overlaps: the values of `overlap` that are tried.
        compressions: the values of `compression` that are tried.

    Raises:
        ValueError: `loss` is not between 0 and 1.
    """
    tried: list[Plan] = []
    within: list[Plan] = []  # those of `tried` whose error is within `error_percent`
    for overlap in overlaps:
        for compression in compressions:
            least = SHARDED_FROM_BYTES if num_workers == 2 else ALWAYS_SHARDED_FROM_BYTES
            scattered = costs.model_bytes >= least
            given = dataclasses.replace(costs, overlap=overlap, scattered=scattered)
            here = given.compressed(compression)
            smallest = here.smallest_period(num_workers, loss) or LONGEST_PERIOD
            known = functools.partial(
                known_error, num_workers, overlap=overlap, compression=compression
            )
            period, error = _within(known, smallest, error_percent)
            lost = here.loss(num_workers, period)
            fits = error is not None and error.percent <= error_percent
            found = Plan(
                num_workers,
                period,
                overlap,
                compression,
                "sharded" if here.scattered and num_workers > 1 else "replicated",
                here.speedup(num_workers, period),
                lost,
                error,
                is_enough=num_workers == 1 or (fits and lost < loss),
            )
            if found.is_enough:
                return found
            if fits:
                within.append(found)
            tried.append(found)
    # `within` is empty if all errors are too large or unknown. Then the first plan is returned,
    # because the safest options are tried first.
    if not within:
        return tried[0]
    fastest = max(each.speedup for each in within)
    return next(each for each in within if each.speedup > 0.99 * fastest)


def _within(
    known: Callable[[int], KnownError | None], smallest: int, error_percent: float
) -> tuple[int, KnownError | None]:
    """Returns the shortest period of at least `smallest` whose error is within a limit.

    If there is none, returns the longest period below `smallest` whose error is within the limit;
    if there is none either, the shortest period that was measured. `known` returns the error of a
    period.
    """
    periods = sorted({period for measured in _ERRORS.values() for period in measured})
    at_least = [min(smallest, LONGEST_KNOWN), *(p for p in periods if p > smallest)]
    for period in [*at_least, *reversed(periods)]:
        error = known(period)
        if error is not None and error.percent <= error_percent:
            return period, error
    period = min(smallest, periods[0])
    return period, known(period)


def calibrated_link(
    reduce_seconds: float, nbytes: float, num_workers: int, empty_seconds: float = 0.0
) -> Link:
    """Returns the link that explains a measured all-reduce of `nbytes` among `num_workers`.

    Args:
        reduce_seconds: the time of the all-reduce.
        nbytes: the bytes that it reduces on each worker.
        num_workers: N ≥ 2.
        empty_seconds: the time of an all-reduce of a few bytes, which is delay alone. At most 0.9
            of `reduce_seconds` counts as delay. 0: not measured, so there is no delay.

    Raises:
        ValueError: a time or size that is not above 0, or fewer than two workers.
    """
    _check("reduce_seconds", reduce_seconds, above_zero=True)
    _check("nbytes", nbytes, above_zero=True)
    _check("empty_seconds", empty_seconds)
    if checked_whole("num_workers", num_workers) < 2:
        raise ValueError("num_workers=1 says nothing of a link: measure with two or more.")
    rounds = 2 * (num_workers - 1)
    delays = min(empty_seconds, 0.9 * reduce_seconds)
    return Link(rounds / num_workers * nbytes / (reduce_seconds - delays), delays / rounds)


def _check(name: str, value: float, above_zero: bool = False) -> None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0.")
    if above_zero and value == 0:
        raise ValueError(f"{name}={value!r} must be above 0.")
