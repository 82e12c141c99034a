"""Counters of the pushes, their staleness, and the minibatches done of each chunk."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfpara.parameter_server.messages import Push

# The last element of the histogram counts all pushes whose staleness is this number or higher.
LARGEST_STALENESS = 255


class Change(NamedTuple):
    """A variable and its next value, or the value of some of its rows."""

    variable: tf.Variable
    value: tf.Tensor
    ids: tf.Tensor | None = None  # the rows that `value` has; None: all rows


class Pushed(NamedTuple):
    """One push in a record: push number `version` (from 0) of a run.

    Attributes:
        worker: index of the worker that pushed.
        chunk: number of the chunk that the minibatches are from.
        pulled: number of pushes before the worker's pull.
        version: number of pushes before this one; `version − pulled` is this push's staleness.
    """

    worker: int
    chunk: int
    pulled: int
    version: int


class Counters:
    """Counters on the first parameter server, written while its lock is held.

    The variables are created on the current device. With `record`, each push is recorded.

    Attributes:
        histogram: int64 [256], number of pushes with staleness 0, 1, …; the last element also
            counts the pushes with a higher staleness.
        by_worker: int64 [workers], number of pushes of each worker.
        samples, minibatches: int64, totals of all pushes.
        left_out: int64, minibatches of the epoch that were left out for NaN or Inf.
        finished: bool [chunks], whether all minibatches of the chunk are in the model.
        halted: whether workers have to stop. A worker reads it with each pull. If it is set, the
            worker pushes the block that it has begun, and stops.
    """

    def __init__(self, num_workers: int, record: bool) -> None:
        def counter(shape: list[int]) -> tf.Variable:
            return tf.Variable(tf.zeros(shape, tf.int64), trainable=False)

        self.histogram, self.by_worker = counter([LARGEST_STALENESS + 1]), counter([num_workers])
        self.samples, self.minibatches, self.left_out = counter([]), counter([]), counter([])
        self.halted = tf.Variable(False, trainable=False)
        self._log: tf.lookup.experimental.MutableHashTable | None = None
        if record:
            self._log = tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.int64, tf.constant([-1, -1, -1], tf.int64)
            )
        self.divide(1)

    def divide(self, num_chunks: int) -> None:
        """Sets the number of chunks of the next epochs; on the current device, outside graphs."""
        self.finished = tf.Variable(tf.zeros([num_chunks], tf.bool), trainable=False)

    def changes(self, push: Push, staleness: tf.Tensor) -> list[Change]:
        """Returns the counters that a push changes, with their next values; inside the lock."""
        row = tf.minimum(staleness, LARGEST_STALENESS)
        one = tf.ones([], tf.int64)
        trained = push.minibatches
        changed: list[Change] = []
        for left_out in push.left_out:
            trained -= left_out
            changed = [Change(self.left_out, self.left_out + left_out)]
        return [
            *changed,
            _counted(self.histogram, row, one),
            _counted(self.by_worker, push.worker, one),
            Change(self.samples, self.samples + push.samples),
            Change(self.minibatches, self.minibatches + trained),
        ]

    def record(self, push: Push, staleness: tf.Tensor) -> None:
        """Records the first server's part of a push, if pushes are recorded; inside the lock."""
        if self._log is not None:
            line = tf.stack([push.worker, push.place.chunk, push.version])
            self._log.insert([push.version + staleness], [line])

    def finish(self, chunk: tf.Tensor, finished: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """Sets the chunk's element of `finished`; inside the lock. Returns `ended`."""
        now = tf.tensor_scatter_nd_update(self.finished.read_value(), [[chunk]], [finished])
        with tf.control_dependencies([self.finished.assign(now)]):
            return tf.identity(ended)

    def lines(self) -> list[Pushed]:
        """Returns the recorded pushes in order; raises ValueError if pushes are not recorded."""
        if self._log is None:
            raise ValueError("no record is kept: give the strategy record=True.")
        versions, rows = (tensor.numpy() for tensor in self._log.export())
        return [Pushed(*map(int, [*rows[k], versions[k]])) for k in versions.argsort()]

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that a checkpoint must hold, by name."""
        # `by_worker` and the record are left out: they count from the start of this process.
        kept = ("histogram", "samples", "finished", "minibatches", "left_out")
        return {f"books/{name}": getattr(self, name) for name in kept}


class Progress:
    """The number of minibatches of each chunk that are in the weights of one parameter server.

    If a worker dies between its push and the answer, another worker pushes the same minibatches
    again. The numbers `done` (int64 [chunks]) show that this push is a repetition, which is not
    applied. The variables are made on the current device and used while the server's lock is held.
    """

    def __init__(self, num_chunks: int) -> None:
        # The shape is fixed, because TensorFlow's workers abort on a variable whose shape may
        # change. So another number of chunks needs a new `Progress`.
        self.done = tf.Variable(tf.zeros([num_chunks], tf.int64), trainable=False)
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)

    def open(self, epoch: int, anew: bool) -> None:
        """Accepts pushes of an epoch; if `anew`, no minibatch of the epoch is done yet."""
        if anew:
            self.done.assign(tf.zeros_like(self.done))
        self._epoch.assign(epoch)

    def close(self) -> tf.Tensor:
        """Accepts no push until `open`."""
        return tf.identity(self._epoch.assign(-1))

    def is_of(self, epoch: tf.Tensor) -> tf.Tensor:
        """Returns whether pushes of this epoch are accepted."""
        return self._epoch == epoch

    def next_is(self, push: Push) -> tf.Tensor:
        """Returns whether a push has the next minibatches of its chunk."""
        done = tf.gather(self.done.read_value(), push.place.chunk)
        return self.is_of(push.place.epoch) & (done == push.place.start)

    def includes(self, push: Push) -> tf.Tensor:
        """Returns whether the minibatches of a push are in the weights."""
        done = tf.gather(self.done.read_value(), push.place.chunk)
        return self.is_of(push.place.epoch) & (done >= push.place.start + push.minibatches)

    def change(self, push: Push) -> Change:
        """Returns the change of `done` by a push."""
        return _counted(self.done, push.place.chunk, push.minibatches)


def _counted(counters: tf.Variable, index: tf.Tensor, by: tf.Tensor) -> Change:
    return Change(counters, tf.tensor_scatter_nd_add(counters.read_value(), [[index]], [by]))
