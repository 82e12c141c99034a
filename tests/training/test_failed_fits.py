"""What a `fit` that fails leaves to the next one in the same process: the model, and no more.

Checkpoint has a test of its own in test_checkpoint.py.
"""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.small import compiled_net, strategy_of
from tfpara import fit_call
from tfpara.callbacks import (
    Checkpoint,
    Preempted,
    StopTogether,
    SyncPeriod,
    Trace,
    WarmStart,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype("float32")
STEPS, TAU = 12, 5  # minibatches of each replica; the last block of an epoch is not whole


@pytest.fixture
def made():
    strategy = strategy_of(2, tfpara.BMUF(0.5), sync_period=TAU)
    keras.utils.set_random_seed(1)
    return strategy, compiled_net(strategy, 4, 3, optimizer=lambda: keras.optimizers.SGD(0.1))


def fit(model, *callbacks, epochs=1):
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :3])).batch(8)
    model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))


def failing(batch):
    def fail(number, logs):
        if number == batch:
            raise ZeroDivisionError

    return keras.callbacks.LambdaCallback(on_train_batch_end=fail)


def interrupting(batch):
    def interrupt(number, logs):
        if number == batch:
            raise KeyboardInterrupt

    return keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)


def syncs(strategy):
    return strategy.statistics().syncs


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "again"), [(TAU - 1, True), (TAU + 1, False)])
def test_after_a_warm_start_that_failed_replicas_sync(made, batch, again):
    strategy, model = made
    with pytest.raises(ZeroDivisionError):
        fit(model, WarmStart(verbose=0), failing(batch))
    assert syncs(strategy) == 0
    assert strategy.sync_period == TAU
    if again:
        fit(model, WarmStart(verbose=0), epochs=2)
    else:
        fit(model)
    assert strategy.sync_period == TAU
    # The block that was open, then two whole ones and the rest of the epoch.
    assert syncs(strategy) == 4 if again else syncs(strategy) >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["broadcast_replica", "set_sync_period"])
def test_after_a_warm_start_whose_end_fails_replicas_sync(made, monkeypatch, method):
    strategy, model = made
    call = getattr(strategy, method)

    def interrupted(*arguments):
        if arguments != (None,):  # as where the warm epoch begins
            raise KeyboardInterrupt
        call(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(strategy, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(model, WarmStart(verbose=0), epochs=2)
    assert strategy.sync_period == TAU


@pytest.mark.nightly
def test_a_wish_to_end_that_was_granted_is_not_that_of_the_next_fit(made, tmp_path):
    strategy, model = made

    def ask(number, logs):
        if strategy.statistics().steps < STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(Preempted):
        fit(model, keras.callbacks.LambdaCallback(on_train_batch_end=ask), checkpoint, epochs=2)
    assert strategy.statistics().steps < STEPS
    fit(model, checkpoint, epochs=2)  # caught, and gone on with


@pytest.mark.nightly
def test_after_a_failure_inside_a_block_a_schedule_of_periods_begins_anew(made):
    strategy, model = made
    with pytest.raises(ZeroDivisionError):
        fit(model, SyncPeriod({0: 4}, verbose=0), failing(5))
    assert strategy.synchronizer_of(model).agreement().block_open
    before = syncs(strategy)
    fit(model, SyncPeriod({0: 3}, verbose=0))
    assert syncs(strategy) - before == 1 + STEPS // 3


@pytest.mark.nightly
def test_a_wish_to_stop_is_not_that_of_the_next_fit(made):
    strategy, model = made

    def wish(batch, logs):
        model.stop_training = True

    wishing = keras.callbacks.LambdaCallback(on_train_batch_end=wish)
    with pytest.raises(ZeroDivisionError):
        fit(model, wishing, StopTogether(), failing(2))
    before = strategy.statistics().steps
    fit(model, StopTogether(), epochs=2)
    assert strategy.statistics().steps - before == 2 * STEPS


@pytest.mark.nightly
def test_the_profiler_is_free_again(made, tmp_path):
    _, model = made
    with pytest.raises(ZeroDivisionError):
        fit(model, Trace(tmp_path, steps=(1, 8)), failing(4))
    fit(model, Trace(tmp_path, steps=(1, 3)))
    assert (tmp_path / "timeline.json").exists()


class Calls(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ended = 0

    def end(self):
        self.ended += 1

    def on_train_begin(self, logs=None):
        fit_call.at_end(self.end)

    def on_train_batch_end(self, batch, logs=None):
        """Where all callbacks lack this one, Keras calls it in a thread of its own."""


HOOKS = ("on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_test_end", "on_epoch_end")


def test_the_end_of_a_call_is_noticed_wherever_it_fails(made):
    """One hook after the other on the same model, which is traced once."""
    _, model = made

    def fail(*_, **__):
        raise ZeroDivisionError

    for hook in HOOKS:
        calls = Calls()
        spoiling = keras.callbacks.LambdaCallback()
        setattr(spoiling, hook, fail)
        with pytest.raises(ZeroDivisionError):
            model.fit(
                X, X[:, :3], validation_data=(X, X[:, :3]), verbose=0, callbacks=[calls, spoiling]
            )
        assert calls.ended == 1, hook


def test_the_end_of_a_call_is_noticed_where_a_step_fails(made):
    _, model = made

    def spoilt(x, y):
        return x, tf.debugging.check_numerics(y, "no number")

    calls = Calls()
    wanted = X[:, :3].copy()
    wanted[40:] = np.nan  # not at once: Keras looks at a first batch before it calls callbacks
    data = tf.data.Dataset.from_tensor_slices((X, wanted)).batch(8).map(spoilt)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        model.fit(data, verbose=0, callbacks=[calls, Calls()])
    assert calls.ended == 1
    fit(model, calls)  # goes well
    assert calls.ended == 2


@pytest.mark.nightly
def test_the_end_of_a_call_is_noticed_while_its_error_is_held(made):
    _, model = made
    calls, seen = Calls(), []
    try:
        fit(model, calls, failing(3))
    except ZeroDivisionError:
        seen.append(calls.ended)
    try:
        fit(model, calls, interrupting(3))
    except KeyboardInterrupt:
        seen.append(calls.ended)
    assert seen == [1, 2]


def test_a_fit_within_a_fit_has_an_end_of_its_own(made):
    _, model = made
    inner, outer, seen = Calls(), Calls(), []
    plain = compiled_net(None, 4, 3)

    def another(epoch, logs):
        plain.fit(X, X[:, :3], verbose=0, callbacks=[inner])
        seen.append((inner.ended, outer.ended))

    fit(model, outer, keras.callbacks.LambdaCallback(on_epoch_end=another))
    assert seen == [(1, 0)]
    assert (inner.ended, outer.ended) == (1, 1)


def test_a_fit_that_fails_within_a_fit_leaves_the_outer_one_as_it_is():
    def another(epoch, logs):
        with pytest.raises(ValueError, match="cardinality"):
            inner.fit(X, X[:16, :3], verbose=0)

    weights = []
    for callbacks in ([], [keras.callbacks.LambdaCallback(on_epoch_end=another)]):
        strategy = strategy_of(2, tfpara.BMUF(0.5), sync_period=TAU)
        keras.utils.set_random_seed(1)
        outer, inner = (compiled_net(strategy, 4, 3) for _ in range(2))
        outer.fit(X, X[:, :3], batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        weights.append(outer.get_weights())
    for with_inner, alone in zip(*weights, strict=True):
        np.testing.assert_array_equal(with_inner, alone)


@pytest.mark.nightly
def test_metrics_are_reset_without_the_other_workers(made, monkeypatch):
    """So that one which begins a `fit` alone, after a failure, does not wait for them."""
    strategy, model = made
    fit(model)
    variables = [v.value for v in model.metrics_variables]
    assert any(c.numpy() for v in variables for c in strategy.experimental_local_results(v))

    def fail(*_):
        raise AssertionError("a reduction over all workers")

    monkeypatch.setattr(strategy.extended.metrics, "over_all", fail)
    monkeypatch.setattr(strategy.extended.models, "finish_blocks", fail)
    model.reset_metrics()
    for variable in variables:
        for component in strategy.experimental_local_results(variable):
            np.testing.assert_array_equal(component, np.zeros(component.shape))
