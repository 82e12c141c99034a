"""Checkpoints while `fit` runs, resuming, and ending all workers together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from tfpara import fit_call
from tfpara.callbacks.checkpoint_base import CheckpointBase, Preempted
from tfpara.callbacks.sync_watch import SyncWatch
from tfpara.callbacks.termination import Termination
from tfpara.checkpoint.base import store_at
from tfpara.checkpoint.run import SyncCheckpoints
from tfpara.cluster.call_site import of_callback
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.one_sync.statistics import Agreement
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Json, Logs
from tfpara.whole_number import checked_whole

_LEAVING = of_callback("Checkpoint")
# The requests that Checkpoint answers. The request STOP is answered by StopTogether.
_ANSWERED = (Request.CHECKPOINT, Request.LEAVE)


class Checkpoint(CheckpointBase):
    """Writes checkpoints, resumes from the newest one, and ends the program in order on SIGTERM.

    A checkpoint is written after each epoch, and at syncs within epochs if requested. In a
    restarted program, `fit` continues exactly at the newest one: weights, slots, block momentum,
    averages, random states, metrics, schedules, and the position in the data. The data must be the
    same in every process; docs/checkpoints.md says which data can be resumed. If any worker gets
    SIGTERM, all write a checkpoint at the next sync and raise `Preempted`, which ends the program
    with exit code 75. Restart it to continue.

    A directory holds the checkpoints of one call of `fit`. The callback runs after all others, so a
    checkpoint includes their work.

    Args:
        directory: folder of the checkpoints, shared by all workers; nothing else may write there. A
            path, or a URL that fsspec knows, such as s3://bucket/run.
        every_syncs: number of syncs after which a further checkpoint is written; None: not by
            syncs.
        every_minutes: minutes after which a further checkpoint is written, by the chief's clock;
            None: not by time.
        keep: number of checkpoints that are kept.
        if_damaged: what to do if there are checkpoints but all are damaged: "refuse", or "start"
            from the beginning.
        may_change: key or keys of the strategy's `data_plan` that may differ from those of the
            interrupted run, such as the number of epochs.
        restart_exit_code: from 1 to 255, in place of 75. None: TFPARA_RESTART_EXIT_CODE, or 75.
        termination_watcher: called once a second on each worker, in a thread, while `fit` runs:
            returns whether this machine will soon end. A true result has the effect of SIGTERM.

    Raises:
        ImportError: the directory is a URL, and fsspec or its package for it is not installed.
        ValueError: a value outside its range, or no URL that fsspec knows; at the start of
            `fit`, a model without a `PeriodicSyncStrategy`.
        tfpara.CheckpointError: on every worker, at the start of `fit`: the directory is another
            run's, in use, damaged or not shared; later: a worker could not write (the earlier
            checkpoints are intact).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_syncs: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        if_damaged: str = "refuse",
        may_change: str | tuple[str, ...] = (),
        restart_exit_code: int | None = None,
        termination_watcher: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(directory, every_minutes, keep, if_damaged, restart_exit_code)
        if every_syncs is not None:
            every_syncs = checked_whole("every_syncs", every_syncs)
        self._every_syncs = every_syncs
        self._may_change = (may_change,) if isinstance(may_change, str) else tuple(may_change)
        self._checkpoints: SyncCheckpoints | None = None
        # The position that was restored; None as soon as its epoch has begun.
        self._resumed: dict[str, Json] | None = None
        self._saved: tuple[int, int] | None = None  # epoch and steps at the last checkpoint
        self._saved_syncs = 0
        self._watch = SyncWatch()
        self._in_epoch = False
        self._ended = False  # whether the last call of `fit` with this callback has come to its end
        self._epoch = 0
        # The number of minibatches of this epoch that an earlier process has trained:
        self._first = 0  # by all replicas together
        self._steps_before = 0  # by each replica
        # The number of minibatches of this epoch that each replica has trained so far.
        self._steps = 0
        self._termination = Termination(self._exit_code, termination_watcher)
        self._asked = Request.NOTHING

    def on_train_begin(self, logs: Logs | None = None) -> None:
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, PeriodicSyncStrategy):
            raise ValueError(
                "Checkpoint needs a model of a tfpara.PeriodicSyncStrategy. Make and compile the "
                "model in its scope, or use keras.callbacks.BackupAndRestore, or in the fit of a "
                "tfpara.AsyncStrategy tfpara.AsyncCheckpoint."
            )
        super().on_train_begin(logs)
        self._stand_down()  # clears the state that a failed custom training loop may have left
        fit_call.at_end(self._stand_down)
        strategy.company.keep_record(self, store_at(self._directory, self._keep).append)
        ended, self._ended = self._ended, False
        former = self._checkpoints
        if former and former.model is self.model and (ended or strategy.company.changes):
            # If this worker joins a run, another worker already has the lock, and `set_state` calls
            # `_listen` later.
            if not strategy.company.joining:
                former.lock()
                self._listen()
            return
        checkpoints = SyncCheckpoints(self.model, self._directory, self._keep, self._may_change)
        if strategy.company.joining:
            # A joining worker gets its state from the other workers, not from a checkpoint.
            self._checkpoints = checkpoints
            return
        position = self._restore(checkpoints)
        self._checkpoints, self._saved = checkpoints, None
        self._listen()
        strategy.company.write_record(checkpoints.synchronizer.agreement().syncs)
        if position is None:
            return
        self._resumed = position
        self._saved = (position["epoch"], position["steps"])
        self._saved_syncs = checkpoints.synchronizer.agreement().syncs
        epochs = self.params.get("epochs", 1)
        # Keras' `fit` begins at the epoch in this private attribute. Keras' own BackupAndRestore
        # sets it in the same way.
        self.model._initial_epoch = epochs if position["finished"] else position["epoch"]
        self.model.stop_training = position["finished"]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        resumed, self._resumed = self._resumed, None
        self.model._initial_epoch = None
        first = steps = 0
        if resumed is not None and resumed["epoch"] == epoch:
            first, steps = resumed["minibatches"], resumed["steps"]
        # A checkpoint with 0 steps has the metrics of the epoch before. This epoch needs new
        # metrics, so those are not restored.
        if steps:
            self._at_sync.restore_epoch(steps)
        if self._saved is not None and epoch < self._saved[0]:
            raise ValueError(
                f"fit begins epoch {epoch} again, and {self._directory} has later checkpoints. A "
                "directory is for one run over its epochs: give this fit another, or go on with "
                "initial_epoch."
            )
        self._watch.begin(self.model)
        self._in_epoch, self._first = True, first
        self._epoch, self._steps_before, self._steps = epoch, steps, steps
        self.model.distribute_strategy.go_on_from(epoch, resumed or {})
        if self._saved is None or self._saved[:1] < (epoch,):
            self._save_at_boundary()

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._ask()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps = self._steps_before + batch + 1
        # All workers must write a checkpoint together. A worker without data for the rest of the
        # epoch does not come here, but waits in a sync. As long as any worker waits in this way,
        # `after_batch` returns None on the other workers, so they write no checkpoint.
        agreement = self._watch.after_batch(self.model, batch, self._is_due)
        if agreement is not None:
            self._save()
            self._act_on(agreement.request)

    def _is_due(self, agreement: Agreement) -> bool:
        """Returns whether a checkpoint must be written at a sync."""
        by_number = self._every_syncs and agreement.syncs - self._saved_syncs >= self._every_syncs
        return bool(by_number) or agreement.request in _ANSWERED

    def on_train_end(self, logs: Logs | None = None) -> None:
        try:
            if self._in_epoch:
                self._in_epoch = False
                self._epoch, self._first = self._epoch + 1, 0
                self._steps_before = self._steps = 0
                self._save_at_boundary(finished=bool(self.model.stop_training))
                self._leave_if_asked_meanwhile()
            self._ended = True
        finally:
            self._stand_down()

    def _stand_down(self) -> None:
        """Clears the state of one call of `fit` when it ends; may be called more than once."""
        self._termination.stop()
        if self._checkpoints is not None:
            self._checkpoints.store.release()
        self._asked, self._resumed, self._in_epoch = Request.NOTHING, None, False
        self.model._initial_epoch = None

    @property
    def _at_sync(self) -> SyncCheckpoints:
        if self._checkpoints is None:
            raise RuntimeError("fit has not begun")
        return self._checkpoints

    def _save(self, finished: bool = False) -> None:
        self._at_sync.save(lambda: self._position(finished))
        self._saved = (self._epoch, self._steps)
        self._saved_syncs = self._at_sync.synchronizer.agreement().syncs
        self._saved_at = time.monotonic()

    def _position(self, finished: bool) -> dict[str, Json]:
        strategy = self.model.distribute_strategy
        return {
            "epoch": self._epoch,
            "steps": self._steps,
            "finished": finished,
            **({"rates": self._rates} if self._in_epoch else {}),
            **strategy.position(self._first, self._steps - self._steps_before),
        }

    def _save_at_boundary(self, finished: bool = False) -> None:
        """Closes all blocks between epochs; writes a checkpoint unless this state has one."""
        self._ask()
        self.model.distribute_strategy.synchronize()
        request = self._at_sync.synchronizer.agreement().request
        if self._saved != (self._epoch, 0) or finished:
            self._save(finished)
        self._act_on(request)

    def _ask(self) -> None:
        """Requests of all workers a checkpoint or the end of the run, if it is due; each once."""
        strategy = self.model.distribute_strategy
        late = strategy.is_chief and self._is_late
        wish = Request.CHECKPOINT if late else Request.NOTHING
        if self._termination.asked and strategy.company.leave():
            wish = Request.LEAVE
        if wish > self._asked:
            strategy.request(wish)
            self._asked = wish

    def _leave_if_asked_meanwhile(self) -> None:
        """Ends the run if a worker was asked to end while the last checkpoint was written."""
        strategy = self.model.distribute_strategy
        # No later sync would tell the other workers.
        if not strategy.company.changes and any(
            strategy.everyones(self._termination.asked, _LEAVING)
        ):
            self._act_on(Request.LEAVE)

    def _act_on(self, request: Request) -> None:
        if request in _ANSWERED:
            self.model.distribute_strategy.answered(*_ANSWERED)
            self._asked = Request.NOTHING
        if request == Request.LEAVE:
            if self.model.distribute_strategy.is_chief:
                ends = threading.current_thread() is threading.main_thread()
                how = f"exit code {self._exit_code}" if ends else f"fit raises {Preempted.__name__}"
                self._say_end(how)
            self._stand_down()
            self._termination.asked = False  # The request is answered by the error below.
            raise Preempted(self._exit_code)

    def get_state(self) -> dict[str, Json]:
        """Returns the facts that a worker needs when it joins an elastic run."""
        if self._checkpoints is None:
            return {}  # `on_train_begin` has not yet restored a checkpoint
        mine = {"saved": self._saved, "saved_syncs": self._saved_syncs, "rates": self._rates}
        return {**self._checkpoints.state(), **mine}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Takes over the other workers' state in an elastic run."""
        self._at_sync.join(state)
        self._saved, self._saved_syncs = tuple(state["saved"]), state["saved_syncs"]
        self._rates = state["rates"]
        self._listen()

    def _listen(self) -> None:
        strategy = self.model.distribute_strategy
        if strategy.company.changes and self._termination.watcher is None:
            return  # In an elastic run the strategy handles SIGTERM: the worker leaves the run.
        self._termination.start(strategy.settings.timeout_seconds)
