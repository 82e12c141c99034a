"""Selection of this worker's minibatches of a pass, whose numbers become known block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpara.sync.workers.data_place import DataPlace, dealt, making
from tfpara.typing import Array

EMPTY = -1  # stands for the number of a minibatch without rows


class Dealt:
    """The minibatches of a pass that belong to this worker, by a queue of their rising numbers.

    Reading waits until the numbers of the next block are known. This wait ends with the iterator.
    Unlike a wait in a Python function, it occupies no thread of TensorFlow.

    Without a queue this worker has no minibatches. None has a number below `first`.
    """

    def __init__(self, queue: tf.queue.QueueBase | None, first: int = 0) -> None:
        self._queue, self.first = queue, first

    def numbers(self, end: int) -> tf.data.Dataset:
        return self.rows().take_while(lambda number: number < end)

    def rows(self) -> tf.data.Dataset:
        """Returns a dataset of all numbers; in a simulation, of vectors: one for each replica."""
        queue = self._queue
        if queue is None:
            return tf.data.Dataset.range(0)
        return tf.data.Dataset.counter().map(lambda _: queue.dequeue())

    def among(self, numbered: tf.data.Dataset) -> tf.data.Dataset:
        """Returns this worker's minibatches from a dataset of pairs (rising number, minibatch)."""
        queue = self._queue
        if queue is None:
            return numbered.take(0).map(lambda number, element: element)
        none = tf.constant(-1, tf.int64)

        def next_of(awaited: tf.Tensor, pair: Any) -> Any:
            number, element = pair
            awaited = tf.cond(awaited < 0, queue.dequeue, lambda: awaited)
            own = number == awaited
            return tf.where(own, none, awaited), (own, element)

        found = numbered.scan(none, next_of).filter(lambda own, element: own)
        return found.map(lambda own, element: element)


def to_replicas(
    minibatches: Callable[[int, int], tf.data.Dataset],
) -> Callable[[int, int], tf.data.Dataset]:
    """Converts a function that returns one worker's minibatches, for simulated workers.

    The converted function's dataset has a minibatch for each replica in turn. Where a replica's
    number is `EMPTY`, its minibatch has no rows.
    """

    def made(epoch: int, first: int) -> tf.data.Dataset:
        rows = dealt()
        if rows is None:
            return minibatches(epoch, first)
        with making(DataPlace(0, 1, 1, epoch, first)):
            whole = minibatches(epoch, first)
        kept = _Kept(whole, first)
        signature = tf.nest.map_structure(open_spec, whole.element_spec)

        def of_row(row: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_generator(
                kept.take, args=(row,), output_signature=signature
            )

        def exists(row: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(kept.exists, [row], tf.bool), [])

        return rows.rows().take_while(exists).flat_map(of_row)

    return made


class _Kept:
    """The minibatches of a dataset, by number: read in order, and taken nearly in order."""

    def __init__(self, whole: tf.data.Dataset, first: int) -> None:
        self._iterator, self._next = iter(whole), first
        self._kept: dict[int, Any] = {}
        self._empty: Any = None

    def exists(self, row: Array) -> bool:
        """Returns whether any number of a row has a minibatch; reads up to the row's largest."""
        while self._next <= row.max():
            minibatch = next(self._iterator, None)
            if minibatch is None:
                break
            self._kept[self._next] = minibatch
            self._next += 1
            self._empty = tf.nest.map_structure(emptied, minibatch)
        return any(number in self._kept for number in row.tolist())

    def take(self, row: Array) -> Iterator[Any]:
        """Yields, for each number in a row, the minibatch of that number, or an empty one."""
        for number in row.tolist():
            yield self._kept.pop(number, self._empty)


def open_spec(spec: Any) -> Any:
    """Returns the spec of minibatches that may be empty."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec  # ragged and sparse specs already allow any number of rows
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def emptied(leaf: Any) -> Any:
    """Returns a tensor of a batch with its rows left out; a scalar or None stays."""
    return slice_of(leaf, 0, 0) if leaf is not None and leaf.shape.rank else leaf


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns the number of rows of a tensor, an int64 scalar."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def rows_of_all(element: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, an int64 scalar; fails if its tensors' rows differ."""
    rows, *others = [rows_of(leaf) for leaf in tf.nest.flatten(element) if leaf is not None]
    words = "the tensors of a batch differ in rows"
    with tf.control_dependencies([tf.debugging.assert_equal(n, rows, words) for n in others]):
        return tf.identity(rows)


def slice_of(leaf: Any, begin: int | tf.Tensor, end: int | tf.Tensor) -> Any:
    """Returns a tensor's rows from `begin` to before `end`, as far as they exist; None stays."""
    if not isinstance(leaf, tf.SparseTensor):
        return None if leaf is None else leaf[begin:end]
    begin, end = tf.cast(begin, tf.int64), tf.cast(end, tf.int64)
    count = tf.minimum(end, leaf.dense_shape[0]) - begin
    rest = leaf.dense_shape[1:]
    start, size = (
        tf.concat([[first], others], 0)
        for first, others in ((begin, tf.zeros_like(rest)), (count, rest))
    )
    sliced = tf.sparse.slice(leaf, start, size)
    sliced.set_shape([None, *leaf.shape[1:]])
    return sliced
