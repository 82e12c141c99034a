"""A callback that writes speed and scores of a run for TensorBoard."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfpara import fit_call
from tfpara.callbacks.base import Callback
from tfpara.callbacks.scalars import Scalars
from tfpara.sync.one_sync.statistics import SyncStatistics
from tfpara.typing import Logs


class Telemetry(Callback):
    """Measures the training and writes scalars that TensorBoard reads.

    Adds to each epoch's log, on every worker:

    * `samples_per_second`, of all replicas, from the end of the epoch's first step (which may
      compile) to the end of its last sync, without what `HeldOut` scores at the epoch's end;
    * with a `PeriodicSyncStrategy`: `sync_ms`, mean time of a sync in milliseconds, including the
      wait for slower workers; `sync_fraction`, the share of the time in syncs; `distance`, the
      relative distance ‖w_i − w̄‖ / ‖w̄‖ of the replicas before a sync, as it was measured last:
      at each of the first 16 syncs, then at every 16th; in an elastic run `workers`, their number
      at the end of the epoch;
    * with an `AsyncStrategy`: `pushes`, the number in the epoch; `staleness`, the mean of the
      pushes' staleness; `staleness_max`, the largest so far (255 stands for 255 or more). The whole
      distribution is a histogram in `log_dir`.

    The chief writes these and everything else in the epoch's log to `log_dir`.
    It runs before other callbacks, so that its clock stops before they work.

    Args:
        log_dir: directory of the event files. None: only the epoch's log.
        samples_per_epoch: samples of an epoch, of all replicas. None: the strategy counts them.
            TensorFlow's own strategies do not count; without a number there is no speed then.
    """

    order = fit_call.Order.CLOCK

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, samples_per_epoch: int | None = None
    ) -> None:
        super().__init__()
        self._scalars = Scalars(log_dir)
        self._samples_per_epoch = samples_per_epoch
        self._unwritten: tuple[int, Logs] | None = None
        self._first: _Mark | None = None
        self._begin: Any = None  # the strategy's counts where the epoch began
        self._staleness: NDArray[np.int64] | None = None  # pushes of the last epoch by staleness
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._write()
        self._first = None
        self._begin = self._strategy.statistics_of(self.model)
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps = batch + 1
        if self._first is None:
            self._first = self._mark()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is None or self._first is None:
            return
        logs.update(self._measured(self._first, self._mark()))
        # The log is written later, when the callbacks after this one have added their entries.
        self._unwritten = (epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._write()

    def _mark(self) -> _Mark:
        seconds = time.perf_counter()
        return _Mark(seconds, self._steps, self._strategy.statistics_of(self.model))

    def _measured(self, first: _Mark, last: _Mark) -> dict[str, float]:
        seconds = max(last.seconds - first.seconds, 1e-9)
        before, after = first.statistics, last.statistics
        rest = (self._steps - first.step) / max(self._steps, 1)  # share of the epoch measured
        if self._samples_per_epoch is not None:
            samples = rest * self._samples_per_epoch
        elif before is not None and after is not None:
            # PeriodicSyncStrategy counts the samples of this worker, AsyncStrategy those of all.
            share = self._strategy.num_workers if isinstance(after, SyncStatistics) else 1
            samples = (after.samples - before.samples) * share
        else:
            return {}
        measured = {"samples_per_second": samples / seconds} if samples else {}
        if isinstance(before, SyncStatistics) and isinstance(after, SyncStatistics):
            waited = after.sync_seconds - before.sync_seconds
            measured["sync_ms"] = 1000.0 * waited / max(after.syncs - before.syncs, 1)
            measured["sync_fraction"] = waited / seconds
            measured["distance"] = after.distance
            if self._strategy.members_change:
                measured["workers"] = float(self._strategy.num_workers)
        elif before is not None and after is not None:
            # Workers push many times before the first batch hook.
            counts = after.staleness - self._begin.staleness
            measured["pushes"] = float(counts.sum())
            measured["staleness"] = float(counts @ np.arange(len(counts)) / max(counts.sum(), 1))
            measured["staleness_max"] = float(np.flatnonzero(after.staleness).max(initial=0))
            self._staleness = counts
        return measured

    def _write(self) -> None:
        if self._unwritten is None:
            return
        epoch, logs = self._unwritten
        self._unwritten = None
        if self._strategy.is_chief:
            self._scalars.write(epoch, logs)
            if self._staleness is not None:
                values = np.arange(len(self._staleness))
                self._scalars.write_histogram(epoch, "staleness", values, self._staleness)


class _Mark(NamedTuple):
    """A moment of training: the clock, steps of the epoch so far, the strategy's counts."""

    seconds: float
    step: int
    statistics: Any
