"""Blocks by speed: the shares of workers, the order of dealing, and bad arguments."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.sync.data.balance import dealing_order, shares_of

NONE = np.zeros(2, int)


@pytest.mark.parametrize("seconds", [[1.0, 2.0], [3.0, 1.0], [1.0, 1.0, 4.0], [0.1, 0.7, 0.3]])
@pytest.mark.parametrize("period", [1, 5, 11])
def test_no_other_shares_make_a_shorter_block(seconds, period):
    workers = len(seconds)
    shares = shares_of(np.array(seconds), period, np.zeros(workers, int))
    assert shares.sum() == workers * period
    assert shares.min() >= 1 and shares.max() <= 4 * period
    all_of_them = itertools.product(range(1, 4 * period + 1), repeat=workers)
    best = min(
        max(t * s for t, s in zip(each, seconds, strict=True))
        for each in all_of_them
        if sum(each) == workers * period
    )
    assert max(shares * seconds) == pytest.approx(best)


def test_the_shares_by_hand():
    assert shares_of(np.array([1.0, 2.0]), 15, NONE).tolist() == [20, 10]
    assert shares_of(np.array([1.0, 0.0]), 15, NONE).tolist() == [15, 15]  # one is not known
    # The floor of 1: the slow one would take 0.2 minibatches; the ceiling: 4τ = 20 of 25.
    assert shares_of(np.array([1.0, 1000.0]), 3, NONE).tolist() == [5, 1]
    five = np.array([1.0, 99.0, 99.0, 99.0, 99.0])
    assert shares_of(five, 5, np.zeros(5, int)).tolist() == [20, 2, 1, 1, 1]


def test_noise_changes_no_shares():
    former = np.array([20, 20])
    assert shares_of(np.array([0.98, 1.02]), 20, former).tolist() == [20, 20]
    assert shares_of(np.array([0.9, 1.1]), 20, former).tolist() == [22, 18]


def test_the_order_of_dealing():
    assert dealing_order(np.array([3, 3])).tolist() == [0, 1, 0, 1, 0, 1]
    # Places: 0, 1/4, 2/4, 3/4 of the first, 0, 1/2 of the second.
    assert dealing_order(np.array([4, 2])).tolist() == [0, 1, 0, 0, 1, 0]
    assert dealing_order(np.array([0, 2])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": True}, "overlap=True"),
        ({"fragments": 2}, "fragments=2"),
        ({"elastic": tfpara.Elastic()}, "balance=True and elastic="),
        ({"balance": "table"}, "'table' must be True, False, or the record"),
        ({"balance": [[3, 3], [4]]}, r"block 1 of the record is \[4\]"),
        ({"devices": ["CPU:0", "CPU:1"]}, "workers of one device, and this one has 2"),
        ({"rule": tfpara.BMUFAdam()}, "BMUFAdam.* filters moments of equal blocks"),
        ({"balance": [[3, 3]]}, "the shares of 2 workers in each block, and the run has 1"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        tfpara.PeriodicSyncStrategy(
            **{"rule": tfpara.BMUF(), "sync_period": 3, "balance": True, **options}
        )


@pytest.mark.parametrize("kind", ["generator", "steps"])
def test_data_without_numbers(kind, model_of_balance):
    x, y = np.zeros((8, 2), "float32"), np.zeros(8)
    if kind == "generator":
        with pytest.raises(ValueError, match="those of x, a generator, have none"):
            model_of_balance.fit((each for each in [(x, y)]), verbose=0)
    else:
        data = model_of_balance.distribute_strategy.minibatches_by_epoch(
            lambda epoch: batches(x, y)
        )
        with pytest.raises(ValueError, match="steps_per_epoch=3 and balance= contradict"):
            model_of_balance.fit(data, steps_per_epoch=3, verbose=0)


def batches(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


@pytest.fixture
def model_of_balance():
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=3, balance=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model
