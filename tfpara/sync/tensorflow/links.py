"""The links between the workers: collectives, and the comparison of workers before training."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

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
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.meetings import Control
from tfpara.sync.workers.settings_check import agree
from tfpara.sync.workers.worker import Worker
from tfpara.tensorflow_private import FuncRegistry
from tfpara.tensorflow_private import context as _context

START = Purpose("making a strategy", "make strategies and models on every worker alike")
_call_python_function = FuncRegistry.__call__
# TensorFlow's timeouts are this many seconds longer than those of tfpara. So the watchdog of tfpara
# ends a wait before TensorFlow does, and can name the silent worker.
LATER_SECONDS = 10.0
# Each strategy uses several group keys, which no other strategy may use. So the first group keys of
# two successive strategies differ by this number.
BETWEEN_STRATEGIES = 1024
_SEED = 87654321  # TensorFlow's default seed
# Counts the strategies that this process has made on each cluster's server.
served: collections.Counter[cluster.Cluster] = collections.Counter()
# TensorFlow always lists these options of its graph optimiser, even if the program has set none. So
# a program has chosen among the optimiser's parts only if TensorFlow lists other options, too.
NO_PARTS = {"disable_meta_optimizer", "disable_model_pruning"}


class Links:
    """The collectives between the workers.

    `earlier`: how many strategies this process has made before on the same server.

    Attributes:
        collectives: between the lead devices, for the weights.
        reports: between the hosts, for the reports before a sync.
        way: the connection of the workers in words; "" if there is none.
        connected_by: a sentence on the connection of the workers' GPUs; "" without GPUs.
    """

    def __init__(
        self, found: cluster.Cluster, settings: Settings, worker: Worker, earlier: int
    ) -> None:
        self._found, self._settings = found, settings
        self._worker, self._earlier = worker, earlier
        # TensorFlow's collectives connect only devices of one kind. So if some workers have GPUs
        # and others only CPUs, the collectives connect the workers' `host` devices, which are CPUs.
        lead = worker.host if len(worker.kinds) > 1 else worker.devices[0]
        self.collectives = self._between(0, lead)  # `connect_by` may choose NCCL instead
        self.reports = self._between(1, worker.host)
        by_horovod = settings.collectives == "horovod"
        self.way = "" if self._alone else "Horovod" if by_horovod else "a ring over gRPC"
        self.connected_by = ""

    @property
    def _alone(self) -> bool:
        return self._worker.num_workers == 1 and self._worker.company.members is None

    def for_control(self) -> Collectives:
        """Returns collectives between the hosts, for exchanges that Python code calls."""
        # The timeout is for waits in graphs. The watchdog or the connection to the meeting point,
        # which can name the silent worker, ends a wait in Python code earlier.
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
        if self._alone:
            return Loopback()
        group += self._earlier * BETWEEN_STRATEGIES
        place = (self._worker.rank, device, timeout_seconds)
        if self._settings.collectives == "horovod":
            return HorovodCollectives(self._worker.num_workers, *place, group)
        members = self._worker.company.members
        return TensorFlowCollectives(
            self._found.tasks, *place, communication, group, members, waiting
        )

    def tell_devices(self) -> None:
        """Gathers the number and kind of the workers' devices; every worker must call it."""
        worker, company = self._worker, self._worker.company
        control = Control(self.for_control(), worker.call_site, tuple, company)
        told = everyones([len(worker.devices), worker.kind], control, START)
        counts, kinds = zip(*told, strict=True)
        company.kinds = frozenset(kinds)
        company.unlike_devices = counts if len(set(counts)) > 1 else ()

    def compare(self) -> None:
        """Compares the workers' settings, and gives all workers the chief's random states."""
        terms = self._settings.fingerprint()
        terms["fast reduce-scatter"] = self.collectives.scatters_well
        if self._worker.changes:
            # A worker that joins takes over another worker's replicas, one on each device. So all
            # workers need equally many devices, of the same kind.
            terms["devices per worker"] = len(self._worker.devices)
            terms["kind of devices"] = self._worker.kind
        agree(terms, self._worker.control, START)
        if self._worker.num_workers == 1:
            return
        card = card_of(self._worker.devices[0]) if self._worker.kinds == {"GPU"} else None
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
        # Every worker shuffles data for itself. With different global seeds the orders would
        # differ, even with `shuffle(1000, seed=1)`, and the workers' parts of the data would
        # overlap. A resumed run, or a worker that joins, needs the same seed, too. So a fixed seed
        # is set if the program has set none.
        if _context.global_seed() is None:
            tf.random.set_seed(_SEED)
        # Scripts and PyDatasets draw random numbers from Python's and NumPy's generators. All
        # workers must draw the same numbers, so each sets its generators to the chief's states.
        set_random_states(states[0])

    def connect_by(self, cards: Sequence[str | None]) -> None:
        """Chooses how the weights travel, from the cards of the workers' lead devices."""
        kinds = self._worker.kinds
        chosen, why = choose_communication(
            self._settings.communication,
            " and ".join(sorted(kinds)),
            cards,
            members_change=self._worker.changes,
        )
        if chosen == "NCCL":
            self.collectives = self._between(0, self._worker.devices[0], communication=chosen)
            self.way = chosen
        if len(kinds) > 1:
            self.connected_by = "workers on GPUs and on CPUs are connected by a ring over gRPC"
        elif kinds == {"GPU"}:
            self.connected_by = f"the workers' GPUs are connected by {self.way}: {why}"

    def abort(self, message: str) -> None:
        """Ends the collectives under way with an error."""
        if self._settings.collectives == "horovod":
            _horovod.abort(message)
        else:
            # TensorFlow's own health check ends collectives by the same function.
            _context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def without_coordination() -> None:
    """Makes TensorFlow start no coordination service, which would end a run that loses a worker."""
    _context.context().configure_coordination_service(service_type="")


def prepare_for_changes(devices: Sequence[str]) -> None:
    """Makes changes of members cheap; must be called before TensorFlow's server starts."""
    # By default gRPC keeps two descriptors for each process that the server was connected to.
    os.environ.setdefault("GRPC_POLL_STRATEGY", "epoll1,poll")
    # TensorFlow's graph optimiser would optimise all functions again in each generation, in half
    # of the time that a change costs. On CPUs, steps were no slower without it.
    chosen = tf.config.optimizer.get_experimental_options().keys()
    if all("CPU" in each.upper() for each in devices) and chosen <= NO_PARTS:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def serve(addresses: Mapping[int, str], leader: str) -> None:
    """Gives this process's server another list of workers; variables and functions stay.

    `addresses` are those of all workers, by task number, in the order of ranks. `leader` is the
    device name of the worker that coordinates collectives.
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


def guard_python_functions(guard: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes TensorFlow call each Python function in a graph in a context that `guard` returns."""

    def guarded(registry: Any, *args: Any) -> Any:
        with guard():
            return _call_python_function(registry, *args)

    FuncRegistry.__call__ = guarded


def end_collectives(why: str) -> None:
    """Ends the collectives under way, and all that follow until `serve`, with an error."""
    _context.context().abort_collective_ops(tf.errors.ABORTED, why)
