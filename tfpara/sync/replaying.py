"""The replay of an elastic run in one process: a simulated replica for each place of a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpara.elastic import record
from tfpara.sync.data.elastic_data import Began, slice_of
from tfpara.sync.keras.train_function import stepping
from tfpara.sync.one_sync.state_vars import Kind, model_slots
from tfpara.typing import Nest

if TYPE_CHECKING:
    import keras

    from tfpara.sync.tensorflow.extended import PeriodicSyncExtended


class Replay:
    """What the workers of an elastic run trained, dealt out to simulated replicas.

    Each replica has the minibatches of one worker's device, in its order; one of whose worker was
    not there, or had less to do than others, takes no step.

    Args:
        path: of the record, `generations.jsonl`.

    Attributes:
        founding_replicas: replicas with which the run began.
        replicas: largest number at a time.
        present: N, as graphs read it.
    """

    def __init__(self, path: Path) -> None:
        self._generations = record.read(path)
        self._devices = self._generations[0].devices
        self.founding_replicas = self._generations[0].founders * self._devices
        self.replicas = record.places_needed(self._generations) * self._devices
        self._positions = {0: record.Position()}  # where each epoch begins
        self._rows: dict[int, list[record.Row]] = {}  # of each epoch
        self._epoch = self._row = 0
        self._has_trained = False

    def attach(self, extended: PeriodicSyncExtended) -> None:
        """Takes the strategy whose replicas these are."""
        self._extended = extended
        with tf.device("CPU:0"), tf.init_scope():
            self.present = tf.Variable(self.founding_replicas, trainable=False, dtype=tf.int32)

    def dealt(self, dataset_fn: Callable[..., tf.data.Dataset]) -> Callable[..., tf.data.Dataset]:
        """Returns a function that makes the data of the replicas in turn, from those of all."""

        def make(context: Any) -> tf.data.Dataset:
            extended = self._extended
            extended.as_one_replica = True
            try:
                whole = dataset_fn(context)
            finally:
                extended.as_one_replica = False
            rows = self._rows_of(extended.position.epoch, whole)
            signature = tf.nest.map_structure(_open, whole.element_spec)

            def minibatches() -> Iterator[Nest]:
                units = _Units(whole, self._devices)
                for row in rows:
                    for unit in row.units:
                        yield from units.take(unit)

            return tf.data.Dataset.from_generator(minibatches, output_signature=signature)

        return make

    def _rows_of(self, epoch: int, whole: tf.data.Dataset) -> list[record.Row]:
        """What is trained in an epoch that has these minibatches."""
        if epoch not in self._positions:
            raise ValueError(
                f"the replay is asked for epoch {epoch} before the one before it. Replays begin "
                "with the first epoch."
            )
        period = self._extended.sync_period
        if period is None:
            raise ValueError("sync_period=None: an elastic run has syncs. Give its period.")
        count = int(whole.cardinality())
        if count == tf.data.UNKNOWN_CARDINALITY:
            count = int(whole.reduce(np.int64(0), lambda number, _: number + 1))
        units = -(-count // self._devices)
        self._rows[epoch], self._positions[epoch + 1] = record.rows(
            self._generations, self._positions[epoch], epoch, period, units
        )
        return self._rows[epoch]

    @property
    def began(self) -> Began:
        """Replicas with which the run began, and those of each worker."""
        return Began(self.founding_replicas, self._devices)

    def check(self, model: keras.Model, given: Mapping[str, Any]) -> None:
        """Looks at what `fit` is given.

        Raises:
            ValueError: several steps are taken at once; the data are no `datasets_by_epoch`; or it
                is a second call.
        """
        if self._has_trained:
            raise ValueError(
                "a replay is of one call of fit: the directory's record does not say with which "
                "state another begins."
            )
        if model.steps_per_execution != 1:
            raise ValueError(
                f"steps_per_execution={model.steps_per_execution}: a replay changes the number of "
                "replicas between steps. Compile the model with 1."
            )
        if not hasattr(given.get("x"), "built_for"):
            raise ValueError("a replay needs the data that fit had in the run.")

    @contextlib.contextmanager
    def training(self, model: keras.Model) -> Iterator[None]:
        """A call of `fit`."""
        with stepping(model, lambda function, iterator: self._step(model, function, iterator)):
            yield
        self._has_trained = True

    def begin_epoch(self, epoch: int) -> None:
        """An epoch of `fit` begins."""
        self._epoch, self._row = epoch, 0

    def _step(
        self, model: keras.Model, function: Callable[..., Any], iterator: Iterator[Any]
    ) -> Any:
        rows = self._rows[self._epoch]
        if self._row < len(rows):
            self._prepare(model, rows[self._row])
        logs = function(iterator)
        self._row += 1
        return logs

    def _prepare(self, model: keras.Model, row: record.Row) -> None:
        """Makes the replicas those that took the step of a row."""
        with model.distribute_strategy.scope():
            synchronizer = self._extended.synchronizer_of(model)
        if row.workers is not None:
            self.present.assign(row.workers * self._devices)
            synchronizer.graph.global_state.rule.change(row.workers * self._devices)
        if row.restarted:
            point = synchronizer.broadcast_point()
            for replica in self._of_places(row.restarted):
                synchronizer.set_replica(replica, point)
        if row.skipped:
            synchronizer.graph.block.steps.assign_add(row.skipped)
        for taker, source in row.taken_over:
            replicas = zip(self._of_places([taker]), self._of_places([source]), strict=True)
            for to, since in replicas:
                _copy(model, to, since)
        if anew := {*row.restarted, *(taker for taker, _ in row.taken_over)}:
            synchronizer.graph.averaging.start_moments(self._of_places(sorted(anew)))

    def _of_places(self, places: Any) -> list[int]:
        return [place * self._devices + k for place in places for k in range(self._devices)]


@dataclasses.dataclass
class _Units:
    """The units of an epoch, each taken once, nearly in their order; read as they are needed."""

    whole: tf.data.Dataset
    devices: int

    def __post_init__(self) -> None:
        self._iterator = iter(self.whole)
        self._kept: dict[int, list[Nest]] = {}
        self._read = 0
        self._empty: Nest = None

    def take(self, unit: int | None) -> list[Nest]:
        """The minibatches of a unit; for None as many that are empty."""
        while self._empty is None or (unit is not None and self._read <= unit):
            own = list(itertools.islice(self._iterator, self.devices))
            self._empty = tf.nest.map_structure(_emptied, own[0])
            self._kept[self._read] = own + [self._empty] * (self.devices - len(own))
            self._read += 1
        return [self._empty] * self.devices if unit is None else self._kept.pop(unit)


def _copy(model: keras.Model, to: int, since: int) -> None:
    """Copies what a replica of a model has for itself, but for its weights."""
    slots = [s for s in model_slots(model) if s.kind is Kind.MODEL]
    trained = {id(v) for weight in model.trainable_variables for v in weight.value.values}
    values = {s.name: s.variable for s in slots if s.replica == since}
    for slot in slots:
        if slot.replica == to and id(slot.variable) not in trained:
            slot.variable.assign(values[slot.name])


def _open(spec: Any) -> Any:
    """The spec of minibatches that may be empty."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec  # that of ragged or sparse tensors is open
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _emptied(leaf: Any) -> Any:
    nothing = tf.constant(0, tf.int64)
    return slice_of(leaf, nothing, nothing) if leaf.shape.rank else leaf
