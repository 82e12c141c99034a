"""`AsyncStrategy.fit` beside Keras' own, and what happens in the middle of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara

X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
Y = (X @ np.random.default_rng(1).normal(size=(6, 3))).argmax(1)
BATCH = 8
MINIBATCHES = len(X) // BATCH


def compiled():
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.5),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="entropy")],
    )
    return model


def made(workers=1, **options):
    strategy = tfpara.simulate_async(workers, tfpara.ASGD(), **options)
    with strategy.scope():
        model = compiled()
    return strategy, model


def settings(**more):
    return {"batch_size": BATCH, "shuffle": False, "verbose": 0, **more}


WEIGHTS = np.random.default_rng(2).uniform(0.0, 2.0, size=len(X)).astype("float32")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sample_weight": WEIGHTS},
        {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
        {"validation_data": (X[:20], Y[:20]), "validation_freq": 2, "validation_batch_size": 10},
        {"validation_data": (X[:20], Y[:20], WEIGHTS[:20])},
        {"initial_epoch": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_worker_has_the_history_of_keras(options):
    model = compiled()
    wanted = model.fit(X, Y, epochs=4, **settings(**options))
    strategy, own = made()
    got = strategy.fit(own, X, Y, epochs=4, chunks=1, **settings(**options))
    assert got is own.history
    assert got.epoch == wanted.epoch
    assert set(got.history) == set(wanted.history)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-4, err_msg=name)
    for mine, theirs in zip(own.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_datasets_train_like_arrays():
    weights = []
    for x, y in ((X, Y), (tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), None)):
        strategy, model = made()
        options = settings() if y is not None else {"verbose": 0}
        strategy.fit(model, x, y, chunks=1, **options)
        weights.append(model.get_weights())
    for mine, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_lines_are_printed_as_by_keras(capsys):
    strategy, model = made(2)
    strategy.fit(model, X, Y, epochs=2, **settings(verbose=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if "/" in line]
    assert [line.split()[0] for line in lines] == ["Epoch", "12/12", "Epoch", "12/12"]
    assert "accuracy: " in lines[1] and "loss: " in lines[1]
    strategy.fit(model, X, Y, **settings(verbose=1))
    assert "━" in capsys.readouterr().out
    strategy.fit(model, X, Y, **settings(verbose=0))
    assert capsys.readouterr().out == ""


@pytest.fixture
def every_push(monkeypatch):
    """The main thread looks as often as it can."""
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)


class Once(keras.callbacks.Callback):
    """Calls a function of the model and the pushes at the first look within an epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        strategy = self.model.distribute_strategy
        if self.function and strategy.running.chunks_done < strategy.running.num_chunks:
            function, self.function = self.function, None
            function(self.model)


def same_as_the_servers(strategy, model):
    theirs = strategy._servers[model][0].global_weights()
    for mine, there in zip(model.trainable_variables, theirs, strict=True):
        np.testing.assert_array_equal(mine.numpy(), there.numpy())


def test_training_that_is_stopped_in_an_epoch_ends_with_whole_pushes(every_push):
    def stop(model):
        model.stop_training = True

    strategy, model = made(2)
    history = strategy.fit(model, X, Y, epochs=5, callbacks=[Once(stop)], **settings())
    counted = strategy.statistics(model)
    assert len(history.epoch) == 1
    assert 0 < counted.pushes < MINIBATCHES
    assert counted.samples == BATCH * counted.pushes
    same_as_the_servers(strategy, model)
    # The next fit begins an epoch of its own.
    strategy.fit(model, X, Y, **settings())
    assert strategy.statistics(model).pushes == counted.pushes + MINIBATCHES


def test_a_pause_stands_still_and_loses_nothing(every_push):
    seen = []

    def pause(model):
        strategy = model.distribute_strategy
        with strategy.running.paused():
            server = strategy._servers[model][0]
            first = [v.numpy() for v in server.variables().values()]
            seen.append(strategy.statistics(model).pushes)
            later = [v.numpy() for v in server.variables().values()]
        for a, b in zip(first, later, strict=True):
            np.testing.assert_array_equal(a, b)

    strategy, model = made(3)
    strategy.fit(model, X, Y, epochs=2, callbacks=[Once(pause)], **settings())
    assert 0 < seen[0] < MINIBATCHES
    counted = strategy.statistics(model)
    assert counted.pushes == counted.staleness.sum() == 2 * MINIBATCHES
    assert counted.samples == 2 * len(X)


def test_an_error_in_a_callback_leaves_the_servers_weights_in_the_model(every_push):
    def fail(model):
        raise OSError("no room on the disk")

    strategy, model = made(2)
    before = model.get_weights()
    with pytest.raises(OSError, match="no room"):
        strategy.fit(model, X, Y, callbacks=[Once(fail)], **settings())
    assert strategy.running is None
    same_as_the_servers(strategy, model)
    assert not np.array_equal(model.get_weights()[0], before[0])
    strategy.fit(model, X, Y, **settings())  # and the workers are free


def test_periods_and_chunks_that_do_not_fit_are_refused():
    strategy, model = made(1, sync_period=4)
    with pytest.raises(ValueError, match="sync_period=4 exceeds the 3 minibatches of a chunk"):
        strategy.fit(model, X, Y, chunks=4, **settings())
    with pytest.raises(ValueError, match="chunks"):
        strategy.fit(model, X, Y, chunks=0, **settings())
    strategy.fit(model, X, Y, chunks=3, **settings())
    assert strategy.statistics(model).pushes == 3
