"""Gathers the workers of a cluster before TensorFlow starts.

TensorFlow's own start waits for missing workers for ever, and does so inside C++ with Python's
interpreter locked: no exception, no Ctrl-C, no thread of ours can end it. So the workers meet first
over plain TCP, on the addresses that TensorFlow will use: every worker says hello to the chief, and
the chief tells all of them whether to go on. That finds absent workers, workers whose TF_CONFIG
differs, two workers with the same task, ports in use and addresses that lead nowhere, and all
workers report the same cause.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfpara.cluster import Cluster
from tfpara.reach import unreachable

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 10.0  # for one exchange between processes that are up
_LOG_SECONDS = 30.0
# After the meeting TensorFlow connects within seconds, unless a worker dies just then.
_CONNECT_SECONDS = 120.0
_LONGEST_MESSAGE = 1 << 20  # bytes

_met: set[Cluster] = set()
_log = logging.getLogger(__name__)


class StartupError(RuntimeError):
    """The workers did not all come together. The message says who is missing or differs."""


@contextlib.contextmanager
def guard(cluster: Cluster, timeout_seconds: float) -> Iterator[None]:
    """Waits for all workers, then runs a body that starts TensorFlow's server, and watches it.

    The body may not hang: if it takes over two minutes, the process prints where it is and exits
    with code 1. That happens if a worker dies between the meeting and TensorFlow's connection.

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
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    _met.add(cluster)


def meet(cluster: Cluster, timeout_seconds: float, collectives: str = "tensorflow") -> None:
    """Waits until every worker of the cluster has called this with the same arguments.

    Listens on this worker's port meanwhile, and frees it.

    Args:
        cluster: this process's view of the cluster.
        timeout_seconds: longest wait for the other workers.
        collectives: the backend that the worker goes on to start.

    Raises:
        StartupError: a worker did not come in time, has another TF_CONFIG or other collectives, or
            has the same task as another; or an address is in use or leads nowhere. All workers
            that came raise it.
    """
    if cluster.num_workers == 1:
        return
    deadline = time.monotonic() + timeout_seconds
    name = cluster.describe(cluster.rank)
    with listen(cluster.address, name, cluster.num_workers) as listener:
        if not cluster.is_chief:
            _report_to_chief(cluster, collectives, timeout_seconds, deadline)
            return
        guests: dict[int, socket.socket] = {}
        try:
            problem = _gather(cluster, collectives, listener, guests, timeout_seconds, deadline)
            for guest in guests.values():
                with contextlib.suppress(OSError):
                    _send(guest, {"problem": problem})
        finally:
            for guest in guests.values():
                guest.close()
    if problem:
        raise StartupError(problem)


class _Hello(NamedTuple):
    rank: int
    cluster: list[Any]
    collectives: str
    guest: socket.socket


def _gather(
    cluster: Cluster,
    collectives: str,
    listener: socket.socket,
    guests: dict[int, socket.socket],
    timeout_seconds: float,
    deadline: float,
) -> str | None:
    """Fills `guests` by rank; returns what is wrong, or None when all have come."""
    log_at = time.monotonic() + _LOG_SECONDS
    for hello in _hellos(listener):
        missing = [rank for rank in range(1, cluster.num_workers) if rank not in guests]
        names = ", ".join(cluster.describe(rank) for rank in missing)
        now = time.monotonic()
        if hello is not None:
            problem = _admit(cluster, collectives, guests, hello)
            if problem:
                return problem
        elif not missing:
            break
        elif now >= deadline:
            return (
                f"after {timeout_seconds:g} s these workers have not started: {names}. Start one "
                "process for each address of TF_CONFIG within startup_timeout_seconds, and see to "
                f"it that they reach the chief at {cluster.address}."
            )
        elif now >= log_at:
            _log.warning("Waiting for %s.", names)
            log_at = now + _LOG_SECONDS
    astray = unreachable(cluster, _ANSWER_SECONDS)
    if astray:
        return (
            f"{', '.join(astray)} came to the chief, but the chief cannot connect to the address. "
            "Correct it in TF_CONFIG, or open the port in the firewall."
        )
    return None


def _hellos(listener: socket.socket) -> Iterator[_Hello | None]:
    """Yields the hellos that arrive, and None at least every `_RETRY_SECONDS`."""
    hellos: queue.SimpleQueue[_Hello] = queue.SimpleQueue()

    def receive(guest: socket.socket) -> None:
        try:
            guest.settimeout(_ANSWER_SECONDS)
            message = _receive(guest)
            said = message.get("collectives", "tensorflow")
            hellos.put(_Hello(int(message["rank"]), list(message["cluster"]), said, guest))
        except (OSError, ValueError, KeyError, TypeError):  # not one of us
            guest.close()

    listener.settimeout(_RETRY_SECONDS)
    while True:
        with contextlib.suppress(TimeoutError):
            guest, _ = listener.accept()
            threading.Thread(target=receive, args=(guest,), daemon=True).start()
        while not hellos.empty():
            yield hellos.get()
        yield None


def _admit(
    cluster: Cluster, collectives: str, guests: dict[int, socket.socket], hello: _Hello
) -> str | None:
    """Adds a worker to `guests`; returns what is wrong with it, or None."""
    if not _is_open(hello.guest):  # it came, died and may be started again
        return None
    former = guests.get(hello.rank)
    twins = former is not None and _is_open(former)
    guests[-1 if twins else hello.rank] = hello.guest
    if hello.cluster != _view(cluster):
        return (
            f"TF_CONFIG differs between workers: {cluster.describe(0)} has the cluster "
            f"{_view(cluster)[0]}, worker {hello.rank} has {hello.cluster[0]} (or other jobs). "
            "Give all workers the same cluster; only the task differs."
        )
    if hello.collectives != collectives:
        return (
            f"collectives: worker 0 has {collectives!r}, worker {hello.rank} has "
            f"{hello.collectives!r}. Give all workers the same."
        )
    if twins:
        return (
            "two processes have the same task in TF_CONFIG: both are "
            f"{cluster.describe(hello.rank)}. Give each worker an index of its own."
        )
    return None


def _report_to_chief(
    cluster: Cluster, collectives: str, timeout_seconds: float, deadline: float
) -> None:
    host, _, port = cluster.addresses[0].rpartition(":")
    hello = {"rank": cluster.rank, "cluster": _view(cluster), "collectives": collectives}
    log_at = time.monotonic() + _LOG_SECONDS
    while True:
        try:
            wait = max(_RETRY_SECONDS, min(_ANSWER_SECONDS, deadline - time.monotonic()))
            with socket.create_connection((host.strip("[]"), int(port)), wait) as chief:
                _send(chief, hello)
                # The chief, which may have started last, waits for the others in its turn.
                chief.settimeout(timeout_seconds + 2 * _ANSWER_SECONDS)
                problem = _receive(chief)["problem"]
                break
        except (OSError, UnicodeError, ValueError, KeyError, TypeError) as error:
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


def _view(cluster: Cluster) -> list[Any]:
    """What all workers must see alike, as JSON gives it back."""
    return [list(cluster.addresses), cluster.has_chief_job]


def listen(address: str, name: str, guests: int = 0) -> socket.socket:
    """Listens on all interfaces, as TensorFlow's server does.

    Args:
        address: this process's "host:port".
        name: this process in messages.
        guests: how many may connect at once.

    Raises:
        StartupError: the port is in use.
    """
    port = int(address.rpartition(":")[2])
    backlog = max(128, guests)
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
                )
        return socket.create_server(("", port), backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of this process, {name}, is in use, perhaps by a worker of an "
                "earlier run. End that, or change the port in TF_CONFIG."
            ) from None
        raise StartupError(f"cannot listen on port {port} of TF_CONFIG: {error}.") from None


def _is_open(guest: socket.socket) -> bool:
    """Whether a guest, who has nothing more to say, is still there."""
    guest.setblocking(False)
    try:
        return bool(guest.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        guest.settimeout(_ANSWER_SECONDS)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Reads one line of JSON; ValueError if it is none."""
    with connection.makefile("rb") as stream:
        line = stream.readline(_LONGEST_MESSAGE)
    if not line:
        raise ValueError("connection closed")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"unexpected message {line[:50]!r}")
    return message
