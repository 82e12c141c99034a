"""Fixed: the company of a run whose workers do not change, or of a single worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.cluster import ALONE, Cluster
from tfpara.cluster.call_site import END, FIT_END, Purpose, call
from tfpara.strategy import EpochUnits
from tfpara.sync.workers.company import Company, Fit
from tfpara.sync.workers.data_place import first_replica_of, replicas_of
from tfpara.sync.workers.meetings import MismatchError
from tfpara.typing import Scalar


class Fixed(Company):
    """The workers of a run which no worker leaves or joins, or a single worker.

    `by_horovod`: whether Horovod connects the workers; TensorFlow then knows only this worker.
    """

    _host: Any  # the extended strategy

    def __init__(self, found: Cluster, by_horovod: bool = False) -> None:
        self._found, self._by_horovod = found, by_horovod
        self.epoch_units = EpochUnits()

    @property
    def is_chief(self) -> bool:
        return self._found.rank == 0

    def replicas_now(self, devices: int) -> tuple[Scalar, Scalar]:
        unlike = self.unlike_devices
        replicas = replicas_of(self._found.num_workers, devices, unlike)
        return replicas, first_replica_of(self._found.rank, devices, unlike)

    def founding_replicas(self, devices: int) -> int:
        return int(self.replicas_now(devices)[0])

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        found = ALONE if self._by_horovod else self._found
        if found.num_workers == 1:
            return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        # TensorFlow is given the cluster that tfpara has checked, so that it does not read
        # TF_CONFIG itself.
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(json.loads(found.tf_config())["cluster"]),
            task_type=found.task_type,
            task_id=found.task_index,
            rpc_layer="grpc",
        )

    def attach(self, extended: Any) -> None:
        self._host = extended
        if self._by_horovod:
            extended.take_place(self._found.num_workers, self._found.rank)

    def part(self) -> None:
        # After this exchange all other workers have finished their work. Errors do not matter,
        # since nothing follows.
        with contextlib.suppress(tf.errors.OpError, MismatchError):
            self._host.control.together(END)

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        if self.is_chief:
            write()
        self._host.control.together(call(name))

    def finish_block(self, synchronizer: Any, purpose: Purpose) -> None:
        with self._host.call_site.meeting(purpose):
            synchronizer.finish_block()

    def finish_blocks(self, purpose: Purpose) -> None:
        synchronizers = self._host.models.in_turn()
        if synchronizers:
            with self._host.call_site.meeting(purpose):
                for synchronizer in synchronizers:
                    synchronizer.finish_block()

    def sums(self, parts: Sequence[tf.Tensor], evaluates: bool) -> list[tf.Tensor]:
        del evaluates  # in an evaluation, too, each worker has only a part of the data
        # All blocks are closed first. This waits until no worker has data left, so that the metrics
        # cover all data.
        purpose = self._host.call_site.of_metric()
        if self._host.models.synchronizers:
            self._host.models.finish_blocks(purpose)
        else:
            self._host.control.together(purpose)
        return [self._sum(part) for part in parts]

    def _sum(self, part: tf.Tensor) -> tf.Tensor:
        if self._found.num_workers == 1:
            return part
        flat, name = tf.reshape(part, [-1]), f"metric/{part.dtype.name}"
        total = self._host.control.collectives.all_reduce([flat], name)[0]
        return tf.reshape(total, part.shape)

    def fit(self, model: keras.Model, given: dict[str, Any], fit: Fit) -> keras.callbacks.History:
        history = fit(given)
        if self._found.num_workers > 1:
            self._host.models.finish_blocks(FIT_END)
        return history
