"""Reading a metric's variable, as one value over the replicas of all workers."""

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
    """The reads of metrics' variables, in which all workers take part."""

    worker: Worker
    # Inside `reading`: the sums of the metrics' variables over all workers, by the `id` of the
    # variable.
    _sums: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict, init=False)

    @contextlib.contextmanager
    def reading(self, model: keras.Model) -> Iterator[None]:
        """A context in which all reads of a model's metrics sum over the same workers.

        If workers may change, all variables are summed at once, on entry.
        """
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

        If only replica 0's component of the variable counts, that component is returned.
        """
        replicas, eager = self.worker.replicas, tf.executing_eagerly()
        if not eager:
            total = self._part_of(variable)
        elif id(variable) in self._sums:
            total = self._sums[id(variable)]
        else:
            (total,) = self._sums_of([variable])
        if eager and self.worker.changes and self.worker.call_site.calls:
            replicas = len(self.worker.devices)  # each worker by itself has evaluated all data
        return total / replicas if mean else total

    def _part_of(self, variable: Metric) -> tf.Tensor:
        """Returns this worker's term of the sum that a read of a metric's variable gives."""
        if not variable.is_of_first:
            return tf.add_n([v.read_value() for v in variable.values])
        first = variable.values[0].read_value()
        # In a graph nothing is exchanged, so each worker's own value counts.
        counts = self.worker.rank == 0 or not tf.executing_eagerly()
        return first if counts else tf.zeros_like(first)

    def _sums_of(self, variables: Sequence[Metric]) -> list[tf.Tensor]:
        """Returns metrics' variables summed over the workers."""
        parts = [self._part_of(variable) for variable in variables]
        return self.worker.company.sums(parts, bool(self.worker.call_site.calls))
