"""The cluster of training processes that TF_CONFIG, or the engine that started them, describes.

TF_CONFIG is read and checked here, before TensorFlow starts, because TensorFlow answers most
mistakes in it with a hang.

    {"cluster": {"chief": ["10.0.0.1:4000"], "worker": ["10.0.0.2:4000", "10.0.0.3:4000"]},
     "task": {"type": "worker", "index": 1}}

Ranks count the chief first, then the workers in their order, so the task above has rank 2. In a
cluster of `worker` jobs only, worker 0 is the chief. Without TF_CONFIG, or with `{}`, one process
trains alone, unless variables of horovodrun, mpirun, srun or another engine (`engines`) show that
it is one of several.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from tfpara.cluster import engines, ports, tf_config
from tfpara.cluster.tf_config import ClusterError as ClusterError

_Read = TypeVar("_Read")
_KIND = tf_config.Kind(
    jobs=("chief", "worker"),
    expected="the jobs are 'chief' (one, optional) and 'worker'",
    example='{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}',
    otherwise=", or unset it to train in one process",
    without_part={
        **tf_config.EVALUATOR,
        "ps": "a synchronous strategy has no parameter servers; tfpara.AsyncStrategy uses them",
    },
)
# Each pair has the names of two environment variables: one has a process's rank, the other the
# number of processes. horovodrun sets the first pair, and Open MPI's mpirun the second. With either
# pair, Horovod's processes find each other by themselves.
RANK_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class Cluster(NamedTuple):
    """All training processes, and which of them this one is.

    Attributes:
        addresses: "host:port" of every process by rank, the chief first; empty when one process
            trains alone.
        task_type: "chief" or "worker", as in TF_CONFIG.
        task_index: index within the job `task_type`, as in TF_CONFIG.
        has_chief_job: whether rank 0 is the job "chief"; otherwise it is worker 0.
        rank_variable: the variable that has this process's rank, such as HOROVOD_RANK; empty if
            only TF_CONFIG has it.
        size: number of processes that the engine's variables state, with or without addresses.
        told: the values of the engine's variables, with which the processes have to find each
            other; None if their addresses are known.
        has_ps: whether TF_CONFIG also lists parameter servers, which do not take part.
    """

    addresses: tuple[str, ...]
    task_type: str
    task_index: int
    has_chief_job: bool = False
    rank_variable: str = ""
    size: int = 0
    told: engines.Told | None = None
    has_ps: bool = False

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
        """This process's "host:port"; empty if it trains alone, or has none."""
        return self.addresses[self.rank] if self.addresses else ""

    @property
    def coordinator(self) -> str:
        """The "host:port" at which processes that know only their ranks meet; empty if unknown."""
        return self.told.coordinator if self.told else ""

    def describe(self, rank: int) -> str:
        """Names a process in messages: "chief (10.0.0.1:4000)" or "worker RANK (10.0.0.2:4000)"."""
        address = f" ({self.addresses[rank]})" if self.addresses else ""
        return label(rank) + address

    def unreachable(self, timeout_seconds: float) -> list[str]:
        """Lists the other processes that accept no TCP connection now; see `ports.accepting`."""
        peers = [rank for rank in range(len(self.addresses)) if rank != self.rank]
        found = ports.accepting([self.addresses[rank] for rank in peers], timeout_seconds)
        return [self.describe(rank) for rank in peers if self.addresses[rank] not in found]

    @property
    def tasks(self) -> tuple[str, ...]:
        """TensorFlow's names of the processes in `addresses`, by rank."""
        chief = int(self.has_chief_job)
        return tuple(
            f"/job:worker/task:{rank - chief}" if rank >= chief else "/job:chief/task:0"
            for rank in range(len(self.addresses))
        )

    def tf_config(self) -> str:
        """Returns a TF_CONFIG from which `read` makes this cluster, if it has addresses."""
        first = int(self.has_chief_job)
        jobs = {"chief": self.addresses[:first], "worker": self.addresses[first:]}
        return tf_config.dump(jobs, self.task_type, self.task_index)


ALONE = Cluster((), "worker", 0)


def label(rank: int) -> str:
    """Names a rank: "chief", "worker 1", "worker 2", ...

    Args:
        rank: rank of a worker, from 0.
    """
    return "chief" if rank == 0 else f"worker {rank}"


def read(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Reads and checks TF_CONFIG and the rank variables in `environ`.

    Args:
        environ: the environment.

    Returns:
        The cluster; a single process if TF_CONFIG is unset, blank or `{}`, and no rank variables
        are set.

    Raises:
        ClusterError: a variable breaks a rule, or they contradict each other; the message names
            the rule.
    """
    found = _from_tf_config(environ)
    told = engines.find({**environ, engines.COORDINATOR: ""} if found.addresses else environ)
    if told is None:
        return found
    if not found.addresses:
        return of_rank(told) if told.size > 1 else found
    if told.engine.outer:
        return found
    if (found.rank, found.num_workers) != (told.rank, told.size):
        indexed = told.rank_variable != told.engine.rank
        starter = "an indexed job" if indexed else told.engine.starter
        raise ClusterError(
            f"{told.rank_variable}={told.rank} of {told.size} processes contradicts TF_CONFIG, in "
            f"which this process is {found.describe(found.rank)}, rank {found.rank} of "
            f"{found.num_workers}. Unset TF_CONFIG for processes that {starter} start, and "
            f"{told.rank_variable} and {told.engine.size} for others."
        )
    if told.rank_variable not in dict(RANK_VARIABLES):
        return found
    return found._replace(rank_variable=told.rank_variable, size=told.size)


def is_evaluator(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process should score checkpoints, instead of training.

    This is so if the type of TF_CONFIG's task is "evaluator"; `tfpara-launch --evaluator`,
    Kubernetes' TFJob and Vertex AI set it. Then call `tfpara.evaluate_checkpoints`. To start an
    evaluator by hand, on any machine that sees the checkpoints:

        TF_CONFIG='{"task": {"type": "evaluator", "index": 0}}' python train.py

    Args:
        environ: the environment.
    """
    try:
        tf_config.read(environ, _KIND)
    except tf_config.NoPart as task:
        return task.job == "evaluator"
    except ClusterError:  # ignored here: the strategy reports what is wrong
        return False
    return False


def taking_part(read: Callable[[], _Read]) -> _Read:
    """Returns the result of `read`, or ends this process with code 0 if it does not train.

    Args:
        read: the function `read` of this module, or of `asynchronous`.
    """
    try:
        return read()
    except tf_config.NoPart as task:
        print(f"tfpara: {task}", file=sys.stderr, flush=True)
        raise SystemExit(0) from None


def of_rank(told: engines.Told, addresses: tuple[str, ...] = ()) -> Cluster:
    """Returns the cluster of an engine's process; `addresses` are empty while they are unknown."""
    job = ("worker", told.rank - 1) if told.rank else ("chief", 0)
    if addresses:
        return Cluster(addresses, *job, has_chief_job=True)
    variable = told.rank_variable
    return Cluster((), *job, has_chief_job=True, rank_variable=variable, size=told.size, told=told)


def _from_tf_config(environ: Mapping[str, str]) -> Cluster:
    found = tf_config.read(environ, _KIND)
    if found is None:
        return ALONE
    jobs = found.jobs
    addresses = (*jobs.get("chief", ()), *jobs.get("worker", ()))
    has_ps = "ps" in found.left_out
    return Cluster(addresses, found.task_type, found.task_index, "chief" in jobs, has_ps=has_ps)
