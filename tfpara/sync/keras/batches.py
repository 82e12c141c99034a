"""Data adapters for Python data and for shuffled arrays, which give each worker its own part."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara.contexts import attributes
from tfpara.steps import with_own_memory
from tfpara.sync.data import reading, same_data
from tfpara.sync.data.dealt import slice_of
from tfpara.sync.keras.replacing import data_adapter_utils, data_adapters
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.tensorflow.variables import plain_variable
from tfpara.typing import Data, Json, Nest


class ShuffledArrays(data_adapters.ArrayDataAdapter):
    """Keras' adapter of arrays that `fit` shuffles, in an order that the run's seed determines."""

    _extended: PeriodicSyncExtended
    _order: tf.Variable  # the indices of the rows, in the order in which the present pass has them
    _spec: Nest  # the `element_spec` of the dataset of batches

    @classmethod
    def of(cls, adapter: Any, extended: PeriodicSyncExtended) -> ShuffledArrays:
        """Turns an adapter of Keras into one of this class, in place, and returns it."""
        adapter.__class__, adapter._extended = cls, extended
        numbers = np.arange(adapter._num_samples, dtype=np.int64)
        with tf.device("CPU:0"), tf.init_scope():
            adapter._order = plain_variable(numbers, "order of rows")
        return adapter

    @property
    def order(self) -> list[int]:
        """The rows' numbers, in the order of the present pass."""
        return self._order.numpy().tolist()

    def begin_pass(self) -> None:
        """Draws the order of the next pass over the data."""
        within = self._batch_size if self._shuffle == "batch" else None
        self._order.assign(self._extended.data.next_order_of_rows(self._num_samples, within))

    def get_tf_dataset(self) -> tf.data.Dataset:
        # Keras calls tf.random.shuffle to shuffle all rows or, with shuffle="batch", the rows of
        # each batch. While Keras builds the dataset, a lookup in `_order` replaces this function.
        # So the run's seed determines the order.
        calls = []

        def ordered(numbers: tf.Tensor) -> tf.Tensor:
            calls.append(numbers)
            return tf.gather(self._order, numbers)

        with attributes(tf.random, shuffle=ordered):
            dataset = super().get_tf_dataset()
        if not calls:
            raise RuntimeError(
                f"Keras {keras.__version__} shuffles arrays in a way that tfpara does not know, so "
                "that a resumed run would train other rows. Take an earlier version of Keras."
            )
        self._spec = dataset.element_spec
        return dataset

    def first_minibatch(self) -> Nest:
        """Returns the shapes and dtypes of a minibatch of one replica."""
        replicas = self._extended.worker.replicas
        rows = -(-min(self._batch_size, self._num_samples) // replicas)

        def minibatch(spec: tf.TypeSpec) -> tf.TensorSpec | None:
            if not hasattr(spec, "shape"):  # the spec of an input that is None
                return None
            return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)

        return keras.tree.map_structure(minibatch, self._spec)


class Steps(data_adapters.data_adapter.DataAdapter):
    """An adapter that yields this worker's part of Python data, for its own devices."""

    def __init__(self, batches: list[Data], extended: PeriodicSyncExtended) -> None:
        if not batches:
            raise ValueError("the data have no batch: their length is 0.")
        self._first = [without_none(batch) for batch in batches]
        self._extended = extended
        # In an elastic run only evaluations use this class, and each worker evaluates all the data.
        self._shares = [(0, 1)] if extended.worker.changes else extended.data.shares
        self._by_replica, self._parts = extended.data.is_by_replica, self._shares[0][1]
        self._signature = signature_of(self._first)

    def begin_pass(self) -> None:
        """Begins the next pass over the data."""

    def _cuts(self) -> Iterator[tuple[Data, int]]:
        """Yields pairs of a batch and the number of the part of it that this worker trains.

        A step takes one pair; or one for each device, if workers have unlike numbers of devices.
        """
        raise NotImplementedError

    def _steps(self) -> Iterator[Nest]:
        for batch, part in self._cuts():
            yield part_of(without_none(batch), part, self._parts)

    def get_tf_dataset(self) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(self._steps, output_signature=self._signature)
        if self._by_replica:
            dataset = with_own_memory(dataset)
            return self._extended.distribute_parts(dataset.prefetch(len(self._shares)))
        return self._extended.distribute_steps(dataset.prefetch(1))

    def first_minibatch(self) -> Nest:
        """Returns a minibatch of one replica, for its shapes."""
        devices = 1 if self._by_replica else len(self._extended.worker_devices)
        replicas = self._parts * devices
        return part_of(self._first[0], 0, replicas, at_least=1)

    def facts(self) -> dict[str, Json]:
        """Returns facts by which these data are compared with other workers'."""
        return {"elements": repr(self._signature), "values": shown_values(self._first)}

    @property
    def num_batches(self) -> int | None:
        return None

    @property
    def batch_size(self) -> None:
        return None


class PyDatasetSteps(Steps):
    """A `keras.utils.PyDataset`, whose batches are divided among the workers."""

    def __init__(
        self, dataset: keras.utils.PyDataset, adapter: Any, extended: PeriodicSyncExtended
    ) -> None:
        self._dataset, self._adapter = dataset, adapter
        adapter.enqueuer = None  # the enqueuer's queue would mix the batches of two passes
        self._processes = bool(dataset.use_multiprocessing) and dataset.workers > 0
        several = self._processes and extended.worker.num_workers > 1
        if several and multiprocessing.get_start_method() == "fork":
            raise ValueError(
                "PyDataset(use_multiprocessing=True) would fork a worker, beside threads that hold "
                "locks, and never end. Write use_multiprocessing=False, for threads; or, below "
                'if __name__ == "__main__":, multiprocessing.set_start_method("spawn").'
            )
        count = adapter.num_batches
        numbers = range(2 if count is None else min(2, count))
        super().__init__([adapter._standardize_batch(dataset[n]) for n in numbers], extended)
        self.order: Sequence[int] = ()  # indices of the batches, in the order of the present pass
        self._hooks_called = 0

    def facts(self) -> dict[str, Json]:
        return {"kind": "PyDataset", "batches": self.num_batches, **super().facts()}

    def begin_pass(self) -> None:
        count = self.num_batches
        if count is not None:
            shuffle = self._adapter.shuffle
            self.order = self._extended.data.next_order(count) if shuffle else range(count)

    def _cuts(self) -> Iterator[tuple[Data, int]]:
        if self.num_batches is None:
            plans: Any = [reading.endless_reads(*share) for share in self._shares]
        else:
            plans = [reading.reads(self.order, *share) for share in self._shares]
        together, numbers = itertools.tee(zip(*plans, strict=True))
        # Among the last batches of a pass, several shares of this worker may need parts of the same
        # batch. `dict.fromkeys` drops repeated numbers, so that each batch is read once.
        wanted = (k for reads in numbers for k in dict.fromkeys(read.batch for read in reads))
        steady = self._extended.worker.company.steady
        batches = reading.ahead(self._dataset, wanted, self._processes, steady)
        with contextlib.closing(batches):
            for reads in together:
                read_now = dict.fromkeys(read.batch for read in reads)
                found = {k: self._adapter._standardize_batch(next(batches)) for k in read_now}
                for parts in zip(*(read.parts for read in reads), strict=True):
                    yield from zip((found[read.batch] for read in reads), parts, strict=True)

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def on_epoch_begin(self) -> None:
        with self._agreed():
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        with self._agreed():
            self._adapter.on_epoch_end()

    def _agreed(self) -> Any:
        """Returns a context for the dataset's hooks, in which all workers draw the same numbers."""
        self._hooks_called += 1
        seed = self._extended.data.order.seed
        if self._parts == 1 or seed is None:
            return contextlib.nullcontext()
        return reading.common_randomness(f"{seed}/{self._hooks_called}")


class GeneratorSteps(Steps):
    """A Python generator. Every worker reads all its batches once, and uses a part of each."""

    def __init__(self, adapter: Any, extended: PeriodicSyncExtended) -> None:
        super().__init__(adapter._first_batches, extended)
        self._rest = adapter.generator()

    def facts(self) -> dict[str, Json]:
        return {"kind": "generator", **super().facts()}

    def _cuts(self) -> Iterator[tuple[Data, int]]:
        for batch in self._rest:
            for part, _ in self._shares:
                yield batch, part


def signature_of(batches: list[Data]) -> Nest:
    """Returns the spec of batches, in which any number of rows is allowed."""

    def spec_of(spec: tf.TypeSpec) -> tf.TypeSpec:
        # An input may be None. Keras gives such an input the spec of an optional, and an optional
        # cannot be divided into parts. So the spec is replaced by the spec of None.
        return tf.type_spec_from_value(None) if isinstance(spec, tf.OptionalSpec) else spec

    return keras.tree.map_structure(spec_of, data_adapter_utils.get_tensor_spec(batches))


def shown_values(batches: list[Data]) -> list[Json]:
    """Returns values by which workers compare batches; inputs may differ, for example by noise."""
    labels = [each[1] if isinstance(each, tuple) and len(each) > 1 else each for each in batches]
    return same_data.values_of(labels)


def without_none(batch: Nest) -> Nest:
    """Returns a batch without the Nones at its end, since None cannot be divided."""
    if isinstance(batch, list):
        batch = tuple(batch)
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch


def part_of(batch: Nest, part: int, of: int, at_least: int = 0) -> Nest:
    """Returns the rows of a part of a batch that is cut into `of` parts.

    If the part has fewer than `at_least` rows, the first `at_least` rows of the batch are returned.
    """

    def rows_of(leaf: Nest) -> Nest:
        if data_adapter_utils.is_scipy_sparse(leaf):
            leaf = data_adapter_utils.scipy_sparse_to_tf_sparse(leaf)
        if leaf is None or of == 1:
            return leaf
        ragged = isinstance(leaf, tf.RaggedTensor)
        rows = reading.bounds(int(leaf.nrows()) if ragged else leaf.shape[0], part, of)
        if rows.stop - rows.start < at_least:
            rows = slice(0, at_least)
        return slice_of(leaf, rows.start, rows.stop)

    return keras.tree.map_structure(rows_of, batch, none_is_leaf=False)
