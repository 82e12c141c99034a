"""Blocks by speed: how many minibatches each worker trains in a block, and which ones.

At a sync each worker reports the time of its minibatches, and all workers receive all reports. So
each worker knows how many minibatches every worker takes until the next sync.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.elastic.plan import Plan
from tfpara.elastic.plan import begin as plan_of_epoch
from tfpara.strategy import EpochUnits
from tfpara.sync.data.dealt import EMPTY, Dealt
from tfpara.sync.momentum_fit import MomentumFit
from tfpara.sync.settings import Settings
from tfpara.sync.start_line import counted
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Array, Json

CEILING = 4  # a worker takes at most 4·τ minibatches in a block; τ is the sync period
# Each worker has a smoothed time of a minibatch: a running mean of the times measured in its
# blocks. A new time enters the mean with the weight `_TRUST` in two cases. In the first, it differs
# from the mean by more than the factor `_LARGE`. In the second, the times of two blocks in a row
# differ from the mean in the same direction, both by more than the factor `_NOISE`. Any other time
# enters with the weight `_TRUST_IN_NOISE`. If its weight were `_TRUST`, too, the workers' shares of
# the minibatches would follow the noise of every block, and workers of equal speed would wait for
# each other.
_TRUST, _TRUST_IN_NOISE = 0.75, 0.25
_LARGE, _NOISE = 1.4, 1.1
_LARGEST_CHANGE = 2.0  # one block changes the smoothed time by at most this factor
# The previous shares are kept if a block takes at most this fraction longer with them than with the
# new ones.
_GAIN = 0.03


def shares_of(seconds: Array, period: int, former: Array) -> Array:
    """Returns the minibatches τ_i of each worker in a block, with Σ τ_i = W·τ for W workers.

    They make max_i s_i·τ_i, the time of the block, as short as whole numbers 1 ≤ τ_i ≤ 4τ allow;
    s_i are the seconds of a minibatch. So τ_i is about W·τ·(1/s_i) / Σ_j (1/s_j).

    Args:
        seconds: s_i of each worker; 0: unknown, so the worker counts as the slowest known one.
        period: τ.
        former: the previous shares. If new ones would gain less than 3 %, these are returned.
    """
    workers = len(seconds)
    total = workers * period
    slowest = seconds.max()
    if slowest <= 0.0:
        return np.full(workers, period)
    seconds = np.where(seconds > 0.0, seconds, slowest)
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

    Each worker i counts its minibatches c from 0, and all are sorted by c / τ_i. So the workers
    reach the end of an epoch together. With equal shares worker k mod W has minibatch k.
    """
    workers = np.repeat(np.arange(len(shares)), shares)
    places = np.concatenate([np.arange(share) / max(share, 1) for share in shares])
    return workers[np.lexsort((workers, places))]


class Balance(EpochUnits):
    """The shares of the workers, in minibatches, of the present block; all workers have the same.

    `make(value, name)` makes a plain variable. `simulates`: whether this worker's replicas stand
    for the workers of a record. Those with a smaller share get empty minibatches at its end.

    Attributes:
        plan: the division of the present pass's minibatches since the last sync; None outside of a
            pass. Its `carried` has each worker's minibatches of the present block, trained or not.
        due: a variable: this worker's number of steps in the present block; 0: the sync period.
        since: a variable: the monotonic time when the present block began here; 0: unknown.
        open_steps: returns the number of this worker's steps since the last sync.
        reported: each worker's steps in the block that ends, and their seconds, or below 0.
        steps_of_epoch: steps in an epoch if all replicas took equally many; None: unknown.
        record: the workers' shares in each block of this process so far.
    """

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        momentum: MomentumFit,
        make: Callable[..., tf.Variable],
        simulates: bool = False,
    ) -> None:
        self._settings, self._worker, self._momentum = settings, worker, momentum
        self._given = [] if isinstance(settings.balance, bool) else settings.balance
        self.simulates = simulates
        workers = self._workers
        if simulates and not self._given:
            raise ValueError(
                "balance=True goes by the speed of workers, and simulated replicas step together. "
                "Give the record of another run: balance=strategy.balance_record."
            )
        if worker.replicas > worker.num_workers and not simulates:
            raise ValueError(
                "balance= deals minibatches out to workers of one device, and this run has "
                f"{worker.replicas} devices on {counted(worker.num_workers, 'worker')}. Start a "
                "worker for each device, or leave balance out."
            )
        if self._given and len(self._given[0]) != workers:
            raise ValueError(
                f"balance= has the shares of {len(self._given[0])} workers in each block, and the "
                f"run has {workers}. Give the record of a run of as many."
            )
        with tf.device("CPU:0"):
            self.due = make(tf.zeros([], tf.int64), "due")
            self.since = make(tf.zeros([], tf.float64), "block_began")
        self.plan: Plan | None = None
        self.open_steps: Callable[[], int] = lambda: 0
        self.reported: tuple[Array, Array] = np.zeros(workers, int), np.zeros(workers)
        self.steps_of_epoch: int | None = None
        self.record: list[list[int]] = []
        self._blocks = 0  # number of trained blocks, including those before a resume
        self._seconds = np.zeros(workers)  # of each worker: the smoothed seconds of a minibatch
        # For each worker: log(a / b). Here a is the time of a minibatch in the last block, limited
        # by `_LARGEST_CHANGE`, and b is the smoothed time before that block.
        self._changes = np.zeros(workers)
        self._shares = np.zeros(workers, int)  # each worker's share of the last assigned block
        self._unmeasured = 0  # `regroup` sets how many of the coming blocks are not measured
        # Whether the present pass has had a complete block. Once this is True, incomplete blocks of
        # the pass are not measured.
        self._had_whole = False
        # The place where the run resumes: the epoch, and the values `minibatches` and `owed` that
        # `position` returned.
        self._resumed: tuple[int, int, Sequence[int]] = (0, 0, ())
        self._rank = 0  # this worker's rank in `plan`
        self._queue: tf.queue.QueueBase | None = None  # the numbers of this worker's minibatches

    @property
    def _workers(self) -> int:
        return self._worker.replicas if self.simulates else self._worker.num_workers

    def begin_epoch(self, epoch: int, first: int, warm: bool) -> Dealt | None:
        """Does what `begin` does, from minibatch `first` on, in a run whose workers stay."""
        owed = self._resumed[2] if self._resumed[:2] == (epoch, first) else ()
        plan = plan_of_epoch(epoch, range(self._workers), first=first, owed=owed)
        return self.begin(plan, self._worker.rank, warm)

    def begin(self, plan: Plan, rank: int, warm: bool) -> Dealt | None:
        """Begins a pass over an epoch; returns this worker's minibatches, or None without syncs.

        `plan` divides the minibatches that are not in the model yet; `rank` is this worker's in it.
        If workers carry some that they have trained, all sync as soon as possible. Unless `warm`,
        the first block's time includes compilation, and is not measured.
        """
        self.end()
        if self._momentum.sync_period is None:
            return None
        self.plan, self._rank, self._had_whole = plan, rank, False
        shape = [plan.size] if self.simulates else []
        self._queue = tf.queue.FIFOQueue(-1, tf.int64, [shape])
        self.since.assign(time.monotonic() if warm else 0.0)
        if len(self._seconds) != plan.size:
            self._seconds = self._changes = np.zeros(plan.size)
        dealt = Dealt(self._queue, min((*plan.owed, plan.first)))
        if any(plan.carried):
            self._shares = np.array([len(units) for units in plan.carried])
            self.due.assign(1)
        else:
            self.due.assign(self._deal())
        return dealt

    def end(self) -> None:
        """Ends the present pass; readers that wait for its minibatches stop waiting."""
        if self._queue is not None:
            self._queue.close(cancel_pending_enqueues=True)
        self.plan = self._queue = None
        self.due.assign(0)
        self._momentum.set_shares([])

    def mean_steps(self) -> float | None:
        """Returns the mean of the workers' steps in the present block; None outside a pass."""
        return None if self.plan is None else self._dealt / self.plan.size

    @property
    def _dealt(self) -> int:
        """The number of minibatches of all workers in the present block, trained or not."""
        return 0 if self.plan is None else sum(map(len, self.plan.carried))

    def close(self) -> int:
        """Ends the block of `reported` after its sync, deals out the next, returns its `due`."""
        (steps, seconds), plan = self.reported, self.plan
        if plan is None or not steps.any():
            return int(self.due)
        self.record.append(self._shares.tolist())
        self._blocks += 1
        is_whole = bool(steps.sum() >= self._dealt)
        if self._unmeasured:
            self._unmeasured -= 1
        else:
            known = (steps > 0) & (seconds > 0.0) & (is_whole or not self._had_whole)
            self._had_whole |= is_whole
            self._measure(steps, seconds, known)
        carried = zip(plan.carried, steps.tolist(), strict=True)
        left = tuple(units[count:] for units, count in carried)
        self.plan = dataclasses.replace(plan, carried=left)
        return self._deal()

    def _measure(self, steps: Array, seconds: Array, known: Array) -> None:
        """Updates the workers' smoothed times of a minibatch by those of a block, where `known`."""
        measured = np.divide(seconds, steps, out=np.zeros(len(steps)), where=known)
        former = np.where(self._seconds > 0.0, self._seconds, measured)
        within = np.clip(measured, former / _LARGEST_CHANGE, former * _LARGEST_CHANGE)
        changes = np.log(np.divide(within, former, out=np.ones(len(steps)), where=known))
        # The last two changes of each worker: the smaller in row 0, the larger in row 1.
        both = np.sort([changes, self._changes], 0)
        again = (both[0] > np.log(_NOISE)) | (both[1] < -np.log(_NOISE))
        is_real = again | (np.abs(changes) > np.log(_LARGE))
        smoothed = former + np.where(is_real, _TRUST, _TRUST_IN_NOISE) * (within - former)
        self._seconds, self._changes = np.where(known, smoothed, former), changes

    def _deal(self) -> int:
        """Assigns a block's minibatches, added to those that workers still have; returns `due`."""
        plan, period = self.plan, self._momentum.sync_period
        assert plan is not None and self._queue is not None
        if period is None:
            period = self._settings.sync_period
        if self._blocks < len(self._given):
            self._shares = np.array(self._given[self._blocks])
        elif self._given:
            self._shares = np.full(plan.size, period)
        else:
            self._shares = shares_of(self._seconds, period, self._shares)
        left = [len(units) for units in plan.carried]
        order = dealing_order(np.maximum(self._shares - left, 0))
        owed, first = plan.owed[: len(order)], plan.first
        end = first + len(order) - len(owed)
        units = np.array([*owed, *range(first, end)], np.int64)
        new = [units[order == rank].tolist() for rank in range(plan.size)]
        carried = tuple((*own, *more) for own, more in zip(plan.carried, new, strict=True))
        self.plan = dataclasses.replace(
            plan, carried=carried, owed=plan.owed[len(owed) :], first=end
        )
        shares = [len(own) for own in carried]
        if self.simulates:
            rows = np.array([*itertools.zip_longest(*new, fillvalue=EMPTY)], np.int64)
            self._queue.enqueue_many(rows.reshape(-1, plan.size))
            self._momentum.set_shares(shares)
            return max(left) + len(rows)
        self._queue.enqueue_many(np.array(new[self._rank], np.int64))
        self._momentum.set_shares([shares[self._rank]])
        return shares[self._rank]

    def total(self, steps: int | None) -> int:
        return steps or self.steps_of_epoch or 0

    def trained(self, steps: int) -> int:
        plan = self.plan
        return steps if plan is None else plan.in_the_model([0] * plan.size) // plan.size

    def reached(self, steps: int) -> int:
        plan = self.plan
        return steps if plan is None else round(self.minibatches(plan) / plan.size)

    def minibatches(self, plan: Plan) -> float:
        """Returns how many of `plan`'s minibatches are trained if all are as far as this worker."""
        of_block = min(1.0, self.open_steps() / max(int(self.due), 1))
        return plan.in_the_model([0] * plan.size) + of_block * self._dealt

    def position(self) -> dict[str, Json]:
        """Returns the position right after a sync, when no carried minibatch is trained.

        The minibatches with numbers below `minibatches` are trained, except those in `owed`: if
        `strategy.synchronize()` closes a block early, workers have not trained all of its own.
        """
        if self.plan is None:
            return {}
        owed = sorted((*self.plan.owed, *itertools.chain(*self.plan.carried)))
        first = self.plan.first
        while owed and owed[-1] == first - 1:
            first = owed.pop()
        return {"minibatches": first, "owed": owed, "devices": 1}

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Continues within an epoch; ValueError: steps are owed of workers with several devices."""
        owed = position.get("owed", ())
        if owed and position["devices"] != 1:
            raise ValueError(
                f"the checkpoint is of workers with {position['devices']} devices, in the middle "
                "of an epoch, and owes steps of them. Go on without balance= and with as many "
                "devices for each worker."
            )
        self._resumed = epoch, position["minibatches"], owed

    def get_state(self) -> Json:
        """Returns what the next shares depend on; at a sync it is the same on all workers."""
        return {
            "blocks": self._blocks,
            "seconds": self._seconds.tolist(),
            "changes": self._changes.tolist(),
            "shares": self._shares.tolist(),
        }

    def set_state(self, state: Json) -> None:
        """Continues from a state of `get_state`, unless it is of another number of workers."""
        assert isinstance(state, Mapping)
        workers = self._workers
        if len(state["seconds"]) == workers:
            self._blocks = state["blocks"]
            self._seconds, self._shares = np.array(state["seconds"]), np.array(state["shares"])
            self._changes = np.array(state.get("changes", [0.0] * workers))

    def regroup(self, state: Mapping[str, Any], former: Sequence[int], plan: Plan) -> None:
        """Continues by `plan` from a former member's `get_state()`, after members have changed.

        `former` are the task numbers of the workers in that state, by rank. A worker that is new
        counts as the slowest until it is measured. The block that is under way, and the first one
        of the plan, are not measured: their time includes the change.
        """
        places = {task: rank for rank, task in enumerate(former)}

        def of_tasks(values: Sequence[float]) -> Array:
            known = places if len(values) == len(former) else {}
            return np.array([values[places[t]] if t in known else 0 for t in plan.tasks])

        self._blocks, self._shares = state["blocks"], of_tasks(state["shares"])
        self._seconds, self._changes = of_tasks(state["seconds"]), of_tasks(state["changes"])
        self._unmeasured = 1 + any(plan.carried)
