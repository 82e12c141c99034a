"""A callback that writes speed and scores of a run for TensorBoard."""

from __future__ import annotations

import os

import numpy as np

from tfpara.callbacks.scalars import Scalars
from tfpara.clock import Clock
from tfpara.typing import Logs


class Telemetry(Clock):
    """Measures the training, for the epoch's log and for TensorBoard.

    `keras.callbacks.TensorBoard` shows the same numbers without this callback, but does not put
    them into the log. Use `Telemetry` to have the numbers in `History` and in CSV files.

    Adds to each epoch's log, on every worker:

    * `samples_per_second` of all replicas, from the end of the epoch's first step (which may
      compile) to the end of its last sync, without the time of `HeldOut` at the end of the epoch;
    * with a `PeriodicSyncStrategy`: `syncs`, the number in the epoch; `sync_ms`, the mean time of a
      sync in milliseconds, including the wait for slower workers; `sync_fraction`, the share of the
      time in syncs; `wait_fraction`, the share of the time in which the worker waits for slower
      ones; `distance`, the relative distance ‖w_i − w̄‖ / ‖w̄‖ of the replicas before a sync, as it
      was measured last (at each of the first 16 syncs, then at every 16th); in an elastic run
      `workers`, their number at the end of the epoch;
    * with an `AsyncStrategy`: `pushes`, the number in the epoch; `staleness`, the mean of the
      pushes' staleness; `staleness_max`, the largest so far (255 stands for 255 or more). The whole
      distribution is the histogram `staleness_distribution` in `log_dir`.

    The chief writes these and everything else in the epoch's log to `log_dir`. The callback runs
    before others, so that its clock stops before they work.

    Args:
        log_dir: directory of the event files. None: only the epoch's log.
        samples_per_epoch: samples of an epoch, of all replicas. None: the strategy counts them.
            TensorFlow's own strategies do not count, so they need it for a speed.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, samples_per_epoch: int | None = None
    ) -> None:
        super().__init__(samples_per_epoch)
        self._scalars = Scalars(log_dir)
        self._unwritten: tuple[int, Logs] | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        # The measurements of the epoch before are written now, because `super().on_epoch_begin`
        # clears them.
        self._write()
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None and self.measured:
            logs.update(self.measured)
            # The logs are written later, since callbacks that run after this one add entries.
            self._unwritten = (epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._write()

    def _write(self) -> None:
        if self._unwritten is None:
            return
        epoch, logs = self._unwritten
        self._unwritten = None
        if not self._strategy.is_chief:
            return
        self._scalars.write(epoch, logs)
        if "staleness" in self.measured:
            counts = self.end.staleness - self.begin.staleness
            # The histogram has its own name, because under one name TensorBoard shows either
            # scalars or histograms, but not both.
            self._scalars.write_histogram(
                epoch, "staleness_distribution", np.arange(len(counts)), counts
            )
