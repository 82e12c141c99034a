"""This worker's minibatches of a pass, whose numbers become known block by block."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Dealt:
    """The minibatches of a pass that are this worker's own.

    Reading waits where the numbers of the next block are not known yet. It keeps no thread of
    TensorFlow's meanwhile, as a Python function would, and ends with its iterator.

    Args:
        queue: of pairs: a minibatch's number in the epoch, and how many empty ones come before it.
            The numbers rise.
        has_empty: whether there may be empty ones.
    """

    def __init__(self, queue: tf.queue.QueueBase, has_empty: bool) -> None:
        self._queue, self._has_empty = queue, has_empty

    def numbers(self, end: int) -> tf.data.Dataset:
        """Returns the pairs whose numbers are below `end`."""
        pairs = tf.data.Dataset.counter().map(lambda _: tuple(self._queue.dequeue()))
        return pairs.take_while(lambda number, empty: number < end)

    def among(self, numbered: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the own minibatches among all from some number on, and the empty ones.

        Args:
            numbered: pairs of a number, rising by 1, and the minibatch.
        """
        none = (tf.constant(-1, tf.int64), tf.constant(0, tf.int64))

        def next_of(awaited: Any, pair: Any) -> Any:
            number, element = pair
            awaited, empty = tf.cond(
                awaited[0] < 0, lambda: tuple(self._queue.dequeue()), lambda: awaited
            )
            own = number == awaited
            after = tf.where(own, none[0], awaited), tf.where(own, none[1], empty)
            return after, (own, empty, element)

        found = numbered.scan(none, next_of).filter(lambda own, empty, element: own)
        return self.with_empty(found.map(lambda own, empty, element: (empty, element)))

    def with_empty(self, pairs: tf.data.Dataset) -> tf.data.Dataset:
        """Returns minibatches, each after as many without rows as the pair says.

        Args:
            pairs: of that number, and the minibatch.
        """
        if not self._has_empty:
            return pairs.map(lambda empty, element: element)

        def both(empty: tf.Tensor, element: Any) -> tf.data.Dataset:
            def one(place: tf.Tensor) -> Any:
                def cut(leaf: Any) -> Any:
                    rows = rows_of(leaf)
                    return slice_of(leaf, 0 * rows, tf.where(place < empty, 0 * rows, rows))

                return tf.nest.map_structure(cut, element)

            return tf.data.Dataset.range(empty + 1).map(one)

        return pairs.flat_map(both)


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, int64."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def slice_of(leaf: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Returns the rows of a batch from `begin` to before `end`, as far as there are any."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin:end]
    count = tf.minimum(end, leaf.dense_shape[0]) - begin
    rest = leaf.dense_shape[1:]
    start, size = (
        tf.concat([[first], others], 0)
        for first, others in ((begin, tf.zeros_like(rest)), (count, rest))
    )
    sliced = tf.sparse.slice(leaf, start, size)
    sliced.set_shape([None, *leaf.shape[1:]])
    return sliced
