"""The strategy's side towards TensorFlow: replicas, variables, data and reductions.

This is the only file of the strategy that imports TensorFlow's private modules, and each import
says why. `data/same_data` reads private attributes of datasets; `keras/replacing` has
Keras' private names.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import hashlib
import json
import logging
import math
import os
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

# The class of plain variables. In a strategy's scope tf.Variable would create a mirrored one.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfpara import cluster, program
from tfpara.algorithms.local_momentum import in_a_block
from tfpara.cluster import failures, quiet, whereabouts
from tfpara.cluster.place import COMPILED_ANEW, END, VARIABLE, Place, Purpose, call
from tfpara.collectives import Collectives, HorovodCollectives, Loopback, TensorFlowCollectives
from tfpara.collectives import horovod as _horovod
from tfpara.collectives.choice import choose_communication
from tfpara.group import Group
from tfpara.keras_model import (
    build_optimizer,
    check_optimizers_known,
    hyperparameters,
    is_seed,
    memory_of,
    minibatches_of_a_step,
    momentum_of,
    optimizers,
    told_of_fit,
)
from tfpara.steps import (
    batch_size,
    reductions,
    weight_of,
    with_open_batches,
    with_own_memory,
    without_tuner,
)
from tfpara.strategy import StateHolder
from tfpara.sync.data.position import Position
from tfpara.sync.data.reading import (
    Order,
    random_states,
    set_random_states,
    shuffled,
    shuffled_rows,
)
from tfpara.sync.data.same_data import batch_size as batch_size_of
from tfpara.sync.data.same_data import (
    check_batched,
    check_files,
    difference,
    divided_between_workers,
)
from tfpara.sync.elastic.rejoin import Regrouping
from tfpara.sync.one_sync.replicas import Site
from tfpara.sync.one_sync.sized_rule import check_sizes
from tfpara.sync.one_sync.statistics import NO_SYNCS
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.replaying import Replay
from tfpara.sync.settings import (
    NEVER,
    Settings,
    few_syncs,
    warn_of_outlasting_momentum,
)
from tfpara.sync.start_line import counted, in_words
from tfpara.sync.tensorflow.devices import card_of, checked_devices
from tfpara.sync.tensorflow.model_variables import replica_variables
from tfpara.sync.workers.json_exchange import everyones, joined
from tfpara.sync.workers.meetings import Control, MismatchError
from tfpara.sync.workers.settings_check import agree
from tfpara.sync.workers.watchdog import Watchdog
from tfpara.typing import Json, Nest, Scalar, Variable

# The context, whose private method ends collectives that wait for a silent worker.
from tensorflow.python.eager import context as _context  # isort: skip

# The extended class that MultiWorkerMirroredStrategy builds, and the value types that its
# reductions see. They have no public names.
from tensorflow.python.distribute import collective_all_reduce_strategy as _mwms  # isort: skip
from tensorflow.python.distribute import values as _values  # isort: skip

# The classes of distributed datasets. Keras accepts no others, and calls __iter__ for each pass.
from tensorflow.python.distribute import input_lib as _input_lib  # isort: skip

# The module whose function makes the datasets of single devices, which is replaced for a while.
from tensorflow.python.data.ops import multi_device_iterator_ops as _multi_device  # isort: skip

# The initial value that tf.train.Checkpoint gives to a variable created after the restore.
from tensorflow.python.trackable.base import CheckpointInitialValue as _CheckpointInitialValue  # isort: skip

# TensorFlow's own limits are longer than ours by so much: the watchdog knows who is silent.
_LATER_SECONDS = 10.0
_log = logging.getLogger(__name__)
_SYNCHRONIZE = call("strategy.synchronize()")
_GATHER = call("strategy.gather()")
_REDUCE = call("strategy.reduce()")
_FORGET = call("strategy.forget()")
_SEED = 87654321  # which TensorFlow takes where a program has set none
_BETWEEN_STRATEGIES = 1024  # group keys, of which a strategy of TensorFlow's takes some
_START = Purpose("making a strategy", "make strategies and models on every worker alike")
_TRAIN = Purpose("beginning to train a model", "train the same models on every worker")


@contextlib.contextmanager
def _own_iterators() -> Iterator[None]:
    """Replaces iterators over devices by such as own their dataset and do not use tf.data's tuner.

    TensorFlow makes a dataset for each device, and no public name reaches its options. When such an
    iterator is deleted, every device in turn waits for its tuner's thread; see `without_tuner`.
    For the functions of these datasets see `_Shared`.
    """
    replaced = {
        "_create_device_dataset": lambda *args: without_tuner(_make_device_dataset(*args)),
        "_PerDeviceGenerator": _shared,
        "_ReincarnatedPerDeviceGenerator": _once_more,
        "OwnedMultiDeviceIterator": _OwningIterator,
    }
    former = {name: getattr(_multi_device, name) for name in replaced}
    vars(_multi_device).update(replaced)
    try:
        yield
    finally:
        vars(_multi_device).update(former)


_make_device_dataset = _multi_device._create_device_dataset
_Generator = _multi_device._PerDeviceGenerator
_Reincarnated = _multi_device._ReincarnatedPerDeviceGenerator
_PARTS = ("init", "next", "finalize")  # of what such a dataset does
# The functions of a device's dataset, and for each the names of the tensors that it captures.
_Traced = dict[str, tuple[Any, list[str | None]]]
_traced: dict[tuple[object, ...], _Traced] = {}
_served: dict[cluster.Cluster, int] = {}  # strategies so far, by the cluster of the server


class _Shared(tf.data.Dataset):
    """The dataset of one device, with functions that were traced for an earlier one.

    TensorFlow traces seven functions for each device whenever a pass over data begins, which takes
    longer than the steps of a small epoch. They differ in the tensors that they capture alone.
    """

    def __init__(self, traced: _Traced, spec: Nest, tensors: Mapping[str | None, tf.Tensor]):
        self._spec = spec
        given: dict[str, Any] = {}
        for part, (function, names) in traced.items():
            given[f"{part}_func"] = function
            given[f"{part}_func_other_args"] = [tensors[name] for name in names]
        super().__init__(tf.raw_ops.GeneratorDataset(**given, **self._flat_structure))

    def _inputs(self) -> list[tf.data.Dataset]:
        return []

    @property
    def element_spec(self) -> Nest:
        return self._spec


def _shared(
    shard_num: int,
    resource: tf.Tensor,
    incarnation_id: tf.Tensor,
    source_device: tf.Tensor,
    element_spec: Nest,
    iterator_is_anonymous: bool,
) -> tf.data.Dataset:
    """Returns the dataset of one device; it stands for `_PerDeviceGenerator`."""

    def make() -> Any:
        _multi_device._PerDeviceGenerator = _Generator  # whose constructor looks for that name
        try:
            return _Generator(
                shard_num,
                resource,
                incarnation_id,
                source_device,
                element_spec,
                iterator_is_anonymous=iterator_is_anonymous,
            )
        finally:
            _multi_device._PerDeviceGenerator = _shared

    if not tf.executing_eagerly():
        return make()
    tensors: dict[str | None, tf.Tensor] = {
        "resource": resource,
        "incarnation": incarnation_id,
        "source": source_device,
    }
    specs = tuple(tf.nest.flatten(element_spec))
    host, device = tf.config.list_logical_devices("CPU")[0].name, _context.context().device_name
    key = host, device, source_device.numpy(), shard_num, iterator_is_anonymous, specs
    if key not in _traced:
        made = make()
        names = {id(tensor): name for name, tensor in tensors.items()}
        found: _Traced = {}
        for part in _PARTS:
            captured = getattr(made, f"_{part}_captured_args")
            found[part] = getattr(made, f"_{part}_func"), [names.get(id(t)) for t in captured]
        # The only other tensor is the resource's handle, which the first function captures.
        if [found[part][1].count(None) for part in _PARTS] != [1, 0, 0]:
            return made
        _traced[key] = found
    handle = tf.raw_ops.MultiDeviceIteratorToStringHandle(multi_device_iterator=resource)
    return _Shared(_traced[key], element_spec, {**tensors, None: handle})


def _once_more(dataset: tf.data.Dataset, incarnation_id: tf.Tensor) -> tf.data.Dataset:
    """Returns a dataset that is read; it stands for `_ReincarnatedPerDeviceGenerator`."""
    return dataset if isinstance(dataset, _Shared) else _Reincarnated(dataset, incarnation_id)


class _OwningIterator(_multi_device.OwnedMultiDeviceIterator):
    """An iterator over devices that keeps the dataset it reads alive.

    TensorFlow's own class makes that dataset and drops it, but its thread that reads ahead has a
    bare pointer to it. Since 2.21 the thread reads each element's types there, which may be freed
    memory.
    """

    def __init__(self, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        made = None if dataset is None else _Remembering(dataset)
        super().__init__(made, *args, **kwargs)
        self._kept = made  # set last, so that it is deleted after the iterator
        if made is not None and tf.executing_eagerly():
            self._process = os.getpid()
            _open_iterators.add(self)

    def end(self) -> None:
        """Ends the thread that reads ahead, by giving the iterator a dataset without elements."""
        if self._kept is None or self._process != os.getpid():
            return  # a fork has no such thread
        with tf.device(self._source_device):
            tf.raw_ops.MultiDeviceIteratorInit(
                dataset=self._kept.with_its_options.take(0)._variant_tensor,
                multi_device_iterator=self._multi_device_iterator_resource,
                max_buffer_size=1,
            )


_open_iterators: weakref.WeakSet[_OwningIterator] = weakref.WeakSet()


def _end_iterators() -> None:
    """Ends the reading of data while Python can still run its part of it.

    A failed `fit` leaves its error, and with it the iterator, to the end of the interpreter. There
    the thread that reads ahead can call no generator any more, and the iterator waits for it.
    """
    for iterator in list(_open_iterators):
        with contextlib.suppress(tf.errors.OpError):  # nothing can be done about it any more
            iterator.end()


atexit.register(_end_iterators)
# A process that ends at once does not wait for a generator.
program.on_leaving(lambda orderly: _open_iterators.clear())


class _Remembering:
    """A stand-in for a dataset that keeps the copy which an iterator makes by `with_options`."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset

    def with_options(self, options: tf.data.Options) -> tf.data.Dataset:
        self.with_its_options = self._dataset.with_options(options)
        return self.with_its_options


def _resumed(begin: Callable[[], Iterator[Nest]], extended: PeriodicSyncExtended) -> Iterator[Nest]:
    """Begins a pass over a dataset; skips minibatches trained before the run was resumed."""
    for synchronizer in extended.synchronizers:
        synchronizer.step_is_over()
    with _own_iterators():
        iterator = begin()
    if not extended.place.calls:  # an evaluation reads its data whole
        for _ in range(extended.position.take_steps()):
            next(iterator)
    return iterator


class _UndividedDataset(_input_lib.DistributedDataset):
    """A dataset that this worker reads whole, as for `predict`; it is not trained on."""

    def __iter__(self) -> Iterator[Nest]:
        with _own_iterators():
            return super().__iter__()


def _not_read_ahead(data: Any, buffer_size: int) -> Any:
    """Stands for `prefetch` of distributed data, which are read ahead as they are."""
    del buffer_size
    return data


class _Datasets(_input_lib.DistributedDatasetsFromFunction):
    """The datasets that a user's function has made for this worker."""

    extended: PeriodicSyncExtended
    _dataset_fn: Callable[..., tf.data.Dataset]
    # Keras calls `map` and `prefetch` of data that it weighs by `class_weight`.
    prefetch = _not_read_ahead

    @property
    def cardinality(self) -> int:
        """The steps of a pass: the minibatches are for this worker's devices in turn."""
        minibatches = int(super().cardinality)  # negative if it is not known
        devices = len(self.extended.worker_devices)
        return minibatches if minibatches < 0 else -(-minibatches // devices)

    def map(self, function: Callable[..., Nest]) -> _Datasets:
        """Returns these data with a function of each element."""
        made = copy.copy(self)
        made._dataset_fn = lambda context: self._dataset_fn(context).map(function)
        made._built = False
        made.build()
        return made

    def __iter__(self) -> Iterator[Nest]:
        return _resumed(super().__iter__, self.extended)


class _EpochDatasets(_Datasets):
    """The datasets of `datasets_by_epoch`, made anew when a pass over another epoch begins."""

    dataset_fn: Callable[..., tf.data.Dataset]  # the user's
    built_for: tuple[int, int, tuple[int, int]]  # epoch, `first`, and this worker's share

    @property
    def cardinality(self) -> int:
        # Epochs may have different lengths.
        return tf.data.UNKNOWN_CARDINALITY

    def map(self, function: Callable[..., Nest]) -> _EpochDatasets:
        with self.extended.position.at(*self.built_for[:2]):
            made = super().map(function)
        made.dataset_fn = lambda context: self.dataset_fn(context).map(function)
        return made

    def __iter__(self) -> Iterator[Nest]:
        epoch, first = self.extended.begin_pass()
        if not self.extended.place.calls:
            # `dataset_fn` leaves out minibatches by `first`: `_resumed` must not skip them again.
            self.extended.position.take_steps()
        wanted = epoch, first, self.extended.share
        if wanted != self.built_for:
            self._built = False
            with self.extended.position.at(epoch, first):
                self.build()
            self.built_for = wanted
        if (steps := super().cardinality) >= 0:
            self.extended.note_data(steps)
        return super().__iter__()


class _Dataset(_input_lib.DistributedDataset):
    """A dataset that is divided among all workers."""

    extended: PeriodicSyncExtended
    given: tf.data.Dataset  # undivided
    prefetch = _not_read_ahead

    def map(self, function: Callable[..., Nest]) -> Any:
        """Returns these data with a function of each element."""
        return self.extended._experimental_distribute_dataset(self.given.map(function), None)

    def __iter__(self) -> Iterator[Nest]:
        return _resumed(super().__iter__, self.extended)


class _AsNumber:
    """Lets Python make a number of a distributed variable, as it does of a plain one.

    So `float(optimizer.learning_rate)` works in callbacks, as in plain Keras.
    """

    def __float__(self) -> float:
        return float(self.read_value())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.read_value())  # type: ignore[attr-defined]


class _Mirrored(_AsNumber, _values.MirroredVariable):
    """A variable of each replica; outside of replicas a read takes this worker's first one."""


class _Metric(_AsNumber, _values.SyncOnReadVariable):
    """A metric's variable, of which each replica has a component; a read aggregates them."""

    @property
    def _is_of_first(self) -> bool:
        return self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA

    # The parent's two methods give each worker its own first replica's value, without an exchange.
    def _get_cross_replica(self) -> tf.Tensor:
        if self._aggregation == tf.VariableAggregation.NONE:
            raise ValueError(_not_aggregated(self.name))
        if not self._is_of_first:
            return super()._get_cross_replica()
        return self.distribute_strategy.extended.first_replicas(self)

    def value(self) -> tf.Tensor:
        if not self._is_of_first or in_replica() or _values.values_util.in_replica_update_context():
            return super().value()
        return self._get_cross_replica()

    def assign(
        self,
        value: Nest,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        # Called from Python, the parent's method reads the variable after it has written it, which
        # is an exchange of all workers. Keras resets all metrics at the begin of an epoch, and does
        # not use the value.
        if not tf.executing_eagerly() or in_replica():
            return super().assign(value, use_locking, name, read_value)
        super().assign(value, use_locking, name, read_value=False)
        return self


def _not_aggregated(name: str) -> str:
    return (
        f'the metric\'s variable {name!r} has aggregation="none", which does not say what it is of '
        'several replicas. Give add_variable aggregation="sum", "mean" or "only_first_replica".'
    )


def in_replica() -> bool:
    """Returns whether the calling code is part of a replica's step."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


class _Trained(NamedTuple):
    """A model that was trained.

    Workers collect a model at different times. So what all of them do alike must not depend on
    whether it is there still.

    model: returns the model; None once Python has collected it.
    identity: the `_identity` that it had then.
    synchronizer: its synchronizer.
    weights: by id, the components on the first device of all its weights, also of those that are
        not trained.
    """

    model: Callable[[], keras.Model | None]
    identity: Any
    synchronizer: Synchronizer
    weights: Mapping[int, tf.Variable]


class PeriodicSyncExtended(_mwms.CollectiveAllReduceExtended):
    """The extended strategy, with replicas that are independent between syncs.

    It overrides the methods in which the parent makes replicas agree at every step or read.
    """

    # Turns off the parent's thread that probes peers: collectives have errors and timeouts here.
    _enable_check_health = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        settings: Settings,
        devices: Sequence[str],
        found: cluster.Cluster,
        elastic: Regrouping | None = None,
    ) -> None:
        self._wanted_devices = devices
        self.elastic = elastic
        self.replay: Replay | None = None  # in a simulation of an elastic run
        self.as_one_replica = False  # whether a script is asked for the data of all replicas
        self.optimizer_stepped = False
        self.applying = False  # whether a step of an optimizer is being traced, or run
        self.tracked: keras.Model | None = None
        self.shown: str | None = None  # the name given to strategy.weights(), inside its context
        self.minibatch_weight: Callable[..., Scalar] | None = None  # None: from the compiled loss
        self.sync_period: int | None = settings.sync_period
        self.position = Position()
        self.passes: Any = None  # over the data of the `fit` that runs, with `steps_per_epoch`
        self.order = Order()
        self.place = Place()
        self._found = found
        self._whereabouts: whereabouts.Whereabouts | None = None
        self.blocks_closed = 0  # how often Python code closed the blocks, on all workers alike
        self.written: list[Variable] = []  # variables that optimizers wrote while run() was traced
        self.used: list[keras.optimizers.Optimizer] = []  # optimizers that stepped in this run()
        self.states: dict[str, StateHolder] = {"order of data": self.order}
        self._sums: dict[int, tf.Tensor] = {}  # of metrics' variables, while these are read
        self._trained: list[_Trained] = []  # in the order of their first steps, on all alike
        self._recent: _Trained | None = None  # of the trained model that was trained last
        self.dropped = NO_SYNCS  # what syncs of models cost that are not in `_trained` any more
        self._synchronizers_made = 0
        self._told: set[str] = set()  # the notes that the user has read
        self._told_of_syncs = False  # whether one of them is that the syncs are few
        self._told_of_idle = False  # or that a replica has no rows
        self.period_is_scheduled = False  # whether callbacks of `fit` set the sync period
        self._epochs_to_note = 0  # of a `fit` whose epochs have no known length yet
        self._creates_alone = False  # whether this worker creates variables that others do not
        self._undivided = False  # whether each worker gets the whole of distributed data
        # All optimizers that have taken steps in run(), by id.
        self._stepping: weakref.WeakValueDictionary[int, keras.optimizers.Optimizer]
        self._stepping = weakref.WeakValueDictionary()
        self._looking = False  # whether Keras is reducing a first batch, to see its shapes
        self._created = 0
        self._timeout_seconds = settings.timeout_seconds  # which the parent's constructor asks for
        horovod = settings.collectives == "horovod" and found.num_workers > 1
        if elastic is not None:
            # The coordination service would end the survivors some seconds after a death. The
            # parent configures one only where there is none.
            _context.context().configure_coordination_service(service_type="")
        served = elastic is None and not horovod and found.num_workers > 1
        self._earlier = _served.get(found, 0) if served else 0  # strategies on the same server
        # The parent would start the server again for a second strategy, and so drop what a faster
        # worker has already asked it for. The server stays, and each strategy has keys of its own.
        self._std_server_started = self._earlier > 0
        strategy._collective_key_base = self._earlier * _BETWEEN_STRATEGIES
        super().__init__(
            strategy,
            cluster_resolver=(
                elastic.resolver() if elastic else _resolver(cluster.ALONE if horovod else found)
            ),
            communication_options=tf.distribute.experimental.CommunicationOptions(),
        )
        if served:
            _served[found] = self._earlier + 1
        if horovod:
            self.take_place(found.num_workers, found.rank)  # TensorFlow sees one process
        if elastic is not None:
            elastic.attach(self)
        # All workers of an elastic run begin with the rule for as many as began it.
        began = elastic.founders * len(self.worker_devices) if elastic else None
        self.settings = settings.resolved(began or self._num_replicas_in_sync)
        self.rule = self.settings.rule  # of the model that was made last
        if elastic is not None and settings.following_rule is None:
            check_sizes(self.settings.rule, elastic.max_workers, len(self.worker_devices))
        # Weights travel between the lead devices, everything small between the hosts.
        host = "CPU:0" if horovod else f"{self._worker_device}/device:CPU:0"
        with tf.device("CPU:0"):
            period = tf.constant(settings.sync_period, tf.int64)
            self._period = _plain_variable(period, "sync_period")
        # Steps of the epoch that `fit` is in, with which its last block ends.
        self._steps_in_epoch = NEVER
        self._without_length: keras.Model | None = None  # in an epoch of unknown length
        # The steps of a block, on each device: what XLA compiles for one reads no other.
        self._blocks: list[tf.Variable] = []
        for device in self.worker_devices:
            with tf.device(device):
                steps = tf.constant(self._steps_of_a_block(settings.sync_period))
                self._blocks.append(_plain_variable(steps, "steps_of_a_block"))
        self.collectives = self._collectives(0, self.worker_devices[0])  # or NCCL's: see `start`
        self.connected_by = ""  # how the workers are connected, for the user
        self.reports = self._collectives(1, host)
        self.control = Control(
            # The watchdog, or the meeting point's line, ends a wait that Python code is in, and
            # earlier than this timeout, and names the silent worker. In graphs the timeout does.
            self._collectives(
                2, host, settings.timeout_seconds + _LATER_SECONDS, self.place.waiting
            ),
            self.place,
            self._in_turn,
            elastic.together if elastic else None,
        )
        if self._num_workers > 1 and elastic is None:
            self._abort = _horovod.abort if horovod else _abort
            self._watchdog = Watchdog(
                settings.timeout_seconds, self._waiting_since, self._tell_waiting, self._end_sync
            )

    # The configuration with which the parent starts TensorFlow's server.
    def _update_config_proto(self, config_proto: tf.compat.v1.ConfigProto) -> Any:
        updated = super()._update_config_proto(config_proto)
        # By default TensorFlow ends all when a worker sends no heartbeat for 10 s: its process is
        # stopped, its machine sleeps, or its clock is put forward.
        limit = math.ceil(1000 * (self._timeout_seconds + _LATER_SECONDS))
        updated.experimental.coordination_config.heartbeat_timeout_in_ms = limit
        if self.elastic is not None:
            updated.experimental.collective_group_leader = self.elastic.leader()
        return updated

    def connect(self, found: cluster.Cluster) -> None:
        """Connects the workers' whereabouts, for messages on waits; every worker must call it."""
        self._found = found
        self._whereabouts = whereabouts.begin(
            found,
            lambda port: self.control.together(_START, port),
            lambda: whereabouts.Row(self._where(), self._exchanges()),
        )
        failures.ask(
            lambda: whereabouts.mute(self._table(), found),
            lambda: self.place.failed.advice if self.place.failed else "",
        )

    def _where(self) -> str:
        text, line = self.place.text(False), whereabouts.line_of_script()
        return f"{text} [{line}]" if line else text

    def _exchanges(self) -> list[str]:
        """Returns the names of the exchanges in which this process waits."""
        names = [s.name for s in self.synchronizers if s.graph.waiting_since()]
        return [*names, "meeting"] if self.place.began else names

    def serve(self, addresses: Mapping[int, str], leader: str, rank: int) -> None:
        """Makes this process's server one of other workers; nothing that exists is made anew.

        Args:
            addresses: of all workers, this one among them, by task number, in the order of ranks.
            leader: the device name of the worker that coordinates collectives.
            rank: this worker's.
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
        self.take_place(len(addresses), rank)

    def take_place(self, num_workers: int, rank: int) -> None:
        """Sets what TensorFlow has derived from its list of workers.

        Args:
            num_workers: that take part.
            rank: this worker's among them, by which data and seeds are divided; 0 is the chief.
        """
        self._num_workers, self._id_in_cluster = num_workers, rank
        self._is_chief = rank == 0

    def end_collectives(self, why: str) -> None:
        """Ends the collectives under way, and all that follow until `serve`, with an error."""
        _context.context().abort_collective_ops(tf.errors.ABORTED, why)

    def part(self) -> None:
        """Waits for all workers at the end of the program.

        If this exchange succeeds, all others have finished their work. If it fails, the error is
        ignored, since nothing follows.
        """
        if self.elastic is not None:
            self.elastic.part()
            return
        with contextlib.suppress(tf.errors.OpError, MismatchError):
            self.control.together(END)

    def _table(self) -> list[whereabouts.Row] | None:
        """Returns where all workers are in their scripts; None if it is not known."""
        return self._whereabouts.table() if self._whereabouts else None

    def _tell_waiting(self, seconds: float) -> None:
        table = self._table()
        if table is None or not self._waiting_since():
            return
        _log.warning("%s", whereabouts.waiting_line(table, self._id_in_cluster, seconds))
        # Workers with a sync in flight may be in different exchanges without being apart.
        apart = "" if self.settings.overlap else whereabouts.apart(table)
        if apart:
            self._abort(failures.note_apart(apart))

    def _end_sync(self) -> None:
        self._abort(failures.note_silence(whereabouts.silent(self._table(), self._found)))

    def _waiting_since(self) -> float:
        return max(self.place.began, *(s.graph.waiting_since() for s in self.synchronizers), 0.0)

    def _collectives(
        self,
        group: int,
        device: str,
        timeout_seconds: float = 0.0,
        waiting: Callable[[], AbstractContextManager[None]] | None = None,
        communication: str = "RING",
    ) -> Collectives:
        members = self.elastic.members if self.elastic else None
        if self._num_workers == 1 and members is None:
            return Loopback()
        group += self._earlier * _BETWEEN_STRATEGIES
        place = (self._id_in_cluster, device, timeout_seconds)
        if self.settings.collectives == "horovod":
            return HorovodCollectives(self._num_workers, *place, group)
        tasks = self._found.tasks
        return TensorFlowCollectives(tasks, *place, communication, group, members, waiting)

    def start(self) -> None:
        """Compares the workers' settings, and gives all workers the chief's random states."""
        agree(
            {
                **self.settings.fingerprint(),
                "devices per worker": len(self.worker_devices),
                "kind of devices": self._local_device_type,
                "full-duplex transport": self.collectives.full_duplex,
            },
            self.control,
            _START,
        )
        if self._num_workers > 1:
            lead = self.worker_devices[0]
            card = card_of(lead) if self._local_device_type == "GPU" else None
            mine = [self._id_in_cluster, card, random_states()]
            ranks, cards, states = zip(*everyones(mine, self.control, _START), strict=True)
            if self.elastic is None and ranks != tuple(range(self._num_workers)):
                raise RuntimeError(
                    f"tables of the workers have the order {ranks}, and not that of ranks, so "
                    "weights would go to other workers than they are meant for. This TensorFlow, "
                    f"{tf.__version__}, orders workers in a way that tfpara does not know; install "
                    "the version that tfpara's requirements name."
                )
            if self.settings.collectives == "tensorflow":
                self._connect_by(cards)
            # Every worker shuffles data for itself. With different seeds the orders would differ,
            # and the workers' parts would overlap. `shuffle(1000, seed=1)` depends on the program's
            # seed, too, so a run that is resumed, or a worker that joins one, has to find the same
            # one. A seed that the user sets later replaces it.
            if _context.global_seed() is None:
                tf.random.set_seed(_SEED)
            # Python's and NumPy's states too, for what scripts draw or a PyDataset shuffles.
            set_random_states(states[0])

    def _connect_by(self, cards: Sequence[str | None]) -> None:
        """Chooses how the weights travel, from the cards of the workers' lead devices."""
        chosen, why = choose_communication(
            self.settings.communication,
            self._local_device_type,
            cards,
            members_change=self.elastic is not None,
        )
        if chosen == "NCCL":
            lead = self.worker_devices[0]
            self.collectives = self._collectives(0, lead, communication=chosen)
        if self._local_device_type == "GPU":
            way = "NCCL" if chosen == "NCCL" else "a ring over gRPC"
            self.connected_by = f"the workers' GPUs are connected by {way}: {why}"

    @contextlib.contextmanager
    def in_fit(self, model: keras.Model, initial_epoch: int) -> Iterator[None]:
        """Notes that a model's `fit` runs inside, which begins with that epoch."""
        former, passes, seed = self._recent, self.passes, self.order.seed
        self.passes = None
        if not self._members_change:
            self.order.seed = None  # each call draws one, or takes that of a checkpoint
        self._recent = self._entry_of(model) or former
        aside: AbstractContextManager[None] = contextlib.nullcontext()
        if self.place.fits:
            aside = self.position.aside(lambda: self.steps_seen)
        try:
            with aside:
                self.position.enter(initial_epoch, self.steps_seen)
                with self.place.in_fit():
                    yield
        finally:
            self.passes, self._without_length = passes, None
            self._note_steps(NEVER)  # also where callbacks have not heard of the end
        if self.place.fits:  # this fit was called in a callback of another fit
            self._recent, self.order.seed = former, seed

    # -- synchronizers -----------------------------------------------------------------------

    def synchronizer_for(self, fn: Callable[..., Nest]) -> Synchronizer | None:
        """Returns the synchronizer of the model whose step `fn` is.

        None if there is none, or if the model was compiled anew or changed since.
        """
        model = self.model_of(fn)
        trained = self._entry(model)
        if model is None or trained is None or trained.identity != _identity(model):
            return None
        return trained.synchronizer

    def synchronizer_of(self, model: keras.Model) -> Synchronizer:
        """Returns the synchronizer of a built and compiled model; makes one if there is none."""
        model = self._owner(model)
        trained = self._entry(model)
        if trained is None or trained.identity != _identity(model):
            return self.make_synchronizer(model)
        return trained.synchronizer

    def track(
        self, models: Sequence[keras.Model], given: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        """Notes that `run` trains these models, with these optimizers beside the compiled ones."""
        if len(models) == 1 and not given and isinstance(models[0], keras.Model):
            self.tracked = models[0]
            return
        former = next((g for g in self._groups() if g.is_of(models, given)), None)
        with self._container_strategy().scope():
            self.tracked = former or Group(models, given)

    def _groups(self) -> list[Group]:
        known = [self.tracked, *(trained.model() for trained in self._trained)]
        return [model for model in known if isinstance(model, Group)]

    def _owner(self, model: keras.Model) -> keras.Model:
        """Returns the group of models that are synchronised with a model, else the model."""
        if self._entry(model) is not None:
            return model
        groups = (g for g in self._groups() if any(member is model for member in g.members))
        return next(groups, model)

    def _entry(self, model: keras.Model | None) -> _Trained | None:
        found = (trained for trained in self._trained if trained.model() is model)
        return None if model is None else next(found, None)

    def _entry_of(self, model: keras.Model) -> _Trained | None:
        """Returns the entry of a model, or of the trained one that has all of its weights."""
        own = self._entry(self._owner(model))
        if own is not None:
            return own
        weights = self._components(model.weights)
        if not weights:
            return None
        wholes = [each for each in self._trained if weights.keys() <= each.weights.keys()]
        # One may have frozen what another trains.
        return max(
            wholes,
            key=lambda each: sum(each.synchronizer.has_any_of([c]) for c in weights.values()),
            default=None,
        )

    def _components(self, variables: Sequence[keras.Variable]) -> dict[int, tf.Variable]:
        """Returns variables' components on the first device, by id."""
        local_results = self._container_strategy().experimental_local_results
        return {id(first): first for first in (local_results(v.value)[0] for v in variables)}

    def model_of(self, fn: Callable[..., Nest]) -> keras.Model | None:
        # Keras hands its bound train_step or test_step to run().
        owner = getattr(fn, "__self__", None)
        return owner if isinstance(owner, keras.Model) else self.tracked

    def weight_of(self, fn: Callable[..., Nest], args: Nest, kwargs: Nest) -> Scalar:
        """Returns the weight of a replica's minibatch in the mean of the replicas."""
        samples = batch_size((args, kwargs))
        if self.minibatch_weight is not None:
            weight = self.minibatch_weight(*args, **kwargs)
            if samples is None:
                return weight
            # A replica without samples takes no step, whatever the user's function returns.
            weight = tf.cast(weight, tf.float64)
            return tf.where(samples > 0, weight, tf.zeros_like(weight))
        model = getattr(fn, "__self__", None)
        if samples is None or not isinstance(model, keras.Model):
            return 1 if samples is None else samples
        return weight_of(args[0], samples, model.loss)

    # A loop's tf.function would have AutoGraph convert this where it is traced, and with it the
    # syncs from Python that end other models' blocks.
    @tf.autograph.experimental.do_not_convert
    def make_synchronizer(self, model: keras.Model | None) -> Synchronizer:
        """Makes the sync state of a model from its present weights."""
        if model is None:
            raise ValueError(
                "run() was given a function that updates weights, but not whose. Call "
                "strategy.track(model) once before a custom training loop."
            )
        _refuse(model)
        former = self._entry(model)
        self._drop_collected(former)
        if former is not None:
            if self.elastic is not None:
                self.elastic.together(former.synchronizer.finish_block)
            else:
                with self.place.meeting(COMPILED_ANEW):
                    former.synchronizer.finish_block()
        build_optimizer(model)
        settings = self.settings.for_optimizers(optimizers(model))
        local_results = self._container_strategy().experimental_local_results
        variables = replica_variables(model, local_results, settings)
        # Layers' names are left out: their numbers count every model that a process has made.
        shapes = [
            f"{n.split('/')[-1]} {tuple(v[0].shape)} {v[0].dtype.name}"
            for n, v in zip(variables.weight_names, variables.weights, strict=True)
        ]
        agree({"model": "; ".join(shapes), **hyperparameters(model)}, self.control, _TRAIN)
        for optimizer in optimizers(model):
            steps = self._steps_of_a_block(settings.sync_period) / minibatches_of_a_step(optimizer)
            warn_of_outlasting_momentum(settings, optimizer, steps)
        for optimizer in filter(settings.fits_momentum, optimizers(model)):
            self._note_fit(optimizer)
        if self._num_replicas_in_sync > 1 and "sum" in reductions(getattr(model, "loss", None)):
            self.note(
                'the loss has reduction="sum". A replica sums over its own minibatch, and the mean '
                "of the replicas counts: 1/N of the sum over all of them, in the step as in the "
                "log. Multiply the learning rate by N, or let the loss be a mean: docs/moving.md"
            )
        if any(v[0].dtype == tf.float64 for v in (*variables.weights, *variables.state)):
            self.note(
                "the model has weights of float64, and every sync rounds them to float32, in which "
                "the global model is kept: docs/training.md"
            )
        if settings is not self.settings and settings.rule.has_momentum():
            self.note(
                "for this local optimizer, which divides by the size of gradients, the rule is "
                f"{in_words(settings.rule)}"
            )
        site = Site(
            # Who joins an elastic run has made fewer of them for its one model.
            name="model" if self.elastic else f"model{self._synchronizers_made}",
            num_replicas=self._num_replicas_in_sync,
            first_replica=self._id_in_cluster * len(self.worker_devices),
            members=self.elastic.members if self.elastic else None,
            present=self.replay.present if self.replay else None,
            devices=self.worker_devices,
            collectives=self.collectives,
            reports=self.reports,
            place=self.place,
            make=_plain_variable,
            period=self._period,
        )
        self._synchronizers_made += 1
        if former is not None:
            former.synchronizer.leave(
                variables.weights, lambda value: self.control.broadcast(value, "left weights")
            )
        synchronizer = Synchronizer(variables, settings, site)
        if site.members is not None:
            replicas = site.members.size * len(self.worker_devices)
            synchronizer.graph.global_state.rule.change(replicas)
        if former is not None:
            synchronizer.adopt(former.synchronizer)
        others = [each.synchronizer for each in self._trained if each is not former]
        if any(other.has_any_of([v[0] for v in variables.weights]) for other in others):
            raise ValueError(
                f"model {model.name!r} shares weights with another that was trained under this "
                "strategy; each would keep a global model of them. Call strategy.forget(other) on "
                "every worker if the other one will not be trained any more; else train one model "
                "that has both."
            )
        self.rule = settings.rule
        self._recent = _Trained(
            _reference(model), _identity(model), synchronizer, self._components(model.weights)
        )
        at = len(self._trained) if former is None else self._place_of(former)
        self._trained[at : at + 1] = [self._recent]
        if self.elastic is not None:
            self.elastic.check_step()
        return synchronizer

    def _place_of(self, entry: _Trained) -> int:
        return next(k for k, each in enumerate(self._trained) if each is entry)

    def _drop_collected(self, former: _Trained | None) -> None:
        """Drops the synchronizers of models that no worker has any more; every worker must call it.

        Args:
            former: the entry of the model that is about to be trained, if it has one.
        """
        # An elastic run has one model.
        if self.elastic is not None or all(each is former for each in self._trained):
            return
        gc.collect()  # Models refer to themselves, so that they stay until then.
        gone = [k for k, each in enumerate(self._trained) if each.model() is None]
        everyone = everyones(gone, self.control, _TRAIN) if self._num_workers > 1 else [gone]
        of_all = set(gone).intersection(*everyone)
        for entry in [self._trained[k] for k in sorted(of_all)]:
            self._drop(entry, _TRAIN)

    def _drop(self, entry: _Trained, purpose: Purpose) -> None:
        """Closes a model's block and gives up its synchronizer; every worker must call it."""
        synchronizer = entry.synchronizer
        with self.place.meeting(purpose):
            synchronizer.finish_block()
        synchronizer.leave([], lambda value: self.control.broadcast(value, "left weights"))
        self.dropped = self.dropped.and_then(synchronizer.graph.statistics())
        del self._trained[self._place_of(entry)]
        if self._recent is entry:
            self._recent = None

    def forget(self, model: keras.Model) -> None:
        if self.elastic is not None:
            raise ValueError(
                "strategy.forget() does not go with elastic=, whose run trains one model."
            )
        if self.place.fits or self.shown is not None:
            where = "in a callback of fit" if self.place.fits else "inside strategy.weights(...)"
            raise ValueError(f"strategy.forget() {where}: a model is in use. Call it afterwards.")
        # All blocks are closed, since others may still train another model.
        self.finish_blocks(_FORGET)
        entry = self._entry_of(model)
        if entry is None:
            return
        self._drop(entry, _FORGET)
        whole = entry.model()
        if whole is not None:
            whole.train_function = None  # in which the syncs are
        if self.tracked is whole:
            self.tracked = None

    def note_epoch(self, model: keras.Model, steps: int | None) -> None:
        """Notes that an epoch of `fit` begins, or that the last one is over.

        Blocks end with the epoch, so momentum is fitted to that where it is shorter than a block.

        Args:
            model: that is trained.
            steps: minibatches of each replica in the epoch; None: not known, or no epoch.
        """
        # Where workers come and go it changes within the epoch.
        self._note_steps(NEVER if steps is None or self._members_change else steps)
        period = self.sync_period
        if period and self._steps_in_epoch < period and not self.period_is_scheduled:
            self.note(
                f"sync_period={period} is longer than an epoch, at whose end the replicas meet in "
                f"any case, so after {self._steps_in_epoch}"
            )
        self._without_length = None if steps or self._members_change else model
        for optimizer in filter(self.settings.fits_momentum, optimizers(model)):
            self._note_fit(optimizer)
            self._note_short_block(optimizer)

    @property
    def _members_change(self) -> bool:
        """Whether this is an elastic run, or the replay of one."""
        return self.elastic is not None or self.replay is not None

    def note_syncs(self, steps: int | None, epochs: int) -> None:
        """Says so, once, where a call of `fit` has fewer syncs than its replicas need.

        It does not where a callback sets the sync period, nor of a single epoch, which may be one
        of several calls. See docs/study.md.

        Args:
            steps: minibatches of each replica in an epoch; None: `note_data` will know.
            epochs: of the run, those before a resume included; 0 if this call has a single one.
        """
        self._epochs_to_note = 0
        period, replicas = self.sync_period, self._num_replicas_in_sync
        if self.settings.device_sync_period:
            replicas = self._num_workers  # a worker's devices meet more often
        if not epochs or period is None or self.period_is_scheduled or self._members_change:
            return
        if steps is None:
            self._epochs_to_note = epochs
            return
        block = period * self.settings.fragments
        text = few_syncs(epochs * -(-steps // block), replicas) if block > 1 else ""
        if text and not self._told_of_syncs:
            self._told_of_syncs = True
            self.note(text)

    def note_batches(self, rows: int | None) -> None:
        """Says so where the batches of `fit` have fewer rows than there are replicas.

        Args:
            rows: of the largest batch; None: not known.
        """
        replicas = self._num_replicas_in_sync
        if rows is not None and rows < replicas and not self._members_change:
            self._told_of_idle = True
            self.note(
                f"fit divides batches of {counted(rows, 'row')} among {replicas} "
                f"replicas, which leaves {replicas - rows} of them without a row in the whole run. "
                f"Give batch_size={replicas} at least, better a multiple of it: docs/data.md"
            )

    def note_idle(self, model: keras.Model) -> None:
        """Says so where a replica has had no row, at the end of the first epoch of `fit`."""
        trained = self.trained(model)
        if trained is None or self._members_change or self._told_of_idle or self.position.first:
            return
        idle = np.flatnonzero(trained.graph.weights_seen == 0).tolist()
        replicas = self._num_replicas_in_sync
        if idle and len(idle) < replicas:
            self._told_of_idle = True
            self.note(
                f"replicas without a row in this epoch: {', '.join(map(str, idle))} (of 0 … "
                f"{replicas - 1}). They do not train. Give batches of a multiple of {replicas} "
                "rows, or, where each worker has its own minibatches, at least one for each of its "
                "devices: docs/data.md"
            )

    def note_data(self, steps: int) -> None:
        """Notes with how many steps a pass over `datasets_by_epoch` begins.

        It is the length of the epoch that begins, if Keras does not know that.
        """
        model = self._without_length
        if model is not None and self.place.fits and not self.place.calls:
            done = self.position.first // self._num_replicas_in_sync  # before a resume
            self.note_epoch(model, done + steps)
            if self._epochs_to_note:
                self.note_syncs(done + steps, self._epochs_to_note)

    def _note_steps(self, in_epoch: int) -> None:
        self._steps_in_epoch = in_epoch
        self._write_blocks()

    def _write_blocks(self) -> None:
        """Tells the replicas of the steps of a block, after these have changed."""
        for steps in self._blocks:
            steps.assign(self._steps_of_a_block(self.sync_period))

    def _note_short_block(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Says so where every second block is too short for the local momentum."""
        if not momentum_of(optimizer):
            return  # Adam's steps stay bounded
        block = (self.sync_period or NEVER) * self.settings.fragments
        steps = self._steps_in_epoch
        rest = steps % block
        accumulated = minibatches_of_a_step(optimizer)
        memory = accumulated / (1.0 - momentum_of(optimizer))
        if block < steps < 2 * block and 0 < rest < memory < block:
            self.note(
                f"an epoch has {steps} steps, and its last block {rest} of {block}: shorter than "
                f"what the local momentum {momentum_of(optimizer):g} remembers, so that training "
                f"may diverge. Choose a sync_period that divides {steps}, or one below "
                f"{steps // 2}: docs/rules.md"
            )

    def _note_fit(self, optimizer: keras.optimizers.Optimizer) -> None:
        if self.sync_period is None:
            return  # as in a warm start
        steps = self._steps_of_a_block(self.sync_period) / minibatches_of_a_step(optimizer)
        fitted, factor = in_a_block(memory_of(optimizer), steps)
        text = told_of_fit(optimizer, steps, float(fitted), float(factor))
        if text:
            self.note(f'{text}; local_state="keep" would leave both alone.')

    def fit_momentum(
        self, optimizer: keras.optimizers.Optimizer
    ) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Returns the momentum with which an optimizer takes a step, and the factor of its rate.

        The momentum is Adam's β₁, which goes without that factor. None: its own. See
        `tfpara.algorithms.local_momentum`.
        """
        if not self.settings.fits_momentum(optimizer):
            return None
        block = self._blocks[_values.values_util.get_current_replica_id_as_int()]
        steps = block.read_value() / minibatches_of_a_step(optimizer)
        return in_a_block(memory_of(optimizer), steps)

    def _steps_of_a_block(self, period: int | None) -> float:
        """Returns a replica's minibatches in a block, which ends with the epoch at the latest."""
        if period is None:
            return float(NEVER)
        return float(min(period * self.settings.fragments, self._steps_in_epoch))

    def note(self, text: str) -> None:
        """Tells the user, once, of what they may not expect."""
        joins = self.elastic is not None and self.elastic.joining
        if self._is_chief and not joins and text not in self._told:
            self._told.add(text)
            print(f"tfpara: {text}", file=sys.stderr, flush=True)

    def of_those_that_stepped(self, outputs: Nest, samples: Sequence[Scalar]) -> Nest:
        """Replaces the outputs of replicas that had no samples by the mean of the others'.

        Such replicas took no step and returned zeros, and Keras averages over all replicas.

        Args:
            outputs: what a step of Keras returned through `run`.
            samples: for each local replica its samples, as from `batch_size`.
        """
        if len(samples) == 1 or not any(tf.is_tensor(number) or number == 0 for number in samples):
            return outputs
        stepped = tf.stack([tf.convert_to_tensor(1 if n is None else n) for n in samples]) > 0

        def filled(leaf: tf.Tensor) -> tf.Tensor:
            parts = self._container_strategy().experimental_local_results(leaf)
            if len(parts) == 1 or not all(tf.is_tensor(p) and p.dtype.is_floating for p in parts):
                return leaf
            weights = tf.cast(stepped, parts[0].dtype)
            total = tf.tensordot(weights, tf.stack(parts), 1)
            mean = tf.math.divide_no_nan(total, tf.reduce_sum(weights))
            # Keras recognizes the values of replicas by this type.
            return _values.PerReplica(
                [tf.where(stepped[k], part, mean) for k, part in enumerate(parts)]
            )

        return tf.nest.map_structure(filled, outputs)

    def step_counts(self) -> list[tuple[keras.optimizers.Optimizer, int]]:
        """Returns all optimizers that have taken steps in `run`, and their steps.

        These are summed over the local replicas.
        """
        local_results = self._container_strategy().experimental_local_results

        def count(optimizer: keras.optimizers.Optimizer) -> int:
            # `_iterations`, since the public `iterations` stands still while gradients accumulate.
            return sum(int(part) for part in local_results(optimizer._iterations.value))

        return [(optimizer, count(optimizer)) for optimizer in list(self._stepping.values())]

    def have_stepped(self, counts: Sequence[tuple[keras.optimizers.Optimizer, int]]) -> bool:
        """Returns whether an optimizer has taken a step since `step_counts` returned `counts`."""
        before = {id(optimizer): steps for optimizer, steps in counts}
        return any(before.get(id(each)) != steps for each, steps in self.step_counts())

    def check_optimizers(self, model: keras.Model | None) -> None:
        """Raises ValueError if a sync writes slots, and `run` steps with an unknown optimizer."""
        used, self.used = self.used, []
        settings = self.settings
        if model is None:
            return
        if settings.slots_at_sync == "keep" and not hasattr(settings.rule, "check_optimizer"):
            return
        setting = (
            "" if settings.local_state == "keep" else f", local_state={settings.local_state!r}"
        )
        # The class name alone: an outer rule's repr reads its optimizer, which no graph can do.
        check_optimizers_known(model, used, f"{type(settings.rule).__name__}{setting}")

    def check_written(self, synchronizer: Synchronizer) -> None:
        """Raises ValueError if `run` is to train weights that no sync would average."""
        written, self.written = self.written, []
        first = self._container_strategy().experimental_local_results
        for variable in written:
            if getattr(variable, "trainable", False) and not synchronizer.has_any_of(
                [first(variable)[0]]
            ):
                raise ValueError(
                    f"run() trains {variable.name!r}, which is not a weight of the model that is "
                    "synchronised: the replicas would drift apart. Call strategy.track([...]) with "
                    "all models that are trained."
                )

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """The synchronizers of all trained models, in the order in which they were made."""
        return [trained.synchronizer for trained in list(self._trained)]

    @property
    def has_trained(self) -> bool:
        """Whether a model was trained."""
        return self._synchronizers_made > 0

    def _in_turn(self) -> list[Synchronizer]:
        """Returns all synchronizers, first that of `_recent`, which others may still train."""
        trained = sorted(self._trained, key=lambda each: each is not self._recent)
        return [each.synchronizer for each in trained]

    def trained(self, model: keras.Model) -> Synchronizer | None:
        """Returns the synchronizer of a model, or of the whole it is part of; None if untrained."""
        trained = self._entry_of(model)
        return trained.synchronizer if trained else None

    def is_stranger(self, model: keras.Model) -> bool:
        """Returns whether a model is another strategy's, or shares weights with a trained model."""
        if model.distribute_strategy is not self._container_strategy():
            return True
        first = self._container_strategy().experimental_local_results
        own = [first(v.value)[0] for v in model.trainable_variables]
        return any(s.has_any_of(own) for s in self.synchronizers)

    def set_sync_period(self, sync_period: int | None) -> None:
        """Sets τ for all models, also within a block; None: no syncs.

        All workers must set it at the same sync.
        """
        self.sync_period = sync_period
        self.period_is_scheduled |= self.place.fits > 0
        self._period.assign(NEVER if sync_period is None else sync_period)
        self._write_blocks()

    def finish_blocks(self, purpose: Purpose = _SYNCHRONIZE) -> None:
        """Closes the open blocks of all models; every worker must call it for this purpose."""
        self.blocks_closed += 1
        synchronizers = self._in_turn()
        if self.elastic is not None:
            self.elastic.close()
            return
        if synchronizers:
            with self.place.meeting(purpose):
                for synchronizer in synchronizers:
                    synchronizer.finish_block()

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        """Has the chief write a file; returns when it is there.

        Args:
            write: writes the file.
            name: of the function that is called, on all workers.
        """
        if self.elastic is not None:
            self.elastic.by_the_chief(write, name)
            return
        if self._container_strategy().is_chief:
            write()
        self.control.together(call(name))

    @contextlib.contextmanager
    def writing(self, model: keras.Model) -> Iterator[None]:
        """Has a model, or what has weights of trained ones, hold the global model for a file."""
        weights = self._components(getattr(model, "weights", []))
        with contextlib.ExitStack() as stack:
            for trained in self._trained:
                if weights.keys() & trained.weights.keys():
                    stack.enter_context(trained.synchronizer.writing(self.note))
            yield

    def broadcast_replica(self, model: keras.Model, replica: int) -> None:
        if not 0 <= replica < self._num_replicas_in_sync:
            raise ValueError(
                f"replica={replica} is not one of 0 … {self._num_replicas_in_sync - 1}."
            )
        synchronizer = self.synchronizer_of(model)
        # The block is closed first, since the rule changes the weights then.
        self.finish_blocks(call("strategy.broadcast_replica()"))
        worker, device = divmod(replica, len(self.worker_devices))
        weights, state = synchronizer.replica_values(device)

        def from_worker(k: int, tensor: tf.Tensor) -> tf.Tensor:
            mine = tensor if worker == self._id_in_cluster else tf.zeros_like(tensor)
            flat = tf.reshape(mine, [-1])
            total = self.control.collectives.all_reduce([flat], f"replica/{k}")[0]
            return tf.reshape(total, tensor.shape)

        values = [from_worker(k, t) for k, t in enumerate([*weights, *state])]
        synchronizer.restart(values[: len(weights)], values[len(weights) :])

    # -- local steps -------------------------------------------------------------------------

    def _use_merge_call(self) -> bool:
        # False: no step waits for other replicas.
        return False

    def _in_multi_worker_mode(self) -> bool:
        # False: otherwise Keras and the input library would run a collective at every step.
        return False

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, options: Any = None
    ) -> Any:
        # Optimizers would sum gradients over the replicas here. A local step uses its own alone.
        del reduce_op, options
        if not self.applying and self._num_replicas_in_sync > 1:
            self.note(
                "all_reduce in a replica gives its own value, since replicas are independent "
                "between syncs. So BatchNormalization(synchronized=True) does as without it: "
                "docs/loops.md"
            )
        return value

    def _replica_ctx_update(
        self, var: Variable, fn: Callable[..., Nest], args: Nest, kwargs: Nest, group: bool
    ) -> Nest:
        # Optimizers write weights and slots through this method, while run() is traced.
        self.optimizer_stepped = True
        self.written.append(var)
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def note_step(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Notes that an optimizer takes a step in a replica."""
        self.used.append(optimizer)
        self._stepping[id(optimizer)] = optimizer

    def _update(
        self, var: Variable, fn: Callable[..., Nest], args: Nest, kwargs: Nest, group: bool
    ) -> Nest:
        # Python code sets a weight (load_weights, set_weights, assign) through this method.
        result = super()._update(var, fn, args, kwargs, group)
        if tf.executing_eagerly():
            for synchronizer in self.synchronizers:
                synchronizer.was_set(var.values[0])
        return result

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, destinations: Any, options: Any
    ) -> Any:
        del destinations, options
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if isinstance(value, _values.SyncOnReadVariable):
            return self._reduce_over_all(value, mean)
        local_results = self._container_strategy().experimental_local_results
        if self._looking:
            return tf.nest.map_structure(lambda leaf: local_results(leaf)[0], value)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else self._reduced(local_results(leaf), mean), value
        )

    def _reduced(self, local: Sequence[Nest], mean: bool) -> tf.Tensor:
        """Returns the sum or mean over all replicas, from the values of this worker's."""
        if self._num_workers > 1 and not tf.executing_eagerly():
            raise ValueError(
                "strategy.reduce inside a tf.function would have the workers wait for each other "
                "in every step. Return the values that strategy.run gives, and call "
                "strategy.reduce outside of the function, on every worker; or update a "
                "keras.metrics.Mean in the step, and read its result() where an epoch ends."
            )
        parts = [tf.convert_to_tensor(part) for part in local]
        if not all(part.shape.is_compatible_with(parts[0].shape) for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"strategy.reduce: the replicas' values have the shapes {shapes}. Give the axis of "
                "the samples too, as in strategy.reduce(op, value, axis=0)."
            )
        # A value that is not one of replicas is the same on each, and counts once for each.
        total = tf.add_n(parts) * (len(self.worker_devices) // len(parts))
        if self._num_workers > 1:
            total = tf.reduce_sum(joined(total[tf.newaxis], 0, self.control, _REDUCE), 0)
        return total / self._num_replicas_in_sync if mean else total

    def _gather_to_implementation(
        self, value: Nest, destinations: object, axis: int, options: object
    ) -> tf.Tensor:
        # The parent's method has no timeout, does not know Horovod's workers, and has the values in
        # the order of the devices' names, 10 before 2.
        del destinations, options
        if self._num_workers > 1 and not tf.executing_eagerly():
            raise ValueError(
                "strategy.gather inside a tf.function would have the workers wait for each other "
                "in every step. Call it outside of the function, on every worker."
            )
        parts = self._container_strategy().experimental_local_results(value)
        mine = tf.concat([tf.convert_to_tensor(part) for part in parts], axis)
        return joined(mine, axis, self.control, _GATHER) if self._num_workers > 1 else mine

    @contextlib.contextmanager
    def reading_metrics(self, model: keras.Model) -> Iterator[None]:
        """Metrics are read inside. In an elastic run all of them are those of the same workers."""
        if self.elastic is None:
            yield
            return
        values = [variable.value for variable in model.metrics_variables]
        variables = [value for value in values if isinstance(value, _Metric)]
        try:
            for variable, total in zip(variables, self._sums_of(variables), strict=True):
                self._sums[id(variable)] = total
            yield
        finally:
            self._sums.clear()

    def first_replicas(self, variable: Variable) -> tf.Tensor:
        """Returns replica 0's component of a metric's variable; every worker must call it."""
        return self._reduce_over_all(variable, False)

    def _part_of(self, variable: Variable) -> tf.Tensor:
        """Returns this worker's term of the sum of which a metric's variable is read."""
        if not variable._is_of_first:
            return tf.add_n([v.read_value() for v in variable.values])
        first = variable.values[0].read_value()
        # In a graph nothing is exchanged.
        counts = self._id_in_cluster == 0 or not tf.executing_eagerly()
        return first if counts else tf.zeros_like(first)

    def _sums_of(self, variables: Sequence[Variable]) -> list[tf.Tensor]:
        """Returns what the replicas have of metrics' variables, summed in one exchange."""
        assert self.elastic is not None
        parts = [self._part_of(variable) for variable in variables]
        if not parts:
            return []
        flat = tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)
        evaluates = bool(self.place.calls)

        def shared() -> list[float]:
            hosts = self.control.collectives
            if evaluates:  # each worker has evaluated all data
                return hosts.all_gather(flat, "metrics")[0].numpy().tolist()
            return hosts.all_reduce([flat], "metrics")[0].numpy().tolist()

        total = tf.constant(self.elastic.together(shared), tf.float64)
        pieces = tf.split(total, [int(tf.size(part)) for part in parts])
        return [
            tf.cast(tf.reshape(piece, part.shape), part.dtype)
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def _reduce_over_all(self, variable: Variable, mean: bool) -> tf.Tensor:
        purpose = self.place.of_metric()
        if self.elastic is not None and tf.executing_eagerly():
            found = self._sums.get(id(variable))
            found = self._sums_of([variable])[0] if found is None else found
            # What is evaluated, each worker has evaluated whole.
            replicas = self._num_replicas_in_sync
            replicas = len(self.worker_devices) if self.place.calls else replicas
            return found / replicas if mean else found
        if tf.executing_eagerly():
            if self.synchronizers:
                self.finish_blocks(purpose)
            else:
                self.control.together(purpose)
        local = self._part_of(variable)
        if self._num_workers > 1 and tf.executing_eagerly():
            name = f"metric/{local.dtype.name}"
            flat = tf.reshape(local, [-1])
            local = tf.reshape(self.control.collectives.all_reduce([flat], name)[0], local.shape)
        return local / self._num_replicas_in_sync if mean else local

    # -- data --------------------------------------------------------------------------------

    @property
    def steps_seen(self) -> int:
        """The training steps of this process, over all models."""
        return self.dropped.steps + sum(s.graph.statistics().steps for s in self.synchronizers)

    def datasets_by_epoch(self, dataset_fn: Callable[[int, int], tf.data.Dataset]) -> Any:
        if not self.place.fits:
            self.position.move(0, self.steps_seen)
        if self.replay is not None:
            dataset_fn = self.replay.dealt(dataset_fn)
        with self.position.at(0, 0):
            dataset = self._distribute_datasets_from_function(dataset_fn, None)
        dataset.__class__ = _EpochDatasets
        dataset.dataset_fn = dataset_fn
        dataset.built_for = (0, 0, self.share)
        return dataset

    def begin_pass(self) -> tuple[int, int]:
        """Notes that a pass over data begins; returns its epoch and how much of it is done.

        The latter is `Position.first`. An evaluation is no epoch, and reads its data whole.
        """
        if self.place.calls:
            return self.position.epoch, 0
        return self.position.begin(self.steps_seen)

    def check_data(self, facts: dict[str, Json], drawn: bool) -> None:
        """Compares the data that the workers gave to `fit` or `evaluate`; all must call it.

        Args:
            facts: facts about this worker's data; see `division.difference`.
            drawn: whether the library draws the order of the data. The seed is the chief's, of
                Python's generator, which `keras.utils.set_random_seed` seeds.

        Raises:
            ValueError: on every worker, if they have different data.
        """
        if self._members_change or self._undivided:
            return
        if drawn and self.order.seed is None:
            self.order.seed = random.getrandbits(48)
        if self.share == (0, 1):
            return
        mine = {"facts": facts, "seed": self.order.seed}
        everyone = everyones(mine, self.control, self.place.of_data())
        self.order.seed = everyone[0]["seed"]
        problem = difference([one["facts"] for one in everyone])
        if problem:
            raise ValueError(problem)

    def next_order(self, count: int) -> list[int]:
        """Returns 0 … count − 1 in the order of the epoch that begins, equal on all workers."""
        return shuffled(count, *self._seed_and_epoch())

    def next_order_of_rows(self, rows: int, batch_size: int | None) -> NDArray[np.int64]:
        """Returns what `shuffled_rows` does for the epoch that begins, equal on all workers."""
        return shuffled_rows(rows, *self._seed_and_epoch(), batch_size)

    def _seed_and_epoch(self) -> tuple[int, int]:
        epoch, _ = self.begin_pass()
        assert self.order.seed is not None
        return self.order.seed, epoch

    def host_variable(self, value: Nest, name: str) -> tf.Variable:
        """Makes a variable of this worker's host alone, also in the strategy's scope."""
        with tf.device("CPU:0"), tf.init_scope():
            return _plain_variable(value, name)

    @property
    def share(self) -> tuple[int, int]:
        """The number of this worker's part of the data, from 0, and the number of parts."""
        return (0, 1) if self._undivided else (self._id_in_cluster, self._num_workers)

    def distribute_steps(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        """Distributes a dataset of this worker's steps over its own devices alone."""
        with self._alone():
            return self._experimental_distribute_dataset(dataset, None)

    @contextlib.contextmanager
    def creating_alone(self) -> Iterator[None]:
        """Lets this worker create variables inside that other workers do not create."""
        former, self._creates_alone = self._creates_alone, True
        try:
            yield
        finally:
            self._creates_alone = former

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Gives datasets that are distributed inside whole to this worker's replicas."""
        self._undivided = True
        try:
            yield
        finally:
            self._undivided = False

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Lets Keras look at a first batch inside: reductions take the first replica's values."""
        former, self._looking = self._looking, True
        try:
            yield
        finally:
            self._looking = former

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Divides data inside as if there were no other workers."""
        place = self._num_workers, self._id_in_cluster
        self._num_workers, self._id_in_cluster = 1, 0
        try:
            yield
        finally:
            self._num_workers, self._id_in_cluster = place

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.distribute.DistributedDataset:
        check_batched(dataset.element_spec, self._num_replicas_in_sync > 1)
        dataset = without_tuner(_safe(dataset))
        if self._undivided or self.elastic is not None:
            # Those who come and go would change what is whose: each evaluates all data.
            with self._alone():
                whole = super()._experimental_distribute_dataset(dataset, options)
            if isinstance(whole, _input_lib.DistributedDataset):
                whole.__class__ = _UndividedDataset
            return whole
        check_files(dataset, self._num_workers)
        distributed = super()._experimental_distribute_dataset(dataset, options)
        if isinstance(distributed, _input_lib.DistributedDataset):
            distributed.__class__ = _Dataset
            distributed.extended, distributed.given = self, dataset
            if not divided_between_workers(dataset) and distributed._cardinality > 0:
                # Each worker gives its devices 1/W of a batch per step, so its own data take W
                # times as many steps, for W workers.
                distributed._cardinality *= self._num_workers
        return distributed

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[..., tf.data.Dataset], options: Any
    ) -> Any:
        def prepared(context: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = dataset_fn(context)
            if len(self.worker_devices) > 1:
                dataset = with_open_batches(dataset)
            return without_tuner(dataset)

        dataset = super()._distribute_datasets_from_function(prepared, options)
        dataset.__class__, dataset.extended = _Datasets, self
        return dataset

    # -- variables ---------------------------------------------------------------------------

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # A replica writes its own component without asking the others.
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        variable = super()._create_variable(next_creator, **kwargs)
        for kind in (_Metric, _Mirrored):
            if type(variable) is kind.__bases__[-1]:
                variable.__class__ = kind
        return variable

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Variable, **kwargs: Any
    ) -> Any:
        # The parent's method broadcasts without a timeout and does not compare shapes.
        initial = kwargs["initial_value"]
        seed = is_seed(kwargs.get("name") or "")
        number = self._id_in_cluster * len(self.worker_devices) + replica_id

        def value() -> tf.Tensor:
            if primary_var is None:
                first = initial() if callable(initial) else initial
                if isinstance(first, _CheckpointInitialValue):
                    first = first.wrapped_value
                first = tf.convert_to_tensor(first, kwargs.get("dtype"))
                shared = kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ
                if shared and tf.executing_eagerly() and not self._creates_alone:
                    first = self._chiefs_value(first, kwargs.get("name") or "Variable")
            else:
                first = tf.identity(primary_var.read_value())
            if seed and (primary_var is None or replica_id > 0):
                # Every replica gets a seed of its own, since dropout must be independent noise.
                step = number if primary_var is None else replica_id
                offset = tf.cast(step * 1_000_003, first.dtype)
                first = first + tf.one_hot(
                    0, first.shape[0], offset, tf.zeros_like(offset), dtype=first.dtype
                )
            return first

        return value

    def _chiefs_value(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the chief's initial value, once all have agreed that the variable is the same."""
        self._created += 1
        if self._num_workers == 1:
            return value
        # Numbers in Keras' names are removed: they count everything that a process has made.
        name = re.sub(r"_\d+(?=[/_]|$)", "", name)
        description = f"{name} {tuple(value.shape)} {value.dtype.name}"
        number = f"variable {self._created}"
        digest = hashlib.blake2b(description.encode(), digest_size=6).digest()
        mine = int.from_bytes(digest, "little")
        if any(theirs != mine for theirs in self.control.together(VARIABLE, mine)):
            agree({f"model, {number}": description}, self.control, VARIABLE)
        if not (value.dtype.is_floating or value.dtype.is_integer):
            return value
        return self.control.broadcast(value, "variable/value")

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        # The parent's method takes one CPU device at most.
        listed = [device.name for device in tf.config.list_logical_devices()]
        devices = checked_devices(self._wanted_devices, listed, worker_device)
        return tuple(devices), self._wanted_devices[0].upper().split(":")[0]


def _safe(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with batches that own their memory, so that they may be divided.

    Batches made by `batch` are copies already. There a further copy would hide the batch size from
    TensorFlow, so the dataset stays as it is.
    """
    copies = with_own_memory(dataset)
    return copies if batch_size_of(copies) == batch_size_of(dataset) else dataset


def _resolver(found: cluster.Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Returns a resolver for the cluster, which is validated; TF_CONFIG is not read again."""
    if found.num_workers == 1:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    jobs = json.loads(found.tf_config())["cluster"]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=found.task_type,
        task_id=found.task_index,
        rpc_layer="grpc",
    )


def _abort(message: str) -> None:
    # This is how the parent's own health check ends collectives.
    _context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def _refuse(model: keras.Model) -> None:
    """Raises ValueError for options of a model that do not work with syncs."""
    if any(getattr(optimizer, "use_ema", False) for optimizer in optimizers(model)):
        raise ValueError(
            "the optimizer has use_ema=True, with which Keras overwrites each replica's weights by "
            'its own average. Use averages={"ema": tfpara.EMA(...)} of the strategy instead.'
        )
    for variable in model.metrics_variables:
        if isinstance(variable.value, _Metric) and variable.aggregation == "none":
            raise ValueError(_not_aggregated(variable.path))


def _reference(model: keras.Model) -> Callable[[], keras.Model | None]:
    """Returns a function that gives the model as long as the program has it.

    A group stays, since nobody else has it.
    """
    return (lambda: model) if isinstance(model, Group) else weakref.ref(model)


def _identity(model: keras.Model) -> Any:
    """Returns what a synchronizer depends on; compiling anew or freezing layers changes it."""
    # The number of slots is part of it, since an optimizer may get them in its first step.
    slots = [(optimizer, len(optimizer.variables)) for optimizer in optimizers(model)]
    return slots, [id(v) for v in model.trainable_variables]


def _plain_variable(value: Nest, name: str) -> tf.Variable:
    return ResourceVariable(value, name=f"tfpara/{name}", trainable=False)
