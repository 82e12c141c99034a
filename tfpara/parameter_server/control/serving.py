"""The program of a worker or parameter server: TensorFlow's server, until the run is over."""

from __future__ import annotations

import os
from typing import NoReturn

import tensorflow as tf

from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.parameter_server.control import member

_servers: list[tf.distribute.Server] = []  # a server stops when its Python object is deleted


def serve_forever(cluster: AsyncCluster, startup_timeout_seconds: float) -> NoReturn:
    """Runs TensorFlow's server for the chief; ends the process when the run is over.

    The numbers of threads are those of `tf.config.threading`, or else of TF_NUM_INTRAOP_THREADS and
    TF_NUM_INTEROP_THREADS. There are at least as many inter-op threads as workers, and one more:
    a worker's call may occupy a thread here while it waits for another process, so fewer threads
    could lead to a deadlock. A parameter server uses no GPU. Arguments as for `member.serve`.
    """

    def start(spec: dict[str, list[str]]) -> None:
        _servers.append(
            tf.distribute.Server(
                tf.train.ClusterSpec(spec),
                job_name=cluster.task_type,
                task_index=cluster.task_index,
                protocol="grpc",
                config=server_config(cluster.task_type, len(spec["worker"])),
            )
        )

    member.serve(cluster, start, startup_timeout_seconds)


def server_config(job: str, num_workers: int) -> tf.compat.v1.ConfigProto:
    """Returns the configuration of TensorFlow's server for a job, "worker" or "ps"."""
    threading = tf.config.threading
    given = int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    wanted = threading.get_inter_op_parallelism_threads() or given or os.cpu_count() or 1
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(wanted, num_workers + 1),
    )
    if job == "ps":
        config.device_count["GPU"] = 0
    return config
