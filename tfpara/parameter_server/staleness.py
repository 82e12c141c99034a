"""The bound on staleness: which workers may pull and push now, and how other workers wait."""

from __future__ import annotations

import tensorflow as tf

_NONE = -1
_NEVER = tf.int64.max // 2


def may_pull(outstanding: tf.Tensor, worker: tf.Tensor, bound: int) -> tf.Tensor:
    """Returns whether a worker may pull now: at most s others have pulled but not pushed yet.

    `outstanding`, int64 [workers], has the number of pushes before each worker's last pull; −1 for
    a worker that has pushed since that pull. `bound` is s, the largest staleness.
    """
    return tf.reduce_sum(tf.cast(_others(outstanding, worker) < _NEVER, tf.int32)) <= bound


def may_push(
    outstanding: tf.Tensor, worker: tf.Tensor, version: tf.Tensor, bound: int
) -> tf.Tensor:
    """Returns whether all other workers can keep to the bound if this worker pushes now.

        v + 1 + i − p_i ≤ s   for all i

    p_0 ≤ p_1 ≤ … are the numbers of pushes before the outstanding pulls of the other workers. If
    these workers push in this order, v + 1 + i pushes come before the i-th. As `may_pull` limits
    the outstanding pulls, the worker with the oldest pull may always push: there is no deadlock.
    `version` is v, the number of pushes so far.
    """
    pulls = tf.sort(_others(outstanding, worker))
    turns = version + 1 + tf.range(tf.size(pulls, tf.int64), dtype=tf.int64)
    # A worker without an outstanding pull never forbids a push. It has `_NEVER` in `pulls`, a
    # number so large that `turns - pulls` is negative.
    return tf.reduce_all(turns - pulls <= bound)


def _none() -> tf.Tensor:
    return tf.constant(_NONE, tf.int64)


def _others(outstanding: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
    """Returns the other workers' outstanding pulls; `_NEVER` stands for none."""
    workers = tf.range(tf.size(outstanding, tf.int64), dtype=tf.int64)
    there = (outstanding >= 0) & (workers != worker)
    return tf.where(there, outstanding, _NEVER)


class Staleness:
    """The outstanding pulls and pushes, and the waiting workers; used in the first server's lock.

    One worker at a time has the turn to push, until all servers have applied the push. The first
    server applies it last. So a worker that may pull finds on each server at least as many pushes
    as the first server had when it allowed the pull. And when a worker gets the turn, all servers
    have applied equally many pushes.

    A worker that has to wait takes a token from its own queue, and then asks again. Waiting for a
    token occupies no thread. Each event that may let workers continue puts tokens into the queues
    of all waiting workers. A worker's waiting calls are counted, because there may be two: one that
    TensorFlow has abandoned, and its replacement.

    The variables are created on the current device; `bound` is s, the largest staleness.
    """

    def __init__(self, num_workers: int, bound: int) -> None:
        self._bound = bound
        self._outstanding = tf.Variable(tf.fill([num_workers], _none()), trainable=False)
        self._chunks = tf.Variable(tf.fill([num_workers], _none()), trainable=False)
        self._pushing = tf.Variable(_NONE, dtype=tf.int64, trainable=False)
        self._waiting = tf.Variable(tf.zeros([num_workers], tf.int32), trainable=False)
        self._queues = [
            tf.queue.FIFOQueue(1024, [tf.bool], shapes=[[]]) for _ in range(num_workers)
        ]

    def ask_to_pull(self, worker: tf.Tensor, version: tf.Tensor, waits: bool) -> tf.Tensor:
        """Returns whether a worker may pull now; notes the pull, or that the worker `waits`.

        An outstanding pull of the same worker is dropped, because the call that made it has been
        restarted. `version` is the number of pushes so far.
        """
        before = self._outstanding.read_value()
        may = may_pull(before, worker, self._bound)
        now = tf.tensor_scatter_nd_update(before, [[worker]], [tf.where(may, version, _none())])
        given_up = (tf.gather(before, worker) >= 0) & ~may
        done = [self._outstanding.assign(now), *self._wake(given_up)]
        with tf.control_dependencies(done):
            done += self._announce(worker, ~may, waits)
        with tf.control_dependencies(done):
            return tf.identity(may)

    def ask_to_push(
        self,
        worker: tf.Tensor,
        pulled: tf.Tensor,
        version: tf.Tensor,
        due: tf.Tensor,
        waits: bool,
    ) -> list[tf.Tensor]:
        """Returns whether a push is settled, and whether its worker has the turn, until `leave`.

        A push is settled if it has the turn, or if it is dropped for good. It is dropped if it is
        not `due` (does not have the next minibatches), or if it is too stale because its worker
        counted as lost, so that other workers did not wait for it. A push that is not settled must
        be offered again; if the worker `waits`, a token will say when.
        """
        pushing = self._pushing.read_value()
        free = (pushing == _NONE) | (pushing == worker)
        allowed = may_push(self._outstanding.read_value(), worker, version, self._bound)
        stays = due & (version - pulled <= self._bound)
        goes = stays & allowed & free
        waiting = stays & ~goes
        turn = self._pushing.assign(tf.where(goes, worker, pushing))
        with tf.control_dependencies([turn]):
            done = self._leave(self._is(worker) & ~stays)
        with tf.control_dependencies(done):
            done += self._announce(worker, waiting, waits)
        with tf.control_dependencies(done):
            return [~waiting, tf.identity(goes)]

    def begin(self, worker: tf.Tensor, chunk: tf.Tensor) -> tf.Tensor:
        """Notes that a worker begins a chunk; returns the chunk.

        Earlier pulls and pushes of this worker, and of a previous worker of the chunk, are dropped:
        TensorFlow has abandoned the calls that made them.
        """
        chunks = self._chunks.read_value()
        former = (chunks == chunk) | self._is(worker)
        now = tf.where(self._is(worker), chunk, tf.where(former, _none(), chunks))
        with tf.control_dependencies([*self._leave(former), self._chunks.assign(now)]):
            return tf.identity(chunk)

    def leave(self, worker: tf.Tensor, condition: bool | tf.Tensor = True) -> tf.Tensor:
        """Ends the pull and push of a worker that is done or lost, if the condition holds."""
        with tf.control_dependencies(self._leave(self._is(worker) & condition)):
            return tf.identity(worker)

    def clear(self) -> None:
        """Ends all pulls and pushes; must not be called in a graph."""
        self._outstanding.assign(tf.fill(self._outstanding.shape, _none()))
        self._pushing.assign(_NONE)

    def wait(self, worker: tf.Tensor) -> tf.Tensor:
        """Waits for a token; must not be called inside the lock."""
        return tf.switch_case(tf.cast(worker, tf.int32), [q.dequeue for q in self._queues])

    def _is(self, worker: tf.Tensor) -> tf.Tensor:
        """Returns bool [workers], true for this worker only."""
        return tf.range(len(self._queues), dtype=tf.int64) == worker

    def _leave(self, leaving: tf.Tensor) -> list[tf.Tensor | tf.Operation]:
        """Ends the pulls and pushes of the workers for which `leaving`, bool [workers], is true."""
        pushing = self._pushing.read_value()
        ends = tf.reduce_any(leaving & self._is(pushing))
        return [
            self._outstanding.assign(tf.where(leaving, _none(), self._outstanding.read_value())),
            self._pushing.assign(tf.where(ends, _none(), pushing)),
            *self._wake(tf.reduce_any(leaving)),
        ]

    def _announce(self, worker: tf.Tensor, waiting: tf.Tensor, waits: bool) -> list[tf.Tensor]:
        """Counts a waiting call of the worker, if `waiting` (a tensor) and `waits` are true."""
        if not waits:
            return []
        waiting = tf.cast(self._is(worker) & waiting, tf.int32)
        return [self._waiting.assign(self._waiting.read_value() + waiting)]

    def _wake(self, condition: tf.Tensor) -> list[tf.Tensor | tf.Operation]:
        """Gives a token to each waiting call, if the condition holds."""
        waiting = self._waiting.read_value()
        woken = waiting * tf.cast(condition, tf.int32)
        tokens = [
            queue.enqueue_many(tf.ones([woken[k]], tf.bool)) for k, queue in enumerate(self._queues)
        ]
        return [*tokens, self._waiting.assign(waiting - woken)]
