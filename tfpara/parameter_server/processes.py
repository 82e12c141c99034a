"""The processes of a cluster with parameter servers, and TensorFlow's server in each."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from types import TracebackType
from typing import NoReturn

import tensorflow as tf

from tfpara import program
from tfpara.cluster import asynchronous as cluster
from tfpara.cluster import ports, quiet, taking_part
from tfpara.parameter_server.chunk_runner import ChunkRunner
from tfpara.parameter_server.control import member
from tfpara.parameter_server.control.lobby import Lobby
from tfpara.parameter_server.workers import Training, Workers
from tfpara.tensorflow_private import cancel_by_thread, functions_let_threads_run

_DEVICE = "/job:{}/replica:0/task:{}/device:CPU:0"
# The servers are kept for the life of the process, because a server stops when its Python object is
# deleted.
_servers: list[tf.distribute.Server] = []
# The `Processes` of each cluster, by the content of TF_CONFIG. All strategies that a program makes
# for one cluster share the same object.
_joined: dict[str, Processes] = {}


def join(timeout_seconds: float, startup_timeout_seconds: float) -> Processes:
    """Returns the processes of TF_CONFIG to the chief; a worker or parameter server never returns.

    Arguments and errors are those of `AsyncStrategy`.
    """
    found = taking_part(cluster.read)
    if not found.is_chief:
        serve_forever(found, startup_timeout_seconds)
    key = found.tf_config()
    if key not in _joined:
        _joined[key] = Processes(found, timeout_seconds, startup_timeout_seconds)
        program.tell_of_failure(_joined[key].end_with)
    return _joined[key]


class Processes(Workers):
    """The workers and parameter servers of a cluster; arguments as for `join`."""

    is_simulated = False
    chief_device = _DEVICE.format("chief", 0)

    def __init__(
        self, found: cluster.AsyncCluster, timeout_seconds: float, startup_timeout_seconds: float
    ) -> None:
        self._exit_code = 0
        self._failure = ""
        self._lobby = Lobby(found, startup_timeout_seconds, timeout_seconds)
        self.state = self._lobby.state
        self._lobby.gather()
        with quiet.starting():
            self._connect(found.spec(self._lobby.tensorflow_address))
        self._watch_the_end()

    def _connect(self, spec: dict[str, list[str]]) -> None:
        self.num_workers = len(spec["worker"])
        self.server_devices = [_DEVICE.format("ps", k) for k in range(len(spec["ps"]))]
        ports.without_proxy(itertools.chain(*spec.values()))
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        cancel_by_thread()
        functions_let_threads_run()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def executor(self, training: Training) -> ChunkRunner:
        return ChunkRunner(self._coordinator, training)

    def check(self) -> None:
        self._lobby.check()

    def lost(self) -> list[int]:
        return self._lobby.lost()

    def end_with(self, exit_code: int, sentence: str) -> None:
        self._exit_code = exit_code
        self._failure = (
            sentence or self._failure or f"the chief has ended with exit code {exit_code}."
        )

    def _watch_the_end(self) -> None:
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            first = str(error).strip().splitlines()[:1]
            self.end_with(1, f"the chief has failed: {': '.join([kind.__name__, *first])}")
            previous(kind, error, traceback)

        sys.excepthook = hook
        # Python calls `_end` after the last line of the program, and deletes TensorFlow's objects
        # only later. Until then TensorFlow needs the other processes, so `_end` tells them to end
        # when this process is gone.
        atexit.register(self._end)

    def _end(self) -> None:
        self._lobby.end_with_process(self._exit_code, self._failure)
        if self._exit_code:
            # The cause is printed already. From now on stderr goes nowhere, because TensorFlow
            # would print, for each function and each process, that it cannot remove the function.
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def serve_forever(found: cluster.AsyncCluster, startup_timeout_seconds: float) -> NoReturn:
    """Runs TensorFlow's server for the chief; ends the process when the run is over."""

    def start(spec: dict[str, list[str]]) -> None:
        ports.without_proxy(itertools.chain(*spec.values()))
        _servers.append(
            tf.distribute.Server(
                tf.train.ClusterSpec(spec),
                job_name=found.task_type,
                task_index=found.task_index,
                protocol="grpc",
                config=server_config(found.task_type, len(spec["worker"])),
            )
        )

    member.serve(found, start, startup_timeout_seconds)


def server_config(job: str, num_workers: int) -> tf.compat.v1.ConfigProto:
    """Returns the configuration of TensorFlow's server for a job, "worker" or "ps".

    The numbers of threads are those of `tf.config.threading`, or else of TF_NUM_INTRAOP_THREADS and
    TF_NUM_INTEROP_THREADS. There is at least one more inter-op thread than workers: a worker's call
    may occupy a thread of this server while it waits for another process, so fewer threads could
    lead to a deadlock. A parameter server uses no GPU.
    """
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
