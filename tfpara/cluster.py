"""Who trains: the cluster that TF_CONFIG, horovodrun or mpirun describe in the environment.

TF_CONFIG is read and checked here, before TensorFlow starts, because TensorFlow answers most
mistakes in it with a hang. Only the standard library is imported.

    {"cluster": {"chief": ["10.0.0.1:4000"], "worker": ["10.0.0.2:4000", "10.0.0.3:4000"]},
     "task": {"type": "worker", "index": 1}}

Ranks count the chief first, then the workers in their order, so the task above has rank 2. In a
cluster of `worker` jobs only, worker 0 is the chief. Without TF_CONFIG, or with `{}`, one process
trains alone, unless the variables of horovodrun (HOROVOD_RANK, HOROVOD_SIZE) or mpirun
(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE) say that it is one of several.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_EXAMPLE = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
_JOBS = ("chief", "worker")
# This process, and how many there are: of horovodrun, and of Open MPI's mpirun.
RANK_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
_WHY_NOT = {
    "ps": (
        "the synchronous strategy has no parameter servers; list chief and worker only, "
        "or train with tfpara.AsyncStrategy, which uses them"
    ),
    "evaluator": (
        "there is no separate evaluator: evaluate() runs on all training workers together; remove "
        "it, and to score checkpoints on the side start a program of its own without TF_CONFIG"
    ),
    "master": "this is the former name of the chief; write 'chief'",
}
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_PORT = re.compile(r"[0-9]{1,5}")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120


class ClusterError(ValueError):
    """TF_CONFIG or a rank variable breaks a rule. The message names the value and the fix."""


class Cluster(NamedTuple):
    """All training processes, and which of them this one is.

    Attributes:
        addresses: "host:port" of every process by rank, the chief first; empty when one process
            trains alone.
        task_type: "chief" or "worker", as in TF_CONFIG.
        task_index: index within the job `task_type`, as in TF_CONFIG.
        has_chief_job: whether rank 0 is the job "chief"; otherwise it is worker 0.
        rank_variable: the variable, such as HOROVOD_RANK, in which this process was told its rank;
            empty if TF_CONFIG alone tells it.
        size: number of processes according to the rank variables; there may be no addresses.
    """

    addresses: tuple[str, ...]
    task_type: str
    task_index: int
    has_chief_job: bool = False
    rank_variable: str = ""
    size: int = 0

    @property
    def num_workers(self) -> int:
        """Number of training processes, the chief included."""
        return max(1, len(self.addresses), self.size)

    @property
    def rank(self) -> int:
        """Position of this process in `addresses`: 0 is the chief."""
        return self.task_index + (self.has_chief_job and self.task_type == "worker")

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints, logs and the progress bar."""
        return self.rank == 0

    @property
    def address(self) -> str:
        """This process's "host:port"; empty when it trains alone, or has none."""
        return self.addresses[self.rank] if self.addresses else ""

    def describe(self, rank: int) -> str:
        """Names a process in messages: "chief (10.0.0.1:4000)" or "worker RANK (10.0.0.2:4000)"."""
        address = f" ({self.addresses[rank]})" if self.addresses else ""
        return label(rank) + address

    def tf_config(self) -> str:
        """The TF_CONFIG that `read` turns into this cluster, if it has addresses."""
        first = int(self.has_chief_job)
        jobs = {"chief": self.addresses[:first], "worker": self.addresses[first:]}
        spec = {job: list(addresses) for job, addresses in jobs.items() if addresses}
        task = {"type": self.task_type, "index": self.task_index}
        return json.dumps({"cluster": spec, "task": task} if spec else {})


ALONE = Cluster((), "worker", 0)


def label(rank: int) -> str:
    """Names a rank: "chief", "worker 1", "worker 2", ..."""
    return "chief" if rank == 0 else f"worker {rank}"


def read(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Reads and checks TF_CONFIG and the rank variables in `environ`.

    Returns:
        The cluster; that of a single process if TF_CONFIG is unset, blank or `{}`, and no rank
        variables are set.

    Raises:
        ClusterError: one of them breaks a rule, or they contradict each other; one message says
            which.
    """
    found = _from_tf_config(environ)
    told = _from_rank_variables(environ)
    if told is None:
        return found
    if not found.addresses:
        return told if told.size > 1 else found
    if (found.rank, found.num_workers) != (told.rank, told.size):
        raise ClusterError(
            f"{told.rank_variable}={told.rank} of {told.size} processes contradicts TF_CONFIG, in "
            f"which this process is {found.describe(found.rank)}, rank {found.rank} of "
            f"{found.num_workers}. Unset TF_CONFIG for processes that horovodrun or mpirun start, "
            f"and {told.rank_variable} for others."
        )
    return found._replace(rank_variable=told.rank_variable, size=told.size)


def _from_rank_variables(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster without addresses of the first pair of variables that is set."""
    for names in RANK_VARIABLES:
        given = [environ.get(name, "").strip() for name in names]
        if not any(given):
            continue
        text = ", ".join(f"{n}={v!r}" for n, v in zip(names, given, strict=True))
        # isdecimal alone takes digits of other scripts too, as int() does.
        if not all(value.isdecimal() for value in given) or int(given[0]) >= int(given[1]):
            raise ClusterError(
                f"{text}: the first must be a number from 0 below the second, which counts the "
                "processes. Both are set by horovodrun or mpirun; unset them to train in one "
                "process, or under TF_CONFIG."
            )
        rank, size = map(int, given)
        job = ("worker", rank - 1) if rank else ("chief", 0)
        return Cluster((), *job, has_chief_job=True, rank_variable=names[0], size=size)
    return None


def _from_tf_config(environ: Mapping[str, str]) -> Cluster:
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        return ALONE
    config = _object(_parse(text), "TF_CONFIG")
    spec = _object(config.get("cluster", {}), "'cluster' in TF_CONFIG")
    jobs = {job: _addresses(job, value) for job, value in spec.items()}
    jobs = {job: addresses for job, addresses in jobs.items() if addresses}
    if "task" not in config and jobs:
        raise ClusterError(
            "TF_CONFIG has a cluster but no 'task', so this process does not know which of the "
            f'addresses is its own. Add "task": {{"type": "{next(iter(jobs))}", "index": 0}}, '
            "with the job and index of this process."
        )
    task_type, task_index = _task(config["task"], jobs) if "task" in config else ("worker", 0)
    if not jobs:
        return ALONE
    _check_distinct(jobs)
    addresses = (*jobs.get("chief", ()), *jobs.get("worker", ()))
    return Cluster(addresses, task_type, task_index, "chief" in jobs)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error}): {_repr.repr(text)}. "
            f"Write it as {_EXAMPLE}, or unset it to train in one process."
        ) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ClusterError(
                f"TF_CONFIG has the key {_repr.repr(key)} twice in one object. Keep one of them."
            )
        result[key] = value
    return result


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(
            f"{name} must be a JSON object, not {_repr.repr(value)}. Write TF_CONFIG as {_EXAMPLE}."
        )
    return value


def _addresses(job: str, value: Any) -> list[str]:
    _check_job(job, "cluster job")
    if not isinstance(value, list):
        raise ClusterError(
            f"cluster job '{job}' in TF_CONFIG must be a list of addresses, not "
            f'{_repr.repr(value)}. Write "{job}": ["host:port", ...].'
        )
    if job == "chief" and len(value) > 1:
        raise ClusterError(
            f"cluster job 'chief' in TF_CONFIG has {len(value)} addresses {_repr.repr(value)}, but "
            "there is one chief. Move the others to 'worker'."
        )
    for address in value:
        problem = _address_problem(address)
        if problem:
            raise ClusterError(
                f"address {_repr.repr(address)} of cluster job '{job}' in TF_CONFIG {problem}. "
                "Write host:port, such as '10.0.0.1:4000', 'node1:4000' or '[::1]:4000'."
            )
    return value


def _check_job(job: Any, what: str) -> None:
    if job not in _JOBS:
        reason = _WHY_NOT.get(str(job), "the jobs are 'chief' (one, optional) and 'worker'")
        raise ClusterError(f"{what} {_repr.repr(job)} in TF_CONFIG is not supported: {reason}.")


def _address_problem(address: Any) -> str | None:
    """What is wrong with an address, or None."""
    if not isinstance(address, str):
        return "is not a string"
    if "://" in address:
        return "has a scheme, which must be left out"
    host, colon, port = address.rpartition(":")
    if not colon:
        return "has no port"
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        return f"has the port {_repr.repr(port)}, which is not a number from 1 to 65535"
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        return "has an IPv6 host without square brackets, or more than one port"
    numeric = bracketed or not host.strip("0123456789.")
    if not numeric:
        return None if _HOST.fullmatch(host) else f"has the host {_repr.repr(host)}, not a name"
    try:
        ip = ipaddress.IPv6Address(host[1:-1]) if bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        return f"has the host {_repr.repr(host)}, which is not an IP address"
    return "stands for all interfaces, so that none can connect" if ip.is_unspecified else None


def _check_distinct(jobs: Mapping[str, list[str]]) -> None:
    seen: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            task = f"{job} {index}"
            other = seen.setdefault(address.lower(), task)
            if other != task:
                raise ClusterError(
                    f"address {_repr.repr(address)} in TF_CONFIG belongs to both {other} and "
                    f"{task}, but each process listens on its own. Change the port of one."
                )


def _task(task: Any, jobs: Mapping[str, list[str]]) -> tuple[str, int]:
    task = _object(task, "'task' in TF_CONFIG")
    for key in ("type", "index"):
        if key not in task:
            raise ClusterError(
                f"'task' in TF_CONFIG has no '{key}': {_repr.repr(task)}. "
                'Write "task": {"type": "worker", "index": 0}.'
            )
    task_type, index = task["type"], task["index"]
    _check_job(task_type, "task type")
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(
            f"task index {_repr.repr(index)} in TF_CONFIG must be an integer from 0, unquoted."
        )
    size = len(jobs.get(task_type, ())) if jobs else 1
    if not 0 <= index < size:
        raise ClusterError(
            f"task {task_type} {_repr.repr(index)} in TF_CONFIG is not in the cluster, which has "
            f"{_sizes(jobs)}. Correct the task (indices count from 0), or list its address."
        )
    return task_type, index


def _sizes(jobs: Mapping[str, list[str]]) -> str:
    return " and ".join(f"{len(jobs.get(job, ()))} {job} address(es)" for job in _JOBS)
