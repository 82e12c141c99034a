"""Company: the workers that take part in a run, and their common operations."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpara.cluster import ALONE, Cluster
from tfpara.cluster.call_site import END, FIT_END, Purpose, call
from tfpara.collectives.members import Members
from tfpara.strategy import CompanyBase
from tfpara.sync.workers.data_place import first_replica_of, replicas_of
from tfpara.typing import Json, Scalar

Fit: TypeAlias = Callable[[Mapping[str, Any]], keras.callbacks.History]


class MismatchError(RuntimeError):
    """Workers have reached different exchanges. The message says where each is in its script."""


class Company(CompanyBase):
    """The workers of a run which no worker leaves or joins, or a single worker.

    A subclass is for elastic runs. Other code calls the methods without asking which one it is.
    Every worker must call the methods marked "All".

    `by_horovod`: whether Horovod connects the workers; TensorFlow then knows only this worker.

    Attributes:
        syncs_in_steps: whether the graph of a step has the sync; else Python code calls it.
        unlike_devices: the number of devices of each worker, by rank, if they differ; else empty.
        kinds: the kinds of all workers' devices, such as "CPU"; empty: not exchanged yet.
    """

    syncs_in_steps = True
    unlike_devices: Sequence[int] = ()
    kinds: frozenset[str] = frozenset()
    _extended: Any

    def __init__(self, found: Cluster, by_horovod: bool = False) -> None:
        self._found, self._by_horovod = found, by_horovod

    @property
    def members(self) -> Members | None:
        """The members, as an object that collectives read; None if members do not change."""
        return None

    @property
    def leader(self) -> str:
        """TensorFlow's name of the task that coordinates collectives; "": TensorFlow chooses."""
        return ""

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files of which the run needs one copy."""
        return self._found.rank == 0

    def replicas_now(self, devices: int) -> tuple[Scalar, Scalar]:
        """Returns N, and the index of this worker's first replica; in an elastic run as tensors."""
        unlike = self.unlike_devices
        replicas = replicas_of(self._found.num_workers, devices, unlike)
        return replicas, first_replica_of(self._found.rank, devices, unlike)

    def founding_replicas(self, devices: int) -> int:
        """Returns N, the number of replicas, at the start of the run."""
        return int(self.replicas_now(devices)[0])

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Returns the cluster for TensorFlow's server, which is about to start."""
        found = ALONE if self._by_horovod else self._found
        if found.num_workers == 1:
            return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        # TensorFlow does not read TF_CONFIG itself, but gets the cluster that tfpara has checked.
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(json.loads(found.tf_config())["cluster"]),
            task_type=found.task_type,
            task_id=found.task_index,
            rpc_layer="grpc",
        )

    def attach(self, extended: Any) -> None:
        """Stores the extended strategy, whose server runs; returns when all are connected."""
        self._extended = extended
        if self._by_horovod:
            extended.take_place(self._found.num_workers, self._found.rank)

    def part(self) -> None:
        """All: waits for the others at the end of the program, if that is needed."""
        # Errors do not matter, since no exchange follows this one.
        with contextlib.suppress(tf.errors.OpError, MismatchError):
            self._extended.control.together(END)

    def together(self, exchange: Callable[[], Json]) -> Any:
        """All: runs an exchange once on each worker, and returns its result.

        It must be the same JSON value on all. If a member is lost, the others repeat the exchange.
        """
        return exchange()

    def check_in_fit(self) -> None:
        """Raises ValueError if a step trains outside of `fit`, and this company needs `fit`."""
        # The `return` is needed, because AutoGraph cannot convert a method with an empty body.
        # AutoGraph converts this method if the tf.function of a custom loop calls it.
        return None

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        """All: the chief writes a file, in the user's call `name`; returns when the file exists."""
        if self.is_chief:
            write()
        self._extended.control.together(call(name))

    def finish_block(self, synchronizer: Any, purpose: Purpose) -> None:
        """All: closes the open block of the model that `synchronizer` belongs to."""
        with self._extended.call_site.meeting(purpose):
            synchronizer.finish_block()

    def land(self, synchronizer: Any) -> Any:
        """All: waits for a sync in flight; returns what all workers have agreed on."""
        return synchronizer.land()

    def finish_blocks(self, purpose: Purpose) -> None:
        """All: closes the open blocks of all models."""
        synchronizers = self._extended.models.in_turn()
        if synchronizers:
            with self._extended.call_site.meeting(purpose):
                for synchronizer in synchronizers:
                    synchronizer.finish_block()

    def sums(self, parts: Sequence[tf.Tensor], evaluates: bool) -> list[tf.Tensor]:
        """All: returns the sums over the workers of `parts`, the values of metrics' variables.

        `evaluates`: whether the metrics are those of an evaluation.
        """
        # Metrics of an evaluation are summed like those of training, because each worker evaluates
        # only a part of the data.
        del evaluates
        # Closing all blocks waits until no worker has data left, so the metrics cover all data.
        purpose = self._extended.call_site.of_metric()
        if self._extended.models.synchronizers:
            self._extended.models.finish_blocks(purpose)
        else:
            self._extended.control.together(purpose)
        return [self._sum(part) for part in parts]

    def _sum(self, part: tf.Tensor) -> tf.Tensor:
        if self._found.num_workers == 1:
            return part
        flat, name = tf.reshape(part, [-1]), f"metric/{part.dtype.name}"
        total = self._extended.control.collectives.all_reduce([flat], name)[0]
        return tf.reshape(total, part.shape)

    def fit(self, model: keras.Model, given: dict[str, Any], fit: Fit) -> keras.callbacks.History:
        """All: calls `fit` with the arguments `given`, by name, which may be changed in place."""
        history = fit(given)
        if self._found.num_workers > 1:
            self._extended.models.finish_blocks(FIT_END)
        return history

    def fit_begins(self) -> None:
        """Admits this worker to a run under way, after the callbacks' `on_train_begin`."""

    def epoch_begins(self, epoch: int) -> None:
        """Begins an epoch of `fit`, before the callbacks' `on_epoch_begin`."""

    def check_step(self) -> None:
        """Restarts a step that has trained nothing yet if members have changed meanwhile."""

    def steady(self) -> AbstractContextManager[Any]:
        """Returns a context in which members do not change.

        Threads beside the main one call TensorFlow in it: if members change while TensorFlow
        prepares an operation, what it keeps is invalid.
        """
        return contextlib.nullcontext()

    def report(self, waits: float, place: str) -> None:
        """Reports for how many seconds this worker waits now, and its place in its script."""
