"""The links between the workers: collectives, and what workers compare before they train."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

from tfpara import cluster
from tfpara.cluster import quiet
from tfpara.cluster.call_site import Purpose
from tfpara.collectives import Collectives, HorovodCollectives, Loopback, TensorFlowCollectives
from tfpara.collectives import horovod as _horovod
from tfpara.collectives.choice import choose_communication
from tfpara.sync.data.reading import random_states, set_random_states
from tfpara.sync.settings import Settings
from tfpara.sync.tensorflow.devices import card_of
from tfpara.sync.tensorflow_private import context as _context
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.settings_check import agree
from tfpara.sync.workers.worker import Worker

START = Purpose("making a strategy", "make strategies and models on every worker alike")
# TensorFlow's own limits are longer than ours by so much: the watchdog knows the silent worker.
LATER_SECONDS = 10.0
BETWEEN_STRATEGIES = 1024  # group keys, of which a strategy of TensorFlow's takes some
_SEED = 87654321  # TensorFlow's own, where a program has set none
NO_PARTS = {"disable_meta_optimizer", "disable_model_pruning"}  # options that are always there
_served: dict[cluster.Cluster, int] = {}  # strategies so far, by the cluster of the server


class Links:
    """The collectives between the workers.

    Args:
        found: the cluster.
        settings: of the strategy.
        worker: this worker.
        earlier: strategies that this process has made before on the same server.

    Attributes:
        collectives: between the lead devices, for the weights.
        reports: between the hosts, for the reports before a sync.
        connected_by: the connection of the workers' GPUs in words; "" without GPUs.
    """

    def __init__(
        self,
        found: cluster.Cluster,
        settings: Settings,
        worker: Worker,
        earlier: int,
    ) -> None:
        self._found = found
        self._settings = settings
        self._worker = worker
        self._earlier = earlier
        self.collectives = self._between(0, worker.devices[0])  # or NCCL's: see `compare`
        self.reports = self._between(1, worker.host)
        self.connected_by = ""

    def for_control(self) -> Collectives:
        """Returns collectives between the hosts, for exchanges that Python code calls.

        The watchdog, or the meeting point's line, ends a wait in Python code earlier than their
        timeout, and names the silent worker. In graphs the timeout does.
        """
        seconds = self._settings.timeout_seconds + LATER_SECONDS
        return self._between(2, self._worker.host, seconds, self._worker.call_site.waiting)

    def _between(
        self,
        group: int,
        device: str,
        timeout_seconds: float = 0.0,
        waiting: Callable[[], AbstractContextManager[None]] | None = None,
        communication: str = "RING",
    ) -> Collectives:
        workers, members = self._worker.num_workers, self._worker.company.members
        if workers == 1 and members is None:
            return Loopback()
        group += self._earlier * BETWEEN_STRATEGIES
        place = (self._worker.rank, device, timeout_seconds)
        if self._settings.collectives == "horovod":
            return HorovodCollectives(workers, *place, group)
        return TensorFlowCollectives(
            self._found.tasks, *place, communication, group, members, waiting
        )

    def compare(self) -> None:
        """Compares the workers' settings, and gives all workers the chief's random states."""
        agree(
            {
                **self._settings.fingerprint(),
                "devices per worker": len(self._worker.devices),
                "kind of devices": self._worker.kind,
                "full-duplex transport": self.collectives.full_duplex,
            },
            self._worker.control,
            START,
        )
        if self._worker.num_workers == 1:
            return
        card = card_of(self._worker.devices[0]) if self._worker.kind == "GPU" else None
        mine = [self._worker.rank, card, random_states()]
        ranks, cards, states = zip(*everyones(mine, self._worker.control, START), strict=True)
        if not self._worker.changes and ranks != tuple(range(self._worker.num_workers)):
            raise RuntimeError(
                f"tables of the workers have the order {ranks}, and not that of ranks, so "
                "weights would go to other workers than they are meant for. This TensorFlow, "
                f"{tf.__version__}, orders workers in a way that tfpara does not know; install "
                "the version that tfpara's requirements name."
            )
        if self._settings.collectives == "tensorflow":
            self.connect_by(cards)
        # Every worker shuffles data for itself. With different seeds the orders would differ, and
        # the workers' parts would overlap. `shuffle(1000, seed=1)` depends on the program's seed,
        # too, so a run that is resumed, or a worker that joins one, has to find the same one. A
        # seed that the user sets later replaces it.
        if _context.global_seed() is None:
            tf.random.set_seed(_SEED)
        # Python's and NumPy's states too, for what scripts draw or a PyDataset shuffles.
        set_random_states(states[0])

    def connect_by(self, cards: Sequence[str | None]) -> None:
        """Chooses how the weights travel, from the cards of the workers' lead devices."""
        chosen, why = choose_communication(
            self._settings.communication,
            self._worker.kind,
            cards,
            members_change=self._worker.changes,
        )
        if chosen == "NCCL":
            self.collectives = self._between(0, self._worker.devices[0], communication=chosen)
        if self._worker.kind == "GPU":
            way = "NCCL" if chosen == "NCCL" else "a ring over gRPC"
            self.connected_by = f"the workers' GPUs are connected by {way}: {why}"

    def abort(self, message: str) -> None:
        """Ends the collectives under way with an error."""
        if self._settings.collectives == "horovod":
            _horovod.abort(message)
        else:
            # TensorFlow's own health check ends collectives this way.
            _context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def strategies_before(found: cluster.Cluster) -> int:
    """Returns how many strategies this process has made on the server of a cluster."""
    return _served.get(found, 0)


def count_strategy(found: cluster.Cluster) -> None:
    """Counts a strategy that was made on the server of a cluster."""
    _served[found] = strategies_before(found) + 1


def without_coordination() -> None:
    """Has TensorFlow start no coordination service, which would end a run that loses a worker.

    TensorFlow configures one only where there is no configuration.
    """
    _context.context().configure_coordination_service(service_type="")


def prepare_for_changes(devices: Sequence[str]) -> None:
    """Makes changes of members cheap; before TensorFlow's server starts.

    gRPC gets one descriptor to watch all sockets. By default it keeps a pair of descriptors for
    each process that the server was connected to.

    On CPUs TensorFlow's graph optimiser is turned off, unless the program has chosen among its
    parts. It optimises all functions again in each generation, which is half of what a change
    costs, and steps were no slower without it.
    """
    os.environ.setdefault("GRPC_POLL_STRATEGY", "epoll1,poll")
    chosen = tf.config.optimizer.get_experimental_options().keys()
    if all("CPU" in each.upper() for each in devices) and chosen <= NO_PARTS:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def serve(addresses: Mapping[int, str], leader: str) -> None:
    """Makes this process's server one of other workers; nothing that exists is made anew.

    Args:
        addresses: of all workers, this one among them, by task number, in the order of ranks.
        leader: the device name of the worker that coordinates collectives.
    """
    context = _context.context()
    definition = type(context._collective_ops_server_def)()
    definition.CopyFrom(context._collective_ops_server_def)
    (job,) = definition.cluster.job
    job.tasks.clear()
    for task, address in addresses.items():
        job.tasks[task] = address
    definition.default_session_config.experimental.collective_group_leader = leader
    with quiet.regrouping():
        context.enable_collective_ops(definition)


def end_collectives(why: str) -> None:
    """Ends the collectives under way, and all that follow until `serve`, with an error."""
    _context.context().abort_collective_ops(tf.errors.ABORTED, why)
