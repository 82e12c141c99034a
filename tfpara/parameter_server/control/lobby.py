"""The chief's side of the control channel: gathers and watches the processes, and ends the run.

TensorFlow waits without end for a process that does not start or stops answering, and it does not
tell a parameter server that the run is over. So every worker and parameter server keeps a TCP
connection to the chief's address of TF_CONFIG for the whole run. Both ends send signs of life over
it; `member.py` has the other end. TensorFlow's server in the chief listens on another port.

If a worker is lost, the others go on without it, and it may come back at any time. If a parameter
server is lost, its part of the model is lost too: all processes end, with a message that names it.

Messages are signed with the run's secret (`tfpara/cluster/messages.py`). Workers and parameter
servers send `hello` (job, index, addresses and version), `serving` (TensorFlow's server listens),
`problem` (why it does not) and `leaving` (the signal that asked the process to end). The chief
sends `welcome`, `end` (exit code and a sentence), `finishing` (the same, for when the chief is
gone) and `leave` (the exit code of a worker that has sent `leaving`, or null). Empty messages, from
both sides, are signs of life.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from tfpara.cluster import secret, startup
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.parameter_server.control import admission
from tfpara.parameter_server.control.member import PURPOSE, beat_seconds
from tfpara.typing import Json

_TICK_SECONDS = 0.1
_ANSWER_SECONDS = 10.0  # longest wait for the other processes to end
_LOG_SECONDS = 30.0
# Seconds that the chief's program has, once the run has failed, to end by itself. A call of
# TensorFlow may block it; then the lobby's thread ends the process.
_LAST_SECONDS = 60.0
_log = logging.getLogger(__name__)


class ParameterServerError(RuntimeError):
    """The run cannot go on. The message names the process that is lost, with its address."""


class Lobby:
    """Gathers the workers and parameter servers, and watches them until the run is over.

    It listens on the chief's address as soon as it is made. The callbacks are called in the lobby's
    own thread, after `gather` has returned; they must not block.

    Args:
        cluster: the chief's view of the cluster.
        startup_timeout_seconds: longest wait for all processes to come.
        timeout_seconds: silence after which a process is taken for lost; also how long the run
            goes on waiting when there is no worker.
        on_worker_lost: called with the index of a worker that is gone or silent.
        on_worker_joined: called with the index of a worker that has come back.
        shared: the secret of the run; that of the environment if None.

    Attributes:
        tensorflow_address: "host:port" on which TensorFlow's server of the chief is to listen.
        failure: why the run cannot go on, in a sentence; None if it can.
        asked_to_end: a sentence on the process that got SIGTERM or SIGINT, and waits for the end
            of the run so that the model can still be saved: a parameter server, or the chief, which
            sets it; else None.
        restart_code: the exit code of a process that is asked to end and is to be started again,
            while the chief writes checkpoints; else None.

    Raises:
        tfpara.StartupError: the chief's port is in use.
        tfpara.cluster.secret.SecretError: the secret of the environment is not valid.
    """

    def __init__(
        self,
        cluster: AsyncCluster,
        startup_timeout_seconds: float,
        timeout_seconds: float,
        *,
        on_worker_lost: Callable[[int], None] = lambda index: None,
        on_worker_joined: Callable[[int], None] = lambda index: None,
        shared: bytes | None = None,
    ) -> None:
        self.failure: str | None = None
        self.asked_to_end: str | None = None
        self.restart_code: int | None = None
        self._cluster = cluster
        self._startup_timeout, self._timeout = startup_timeout_seconds, timeout_seconds
        self._on_lost, self._on_joined = on_worker_lost, on_worker_joined
        self._beat = beat_seconds(timeout_seconds)
        shared = secret.read() if shared is None else shared
        secret.warn_without(shared, itertools.chain(*cluster.spec().values()))
        listener = startup.listen(cluster.address, cluster.name, len(cluster.members))
        self._door = Door[str](listener, shared, PURPOSE, len(cluster.members))
        self.tensorflow_address = admission.free_address(cluster)
        self._guests: dict[tuple[str, int], Channel] = {}
        self._serving: set[tuple[str, int]] = set()
        self._leaving: dict[tuple[str, int], str] = {}  # workers that end, with the signal's name
        self._problem: str | None = None  # why the processes cannot come together
        self._gathered = False
        self._end: dict[str, Json] | None = None  # the last message, for late processes too
        self._without_workers_since: float | None = None
        self._failed_at = 0.0
        self._beat_at = 0.0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tfpara-lobby", daemon=True)
        self._thread.start()

    # -- the chief's program --------------------------------------------------------------------

    def gather(self) -> None:
        """Waits until TensorFlow's server listens in every worker and parameter server.

        Raises:
            tfpara.StartupError: a process did not come in time, has another TF_CONFIG or another
                version of tfpara, has the same task as another, could not start its server, or has
                an address that cannot be reached. All that came end with the same sentence.
        """
        deadline = time.monotonic() + self._startup_timeout
        log_at = time.monotonic() + _LOG_SECONDS
        while True:
            problem, missing = self._problem, self._missing()
            now = time.monotonic()
            if not problem and not missing:
                astray = admission.astray(self._cluster)
                missing = self._missing()
                problem = None if missing else astray  # one that has just died may come back
            names = ", ".join(missing)
            if missing and now >= deadline:
                absent = admission.absent(self._cluster, names, self._startup_timeout)
                problem = problem or absent + self._door.turned_away
            if problem:
                self.fail(problem)
                raise startup.StartupError(problem)
            with self._changed:
                # A process may have left while the addresses were checked.
                if not missing and not self._missing() and not self._problem:
                    self._gathered = True
                    return
                self._changed.wait(_TICK_SECONDS)
            if missing and now >= log_at:
                _log.warning("Waiting for %s.", names)
                log_at = now + _LOG_SECONDS

    def check(self) -> None:
        """Raises ParameterServerError if the run cannot go on."""
        if self.failure:
            raise ParameterServerError(self.failure)

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of the workers that are there now."""
        with self._changed:
            return tuple(sorted(index for job, index in self._serving if job == "worker"))

    def finish(self) -> None:
        """Tells all processes that the run is over, waits until they end, and stops listening."""
        self._close(0, "")

    def end_with_process(self, code: int = 0, sentence: str = "") -> None:
        """Tells all processes to end as soon as this process is gone.

        This is for the exit of the chief's program: until then TensorFlow still needs them.

        Args:
            code: their exit code.
            sentence: the cause; empty if the code is 0.
        """
        with self._changed:
            if self._end is None:
                self._end = {"code": code, "sentence": sentence}
                for guest in self._guests.values():
                    guest.send(finishing=self._end)

    def fail(self, sentence: str, code: int = 1) -> None:
        """Tells all processes to end with an error, waits until they do, and stops listening.

        Args:
            sentence: the cause, which they print.
            code: their exit code; 75 if the chief has written a checkpoint and asks for a restart.
        """
        self._close(code, sentence)

    def _close(self, code: int, sentence: str) -> None:
        with self._changed:
            self._say_end(code, sentence)
            self._changed.wait_for(lambda: not self._guests, timeout=_ANSWER_SECONDS)
            self._closing = True
        self._thread.join()
        self._guests.clear()
        self._door.close()

    def _say_end(self, code: int, sentence: str) -> None:
        """Sends `end` to all processes, unless the end of the run was sent before."""
        if self._end is None:
            self._end = {"code": code, "sentence": sentence}
            for guest in self._guests.values():
                guest.send(end=self._end)

    def _missing(self) -> list[str]:
        missing = [member for member in self._cluster.members if member not in self._serving]
        return [self._cluster.describe(*member) for member in missing]

    # -- the lobby's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._closing:
            self._door.wait(_TICK_SECONDS)
            told: list[Callable[[], None]] = []
            with self._changed:
                now, before = time.monotonic(), looked_at
                looked_at = now
                if now - before > self._timeout / 2:  # this process was stopped itself
                    for guest in self._guests.values():
                        guest.heard = now
                for channel, messages in self._door.poll():
                    told += itertools.chain(*self._door.heed(channel, messages, self._hear))
                    if channel.closed:
                        told += self._lose(channel, "its connection ended")
                told += self._look_at_the_clock(now)
                self._changed.notify_all()
            for tell in told:
                tell()

    def _hear(self, channel: Channel, message: dict[str, Json]) -> list[Callable[[], None]]:
        """Takes in a message; returns calls of callbacks."""
        member = self._member(channel)
        if member is None:
            if not channel.closed:
                self._greet(channel, message)
            return []
        name = self._cluster.describe(*member)
        if "problem" in message:
            if self._gathered:
                _log.warning("%s", message["problem"])
            self._problem = self._problem or str(message["problem"])
        elif "leaving" in message and member[0] == "ps":
            self.asked_to_end = f"{name} was asked to end ({message['leaving']})."
        elif "leaving" in message:
            self._leaving[member] = str(message["leaving"])
            channel.send(leave=self.restart_code)
        elif "serving" in message and member not in self._serving and not channel.closed:
            self._serving.add(member)
            if self._gathered and member[0] == "worker":
                _log.warning("%s is back.", name)
                return [lambda: self._on_joined(member[1])]
        return []

    def _greet(self, channel: Channel, message: dict[str, Json]) -> None:
        """Admits a process that has sent `hello`, or refuses it."""
        try:
            member = (str(message["job"]), int(message["index"]))
            view, their_version = message["hello"], message["version"]
        except (KeyError, TypeError, ValueError, OverflowError):  # not a process of tfpara
            self._drop(channel)
            return
        former = self._guests.get(member)
        problem = admission.objection(self._cluster, member, view, their_version)
        if former is not None and time.monotonic() - former.heard < 3 * self._beat:
            problem = problem or admission.twins(self._cluster, member)
        if self._end is not None or problem:
            channel.send(end=self._end or {"code": 1, "sentence": problem})
            if not self._gathered:
                self._problem = self._problem or problem
            # The channel stays open: the process closes it, or `Door` drops it.
            return
        if former is not None:  # silent: its machine may have died
            self._drop(former)
        self._door.let_in(channel)
        self._guests[member] = channel
        channel.send(
            welcome=self._cluster.spec(self.tensorflow_address), timeout_seconds=self._timeout
        )

    def _look_at_the_clock(self, now: float) -> list[Callable[[], None]]:
        told: list[Callable[[], None]] = []
        how = f"it was silent for longer than timeout_seconds={self._timeout:g}"
        for guest in [self._guests[member] for member in self._serving]:
            if now - guest.heard > self._timeout:
                told += self._lose(guest, how)
        if now >= self._beat_at:
            self._beat_at = now + self._beat
            for guest in self._guests.values():
                guest.send()
        if any(job == "worker" for job, _ in self._serving) or not self._gathered:
            self._without_workers_since = None
        elif self._without_workers_since is None:
            self._without_workers_since = now
        elif now - self._without_workers_since > self._timeout and not self._saves:
            self._fail_all(
                f"all workers are gone, and none has come back for timeout_seconds="
                f"{self._timeout:g}; start all processes again."
            )
        if self._failed_at and now - self._failed_at > _LAST_SECONDS:
            _leave(f"tfpara: {self.failure}")
        return told

    def _lose(self, channel: Channel, how: str) -> list[Callable[[], None]]:
        """Gives up a connection as lost; returns the callbacks to call."""
        member = self._member(channel)
        if member is None:
            self._drop(channel)
            return []
        name = self._cluster.describe(*member)
        was_serving = member in self._serving
        if member in self._leaving:
            how = f"it was asked to end ({self._leaving[member]})"
        # A process that was suspended reads this when it goes on.
        channel.send(end={"code": 1, "sentence": f"the chief has given {name} up: {how}."})
        self._drop(channel)
        if not (was_serving and self._gathered) or self._end is not None:
            return []
        if member[0] == "ps":
            self._fail_all(
                f"{name} is lost with its part of the model: {how}. Start all processes again, "
                "from the last checkpoint."
            )
            return []
        if not self._saves:
            _log.warning("%s is lost: %s. Training goes on without it.", name, how)
        return [lambda: self._on_lost(member[1])]

    @property
    def _saves(self) -> bool:
        """Whether the run is about to end with a checkpoint, which needs no worker."""
        return self.asked_to_end is not None and self.restart_code is not None

    def _fail_all(self, sentence: str) -> None:
        if self.failure is None:
            self.failure = sentence
            self._failed_at = time.monotonic()
            self._say_end(1, sentence)

    def _member(self, channel: Channel) -> tuple[str, int] | None:
        return next((member for member, guest in self._guests.items() if guest is channel), None)

    def _drop(self, channel: Channel) -> None:
        member = self._member(channel)
        if member is not None:
            del self._guests[member]
            self._serving.discard(member)
            self._leaving.pop(member, None)
        self._door.drop(channel)


def _leave(sentence: str) -> NoReturn:
    """Ends this process at once, because a call of TensorFlow blocks its program."""
    with contextlib.suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)
    os._exit(1)
