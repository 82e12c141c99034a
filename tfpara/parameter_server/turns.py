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


def _nobody() -> tf.Tensor:
    return tf.constant(_NONE, tf.int64)


def _others(outstanding: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
    """The outstanding pulls but the worker's; `_NEVER` where there is none."""
    workers = tf.range(tf.size(outstanding, tf.int64), dtype=tf.int64)
    there = tf.logical_and(outstanding >= 0, tf.not_equal(workers, worker))
    return tf.where(there, outstanding, _NEVER)


class Turns:
    """Pulls and pushes under way, and workers that wait; used inside the first server's lock.

    One worker at a time pushes: from its `GO` until the push is on all servers. The first server
    gets it last. So whoever has asked to pull reads, on each server, at least as many pushes as the
    first had then; and whoever may push finds, on each, as many as on the first.

    A worker that has to wait takes a token from its own queue, which needs no thread, and asks
    again. Whatever may let it go on puts a token into the queues of all that wait. They are
    counted: a call that TensorFlow has given up may wait beside the one that was made in its place.

    Made on the current device.

    Args:
        num_workers: how many may push.
        bound: s, the largest staleness.
    """

    def __init__(self, num_workers: int, bound: int) -> None:
        self._bound = bound
        self._outstanding = tf.Variable(tf.fill([num_workers], _nobody()), trainable=False)
        self._chunks = tf.Variable(tf.fill([num_workers], _nobody()), trainable=False)
        self._pushing = tf.Variable(_NONE, dtype=tf.int64, trainable=False)
        self._waiting = tf.Variable(tf.zeros([num_workers], tf.int32), trainable=False)
        self._queues = [
            tf.queue.FIFOQueue(1024, [tf.bool], shapes=[[]]) for _ in range(num_workers)
        ]

    def ask_to_pull(self, worker: tf.Tensor, version: tf.Tensor, waits: bool) -> tf.Tensor:
        """Whether a worker may pull now; if so it is entered, otherwise it is known to wait.

        Args:
            worker: who asks; a pull that it began before, and was started again since, is given up.
            version: pushes so far.
            waits: whether it will wait for a token.
        """
        before = self._outstanding.read_value()
        may = may_pull(before, worker, self._bound)
        now = tf.tensor_scatter_nd_update(before, [[worker]], [tf.where(may, version, _nobody())])
        given_up = tf.logical_and(tf.gather(before, worker) >= 0, tf.logical_not(may))
        done = [self._outstanding.assign(now), *self._wake(given_up)]
        with tf.control_dependencies(done):
            done += self._announce(worker, tf.logical_not(may), waits)
        with tf.control_dependencies(done):
            return tf.identity(may)

    def verdict(self, worker: tf.Tensor, pulled: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
        """`GO`, `WAIT`, or `DROP`: of a worker that was given up and has been overtaken since."""
        pushing = self._pushing.read_value()
        free = tf.logical_or(tf.equal(pushing, _NONE), tf.equal(pushing, worker))
        allowed = may_push(self._outstanding.read_value(), worker, version, self._bound)
        fresh = version - pulled <= self._bound
        return tf.where(fresh, tf.where(tf.logical_and(allowed, free), GO, WAIT), DROP)

    def settle(self, worker: tf.Tensor, verdict: tf.Tensor, waits: bool) -> tf.Tensor:
        """Enters what becomes of a push; returns whether it is settled.

        Args:
            worker: whose push it is. With `GO` it pushes until `leave` is called.
            verdict: on it.
            waits: whether it will wait for a token, if it must `WAIT`.
        """
        settled = tf.not_equal(verdict, WAIT)
        pushing = self._pushing.read_value()
        goes = self._pushing.assign(tf.where(tf.equal(verdict, GO), worker, pushing))
        with tf.control_dependencies([goes]):
            done = self._leave(tf.logical_and(self._is(worker), tf.equal(verdict, DROP)))
        with tf.control_dependencies(done):
            done += self._announce(worker, tf.logical_not(settled), waits)
        with tf.control_dependencies(done):
            return tf.identity(settled)

    def begin(self, worker: tf.Tensor, chunk: tf.Tensor) -> tf.Tensor:
        """A worker begins a chunk: nobody waits for one that had it, or for the worker's own past.

        A chunk begins anew where TensorFlow has given up the call of the worker that had it.
        """
        chunks = self._chunks.read_value()
        former = tf.logical_or(tf.equal(chunks, chunk), self._is(worker))
        now = tf.where(self._is(worker), chunk, tf.where(former, _nobody(), chunks))
        with tf.control_dependencies([*self._leave(former), self._chunks.assign(now)]):
            return tf.identity(chunk)

    def leave(self, worker: tf.Tensor, condition: bool | tf.Tensor = True) -> tf.Tensor:
        """A push is on all servers, or its worker is lost: nobody waits for it any more."""
        with tf.control_dependencies(self._leave(tf.logical_and(self._is(worker), condition))):
            return tf.identity(worker)

    def clear(self) -> None:
        """No pull and no push is under way; outside graphs."""
        self._outstanding.assign(tf.fill(self._outstanding.shape, _nobody()))
        self._pushing.assign(_NONE)

    def wait(self, worker: tf.Tensor) -> tf.Tensor:
        """Waits for a token; outside the lock."""
        return tf.switch_case(tf.cast(worker, tf.int32), [q.dequeue for q in self._queues])

    def _is(self, worker: tf.Tensor) -> tf.Tensor:
        """bool [workers]: true for the worker."""
        return tf.equal(tf.range(len(self._queues), dtype=tf.int64), worker)

    def _leave(self, leaving: tf.Tensor) -> list[tf.Tensor | tf.Operation]:
        """These, bool [workers], have no pull and no push under way."""
        pushing = self._pushing.read_value()
        ends = tf.reduce_any(tf.logical_and(leaving, self._is(pushing)))
        return [
            self._outstanding.assign(tf.where(leaving, _nobody(), self._outstanding.read_value())),
            self._pushing.assign(tf.where(ends, _nobody(), pushing)),
            *self._wake(tf.reduce_any(leaving)),
        ]

    def _announce(self, worker: tf.Tensor, waiting: tf.Tensor, waits: bool) -> list[tf.Tensor]:
        """One more waits for a token, on a condition."""
        if not waits:
            return []
        waiting = tf.cast(tf.logical_and(self._is(worker), waiting), tf.int32)
        return [self._waiting.assign(self._waiting.read_value() + waiting)]

    def _wake(self, condition: tf.Tensor) -> list[tf.Tensor | tf.Operation]:
        """Gives a token to all that wait, on a condition."""
        waiting = self._waiting.read_value()
        woken = waiting * tf.cast(condition, tf.int32)
        tokens = [
            queue.enqueue_many(tf.ones([woken[k]], tf.bool)) for k, queue in enumerate(self._queues)
        ]
        return [*tokens, self._waiting.assign(waiting - woken)]
