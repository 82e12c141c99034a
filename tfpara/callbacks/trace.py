"""A callback that records a timeline of some training steps."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpara import files, fit_call
from tfpara.callbacks import timeline
from tfpara.cluster.call_site import Purpose
from tfpara.sync.keras import hooks
from tfpara.typing import Logs
from tfpara.whole_number import checked_whole

# The number of steps to record before and after the end of the second sync. (The first sync is not
# typical, since it compiles.)
_BEFORE, _AFTER = 20, 5


class Trace(fit_call.Callback):
    """Records some steps with TensorFlow's profiler and writes a timeline of all workers.

    `log_dir/timeline.json` (written by the chief at the end of `fit`) opens in chrome://tracing or
    ui.perfetto.dev. It has a process for each worker, and in each process these rows:

    * step: minibatches, as Keras runs them, syncs included;
    * check: whether the weights are finite, at a sync; wait: for the other workers, which for a
      small model includes the exchange of its weights;
    * pack: the weights into buckets; reduce: their exchange;
    * rule: the rule and the averages; unpack: the weights from the buckets.

    `log_dir/worker-K` has all operations that the profiler recorded, for TensorBoard's profile
    plugin.

    Workers on several machines are aligned by their clocks. Recorded steps are some percent slower.
    Each `fit` makes one recording. All workers must have this callback.

    Args:
        log_dir: the folder; created if its parent exists.
        steps: first and last step to record, counted by each worker from 0 at the start of `fit`.
            None: up to 20 steps before the end of the second sync and 5 after it; without syncs,
            steps 10 to 29.

    Raises:
        ValueError: `steps` is not a first and a last step.
        FileNotFoundError: the folder's parent does not exist.
        NotADirectoryError: there is a file of that name.
        PermissionError: the folder, or its parent, is not writable.
    """

    order = fit_call.Order.CLOCK
    not_elastic = "all workers trace the same steps, and one that comes later takes others."

    def __init__(
        self, log_dir: str | os.PathLike[str], steps: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self._log_dir = _writable(Path(log_dir))
        self._steps = None if steps is None else _checked(steps)
        self._mark: Any = None
        self._recording = False
        hooks.watch_fit()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._first, self._last = self._steps or (10, 29)
        period = self._strategy.sync_period
        if not self._steps and period is not None:
            self._first, self._last = max(1, 2 * period - _BEFORE), 2 * period + _AFTER - 1
        self._spans: list[timeline.Span] | None = None
        self._before = self._done = 0
        fit_call.at_end(self._give_up)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._before = self._done

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        step = self._before + batch
        if not self._recording and self._spans is None and step >= self._first:
            self._start()
        if self._recording:
            # The profiler has a clock of its own. `clock_ns` is the machine's time at the beginning
            # of the step. `timeline.spans` compares it with the profiler's time, and so finds the
            # difference between the clocks.
            self._mark = tf.profiler.experimental.Trace(
                timeline.STEP, step=step, clock_ns=time.time_ns()
            )
            self._mark.__enter__()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._done = self._before + batch + 1
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self._recording and self._done > self._last:
            self._stop()

    def _give_up(self) -> None:
        """Frees the profiler if `fit` has failed, since a process has only one."""
        self._mark = None
        if self._recording:
            self._recording = False
            tf.profiler.experimental.stop(save=False)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._recording:
            self._stop()
        if self._spans is None:
            warnings.warn(
                f"nothing was traced: this worker took {self._done} steps, and step {self._first} "
                f"was to be the first one (counted from 0). Choose steps= lower.",
                stacklevel=2,
            )
        strategy = self._strategy
        found = strategy.everyones(self._spans or [], Purpose("writing a trace"))
        if strategy.is_chief:
            names = {f"worker {rank}": spans for rank, spans in enumerate(found)}
            with files.whole(self._log_dir / "timeline.json") as place:
                place.write_text(json.dumps(timeline.chrome_trace(names)))

    def _start(self) -> None:
        self._worker_dir = self._log_dir / f"worker-{self._strategy.worker_index}"
        try:
            tf.profiler.experimental.start(os.fspath(self._worker_dir))
        except tf.errors.AlreadyExistsError as error:
            raise ValueError(
                "TensorFlow's profiler is running already, and there is one in a process. Use "
                "either Trace or profile_batch= of keras.callbacks.TensorBoard."
            ) from error
        self._recording = True

    def _stop(self) -> None:
        self._recording = False
        tf.profiler.experimental.stop()
        self._spans = timeline.spans(timeline.read(self._worker_dir))


def _checked(steps: tuple[int, int]) -> tuple[int, int]:
    if len(steps) != 2:
        raise ValueError(
            f"steps={steps!r} must be the first and the last step to record, such as (100, 120)."
        )
    first = checked_whole("steps[0]", steps[0], at_least=0)
    return first, checked_whole("steps[1]", steps[1], at_least=first)


def _writable(folder: Path) -> Path:
    parent = folder.absolute().parent
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"log_dir={folder} is a file; a trace needs a folder.")
    if not parent.is_dir():
        raise FileNotFoundError(f"log_dir={folder}: there is no folder {parent}. Make it first.")
    place = folder if folder.exists() else parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"log_dir={folder}: {place} may not be written. Choose another.")
    folder.mkdir(exist_ok=True)
    return folder
