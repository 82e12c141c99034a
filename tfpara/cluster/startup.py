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
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tfpara.cluster import (
    ALONE,
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
# The longest time that TensorFlow's start may take after all workers have met. Normally it takes
# seconds, but it hangs if a worker dies meanwhile.
_CONNECT_SECONDS = 120.0
_PURPOSE = "start"

# The cluster in which this process has started TensorFlow; `ALONE` stands for an elastic run.
_met: Cluster | None = None
# Clusters that were read without addresses; each is mapped to the same cluster with addresses.
_found: dict[Cluster, Cluster] = {}
_log = logging.getLogger(__name__)


class StartupError(RuntimeError):
    """Not all workers came, or they differ. The message names the missing or differing workers."""


@contextlib.contextmanager
def guard(cluster: Cluster, timeout_seconds: float) -> Iterator[None]:
    """A context that first waits for all workers; its body starts TensorFlow's server.

    If the body takes over two minutes, the process prints a traceback and exits with code 1. That
    happens if a worker dies between the meeting and TensorFlow's connection. The context does
    nothing in a cluster of one process, or in one that this process has met before. Raises
    StartupError as `meet` does, or if this process has met another cluster before.
    """
    global _met
    if cluster.num_workers == 1 or cluster == _met:
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
    _met = cluster


@contextlib.contextmanager
def elastic_run() -> Iterator[None]:
    """A context after which this process is part of an elastic run; StartupError: it cannot be."""
    global _met
    _refuse_another()
    yield
    _met = ALONE


def _refuse_another() -> None:
    """Raises StartupError if TensorFlow's server serves other workers already."""
    if _met is None:
        return
    which = ", ".join(_met.addresses) or "an elastic run"
    raise StartupError(
        f"this process has trained with other workers before ({which}), and TensorFlow serves "
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

    During the call this process listens on its port. `collectives` is the backend that the worker
    starts after the call. `shared` is the secret of the run; None takes that of the environment.

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
        with contextlib.closing(ports.OpenPort(listener)) as own:
            _report_to_chief(terms, cluster.rank, own.port)
        return
    secret.warn_without(shared, cluster.addresses)
    with _gathered(terms, listener) as (door, _):
        _check_reachable(cluster, terms.deadline)
        door.tell_guests(problem=None)


def find_each_other(
    cluster: Cluster, timeout_seconds: float, collectives: str = "tensorflow"
) -> Cluster:
    """Returns the cluster with addresses, for processes that know only their ranks.

    A cluster with addresses, or of a single process, is returned unchanged. Arguments and errors
    are as for `meet`; and ClusterError is raised if the address of rank 0 is not known.
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
            addresses = _report_to_chief(terms, told.rank, port)["addresses"]
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

    `port` is the port of this process, which is rank 0.
    """
    others = [guests[rank] for rank in sorted(guests)]
    addresses = [ports.joined(others[0].reached, port), *(each.address for each in others)]
    found = ports.reached_by_all(dict(enumerate(addresses)), [each.reached for each in others])
    return list(found.values())


class _Guest(NamedTuple):
    """A worker that has connected to the chief."""

    reached: str  # the IP address at which this worker has reached the chief
    address: str  # "host:port" of this worker, as the chief sees it


class _Terms(NamedTuple):
    """Differences between a meeting of TF_CONFIG's workers and one of an engine's."""

    size: int  # number of workers
    chief: str  # "host:port" at which the chief listens
    describe: Callable[[int], str]  # returns, for messages, a worker's name by its rank
    view: Json  # what must be the same on all workers: the cluster, or the number of processes
    differs: Callable[[int, Json], str]  # returns the error text for a rank whose view differs
    twice: Callable[[int], str]  # returns the error text for two workers with the given rank
    absent: str  # what the user should do if workers do not come to the meeting
    chief_where: str  # the place where the chief must be started, in words
    collectives: str
    shared: bytes  # the secret of the run
    timeout_seconds: float
    deadline: float  # the end of the meeting, in seconds of `time.monotonic()`


def _terms(cluster: Cluster, collectives: str, shared: bytes, timeout_seconds: float) -> _Terms:
    """Returns the terms for workers of TF_CONFIG."""
    return _Terms(
        size=cluster.num_workers,
        chief=cluster.addresses[0],
        describe=cluster.describe,
        view=_view(cluster),
        differs=lambda rank, view: (
            f"TF_CONFIG differs between workers: {cluster.describe(0)} has the cluster "
            f"{_view(cluster)}, worker {rank} has {view}. "
            "Give all workers the same cluster; only the task differs."
        ),
        twice=lambda rank: (
            "two processes have the same task in TF_CONFIG: both are "
            f"{cluster.describe(rank)}. Give each worker an index of its own."
        ),
        absent="Start one process for each address of TF_CONFIG",
        chief_where="the chief at its own",
        collectives=collectives,
        shared=shared,
        timeout_seconds=timeout_seconds,
        deadline=time.monotonic() + timeout_seconds,
    )


def _terms_of(
    told: engines.Told, collectives: str, shared: bytes, timeout_seconds: float
) -> _Terms:
    """Returns the terms for workers that have their ranks from an engine."""
    return _Terms(
        size=told.size,
        chief=told.coordinator,
        describe=lambda rank: label(rank) if rank else f"chief ({told.coordinator})",
        view=told.size,
        differs=lambda rank, size: (
            f"the number of processes differs between workers: the chief has "
            f"{told.engine.size}={told.size}, and the process with rank {rank} counts "
            f"{size}. Start all of them as one run, with the same number."
        ),
        twice=lambda rank: (
            f"two processes have the same rank: both have {told.rank_variable}={rank}. Give each "
            f"a rank of its own, from 0 to {told.size - 1}."
        ),
        absent=f"Start one process for each rank below {told.engine.size}={told.size}",
        chief_where=f"rank 0 where this address leads, which is from {told.coordinator_from}",
        collectives=collectives,
        shared=shared,
        timeout_seconds=timeout_seconds,
        deadline=time.monotonic() + timeout_seconds,
    )


def _problem(terms: _Terms, rank: int, hello: Mapping[str, Json]) -> str:
    """Returns what contradicts the terms in a worker's first message ("hello"); else ""."""
    if hello["view"] != terms.view:
        return terms.differs(rank, hello["view"])
    if hello["collectives"] != terms.collectives:
        return (
            f"collectives: worker 0 has {terms.collectives!r}, worker {rank} has "
            f"{hello['collectives']!r}. Give all workers the same."
        )
    return ""


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
        if known_as is not None:
            return
        match hello:
            case {
                "rank": int() as rank,
                "view": _,
                "collectives": _,
                "at": [str() as host, int() as port],
            } if 0 < rank < terms.size and ports.is_place(host, port):
                is_twin = rank in guests
                # A second process with the same rank gets the key −rank, so that both processes get
                # an answer.
                door.let_in(channel, -rank if is_twin else rank)
                problem = _problem(terms, rank, hello) or (terms.twice(rank) if is_twin else "")
                problems.extend([problem] if problem else [])
                guests[rank] = _Guest(channel.own_host, ports.joined(host, port))
            case _:
                door.drop(channel)  # the message is not from a worker

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
        # A pod's name may be unknown until some time after the pod's start. So the names are looked
        # up before the probe, and if one was unknown, the probe is repeated. A look-up after the
        # probe would be too late: a name that was unknown to the probe could be known by then, and
        # the probe would not be repeated.
        known = all(map(ports.places, cluster.addresses))
        astray = cluster.unreachable(_ANSWER_SECONDS)
        if known or not astray:
            break
    if astray:
        raise StartupError(
            f"{', '.join(astray)} came to the chief, but the chief cannot connect to the address. "
            "Correct it in TF_CONFIG, or open the port in the firewall."
        )


def _report_to_chief(terms: _Terms, rank: int, port: int) -> dict[str, Json]:
    """Reports this worker's rank and port until the chief answers; returns the answer.

    Raises StartupError if the answer is a problem.
    """
    chief = terms.describe(0)
    try:
        answer = tried(lambda: _ask_chief(terms, rank, port), terms.deadline, chief)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"after {terms.timeout_seconds:g} s this worker has not started: {chief} (last answer: "
            f"{error}). {terms.absent} within startup_timeout_seconds, {terms.chief_where}."
        ) from None
    if answer["problem"]:
        raise StartupError(answer["problem"])
    return answer


def _ask_chief(terms: _Terms, rank: int, port: int) -> dict[str, Json]:
    """Sends hello to the chief; returns its answer, or raises OSError."""
    wait = max(RETRY_SECONDS, min(_ANSWER_SECONDS, terms.deadline - time.monotonic()))
    # If the chief has started last, it waits up to timeout_seconds for the other workers before it
    # answers.
    patience = terms.timeout_seconds + 2 * _ANSWER_SECONDS
    with contextlib.closing(messages.connect(terms.chief, terms.shared, _PURPOSE, wait)) as chief:
        at = [chief.own_host, port]
        chief.send(rank=rank, view=terms.view, collectives=terms.collectives, at=at)
        answer = chief.wait(time.monotonic() + patience)
    if chief.differs:
        return {"problem": messages.other_secret(terms.describe(0))}
    if answer is None or "problem" not in answer:
        raise ConnectionError("it did not answer")
    return answer


def _view(cluster: Cluster) -> Json:
    """Returns the part of TF_CONFIG that must agree between all workers."""
    return json.loads(cluster.tf_config())["cluster"]


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
