"""A worker's connection to the meeting point, and TensorFlow's server in each generation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import tensorflow as tf

from tfpara.cluster import exit_codes, ports, secret
from tfpara.collectives.members import Members
from tfpara.elastic.meeting import NAME, Ended, Evicted, Form, Left, Line, MeetingError
from tfpara.elastic.settings import Elastic, meeting_point
from tfpara.sync.elastic.shared_lock import SharedLock
from tfpara.sync.start_line import say
from tfpara.sync.tensorflow import links
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.typing import Json

# The errors that TensorFlow raises after a member is lost, or after collectives are aborted.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
# TensorFlow's list of tasks must have no gaps. So this address takes the place of each task that no
# worker has.
_PLACEHOLDER = "127.0.0.1:1"
# A worker that comes back is alone at first, in a generation of its own. The number of this
# generation is `_ALONE` plus the number of the worker's last one. No run has so many generations,
# so the number differs from those of the run.
_ALONE = 1 << 20
# A change of generation waits for threads that read data, but no longer than this, because such a
# thread may never return.
_PATIENCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class GivenUp(BaseException):
    """The others train on without this worker, which joins them again by another call of `fit`.

    It is not an `Exception`: a script that catches exceptions would keep it from joining.
    """


class Connection:
    """The line to the meeting point, the present generation, and TensorFlow's server in it.

    Attributes:
        line: the line to the meeting point.
        form: the present generation.
        founders: number of workers with which the run began.
        members: the present members, as collectives read them.
        joining: whether this worker waits to be admitted.
        in_fit: whether this worker is in a call of `fit`, so that it can rejoin.
        leaves: whether this worker is to leave after the next sync.
        out: whether this worker is no longer a member.
        steady: a lock; the generation does not change while threads share it.
    """

    members: Members
    _extended: PeriodicSyncExtended

    def __init__(self, settings: Elastic, timeout_seconds: float) -> None:
        self._reserved = ports.reserve()
        port = self._reserved.getsockname()[1]
        asked, name = dataclasses.asdict(settings), os.environ.get(NAME, "")
        self._connect = functools.partial(
            Line, meeting_point(), secret.read(), port, asked, timeout_seconds, name=name
        )
        self._own_address = f"127.0.0.1:{port}"  # used while this worker is alone
        self.line, self.form = self._begin()
        self.founders = self.line.founders
        self.joining = not self.line.founding
        self.in_fit = self.leaves = self.out = self._said_leaving = False
        # While the main thread changes the generation, it has this lock alone. If the thread of
        # `line` needs a share meanwhile, it waits, and sends no signs of life. The argument keeps
        # this wait shorter than the silence after which a worker counts as lost.
        self.steady = SharedLock(min(_PATIENCE_SECONDS, settings.silence_seconds / 4.0))
        # This lock is held while the generation changes, and while the thread of `line` aborts the
        # collectives of a generation.
        self._changing = threading.Lock()

    def _begin(self) -> tuple[Line, Form]:
        """Connects; returns the line and the first generation."""
        while True:
            line = self._connect()
            if not line.founding:
                return line, self._alone(0, line.task)
            try:
                return line, line.formed()
            except Evicted:
                # The others have begun without this worker, which connects again to join them.
                line.close()

    def _alone(self, number: int, task: int) -> Form:
        """Returns a generation with this worker alone, for the time until it joins the others."""
        return Form(number, (task,), (self._own_address,), (None,), "")

    @property
    def rank(self) -> int:
        return self.form.tasks.index(self.line.task)

    @property
    def names(self) -> list[str]:
        """TensorFlow's names of the members' tasks, by rank."""
        return [f"/job:worker/replica:0/task:{task}" for task in self.form.tasks]

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Returns the first generation, for the server's start; frees this worker's port."""
        self._reserved.close()
        known = dict(zip(self.form.tasks, self.form.addresses, strict=True))
        count = max(*self.form.tasks, self.line.task) + 1
        addresses = [known.get(task, _PLACEHOLDER) for task in range(count)]
        ports.without_proxy(addresses)
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}),
            task_type="worker",
            task_id=self.line.task,
            rpc_layer="grpc",
        )

    def attach(self, extended: PeriodicSyncExtended) -> None:
        """Stores the strategy, whose server runs; founders return when they are all connected."""
        self._extended = extended
        links.guard_python_functions(self.steady.shared)
        self.members = Members(extended.worker.host, self.names, self.rank, self.form.number)
        self._listen()
        if self.joining:
            self._take_place_of_joiner()
            return
        # TensorFlow has taken this worker's task number as its rank. The two numbers differ if a
        # founder was replaced by another worker. So the right rank is set here.
        extended.take_place(len(self.form.tasks), self.rank)
        while not self.ready():
            self.become(self.met(None, True))  # a member was lost before all were connected
        if self.form.last:
            self.end(f"{self.form.last}, and none has trained.")

    def _take_place_of_joiner(self) -> None:
        """Gives a joiner the founders' number of workers, and a rank above 0: it is no chief."""
        self._extended.take_place(self.founders, self.line.task or self.founders)

    def become(self, form: Form) -> None:
        """Puts TensorFlow's server into a generation."""
        with self.steady.exclusive(), self._changing:
            self.form = form
            addresses = dict(zip(form.tasks, form.addresses, strict=True))
            ports.without_proxy(addresses.values())
            links.serve(addresses, self.names[0])
            self._extended.take_place(len(addresses), self.rank)
            self.members.change(self.names, self.rank, form.number)

    def _listen(self) -> None:
        self.line.on_abort = self._abort
        self.line.on_silence = self._end_long_wait

    def _abort(self, generation: int, why: str) -> None:
        """Ends the collectives of a generation. Called by the line's thread."""
        with self._changing:
            if generation == self.form.number:
                links.end_collectives(f"tfpara: {why}")

    def _end_long_wait(self) -> None:
        """Ends a wait for workers if the meeting point is silent. Called by the line's thread."""
        began = self._extended.waits.since()
        if began and time.monotonic() - began > self._extended.settings.timeout_seconds:
            links.end_collectives("tfpara: no worker and no meeting point answers")

    def met(self, report: Json, failed: bool, admits: bool = False) -> Form:
        """Attends a meeting; returns the next generation. For the arguments see `Line.met`."""
        with self.refusals():
            return self.line.met(self.form.number, report, failed, admits)

    def ready(self) -> bool:
        """Reports that this worker is connected; returns whether its whole generation is."""
        with self.refusals():
            return self.line.ready(self.form.number)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """A context that ends the program if the meeting point says that the worker is out.

        In `fit`, a worker that counted as lost raises `GivenUp` instead, so that it can rejoin.
        """
        try:
            yield
        except Evicted as error:
            if self.in_fit:
                raise GivenUp(str(error)) from None
            self.end(str(error))
        except (Left, Ended) as error:
            self.end(str(error), isinstance(error, Ended) and error.complete)

    def end(self, why: str, complete: bool = False) -> NoReturn:
        """Ends this program with a sentence; unless the run is `complete`, it may be restarted."""
        self.out = True
        self.line.close()
        code = 0 if complete else exit_codes.restart()
        say(f"{why} Exit code {code}.")
        raise SystemExit(code)

    def say_leaving(self) -> None:
        """If this worker is to leave, asks the meeting point, once, to continue without it."""
        if self.leaves and not self._said_leaving:
            self._said_leaving = True
            self.line.leave()

    def come_back(self, why: str) -> None:
        """Connects again as a joiner, after the run has continued without this worker."""
        if self.leaves:
            self.end(why)
        say(f"{why} It comes back.")
        self.line.close()
        task = self.line.task
        try:
            self.line = self._connect(task=task)
        except MeetingError as error:
            self.end(str(error))
        if self.line.task != task or self.line.founding:
            # The meeting point does not know this worker's run. If it has given the worker another
            # task number, this worker cannot use that number, because TensorFlow's server keeps its
            # first number. If the meeting point counts the worker among the founders of a new run,
            # the other founders could not use this worker's model.
            self.end("the run that this worker belongs to is over.")
        self._listen()
        self.joining = True
        self.become(self._alone(_ALONE + self.form.number, task))
        self._take_place_of_joiner()

    def part(self, completed: bool) -> None:
        """Closes the line at the program's end; if the run is `completed`, all programs end."""
        if self.out:
            return
        self.out = True
        if self.joining or not completed:
            self.line.close()  # the run may go on without this worker
        else:
            self.line.done()


def in_short(error: tf.errors.OpError) -> str:
    """Returns the line of a TensorFlow error that states the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "tfpara:" in line or "error received from" in line.lower())
    return next(telling, lines[-1] if lines else type(error).__name__)
