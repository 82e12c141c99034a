"""The weight of a minibatch in the mean of the replicas."""

import keras
import pytest
import tensorflow as tf

from tfpara.steps import weight_of

SUM = keras.losses.MeanSquaredError(reduction="sum")
BY_WEIGHT = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


@pytest.mark.parametrize("loss, weight", [(SUM, 1), (BY_WEIGHT, 5)])
def test_an_output_whose_loss_is_none_does_not_count(loss, weight):
    minibatch = (tf.zeros([2, 4]), {"a": tf.zeros(2), "b": tf.zeros(2)}, {"a": tf.constant([2, 3])})
    assert int(weight_of(minibatch, 2, {"a": loss, "b": None})) == weight


def test_a_third_part_that_is_ragged_or_sparse_has_no_sample_weights():
    ragged = tf.ragged.constant([[1], [2, 3]])
    for third in (ragged, tf.sparse.from_dense([[0, 1], [1, 0]]), (ragged, None)):
        assert weight_of((tf.zeros([2, 4]), tf.zeros(2), third), 2, None) == 2
