"""The meeting of a cluster's workers before TensorFlow starts.

TensorFlow's own start waits forever for missing workers, inside C++ and with Python's interpreter
locked, so that no exception, Ctrl-C or Python thread can end it. So the workers meet first over
plain TCP, at the addresses that TensorFlow will use. Every worker sends a hello to the chief, which
answers all of them with a go-ahead or with one problem: missing workers, differing TF_CONFIGs, two
workers with the same task, ports in use, wrong addresses. Messages are signed (`messages.py`).

Workers that know only their ranks, from an engine (`engines.py`), first find each other in the same
way: rank 0 listens at the coordinator's address, every worker sends its host and the port on which
TensorFlow may listen, and rank 0 sends the addresses to all.
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

from tfpara.cluster import (
    Cluster,
    engines,
    label,
    messages,
    parent,
    ports,
    quiet,
    secret,
    workers,
)
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.cluster.waiting import RETRY_SECONDS, tried, until
from tfpara.typing import Json

# Longest wait for an answer of a process that has started already. For processes that have not
# started yet, the wait is `timeout_seconds`.
_ANSWER_SECONDS = 10.0
# Longest start of TensorFlow after all workers have met. The start takes seconds; it hangs if a
# worker dies meanwhile.
_CONNECT_SECONDS = 120.0
_PURPOSE = "start"

_met: set[Cluster] = set()  # the clusters in which this process has started TensorFlow
_in_elastic_run = False
# Clusters that were read without addresses; each is mapped to the same cluster with addresses.
_found: dict[Cluster, Cluster] = {}
_log = logging.getLogger(__name__)


class StartupError(RuntimeError):
    """Not all workers came, or they differ. The message names the missing or differing workers."""


@contextlib.contextmanager
def guard(cluster: Cluster, timeout_seconds: float) -> Iterator[None]:
    """A context that first waits for all workers; its body starts TensorFlow's server.

    If the body takes over two minutes, the process prints a traceback and exits with code 1. That
    happens if a worker dies between the meeting and TensorFlow's connection. Afterwards SIGTERM has
    its former handler. The context does nothing in a cluster of one process, or in one that this
    process has met before.

    Raises:
        StartupError: as by `meet`; or this process has met another cluster before, as a Python
            worker of Spark may have, which serves one job after the other.
    """
    if cluster.num_workers == 1 or cluster in _met:
        yield
        return
    _refuse_another()
    meet(cluster, timeout_seconds)
    ports.without_proxy(cluster.addresses)
    # Python threads do not run during TensorFlow's start, so this timer is a thread in C.
    faulthandler.dump_traceback_later(_CONNECT_SECONDS, exit=True, file=sys.__stderr__ or 2)
    try:
        with quiet.starting(), _sigterm_kept():
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    _met.add(cluster)


@contextlib.contextmanager
def elastic_run() -> Iterator[None]:
    """A context after which this process is part of an elastic run; StartupError: it cannot be."""
    global _in_elastic_run
    _refuse_another()
    yield
    _in_elastic_run = True


def _refuse_another() -> None:
    """Raises StartupError if TensorFlow's server serves other workers already."""
    if not _met and not _in_elastic_run:
        return
    which = [", ".join(former.addresses) for former in _met] or ["an elastic run"]
    raise StartupError(
        f"this process has trained with other workers before ({which[0]}), and TensorFlow serves "
        "one cluster, or one elastic run, in the life of a process. Start each training in new "
        "processes; under Spark set spark.python.worker.reuse=false."
    )


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM, which TensorFlow's server replaces by an empty one.

    Otherwise this process would not notice SIGTERM. Nor would processes that it forks, so that a
    pool of processes could not be ended. Python can set handlers in the main thread alone, but
    engines such as Ray train in another thread. So the C library's function is called, which works
    in any thread.
    """
    libc = ctypes.CDLL(None)
    former = ctypes.create_string_buffer(1024)  # larger than a struct sigaction
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

    During the call this process listens on its port.

    Args:
        cluster, timeout_seconds: the workers, and the longest wait for them.
        collectives: the backend that the worker starts after the call.
        shared: the secret of the run; None takes that of the environment.

    Raises:
        StartupError: a worker did not come in time, has another TF_CONFIG, other collectives or
            another secret, or has the same task as another worker; or an address is in use or
            cannot be reached. All workers that came raise it.
        tfpara.cluster.secret.SecretError: the environment's secret is not valid.
    """
    if cluster.num_workers == 1:
        return
    shared = secret.read() if shared is None else shared
    terms = _terms(cluster, collectives, shared, timeout_seconds)
    listener = listen(cluster.address, cluster.describe(cluster.rank), cluster.num_workers)
    if not cluster.is_chief:
        hello = {"rank": cluster.rank, "cluster": _view(cluster), "collectives": collectives}
        with contextlib.closing(ports.OpenPort(listener)):
            _report_to_chief(terms, lambda _: hello)
        return
    secret.warn_without(shared, cluster.addresses)
    with _gathered(terms, listener) as (door, _):
        _check_reachable(cluster, terms.deadline)
        door.tell_guests(problem=None)


def find_each_other(
    cluster: Cluster, timeout_seconds: float, collectives: str = "tensorflow"
) -> Cluster:
    """Returns the cluster with addresses, for processes that know only their ranks.

    A cluster with addresses, or of a single process, is returned unchanged. Arguments as for
    `meet`.

    Raises:
        ClusterError: the address of rank 0 is not known.
        StartupError: a worker did not come in time, has another number of processes, another secret
            or other collectives, or has the same rank as another; or rank 0 cannot listen at the
            coordinator's address. All workers that came raise it.
        tfpara.cluster.secret.SecretError: the environment's secret is not valid.
    """
    told = cluster.told
    if told is None:
        return cluster
    if cluster in _found:
        return _found[cluster]
    if not told.coordinator:
        raise workers.ClusterError(engines.no_coordinator(told))
    # Rank 0 logs this as a warning, because Python shows warnings, but not INFO, by default.
    level = logging.INFO if told.rank else logging.WARNING
    _log.log(level, "tfpara: %s.", told.described())
    terms = _terms_of(told, collectives, secret.read(), timeout_seconds)
    with contextlib.closing(ports.reserve()) as own:
        port = own.getsockname()[1]
        if told.rank:
            hello = {"rank": told.rank, "size": told.size, "collectives": collectives}
            answer = _report_to_chief(terms, lambda chief: {**hello, "at": [chief.own_host, port]})
            addresses = answer["addresses"]
        else:
            with _gathered(terms, _listen_as_coordinator(told)) as (door, guests):
                addresses = _addresses(port, guests)
                door.tell_guests(problem=None, addresses=addresses)
    _found[cluster] = workers.of_rank(told, tuple(addresses))
    return _found[cluster]


def _listen_as_coordinator(told: engines.Told) -> socket.socket:
    host, number = ports.split(told.coordinator)
    try:
        return ports.listen(ports.own_host(host), int(number), told.size)
    except OSError as error:
        raise StartupError(
            f"rank 0 cannot listen at {told.coordinator} ({told.coordinator_from}): "
            f"{error.strerror}. End what else listens there, a second process with rank 0 perhaps, "
            f"or set {engines.COORDINATOR}=host:port to a free port of this machine for all "
            "processes."
        ) from None


def _addresses(port: int, guests: Mapping[int, _Guest]) -> list[str]:
    """Returns the addresses of the workers, by rank, at which all workers can reach them.

    A worker that came by loopback is on the chief's machine. If others came from elsewhere, they
    reach that worker at the same host as the chief.
    """
    at = {rank: guest.hello["at"] for rank, guest in guests.items()}
    outside = [rank for rank, (host, _) in at.items() if not secret.is_loopback(f"{host}:0")]
    own = guests[outside[0] if outside else 1].reaches
    places = [(own, port)]
    for rank in range(1, len(at) + 1):
        host, number = at[rank]
        here = bool(outside) and rank not in outside
        places.append((own if here else host, number))
    return [ports.joined(*place) for place in places]


class _Guest(NamedTuple):
    """A worker that has connected to the chief."""

    reaches: str  # the IP address at which this worker has reached the chief
    hello: Mapping[str, Json]


class _Terms(NamedTuple):
    """Differences between a meeting of TF_CONFIG's workers and one of an engine's."""

    size: int  # number of workers
    chief: str  # "host:port" at which the chief listens
    describe: Callable[[int], str]  # returns the name, for messages, of the worker with a rank
    # From a rank and its first message ("hello"), returns what is wrong with the hello, or None.
    check: Callable[[int, Mapping[str, Json]], str | None]
    known: Callable[[Mapping[str, Json]], bool]  # returns whether a hello has the right form
    twice: Callable[[int], str]  # returns the error text for two workers with the given rank
    absent: str  # the fix if workers do not come to the meeting
    chief_where: str  # the place where the chief must be started, in words
    shared: bytes  # the secret of the run
    timeout_seconds: float
    deadline: float  # the end of the meeting, in seconds of `time.monotonic()`


def _terms(cluster: Cluster, collectives: str, shared: bytes, timeout_seconds: float) -> _Terms:
    """Returns the terms for workers of TF_CONFIG."""

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
        size=cluster.num_workers,
        chief=cluster.addresses[0],
        describe=cluster.describe,
        check=check,
        known=lambda hello: isinstance(hello.get("cluster"), list) and len(hello["cluster"]) == 2,
        twice=lambda rank: (
            "two processes have the same task in TF_CONFIG: both are "
            f"{cluster.describe(rank)}. Give each worker an index of its own."
        ),
        absent="Start one process for each address of TF_CONFIG",
        chief_where="the chief at its own",
        shared=shared,
        timeout_seconds=timeout_seconds,
        deadline=time.monotonic() + timeout_seconds,
    )


def _terms_of(
    told: engines.Told, collectives: str, shared: bytes, timeout_seconds: float
) -> _Terms:
    """Returns the terms for workers that have their ranks from an engine."""

    def check(rank: int, hello: Mapping[str, Json]) -> str | None:
        if hello["size"] != told.size:
            return (
                f"the number of processes differs between workers: the chief has "
                f"{told.engine.size}={told.size}, and the process with rank {rank} counts "
                f"{hello['size']}. Start all of them as one run, with the same number."
            )
        return _other_collectives(rank, hello, collectives)

    return _Terms(
        size=told.size,
        chief=told.coordinator,
        describe=lambda rank: label(rank) if rank else f"chief ({told.coordinator})",
        check=check,
        known=_has_address,
        twice=lambda rank: (
            f"two processes have the same rank: both have {told.rank_variable}={rank}. Give each "
            f"a rank of its own, from 0 to {told.size - 1}."
        ),
        absent=f"Start one process for each rank below {told.engine.size}={told.size}",
        chief_where=f"rank 0 where this address leads, which is from {told.coordinator_from}",
        shared=shared,
        timeout_seconds=timeout_seconds,
        deadline=time.monotonic() + timeout_seconds,
    )


def _has_address(hello: Mapping[str, Json]) -> bool:
    """Returns whether a hello has the number of processes and its sender's address."""
    match hello:
        case {"size": int(), "at": [str() as host, int() as port]}:
            return ports.is_place(host, port)
    return False


def _other_collectives(rank: int, hello: Mapping[str, Json], collectives: str) -> str | None:
    theirs = hello.get("collectives", "tensorflow")
    if theirs == collectives:
        return None
    return (
        f"collectives: worker 0 has {collectives!r}, worker {rank} has "
        f"{theirs!r}. Give all workers the same."
    )


@contextlib.contextmanager
def _gathered(
    terms: _Terms, listener: socket.socket
) -> Iterator[tuple[Door[int], dict[int, _Guest]]]:
    """Yields the chief's connections and the workers by rank, once all workers have come.

    If the wait or the body of the context raises StartupError, workers that have come receive it.
    """
    door = Door[int](listener, terms.shared, _PURPOSE, terms.size)
    try:
        yield door, _gather(terms, door)
    except StartupError as error:
        door.tell_guests(problem=str(error))
        raise
    finally:
        door.close(_ANSWER_SECONDS)


def _gather(terms: _Terms, door: Door[int]) -> dict[int, _Guest]:
    """Waits for all workers; returns them by rank."""
    guests: dict[int, _Guest] = {}
    problems: list[str] = []

    def hear(channel: Channel, known_as: int | None, hello: dict[str, Json]) -> None:
        rank = hello.get("rank")
        if known_as is not None:
            return
        if not isinstance(rank, int) or not 0 < rank < terms.size or not terms.known(hello):
            door.drop(channel)  # the message is not from a worker
            return
        is_twin = rank in guests
        # A second process with the same rank has the key −rank, so that both get an answer.
        door.let_in(channel, -rank if is_twin else rank)
        problem = terms.check(rank, hello) or (terms.twice(rank) if is_twin else "")
        problems.extend([problem] if problem else [])
        guests[rank] = _Guest(channel.own_host, hello)

    def missing() -> str:
        return ", ".join(
            terms.describe(rank) for rank in range(1, terms.size) if rank not in guests
        )

    # After all workers have come, the loop waits a moment longer, since a second process with the
    # same task may still come. It does not wait under a launcher, which starts no such process.
    patience = 0.0 if parent.is_there() else RETRY_SECONDS
    complete_since = float("inf")
    for _ in until(terms.deadline, missing, pause=door.wait):
        # A worker whose connection has ended is removed from `guests`, so that it may come again.
        door.serve(hear, lambda rank: guests.pop(rank, None))
        if problems:
            raise StartupError(problems[0])
        now = time.monotonic()
        complete_since = float("inf") if missing() else min(now, complete_since)
        if now - complete_since >= patience:
            break
    if missing():
        raise StartupError(
            f"after {terms.timeout_seconds:g} s these workers have not started: {missing()}. "
            f"{terms.absent} within startup_timeout_seconds, and see to it that they reach the "
            f"chief at {terms.chief}.{door.turned_away}"
        )
    return guests


def _check_reachable(cluster: Cluster, deadline: float) -> None:
    """Raises StartupError if the chief cannot reach workers that have reached it."""
    astray: list[str] = []
    for _ in until(deadline, str):
        # A pod's name may be unknown until some time after the pod's start. While a name is
        # unknown, the probe is repeated. Names are looked up before the probe, since one may become
        # known during it.
        known = all(map(ports.places, cluster.addresses))
        astray = cluster.unreachable(_ANSWER_SECONDS)
        if known or not astray:
            break
    if astray:
        raise StartupError(
            f"{', '.join(astray)} came to the chief, but the chief cannot connect to the address. "
            "Correct it in TF_CONFIG, or open the port in the firewall."
        )


def _report_to_chief(
    terms: _Terms, hello: Callable[[Channel], Mapping[str, Json]]
) -> dict[str, Json]:
    """Sends hello until the chief answers; returns the answer, or raises its problem."""
    chief = terms.describe(0)
    try:
        answer = tried(lambda: _ask_chief(terms, hello), terms.deadline, chief)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"after {terms.timeout_seconds:g} s this worker has not started: {chief} (last answer: "
            f"{error}). {terms.absent} within startup_timeout_seconds, {terms.chief_where}."
        ) from None
    if answer["problem"]:
        raise StartupError(answer["problem"])
    return answer


def _ask_chief(terms: _Terms, hello: Callable[[Channel], Mapping[str, Json]]) -> dict[str, Json]:
    """Sends hello to the chief; returns its answer, or raises OSError."""
    wait = max(RETRY_SECONDS, min(_ANSWER_SECONDS, terms.deadline - time.monotonic()))
    # If the chief has started last, it waits up to timeout_seconds for the others before it
    # answers.
    patience = terms.timeout_seconds + 2 * _ANSWER_SECONDS
    with contextlib.closing(messages.connect(terms.chief, terms.shared, _PURPOSE, wait)) as chief:
        chief.send(**hello(chief))
        answer = chief.wait(time.monotonic() + patience)
    if chief.differs:
        return {"problem": messages.other_secret(terms.describe(0))}
    if answer is None or "problem" not in answer:
        raise ConnectionError("it did not answer")
    return answer


def _view(cluster: Cluster) -> list[Json]:
    """Returns the values that must agree between all workers, in the form that JSON gives them."""
    return [list(cluster.addresses), cluster.has_chief_job]


def listen(address: str, name: str, guests: int = 0) -> socket.socket:
    """Returns a socket that listens on "host:port"; StartupError, with `name`: it is in use."""
    given, port = ports.split(address)
    try:
        # TensorFlow's server binds the port on all interfaces, so the port must be free on all of
        # them.
        ports.bind("", int(port)).close()
        return ports.listen(ports.own_host(given), int(port), guests)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of this process, {name}, is in use, perhaps by a worker of an "
                "earlier run. End that, or change the port in TF_CONFIG."
            ) from None
        raise StartupError(f"cannot listen on port {port} of TF_CONFIG: {error}.") from None
