"""The replay of an elastic run in one process: a simulated replica for each place of a worker."""

import contextlib
import dataclasses
import itertools
import unittest.mock

import numpy as np
import record
import tensorflow as tf

from tfpara import cluster
from tfpara.elastic.settings import Elastic
from tfpara.sync import start
from tfpara.sync.data.dealt import emptied, open_spec
from tfpara.sync.data.elastic_data import Began
from tfpara.sync.elastic.fit_again import stepping
from tfpara.sync.keras.fit_arguments import deal_out
from tfpara.sync.one_sync.replicas import assign_on
from tfpara.sync.one_sync.sized_rule import check_sizes
from tfpara.sync.one_sync.state_vars import Kind, model_slots
from tfpara.sync.simulation import make_devices
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.sync.workers.company import Company
from tfpara.sync.workers.data_place import DataPlace, making


def replayed(path, rule, elastic=None, **options):
    """A strategy whose replicas train what the workers of a run did, with that run's arguments.

    Each replica has the minibatches of one worker's device, in its order; one of whose worker was
    not there, or had less to do than others, takes no step.

    Args:
        path: of the record, `generations.jsonl`.
        rule: of the run; likewise the others.
    """
    company, of_run = Replay(path), elastic or Elastic()
    make_devices(company.places)

    def workers_of(settings, *_):
        # Devices of one process would divide the state, which the run has kept whole.
        settings = dataclasses.replace(settings.elastic(), aggregation="replicated")
        if of_run.rule_follows:
            largest = check_sizes(rule, of_run.max_workers, 1)
            settings = dataclasses.replace(settings, following_rule=rule, largest_rule=largest)
        return cluster.ALONE, settings, contextlib.nullcontext(company)

    devices = [f"CPU:{number}" for number in range(company.places)]
    with unittest.mock.patch.object(start, "workers_of", workers_of):
        return _Replaying(rule, devices=devices, **options)


class _Replaying(PeriodicSyncStrategy):
    _is_simulated = True

    def datasets_by_number(self, dataset_fn):
        return super().datasets_by_number(self.extended.worker.company.dealt(dataset_fn))


class Replay(Company):
    """The workers of an elastic run, as one process plays them."""

    changes = True

    def __init__(self, path):
        super().__init__(cluster.ALONE)
        self._generations = record.read(path)
        self._devices = self._generations[0].devices
        self._founding_replicas = self._generations[0].founders * self._devices
        self.places = record.places_needed(self._generations) * self._devices
        self._positions = {0: record.Position()}  # where each epoch begins
        self._rows = {}  # of each epoch
        self._epoch = self._row = 0

    def attach(self, extended):
        super().attach(extended)
        with tf.device("CPU:0"), tf.init_scope():
            self._present = tf.Variable(self._founding_replicas, trainable=False, dtype=tf.int32)

    def founding_replicas(self, devices):
        return self._founding_replicas

    def replicas_now(self, devices):
        return self._present.read_value(), 0

    def dealt(self, dataset_fn):
        """A function that makes the data of the replicas in turn, from those of all."""

        def make(epoch, first):
            with making(DataPlace(0, 1, 1, epoch, first)):
                whole = dataset_fn(epoch, first)
            rows = self._rows_of(epoch, whole)
            signature = tf.nest.map_structure(open_spec, whole.element_spec)

            def minibatches():
                units = _Units(whole, self._devices)
                for row in rows:
                    for unit in row.units:
                        yield from units.take(unit)

            return tf.data.Dataset.from_generator(minibatches, output_signature=signature)

        return make

    def _rows_of(self, epoch, whole):
        """What is trained in an epoch that has these minibatches."""
        count = int(whole.cardinality())
        if count == tf.data.UNKNOWN_CARDINALITY:
            count = int(whole.reduce(np.int64(0), lambda number, _: number + 1))
        units = -(-count // self._devices)
        self._rows[epoch], self._positions[epoch + 1] = record.rows(
            self._generations,
            self._positions[epoch],
            epoch,
            self._extended.momentum.sync_period,
            units,
        )
        return self._rows[epoch]

    def fit(self, model, given, fit):
        began = Began(self._founding_replicas, self._devices)
        deal_out(model.distribute_strategy, began, given)
        with stepping(model, lambda function, iterator: self._step(model, function, iterator)):
            return fit(given)

    def epoch_begins(self, epoch):
        self._epoch, self._row = epoch, 0

    def _step(self, model, function, iterator):
        rows = self._rows[self._epoch]
        if self._row < len(rows):
            self._prepare(model, rows[self._row])
        logs = function(iterator)
        self._row += 1
        return logs

    def _prepare(self, model, row):
        """Makes the replicas those that took the step of a row."""
        with model.distribute_strategy.scope():
            synchronizer = self._extended.models.synchronizer_of(model)
        if row.workers is not None:
            self._present.assign(row.workers * self._devices)
            synchronizer.graph.global_state.rule.change(row.workers * self._devices)
        if row.restarted:
            point = synchronizer.broadcast_point()
            for replica in self._of_places(row.restarted):
                _set_replica(synchronizer, replica, point)
        if row.skipped:
            synchronizer.graph.block.steps.assign_add(row.skipped)
        for taker, source in row.taken_over:
            replicas = zip(self._of_places([taker]), self._of_places([source]), strict=True)
            for to, since in replicas:
                _copy(model, to, since)
        if anew := {*row.restarted, *(taker for taker, _ in row.taken_over)}:
            _start_moments(synchronizer.graph.averaging, self._of_places(sorted(anew)))

    def _of_places(self, places):
        return [place * self._devices + k for place in places for k in range(self._devices)]


def _start_moments(averaging, replicas):
    """Sets the moments of some replicas to those with which the open block began."""
    own = averaging._replicas
    for slots, field in zip(own.variables.moments, ("momentum", "velocity"), strict=False):
        buckets = averaging._global.whole(f"moments/{field}")
        for replica in replicas:
            with tf.device(own.devices[replica]):
                assign_on(replica, slots, own.layout.unpack(buckets))


@dataclasses.dataclass
class _Units:
    """The units of an epoch, each taken once, nearly in their order; read as they are needed."""

    whole: tf.data.Dataset
    devices: int

    def __post_init__(self):
        self._iterator = iter(self.whole)
        self._kept = {}
        self._read = 0
        self._empty = None

    def take(self, unit):
        """The minibatches of a unit; for None as many that are empty."""
        while self._empty is None or (unit is not None and self._read <= unit):
            own = list(itertools.islice(self._iterator, self.devices))
            self._empty = tf.nest.map_structure(emptied, own[0])
            self._kept[self._read] = own + [self._empty] * (self.devices - len(own))
            self._read += 1
        return [self._empty] * self.devices if unit is None else self._kept.pop(unit)


def _set_replica(synchronizer, replica, weights):
    """Writes weights to a replica's variables, by their constraints."""
    replicas = synchronizer.graph.replicas
    of_all = zip(replicas.variables.weights, replicas.constrained(weights), strict=True)
    for of_replicas, value in of_all:
        of_replicas[replica].assign(value)


def _copy(model, to, since):
    """Copies what a replica of a model has for itself, but for its weights."""
    slots = [s for s in model_slots(model) if s.kind is Kind.MODEL]
    trained = {id(v) for weight in model.trainable_variables for v in weight.value.values}
    values = {s.name: s.variable for s in slots if s.replica == since}
    for slot in slots:
        if slot.replica == to and id(slot.variable) not in trained:
            slot.variable.assign(values[slot.name])
