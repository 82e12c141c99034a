"""Data of a worker among others with unlike numbers of devices."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.steps import with_open_batches


class Pair(NamedTuple):
    x: tf.Tensor
    y: tf.Tensor


@pytest.fixture
def strategy():
    """The strategy of the first worker, of two with 2 and 1 devices."""
    made = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0", "CPU:1"])
    made.extended.worker.company.unlike_devices = (2, 1)
    return made


def pairs(rows):
    return tf.data.Dataset.range(rows).map(lambda n: Pair(n, 2 * n))


def test_batches_keep_the_type_of_a_named_tuple(strategy):
    data = strategy.experimental_distribute_dataset(pairs(12).batch(6))
    local = strategy.experimental_local_results
    found = [[own.numpy().tolist() for own in local(each.x) + local(each.y)] for each in data]
    assert found == [[[0, 1], [2, 3], [0, 2], [4, 6]], [[6, 7], [8, 9], [12, 14], [16, 18]]]
    (whole,) = with_open_batches(pairs(4).batch(4, drop_remainder=True))
    np.testing.assert_array_equal(whole.y, [0, 2, 4, 6])
    assert isinstance(whole, Pair)


def test_options_of_the_user_are_passed_on(strategy):
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    data = strategy.experimental_distribute_dataset(pairs(6).batch(6), options)
    assert data._options is options
