"""Reading a metric's variable: one number from the replicas of all workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfpara.sync.tensorflow.variables import Metric
from tfpara.sync.workers.worker import Worker


@dataclasses.dataclass(eq=False)
class MetricReads:
    """The reading of metrics.

    Args:
        worker: this worker.
    """

    worker: Worker
    # By the variable's id, while metrics are read.
    _sums: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict, init=False)

    @contextlib.contextmanager
    def reading(self, model: keras.Model) -> Iterator[None]:
        """Has metrics that are read inside be all of the same workers, where these change."""
        if not self.worker.changes:
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
        replicas, eager = self.worker.replicas, tf.executing_eagerly()
        if not eager:
            total = self._part_of(variable)
        elif id(variable) in self._sums:
            total = self._sums[id(variable)]
        else:
            (total,) = self._sums_of([variable])
        if eager and self.worker.changes and self.worker.call_site.calls:
            replicas = len(self.worker.devices)  # each worker has evaluated all data
        return total / replicas if mean else total

    def _part_of(self, variable: Metric) -> tf.Tensor:
        """Returns this worker's term of the sum of which a metric's variable is read."""
        if not variable.is_of_first:
            return tf.add_n([v.read_value() for v in variable.values])
        first = variable.values[0].read_value()
        # In a graph nothing is exchanged.
        counts = self.worker.rank == 0 or not tf.executing_eagerly()
        return first if counts else tf.zeros_like(first)

    def _sums_of(self, variables: Sequence[Metric]) -> list[tf.Tensor]:
        """Returns metrics' variables summed over the workers."""
        parts = [self._part_of(variable) for variable in variables]
        return self.worker.company.sums(parts, bool(self.worker.call_site.calls))
