"""What a worker or parameter server does: it runs TensorFlow's server until the run is over."""

from __future__ import annotations

import os
from typing import NoReturn

import tensorflow as tf

from tfpara.parameter_server import member
from tfpara.parameter_server.cluster import AsyncCluster

_servers: list[tf.distribute.Server] = []  # a server ends when Python forgets it


def serve_forever(cluster: AsyncCluster, startup_timeout_seconds: float) -> NoReturn:
    """Runs TensorFlow's server for the chief; ends the process when the run is over.

    Threads are those of `tf.config.threading`, or of TF_NUM_INTRAOP_THREADS and
    TF_NUM_INTEROP_THREADS, but at least one more than there are workers between operations. A
    parameter server uses no GPU.

    Args:
        cluster: this process's view of the cluster: a worker's or a parameter server's.
        startup_timeout_seconds: longest wait for the chief.
    """

    def start(spec: dict[str, list[str]]) -> None:
        _servers.append(
            tf.distribute.Server(
                tf.train.ClusterSpec(spec),
                job_name=cluster.task_type,
                task_index=cluster.task_index,
                protocol="grpc",
                config=_config(cluster),
            )
        )

    member.serve(cluster, start, startup_timeout_seconds)


def _config(cluster: AsyncCluster) -> tf.compat.v1.ConfigProto:
    threading = tf.config.threading
    inter = threading.get_inter_op_parallelism_threads()
    inter = inter or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threading.get_intra_op_parallelism_threads(),
        # Threads wait for other processes; if all did, the run would stand still.
        inter_op_parallelism_threads=max(inter, cluster.num_workers + 1) if inter else 0,
    )
    if cluster.task_type == "ps":
        config.device_count["GPU"] = 0
    return config
