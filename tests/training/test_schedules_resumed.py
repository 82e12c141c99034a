"""Schedules in runs that are killed and go on from a checkpoint, against uninterrupted ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.small import strategy_of
from tfpara.callbacks import Checkpoint
from tfpara.callbacks.schedule import LearningRate, SyncPeriod
from tfpara.callbacks.stopping import Newbob, OverfittingGuard
from tfpara.callbacks.warm_start import WarmStart
from tfpara.schedules import AdaComm, Hand, NewbobRule
from tfpara.steps import without_tuner

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("float32")
Y = X[:, :3].argmax(1)
STEPS, EPOCHS = 8, 4  # minibatches of 4 for each of two replicas


def plain(first, end):
    return without_tuner(tf.data.Dataset.from_tensor_slices((X[first:end], Y[first:end])).batch(8))


def by_position():
    return [
        SyncPeriod({0: 2, 1: 4, 3: 1}, verbose=0),
        LearningRate(Hand(0.5, STEPS, factor=0.9), steps_per_epoch=STEPS),
    ]


def by_the_last_rate():
    """A run that is resumed begins an epoch again, and callbacks are told so once more."""

    class Fade(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.9 * float(self.model.optimizer.learning_rate)

    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate), Fade()]


def by_scores():
    guard = OverfittingGuard("loss", "validation_loss")
    newbob = Newbob(plain(0, 24), rule=NewbobRule(start=0.2, stop=0.0), verbose=0)
    return [
        WarmStart(verbose=0),
        newbob,
        guard,
        SyncPeriod(AdaComm(4), verbose=0),
    ]


class Killed(Exception):
    pass


def run(directory, schedules, known, kill=None):
    """One process of the run; what it ends with, or None where it was killed.

    `known`: whether Keras knows the number of steps in an epoch.
    """
    strategy = strategy_of(2, tfpara.BMUF(0.5))
    keras.utils.set_random_seed(len(list(directory.glob("checkpoint-*"))))
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.5), loss)
    schedules = schedules()
    warm = schedules[0] if isinstance(schedules[0], WarmStart) else WarmStart(epochs=0)

    def of_this_worker(epoch, first):
        count, mine = warm.replicas(strategy, epoch)
        order = np.random.default_rng(epoch).permutation(16)[: STEPS if count == 1 else 16]
        chosen = order.reshape(-1, count)[first // count :, mine].ravel()
        minibatches = np.reshape(X, (16, 4, 4))[chosen], np.reshape(Y, (16, 4))[chosen]
        return warm.to_every_replica(
            strategy, epoch, tf.data.Dataset.from_tensor_slices(minibatches)
        )

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == kill:
                raise Killed

        def on_epoch_end(self, epoch, logs=None):
            if (epoch, "end") == kill:
                raise Killed

    checkpoint = Checkpoint(directory, every_syncs=1)
    data = plain(0, 64) if known else strategy.datasets_by_epoch(of_this_worker)
    callbacks = [Kill(), *schedules, checkpoint]
    try:
        log = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    except Killed:
        checkpoint._checkpoints.store.release()  # as the end of the process would
        return None
    checkpoint._checkpoints.store.release()
    first = strategy.experimental_local_results
    variables = [*model.variables, *model.optimizer.variables]
    states = [s.get_state() for s in schedules if hasattr(s, "get_state")]
    return [c.numpy() for v in variables for c in first(v.value)], states, log["learning_rate"]


@pytest.mark.nightly_cases("by scores", "by the last rate", "unknown length")
@pytest.mark.parametrize(
    ("schedules", "known", "kills"),
    [
        (by_position, True, [(1, 5), (3, "end")]),
        (by_position, False, [(1, 5)]),
        (by_the_last_rate, False, [(1, 5), (2, 0)]),
        (by_scores, False, [(0, 3), (2, 4)]),
    ],
    ids=["by position", "unknown length", "by the last rate", "by scores"],
)
def test_a_resumed_run_has_the_schedule_of_an_uninterrupted_one(tmp_path, schedules, known, kills):
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    weights, states, rates = run(tmp_path / "whole", schedules, known)
    for kill in kills:
        assert run(tmp_path / "broken", schedules, known, kill) is None
    resumed_weights, resumed_states, resumed_rates = run(tmp_path / "broken", schedules, known)
    assert len(set(rates)) > 1
    assert resumed_rates == rates[kills[-1][0] :]
    assert resumed_states == states
    for got, want in zip(resumed_weights, weights, strict=True):
        np.testing.assert_array_equal(got, want)
