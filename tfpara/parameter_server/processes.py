"""The processes of a cluster with parameter servers, as the chief uses them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfpara.parameter_server.cluster_run import Cluster

_CHIEF = "/job:chief/replica:0/task:0"


class Processes:
    """Starts this process's part; in the chief it returns when all processes are there.

    Args:
        timeout_seconds: a parameter server that is silent for so long is given up.
        startup_timeout_seconds: longest wait for all processes.
    """

    chief_device = f"{_CHIEF}/device:CPU:0"
    record = None

    def __init__(self, timeout_seconds: float, startup_timeout_seconds: float) -> None:
        raise RuntimeError

    def _connect(self, spec: dict[str, list[str]]) -> None:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.num_workers = len(spec["worker"])
        self.server_devices = [
            f"/job:ps/replica:0/task:{k}/device:CPU:0" for k in range(len(spec["ps"]))
        ]

    def executor(
        self, server: Any, work: Any, chunks: Any, sync_period: int, choose_rate: Any, seed: int
    ) -> Cluster:
        """What runs chunks on the workers."""
        del seed
        return Cluster(self._coordinator, server, work, chunks, sync_period, choose_rate)

    def check(self) -> None:
        """Raises what the processes' connections have shown to be wrong."""
