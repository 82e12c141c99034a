"""Counters that are parts of one variable."""

import numpy as np
import tensorflow as tf

from tfpara.sync.one_sync.counter import Counter


def test_each_counter_is_a_part_of_the_variable():
    whole = tf.Variable(tf.zeros([5], tf.float64))
    steps, pair = Counter(whole, 1, [], tf.int64), Counter(whole, 3, [2])
    steps.assign(7)
    steps.assign_add(2)
    pair.assign([0.5, 1.0])
    pair.assign_add(tf.constant([1.0, 1.0], tf.float64))
    np.testing.assert_array_equal(whole.numpy(), [0, 9, 0, 1.5, 2])
    assert int(steps) == 9
    assert steps.read_value().dtype == steps.dtype == tf.int64
    assert steps.shape == []
    assert pair.shape == [2]
    np.testing.assert_array_equal(pair.read_value(), [1.5, 2])


def test_a_graph_adds_in_order():
    whole = tf.Variable(tf.zeros([2], tf.float64))
    counter = Counter(whole, 0, [], tf.int64)

    @tf.function
    def twice():
        counter.assign_add(1)
        counter.assign_add(counter.read_value())
        return counter.read_value()

    assert int(twice()) == 2
    assert int(twice()) == 6
