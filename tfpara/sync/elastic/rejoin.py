"""Elastic training: what a worker does where members are lost, leave or come.

TensorFlow's server takes another list of workers in a living process, and its collectives take
their sizes and keys from a variable (`collectives.members`), so graphs, variables and iterators
stay. What was in the air when a worker was lost fails on all; nothing of it was written, or all of
it was, on each worker. So they meet, tell each other where they are, give who is behind the state
of who is ahead, deal out what is left of the epoch, and go on in the same call of `fit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfpara.cluster import exit_codes, ports, secret
from tfpara.cluster.place import call
from tfpara.collectives import TensorFlowCollectives
from tfpara.collectives.members import Members
from tfpara.elastic.meeting import NAME, Ended, Evicted, Form, Left, Line, MeetingError, Passed
from tfpara.elastic.plan import Plan, begin
from tfpara.elastic.settings import Elastic, meeting_point
from tfpara.files import append_line
from tfpara.keras_model import hyperparameters
from tfpara.strategy import StateHolder
from tfpara.sync.data.elastic_data import Began
from tfpara.sync.elastic.state_transfer import hand_over, hand_over_arrays, hand_over_text
from tfpara.sync.keras.chiefs_callbacks import HAS_WEIGHTS
from tfpara.sync.keras.train_function import stepping
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.one_sync.state_vars import Kind, Slot, slots_of
from tfpara.sync.one_sync.statistics import NO_SYNCS
from tfpara.typing import Json, Nest
from tfpara.version import __version__

if TYPE_CHECKING:
    from tfpara.sync.one_sync.graph import SyncGraph
    from tfpara.sync.tensorflow.extended import PeriodicSyncExtended

# What TensorFlow says of a member that is lost, and where its collectives are aborted.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_PLACEHOLDER = "127.0.0.1:1"  # where TensorFlow wants an address and nobody is
_ALONE = 1 << 20  # and above: numbers of generations of one worker, which no run reaches
_LONGEST_HISTORY = 1 << 16  # characters of what is kept of one call of `fit`
_log = logging.getLogger(__name__)


class GivenUp(BaseException):
    """The others train on without this worker, which joins them again by another call of `fit`.

    No `Exception`, since a script that catches these would keep it from there.
    """


class _Over(BaseException):
    """The others have begun another call of `fit` than the one that this worker wants to join."""


class _Regrouped(BaseException):
    """The members have changed while a step was traced, which has to read other data now."""


class Regrouping:
    """A worker's part in an elastic run.

    Args:
        settings: of the run.
        timeout_seconds: longest wait for the meeting point.

    Attributes:
        founders: workers with which the run began.
        max_workers: most that may train; None: any number.
        form: the present generation.
        members: as collectives know it.
        joining: whether this worker has still to be let in.
        completed_in: the generation in which the last exchange from Python has gone well.
        states: of objects that all workers have alike, by name: who joins takes them over.
        record: file to which the chief adds a line of JSON for each generation; None: no file.
        plan: who trains what of the epoch.
        dataset_fn: makes the data of the present `fit`; None before the first.
    """

    def __init__(self, settings: Elastic, timeout_seconds: float) -> None:
        self._reserved = ports.reserve()
        port = self._reserved.getsockname()[1]
        self._connect = functools.partial(
            Line,
            meeting_point(),
            secret.read(),
            port,
            dataclasses.asdict(settings),
            timeout_seconds,
            name=os.environ.get(NAME, ""),
        )
        self._address = f"127.0.0.1:{port}"  # of this worker, while it is alone
        self.line, self.form = self._begin()
        self.founders, self.max_workers = self.line.founders, settings.max_workers
        self.joining = not self.line.founding
        self.plan = begin(0, self.form.tasks)
        self.dataset_fn: Callable[..., tf.data.Dataset] | None = None
        self._facts: Mapping[str, Json] = {}  # of these data, beyond what shows in their spec
        self._lock = threading.Lock()
        self._iterator: Iterator[Any] | None = None
        self._operations = 0  # collective calls from Python that are done
        self._result: Json = None  # of the last of them
        self.completed_in = self.form.number  # the generation in which that went well
        self._others: dict[str, Any] = {}  # report of who has done most of them
        self._inside = False  # whether one is under way
        self.states: dict[str, StateHolder] = {}
        self.record: Path | None = None
        self._logs: Any = None
        self._model: keras.Model | None = None
        self._fit = -1  # the call of `fit` that this worker is in, or was in last, from 0
        self._epoch = 0  # that it is in; -1 before its first
        self._histories: list[Json] = []  # what calls of `fit` have returned
        self._source: int | None = None  # whose state was taken over at the last meeting
        self._taken: list[int] = []  # by whom
        self._late = [0] * len(self.form.tasks)  # steps of the open block that a rank has missed
        self._closed_at = (-1, -1)  # the latest call of `fit`, and epoch, with all blocks closed
        self._in_step = False
        self._step_began_in = 0  # the generation in which the present step has begun
        self._may_be_due = False  # whether a sync has failed that has not been repeated
        self._agreed = False  # whether this worker has told what all have alike
        self._leaves = self._told = False  # whether it is to leave, and has said so
        self._failed = False  # whether the last call of `fit` has not returned
        self._in_fit = self._returns = False  # whether it may come back; whether it does
        self._passes_by = False  # whether it takes no part in the present `fit`
        self._last = ""  # why all write a checkpoint and end; "" if they train on
        self._out = False  # whether this worker is no member any more

    def _begin(self) -> tuple[Line, Form]:
        """Connects to the meeting point; returns the line and the first generation."""
        while True:
            line = self._connect()
            if not line.founding:
                return line, self._alone(0, line.task)
            try:
                return line, line.formed()
            except Evicted:
                line.close()  # the others have begun without this worker, which joins them

    def _alone(self, number: int, task: int) -> Form:
        """The generation of this worker before it joins the others."""
        return Form(number, (task,), (self._address,), (None,), "")

    # -- TensorFlow's view -------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's in the present generation."""
        return self.form.tasks.index(self.line.task)

    @property
    def is_chief(self) -> bool:
        """Whether no member of a lower rank is left.

        Within `fit` it is that of the present generation, so that it changes where all meet. After
        it there may be no exchange any more, and who has a file to write asks who is lost by now.
        """
        if self.joining:
            return False
        lower = self.form.tasks[: self.rank]
        return not lower or (not self._in_fit and self.line.lost.issuperset(lower))

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The first generation, for the start of TensorFlow's server; frees the port for it."""
        self._reserved.close()
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": [address for _, address in self._jobs()]}),
            task_type="worker",
            task_id=self.line.task,
            rpc_layer="grpc",
        )

    def leader(self) -> str:
        """The device name of rank 0, which coordinates TensorFlow's collectives."""
        return _names(self.form)[0]

    def attach(self, extended: PeriodicSyncExtended) -> None:
        """Takes the strategy, whose server runs, for this worker's."""
        self._extended = extended
        size, rank = len(self.form.tasks), self.rank
        host = f"{extended._worker_device}/device:CPU:0"
        self.members = Members(host, _names(self.form), rank, self.form.number)
        self._listen()
        if self.joining:
            self._take_place_of_joiner()
            return
        # TensorFlow takes task numbers for ranks, which they are not where a worker was lost, and
        # replaced, before the run began.
        extended.take_place(size, rank)
        while not self.line.ready(self.form.number):
            self._become(self._met(None, True))  # one was lost before all were connected
        if self.form.last:
            self._end(f"{self.form.last}, and none has trained.")
        self.plan = begin(0, self.form.tasks)

    def _take_place_of_joiner(self) -> None:
        """Has a program believe that others are there; this worker is not the chief."""
        # As many as the others had when their programs were here. It has a number of its own.
        self._extended.take_place(self.founders, self.line.task or self.founders)

    def _jobs(self) -> list[tuple[int, str]]:
        """Tasks and addresses, with placeholders for the tasks that are no members."""
        known = dict(zip(self.form.tasks, self.form.addresses, strict=True))
        count = max(*self.form.tasks, self.line.task) + 1
        return [(task, known.get(task, _PLACEHOLDER)) for task in range(count)]

    def _become(self, form: Form) -> None:
        """Makes TensorFlow's server one of a new generation."""
        with self._lock:
            self.form = form
            addresses = dict(zip(form.tasks, form.addresses, strict=True))
            self._extended.serve(addresses, self.leader(), self.rank)
            self.members.change(_names(form), self.rank, form.number)
        for synchronizer in self._extended.synchronizers:
            replicas = len(form.tasks) * len(self._extended.worker_devices)
            synchronizer.graph.global_state.rule.change(replicas)

    def _listen(self) -> None:
        self.line.on_abort(self._abort)
        self.line.on_silence(self._look_around)

    def _look_around(self) -> None:
        """Ends a wait for others, of whom nothing can be heard, on the line's thread."""
        began = self._extended._waiting_since()
        if began and time.monotonic() - began > self._extended.settings.timeout_seconds:
            self._extended.end_collectives("tfpara: no worker and no meeting point answers")

    def _abort(self, generation: int, why: str) -> None:
        """Ends the collectives of a generation, on the line's thread."""
        with self._lock:
            if generation == self.form.number:
                self._extended.end_collectives(f"tfpara: {why}")

    @property
    def _closed(self) -> bool:
        """Whether nothing of the epoch that `fit` is in is left to train."""
        return self._closed_at >= (self._fit, self._epoch)

    # -- meetings ----------------------------------------------------------------------------

    def meet(self, failed: bool) -> None:
        """Meets the others until a generation is complete, and all of it agree on the state."""
        while True:
            # What others are in the middle of, who is new could not finish with them.
            admits = self._in_step and not self._closed
            form = self._met(self._report(), failed, admits)
            self._become(form)
            failed = True
            if not self._are_ready(form):
                continue
            try:
                self._reconcile(form)
            except LOST as error:
                _log.info("tfpara: generation %s has failed: %s", form.number, _short(error))
                continue
            break
        if form.last:
            self._last = form.last
            if not self._extended.synchronizers:
                self._end(f"{form.last}, and none has trained.")
            if self.rank == 0:
                print(f"tfpara: {form.last}: training ends.", file=sys.stderr, flush=True)
            for synchronizer in self._extended.synchronizers:
                synchronizer.graph.request(Request.LEAVE)

    def _met(self, report: Json, failed: bool, admits: bool = False) -> Form:
        """Comes to a meeting; returns the next generation."""
        with self._being_told():
            return self.line.met(self.form.number, report, failed, admits)

    def _are_ready(self, form: Form) -> bool:
        """Says that this worker is connected; returns whether all of a generation are."""
        with self._being_told():
            return self.line.ready(form.number)

    @contextlib.contextmanager
    def _being_told(self) -> Iterator[None]:
        """Ends the program, or the present `fit`, where this worker is told that it is out."""
        try:
            yield
        except Evicted as error:
            if self._in_fit:
                raise GivenUp(str(error)) from None
            self._end(str(error))
        except (Left, Ended) as error:
            self._end(str(error), isinstance(error, Ended) and error.complete)

    def _end(self, why: str, complete: bool = False) -> NoReturn:
        """Ends this worker's program, which the others go on without; it may be started again.

        Args:
            why: in a sentence.
            complete: whether nothing is left to do.
        """
        self._out = True
        self.line.close()
        code = 0 if complete else exit_codes.restart()
        print(f"tfpara: {why} Exit code {code}.", file=sys.stderr, flush=True)
        raise SystemExit(code)

    def fit(self, call: Callable[[], Nest], build: Callable[[], object]) -> Nest:
        """Makes a call of `fit`, and again where this worker was given up and comes back.

        Where the others are in a later call, it returns at once, with what this one gave them.

        Args:
            call: the call.
            build: makes the model's variables, as the call would. A layer that is frozen before it
                has variables has others than one that is frozen after `fit`.
        """
        self._failed = True
        while True:
            self._in_fit = True
            try:
                if self.joining:
                    with self._being_told():
                        self._pass_by(*self.line.where())
                result = call()
                self._failed = False
                return result
            except GivenUp as error:
                self._come_back(str(error))
            except _Over:
                self._passes_by = True
                if not self._model.built:  # type: ignore[union-attr]
                    build()
                self._failed = False
                return self._history()
            finally:
                self._in_fit = self._passes_by = False

    def _pass_by(self, fit: int, histories: list[Json]) -> None:
        """Notes the call of `fit` that the others are in; raises `_Over` if it is a later one."""
        self._histories = histories
        if fit > self._fit:
            text = f"call {self._fit + 1} of fit is over; the others are in call {fit + 1}"
            print(f"tfpara: {text}", file=sys.stderr, flush=True)
            raise _Over

    def _history(self) -> keras.callbacks.History:
        """What the present `fit` has given to the others."""
        history = keras.callbacks.History()
        told: Any = self._histories[self._fit]
        vars(history).update(told)
        assert self._model is not None
        history.set_model(self._model)
        self._model.history = history
        return history

    def _come_back(self, why: str) -> None:
        """Connects anew, as one that joins; it keeps its model and its traced step."""
        if self._leaves:
            self._end(why)
        print(f"tfpara: {why} It comes back.", file=sys.stderr, flush=True)
        self.line.close()
        task = self.line.task
        try:
            self.line = self._connect(task=task)
        except MeetingError as error:
            self._end(str(error))
        if self.line.task != task or self.line.founding:
            # TensorFlow's server keeps its number, and what this worker has trained is of no use.
            self._end("the run that this worker belongs to is over.")
        self._listen()
        self.joining = self._returns = True
        self._closed_at = (-1, -1)  # it may have closed an epoch alone that the others train on
        self._iterator = None
        self._become(self._alone(_ALONE + self.form.number, task))
        self._take_place_of_joiner()
        self._deal_anew()

    def leave(self) -> None:
        """Has this worker leave at the next sync; the others go on without it."""
        self._leaves = True

    @property
    def has_trained(self) -> bool:
        """Whether the last call of `fit` has returned, or all were asked to end in it."""
        return self._fit >= 0 and not self._gave_up

    @property
    def _gave_up(self) -> bool:
        return self._failed and not self._last

    def part(self) -> None:
        """This worker's program has come to its end, as all others will if its `fit` returned."""
        if not self._out:
            self._out = True
            if self.joining or self._gave_up:
                self.line.close()  # the others may have more to do
            else:
                self.line.done()

    def _report(self) -> dict[str, Json]:
        """Where this worker is."""
        graphs = [synchronizer.graph for synchronizer in self._extended.synchronizers]
        for graph in graphs:
            graph.forget_waiting()
        return {
            "syncs": sum(graph.statistics().syncs for graph in graphs),
            "open": sum(graph.block.trained for graph in graphs),
            "counted": sum(int(graph.block.steps) for graph in graphs),
            "dealt": self._steps_dealt(),
            "plan": self.plan.state(),
            "closed": self._closed_at,
            "operations": self._operations,
            "met": self._extended.place.met,
            "result": self._result,
            "completed_in": self.completed_in,
            "agreed": graphs[0]._agreed.numpy().tolist() if graphs else [],
            "states": {} if self.joining else self._told_states(),
        }

    def keep_state(self, name: str, holder: StateHolder) -> None:
        """Has a worker that joins take over an object's state.

        Args:
            name: of the state; a number is added where another object has it.
            holder: its arrays are handed over as well if its state says `HAS_WEIGHTS`; they are its
                attribute `weights`, of the same shapes on all workers.
        """
        if holder not in self.states.values():
            same = sum(known.startswith(name) for known in self.states)
            self.states[f"{name} {same}"] = holder

    def _told_states(self) -> dict[str, Json]:
        holders = self._extended.states | self.states
        return {name: holder.get_state() for name, holder in holders.items()}

    def _reconcile(self, form: Form) -> None:
        """Brings all members to the state of the one that is furthest."""
        reports: list[Any] = list(form.reports)
        known = [report for report in reports if report]
        if not known:
            self._end("those that had the state of the run are lost.")
        ahead = max(known, key=_how_far)
        source, furthest = reports.index(ahead), ahead["syncs"]
        behind = [not own or own["syncs"] < furthest for own in reports]
        if any(behind):
            self._hand_over(source, behind[self.rank], ahead)
        # The others' blocks are partly, or all, trained: they do not wait for a whole one.
        (synchronizer,) = self._extended.synchronizers or (None,)
        missed = max(own["open"] for own in known if own["syncs"] == furthest)
        if synchronizer is not None:
            block = synchronizer.graph.block
            missed = min(missed, int(block.period))
            if behind[self.rank]:
                block.steps.assign(missed)
        self._late = [
            missed if taken else own["counted"] - own["open"]
            for own, taken in zip(reports, behind, strict=True)
        ]
        self._may_be_due = True
        plan = Plan.of(ahead["plan"])
        here = dict(zip(form.tasks, zip(reports, behind, strict=True), strict=True))
        open_steps = []
        for task in plan.tasks:
            own, is_behind = here.get(task, (None, True))
            counts = own and not is_behind and Plan.place(own["plan"]) == plan.at
            open_steps.append(own["open"] if own and counts else 0)
        self.plan = plan.after(ahead["dealt"], open_steps, form.tasks)
        self._closed_at = max(self._closed_at, tuple(ahead["closed"]))
        self._deal_anew()
        self._others = max(known, key=lambda report: report["operations"])
        if self.joining:
            self._extended.place.met = self._others["met"]
            self._operations, self._result = self._others["operations"], self._others["result"]
            for name, holder in (self._extended.states | self.states).items():
                if name in ahead["states"]:
                    holder.set_state(ahead["states"][name])
        # Of another call of `fit` this worker has no data yet: `begin_epoch` makes them.
        ready = self.plan.fit == self._fit and self.plan.at > self._closed_at
        self._iterator = self._of_plan() if ready else None
        self._taken = [task for task, own in zip(form.tasks, behind, strict=True) if own]
        self._source = form.tasks[source]
        if self.rank == 0:
            several = len(form.tasks) > 1
            who = f"{len(form.tasks)} workers train" if several else "1 worker trains"
            text = f"tfpara: {form.why}: {who} on (generation {form.number})"
            print(text, file=sys.stderr, flush=True)
            self.write_record(furthest)

    def write_record(self, syncs: int) -> None:
        """Adds the present generation to the record: its members, and where the run is."""
        if self.record is None or self.rank != 0:
            return
        line = {
            "generation": self.form.number,
            "why": self.form.why,
            "tasks": self.form.tasks,
            "founders": self.founders,
            "time": time.time(),
            "syncs": syncs,
            "plan": self.plan.state(),
            "devices": len(self._extended.worker_devices),
            "source": self._source,
            "took_over": self._taken,
            "late": self._late,
        }
        self.record.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.record, json.dumps(line))

    def _hand_over(self, source: int, receives: bool, ahead: Mapping[str, Any]) -> None:
        """Sends the state of the worker with rank `source`, who is `ahead`, to who receives it."""
        assert self._model is not None
        (synchronizer,) = self._extended.synchronizers
        hosts = self._extended.control.collectives
        assert isinstance(hosts, TensorFlowCollectives)  # Horovod's groups cannot change
        values = hand_over(self.slots(), hosts, source, receives)
        kept: list[tuple[Any, list[np.ndarray]]] = []
        for name, state in sorted(ahead["states"].items()):
            if isinstance(state, dict) and state.get(HAS_WEIGHTS):
                holder: Any = self.states.get(name)  # a callback that keeps the best weights
                own = getattr(holder, "weights", None) or self._model.get_weights()
                kept.append((holder, hand_over_arrays(own, hosts, source)))
        history = json.loads(hand_over_text(_told(self._model.history), hosts, source))
        if not receives:
            return
        # All has arrived, or nothing is taken over.
        for variable, value in values:
            variable.assign(value)
        for holder, weights in kept:
            if holder is not None:
                holder.weights = weights
        if self.joining:  # who is behind has seen these epochs itself
            vars(self._model.history).update(history)
        synchronizer.start_from(synchronizer.broadcast_point())
        synchronizer.graph.block.give_up()
        synchronizer.graph._agreed.assign(ahead["agreed"])
        synchronizer.graph.answered(Request.MEET)

    def slots(self) -> list[Slot]:
        """What travels to a worker that is behind, or new."""
        kinds = (Kind.SHARED, Kind.HOLDER, Kind.MODEL)
        counters = ("counter/syncs", "counter/period")
        assert self._model is not None
        (synchronizer,) = self._extended.synchronizers
        slots = [*slots_of(self._model), *synchronizer.graph.global_state.rule.slots()]
        return [slot for slot in slots if slot.kind in kinds or slot.name in counters]

    def _terms(self) -> dict[str, Json]:
        """What all workers have to have alike."""
        assert self._model is not None
        weights = [f"{tuple(v.shape)} {v.dtype}" for v in self._model.trainable_variables]
        data = self._units(0, 0, 1, 0)
        slots = [f"{s.name} {s.variable.shape} {s.variable.dtype}" for s in self.slots()]
        terms = {
            "tfpara": __version__,
            "TensorFlow": tf.__version__,
            **self._extended.settings.fingerprint(),
            "devices per worker": len(self._extended.worker_devices),
            "kind of devices": self._extended._local_device_type,
            "weights": "; ".join(weights),
            "state": f"{len(slots)} variables, {zlib.crc32(' '.join(slots).encode()):08x}",
            **hyperparameters(self._model),
            "data": str(data.element_spec),
            **(self._facts or {"minibatches of the first epoch": int(data.cardinality())}),
        }
        return {key: json.loads(json.dumps(value, default=repr)) for key, value in terms.items()}

    # -- training ----------------------------------------------------------------------------

    @property
    def began(self) -> Began:
        """Replicas with which the run began, and those of each worker."""
        devices = len(self._extended.worker_devices)
        return Began(self.founders * devices, devices)

    def check(self, model: keras.Model, given: Mapping[str, Any]) -> None:
        """Looks at what `fit` is given.

        Raises:
            ValueError: it cannot be dealt out anew where workers come and go; another model is
                trained already; or a callback of `fit` has called it.
        """
        if given.get("steps_per_epoch") is not None:
            raise ValueError(
                f"steps_per_epoch={given['steps_per_epoch']} and elastic= contradict each other: "
                "workers take as many steps as are left to them. Give arrays, or data for as long "
                "an epoch."
            )
        if not hasattr(given.get("x"), "built_for"):
            raise ValueError(
                "elastic= deals the data of an epoch out anew where workers come and go. Give fit "
                "arrays, a tf.data.Dataset or PyDataset of whole epochs, or "
                "strategy.minibatches_by_epoch(...): docs/elastic.md."
            )
        if self._model is not None and self._model is not model:
            raise ValueError(
                f"elastic= trains one model, and {self._model.name!r} was trained already. Make a "
                f"strategy of its own for {model.name!r}, in a program of its own."
            )
        if self._in_fit:
            raise ValueError(
                "fit was called in a callback of fit: a worker that joins could not take part in "
                "it. Call one after the other."
            )
        self.dataset_fn = given["x"].dataset_fn
        self._facts = getattr(given["x"], "facts", {})

    @contextlib.contextmanager
    def training(self, model: keras.Model) -> Iterator[None]:
        """A call of `fit`; its training function is ours as well, once Keras has made it."""
        self._model = model
        self._fit, self._epoch, self._logs = self._fit + 1, -1, None
        self._agreed = self._returns = False
        self.states.clear()  # of the callbacks of an earlier call
        for synchronizer in self._extended.synchronizers:
            # A worker that wanted in is told of this call, and asks again.
            synchronizer.graph.answered(Request.MEET)
        if not self.joining and self._fit:
            self.line.begins(self._fit, self._histories)
        former = None
        if threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGTERM, self._note)
        try:
            with stepping(model, self._step):
                yield
            if not self.joining:
                # Nobody ends its program while another waits for it in an exchange.
                self.together(lambda: self._extended.control.collectives.barrier("fit"))
                self._histories = [*self._histories, _shortened(_told(model.history))]
        finally:
            model._initial_epoch = None
            if former is not None:
                signal.signal(signal.SIGTERM, former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: this worker leaves after the next sync. A second one ends it at once."""
        del frame
        if self._leaves:
            os._exit(128 + number)
        self.leave()
        if self.joining:
            self.line.give_up()

    def begin(self) -> None:
        """`fit` begins, and callbacks have heard of it; a worker that joins is let in here."""
        model = self._model
        assert model is not None
        if not self.joining or self._passes_by:
            return
        if not (self._returns and self._extended.synchronizers):
            # It traces its step alone, while the others train. That step is none of the run.
            before = [each.graph.statistics() for each in self._extended.synchronizers]
            self._of_one = self._of_plan()
            with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
                self._logs = model.train_function.inner(self._of_one)  # type: ignore[union-attr]
            (synchronizer,) = self._extended.synchronizers
            synchronizer.finish_block()
            synchronizer.graph.set_statistics(*before or [NO_SYNCS])
        model._initial_epoch = self.join()

    def begin_epoch(self, epoch: int) -> None:
        """An epoch of `fit` begins."""
        self._epoch = epoch
        # A worker that joined has made passes over data of its own, which are no epochs.
        self._extended.position.move(epoch, self._extended.steps_seen)
        if self.plan.at == (self._fit, epoch):
            # The others have begun it: this worker was told at a meeting, of which it may have had
            # no data yet.
            self._iterator = self._iterator or self._of_plan()
        else:
            self.plan = begin(epoch, self.form.tasks, self._fit)
            self._iterator = None
            self._deal_anew()

    def _deal_anew(self) -> None:
        """Nothing of the plan's data is in the model yet."""
        for synchronizer in self._extended.synchronizers:
            _dealt(synchronizer.graph).assign(tf.zeros([len(self.form.tasks)], tf.int64))

    def _step(self, function: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        """A training step of Keras, after which the members may be others."""
        if self._closed:  # by the others, while this worker was behind
            raise StopIteration
        self._in_step = True
        try:
            self._look()
            # Not before the first step: a model that was compiled anew is not known before.
            if not self._agreed and self.rank == 0 and self._logs is not None:
                self._agreed = True
                self.line.agreed(self._terms())
            trained = False
            while True:
                try:
                    # Callbacks act on syncs where a step ends: on all workers after the same one.
                    trained |= self._repeat() and self._logs is not None
                    if not trained:
                        self._step_began_in = self.form.number
                        self._logs = function(self._iterator or iterator)
                    return self._logs
                except _Regrouped:
                    continue
                except (tf.errors.OutOfRangeError, StopIteration):
                    if self._close_epoch():
                        raise
                except LOST as error:
                    _log.info("tfpara: a sync has failed: %s", _short(error))
                    self.meet(failed=True)
                    trained = self._logs is not None
        finally:
            self._in_step = False

    def check_step(self) -> None:
        """Has a step begin anew with other data, if the members have changed while it was traced.

        It is called before the step has trained anything.
        """
        if self._in_step and self._step_began_in != self.form.number:
            raise _Regrouped

    def _repeat(self) -> bool:
        """Runs the sync that is due, where it had failed before; returns whether one was due."""
        due, self._may_be_due = self._may_be_due, False
        if due and self._extended.synchronizers:
            (synchronizer,) = self._extended.synchronizers
            block = synchronizer.graph.block
            if int(block.steps) >= int(block.period):
                synchronizer.graph.sync(tf.constant(True))
                return True
        return False

    def _look(self) -> None:
        """Meets the others where all have agreed on it in a sync."""
        if not self._extended.synchronizers:
            return
        if self._last and "checkpoints" not in self.states:
            self._end(f"{self._last}: training ends, and there is no Checkpoint callback.")
        if self._leaves and not self._told:
            self._told = True
            self.line.leave()
        (synchronizer,) = self._extended.synchronizers
        request, alike = synchronizer.graph.agreed()
        # Who has no data left waits in a sync, and not for a meeting, until the others have none.
        if request == Request.MEET and alike:
            synchronizer.graph.answered(Request.MEET)
            self.meet(failed=False)
        elif self.line.wanted:
            synchronizer.graph.request(Request.MEET)

    def _close_epoch(self) -> bool:
        """Closes the last blocks; returns whether nothing of the epoch is left."""
        if self._closed:
            return True
        (synchronizer,) = self._extended.synchronizers
        try:
            synchronizer.finish_block()
        except LOST as error:
            _log.info("tfpara: the last sync of an epoch has failed: %s", _short(error))
            self.meet(failed=True)
            return self._closed
        self._closed_at = self._fit, self._epoch
        return True

    def close(self) -> None:
        """Closes the open blocks where Python code asks for it; who is to join has none to keep."""
        if not self.joining and not self._closed and self._extended.synchronizers:
            (synchronizer,) = self._extended.synchronizers
            self.together(synchronizer.finish_block)

    def together(self, operation: Callable[[], Json]) -> Any:
        """An exchange from Python, which all members come to, once each.

        Where a member is lost in it, those that are left repeat it; unless it has gone well on one
        of them, who tells the others what it gave.

        Args:
            operation: makes the exchange; returns what it gives to all alike, as JSON has it.
        """
        if self._inside:
            return operation()
        number, place = self._operations, self._extended.place
        met = place.met
        while True:
            try:
                self._inside = True
                result = operation()
                self.completed_in = self.form.number
            except LOST as error:
                _log.info("tfpara: an exchange has failed: %s", _short(error))
                self._inside = False
                place.met = met  # part of it may have gone well, on some
                self.meet(failed=True)
                if self._others["operations"] <= number:
                    continue
                result, self.completed_in = self._others["result"], self._others["completed_in"]
                place.met = self._others["met"]
            finally:
                self._inside = False
            self._operations, self._result = number + 1, result
            return result

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        """Has the chief write a file, and the next one where it is lost before all are told.

        All members call it, in the function called `name`; it returns when the file is there.
        """
        if self.joining:
            return

        def chief() -> int:
            self._extended.control.together(call(name))
            return self.form.tasks[0]

        writer = None
        while writer != (found := self.together(chief)):
            writer = found
            if writer == self.line.task:
                write()

    # -- data --------------------------------------------------------------------------------

    def _of_plan(self) -> Iterator[Any]:
        """This worker's data from here on to the end of the epoch."""
        extended, rank, epoch = self._extended, self.rank, self.plan.epoch
        devices = len(extended.worker_devices)
        parts = [
            self._units(epoch, each.start, each.step, 0).take(len(each) * devices)
            for each in self.plan.ranges(rank)
        ]
        parts.append(self._units(epoch, self.plan.first, self.plan.size, rank))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.concatenate(part)
        extended.position.take_steps()  # the plan leaves out what is done; no step is skipped again
        distributed = extended._distribute_datasets_from_function(lambda context: whole, None)
        return iter(distributed)

    def _units(self, epoch: int, first: int, size: int, rank: int) -> tf.data.Dataset:
        """The units first + rank, first + rank + size, … of an epoch."""
        extended, position = self._extended, self._extended.position
        place = extended._num_workers, extended._id_in_cluster
        former = position.epoch, position.first
        try:
            extended._num_workers, extended._id_in_cluster = size, rank
            position.epoch = epoch
            position.first = first * len(extended.worker_devices)
            assert self.dataset_fn is not None
            return self.dataset_fn(None)
        finally:
            extended._num_workers, extended._id_in_cluster = place
            position.epoch, position.first = former

    # -- joining -----------------------------------------------------------------------------

    def join(self) -> int:
        """Has this worker, whose model is built and has taken a step, let in.

        Returns:
            The epoch that the others train.
        """
        try:
            with self._being_told():
                self.line.register(self._terms(), self._fit)
                self._enter(self.line.formed())
        except Passed as error:
            self._pass_by(error.fit, error.histories)
        self.line.begins(self._fit, self._histories)
        self.joining = False
        return self.plan.epoch

    def _enter(self, form: Form) -> None:
        """Takes part in the generation that lets this worker in, or in one that follows it."""
        while True:
            self._become(form)
            if self.line.ready(form.number):
                with contextlib.suppress(*LOST):
                    self._reconcile(form)
                    return
            form = self.line.met(form.number, None, True)

    # -- checkpoints -------------------------------------------------------------------------

    def position(self) -> dict[str, Json]:
        """Where in the epoch the run is, at a sync, as a checkpoint keeps it.

        `minibatches` are done, over all replicas, but for those of the units `owed`.
        """
        rest = self._rest()
        devices = len(self._extended.worker_devices)
        return {"minibatches": rest.first * devices, "owed": list(rest.owed), "devices": devices}

    def trained_units(self) -> int:
        """Units of the epoch that are in the model; at a sync the same number on all workers."""
        return self.plan.in_the_model(self._steps_dealt())

    def reached(self) -> int:
        """Units of the epoch that are trained, where all are as far in the open block as this one.

        Workers that have taken as many steps since the last sync have the same number.
        """
        open_steps = sum(each.graph.block.trained for each in self._extended.synchronizers)
        return self.trained_units() + open_steps * self.plan.size

    def units(self, steps: int | None) -> int:
        """All units of the epoch; 0 if they are not known.

        Args:
            steps: that each replica of those with which the run first began takes in an epoch; it
                is needed where the data do not say how many minibatches they are.
        """
        devices = len(self._extended.worker_devices)
        minibatches = int(self._units(self.plan.epoch, 0, 1, 0).cardinality())
        if minibatches > 0:
            return -(-minibatches // devices)
        parts = self._extended.order.parts or self.began.replicas
        return (steps or 0) * parts // devices

    def _rest(self) -> Plan:
        """What is not in the model yet, for the present members."""
        if not self._extended.synchronizers:
            return self.plan
        return self.plan.after(self._steps_dealt(), [0] * self.plan.size, self.plan.tasks)

    def _steps_dealt(self) -> list[int]:
        """Of each rank, how many of its steps by the plan are in the model."""
        if not self._extended.synchronizers:
            return [0] * len(self.form.tasks)
        (synchronizer,) = self._extended.synchronizers
        return _dealt(synchronizer.graph).numpy().tolist()

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's position, in the epoch that begins.

        Raises:
            ValueError: what is left cannot be dealt out to workers with as many devices as here.
        """
        tasks, owed = self.form.tasks, position.get("owed", ())
        devices = len(self._extended.worker_devices)
        first, rest = divmod(position["minibatches"], devices)
        if rest or (owed and position["devices"] != devices):
            raise ValueError(
                f"the checkpoint is of workers with {position.get('devices', 'other')} devices, in "
                f"the middle of an epoch, and this one has {devices}. Go on with as many devices "
                "for each worker; their number may change where an epoch begins."
            )
        self.plan = Plan(epoch, tasks, ((),) * len(tasks), tuple(owed), first, self._fit)
        self._iterator = self._of_plan()


def _names(form: Form) -> list[str]:
    """Returns TensorFlow's names of the tasks of a generation, by rank."""
    return [f"/job:worker/replica:0/task:{task}" for task in form.tasks]


def _how_far(report: Mapping[str, Any]) -> tuple[int, ...]:
    """How far a worker is, to be compared with others."""
    place, operations = Plan.place(report["plan"]), report["operations"]
    return report["syncs"], *place, *report["closed"], operations


def _told(history: keras.callbacks.History) -> str:
    """What a `History` has, as a text of JSON."""
    told = {"epoch": history.epoch, "history": history.history}
    return json.dumps(told, default=lambda value: getattr(value, "tolist", value.__repr__)())


def _shortened(told: str) -> Json:
    """What `_told` gave, as JSON; if that is long, its epochs alone."""
    kept = json.loads(told)
    return kept if len(told) <= _LONGEST_HISTORY else {**kept, "history": {}}


def _short(error: tf.errors.OpError) -> str:
    """The line of an error of TensorFlow's that says what has happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "tfpara:" in line or "error received from" in line.lower())
    return next(telling, lines[-1] if lines else type(error).__name__)


def _dealt(graph: SyncGraph) -> tf.Variable:
    if graph.dealt is None:
        raise RuntimeError("the synchronizer is of a run whose members do not change")
    return graph.dealt
