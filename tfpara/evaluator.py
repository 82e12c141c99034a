"""Scores a run's checkpoints, in a process beside those that train."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfpara import files
from tfpara.algorithms import Average
from tfpara.algorithms.asgd import AsyncAverage
from tfpara.callbacks.held_out import checked_held_out, evaluate
from tfpara.callbacks.scalars import Scalars, flat
from tfpara.callbacks.table import Table
from tfpara.checkpoint import weights
from tfpara.checkpoint.base import store_at
from tfpara.checkpoint.store import CheckpointError, Store
from tfpara.cluster import exit_codes, parent
from tfpara.program import explain_errors
from tfpara.remote_files import RefusedError, is_url, whole
from tfpara.saved_model import writer
from tfpara.strategy import Strategy
from tfpara.typing import Data, Json
from tfpara.whole_number import checked_whole

_LOOK_SECONDS = 1.0  # pause between two looks for a new checkpoint
_PLACE = ("checkpoint", "mark", "epoch", "step", "weights")  # the first columns of the table
_REMOVED = "removed too early; a larger keep= of the run's callback keeps more"
_BEST: dict[str, Callable[..., Any]] = {"min": min, "max": max}


def evaluate_checkpoints(
    model: keras.Model,
    directory: str | os.PathLike[str],
    data: Data,
    out: str | os.PathLike[str],
    *,
    epochs: int,
    averages: Mapping[str, Average | AsyncAverage] | None = None,
    monitor: str = "loss",
    mode: str = "min",
    best: str | os.PathLike[str] | None = None,
    save: Callable[[keras.Model, Path], object] | None = None,
    wait_minutes: float = 60.0,
) -> list[dict[str, Json]]:
    """Scores each checkpoint of a run on held-out data, until the run has ended.

    Call it in a process of its own, which does not train (`tfpara.is_evaluator`). It reads the
    checkpoints of `Checkpoint` or `AsyncCheckpoint`. Training never waits for it. If this process
    is started again, it continues after the last checkpoint in the table.

    In `out` it writes

        scores.csv      a row for each checkpoint and model: number and mark of the checkpoint,
                        epochs and steps that are done, weights ("global" or an average), and loss
                        and metrics
        tensorboard/    the same for TensorBoard, by the number of the checkpoint
        best            the model with the best score so far (of equal scores, the first); it is
                        never visible half written

    Args:
        model: a model of the same architecture as the run's, without a strategy, compiled with loss
            and metrics.
        directory: directory of the run's checkpoints.
        data: held-out data, in any form that `tfpara.callbacks.HeldOut` takes.
        out: directory on this machine for the results of this evaluator alone.
        epochs: the `epochs` of the run's `fit`. The run has ended if a checkpoint has this number
            of epochs, or if training has stopped by itself.
        averages: those averages of the run's strategy that are scored as well.
        monitor: the score that decides which model is best, by its name in Keras' `evaluate`.
        mode: "min" if a lower score is better, "max" if a higher one is.
        best: path or URL of the best model. None: `best` in `out`.
        save: a function that writes the best model, called with the model and the path of a file or
            folder to write, which ends as `best` does. None: a SavedModel, as by `tfpara.export`;
            the model must then be Sequential, or made from inputs and outputs.
        wait_minutes: longest wait for a new checkpoint.

    Returns:
        The rows of the table.

    Raises:
        ValueError: an argument out of its range, a model of a strategy of tfpara, or one that is
            not built, or whose inputs are not known if there is no `save`; an unknown `monitor`; or
            a table in `out` that has other columns.
        tfpara.CheckpointError: there was no new checkpoint for `wait_minutes`; the checkpoints are
            of another model, lack an average, or are not those of the table; or another evaluator
            uses `out`.
    """
    if mode not in _BEST:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(_BEST)}.")
    if not wait_minutes > 0:
        raise ValueError(f"wait_minutes={wait_minutes!r} must be positive.")
    epochs = checked_whole("epochs", epochs)
    checked_held_out(data)
    if type(Strategy.of(model)) is not Strategy:
        raise ValueError(
            "the model was made in the scope of a strategy of tfpara, whose workers train it. "
            "Build it without one where tfpara.is_evaluator() is true."
        )
    # A model that is never called, such as a GAN, counts as not built, although its parts are.
    if not (model.built or model.trainable_variables):
        raise ValueError("the model has no weights yet. Call it on data, or build it, first.")
    explain_errors()
    if is_url(out):
        raise ValueError(
            f"out={out!r} must be a directory of this machine, for a table that grows."
        )
    out = Path(out)
    path = out / "best" if best is None else best
    if save is None:
        if not getattr(model, "inputs", None):
            raise ValueError(
                "the model does not say which inputs it has, so it cannot be written as a "
                "SavedModel. Give save=, a function that writes the best model, such as "
                'lambda model, path: model.save(path) with best="best.keras".'
            )
        writer(model, path)  # If the model cannot be exported, this raises ValueError at once.
    evaluator = _Evaluator(
        model, store_at(directory, keep=1), data, out, averages or {}, monitor, mode, path, save
    )
    with _locked(out), _sigterm() as leave_late:
        return evaluator.run(epochs, wait_minutes, leave_late)


@dataclasses.dataclass
class _Evaluator:
    """Scores checkpoints; the fields come from the arguments of `evaluate_checkpoints`."""

    _model: keras.Model
    _store: Store
    _data: Data
    _out: Path
    _averages: Mapping[str, Any]
    _monitor: str
    _mode: str
    _path: str | os.PathLike[str]
    _save: Callable[[keras.Model, Path], object] | None
    _last: int = 0  # number of the last checkpoint that was read or skipped

    def __post_init__(self) -> None:
        self._best_of = _BEST[self._mode]
        self._table = Table(self._out / "scores.csv", files.no_link)
        self._scalars = Scalars(self._out / "tensorboard")

    def run(
        self, epochs: int, wait_minutes: float, leave_late: Callable[[], None]
    ) -> list[dict[str, Json]]:
        """Scores checkpoints up to that of the last epoch; calls `leave_late` before each."""
        since, told, after = time.monotonic(), "", ""
        while True:
            leave_late()
            former, refused = self._last, ""
            position: dict[str, Json] | None = None
            try:
                number = self._next()
                if number is not None:
                    position = self._look(number)
            except RefusedError as error:
                refused = f"{self._store.directory} cannot be read ({error.strerror})"
                # EIO means that the storage has failed repeatedly, but perhaps only for a while.
                # After any other error, later tries would fail, too.
                if error.errno != errno.EIO:
                    raise CheckpointError(f"{refused}.") from error
                self._last, number = former, None
            if position is not None:
                since, told = time.monotonic(), ""
                after = f" after checkpoint {self._last} (epoch {position['epoch']} of {epochs})"
                if position["finished"] or position["epoch"] >= epochs:
                    _say(f"the run has ended; scores are in {self._table.path}")
                    return self._table.rows()
            elif number is None:
                what = f"new checkpoint{after} in {self._store.directory}"
                if time.monotonic() - since > 60 * wait_minutes:
                    raise CheckpointError(
                        f"there was no {what} for {wait_minutes:g} minutes. Either the "
                        "run has stopped, or it writes its checkpoints elsewhere or less often: in "
                        "the last case give a longer wait_minutes. Start this program again to "
                        "continue."
                    )
                waits = refused or f"waits for a {what}, at most {wait_minutes:g} minutes"
                if told != waits:
                    _say(waits)
                told = waits
                time.sleep(_LOOK_SECONDS)

    def _look(self, number: int) -> dict[str, Json] | None:
        """Scores a checkpoint; returns its position in the run, or None if it cannot be read."""
        try:
            manifest = self._store.read_manifest(number)
        except CheckpointError as error:
            self._leave_out(number, error)
            return None
        missing = self._missing(number, manifest)
        if missing and not self._score(number, manifest, missing):
            return None
        position: dict[str, Json] = dict(manifest["position"])
        if position["finished"]:
            # A `fit` that `stop_training` has ended marks its last checkpoint as finished. But the
            # script may then call `fit` again. If a later checkpoint exists, the script has done
            # so, and this checkpoint is not the end of the run.
            position["finished"] = number >= max(self._store.numbers(), default=number)
        return position

    def _next(self) -> int | None:
        """Returns the number of the next checkpoint, or None; may raise CheckpointError."""
        numbers = self._store.numbers()
        if numbers and max(numbers) < self._last:
            raise CheckpointError(
                f"{self._store.directory} had a checkpoint {self._last}, and its newest one is now "
                f"{max(numbers)}: they are of another run. Give another out=, or remove "
                f"{self._out}."
            )
        new = [number for number in numbers if number > self._last]
        if not new:
            return None
        former, self._last = self._last, min(new)
        if 0 < former < self._last - 1:
            _say(f"checkpoints {former + 1} to {self._last - 1} are not scored: {_REMOVED}")
        return self._last

    def _leave_out(self, number: int, error: Exception) -> None:
        there = number in self._store.numbers()
        why = " ".join(str(error).split())[:300] if there else _REMOVED
        _say(f"checkpoint {number} is not scored: {why}")

    def _missing(self, number: int, manifest: Mapping[str, Json]) -> list[str]:
        """Returns the models of a checkpoint that the table lacks; may raise CheckpointError."""
        rows = [row for row in self._rows() if row["checkpoint"] == str(number)]
        if any(row["mark"] != _mark(manifest) for row in rows):
            raise CheckpointError(
                f"{self._table.path} has scores of a checkpoint {number} that is not the one in "
                f"{self._store.directory}: they are of another run. Give another out=, or remove "
                f"{self._out}."
            )
        there = {row["weights"] for row in rows}
        return [name for name in ("global", *self._averages) if name not in there]

    def _score(self, number: int, manifest: Mapping[str, Json], names: Sequence[str]) -> bool:
        """Scores some models of a checkpoint; returns False if it could not be read."""
        averages = {name: a for name, a in self._averages.items() if name in names}
        weights.check(self._store, number, manifest, self._model, averages)
        try:
            found = weights.read(self._store, number, manifest, self._model, averages)
        except RefusedError:
            raise  # The store has failed. The checkpoint itself may be good, so it is not left out.
        except (CheckpointError, OSError, tf.errors.OpError) as error:
            self._leave_out(number, error)
            return False
        finally:
            self._store.drop_copies()
        best, rows = self._best(), []
        for name in names:
            found.put_into(self._model, name)
            scores = {k: float(v) for k, v in flat(evaluate(self._model, self._data)).items()}
            if self._monitor not in scores:
                raise ValueError(
                    f"monitor={self._monitor!r} is no score of this model. There are: "
                    f"{', '.join(scores)}."
                )
            place = {
                "checkpoint": number,
                "mark": _mark(manifest),
                "epoch": manifest["position"]["epoch"],
                "step": manifest["position"].get("steps", 0),
                "weights": name,
            }
            rows.append({**place, **scores})
            score = scores[self._monitor]
            is_best = not math.isnan(score) and (best is None or self._best_of(best, score) != best)
            if is_best:
                best = score
                self._keep()
            told = ", ".join(f"{key} {value:.6g}" for key, value in scores.items())
            note = f"; the best so far, in {self._path}" if is_best else ""
            _say(f"checkpoint {number}, {name}: {told}{note}")
        by_name = {f"{r['weights']}/{k}": r[k] for r in rows for k in r if k not in _PLACE}
        self._scalars.write(number, by_name)
        parent.tell_progress({"scores": {"checkpoint": number, **by_name}})
        # The table's rows are written last. So if this process is killed before that, the next
        # evaluator scores the checkpoint again.
        there, columns = self._rows(), list(rows[0])
        if there and list(there[0]) != columns:
            raise ValueError(
                f"{self._table.path} has the columns {', '.join(there[0])}, and the model now has "
                f"the scores {', '.join(columns[len(_PLACE) :])}. Compile it as before, or give "
                "another out=."
            )
        self._table.add(rows)
        return True

    def _rows(self) -> list[dict[str, Json]]:
        """Returns the rows of the table; raises ValueError if the file is another table."""
        rows = self._table.rows()
        if rows and list(rows[0])[: len(_PLACE)] != list(_PLACE):
            raise ValueError(
                f"{self._table.path} has the columns {', '.join(map(str, rows[0]))}, so it is no "
                "table of an evaluator. Give another out=."
            )
        return rows

    def _keep(self) -> None:
        """Replaces the best model by the present one."""
        if self._save is None:
            writer(self._model, self._path)()
            return
        with whole(self._path) as place:
            self._save(self._model, place)

    def _best(self) -> float | None:
        """Returns the best score in the table, None if there is none."""
        scores = (float(row.get(self._monitor, "nan")) for row in self._rows())
        best: float | None = self._best_of((s for s in scores if not math.isnan(s)), default=None)
        return best


def _say(text: str) -> None:
    print(f"tfpara: {text}", flush=True)


def _mark(manifest: Mapping[str, Json]) -> str:
    """Returns digits that tell a checkpoint from other runs' checkpoints of the same number."""
    return min(str(each["sha256"]) for each in manifest["files"].values())[:8]


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """A context in which no other process is the evaluator of `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "a+", opener=files.no_link) as file:
        try:
            # Unlike a lock by `flock`, this lock does not pass to the processes that this one forks
            # to read data.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # NFS raises PermissionError for a held lock
            file.seek(0)
            raise CheckpointError(
                f"{out} is in use by another evaluator ({file.read(200) or 'an unknown process'}). "
                "One is enough: end it first, or give this one another out=."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextlib.contextmanager
def _sigterm() -> Iterator[Callable[[], None]]:
    """A context in which SIGTERM ends the program with the exit code that asks for a restart.

    Python drops exceptions that a `__del__` raises. So if SIGTERM comes during a `__del__`, the
    program ends only at the next call of the function that this context yields.
    """
    code, asked = exit_codes.restart(), False

    def leave(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        raise SystemExit(code)

    def leave_late() -> None:
        if asked:
            raise SystemExit(code)

    if threading.current_thread() is not threading.main_thread():
        yield leave_late
        return
    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield leave_late
    finally:
        signal.signal(signal.SIGTERM, former)
