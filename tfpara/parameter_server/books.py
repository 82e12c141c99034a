"""The books of a parameter server: pushes, their staleness, and how far each chunk is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Staler pushes are counted together with those of this staleness.
LARGEST_STALENESS = 255


class Books:
    """Counters on the first parameter server, written inside its lock.

    Made on the current device.

    Args:
        num_workers: how many may push.

    Attributes:
        histogram: int64 [256], pushes by staleness; the last counts the staler ones too.
        by_worker: int64 [workers], pushes of each worker.
        samples: int64, of all pushes.
        progress: int64 [chunks], minibatches of each chunk of this epoch that are in the model.
        finished: bool [chunks].
        halted: whether workers stop where they are.
    """

    def __init__(self, num_workers: int) -> None:
        def counter(shape: list[int]) -> tf.Variable:
            return tf.Variable(tf.zeros(shape, tf.int64), trainable=False)

        self.histogram = counter([LARGEST_STALENESS + 1])
        self.by_worker = counter([num_workers])
        self.samples = counter([])
        self.halted = tf.Variable(False, trainable=False)
        self.divide(1)

    def divide(self, num_chunks: int) -> None:
        """Epochs have so many chunks from here on; on the current device, outside graphs."""
        # Not one variable of open shape, which TensorFlow's workers abort on.
        self.progress = tf.Variable(tf.zeros([num_chunks], tf.int64), trainable=False)
        self.finished = tf.Variable(tf.zeros([num_chunks], tf.bool), trainable=False)

    def begin_epoch(self) -> None:
        """No chunk of the new epoch has begun."""
        self.progress.assign(tf.zeros_like(self.progress))
        self.finished.assign(tf.zeros_like(self.finished))

    def enter(self, push: Any, staleness: tf.Tensor) -> list[tf.Tensor]:
        """Enters a push; returns what must have run before the lock is given back."""
        row = tf.minimum(staleness, LARGEST_STALENESS)
        one = tf.ones([], tf.int64)
        return [
            _count(self.histogram, row, one),
            _count(self.by_worker, push.worker, one),
            self.samples.assign_add(push.samples),
            _count(self.progress, push.chunk, push.minibatches),
        ]

    def finish(self, chunk: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """Enters whether all minibatches of a chunk are in the model; inside the lock."""
        now = tf.tensor_scatter_nd_update(self.finished.read_value(), [[chunk]], [ended])
        with tf.control_dependencies([self.finished.assign(now)]):
            return tf.identity(ended)

    def variables(self) -> dict[str, tf.Variable]:
        """All but what lasts no longer than a process, by name."""
        kept = {k: v for k, v in vars(self).items() if k not in ("halted", "by_worker")}
        return {f"books/{name}": variable for name, variable in kept.items()}


def _count(counters: tf.Variable, index: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
    return counters.assign(tf.tensor_scatter_nd_add(counters.read_value(), [[index]], [by]))
