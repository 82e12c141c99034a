"""The cluster of asynchronous training: the chief, workers and parameter servers of TF_CONFIG.

    {"cluster": {"chief": ["10.0.0.1:4000"], "worker": ["10.0.0.2:4000", "10.0.0.3:4000"],
                 "ps": ["10.0.0.4:4000"]},
     "task": {"type": "worker", "index": 1}}

Job and index identify a worker or parameter server: the task above is worker 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from tfpara.cluster import tf_config
from tfpara.cluster.tf_config import ClusterError

_START = "start the script by tfpara-launch --ps 1 -n 2, which writes TF_CONFIG"
_KIND = tf_config.Kind(
    jobs=("chief", "worker", "ps"),
    expected="the jobs are 'chief' (one), 'worker' and 'ps'",
    example=(
        '{"cluster": {"chief": ["host:port"], "worker": ["host:port", ...], "ps": ["host:port", '
        '...]}, "task": {"type": "worker", "index": 0}}'
    ),
    otherwise=f", or {_START}",
)


class AsyncCluster(NamedTuple):
    """All processes of an asynchronous run, and which of them this one is."""

    jobs: Mapping[str, tuple[str, ...]]  # "host:port" of each process by job and index
    task_type: str  # "chief", "worker" or "ps", as in TF_CONFIG
    task_index: int  # index within the job `task_type`, as in TF_CONFIG

    @property
    def is_chief(self) -> bool:
        """Whether this process runs the training program; the other processes serve it."""
        return self.task_type == "chief"

    @property
    def address(self) -> str:
        return self.jobs[self.task_type][self.task_index]

    @property
    def name(self) -> str:
        """The name of this process in messages, as from `describe`."""
        return self.describe(self.task_type, self.task_index)

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """Job and index of every process but the chief, the parameter servers first."""
        others = ("ps", "worker")
        return tuple((job, index) for job in others for index in range(len(self.jobs[job])))

    def describe(self, job: str, index: int) -> str:
        """Names a process in messages: "chief (10.0.0.1:4000)" or "ps 0 (10.0.0.4:4000)"."""
        return f"{label(job, index)} ({self.jobs[job][index]})"

    def spec(self, chief_address: str | None = None) -> dict[str, list[str]]:
        """Returns the addresses by job, for `tf.train.ClusterSpec`."""
        spec = {job: list(addresses) for job, addresses in self.jobs.items()}
        # The control channel uses the chief's address of TF_CONFIG, so TensorFlow needs another.
        return {**spec, "chief": [chief_address]} if chief_address else spec

    def tf_config(self) -> str:
        """Returns a TF_CONFIG from which `read` makes this cluster."""
        return tf_config.dump(self.jobs, self.task_type, self.task_index)


def label(job: str, index: int) -> str:
    """Names a process without its address: "chief", "worker 1", "ps 0", ..."""
    return job if job == "chief" else f"{job} {index}"


def is_meant() -> bool:
    """Returns whether TF_CONFIG, even an invalid one, names parameter servers."""
    text, pools = os.environ.get("TF_CONFIG", ""), os.environ.get("CLUSTER_SPEC", "")
    return '"ps"' in text or (not text.strip() and '"workerpool2"' in pools)


def read(environ: Mapping[str, str] = os.environ) -> AsyncCluster:
    """Reads and checks TF_CONFIG in `environ`.

    Raises:
        ClusterError: TF_CONFIG breaks a rule, or lacks a chief, a worker or a parameter server; the
            message names the mistake.
    """
    found = tf_config.read(environ, _KIND)
    if found is None:
        raise ClusterError(
            "TF_CONFIG is unset or empty, but asynchronous training needs a chief, workers and "
            f"parameter servers: {_START}. In one process, train with tfpara.PeriodicSyncStrategy."
        )
    jobs = found.jobs
    if "ps" not in jobs:
        raise ClusterError(
            "TF_CONFIG has no 'ps' addresses: it is that of a synchronous strategy, given to "
            "tfpara.AsyncStrategy. Start with tfpara-launch --ps 1, or add "
            '"ps": ["host:port"] to the cluster, or train with tfpara.PeriodicSyncStrategy.'
        )
    if "chief" not in jobs:
        raise ClusterError(
            "TF_CONFIG has no 'chief' address, but in asynchronous training the chief runs the "
            'program, and no worker takes its place. Add "chief": ["host:port"] to the cluster.'
        )
    if "worker" not in jobs:
        raise ClusterError(
            "TF_CONFIG has no 'worker' addresses, but the workers compute the gradients. Add "
            '"worker": ["host:port", ...] to the cluster.'
        )
    return AsyncCluster(jobs, found.task_type, found.task_index)
