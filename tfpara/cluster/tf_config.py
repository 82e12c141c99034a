"""Reads and checks TF_CONFIG, for every kind of cluster that it can describe.

One short message per mistake names the value, the rule and the fix.
"""

from __future__ import annotations

import ipaddress
import json
import re
import reprlib
from collections.abc import Mapping
from typing import NamedTuple

from tfpara.typing import Json

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_PORT = re.compile(r"[0-9]{1,5}")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120
shown = _repr.repr  # returns a value as text of limited length, for messages

ADDRESSES = "Write host:port, such as '10.0.0.1:4000', 'node1:4000' or '[::1]:4000'"
# Names of jobs in Vertex AI's CLUSTER_SPEC, mapped to those of TF_CONFIG.
_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}
_POOLS["workerpool3"] = "evaluator"
# Known top-level keys of TF_CONFIG: TensorFlow's own, and those of engines that start processes.
_KEYS = {"cluster", "task", "environment", "job", "rpc_layer", "session_master", "trial"}


class ClusterError(ValueError):
    """TF_CONFIG or a rank variable breaks a rule. The message names the value and the fix."""


class NoPart(ClusterError):
    """TF_CONFIG gives this process a `job` that does not train."""

    def __init__(self, message: str, job: str) -> None:
        super().__init__(message)
        self.job = job


EVALUATOR = {
    "evaluator": "the training processes evaluate by themselves; to score checkpoints beside them, "
    "the script calls tfpara.evaluate_checkpoints where tfpara.is_evaluator() is true, before it "
    "makes a strategy",
}


class Kind(NamedTuple):
    """A kind of cluster: its jobs, and texts for messages about mistakes."""

    jobs: tuple[str, ...]  # names of the jobs, in the order in which messages list them
    expected: str  # the jobs in words, as in "the jobs are 'chief' (one, optional) and 'worker'"
    example: str  # an example of a TF_CONFIG
    otherwise: str = ""  # an alternative to setting TF_CONFIG, as in ", or unset it to …"
    # The jobs that may be listed but do not train, each mapped to the reason. The addresses of
    # these jobs are not read, and their processes have nothing to do.
    without_part: Mapping[str, str] = EVALUATOR


class TFConfig(NamedTuple):
    """The content of a valid TF_CONFIG."""

    jobs: dict[str, tuple[str, ...]]  # each job's addresses ("host:port"); no address comes twice
    task_type: str  # this process's job
    task_index: int  # this process's index within the job
    left_out: tuple[str, ...] = ()  # the jobs that have addresses, but do not train


def read(environ: Mapping[str, str], kind: Kind) -> TFConfig | None:
    """Reads and checks TF_CONFIG in `environ`, or Vertex AI's CLUSTER_SPEC in its place.

    The chief may be called "master". Jobs that do not train are left out. Addresses may be a map
    from indices. Returns None if TF_CONFIG is unset or blank, or has no addresses.

    Raises:
        NoPart: this process's job does not train.
        ClusterError: TF_CONFIG breaks a rule of all kinds of clusters; the message names the rule.
    """
    text = environ.get("TF_CONFIG", "")
    if text.strip():
        config = _object(_parse(text, kind), "TF_CONFIG", kind)
    else:
        config = _of_pools(environ.get("CLUSTER_SPEC", ""))
    if not config:
        return None
    config = _with_present_names(config)
    _check_takes_part(config.get("task"), kind)
    unknown = sorted(config.keys() - _KEYS)
    if "task" in config and "cluster" not in config and unknown:
        raise ClusterError(
            f"TF_CONFIG has a task but no 'cluster'; its key {shown(unknown[0])} is none that "
            f"TensorFlow knows. Write TF_CONFIG as {kind.example}{kind.otherwise}."
        )
    spec = _object(config.get("cluster", {}), "'cluster' in TF_CONFIG", kind)
    left_out = tuple(job for job in kind.without_part if spec.get(job))
    jobs = {
        job: _addresses(job, value, kind)
        for job, value in spec.items()
        if job not in kind.without_part
    }
    jobs = {job: addresses for job, addresses in jobs.items() if addresses}
    listed = bool(jobs or left_out)
    if "task" not in config and listed:
        job = next(iter(jobs), "worker")
        raise ClusterError(
            "TF_CONFIG has a cluster but no 'task', so this process does not know which of the "
            f'addresses is its own. Add "task": {{"type": "{job}", "index": 0}}, with the job and '
            "index of this process."
        )
    task = _task(config["task"], jobs, listed, kind) if "task" in config else None
    if task is None or not jobs:
        return None
    _check_distinct(jobs)
    return TFConfig({job: tuple(addresses) for job, addresses in jobs.items()}, *task, left_out)


def _of_pools(text: str) -> dict[str, Json]:
    """Converts Vertex AI's CLUSTER_SPEC to TF_CONFIG; empty if it is unset or of another form."""
    try:
        config = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return {}
    match config:
        case {"cluster": dict() as spec, "task": {"type": str() as pool} as task}:
            if spec and {*spec, pool} <= _POOLS.keys():
                jobs = {_POOLS[name]: addresses for name, addresses in spec.items()}
                return {"cluster": jobs, "task": {**task, "type": _POOLS[pool]}}
    return {}


def _with_present_names(config: dict[str, Json]) -> dict[str, Json]:
    """Returns a configuration in which "master", the chief's former name, is "chief"."""
    spec, task = config.get("cluster"), config.get("task")
    if isinstance(spec, dict):
        spec = {job: value for job, value in spec.items() if value or job != "master"}
        if {"master", "chief"} <= spec.keys():
            raise ClusterError(
                "TF_CONFIG has both 'master' and 'chief', which are names of one job. Keep 'chief'."
            )
        spec = {"chief" if job == "master" else job: value for job, value in spec.items()}
        config = {**config, "cluster": spec}
    if isinstance(task, dict) and task.get("type") == "master":
        config = {**config, "task": {**task, "type": "chief"}}
    return config


def _check_takes_part(task: Json, kind: Kind) -> None:
    job = task.get("type") if isinstance(task, dict) else None
    reason = kind.without_part.get(job) if isinstance(job, str) else None
    if reason:
        raise NoPart(
            f"this process has the job {job!r} in TF_CONFIG, and nothing to do: {reason}. It ends "
            "with exit code 0.",
            str(job),
        )


def _listed(job: str, value: Json) -> Json:
    """Converts a map from indices to addresses to a list; returns other values as they are."""
    if not isinstance(value, dict) or not all(i.isdecimal() and len(i) < 10 for i in value):
        return value
    if len(value) < 2 or sorted(map(int, value)) != list(range(len(value))):
        raise ClusterError(
            f"cluster job {job!r} in TF_CONFIG has only some of the addresses, "
            f"{shown(value)}: each process must know all addresses. With enableDynamicWorker, a "
            f"TFJob tells each worker only its own; set that to false, or write a list of all, "
            f'"{job}": ["host:port", ...].'
        )
    return [value[index] for index in sorted(value, key=int)]


def dump(jobs: Mapping[str, tuple[str, ...]], task_type: str, task_index: int) -> str:
    """Returns a TF_CONFIG from which `read` gets these values; "{}" if there are no addresses."""
    spec = {job: list(addresses) for job, addresses in jobs.items() if addresses}
    task = {"type": task_type, "index": task_index}
    return json.dumps({"cluster": spec, "task": task} if spec else {})


def _parse(text: str, kind: Kind) -> Json:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error}): {shown(text)}. "
            f"Write it as {kind.example}{kind.otherwise}."
        ) from None


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result: dict[str, Json] = {}
    for key, value in pairs:
        if key in result:
            raise ClusterError(
                f"TF_CONFIG has the key {shown(key)} twice in one object. Keep one of them."
            )
        result[key] = value
    return result


def _object(value: Json, name: str, kind: Kind) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ClusterError(
            f"{name} must be a JSON object, not {shown(value)}. Write TF_CONFIG as {kind.example}."
        )
    return value


def _addresses(job: str, value: Json, kind: Kind) -> list[str]:
    _check_job(job, "cluster job", kind)
    value = _listed(job, value)
    if not isinstance(value, list):
        raise ClusterError(
            f"cluster job '{job}' in TF_CONFIG must be a list of addresses, not "
            f'{shown(value)}. Write "{job}": ["host:port", ...].'
        )
    if job == "chief" and len(value) > 1:
        raise ClusterError(
            f"cluster job 'chief' in TF_CONFIG has {len(value)} addresses {shown(value)}, but "
            "there is one chief. Move the others to 'worker'."
        )
    for address in value:
        given = f"address {shown(address)} of cluster job '{job}' in TF_CONFIG"
        check_address(address, given, ADDRESSES)
    return value


def _check_job(job: Json, what: str, kind: Kind) -> None:
    if job not in kind.jobs:
        raise ClusterError(f"{what} {shown(job)} in TF_CONFIG is not supported: {kind.expected}.")


def check_address(address: Json, given: str, fix: str) -> None:
    """Raises ClusterError if `address`, described by `given`, is invalid; `fix` says what to do."""
    problem = _address_problem(address)
    if problem:
        raise ClusterError(f"{given} {problem}. {fix}.")


def _address_problem(address: Json) -> str | None:
    if not isinstance(address, str):
        return "is not a string"
    if "://" in address:
        return "has a scheme, which must be left out"
    host, colon, port = address.rpartition(":")
    if not colon:
        return "has no port"
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        return f"has the port {shown(port)}, which is not a number from 1 to 65535"
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        return "has an IPv6 host without square brackets, or more than one port"
    numeric = bracketed or not host.strip("0123456789.")
    if not numeric:
        return None if _HOST.fullmatch(host) else f"has the host {shown(host)}, not a name"
    try:
        ip = ipaddress.IPv6Address(host[1:-1]) if bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        return f"has the host {shown(host)}, which is not an IP address"
    return "stands for all interfaces, so that none can connect" if ip.is_unspecified else None


def _check_distinct(jobs: Mapping[str, list[str]]) -> None:
    seen: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            task = f"{job} {index}"
            other = seen.setdefault(address.lower(), task)
            if other != task:
                raise ClusterError(
                    f"address {shown(address)} in TF_CONFIG belongs to both {other} and "
                    f"{task}, but each process listens on its own. Change the port of one."
                )


def _task(task: Json, jobs: Mapping[str, list[str]], listed: bool, kind: Kind) -> tuple[str, int]:
    task = _object(task, "'task' in TF_CONFIG", kind)
    for key in ("type", "index"):
        if key not in task:
            raise ClusterError(
                f"'task' in TF_CONFIG has no '{key}': {shown(task)}. "
                'Write "task": {"type": "worker", "index": 0}.'
            )
    task_type, index = task["type"], task["index"]
    _check_job(task_type, "task type", kind)
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(
            f"task index {shown(index)} in TF_CONFIG must be an integer from 0, unquoted."
        )
    size = len(jobs.get(task_type, ())) if listed else 1
    if not 0 <= index < size:
        raise ClusterError(
            f"task {task_type} {shown(index)} in TF_CONFIG is not in the cluster, which has "
            f"{_sizes(jobs, kind)}. Correct the task (indices count from 0), or list its address."
        )
    return task_type, index


def _sizes(jobs: Mapping[str, list[str]], kind: Kind) -> str:
    return " and ".join(f"{len(jobs.get(job, ()))} {job} address(es)" for job in kind.jobs)
