"""Predictions that are divided among the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpara.cluster.call_site import call
from tfpara.sync.data import reading, same_data
from tfpara.sync.data.dealt import slice_of
from tfpara.sync.workers.json_exchange import everyones, joined
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Array, Data, Json, Nest

_PREDICT = call("strategy.predict()")
# Workers send their rows in pieces of at most this many bytes. So a worker that does not keep the
# rows needs memory for only one piece from each worker.
_PIECE_BYTES = 64 << 20
_REMEDY = "Give the same data on every worker: strategy.predict divides them."


class _Whole(NamedTuple):
    """All the data of a prediction: `length` rows of arrays, or batches of other data.

    `part` returns those from one number to before another. By `facts` workers compare the data.
    """

    length: int
    part: Callable[[int, int], Data]
    facts: dict[str, Json]


def predict(
    strategy: Any,
    model: keras.Model,
    x: Data,
    batch_size: int | None,
    only_chief: bool,
    verbose: str | int,
) -> Nest | None:
    """Returns the predictions of all rows; see `PeriodicSyncStrategy.predict`.

    A worker with replicas i … j of N predicts n·i // N … n·(j + 1) // N − 1 of n rows or batches.
    """
    worker = strategy.extended.worker
    given: dict[str, Any] = {"batch_size": batch_size, "verbose": verbose}
    if worker.num_workers == 1 and not worker.changes:
        return model.predict(x, **given)
    whole = _whole(x)
    found: Nest | None = None

    def exchange() -> None:
        nonlocal found
        facts = everyones(whole.facts, worker.control, _PREDICT)
        problem = same_data.difference(facts, _REMEDY)
        if problem:
            raise ValueError(problem)
        ids, replicas = worker.replica_ids, worker.replicas
        start = reading.bounds(whole.length, ids[0], replicas).start
        stop = reading.bounds(whole.length, ids[-1], replicas).stop
        # Even a worker without rows predicts one row (or one batch of a dataset), because it must
        # know the structure of the outputs. It then drops this prediction.
        first = min(start, whole.length - 1)
        outputs = model.predict(whole.part(first, max(stop, first + 1)), **given)
        keeps = not only_chief or worker.rank == 0
        kept = None if stop > start else 0
        rows = [_gathered(leaf[:kept], worker, keeps) for leaf in keras.tree.flatten(outputs)]
        if worker.changes:
            # After this barrier all workers have the rows. So the exchange need not be repeated if
            # a worker is lost now.
            worker.control.collectives.barrier("predictions")
        found = keras.tree.pack_sequence_as(outputs, rows) if keeps else None

    worker.control.whole(exchange)
    return found


def _gathered(mine: Array, worker: Worker, keeps: bool) -> Array | None:
    """Returns the rows of all workers, by rank, or None unless `keeps`."""
    if not isinstance(mine, np.ndarray):
        raise ValueError(
            f"strategy.predict: an output is a {type(mine).__name__}, whose rows cannot be "
            "gathered. Let the model return dense tensors, such as ragged.to_tensor()."
        )
    counts = everyones(len(mine), worker.control, _PREDICT)
    size = max(1, _PIECE_BYTES // max(1, mine.itemsize * int(np.prod(mine.shape[1:]))))
    pieces: list[list[Array]] = [[] for _ in counts]
    for first in range(0, max(counts), size):
        piece = tf.convert_to_tensor(mine[first : first + size])
        rows = joined(piece, 0, worker.control, _PREDICT).numpy()
        ends = np.cumsum([min(max(count - first, 0), size) for count in counts])
        if keeps:
            for of_worker, part in zip(pieces, np.split(rows, ends[:-1]), strict=True):
                of_worker.append(part)
    return np.concatenate([part for of_worker in pieces for part in of_worker]) if keeps else None


def _whole(x: Data) -> _Whole:
    """Returns data as a `_Whole`; raises ValueError without a known end or order, or any rows."""
    if isinstance(x, tf.data.Dataset):
        whole = _of_dataset(x)
    elif isinstance(x, keras.utils.PyDataset):
        if x.num_batches is None:
            raise ValueError("strategy.predict: the PyDataset has no end. Write its __len__.")
        whole = _Whole(
            x.num_batches,
            lambda first, end: _Batches(x, first, end),
            {"kind": "PyDataset", "batches": x.num_batches},
        )
    elif hasattr(x, "__next__") or isinstance(x, tf.distribute.DistributedDataset):
        raise ValueError(
            f"strategy.predict divides data by number, and those of x, a {type(x).__name__}, have "
            "none. Give arrays, a PyDataset, or a tf.data.Dataset of known order."
        )
    else:
        whole = _of_arrays(x)
    if not whole.length:
        raise ValueError("strategy.predict got data without a single row.")
    return whole


def _of_dataset(dataset: tf.data.Dataset) -> _Whole:
    why = same_data.why_order_differs(dataset)
    if not same_data.divided_between_workers(dataset):
        why = "has auto-sharding off, so that each worker's is a part of its own"
    if why:
        raise ValueError(
            f"strategy.predict divides the batches by number, and the dataset {why}. Give all "
            "rows, in one order."
        )
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError("strategy.predict: the dataset has no end. Give dataset.take(batches).")
    if count < 0:  # the number is not known, so the dataset is read once to count its batches
        count = sum(1 for _ in dataset)
    facts = same_data.facts_of_dataset(dataset) | {"batches": count}
    return _Whole(count, lambda first, end: dataset.skip(first).take(end - first), facts)


def _of_arrays(x: Data) -> _Whole:
    def rows(leaf: Any) -> int:
        if isinstance(leaf, tf.RaggedTensor):
            return int(leaf.nrows())
        if len(getattr(leaf, "shape", ())) == 0:
            raise ValueError(
                f"strategy.predict got a {type(leaf).__name__} in x, which has no rows. Give "
                "arrays, np.asarray(x) of a list."
            )
        return int(leaf.shape[0])

    def part(first: int, end: int) -> Data:
        return keras.tree.map_structure(lambda leaf: slice_of(leaf, first, end), x)

    # A None among several inputs stands for an input that is left out.
    given = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    counts = {rows(leaf) for leaf in given or [x]}
    if len(counts) != 1:
        raise ValueError(f"strategy.predict: the arrays have {sorted(counts)} rows; give as many.")
    (count,) = counts
    facts = {"kind": "arrays", "rows": count, "values": same_data.values_of(x)}
    return _Whole(count, part, facts)


class _Batches(keras.utils.PyDataset):
    """Some batches of a dataset: those from number `first` to before `end`."""

    def __init__(self, dataset: keras.utils.PyDataset, first: int, end: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._numbers = dataset, range(first, end)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Data:
        return self._dataset[self._numbers[index]]
