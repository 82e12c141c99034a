"""Checkpoints of the parameter servers' state, and resuming from them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfpara import fit_call
from tfpara.callbacks.checkpoint_base import CheckpointBase, Preempted
from tfpara.checkpoint.servers import ServerCheckpoints
from tfpara.cluster import parent
from tfpara.typing import Json, Logs

_SENTENCE = "the chief was asked to end, and has written a checkpoint; start all processes again."


class AsyncCheckpoint(CheckpointBase):
    """Writes checkpoints of an asynchronous run, resumes from the newest, and handles SIGTERM.

    A checkpoint has the state of the parameter servers, the frozen weights and the states of
    callbacks, but not the workers' own state. It is written at the end of each epoch, and within
    epochs if requested. A restarted program continues from the newest checkpoint. It must have as
    many parameter servers and chunks as before, and within an epoch the same minibatches, but may
    have any number of workers. If that number changes, give `fit` the number of `chunks`, which
    otherwise depends on it. docs/parameter_server.md says more.

    On SIGTERM in the chief, or in a parameter server, the chief writes a checkpoint, and
    `Preempted` ends the program with exit code 75, or TFPARA_RESTART_EXIT_CODE. The callback runs
    after all others, so the checkpoint includes their work.

    Args:
        directory: folder of the checkpoints; nothing else may write there. A path, or a URL that
            fsspec knows, such as s3://bucket/run.
        every_minutes: minutes between further checkpoints within an epoch. None: no checkpoints
            within an epoch.
        keep: number of checkpoints that are kept.
        if_damaged: what to do if there are checkpoints but all are damaged: "refuse", or "start"
            from the beginning.
        data_plan: facts about the data and settings that a resumed run must share, by name.

    Raises:
        ImportError: the directory is a URL, and fsspec or its package for it is not installed.
        ValueError: a value outside its range, or no URL that fsspec knows; at the start of
            `fit`, a model of another strategy.
        tfpara.CheckpointError: at the start of `fit`: the directory belongs to another run, is in
            use or damaged; later: it cannot be written to (the earlier checkpoints are intact).
    """

    _checkpoints: ServerCheckpoints  # the checkpoints of the present call of `fit`

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_minutes: float | None = None,
        keep: int = 3,
        if_damaged: str = "refuse",
        data_plan: Mapping[str, Json] | None = None,
    ) -> None:
        super().__init__(directory, every_minutes, keep, if_damaged)
        self._plan = dict(data_plan or {})
        # The epoch and the servers' `generation` at the last checkpoint. If both are still the same
        # at the end of `fit`, no further checkpoint is needed.
        self._saved: tuple[int, int] = (0, 0)
        self._former_handler: Callable[..., object] | int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._strategy.running is None:
            raise ValueError(
                "AsyncCheckpoint works in the fit of a tfpara.AsyncStrategy, with a model that was "
                "made in its scope. With others, use tfpara.callbacks.Checkpoint."
            )
        super().on_train_begin(logs)
        self._checkpoints = ServerCheckpoints(self.model, self._directory, self._keep, self._plan)
        self._restore(self._checkpoints)
        fit_call.at_end(self._stand_down)
        self._running.at_poll = self._look
        self.model.distribute_strategy.answer_leaving(self._exit_code)
        if threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGTERM, self._terminate)
        self._note_saved(self._running.epoch)

    def _look(self) -> None:
        """Writes a checkpoint while workers train, if one is due."""
        if self._asked_to_end or self._is_late:
            with self._running.paused():
                self._save(self._running.epoch, within=True)
                self._leave_if_asked()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        # The checkpoint after the last epoch is written in `on_train_end`, since other callbacks
        # may change the state in their `on_train_end`.
        if not self._running.is_over:
            self._save(epoch + 1)
            self._leave_if_asked()

    def on_train_end(self, logs: Logs | None = None) -> None:
        running = self._running
        self.model.distribute_strategy.write(self.model)
        if self._saved != (running.epoch, running.server.generation):
            self._save(running.epoch, finished=bool(self.model.stop_training))
        self._leave_if_asked()
        self._stand_down()

    def _stand_down(self) -> None:
        if self._former_handler is not None:
            signal.signal(signal.SIGTERM, self._former_handler)
            self._former_handler = None
        if not self._asked_to_end:
            self.model.distribute_strategy.answer_leaving(None)
        self._checkpoints.store.release()

    @property
    def _running(self) -> Any:
        return self.model.distribute_strategy.running

    @property
    def _asked_to_end(self) -> bool:
        return self.model.distribute_strategy.asked_to_end is not None

    def _save(self, epoch: int, *, within: bool = False, finished: bool = False) -> None:
        # A checkpoint has the state of the servers. Callbacks before this one may have changed the
        # chief's model, so the model is first written to the servers.
        self.model.distribute_strategy.write(self.model)
        self._running.follow_rate()
        position: dict[str, Json] = {"epoch": epoch, "within": within, "finished": finished}
        position |= {"rates": self._rates} if within else {}
        self._checkpoints.save(lambda: {**position, "order": self._running.order})
        self._note_saved(epoch)

    def _note_saved(self, epoch: int) -> None:
        self._saved_at = time.monotonic()
        self._saved = (epoch, self._running.server.generation)

    def _terminate(self, number: int, frame: object) -> None:
        self.model.distribute_strategy.ask_to_end("the chief was asked to end (SIGTERM).")
        parent.tell(saves=True)

    def _leave_if_asked(self) -> None:
        if not self._asked_to_end:
            return
        self.model.distribute_strategy.end_with(self._exit_code, _SENTENCE)
        self._say_end(f"exit code {self._exit_code}")
        raise Preempted(self._exit_code)
