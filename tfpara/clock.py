"""Measures each epoch's speed and syncs, and shows them in TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import keras

from tfpara import fit_call
from tfpara.typing import Logs

VARIABLE = "TFPARA_TENSORBOARD"


class Clock(fit_call.Callback):
    """Measures each epoch, from the end of its first step, which may compile, to its last sync.

    The clock runs before other callbacks, so that it stops before they work. It reads the
    strategy's counts when an epoch begins, after the first step, and at the end, but not in each
    step. If `samples_per_epoch`, of all replicas, is None, the strategy counts them.
    """

    order = fit_call.Order.CLOCK

    def __init__(self, samples_per_epoch: int | None = None) -> None:
        super().__init__()
        # The measured numbers of the last epoch, by name; empty if nothing could be measured.
        self.measured: dict[str, float] = {}
        self._samples_per_epoch = samples_per_epoch
        # The strategy's counts at the beginning and at the end of the last epoch.
        self.begin: Any = None
        self.end: Any = None
        self._first: tuple[float, int, Any] | None = None
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.measured = {}
        self._first = None
        self.begin = self._strategy.statistics_of(self.model)
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps = batch + 1
        if self._first is None:
            self._first = self._mark()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._first is not None:
            self.measured = self._since(*self._first)

    def _mark(self) -> tuple[float, int, Any]:
        """Returns the time, the epoch's steps so far, and the strategy's counts."""
        return time.perf_counter(), self._steps, self._strategy.statistics_of(self.model)

    def _since(self, began: float, first_step: int, first_counts: Any) -> dict[str, float]:
        now, _, self.end = self._mark()
        seconds = max(now - began, 1e-9)
        strategy = self._strategy
        measured: dict[str, float] = {}
        if self.end is not None:
            times = strategy.num_replicas / len(strategy.local_replica_ids)
            measured = self.end.of_epoch(self.begin, first_counts, seconds, times)
            if strategy.company.changes:
                measured["workers"] = float(strategy.num_workers)
        if self._samples_per_epoch is not None:
            # The measurement begins at the first call of `on_train_batch_end`. `rest` is the share
            # of the epoch's steps that come after this call.
            rest = (self._steps - first_step) / max(self._steps, 1)
            measured["samples_per_second"] = rest * self._samples_per_epoch / seconds
        if not measured.get("samples_per_second"):
            measured.pop("samples_per_second", None)
        return measured


class BoardClock(Clock):
    """Adds its measurements to what the TensorBoard callbacks (`boards`) of a `fit` write.

    `History`, CSV files and other callbacks get the same logs as under plain Keras.
    """

    def __init__(self, boards: Sequence[keras.callbacks.TensorBoard]) -> None:
        super().__init__()
        self._boards = boards

    def on_train_begin(self, logs: Logs | None = None) -> None:
        for board in self._boards:
            self._attach(board)

    def _attach(self, board: keras.callbacks.TensorBoard) -> None:
        hook = board.on_epoch_end
        own = "on_epoch_end" in vars(board)

        def on_epoch_end(epoch: int, logs: Logs | None = None) -> None:
            # If a metric in `logs` has the same name as a measurement, TensorBoard shows the
            # metric. So no measurement hides a metric of the user.
            hook(epoch, {**self.measured, **(logs or {})})

        board.on_epoch_end = on_epoch_end
        fit_call.at_end(
            lambda: setattr(board, "on_epoch_end", hook) if own else delattr(board, "on_epoch_end")
        )


def for_tensorboard(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks; puts a clock first if there is a TensorBoard, but no clock yet.

    TFPARA_TENSORBOARD=0 in the environment prevents that.
    """
    boards = [each for each in callbacks if isinstance(each, keras.callbacks.TensorBoard)]
    timed = any(isinstance(each, Clock) for each in callbacks)
    if not boards or timed or os.environ.get(VARIABLE) == "0":
        return list(callbacks)
    return [BoardClock(boards), *callbacks]
