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

    Adds to each epoch's log, on every worker, `samples_per_second` of all replicas; with a
    `PeriodicSyncStrategy` also `syncs`, `sync_ms`, `sync_fraction`, `wait_fraction` and `distance`,
    and in an elastic run `workers`; with an `AsyncStrategy` also `pushes`, `staleness` (of which
    `log_dir` gets a histogram) and `staleness_max`. docs/watching.md explains them.

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
        # The last epoch's measurements are written now, because `super().on_epoch_begin` clears
        # them.
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
            self._scalars.write_histogram(epoch, "staleness", np.arange(len(counts)), counts)
