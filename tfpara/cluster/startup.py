"""Gathers the workers of a cluster before TensorFlow starts.

TensorFlow's own start waits for missing workers for ever, and does so inside C++ with Python's
interpreter locked: no exception, no Ctrl-C, no thread of ours can end it. So the workers meet first
over plain TCP, on the addresses that TensorFlow will use: every worker says hello to the chief, and
the chief tells all of them whether to go on. That finds absent workers, workers whose TF_CONFIG
differs, two workers with the same task, ports in use and addresses that lead nowhere, and all
workers report the same cause. Messages are signed with the run's secret (`messages.py`).
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tfpara.cluster import Cluster, messages, ports, quiet, secret
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.cluster.reach import unreachable

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 10.0  # for one exchange between processes that are up
_LOG_SECONDS = 30.0
# After the meeting TensorFlow connects within seconds, unless a worker dies just then.
_CONNECT_SECONDS = 120.0
_PURPOSE = "start"

_met: set[Cluster] = set()
_log = logging.getLogger(__name__)


class StartupError(RuntimeError):
    """The workers did not all come together. The message says who is missing or differs."""


@contextlib.contextmanager
def guard(cluster: Cluster, timeout_seconds: float) -> Iterator[None]:
    """Waits for all workers, then runs a body that starts TensorFlow's server, and watches it.

    The body may not hang: if it takes over two minutes, the process prints where it is and exits
    with code 1. That happens if a worker dies between the meeting and TensorFlow's connection.
    SIGTERM does afterwards what it did before.

    Args:
        cluster: this process's view of the cluster. Does nothing if that is one process, or if
            this process has been through it with the same cluster.
        timeout_seconds: longest wait for the other workers.

    Raises:
        StartupError: by `meet`.
    """
    if cluster.num_workers == 1 or cluster in _met:
        yield
        return
    meet(cluster, timeout_seconds)
    # Python threads stand still in TensorFlow's start; this timer is a thread in C.
    faulthandler.dump_traceback_later(_CONNECT_SECONDS, exit=True, file=sys.__stderr__ or 2)
    try:
        with quiet.starting():
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        _take_back_sigterm()
    _met.add(cluster)


def _take_back_sigterm() -> None:
    """Undoes that TensorFlow's server, in C++, takes SIGTERM and does nothing on it.

    The processes that this one forks would ignore it, too, and their pool could not end them. Only
    the main thread may do so.
    """
    if threading.current_thread() is threading.main_thread():
        former = signal.getsignal(signal.SIGTERM)  # as Python knows it
        if former is not None:
            signal.signal(signal.SIGTERM, former)


def meet(
    cluster: Cluster,
    timeout_seconds: float,
    collectives: str = "tensorflow",
    shared: bytes | None = None,
) -> None:
    """Waits until every worker of the cluster has called this with the same arguments.

    Listens on this worker's port meanwhile, and frees it.

    Args:
        cluster: this process's view of the cluster.
        timeout_seconds: longest wait for the other workers.
        collectives: the backend that the worker goes on to start.
        shared: the secret of the run; that of the environment if None.

    Raises:
        StartupError: a worker did not come in time, has another TF_CONFIG, other collectives or
            another secret, or has the same task as another; or an address is in use or leads
            nowhere. All workers that came raise it.
        tfpara.cluster.secret.SecretError: the secret of the environment is none.
    """
    if cluster.num_workers == 1:
        return
    shared = secret.read() if shared is None else shared
    deadline = time.monotonic() + timeout_seconds
    name = cluster.describe(cluster.rank)
    listener = listen(cluster.address, name, cluster.num_workers)
    if not cluster.is_chief:
        with contextlib.closing(ports.OpenPort(listener)):
            _report_to_chief(cluster, collectives, shared, timeout_seconds, deadline)
        return
    secret.warn_without(shared, cluster.addresses)
    door = Door(listener, shared, _PURPOSE, cluster.num_workers)
    try:
        problem = _gather(cluster, collectives, door, timeout_seconds, deadline)
        door.tell_guests(problem=problem)
    finally:
        door.close(_ANSWER_SECONDS)
    if problem:
        raise StartupError(problem)


def _gather(
    cluster: Cluster, collectives: str, door: Door, timeout_seconds: float, deadline: float
) -> str | None:
    """Lets all workers in; returns what is wrong, or None when all have come."""
    guests: dict[int, Channel] = {}  # by rank
    log_at = time.monotonic() + _LOG_SECONDS
    complete_since = float("inf")  # another with the same task may be just behind
    while True:
        door.wait(_RETRY_SECONDS)
        for channel, said in door.poll():
            if channel.closed:  # it came, died and may be started again
                guests = {rank: guest for rank, guest in guests.items() if guest is not channel}
                door.drop(channel)
            elif channel not in guests.values():
                problem = _admit(cluster, collectives, door, guests, channel, said[0])
                if problem:
                    return problem
        missing = [rank for rank in range(1, cluster.num_workers) if rank not in guests]
        names = ", ".join(cluster.describe(rank) for rank in missing)
        now = time.monotonic()
        complete_since = float("inf") if missing else min(now, complete_since)
        if now - complete_since >= _RETRY_SECONDS:
            break
        if missing and now >= deadline:
            return (
                f"after {timeout_seconds:g} s these workers have not started: {names}. Start one "
                "process for each address of TF_CONFIG within startup_timeout_seconds, and see to "
                f"it that they reach the chief at {cluster.address}.{door.turned_away}"
            )
        if missing and now >= log_at:
            _log.warning("Waiting for %s.", names)
            log_at = now + _LOG_SECONDS
    astray = unreachable(cluster, _ANSWER_SECONDS)
    if astray:
        return (
            f"{', '.join(astray)} came to the chief, but the chief cannot connect to the address. "
            "Correct it in TF_CONFIG, or open the port in the firewall."
        )
    return None


def _admit(
    cluster: Cluster,
    collectives: str,
    door: Door,
    guests: dict[int, Channel],
    channel: Channel,
    hello: dict[str, Any],
) -> str | None:
    """Lets in who says hello, and adds it to `guests`; returns what is wrong with it, or None."""
    rank, view = hello.get("rank"), hello.get("cluster")
    if not isinstance(rank, int) or not isinstance(view, list) or len(view) != 2:
        door.drop(channel)  # not one of us
        return None
    door.let_in(channel)
    theirs = hello.get("collectives", "tensorflow")
    if view != _view(cluster):
        return (
            f"TF_CONFIG differs between workers: {cluster.describe(0)} has the cluster "
            f"{_view(cluster)[0]}, worker {rank} has {view[0]} (or other jobs). "
            "Give all workers the same cluster; only the task differs."
        )
    if theirs != collectives:
        return (
            f"collectives: worker 0 has {collectives!r}, worker {rank} has "
            f"{theirs!r}. Give all workers the same."
        )
    if rank in guests:
        return (
            "two processes have the same task in TF_CONFIG: both are "
            f"{cluster.describe(rank)}. Give each worker an index of its own."
        )
    guests[rank] = channel
    return None


def _report_to_chief(
    cluster: Cluster, collectives: str, shared: bytes, timeout_seconds: float, deadline: float
) -> None:
    log_at = time.monotonic() + _LOG_SECONDS
    while True:
        try:
            # The chief, which may have started last, waits for the others in its turn.
            problem = _ask_chief(
                cluster, collectives, shared, deadline, timeout_seconds + 2 * _ANSWER_SECONDS
            )
            break
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now >= deadline:
                raise StartupError(
                    f"after {timeout_seconds:g} s this worker has not started: "
                    f"{cluster.describe(0)} (last answer: {error}). Start one process for each "
                    "address of TF_CONFIG within startup_timeout_seconds, the chief at its own."
                ) from None
            if now >= log_at:
                _log.warning("Waiting for %s (%s).", cluster.describe(0), error)
                log_at = now + _LOG_SECONDS
        time.sleep(_RETRY_SECONDS)
    if problem:
        raise StartupError(problem)


def _ask_chief(
    cluster: Cluster, collectives: str, shared: bytes, deadline: float, answer_seconds: float
) -> str | None:
    """Says hello to the chief; returns what it says to be wrong, or None.

    Raises:
        OSError: the chief is not there, or did not answer.
    """
    wait = max(_RETRY_SECONDS, min(_ANSWER_SECONDS, deadline - time.monotonic()))
    chief = messages.connect(cluster.addresses[0], shared, _PURPOSE, wait)
    try:
        chief.send(rank=cluster.rank, cluster=_view(cluster), collectives=collectives)
        answer = chief.wait(time.monotonic() + answer_seconds)
    finally:
        chief.close()
    if chief.differs:
        return messages.other_secret(cluster.describe(0))
    if answer is None or "problem" not in answer:
        raise ConnectionError("it did not answer")
    return answer["problem"]


def _view(cluster: Cluster) -> list[Any]:
    """What all workers must see alike, as JSON gives it back."""
    return [list(cluster.addresses), cluster.has_chief_job]


def listen(address: str, name: str, guests: int = 0) -> socket.socket:
    """Listens on an address of this process: see `ports.own_host`.

    Args:
        address: this process's "host:port".
        name: this process in messages.
        guests: how many may connect at once.

    Raises:
        StartupError: the port is in use.
    """
    given, _, port = address.rpartition(":")
    try:
        # TensorFlow's server will take the port on all interfaces, so it must be free on all.
        ports.bind("", int(port)).close()
        listener = ports.bind(ports.own_host(given), int(port))
        listener.listen(max(128, guests))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of this process, {name}, is in use, perhaps by a worker of an "
                "earlier run. End that, or change the port in TF_CONFIG."
            ) from None
        raise StartupError(f"cannot listen on port {port} of TF_CONFIG: {error}.") from None
    return listener
