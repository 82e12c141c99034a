"""Counts each minibatch in the weights: what is lost has none there, what is doubled has two.

`Counter` is the whole model. It has a weight for each minibatch. A step of SGD with rate 1 raises
the weight of its minibatch by 1, whatever its number of rows. `shares` is what the means of syncs
make of that.
"""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import tensorflow as tf

LARGEST = 5  # rows of a minibatch


class Kill(keras.callbacks.Callback):
    """Kills this process once there were so many syncs."""

    def __init__(self, syncs):
        super().__init__()
        self.syncs = syncs

    def on_train_batch_end(self, batch, logs=None):
        if self.model.distribute_strategy.statistics().syncs >= self.syncs:
            os.kill(os.getpid(), signal.SIGKILL)


class Counter(keras.layers.Layer):
    """Returns the weights of the minibatches whose numbers it is given."""

    def __init__(self, minibatches: int) -> None:
        super().__init__()
        self.minibatches = minibatches

    def build(self, shape) -> None:
        self.counts = self.add_weight(shape=(self.minibatches,), initializer="zeros")

    def call(self, numbers):
        return tf.gather(self.counts, numbers)


def counting_model(minibatches: int) -> keras.Model:
    """Returns a compiled model that counts minibatches; call it in the scope of a strategy."""
    model = keras.Sequential([keras.Input((), dtype="int64"), Counter(minibatches)])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, counts: -counts)
    return model


def rows_of(number, uneven: bool):
    """Returns how many rows a minibatch has."""
    return 1 + number % LARGEST if uneven else 1


def minibatches(first: int, count: int, uneven: bool = False) -> tf.data.Dataset:
    """Returns the minibatches `first`, `first` + 1, …, of rows that have its number."""

    def minibatch(number):
        rows = tf.fill([rows_of(number, uneven)], number)
        return rows, tf.zeros_like(rows, tf.float32)

    return tf.data.Dataset.range(first, first + count).map(minibatch)


def shares(minibatches: int, replicas: int, period: int, uneven: bool = False) -> np.ndarray:
    """Returns the weights after an epoch under BSP, where minibatch k is of replica k mod N.

    A sync adds to each weight the mean of what the replicas have added, weighted by the rows n_i
    that replica i has had in the block. So the weight of a minibatch of replica i is n_i / Σ n_j.
    """
    block = period * replicas
    weights = np.zeros(minibatches)
    for first in range(0, minibatches, block):
        numbers = np.arange(first, min(first + block, minibatches))
        rows = np.bincount(numbers % replicas, rows_of(numbers, uneven) * np.ones(len(numbers)))
        weights[numbers] = rows[numbers % replicas] / rows.sum()
    return weights
