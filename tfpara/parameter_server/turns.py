"""Whose turn it is where staleness is bounded: workers wait before a pull and before a push."""

from __future__ import annotations

import tensorflow as tf

# What becomes of a push.
WAIT, GO, DROP = 0, 1, 2

_NONE = -1
_NEVER = tf.int64.max // 2


def may_pull(outstanding: tf.Tensor, worker: tf.Tensor, bound: int) -> tf.Tensor:
    """Whether a worker may pull now: at most s others have pulled and not pushed yet.

    Args:
        outstanding: int64 [workers], version at each worker's pull; −1 where it has pushed.
        worker: who asks.
        bound: s, the largest staleness.
    """
    return tf.reduce_sum(tf.cast(_others(outstanding, worker) < _NEVER, tf.int32)) <= bound


def may_push(
    outstanding: tf.Tensor, worker: tf.Tensor, version: tf.Tensor, bound: int
) -> tf.Tensor:
    """Whether all others can still keep to the bound if this worker pushes now.

        v + 1 + i − p_i ≤ s   for all i

    p_0 ≤ p_1 ≤ … are the versions at the others' pulls: if they push in this order, the i-th does
    so at version v + 1 + i. With `may_pull` the one that has the oldest pull may always push, so
    nobody waits for ever.

    Args:
        outstanding, worker, bound: as for `may_pull`.
        version: v, pushes so far.
    """
    pulls = tf.sort(_others(outstanding, worker))
    turns = version + 1 + tf.range(tf.size(pulls, tf.int64), dtype=tf.int64)
    return tf.reduce_all(turns - pulls <= bound)  # negative for those that have no pull


def _others(outstanding: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
    """The outstanding pulls but the worker's; `_NEVER` where there is none."""
    workers = tf.range(tf.size(outstanding, tf.int64), dtype=tf.int64)
    there = tf.logical_and(outstanding >= 0, tf.not_equal(workers, worker))
    return tf.where(there, outstanding, _NEVER)


class Turns:
    """Pulls under way and workers that wait; used inside the first server's lock.

    A worker that has to wait takes a token from its own queue, which needs no thread, and asks
    again. Whatever may let it go on puts a token into the queues of all that wait.

    Made on the current device.

    Args:
        num_workers: how many may push.
        bound: s, the largest staleness.
    """

    def __init__(self, num_workers: int, bound: int) -> None:
        self._bound = bound
        self._outstanding = tf.Variable(
            tf.fill([num_workers], tf.constant(_NONE, tf.int64)), trainable=False
        )
        self._waiting = tf.Variable(tf.zeros([num_workers], tf.bool), trainable=False)
        self._queues = [
            tf.queue.FIFOQueue(1024, [tf.bool], shapes=[[]]) for _ in range(num_workers)
        ]

    def ask_to_pull(self, worker: tf.Tensor) -> tf.Tensor:
        """Whether a worker may pull now."""
        return may_pull(self._outstanding.read_value(), worker, self._bound)

    def pulled(self, worker: tf.Tensor, version: tf.Tensor) -> list[tf.Operation]:
        """Enters a pull; returns what must have run before the lock is given back."""
        return [self._enter(worker, version)]

    def verdict(self, worker: tf.Tensor, pulled: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
        """`GO`, `WAIT`, or `DROP`: of a worker that was given up and has been overtaken since."""
        allowed = may_push(self._outstanding.read_value(), worker, version, self._bound)
        fresh = version - pulled <= self._bound
        return tf.where(fresh, tf.where(allowed, GO, WAIT), DROP)

    def pushed(self, worker: tf.Tensor) -> list[tf.Operation]:
        """Enters that a worker has no pull under way any more, and wakes those that wait."""
        entered = self._enter(worker, tf.constant(_NONE, tf.int64))
        with tf.control_dependencies([entered]):
            waiting = self._waiting.read_value()
            woken = [
                queue.enqueue_many(tf.ones([tf.cast(waiting[k], tf.int32)], tf.bool))
                for k, queue in enumerate(self._queues)
            ]
        with tf.control_dependencies(woken):
            return [*woken, self._waiting.assign(tf.zeros_like(waiting))]

    def announce(self, worker: tf.Tensor) -> list[tf.Operation]:
        """Enters that a worker is going to wait."""
        there = tf.tensor_scatter_nd_update(self._waiting.read_value(), [[worker]], [True])
        return [self._waiting.assign(there)]

    def wait(self, worker: tf.Tensor) -> tf.Tensor:
        """Waits for a token; outside the lock."""
        return tf.switch_case(tf.cast(worker, tf.int32), [q.dequeue for q in self._queues])

    def _enter(self, worker: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
        now = tf.tensor_scatter_nd_update(self._outstanding.read_value(), [[worker]], [version])
        return self._outstanding.assign(now)
