"""A checkpoint of an earlier version still loads, and its run goes on to the same end.

`golden/checkpoint` was written at commit 776c663 (version 0.1.0, TensorFlow 2.17) by `train` below,
stopped in the second of two epochs, in the sync after 4 of its 6 minibatches; `golden/end.npz` is
what the same program had in the end without a stop.
"""

import shutil
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfpara

GOLDEN = Path(__file__).with_name("golden")
TAU, STEPS = 2, 6


def make(seed):
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(0.5),
        sync_period=TAU,
        devices=["CPU:0", "CPU:1"],
        averages={"ema": tfpara.EMA(0.8), "ma": tfpara.MA()},
    )
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dropout(0.3, seed=5),
                keras.layers.Dense(4),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return strategy, model


def minibatch(epoch, number):
    rng = np.random.default_rng([epoch, number])
    return rng.normal(size=(4, 6)).astype("float32"), rng.integers(0, 4, 4).astype("int32")


def data(strategy, log):
    def of_this_worker(epoch, first):
        mine = list(range(first, 2 * STEPS))
        log.append((epoch, first))
        x, y = zip(*(minibatch(epoch, k) for k in mine), strict=True)
        return tf.data.Dataset.from_tensor_slices((np.array(x), np.array(y)))

    return strategy.datasets_by_epoch(of_this_worker)


def everything(strategy, model):
    found = []
    for which in ("local", "global", *strategy.averages):
        with strategy.weights(model, which):
            for variable in model.variables:
                found += [c.numpy() for c in strategy.experimental_local_results(variable.value)]
    for variable in model.optimizer.variables:
        found += [c.numpy() for c in strategy.experimental_local_results(variable.value)]
    return found


def train(directory, seed, *callbacks):
    strategy, model = make(seed)
    log = []
    checkpoint = tfpara.callbacks.Checkpoint(directory, every_syncs=1, keep=1)
    model.fit(data(strategy, log), epochs=2, verbose=0, callbacks=[*callbacks, checkpoint])
    return everything(strategy, model), log, strategy


def test_a_run_of_an_earlier_version_goes_on_to_the_same_end(tmp_path):
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "run")
    found, log, strategy = train(tmp_path / "run", seed=9)
    assert log[-1] == (1, 2 * 4)
    assert strategy.statistics().steps == 2 * STEPS
    expected = np.load(GOLDEN / "end.npz")
    assert len(found) == len(expected.files)
    for value, name in zip(found, expected.files, strict=True):
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
