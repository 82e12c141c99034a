"""Metrics' variables, read as one number of the replicas of all workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfpara.sync.tensorflow.trained_models import TrainedModels
from tfpara.sync.tensorflow.variables import Metric
from tfpara.sync.workers.worker import Worker


@dataclasses.dataclass(eq=False)
class MetricReads:
    """The reading of metrics, which closes the open blocks: so the data of all workers end alike.

    Args:
        worker: this worker.
        models: the trained models.
    """

    worker: Worker
    models: TrainedModels
    # By the variable's id, while metrics are read.
    _sums: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict, init=False)

    @contextlib.contextmanager
    def reading(self, model: keras.Model) -> Iterator[None]:
        """Metrics are read inside. In an elastic run all of them are those of the same workers."""
        if self.worker.elastic is None:
            yield
            return
        values = [variable.value for variable in model.metrics_variables]
        variables = [value for value in values if isinstance(value, Metric)]
        try:
            for variable, total in zip(variables, self._sums_of(variables), strict=True):
                self._sums[id(variable)] = total
            yield
        finally:
            self._sums.clear()

    def over_all(self, variable: Metric, mean: bool) -> tf.Tensor:
        """Returns the sum or mean of a variable over all replicas; every worker must call it.

        Of a variable that is read as replica 0's, it is that one's component.
        """
        eager = tf.executing_eagerly()
        replicas = self.worker.replicas
        if self.worker.elastic is not None and eager:
            found = self._sums.get(id(variable))
            found = self._sums_of([variable])[0] if found is None else found
            if self.worker.place.calls:  # each worker has evaluated all data
                replicas = len(self.worker.devices)
            return found / replicas if mean else found
        if eager:
            purpose = self.worker.place.of_metric()
            if self.models.synchronizers:
                self.models.finish_blocks(purpose)
            else:
                self.worker.control.together(purpose)
        local = self._part_of(variable)
        if self.worker.num_workers > 1 and eager:
            hosts, name = self.worker.control.collectives, f"metric/{local.dtype.name}"
            local = tf.reshape(hosts.all_reduce([tf.reshape(local, [-1])], name)[0], local.shape)
        return local / replicas if mean else local

    def _part_of(self, variable: Metric) -> tf.Tensor:
        """Returns this worker's term of the sum of which a metric's variable is read."""
        if not variable.is_of_first:
            return tf.add_n([v.read_value() for v in variable.values])
        first = variable.values[0].read_value()
        # In a graph nothing is exchanged.
        counts = self.worker.rank == 0 or not tf.executing_eagerly()
        return first if counts else tf.zeros_like(first)

    def _sums_of(self, variables: Sequence[Metric]) -> list[tf.Tensor]:
        """Returns metrics' variables summed over the workers of an elastic run, in one exchange."""
        parts = [self._part_of(variable) for variable in variables]
        if not parts:
            return []
        flat = tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)
        evaluates = bool(self.worker.place.calls)

        def shared() -> list[float]:
            hosts = self.worker.control.collectives
            if evaluates:  # each worker has evaluated all data
                return hosts.all_gather(flat, "metrics")[0].numpy().tolist()
            return hosts.all_reduce([flat], "metrics")[0].numpy().tolist()

        total = tf.constant(self.worker.elastic.together(shared), tf.float64)
        pieces = tf.split(total, [int(tf.size(part)) for part in parts])
        return [
            tf.cast(tf.reshape(piece, part.shape), part.dtype)
            for piece, part in zip(pieces, parts, strict=True)
        ]
