"""Data that the strategy distributes over its replicas, and the passes over them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfpara.steps import with_open_batches, with_own_memory, without_tuner
from tfpara.sync.data.balance import Balance
from tfpara.sync.data.dealt import Dealt, rows_of_all, slice_of
from tfpara.sync.data.position import Position
from tfpara.sync.data.reading import Order, shuffled, shuffled_rows
from tfpara.sync.data.same_data import (
    batch_size,
    check_batched,
    check_files,
    difference,
    divided_between_workers,
    files_are_divided,
)
from tfpara.sync.momentum_fit import MomentumFit
from tfpara.sync.tensorflow.device_datasets import iterator_over
from tfpara.sync.tensorflow.run_steps import PREDICTS
from tfpara.sync.tensorflow.trained_models import TrainedModels
from tfpara.sync.workers.data_place import DataPlace, making
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.worker import Worker
from tfpara.tensorflow_private import input_lib as _input_lib
from tfpara.typing import Json, Nest

# `_Distribute` is the type of TensorFlow's function that distributes a dataset. `_DatasetFn` is the
# type of a user's function that makes datasets. `_FromFunction` is the type of TensorFlow's
# function that distributes the datasets of such a user's function.
_Distribute = Callable[[tf.data.Dataset], tf.distribute.DistributedDataset]
_DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]
_FromFunction = Callable[[_DatasetFn], Any]


@dataclasses.dataclass(eq=False)
class DistributedData:
    """The data of a run: the position in them, their order, and their division among the workers.

    `passes` are those by which the present `fit` reads its data; None before its first epoch.
    """

    worker: Worker
    models: TrainedModels
    momentum: MomentumFit
    balance: Balance | None
    position: Position = dataclasses.field(default_factory=Position, init=False)
    order: Order = dataclasses.field(default_factory=Order, init=False)
    passes: Any = dataclasses.field(default=None, init=False)

    @property
    def share(self) -> tuple[int, int]:
        """The number of this worker's part of the data, from 0, and the number of parts."""
        return (0, 1) if PREDICTS.get() else (self.worker.rank, self.worker.num_workers)

    @property
    def is_by_replica(self) -> bool:
        """Whether the data are divided by replica, as workers have unlike numbers of devices."""
        return self.worker.among_unlike and not PREDICTS.get()

    @property
    def shares(self) -> list[tuple[int, int]]:
        """This worker's shares of each step's data: `share`, or one such pair for each replica."""
        if not self.is_by_replica:
            return [self.share]
        return [(replica, self.worker.replicas) for replica in self.worker.replica_ids]

    def place_of(self, epoch: int, first: int, dealt: Dealt | None = None) -> DataPlace:
        """Returns which part of an epoch's data this worker reads, from minibatch `first` on."""
        worker = self.worker
        # A worker that has not joined its elastic run yet may have a rank above those of the
        # members. The remainder is always the rank of a member.
        rank = worker.rank % worker.num_workers
        unlike = worker.company.unlike_devices if worker.among_unlike else ()
        return DataPlace(rank, worker.num_workers, len(worker.devices), epoch, first, dealt, unlike)

    # -- passes ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_fit(self, initial_epoch: int) -> Iterator[None]:
        """A context in which a call of `fit` runs that begins with epoch `initial_epoch`."""
        passes, seed = self.passes, self.order.seed
        self.passes = None
        if not self.worker.changes:
            self.order.seed = None  # each call of fit draws a seed, or takes that of a checkpoint
        within = self.worker.call_site.fits > 0  # a callback of another `fit` calls this `fit`
        aside = self.position.aside(lambda: self.models.steps_seen)
        try:
            with aside if within else contextlib.nullcontext():
                self.enter_epoch(initial_epoch)
                yield
        finally:
            self.passes = passes
            if within:
                self.order.seed = seed
            if self.balance is not None:
                self.balance.end()

    def enter_epoch(self, epoch: int) -> None:
        """Notes that `fit` is at the beginning of an epoch."""
        self.position.enter(epoch, self.models.steps_seen)

    def begin_pass(self) -> tuple[int, int]:
        """Notes that a pass over data begins; returns its epoch and `Position.first`."""
        # An evaluation begins no epoch, and reads its data whole.
        if self.worker.call_site.calls:
            return self.position.epoch, 0
        return self.position.begin(self.models.steps_seen)

    def resumed(self, dataset: Any, begin: Callable[[], Iterator[Nest]]) -> Iterator[Nest]:
        """Begins a pass over a distributed dataset; skips minibatches trained before a resume."""
        for synchronizer in self.models.synchronizers:
            synchronizer.step_is_over()
        iterator = iterator_over(dataset, begin)
        if not self.worker.call_site.calls:  # only training skips; an evaluation reads all data
            for _ in range(self.position.take_steps()):
                next(iterator)
        return iterator

    def minibatches_before(self) -> int:
        """Returns how many of this worker's minibatches more or fewer replicas have trained before.

        It is 0 if the number of replicas is the same; then `resumed` skips whole steps.
        """
        position, replicas = self.position, self.worker.replicas
        same = position.first == position.steps * replicas
        if same or not position.steps or self.worker.call_site.calls:
            return 0
        position.take_steps()
        return position.first * len(self.worker.devices) // replicas

    def note_length(self, steps: int) -> None:
        """Notes the steps of a pass over `datasets_by_epoch`, whose length Keras does not know."""
        if self.worker.call_site.fits and not self.worker.call_site.calls:
            self.momentum.set_length(self.position.resumed + steps)

    def next_order(self, count: int) -> list[int]:
        """Returns `shuffled` for the epoch that begins."""
        return shuffled(count, *self._seed_and_epoch())

    def next_order_of_rows(self, rows: int, batch_size: int | None) -> NDArray[np.int64]:
        """Returns `shuffled_rows` for the epoch that begins."""
        return shuffled_rows(rows, *self._seed_and_epoch(), batch_size)

    def _seed_and_epoch(self) -> tuple[int, int]:
        epoch, _ = self.begin_pass()
        assert self.order.seed is not None
        return self.order.seed, epoch

    def check(self, facts: dict[str, Json], drawn: bool) -> None:
        """Compares the data of all workers in `fit` or `evaluate`; every worker must call it.

        For `facts` see `same_data.difference`. `drawn`: the library draws the order of the data.
        The seed of that order comes from the chief's Python generator, which
        `keras.utils.set_random_seed` seeds.
        """
        if self.worker.changes or PREDICTS.get():
            return
        if drawn and self.order.seed is None:
            self.order.seed = random.getrandbits(48)
        if self.share == (0, 1):
            return
        mine = {"facts": facts, "seed": self.order.seed}
        everyone = everyones(mine, self.worker.control, self.worker.call_site.of_data())
        self.order.seed = everyone[0]["seed"]
        problem = difference([one["facts"] for one in everyone])
        if problem:
            raise ValueError(problem)

    # -- datasets --------------------------------------------------------------------------------

    def divided(self, dataset: tf.data.Dataset, distribute: _Distribute) -> Any:
        """Returns a dataset of batches, each divided among the replicas of all workers."""
        check_batched(dataset.element_spec, self.worker.replicas > 1)
        dataset = without_tuner(_safe(dataset))
        if PREDICTS.get() or self.worker.changes:
            # In `predict` each worker reads all data. In an elastic run each worker also evaluates
            # all data, because a worker that joins or leaves would change the others' parts.
            with self.worker.alone():
                whole = distribute(dataset)
            whole.__class__ = _UndividedDataset
            return whole
        check_files(dataset, self.worker.num_workers)
        distributed = distribute(dataset)
        distributed.__class__ = _Dataset
        distributed.data, distributed.given, distributed.distribute = self, dataset, distribute
        if not divided_between_workers(dataset) and distributed._cardinality > 0:
            # Auto-sharding is off, so each worker has data of its own. With W workers TensorFlow
            # still cuts each batch into W parts, and a step takes one part. So a worker has W times
            # as many steps as batches.
            distributed._cardinality *= self.worker.num_workers
        return distributed

    def parts_of(self, dataset: tf.data.Dataset, distribute: _Distribute) -> tf.data.Dataset:
        """Returns the minibatches of this worker's replicas, in turn, from a dataset of batches.

        Each replica gets what `divided` would give it in a run in which each replica is a worker.
        """
        own, parts = self.worker.replica_ids, self.worker.replicas
        check_batched(dataset.element_spec)
        dataset = _safe(dataset)
        if not divided_between_workers(dataset):
            return _cut(dataset, range(parts), parts)
        if not files_are_divided(dataset):
            return _cut(dataset, own, parts)
        check_files(dataset, parts, "replicas, since workers have unlike numbers of devices")
        of_replicas = []
        for replica in own:
            with self.worker.as_one_of([1] * parts, replica):
                of_replicas += distribute(dataset)._cloned_datasets
        turns = tf.data.Dataset.range(len(own)).repeat()
        return tf.data.Dataset.choose_from_datasets(of_replicas, turns, stop_on_empty_dataset=False)

    def from_function(self, dataset_fn: _DatasetFn, make: _FromFunction) -> Any:
        """Returns the data of a user's function, which makes this worker's minibatches."""

        def prepared(context: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = dataset_fn(context)
            if len(self.worker.devices) > 1:
                dataset = with_open_batches(dataset)
            return without_tuner(dataset)

        dataset = make(prepared)
        dataset.__class__, dataset.data = _Datasets, self
        return dataset

    def by_epoch(self, dataset_fn: _DatasetFn, make: _FromFunction) -> Any:
        """Returns data that `dataset_fn` makes anew for each epoch."""
        if not self.worker.call_site.fits:
            self.position.move(0, self.models.steps_seen)
        with making(self.place_of(0, 0)):
            dataset = self.from_function(dataset_fn, make)
        dataset.__class__ = _EpochDatasets
        dataset.dataset_fn = dataset_fn
        dataset.built_for = (0, 0, self.share)
        steps = dataset.known_steps()
        if self.balance is not None and steps is not None:
            self.balance.steps_of_epoch = steps
        return dataset

    def deal(self, epoch: int, first: int) -> Dealt | None:
        """Deals out a pass's minibatches by the workers' speeds; returns None if ranks decide."""
        place = self.worker.call_site
        if self.balance is None or place.calls:
            return None
        if self.worker.changes:
            # In an elastic run, the steps of an epoch read datasets that `DataPlan` makes, and not
            # the datasets given to `fit`. So once the first epoch has begun, a pass over a dataset
            # given to `fit` gets no minibatches: `Dealt(None)` is an empty deal.
            return None if place.is_before_epochs else Dealt(None)
        return self.balance.begin_epoch(epoch, first, warm=self.models.steps_seen > 0)


class _UndividedDataset(_input_lib.DistributedDataset):
    """A dataset that this worker reads whole, as for `predict`, and does not train on."""

    def __iter__(self) -> Iterator[Nest]:
        return iterator_over(self, super().__iter__)


def _not_read_ahead(data: Any, buffer_size: int) -> Any:
    """Replaces `prefetch` of distributed data, which are read ahead anyway."""
    del buffer_size
    return data


class _Datasets(_input_lib.DistributedDatasetsFromFunction):
    """The datasets that a user's function has made for this worker."""

    data: DistributedData
    of_minibatches = True  # whether the user's function makes minibatches, not the library parts
    _dataset_fn: _DatasetFn
    # To apply `class_weight`, Keras calls `map` and then `prefetch` of the data. TensorFlow's
    # distributed datasets have neither method, so this class adds both.
    prefetch = _not_read_ahead

    @property
    def cardinality(self) -> int:
        """The steps of a pass, each with a minibatch for each of this worker's devices."""
        minibatches = int(super().cardinality)  # negative if the number is not known
        devices = len(self.data.worker.devices)
        return minibatches if minibatches < 0 else -(-minibatches // devices)

    def map(self, function: Callable[..., Nest]) -> _Datasets:
        return self._changed(lambda dataset: dataset.map(function))

    def _changed(self, change: Callable[[tf.data.Dataset], tf.data.Dataset]) -> _Datasets:
        made = copy.copy(self)
        made._dataset_fn = lambda context: change(self._dataset_fn(context))
        made._built = False
        made.build()
        return made

    def __iter__(self) -> Iterator[Nest]:
        count = self.data.minibatches_before() if self.of_minibatches else 0
        rest = self._changed(lambda dataset: dataset.skip(count)) if count else self
        return self.data.resumed(rest, super(_Datasets, rest).__iter__)


class _EpochDatasets(_Datasets):
    """The datasets of `datasets_by_epoch`, made anew when a pass over another epoch begins."""

    is_by_epoch = True
    dataset_fn: _DatasetFn  # the user's function
    # The present datasets belong to this epoch, begin with this minibatch of it, and have this
    # share of the minibatches.
    built_for: tuple[int, int, tuple[int, int]]
    _was_read = False  # whether a pass over the present datasets has begun

    @property
    def cardinality(self) -> int:
        # Epochs may have different lengths, so Keras is told no length.
        return tf.data.UNKNOWN_CARDINALITY

    def known_steps(self) -> int | None:
        """Returns the steps of a pass over the present datasets; None: they are not known."""
        steps = super().cardinality
        return steps if steps >= 0 else None

    def map(self, function: Callable[..., Nest]) -> _EpochDatasets:
        with making(self.data.place_of(*self.built_for[:2])):
            made = super().map(function)
        made.dataset_fn = lambda context: self.dataset_fn(context).map(function)
        return made

    def __iter__(self) -> Iterator[Nest]:
        epoch, first = self.data.begin_pass()
        if not self.data.worker.call_site.calls:
            # `dataset_fn` itself leaves out the minibatches that are trained already. `take_steps`
            # clears the number of minibatches to skip, so that they are not skipped again. The run
            # may have had another number of replicas before, so `resumed` is computed anew, in
            # steps of the present replicas.
            self.data.position.take_steps()
            self.data.position.resumed = first // self.data.worker.replicas
        dealt = self.data.deal(epoch, first)
        if dealt is not None:
            first = dealt.first
        wanted = epoch, first, self.data.share
        # A dataset with a seeded `shuffle` has another order when it is read again. So each pass
        # reads new datasets, also the first one, if Keras has looked at the first batch before it.
        if dealt is not None or wanted != self.built_for or self._was_read:
            self._built = False
            with making(self.data.place_of(epoch, first, dealt)):
                self.build()
            self.built_for = wanted
        self._was_read = True
        if (steps := self.known_steps()) is not None:
            self.data.note_length(steps)
        return super().__iter__()


class _Dataset(_input_lib.DistributedDataset):
    """A dataset that is divided among all workers."""

    data: DistributedData
    given: tf.data.Dataset  # the dataset before it was divided
    distribute: _Distribute
    prefetch = _not_read_ahead

    def map(self, function: Callable[..., Nest]) -> Any:
        return self.data.divided(self.given.map(function), self.distribute)

    def __iter__(self) -> Iterator[Nest]:
        return self.data.resumed(self, super().__iter__)


def _cut(dataset: tf.data.Dataset, own: Sequence[int], parts: int) -> tf.data.Dataset:
    """Cuts each batch into parts, as TensorFlow does for several workers; returns those in `own`.

    Of a batch of B rows each part has B / `parts` rows, rounded up, until no rows are left. `own`
    are successive numbers of parts; the first part is 0.
    """

    @tf.autograph.experimental.do_not_convert
    def of_batch(*given: Nest) -> tf.data.Dataset:
        # tf.data passes the elements of a tuple as separate arguments, but a NamedTuple as one
        # argument.
        batch = given if type(dataset.element_spec) is tuple else given[0]
        rows = rows_of_all(batch)
        size = (rows + parts - 1) // parts

        def part(number: tf.Tensor) -> Nest:
            begin = tf.minimum(number * size, rows)
            return tf.nest.map_structure(lambda leaf: slice_of(leaf, begin, begin + size), batch)

        return tf.data.Dataset.range(own[0], own[-1] + 1).map(part)

    made, count = dataset.flat_map(of_batch), int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return made
    known = count if count == tf.data.INFINITE_CARDINALITY else count * len(own)
    return made.apply(tf.data.experimental.assert_cardinality(known))


def _safe(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with batches that own their memory, so that they may be divided."""
    copies = with_own_memory(dataset)
    # Batches made by `batch` are copies already, and another copy would hide the batch size.
    return copies if batch_size(copies) == batch_size(dataset) else dataset
