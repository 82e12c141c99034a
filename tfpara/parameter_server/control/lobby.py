"""The chief's side of the control channel: its sockets and its thread.

TensorFlow waits forever for a process that does not start or stops answering, and it does not tell
a parameter server that the run is over. So every worker and parameter server keeps a TCP connection
to the chief's address of TF_CONFIG during the whole run (`member.py` is the other end). The state
machine in `membership.py` decides which process is lost and when the run ends. TensorFlow's server
in the chief listens on another port.

Messages are signed with the run's secret (`tfpara/cluster/messages.py`). Workers and parameter
servers send `hello` (job, index, addresses and version), `serving` (TensorFlow's server listens),
`problem` (why that server cannot listen) and `leaving` (the signal that asked the process to end).
The chief sends `welcome`, `end` (exit code and a sentence), `finishing` (the same, to be obeyed
when the chief is gone) and `leave` (the exit code of a worker that has sent `leaving`, or null).
Empty messages, from both sides, are signs of life.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from typing import Any, NoReturn

from tfpara.cluster import ports, secret, startup
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.parameter_server.control import membership
from tfpara.parameter_server.control.member import PURPOSE
from tfpara.typing import Json

_TICK_SECONDS = 0.1
# TensorFlow connects to a lost task again and again, and would wait forever for an answer. So the
# lobby cuts these connections repeatedly, with this pause. The pause is short, because the chief
# may wait so long for each graph function that it makes, of which an evaluation makes a dozen.
_CUT_SECONDS = 0.2
# The longest wait until the other processes end, or until their addresses accept a connection.
_ANSWER_SECONDS = 10.0
_FIRST_FREE_PORT = 1024
_log = logging.getLogger(__name__)


class ParameterServerError(RuntimeError):
    """The run cannot continue. The message names the lost process and its address."""


class Lobby:
    """Gathers the workers and parameter servers, and watches them until the run is over.

    A `Lobby` listens on the chief's address as soon as it is made. `cluster` is the chief's view of
    the cluster; the time limits are those of `AsyncStrategy`.

    Attributes:
        tensorflow_address: "host:port" on which TensorFlow's server of the chief is to listen.
        state: the state machine of the processes (`membership.py`); the chief's program sets its
            `asked_to_end` and `restart_code`.

    Raises:
        tfpara.StartupError: the chief's port is in use.
        tfpara.cluster.secret.SecretError: the secret of the environment is not valid.
    """

    def __init__(
        self, cluster: AsyncCluster, startup_timeout_seconds: float, timeout_seconds: float
    ) -> None:
        self._cluster = cluster
        shared = secret.read()
        secret.warn_without(shared, itertools.chain(*cluster.jobs.values()))
        listener = startup.listen(cluster.address, cluster.name, len(cluster.members))
        self._door = Door[membership.Task](listener, shared, PURPOSE, len(cluster.members))
        self.tensorflow_address = _free_address(cluster)
        self.state = membership.Membership(
            cluster,
            self.tensorflow_address,
            startup_timeout_seconds,
            timeout_seconds,
            time.monotonic(),
        )
        self._hosts: dict[membership.Task, str] = {}  # IP address from which each task connected
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tfpara-lobby", daemon=True)
        self._thread.start()

    def gather(self) -> None:
        """Waits until TensorFlow's server listens in every worker and parameter server.

        Raises tfpara.StartupError if that cannot be; all connected processes end with its message.
        """
        state = self.state
        while state.phase == "gathering":
            with self._changed:
                self._changed.wait_for(lambda: state.problem or not state.missing)
            astray = None if state.problem else _astray(self._cluster)
            with self._changed:
                state.reached(astray)
            if state.problem:
                self.fail(state.problem)
                raise startup.StartupError(state.problem)

    def check(self) -> None:
        """Raises ParameterServerError if the run cannot continue."""
        if self.state.failure:
            raise ParameterServerError(self.state.failure)

    def lost(self) -> list[int]:
        """Returns the indices of workers that were lost since the last call."""
        with self._changed:
            found, self.state.lost = self.state.lost, []
        return found

    def end_with_process(self, code: int = 0, sentence: str = "") -> None:
        """Tells all processes to end as soon as this process is gone; arguments as for `fail`."""
        # The chief's program calls this at its exit, since until then TensorFlow needs the others.
        with self._changed:
            self._do(self.state.end(code, sentence, "finishing"))

    def fail(self, sentence: str, code: int = 1) -> None:
        """Tells all processes to end, waits until they do, and stops listening.

        They print the cause, `sentence`, if their exit code, `code`, is not 0.
        """
        with self._changed:
            self._do(self.state.end(code, sentence))
            self._changed.wait_for(lambda: not self._door.guests, timeout=_ANSWER_SECONDS)
            self._closing = True
        self._thread.join()
        self._door.close()

    def _run(self) -> None:
        while not self._closing:
            self._door.wait(_TICK_SECONDS)
            with self._changed:
                heard = {task: guest.heard for task, guest in self._door.guests.items()}
                self._do(self.state.tick(time.monotonic(), heard, self._door.turned_away))
                self._door.serve(self._hear, self._lose)
                self._changed.notify_all()

    def _hear(
        self, channel: Channel, task: membership.Task | None, message: dict[str, Json]
    ) -> None:
        match message:
            case {"problem": sentence} if task:
                self._do(self.state.fails_to_serve(str(sentence)))
            case {"leaving": signal} if task:
                self._do(self.state.leaves(task, str(signal)))
            case {"serving": _} if task and not channel.closed:
                self._do(self.state.serves(task))
            case {
                "hello": view,
                "job": str() as job,
                "index": int() as index,
                "version": version,
            } if not task and not channel.closed:
                # If the process is refused, its connection is not closed here, because the process
                # closes it, or `Door` does so later.
                said = self.state.hello((job, index), view, version, time.monotonic())
                self._do(said, channel)
            case _ if not task:  # the sender is not tfpara
                self._door.drop(channel)

    def _lose(self, task: membership.Task) -> None:
        self._do(self.state.gone(task, "its connection ended", time.monotonic()))

    def _do(self, actions: list[membership.Action], stranger: Any = None) -> None:
        """Executes the state machine's actions; `stranger` is the connection that said hello."""
        for action in actions:
            match action:
                case membership.Send(task, message):
                    (self._door.guests[task] if task else stranger).send(**message)
                case membership.Admit(task):
                    self._hosts[task] = stranger.peer_host
                    self._door.let_in(stranger, task)
                case membership.Drop(task):
                    self._drop(task)
                case membership.Note(sentence):
                    _log.warning("%s", sentence)
                case membership.Exit(sentence):
                    _leave(sentence)

    def _drop(self, task: membership.Task) -> None:
        """Closes the connection of a task, and keeps TensorFlow from waiting for the task."""
        self._door.drop(self._door.guests[task])
        job, index = task
        address = self._cluster.jobs[job][index]
        # The first cut must come before the task's new process is let in, because a later one would
        # end that process's connections. So it is made at once, and only to the IP address from
        # which the task has connected. To look up the task's host name may take long, and by now
        # the name may lead to another machine, or nowhere. So only `_keep_cut` does that, and adds
        # the addresses that it finds.
        lost = {(self._hosts[task], int(ports.split(address)[1]))}
        ports.cut(lost)
        threading.Thread(target=self._keep_cut, args=(task, address, lost), daemon=True).start()

    def _keep_cut(self, task: membership.Task, address: str, lost: set[tuple[str, int]]) -> None:
        """Ends all connections to a task that is lost, until it is back.

        A suspended process does not answer TensorFlow's calls, which have no time limit, and its
        machine still accepts each new connection. So one cut is not enough.
        """
        while True:
            lost |= ports.places(address)
            # The lock is held, so that the task is not let in between the check and the cut.
            # Otherwise the cut would end the connections of the task's new process.
            with self._changed:
                if task in self._door.guests or self._closing:
                    return
                ports.cut(lost)
            time.sleep(_CUT_SECONDS)


def _leave(sentence: str) -> NoReturn:
    """Ends this process at once, because a TensorFlow call blocks its program."""
    with contextlib.suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)
    os._exit(1)


def _astray(cluster: AsyncCluster) -> str | None:
    """Returns a message that names the addresses where nothing accepts a connection, or None.

    TensorFlow would wait for them forever.
    """
    addresses = {
        cluster.describe(job, index): cluster.jobs[job][index] for job, index in cluster.members
    }
    found = ports.accepting(tuple(addresses.values()), _ANSWER_SECONDS)
    names = [name for name, address in addresses.items() if address not in found]
    if not names:
        return None
    return (
        f"{', '.join(names)} came to the chief, but the chief cannot connect to the address. "
        "Correct it in TF_CONFIG, or open the port in the firewall."
    )


def _free_address(cluster: AsyncCluster) -> str:
    """Returns "host:port": the chief's host, and a free port that no address of the cluster has.

    The search goes up from the chief's own port, and then from 1024.
    """
    host, _, own = cluster.address.rpartition(":")
    addresses = itertools.chain.from_iterable(cluster.jobs.values())
    taken = {int(address.rpartition(":")[2]) for address in addresses}
    for port in itertools.chain(range(int(own) + 1, 1 << 16), range(_FIRST_FREE_PORT, int(own))):
        if port not in taken:
            address = f"{host}:{port}"
            with contextlib.suppress(startup.StartupError), startup.listen(address, cluster.name):
                return address
    raise startup.StartupError(f"the host of {cluster.name} has no free port for TensorFlow.")
