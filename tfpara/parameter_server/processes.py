"""The chief's access to the other processes of a cluster with parameter servers."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import tensorflow as tf

from tfpara import program
from tfpara.cluster import asynchronous as cluster
from tfpara.cluster import quiet, taking_part
from tfpara.parameter_server.chunk_runner import Cluster
from tfpara.parameter_server.control import serving
from tfpara.parameter_server.control.lobby import Lobby

if TYPE_CHECKING:
    from tfpara.parameter_server.chunks import Chunks
    from tfpara.parameter_server.server import Server
    from tfpara.parameter_server.worker_step import ChooseRate, Work

_DEVICE = "/job:{}/replica:0/task:{}/device:CPU:0"
_joined: dict[str, Processes] = {}  # by TF_CONFIG; several strategies share the processes


def join(timeout_seconds: float, startup_timeout_seconds: float) -> Processes:
    """Returns the processes of TF_CONFIG to the chief; a worker or parameter server never returns.

    Args:
        timeout_seconds: silence after which another process is taken for lost.
        startup_timeout_seconds: longest wait for all processes.

    Raises:
        tfpara.cluster.ClusterError: TF_CONFIG is wrong.
        tfpara.StartupError: processes did not come, or have another TF_CONFIG.
    """
    found = taking_part(cluster.read)
    if not found.is_chief:
        serving.serve_forever(found, startup_timeout_seconds)
    key = found.tf_config()
    if key not in _joined:
        _joined[key] = Processes(Lobby, found, timeout_seconds, startup_timeout_seconds)
        program.tell_of_failure(_joined[key].end_with)
    return _joined[key]


class Processes:
    """The workers and parameter servers, as the chief uses them.

    Args:
        kind: the class that gathers and watches the processes.
        found: the chief's view of the cluster.
        timeout_seconds, startup_timeout_seconds: as for `join`.
    """

    is_simulated = False
    chief_device = _DEVICE.format("chief", 0)

    def __init__(
        self,
        kind: type[Lobby],
        found: cluster.AsyncCluster,
        timeout_seconds: float,
        startup_timeout_seconds: float,
    ) -> None:
        self._lost: collections.deque[int] = collections.deque()
        self._exit_code = 0
        self._failure = ""
        self._lobby = kind(
            found,
            startup_timeout_seconds,
            timeout_seconds,
            on_worker_lost=self._lost.append,
        )
        self._lobby.gather()
        with quiet.starting():
            self._connect(found.spec(self._lobby.tensorflow_address))
        self._watch_the_end()

    def _connect(self, spec: dict[str, list[str]]) -> None:
        self.num_workers = len(spec["worker"])
        self.server_devices = [_DEVICE.format("ps", k) for k in range(len(spec["ps"]))]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def executor(
        self,
        server: Server,
        work: Work,
        chunks: Chunks,
        sync_period: int,
        choose_rate: ChooseRate | None,
        order: Sequence[int],
        seed: int,
    ) -> Cluster:
        """Returns the object that trains chunks on the workers."""
        del seed
        return Cluster(
            self._coordinator, server, work, chunks, sync_period, choose_rate, order=order
        )

    def check(self) -> None:
        """Raises an error if the run cannot go on.

        Raises:
            tfpara.ParameterServerError: a parameter server is gone, or all workers are.
        """
        self._lobby.check()

    @property
    def asked_to_end(self) -> str | None:
        """A sentence if the chief or a parameter server was asked to end, and waits for the run's
        end; the chief sets it.
        """
        return self._lobby.asked_to_end

    @asked_to_end.setter
    def asked_to_end(self, sentence: str) -> None:
        self._lobby.asked_to_end = sentence

    def answer_leaving(self, exit_code: int | None) -> None:
        """Sets the exit code of workers that are asked to end; None: that of the signal."""
        self._lobby.restart_code = exit_code

    def lost(self) -> list[int]:
        """Returns the indices of workers that were lost since the last call."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._lost.popleft())
        return found

    def end_with(self, exit_code: int, sentence: str) -> None:
        """Sets the exit code and last sentence of the other processes, for when this one ends.

        An empty sentence leaves the one that was set before, if there is one.
        """
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
        # Runs after the last line of the program and before TensorFlow's own exit handlers.
        atexit.register(self._end)

    def _end(self) -> None:
        self._lobby.end_with_process(self._exit_code, self._failure)
        if self._exit_code:
            # The cause has been printed. TensorFlow would still print, for each of its functions
            # and each process, that it cannot remove the function there.
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
