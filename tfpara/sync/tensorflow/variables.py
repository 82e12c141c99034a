"""The variables of models and metrics in the strategy's scope, and those of the strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.cluster.call_site import VARIABLE
from tfpara.contexts import attributes
from tfpara.keras_model import is_seed
from tfpara.sync.workers.settings_check import agree
from tfpara.sync.workers.worker import Worker
from tfpara.tensorflow_private import CheckpointInitialValue, ResourceVariable
from tfpara.tensorflow_private import values as _values
from tfpara.typing import Nest, Variable


class _AsNumber:
    """Lets `float(optimizer.learning_rate)` work in callbacks, as in plain Keras."""

    def __float__(self) -> float:
        return float(self.read_value())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.read_value())  # type: ignore[attr-defined]


class Mirrored(_AsNumber, _values.MirroredVariable):
    """A variable with a component on each replica; other code reads this worker's first one."""


class Metric(_AsNumber, _values.SyncOnReadVariable):
    """A metric's variable, of which each replica has a component; a read aggregates them."""

    @property
    def is_of_first(self) -> bool:
        """Whether a read gives replica 0's component."""
        return self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA

    # If `is_of_first` is true, all workers must read replica 0's component. But the parent class's
    # versions of the next two methods would give each worker the value of its own first replica,
    # without an exchange between the workers.
    def _get_cross_replica(self) -> tf.Tensor:
        if self._aggregation == tf.VariableAggregation.NONE:
            raise ValueError(not_aggregated(self.name))
        if not self.is_of_first:
            return super()._get_cross_replica()
        return self.distribute_strategy.extended.metrics.over_all(self, False)

    def value(self) -> tf.Tensor:
        if not self.is_of_first or in_replica() or _values.values_util.in_replica_update_context():
            return super().value()
        return self._get_cross_replica()

    def assign(
        self,
        value: Nest,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        # If Python code calls the parent class's method, the method also reads the variable, and
        # all workers take part in this read. Keras calls `assign` to reset all metrics when an
        # epoch begins, and does not use the value that was read. So the read is left out.
        if not tf.executing_eagerly() or in_replica():
            return super().assign(value, use_locking, name, read_value)
        super().assign(value, use_locking, name, read_value=False)
        return self


@dataclasses.dataclass(eq=False)
class MetricReads:
    """The reads of metrics' variables, in which all workers take part."""

    worker: Worker
    # The sums of the metrics' variables over all workers, by the `id` of the variable. The dict is
    # empty outside of `reading`.
    _sums: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict, init=False)

    @contextlib.contextmanager
    def reading(self, model: keras.Model) -> Iterator[None]:
        """A context in which all reads of a model's metrics sum over the same workers."""
        if not self.worker.changes:
            yield
            return
        values = [variable.value for variable in model.metrics_variables]
        variables = [value for value in values if isinstance(value, Metric)]
        sums = zip(map(id, variables), self._sums_of(variables), strict=True)
        with attributes(self, _sums=dict(sums)):
            yield

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
            # In an elastic run each worker evaluates all data, so the values are those of a single
            # worker, and their mean is over the replicas of this worker.
            replicas = len(self.worker.devices)
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


def not_aggregated(name: str) -> str:
    """Returns the error's text for a metric's variable whose value over replicas is undefined."""
    return (
        f'the metric\'s variable {name!r} has aggregation="none", which does not say what it is of '
        'several replicas. Give add_variable aggregation="sum", "mean" or "only_first_replica".'
    )


def with_our_class(variable: Any) -> Any:
    """Returns a variable that TensorFlow has made, as one of the classes of this file."""
    for kind in (Metric, Mirrored):
        if type(variable) is kind.__bases__[-1]:
            variable.__class__ = kind
    if isinstance(variable, Metric) and variable.dtype == tf.bool:
        raise ValueError(
            f"the metric's variable {variable.name!r} is of bool, and the values of several "
            'replicas are added up. Count in numbers: add_variable(..., dtype="int32").'
        )
    return variable


def in_replica() -> bool:
    """Returns whether the calling code is part of a replica's step."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def local_replica() -> int:
    """Returns the number, on this worker, of the replica whose step calls this function."""
    return _values.values_util.get_current_replica_id_as_int()


def plain_variable(
    value: Nest, name: str, shape: Sequence[int | None] | None = None
) -> tf.Variable:
    """Returns a variable of the present device alone, also in a strategy's scope.

    `shape`: that of all values that the variable may get, if it is not that of `value`.
    """
    return ResourceVariable(value, name=f"tfpara/{name}", trainable=False, shape=shape)


class InitialValues:
    """The initial values of variables: the chief's, once all have agreed on what is being made."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._created = 0
        self._alone = False

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this worker creates variables that other workers do not create."""
        return attributes(self, _alone=True)

    def of_component(
        self, replica_id: int, primary: Variable | None, given: Mapping[str, Any]
    ) -> Callable[[], tf.Tensor]:
        """Returns a function that gives the initial value of a local replica's component.

        `primary` is the component of the first local replica; None if that is the one to be made.
        `given` are the arguments with which the variable is created.
        """
        name, dtype = given.get("name") or "Variable", given.get("dtype")
        shared = given.get("synchronization") != tf.VariableSynchronization.ON_READ

        def value() -> tf.Tensor:
            if primary is None:
                initial = given["initial_value"]
                first = initial() if callable(initial) else initial
                if isinstance(first, CheckpointInitialValue):
                    first = first.wrapped_value
                first = tf.convert_to_tensor(first, dtype)
                if shared and tf.executing_eagerly() and not self._alone:
                    first = self._chiefs_value(first, name)
            else:
                first = tf.identity(primary.read_value())
            if is_seed(name):
                # Every replica gets a seed of its own, so that the dropout of different replicas is
                # independent.
                number = self._worker.first_replica if primary is None else replica_id
                offset = tf.cast(number * 1_000_003, first.dtype)
                first = first + tf.one_hot(
                    0, first.shape[0], offset, tf.zeros_like(offset), dtype=first.dtype
                )
            return first

        return value

    def _chiefs_value(self, value: tf.Tensor, name: str) -> tf.Tensor:
        self._created += 1
        if self._worker.num_workers == 1:
            return value
        # Numbers in Keras' names are removed: they count all objects of a process, and may differ
        # between workers.
        name = re.sub(r"_\d+(?=[/_]|$)", "", name)
        description = f"{name} {tuple(value.shape)} {value.dtype.name}"
        digest = hashlib.blake2b(description.encode(), digest_size=6).digest()
        mine = int.from_bytes(digest, "little")
        if any(theirs != mine for theirs in self._worker.control.together(VARIABLE, mine)):
            agree({f"model, variable {self._created}": description}, self._worker.control, VARIABLE)
        if not (value.dtype.is_floating or value.dtype.is_integer):
            return value
        return self._worker.control.broadcast(value, "variable/value")
