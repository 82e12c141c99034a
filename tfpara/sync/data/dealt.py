"""Selects this worker's minibatches of a pass. Their indices become known block by block."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Dealt:
    """The minibatches of a pass that belong to this worker, by a queue of their rising numbers.

    Reading waits until the numbers of the next block are known. This wait occupies no thread of
    TensorFlow, as one in a Python function would, and ends with the iterator.
    """

    def __init__(self, queue: tf.queue.QueueBase) -> None:
        self._queue = queue

    def numbers(self, end: int) -> tf.data.Dataset:
        numbers = tf.data.Dataset.counter().map(lambda _: self._queue.dequeue())
        return numbers.take_while(lambda number: number < end)

    def among(self, numbered: tf.data.Dataset) -> tf.data.Dataset:
        """Returns this worker's minibatches among pairs of a rising number and a minibatch."""
        none = tf.constant(-1, tf.int64)

        def next_of(awaited: tf.Tensor, pair: Any) -> Any:
            number, element = pair
            awaited = tf.cond(awaited < 0, self._queue.dequeue, lambda: awaited)
            own = number == awaited
            return tf.where(own, none, awaited), (own, element)

        found = numbered.scan(none, next_of).filter(lambda own, element: own)
        return found.map(lambda own, element: element)


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, int64."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def slice_of(leaf: Any, begin: int | tf.Tensor, end: int | tf.Tensor) -> Any:
    """Returns the existing rows of a batch from `begin` to before `end`."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin:end]
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
