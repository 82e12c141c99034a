"""Checkpoints of what the parameter servers hold, and going on from them."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpara import fit_call
from tfpara.callbacks.checkpointing import Preempted
from tfpara.checkpoint.run import (
    IF_DAMAGED,
    UNREADABLE,
    check_run,
    collected,
    give_state,
    taken_up,
    unreadable,
)
from tfpara.checkpoint.store import CheckpointError, Store
from tfpara.checks import versions
from tfpara.cluster import exit_codes, parent
from tfpara.strategy import Strategy
from tfpara.typing import Json, Logs
from tfpara.whole_number import checked_whole

# Variables that older checkpoints do not have. They lack frozen weights, too.
_LATER = ("books/minibatches", "local_rate")
_FROZEN = "frozen/"
_FIELDS = {"position.within": bool}  # the manifest's further keys
_SENTENCE = "the chief was asked to end, and has written a checkpoint; start all processes again."


class AsyncCheckpoint(keras.callbacks.Callback):
    """Writes checkpoints of an asynchronous run, goes on from the newest, and leaves on SIGTERM.

    A checkpoint has the state of the parameter servers (weights, the optimizer's slots, averages,
    counters, and how far each chunk of the epoch is), the frozen weights and the states of
    callbacks. It is written at the end of each epoch, and within epochs if asked; workers pause
    meanwhile, between two pushes. A program that is started again goes on there. It must have as
    many parameter servers and chunks as before, and within an epoch the same minibatches, but may
    have any number of workers. If that number changes, give `fit` the number of `chunks`, which
    otherwise depends on it. The workers' own state is not kept: their models (AsyncEASGD) begin
    with the servers', and their optimizers (all rules but ASGD) without momentum or moments.

    On SIGTERM in the chief, or in a parameter server, a checkpoint is written and `Preempted` ends
    the program with exit code 75, or TFPARA_RESTART_EXIT_CODE. No worker is needed for it, so that
    all processes may get SIGTERM at once: all end with this code. A worker that alone gets SIGTERM
    ends with it, too, and the others go on. SIGTERM again changes nothing. The callback runs after
    all others, and so has what they have done.

    Args:
        directory: folder of the checkpoints; nothing else may write there.
        every_minutes: also writes one within an epoch after so many minutes. None: only at its end.
        keep: how many checkpoints stay.
        if_damaged: what to do if there are checkpoints but none is whole: "refuse", or "start" from
            the beginning.
        data_plan: facts about the data and settings that a resumed run must share, by name.

    Raises:
        ValueError: a value outside its range; at the start of `fit`, a model of another strategy.
        tfpara.CheckpointError: at the start of `fit`: the directory belongs to another run, is in
            use or damaged; later: it cannot be written to (the earlier checkpoints are intact).
    """

    order = fit_call.Order.SAVES

    async_safe = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_minutes: float | None = None,
        keep: int = 3,
        if_damaged: str = "refuse",
        data_plan: Mapping[str, Json] | None = None,
    ) -> None:
        super().__init__()
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes={every_minutes!r} must be positive, or None.")
        keep = checked_whole("keep", keep, of="checkpoints")
        if if_damaged not in IF_DAMAGED:
            raise ValueError(f"if_damaged={if_damaged!r} is not one of {', '.join(IF_DAMAGED)}.")
        self._store = Store(directory, keep, _FIELDS)
        self._every_minutes = every_minutes
        self._if_damaged = if_damaged
        self._plan = dict(data_plan or {})
        self._number = 0
        self._saved_at = time.monotonic()
        self._saved_generation = 0  # of the servers' model
        self._saved_epoch = -1  # the epoch with which the last checkpoint goes on; -1 if unknown
        self._exit_code = exit_codes.restart()
        self._former_handler: Callable[..., object] | int | None = None

    # -- hooks -----------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if Strategy.of(self.model).running is None:
            raise ValueError(
                "AsyncCheckpoint works in the fit of a tfpara.AsyncStrategy. With others, use "
                "tfpara.callbacks.Checkpoint."
            )
        self._store.lock()
        self._store.mark = secrets.token_hex(4)
        try:
            self._number = max(self._store.numbers(), default=0)
            self._restore()
        except BaseException:
            self._store.release()
            raise
        fit_call.at_end(self._stand_down)
        self._running.at_poll = self._look
        self.model.distribute_strategy.answer_leaving(self._exit_code)
        if threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGTERM, self._terminate)
        self._saved_at = time.monotonic()
        self._saved_generation = self._running.server.generation
        self._saved_epoch = self._running.epoch

    def _look(self) -> None:
        """Writes a checkpoint while workers train, if one is due."""
        minutes = (time.monotonic() - self._saved_at) / 60.0
        if self._asked_to_end or minutes > (self._every_minutes or float("inf")):
            with self._running.paused():
                self._save(self._running.epoch, within=True)
                self._leave_if_asked()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        # The last epoch's checkpoint has what other callbacks do in on_train_end.
        if not self._running.is_over:
            self._save(epoch + 1)
            self._leave_if_asked()

    def on_train_end(self, logs: Logs | None = None) -> None:
        strategy, running = self.model.distribute_strategy, self._running
        strategy.write(self.model)
        saved = (self._saved_epoch, self._saved_generation)
        if saved != (running.epoch, running.server.generation):
            self._save(running.epoch, finished=bool(self.model.stop_training))
        self._leave_if_asked()
        self._stand_down()

    def _stand_down(self) -> None:
        if self._former_handler is not None:
            signal.signal(signal.SIGTERM, self._former_handler)
            self._former_handler = None
        if not self._asked_to_end:
            self.model.distribute_strategy.answer_leaving(None)
        self._store.release()

    # -- saving ----------------------------------------------------------------------------------

    @property
    def _running(self) -> Any:
        return self.model.distribute_strategy.running

    @property
    def _asked_to_end(self) -> bool:
        return self.model.distribute_strategy.asked_to_end is not None

    def _save(self, epoch: int, *, within: bool = False, finished: bool = False) -> None:
        self.model.distribute_strategy.write(self.model)  # what callbacks before this one have set
        self._running.follow_rate()
        self._number += 1
        number = self._number
        manifest = {
            "run": self._of_a_run(),
            "data": self._running.data_facts,
            "versions": versions(),
            "workers": 1,  # how many processes write the checkpoint
            "position": {
                "epoch": epoch,
                "within": within,
                "finished": finished,
                "order": self._running.order,
            },
            "learning_rate": self._rate(),
            "states": collected(self.model.distribute_strategy.states),
        }
        try:
            self._store.begin(number)
            tensors = {name: tf.identity(held) for name, held in self._variables().items()}
            manifest["files"] = self._store.write_part(number, 0, tensors)
            self._store.commit(number, manifest)
        except CheckpointError:
            self._store.abandon(number)
            raise
        self._saved_at = time.monotonic()
        self._saved_generation = self._running.server.generation
        self._saved_epoch = epoch

    def _variables(self) -> dict[str, tf.Variable]:
        """Returns what a checkpoint holds: the servers' variables, and the frozen weights."""
        running = self._running
        frozen = {f"{_FROZEN}{k}": v.value for k, v in enumerate(running.work.frozen)}
        return {**running.server.variables(), **frozen}

    def _rate(self) -> float | None:
        rate = self.model.optimizer.learning_rate
        return float(rate) if isinstance(rate, keras.Variable) else None

    def _of_a_run(self) -> dict[str, Json]:
        strategy, model = self.model.distribute_strategy, self.model
        shapes = [f"{tuple(v.shape)} {v.dtype}" for v in model.trainable_variables]
        return {
            "rule": repr(strategy.rule_of_a_run),
            "sync_period": strategy.sync_period,
            "averages": {name: repr(a) for name, a in strategy.averages.items()},
            "parameter servers": len(self._running.server.shards),
            "chunks": self._running.num_chunks,
            "model": "; ".join(shapes),
            "optimizer": type(model.optimizer).__name__,
            **{f"data_plan.{key}": value for key, value in self._plan.items()},
        }

    # -- going on --------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Goes on from the newest checkpoint that is whole, if there is one."""
        problems = []
        for number in self._store.numbers():
            try:
                manifest = self._store.read_manifest(number)
                self._store.check(number, manifest)
            except CheckpointError as error:
                warnings.warn(f"{error}; trying the checkpoint before it.", stacklevel=2)
                problems.append(str(error))
                self._store.damaged.add(number)
                continue
            try:
                self._check_run(number, manifest)
                self._load(number, manifest)
            except UNREADABLE as error:
                raise unreadable(self._store.path(number), error) from error
            return
        if problems and self._if_damaged == "refuse":
            raise CheckpointError(
                f"no checkpoint in {self._store.directory} can be used: {'; '.join(problems)}. To "
                'train from the beginning, remove the directory or give if_damaged="start".'
            )

    def _check_run(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Refuses a checkpoint of other settings or, within an epoch, of other minibatches."""
        theirs, mine = dict(manifest["run"]), self._of_a_run()
        if manifest["position"]["within"] and "data" in manifest:  # older ones do not have it
            theirs |= manifest["data"]
            mine |= self._running.data_facts
        check_run(self._store.path(number), {**manifest, "run": theirs}, mine, versions())

    def _load(self, number: int, manifest: Mapping[str, Json]) -> None:
        (reader,) = self._store.readers(number, manifest)
        held = self._variables()
        there = reader.get_variable_to_shape_map()
        self._check_shapes(number, there, {name: list(v.shape) for name, v in held.items()})
        for name, variable in held.items():
            if name in there:
                variable.assign(reader.get_tensor(name))
            elif name in _LATER:
                variable.assign(self._missing(name, manifest))
        for name, state in manifest["states"].items():
            holder = self.model.distribute_strategy.states.get(name)
            if holder is not None:
                give_state(name, holder, state)
        if manifest["learning_rate"] is not None:
            self.model.optimizer.learning_rate = manifest["learning_rate"]
        # Older checkpoints do not have the order of the chunks, which was that of the seed alone.
        position = {"order": [self.model.distribute_strategy.seed], **manifest["position"]}
        self._running.resume(**position)
        where = ", within it" if position["within"] else ""
        epochs = self.params.get("epochs", 1)
        print(taken_up(self._store.directory, number, position, where, epochs), flush=True)

    def _check_shapes(
        self, number: int, there: Mapping[str, Json], mine: Mapping[str, Json]
    ) -> None:
        """Refuses a checkpoint whose model, metrics or optimizer have other variables."""
        later = {name for name in mine if name in _LATER or name.startswith(_FROZEN)}
        for name in sorted({*there, *mine} - (later - {*there})):
            theirs, own = there.get(name, "none"), mine.get(name, "none")
            if theirs != own:
                raise CheckpointError(
                    f"{self._store.path(number)} is of another run: its variable {name!r} has the "
                    f"shape {theirs}, and here {own}. Resume with the same model, metrics and "
                    "optimizer, or give this run a directory of its own."
                )

    def _missing(self, name: str, manifest: Mapping[str, Json]) -> Any:
        """Returns the value of a variable that older checkpoints do not have.

        The workers' learning rate is that of the servers.
        """
        pushes = self._running.server.first.version  # restored before
        return {
            "local_rate": manifest["learning_rate"],
            # The true number is lower if some chunk's last push was of fewer minibatches.
            "books/minibatches": pushes * self.model.distribute_strategy.sync_period,
        }[name]

    # -- SIGTERM ---------------------------------------------------------------------------------

    def _terminate(self, number: int, frame: object) -> None:
        del number, frame
        self.model.distribute_strategy.ask_to_end("the chief was asked to end (SIGTERM).")
        parent.tell(saves=True)

    def _leave_if_asked(self) -> None:
        if not self._asked_to_end:
            return
        self.model.distribute_strategy.end_with(self._exit_code, _SENTENCE)
        print(
            f"Asked to end: checkpoint written, exit code {self._exit_code}. Start the program "
            "again to go on.",
            flush=True,
        )
        self._store.release()
        raise Preempted(self._exit_code)
