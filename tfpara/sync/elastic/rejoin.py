"""Meetings: members of an elastic run agree on its state when one is lost, leaves or joins.

TensorFlow's server accepts another list of workers in a running process, and its collectives read
their sizes and keys from a variable, so graphs, variables and iterators stay. An exchange that runs
when a worker is lost fails on all workers; each has written the whole result, or nothing. So the
workers meet, exchange reports, send the state of the worker that is furthest to those that are
behind, divide the rest of the epoch, and continue in the same call of `fit`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfpara.elastic.meeting import Form
from tfpara.elastic.plan import Plan
from tfpara.keras_model import hyperparameters
from tfpara.sync.elastic.connection import LOST, Connection, in_short
from tfpara.sync.elastic.data_plan import DataPlan
from tfpara.sync.elastic.state_transfer import StateTransfer
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.start_line import say
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.typing import Json
from tfpara.version import __version__

# Garbage is collected in every 16th generation. The functions that have read the data of earlier
# generations are in reference cycles, and in a process with many objects Python rarely looks for
# such cycles by itself.
_COLLECTED = 16
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Progress:
    """The progress of this worker, besides its data and its syncs.

    Attributes:
        fit: the present or latest call of `fit` of this worker, from 0.
        epoch: the present epoch; −1 before the first of the call.
        closed: the latest epoch of which nothing is left to train: its call of `fit`, its number.
        operations: number of completed exchanges from Python.
        result: result of the last of these exchanges.
        completed_in: the generation in which the last of these exchanges has succeeded.
        planned_in: the generation in which this worker has last adopted a plan of the data.
        sync_may_be_due: whether a sync may have failed, and must then be repeated.
        in_step: whether a training step runs; only then are newcomers admitted.
    """

    fit: int = -1
    epoch: int = 0
    closed: tuple[int, ...] = (-1, -1)
    operations: int = 0
    result: Json = None
    completed_in: int = 0
    planned_in: int = 0
    sync_may_be_due: bool = False
    in_step: bool = False

    @property
    def epoch_is_closed(self) -> bool:
        """Whether nothing is left to train of the epoch that `fit` is in."""
        return self.closed >= (self.fit, self.epoch)


class Rejoin:
    """A worker's part in meetings.

    Attributes:
        others: at the last meeting, the report with the most exchanges from Python.
        last: the reason why all must write a checkpoint and end; "" if they train on.
        record: with it the chief keeps a line of JSON for each generation; None: no record.
    """

    def __init__(self, extended: PeriodicSyncExtended, connection: Connection) -> None:
        self.extended, self.connection = extended, connection
        self.data = DataPlan(extended, connection)
        self.transfer = StateTransfer(extended)
        self.progress = Progress(completed_in=connection.form.number)
        self.others: Mapping[str, Any] = {}
        self.last = ""
        self.record: Callable[[str], None] | None = None
        # Facts about the last meeting, for the record. `_source` is the task that was furthest, and
        # `_taken` lists the tasks that took over its state. `_late` has, for each rank, the number
        # of steps of the open block that are counted but not trained.
        self._source: int | None = None
        self._taken: list[int] = []
        self._late = [0] * len(connection.form.tasks)

    def meet(self, failed: bool) -> None:
        """Meets the others until a generation is complete and agrees on the state.

        `failed`: whether an exchange failed or a member is lost; else all have agreed to meet.
        """
        while True:
            # Outside of training steps, or when the epoch is closed, the members may have begun an
            # exchange. A newcomer could not take part in it, so none is admitted then.
            admits = self.progress.in_step and not self.progress.epoch_is_closed
            for synchronizer in self.extended.models.synchronizers:
                synchronizer.settle()
            form = self.connection.met(self.report(), failed, admits)
            failed = True
            if self._agree(form):
                break
        if form.number % _COLLECTED == 0:
            gc.collect()
        if not form.last:
            return
        self.last = form.last
        if not self.extended.models.synchronizers:
            self.connection.end(f"{form.last}, and none has trained.")
        if self.connection.rank == 0:
            say(f"{form.last}: training ends.")
        for synchronizer in self.extended.models.synchronizers:
            synchronizer.graph.request(Request.LEAVE)

    def join(self) -> None:
        """Joins the others, after this worker's model has taken a step alone."""
        connection = self.connection
        with connection.refusals():
            connection.line.register(self.terms(), self.progress.fit)
            form = connection.line.formed()
            while not self._agree(form):
                form = connection.line.met(form.number, None, True)

    def _agree(self, form: Form) -> bool:
        """Connects to a generation; returns whether all of its members agree on the state."""
        self._await_prepared()
        self.connection.become(form)
        for synchronizer in self.extended.models.synchronizers:
            synchronizer.graph.global_state.rule.change(self.extended.worker.replicas)
        if not self.connection.ready():
            return False
        try:
            self.reconcile(form)
        except LOST as error:
            _log.info("tfpara: generation %s has failed: %s", form.number, in_short(error))
            return False
        return True

    def _await_prepared(self) -> None:
        """Waits for threads that prepare a sync: TensorFlow's server must not change meanwhile."""
        for synchronizer in self.extended.models.synchronizers:
            synchronizer.graph.await_prepared()

    def report(self) -> dict[str, Json]:
        """Returns this worker's report on its position."""
        graphs = [synchronizer.graph for synchronizer in self.extended.models.synchronizers]
        for graph in graphs:
            graph.forget_waiting()
        progress = self.progress
        return {
            "syncs": sum(graph.syncs for graph in graphs),
            "open": sum(graph.block.trained for graph in graphs),
            "counted": sum(int(graph.block.steps) for graph in graphs),
            "dealt": self.data.trained_steps(),
            "plan": self.data.plan.state(),
            "planned_in": progress.planned_in,
            "closed": progress.closed,
            "operations": progress.operations,
            "met": self.extended.call_site.met,
            "result": progress.result,
            "completed_in": progress.completed_in,
            "agreed": graphs[0]._agreed.numpy().tolist() if graphs else [],
            "history": self.transfer.note_history(),
            "states": {} if self.connection.joining else self.transfer.states(),
        }

    def reconcile(self, form: Form) -> None:
        """Brings all members to the state of the one that is furthest; may raise one of `LOST`."""
        reports: list[Any] = list(form.reports)
        known = [report for report in reports if report]
        if not known:
            self.connection.end("those that had the state of the run are lost.")
        ahead = max(known, key=_how_far)
        source, syncs = reports.index(ahead), ahead["syncs"]
        behind = [not own or own["syncs"] < syncs for own in reports]
        receives, joins = behind[self.connection.rank], self.connection.joining
        if any(behind):
            self.transfer.hand_over(source, receives, joins, ahead)
        self._late = self._shorten_block(reports, behind, syncs)
        for synchronizer in self.extended.models.synchronizers:
            graph = synchronizer.graph
            graph.answered(Request.MEET)  # a request that led to this meeting is fulfilled now
            graph.consensus.divided_in = int(graph.block.taken) - graph.block.trained
        self.progress.sync_may_be_due = True
        self.progress.closed = max(self.progress.closed, tuple(ahead["closed"]))
        self.others = max(known, key=lambda report: report["operations"])
        if joins:
            self.extended.call_site.met = self.others["met"]
            self.progress.operations = self.others["operations"]
            self.progress.result = self.others["result"]
            self.transfer.take_states(ahead["states"])
        plan = _next_plan(form, reports, behind, ahead)
        # If the plan belongs to a later call of `fit`, this worker makes the data when it begins
        # that call.
        has_data = plan.fit == self.progress.fit and plan.at > self.progress.closed
        self.data.go_on(plan, has_data, ahead)
        self.progress.planned_in = form.number
        self._taken = [task for task, own in zip(form.tasks, behind, strict=True) if own]
        self._source = form.tasks[source]
        if self.connection.rank == 0:
            count = len(form.tasks)
            who = f"{count} workers train" if count > 1 else "1 worker trains"
            say(f"{form.why}: {who} on (generation {form.number})")
            self.write_record(syncs)

    def _shorten_block(self, reports: list[Any], behind: list[bool], syncs: int) -> list[int]:
        """Sets the step counters of workers that are behind, so that all close the block together.

        Returns for each rank the steps of the open block that it counts but has not taken.
        """
        furthest = [own for own in reports if own and own["syncs"] == syncs]
        if self.extended.balance is None:
            # A worker is ready to sync when its count of steps, which includes missed steps,
            # reaches the sync period. A worker that is behind gets the smallest count among
            # `furthest`, so it is ready at the same step as the last worker of `furthest`.
            missed = min(own["counted"] for own in furthest)
        else:
            missed = max(own["open"] for own in furthest)
        for synchronizer in self.extended.models.synchronizers:
            block = synchronizer.graph.block
            missed = min(missed, int(block.period))
            # With `balance`, no more minibatches of an open block are dealt out after a meeting, so
            # all workers sync next. So the counter `steps` is also set on a worker that has trained
            # nothing in the block, since its value may come from an earlier meeting.
            by_speed = self.extended.balance is not None and block.trained == 0
            if behind[self.connection.rank] or by_speed:
                block.steps.assign(missed)
        return [
            missed if taken else own["counted"] - own["open"]
            for own, taken in zip(reports, behind, strict=True)
        ]

    def write_record(self, syncs: int) -> None:
        """Appends the present generation to the record, if this worker is its chief."""
        if self.record is None or self.connection.rank != 0:
            return
        form = self.connection.form
        line = {
            "generation": form.number,
            "why": form.why,
            "tasks": form.tasks,
            "founders": self.connection.founders,
            "time": time.time(),
            "syncs": syncs,
            "plan": self.data.plan.state(),
            "devices": len(self.extended.worker_devices),
            "source": self._source,
            "took_over": self._taken,
            "late": self._late,
        }
        self.record(json.dumps(line))

    def terms(self) -> dict[str, Json]:
        """Returns the values that must be equal on all workers."""
        model = self.transfer.trained_model
        data = self.data.whole_epoch(0)
        slots = [f"{s.name} {s.variable.shape} {s.variable.dtype}" for s in self.transfer.slots()]
        terms = {
            "tfpara": __version__,
            "TensorFlow": tf.__version__,
            **self.extended.settings.fingerprint(),
            "devices per worker": len(self.extended.worker_devices),
            "kind of devices": self.extended.worker.kind,
            "weights": "; ".join(f"{tuple(v.shape)} {v.dtype}" for v in model.trainable_variables),
            "state": f"{len(slots)} variables, {zlib.crc32(' '.join(slots).encode()):08x}",
            **hyperparameters(model),
            "data": str(data.element_spec),
            **(self.data.facts or {"minibatches of the first epoch": int(data.cardinality())}),
        }
        return {key: json.loads(json.dumps(value, default=repr)) for key, value in terms.items()}

    def come_back(self, why: str) -> None:
        """Connects again as a joiner; the model and its traced step stay."""
        self._await_prepared()
        self.connection.come_back(why)
        # The others may still be training an epoch that only this worker has closed. So no epoch
        # counts as closed until the next meeting.
        self.progress.closed = (-1, -1)
        self.data.iterator = None
        self.data.forget_trained()


def _how_far(report: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns a worker's progress; that of the worker which is furthest is the largest."""
    return (
        report["syncs"],
        *Plan.place(report["plan"]),
        # If a member was lost while the members adopted a plan, only some of them have the plan.
        # Those that have it count as further.
        report["planned_in"],
        *report["closed"],
        report["operations"],
        # If minibatches are dealt out by speed, only a worker that has begun to read the epoch
        # knows which worker has which minibatches (`carried`). So such a worker counts as further.
        any(report["plan"]["carried"]),
        # Of workers that are equally far, the one with the smallest count of steps in the open
        # block sends its state. The receivers get this count, and also the optimizer's count of
        # steps. So at the end of the block, the optimizer's count is equal on all of them.
        -report["counted"],
    )


def _next_plan(
    form: Form, reports: list[Any], behind: list[bool], ahead: Mapping[str, Any]
) -> Plan:
    """Returns the plan of a generation, from the reports of its members; `ahead` is the furthest.

    `behind` tells which workers receive another one's state.
    """
    plan = Plan.of(ahead["plan"])
    here = dict(zip(form.tasks, zip(reports, behind, strict=True), strict=True))
    open_steps = []
    for task in plan.tasks:
        own, is_behind = here.get(task, (None, True))
        counts = own and not is_behind and Plan.place(own["plan"]) == plan.at
        open_steps.append(own["open"] if own and counts else 0)
    return plan.after(ahead["dealt"], open_steps, form.tasks)
