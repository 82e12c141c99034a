"""Blocks by speed: the number and choice of the minibatches that each worker trains in a block.

Each report has the time of a minibatch, and all workers have the same reports. So each worker
knows without a further message how many minibatches every worker takes until the next sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfpara.strategy import EpochUnits
from tfpara.sync.data.dealt import Dealt
from tfpara.sync.momentum_fit import MomentumFit
from tfpara.sync.settings import Settings
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Array, Json

CEILING = 4  # largest number of minibatches of one worker in a block, as a multiple of τ
# Weight of the last block in a worker's smoothed time of a minibatch: the larger one if the block's
# time differs by the factor `_LARGE`, or by `_NOISE` twice in the same direction. Otherwise shares
# would follow the noise of every block, and workers of equal speed would wait for each other.
_TRUST, _TRUST_IN_NOISE = 0.75, 0.25
_LARGE, _NOISE = 1.4, 1.1
_LARGEST_CHANGE = 2.0  # factor by which one block may change that time
_GAIN = 0.03  # smallest gain of time for which the shares change


def shares_of(seconds: Array, period: int, former: Array) -> Array:
    """Returns the minibatches τ_i of each worker in a block, with Σ τ_i = W·τ for W workers.

    They make max_i s_i·τ_i, the time of the block, as short as whole numbers 1 ≤ τ_i ≤ 4τ allow;
    s_i are the seconds of a minibatch. So τ_i is about W·τ·(1/s_i) / Σ_j (1/s_j).

    Args:
        seconds: s_i; 0 if unknown, and then all workers have the same share.
        period: τ.
        former: the previous shares; they are returned if others would gain less than 3 %.
    """
    workers = len(seconds)
    total = workers * period
    if not (seconds > 0.0).all():
        return np.full(workers, period)
    speeds = 1.0 / seconds
    shares = np.clip((total * speeds / speeds.sum()).astype(int), 1, CEILING * period)
    while shares.sum() < total:
        after = np.where(shares < CEILING * period, (shares + 1) * seconds, np.inf)
        shares[after.argmin()] += 1
    while shares.sum() > total:
        shares[np.where(shares > 1, shares * seconds, 0.0).argmax()] -= 1
    still_fit = former.sum() == total and former.max() <= CEILING * period
    gains = (former * seconds).max() > (1.0 + _GAIN) * (shares * seconds).max()
    return former if still_fit and not gains else shares


def dealing_order(shares: Array) -> Array:
    """Returns for each minibatch of a block, in the order of the data, the worker that trains it.

    Minibatch c of worker i, from 0, is ordered by c / τ_i. So the workers reach the end of an epoch
    together, at whatever point of a block that is. With equal shares worker k mod W has minibatch
    k, as without balance.
    """
    workers = np.repeat(np.arange(len(shares)), shares)
    places = np.concatenate([np.arange(share) / max(share, 1) for share in shares])
    return workers[np.lexsort((workers, places))]


class Balance(EpochUnits):
    """The shares of the workers in the present block, the same on all of them.

    Args:
        settings: settings of the strategy.
        worker: this worker.
        momentum: momentum of the models' optimizers, which is fitted to the block.
        make: makes a plain variable, `make(value, name)`.

    Attributes:
        due: the steps of this worker in the present block, a variable; 0: those of the sync period.
        since: the time when the present block began on this worker, a variable; 0: unknown.
        open_steps: returns this worker's steps since the last sync.
        steps_of_epoch: steps of each replica, if all took equally many; None: unknown.
        record: the shares in all blocks of this process so far.
    """

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        momentum: MomentumFit,
        make: Callable[..., tf.Variable],
    ) -> None:
        self._settings, self._worker, self._momentum = settings, worker, momentum
        self._given = [] if isinstance(settings.balance, bool) else settings.balance
        self._workers = worker.num_workers
        if len(worker.devices) > 1:
            raise ValueError(
                f"balance= deals minibatches out to workers of one device, and this one has "
                f"{len(worker.devices)}. Start a worker for each device, or leave balance out."
            )
        if self._given and len(self._given[0]) != self._workers:
            raise ValueError(
                f"balance= has the shares of {len(self._given[0])} workers in each block, and the "
                f"run has {self._workers}. Give the record of a run of as many."
            )
        with tf.device("CPU:0"):
            self.due = make(tf.zeros([], tf.int64), "due")
            self.since = make(tf.zeros([], tf.float64), "block_began")
        self.open_steps: Callable[[], int] = lambda: 0
        self.steps_of_epoch: int | None = None
        self.record: list[list[int]] = []
        self._blocks = 0  # number of trained blocks, with those before a resume
        self._seconds = np.zeros(self._workers)  # seconds of a minibatch, smoothed
        self._changes = np.zeros(self._workers)  # logarithms of the last block's over those
        self._shares = np.zeros(self._workers, int)  # shares by speed, of the last block
        # Of the present block: the steps of each worker, trained or not, the number of its first
        # minibatch, and that of the first one after it.
        self._steps = np.zeros(self._workers, int)
        self._first = self._next = 0
        # Whether a block of the present pass was whole. Then a shorter one, as at the end of an
        # epoch, is not measured, since a few steps tell little.
        self._had_whole = False
        self._owes = False  # whether minibatches before the present block are not trained yet
        self._queue: tf.queue.QueueBase | None = None

    def begin(self, first: int, warm: bool) -> Dealt | None:
        """Begins a pass over an epoch; returns this worker's minibatches; None: there are no syncs.

        Args:
            first: minibatches of the epoch that are trained already.
            warm: whether this process has trained before. If not, the first block compiles, and
                its time tells nothing.
        """
        self.end()
        self._next, self._had_whole = first, False
        if self._momentum.sync_period is None:
            return None
        self._queue = tf.queue.FIFOQueue(-1, tf.int64, [[]])
        self.since.assign(time.monotonic() if warm else 0.0)
        self._deal(np.zeros(self._workers, int))
        return Dealt(self._queue)

    def end(self) -> None:
        """Ends the present pass, also for readers that wait for its minibatches."""
        if self._queue is not None:
            self._queue.close(cancel_pending_enqueues=True)
        self._queue = None
        self.due.assign(0)
        self._momentum.set_share(None)

    def mean_steps(self) -> float | None:
        """Returns the mean of the workers' steps in the present block; None outside a pass."""
        return None if self._queue is None else float(self._steps.mean())

    def close(self, steps: Array, seconds: Array) -> None:
        """Ends a block at a sync, and assigns the minibatches of the next one.

        Args:
            steps: steps of each process in the block.
            seconds: time in which each process trained the block; below 0: unknown.
        """
        if self._queue is None or not steps.any():
            return
        self.record.append(self._shares.tolist())
        self._blocks += 1
        is_whole = bool(steps.sum() >= self._steps.sum())
        known = (steps > 0) & (seconds > 0.0) & (is_whole or not self._had_whole)
        self._had_whole |= is_whole
        measured = np.divide(seconds, steps, out=np.zeros(len(steps)), where=known)
        former = np.where(self._seconds > 0.0, self._seconds, measured)
        within = np.clip(measured, former / _LARGEST_CHANGE, former * _LARGEST_CHANGE)
        changes = np.log(np.divide(within, former, out=np.ones(len(steps)), where=known))
        both = np.sort([changes, self._changes], 0)  # the smaller and the larger, with their signs
        again = (both[0] > np.log(_NOISE)) | (both[1] < -np.log(_NOISE))
        is_real = again | (np.abs(changes) > np.log(_LARGE))
        smoothed = former + np.where(is_real, _TRUST, _TRUST_IN_NOISE) * (within - former)
        self._seconds, self._changes = np.where(known, smoothed, former), changes
        self._deal(np.maximum(self._steps - steps, 0))

    def _deal(self, left: Array) -> None:
        """Assigns a block's minibatches, after the `left` steps that each worker still has."""
        period = self._momentum.sync_period
        if period is None:
            period = self._settings.sync_period
        if self._blocks < len(self._given):
            self._shares = np.array(self._given[self._blocks])
        elif self._given:
            self._shares = np.full(self._workers, period)
        else:
            self._shares = shares_of(self._seconds, period, self._shares)
        new = np.maximum(self._shares - left, 0)
        order = dealing_order(new)
        numbers = self._next + np.arange(len(order), dtype=np.int64)
        self._owes, self._first = bool(left.any()), self._next
        self._next += len(order)
        self._steps = left + new
        mine = int(self._steps[self._worker.rank])
        self.due.assign(mine)
        self._momentum.set_share(mine)
        assert self._queue is not None
        self._queue.enqueue_many(numbers[order == self._worker.rank])

    def total(self, steps: int | None) -> int:
        return steps or self.steps_of_epoch or 0

    def trained(self, steps: int) -> int:
        return steps if self._queue is None else self._first // self._workers

    def reached(self, steps: int) -> int:
        due = int(self.due)
        if self._queue is None or due == 0:
            return steps
        done = (self._next - self._first) * min(1.0, self.open_steps() / due)
        return round((self._first + done) / self._workers)

    def position(self) -> dict[str, Json]:
        if self._queue is None:
            return {}
        if self._owes:
            raise ValueError(
                "a checkpoint where strategy.synchronize() has closed a block before its end: with "
                "balance= some workers still owe minibatches of that block. Let the checkpoint be "
                "taken at a later sync, or where an epoch ends."
            )
        return {"minibatches": self._first}

    def get_state(self) -> Json:
        """Returns the basis of the next shares; at a sync it is the same on all workers."""
        return {
            "blocks": self._blocks,
            "seconds": self._seconds.tolist(),
            "shares": self._shares.tolist(),
        }

    def set_state(self, state: Json) -> None:
        """Continues from a state; a state of another number of workers is not used."""
        assert isinstance(state, Mapping)
        if len(state["seconds"]) == self._workers:
            self._blocks = state["blocks"]
            self._seconds, self._shares = np.array(state["seconds"]), np.array(state["shares"])
            self._changes = np.zeros(self._workers)
