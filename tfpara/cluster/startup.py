"""Gathers the workers of a cluster before TensorFlow starts.

TensorFlow's own start waits for missing workers for ever, and does so inside C++ with Python's
interpreter locked: no exception, no Ctrl-C, no thread of ours can end it. So the workers meet first
over plain TCP, on the addresses that TensorFlow will use: every worker says hello to the chief, and
the chief tells all of them whether to go on. That finds absent workers, workers whose TF_CONFIG
differs, two workers with the same task, ports in use and addresses that lead nowhere, and all
workers report the same cause. Messages are signed with the run's secret (`messages.py`).

Workers that know their ranks alone, from an engine (`engines.py`), find each other first, in the
same way: rank 0 listens at the coordinator's address, each says at which port of its own TensorFlow
may listen, and all are told the addresses of all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tfpara.cluster import Cluster, engines, label, messages, ports, quiet, secret, workers
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.cluster.reach import unreachable
from tfpara.typing import Json

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 10.0  # for one exchange between processes that are up
_LOG_SECONDS = 30.0
# After the meeting TensorFlow connects within seconds, unless a worker dies just then.
_CONNECT_SECONDS = 120.0
_PURPOSE = "start"

_met: set[Cluster] = set()
_found: dict[Cluster, Cluster] = {}  # by what the engine has told
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
        with quiet.starting(), _sigterm_kept():
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    _met.add(cluster)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Undoes that TensorFlow's server, in C++, takes SIGTERM and does nothing on it.

    The processes that this one forks would ignore it, too, and their pool could not end them.
    Python sets signals in the main thread alone, and engines such as Ray train in another; the C
    library's function is for any thread.
    """
    libc = ctypes.CDLL(None)
    former = ctypes.create_string_buffer(1024)  # more than a struct sigaction
    libc.sigaction(signal.SIGTERM, None, former)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, former, None)


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
    terms = _terms(cluster, collectives)
    if not cluster.is_chief:
        hello = {"rank": cluster.rank, "cluster": _view(cluster), "collectives": collectives}
        with contextlib.closing(ports.OpenPort(listener)):
            _report_to_chief(terms, lambda _: hello, shared, timeout_seconds, deadline)
        return
    secret.warn_without(shared, cluster.addresses)
    door = Door(listener, shared, _PURPOSE, cluster.num_workers)
    try:
        guests = _gather(terms, door, timeout_seconds, deadline)
        problem = guests if isinstance(guests, str) else _astray(cluster, deadline)
        door.tell_guests(problem=problem)
    finally:
        door.close(_ANSWER_SECONDS)
    if problem:
        raise StartupError(problem)


def find_each_other(
    cluster: Cluster, timeout_seconds: float, collectives: str = "tensorflow"
) -> Cluster:
    """The cluster with addresses, of processes that an engine has told their ranks alone.

    Args:
        cluster: this process's view; returned as it is if it has addresses, or no others.
        timeout_seconds: longest wait for the other workers.
        collectives: the backend that the worker goes on to start.

    Raises:
        ClusterError: it is not known where rank 0 is.
        StartupError: a worker did not come in time, counts other processes, has another secret or
            other collectives, or the same rank as another; or rank 0 cannot listen at the
            coordinator's address. All workers that came raise it.
        tfpara.cluster.secret.SecretError: the secret of the environment is none.
    """
    told = cluster.told
    if told is None:
        return cluster
    if cluster in _found:
        return _found[cluster]
    if not told.coordinator:
        raise workers.ClusterError(engines.no_coordinator(told))
    level = logging.INFO if told.rank else logging.WARNING  # which is shown by default
    _log.log(level, "tfpara: %s.", told.described())
    shared = secret.read()
    deadline = time.monotonic() + timeout_seconds
    terms = _terms_of(told, collectives)
    with contextlib.closing(ports.reserve()) as own:
        port = own.getsockname()[1]
        if told.rank:
            answer = _report_to_chief(
                terms,
                lambda channel: {
                    "rank": told.rank,
                    "size": told.size,
                    "collectives": collectives,
                    "at": [channel.own_host, port],
                },
                shared,
                timeout_seconds,
                deadline,
            )
            addresses = answer["addresses"]
        else:
            addresses = _tell_addresses(told, terms, port, shared, timeout_seconds, deadline)
    _found[cluster] = workers.of_rank(told, tuple(addresses))
    return _found[cluster]


def _tell_addresses(
    told: engines.Told,
    terms: _Terms,
    port: int,
    shared: bytes,
    timeout_seconds: float,
    deadline: float,
) -> list[str]:
    """Lets all workers in at the coordinator's address, and tells them the addresses of all."""
    host, _, number = told.coordinator.rpartition(":")
    try:
        listener = ports.bind(ports.own_host(host), int(number))
        listener.listen(max(128, told.size))
    except OSError as error:
        raise StartupError(
            f"rank 0 cannot listen at {told.coordinator} ({told.coordinator_from}): "
            f"{error.strerror}. End what else listens there, a second process with rank 0 perhaps, "
            f"or set {engines.COORDINATOR}=host:port to a free port of this machine for all "
            "processes."
        ) from None
    door = Door(listener, shared, _PURPOSE, told.size)
    try:
        guests = _gather(terms, door, timeout_seconds, deadline)
        if isinstance(guests, str):
            door.tell_guests(problem=guests)
            raise StartupError(guests)
        addresses = _addresses(port, guests)
        door.tell_guests(problem=None, addresses=addresses)
    finally:
        door.close(_ANSWER_SECONDS)
    return addresses


def _addresses(port: int, guests: Mapping[int, _Guest]) -> list[str]:
    """Where the workers listen, by rank, as all of them can reach it.

    Who came by loopback is on the chief's machine, and as reachable as the chief is for those who
    came from elsewhere.
    """
    at = {rank: guest.hello["at"] for rank, guest in guests.items()}
    outside = [rank for rank, (host, _) in at.items() if not secret.is_loopback(f"{host}:0")]
    own = guests[outside[0] if outside else 1].channel.own_host
    places = [(own, port)]
    for rank in range(1, len(at) + 1):
        host, number = at[rank]
        here = bool(outside) and rank not in outside
        places.append((own if here else host, number))
    return [f"[{host}]:{number}" if ":" in host else f"{host}:{number}" for host, number in places]


class _Guest(NamedTuple):
    """A worker that has come."""

    channel: Channel
    hello: Mapping[str, Json]


class _Terms(NamedTuple):
    """What holds of a meeting.

    Attributes:
        size: number of workers.
        chief: where the chief listens, "host:port".
        describe: names a worker in messages, by rank.
        check: what is wrong with what a worker says, or None; given its rank and its hello.
        known: whether a hello has the form of those of this kind of meeting.
        twice: that two have the same rank, in a sentence; given the rank.
        absent: what to do if workers do not come.
        chief_where: where the chief is to be started, in words.
    """

    size: int
    chief: str
    describe: Callable[[int], str]
    check: Callable[[int, Mapping[str, Json]], str | None]
    known: Callable[[Mapping[str, Json]], bool]
    twice: Callable[[int], str]
    absent: str
    chief_where: str


def _terms(cluster: Cluster, collectives: str) -> _Terms:
    """Of workers that TF_CONFIG names."""

    def check(rank: int, hello: Mapping[str, Json]) -> str | None:
        view = hello["cluster"]
        if view != _view(cluster):
            return (
                f"TF_CONFIG differs between workers: {cluster.describe(0)} has the cluster "
                f"{_view(cluster)[0]}, worker {rank} has {view[0]} (or other jobs). "
                "Give all workers the same cluster; only the task differs."
            )
        return _other_collectives(rank, hello, collectives)

    return _Terms(
        cluster.num_workers,
        cluster.addresses[0],
        cluster.describe,
        check,
        lambda hello: isinstance(hello.get("cluster"), list) and len(hello["cluster"]) == 2,
        lambda rank: (
            "two processes have the same task in TF_CONFIG: both are "
            f"{cluster.describe(rank)}. Give each worker an index of its own."
        ),
        "Start one process for each address of TF_CONFIG",
        "the chief at its own",
    )


def _terms_of(told: engines.Told, collectives: str) -> _Terms:
    """Of workers that an engine has told their ranks."""

    def check(rank: int, hello: Mapping[str, Json]) -> str | None:
        if hello["size"] != told.size:
            return (
                f"the number of processes differs between workers: the chief has "
                f"{told.size_variable}={told.size}, and the process with rank {rank} counts "
                f"{hello['size']}. Start all of them as one run, with the same number."
            )
        return _other_collectives(rank, hello, collectives)

    return _Terms(
        told.size,
        told.coordinator,
        lambda rank: label(rank) if rank else f"chief ({told.coordinator})",
        check,
        _has_place,
        lambda rank: (
            f"two processes have the same rank: both have {told.rank_variable}={rank}. Give each "
            f"a rank of its own, from 0 to {told.size - 1}."
        ),
        f"Start one process for each rank below {told.size_variable}={told.size}",
        f"rank 0 where this address leads, which is from {told.coordinator_from}",
    )


def _has_place(hello: Mapping[str, Json]) -> bool:
    """Whether a hello says how many processes there are, and where this one is."""
    match hello:
        case {"size": int(), "at": [str() as host, int() as port]}:
            return ports.is_address(host) and 0 < port < 65536
    return False


def _other_collectives(rank: int, hello: Mapping[str, Json], collectives: str) -> str | None:
    theirs = hello.get("collectives", "tensorflow")
    if theirs == collectives:
        return None
    return (
        f"collectives: worker 0 has {collectives!r}, worker {rank} has "
        f"{theirs!r}. Give all workers the same."
    )


def _gather(
    terms: _Terms, door: Door, timeout_seconds: float, deadline: float
) -> dict[int, _Guest] | str:
    """Lets all workers in; returns them by rank when all have come, or what is wrong."""
    guests: dict[int, _Guest] = {}
    log_at = time.monotonic() + _LOG_SECONDS
    complete_since = float("inf")  # another with the same task may be just behind
    while True:
        door.wait(_RETRY_SECONDS)
        for channel, said in door.poll():
            if channel.closed:  # it came, died and may be started again
                guests = {r: guest for r, guest in guests.items() if guest.channel is not channel}
                door.drop(channel)
            elif all(channel is not guest.channel for guest in guests.values()):
                problem = _admit(terms, door, guests, channel, said[0])
                if problem:
                    return problem
        missing = [rank for rank in range(1, terms.size) if rank not in guests]
        names = ", ".join(terms.describe(rank) for rank in missing)
        now = time.monotonic()
        complete_since = float("inf") if missing else min(now, complete_since)
        if now - complete_since >= _RETRY_SECONDS:
            return guests
        if missing and now >= deadline:
            return (
                f"after {timeout_seconds:g} s these workers have not started: {names}. "
                f"{terms.absent} within startup_timeout_seconds, and see to it that they reach the "
                f"chief at {terms.chief}.{door.turned_away}"
            )
        if missing and now >= log_at:
            _log.warning("Waiting for %s.", names)
            log_at = now + _LOG_SECONDS


def _astray(cluster: Cluster, deadline: float) -> str | None:
    """Which of the workers that have come cannot be reached, in a sentence; or None."""
    while True:
        # A pod's name may be known later than the pod runs; asked first, for it may come meanwhile.
        unknown = ports.unknown(cluster.addresses)
        astray = unreachable(cluster, _ANSWER_SECONDS)
        if not astray or not unknown or time.monotonic() >= deadline:
            break
        time.sleep(_RETRY_SECONDS)
    if astray:
        return (
            f"{', '.join(astray)} came to the chief, but the chief cannot connect to the address. "
            "Correct it in TF_CONFIG, or open the port in the firewall."
        )
    return None


def _admit(
    terms: _Terms,
    door: Door,
    guests: dict[int, _Guest],
    channel: Channel,
    hello: Mapping[str, Json],
) -> str | None:
    """Lets in who says hello, and adds it to `guests`; returns what is wrong with it, or None."""
    rank = hello.get("rank")
    if not isinstance(rank, int) or rank < 0 or not terms.known(hello):
        door.drop(channel)  # not one of us
        return None
    door.let_in(channel)
    problem = terms.check(rank, hello)
    if problem is None and rank in guests:
        problem = terms.twice(rank)
    guests[rank] = _Guest(channel, hello)
    return problem


def _report_to_chief(
    terms: _Terms,
    hello: Callable[[Channel], Mapping[str, Json]],
    shared: bytes,
    timeout_seconds: float,
    deadline: float,
) -> dict[str, Json]:
    """Says hello until the chief is there; returns its answer.

    Raises:
        StartupError: nobody answers, or the chief says that something is wrong.
    """
    log_at = time.monotonic() + _LOG_SECONDS
    while True:
        try:
            # The chief, which may have started last, waits for the others in its turn.
            answer = _ask_chief(
                terms, hello, shared, deadline, timeout_seconds + 2 * _ANSWER_SECONDS
            )
            break
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now >= deadline:
                raise StartupError(
                    f"after {timeout_seconds:g} s this worker has not started: "
                    f"{terms.describe(0)} (last answer: {error}). {terms.absent} within "
                    f"startup_timeout_seconds, {terms.chief_where}."
                ) from None
            if now >= log_at:
                _log.warning("Waiting for %s (%s).", terms.describe(0), error)
                log_at = now + _LOG_SECONDS
        time.sleep(_RETRY_SECONDS)
    if answer["problem"]:
        raise StartupError(answer["problem"])
    return answer


def _ask_chief(
    terms: _Terms,
    hello: Callable[[Channel], Mapping[str, Json]],
    shared: bytes,
    deadline: float,
    answer_seconds: float,
) -> dict[str, Json]:
    """Says hello to the chief; returns its answer.

    Raises:
        OSError: the chief is not there, or did not answer.
    """
    wait = max(_RETRY_SECONDS, min(_ANSWER_SECONDS, deadline - time.monotonic()))
    chief = messages.connect(terms.chief, shared, _PURPOSE, wait)
    try:
        chief.send(**hello(chief))
        answer = chief.wait(time.monotonic() + answer_seconds)
    finally:
        chief.close()
    if chief.differs:
        return {"problem": messages.other_secret(terms.describe(0))}
    if answer is None or "problem" not in answer:
        raise ConnectionError("it did not answer")
    return answer


def _view(cluster: Cluster) -> list[Json]:
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
