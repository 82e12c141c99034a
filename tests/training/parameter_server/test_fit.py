"""`AsyncStrategy.fit` beside Keras' own, and what happens in the middle of it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.parameter_server import models

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


@pytest.mark.nightly_cases("class_weight-validation_data-validation_batch_size-initial_epoch")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "sample_weight": WEIGHTS,
            "validation_data": (X[:20], Y[:20]),
            "validation_freq": 2,
        },
        {
            "class_weight": {0: 1.0, 1: 3.0, 2: 0.5},
            "validation_data": (X[:20], Y[:20], WEIGHTS[:20]),
            "validation_batch_size": 10,
            "initial_epoch": 2,
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_worker_has_the_history_of_keras(options):
    notes, hooks = ([], []), keras.callbacks.Callback()
    model = compiled()
    hooks.on_test_batch_end = lambda batch, logs: notes[0].append(batch)
    wanted = model.fit(X, Y, epochs=4, callbacks=[hooks], **settings(**options))
    strategy, own = made()
    hooks.on_test_batch_end = lambda batch, logs: notes[1].append(batch)
    got = strategy.fit(own, X, Y, epochs=4, chunks=1, callbacks=[hooks], **settings(**options))
    assert notes[0] == notes[1]
    assert got is own.history
    assert got.epoch == wanted.epoch
    assert set(got.history) == set(wanted.history)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-4, err_msg=name)
    for mine, theirs in zip(own.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


class Named(keras.metrics.CategoricalAccuracy):
    def result(self):
        return {"right": super().result()}


@pytest.mark.nightly
def test_metrics_of_several_values_are_in_the_history_as_by_keras():
    histories = []
    for strategy, model in ((None, compiled()), made()):
        loss = keras.losses.CategoricalCrossentropy()
        metrics = [keras.metrics.F1Score(), Named()]
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
        fit, chunks = (strategy.fit, {"chunks": 1}) if strategy else (keras.Model.fit, {})
        history = fit(model, X, np.eye(3)[Y], epochs=2, **settings(**chunks)).history
        histories.append(np.column_stack([history["f1_score"], history["right"]]))
    assert histories[0].shape == (2, 4)
    np.testing.assert_allclose(*histories, rtol=1e-5)


@pytest.mark.nightly
def test_inputs_of_any_length_are_trained_on_as_by_keras():
    """Longer than the window of a convolution, but not of a length that the dataset knows."""
    x = np.random.default_rng(3).normal(size=(24, 9, 4)).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, Y[:24]))
    rows = rows.padded_batch(BATCH, padded_shapes=([None, 4], []))
    strategy = tfpara.simulate_async(1, tfpara.ASGD())
    ends = []
    for scope, fit in (
        (contextlib.nullcontext(), keras.Model.fit),
        (strategy.scope(), strategy.fit),
    ):
        keras.utils.set_random_seed(7)
        window = keras.layers.Conv1D(3, 5)
        last = [keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(3, "softmax")]
        with scope:
            model = keras.Sequential([keras.Input((None, 4)), window, *last])
            loss = "sparse_categorical_crossentropy"
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        ends.append([fit(model, rows, verbose=0).history["loss"], *model.get_weights()])
    for got, wanted in zip(*ends, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_datasets_train_like_arrays():
    weights = []
    for x, y in ((X, Y), (tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), None)):
        strategy, model = made()
        options = settings() if y is not None else {"verbose": 0}
        strategy.fit(model, x, y, chunks=1, **options)
        weights.append(model.get_weights())
    for mine, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture
def every_push(monkeypatch):
    """The main thread looks as often as it can."""
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)


class Tally(keras.layers.Layer):
    """Has a weight for each sample, whose sum over a minibatch it gives."""

    def build(self, shape):
        self.times = self.add_weight(shape=(40,), initializer="zeros", name="times")

    def call(self, numbers):
        return tf.gather(self.times, numbers)


def tallied(workers, servers=1, **options):
    """A strategy, and a model whose weights are how often each of 40 samples was trained on."""
    strategy = tfpara.simulate_async(workers, tfpara.ASGD(), **options)
    strategy._processes.server_devices = tuple(f"CPU:{k}" for k in range(servers))
    with strategy.scope():
        x = keras.Input((), dtype="int64")
        model = keras.Model(x, keras.layers.Add()([Tally()(x), Tally()(x)]))
        model.compile(keras.optimizers.SGD(1.0), lambda y, out: -tf.reduce_sum(out))
    return strategy, model


def shuffled():
    samples = tf.data.Dataset.range(40).map(lambda k: (k, tf.cast(k, tf.float32)))
    return samples.shuffle(40).batch(3)


def test_a_shuffled_dataset_trains_each_sample_once_in_each_epoch(every_push):
    """Also where workers pause in the middle of an epoch, and read their chunks anew after it."""
    strategy, model = tallied(3, servers=2)
    seen, pauses = [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if 3 <= batch < 9:
                with strategy.running.paused():
                    pauses.append(batch)

        def on_epoch_end(self, epoch, logs=None):
            seen.append(model.get_weights())

    for _ in range(2):
        strategy.fit(model, shuffled(), epochs=2, verbose=0, callbacks=[Look()])
    assert len(pauses) >= 4
    for number, weights in enumerate(seen):
        for weight in weights:
            np.testing.assert_array_equal(weight, number + 1.0)


@pytest.mark.nightly
def test_every_epoch_and_every_fit_has_an_order_of_its_own():
    """One worker, from the same weights: only the order of the data can make a difference."""
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X)).batch(BATCH)

    def ends(data, **options):
        strategy, model = made()
        strategy.fit(model, *data, epochs=1, verbose=0, **options)
        go_back = strategy.snapshot(model)
        found = []
        for first in (0, 1, 0):
            strategy.fit(model, *data, initial_epoch=first, epochs=first + 1, verbose=0, **options)
            found.append(model.get_weights()[0])
            go_back()
        return found

    for data, options in (((rows,), {}), ((X, Y), {"batch_size": BATCH})):
        once, again = ends(data, **options), ends(data, **options)
        np.testing.assert_array_equal(once, again)
        for k in range(3):
            assert not np.array_equal(once[k], once[k - 1])


@pytest.mark.nightly
def test_a_dataset_that_is_another_one_each_time_ends_the_run():
    strategy, model = tallied(3)
    now_and_then = lambda k, y: tf.math.floormod(tf.timestamp() * 1e6, 2.0) < 1.0  # noqa: E731
    samples = tf.data.Dataset.range(400).map(lambda k: (k % 40, 0.0))
    some = samples.filter(now_and_then).batch(1)
    with pytest.raises(ValueError, match="not the same each time .* in epoch .* its 3 chunks had"):
        strategy.fit(model, some, epochs=20, verbose=0)


@pytest.mark.nightly
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


class Once(keras.callbacks.Callback):
    """Calls a function of the model and the pushes at the first look within an epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        strategy = self.model.distribute_strategy
        if self.function and strategy.running.chunks_done < strategy.running.chunks.count:
            function, self.function = self.function, None
            function(self.model)


def same_as_the_servers(strategy, model):
    theirs = strategy._models.of(model).server.weights_at_once(["global"]).weights["global"]
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


@pytest.mark.nightly
def test_a_pause_stands_still_and_loses_nothing(every_push):
    seen = []

    def pause(model):
        strategy = model.distribute_strategy
        with strategy.running.paused():
            server = strategy._models.of(model).server
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


@pytest.mark.nightly
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


def test_a_fit_within_a_fit_leaves_the_outer_one_as_it_is():
    seen = []

    def another(epoch, logs):
        outer = strategy.running
        strategy.fit(inner, X, Y, **settings())
        seen.append(strategy.running is outer)

    strategy, model = made(2)
    with strategy.scope():
        inner = compiled()
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=another)]
    strategy.fit(model, X, Y, epochs=2, callbacks=callbacks, **settings())
    assert seen == [True, True]
    assert strategy.running is None
    assert strategy.statistics(model).pushes == strategy.statistics(inner).pushes == 2 * MINIBATCHES


@pytest.mark.nightly
def test_an_order_that_is_not_this_runs_is_refused():
    first, model = made(2)
    first.fit(model, X, Y, chunks=4, **settings())
    record = first.record(model)
    same, again = made(2, order=record)
    same.fit(again, X, Y, chunks=4, **settings())
    assert same.record(again) == record
    for options, told in (
        ({"epochs": 2}, "has ended|no pull"),
        ({"chunks": 3}, "no pull|has nothing to push|has ended"),
    ):
        other, model = made(2, order=record)
        with pytest.raises(ValueError, match=f"record of another run: .*({told})"):
            other.fit(model, X, Y, **settings(**{"chunks": 4, **options}))
    with pytest.raises(ValueError, match="pushes of worker 1, and there are 1 workers"):
        made(1, order=record)


@pytest.mark.nightly
def test_a_dataset_of_unknown_length_is_for_all_workers():
    strategy, model = made(3)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).filter(lambda x, y: True)
    strategy.fit(model, data, verbose=0)
    assert (strategy.statistics(model).by_worker > 0).all()
    assert strategy.statistics(model).pushes == MINIBATCHES


@pytest.mark.nightly
def test_the_chief_reads_its_data_without_the_tuner(monkeypatch):
    strategy, model = made()
    data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(4)
    whole, read = tf.distribute.OneDeviceStrategy.experimental_distribute_dataset, []

    def noted(self, dataset, options=None):
        read.append(dataset.options().autotune.enabled)
        return whole(self, dataset, options)

    monkeypatch.setattr(tf.distribute.OneDeviceStrategy, whole.__name__, noted)
    strategy.fit(model, X, Y, **settings(validation_data=data))
    model.predict(X[:8], verbose=0)
    assert read == [False, False]


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(keras.config, "max_epochs"), reason="Keras has no limits yet")
@pytest.mark.parametrize("kind", ["arrays", "dataset", "chunks"])
def test_the_limits_of_keras_for_a_quick_try_hold(kind, request):
    request.addfinalizer(lambda: keras.config.set_max_epochs(None))
    request.addfinalizer(lambda: keras.config.set_max_steps_per_epoch(None))
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(4)
    strategy, model = made(3)
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    data = {
        "arrays": (X, Y),
        "dataset": (rows,),
        "chunks": (tfpara.Chunks(3, lambda epoch, chunk: rows.shard(3, chunk)),),
    }[kind]
    options = settings() if kind == "arrays" else {"verbose": 0}
    with pytest.warns(UserWarning, match="limit: max_"):
        history = strategy.fit(model, *data, epochs=5, **options)
    assert history.epoch == [0, 1]
    assert strategy.statistics(model).samples == 2 * 4 * BATCH


@pytest.mark.nightly
def test_validation_frequencies_are_those_of_keras():
    strategy, model = made()
    for every, epochs in [(1, [0, 1, 2]), (2, [1]), ([1, 3], [0, 2])]:
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, s=seen: s.append(epoch) if "val_loss" in logs else None
        )
        options = settings(validation_data=(X[:8], Y[:8]), validation_freq=every, callbacks=[note])
        strategy.fit(model, X, Y, epochs=3, **options)
        assert seen == epochs


def test_other_validation_frequencies_are_refused():
    strategy, model = made()
    for every in (0, 1.5, True, None):
        with pytest.raises(ValueError, match=f"validation_freq={every}"):
            strategy.fit(model, X, Y, validation_data=(X, Y), validation_freq=every, **settings())
    assert strategy.statistics(model).pushes == 0


def test_validation_data_for_one_epoch_or_without_end_are_refused():
    strategy, model = made()
    endless = tf.data.Dataset.from_tensors((X[:8], Y[:8])).repeat()
    for kind, data, told in (
        (TypeError, iter([(X, Y)]), "validation_data is a list_iterator, which gives its batches"),
        (ValueError, endless, "dataset of validation_data is infinite"),
    ):
        with pytest.raises(kind, match=told):
            strategy.fit(model, X, Y, validation_data=data, **settings())
    assert strategy.statistics(model).pushes == 0


def test_a_model_that_was_not_trained_has_no_statistics():
    strategy, model = made()
    for call in (strategy.statistics, lambda: strategy.statistics(model), strategy.record):
        with pytest.raises(ValueError, match="not been trained yet"):
            call()


@pytest.mark.nightly
def test_frozen_weights_and_statistics_that_are_set_between_fits_are_used():
    strategy = tfpara.simulate_async(1, tfpara.ASGD())
    with strategy.scope():
        frozen = keras.layers.Dense(4, trainable=False)
        layers = [frozen, keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    y = np.eye(3, dtype="float32")[Y]
    first = strategy.fit(model, X, y, **settings()).history["loss"]
    frozen.set_weights([np.zeros((6, 4)), np.ones(4)])
    second = strategy.fit(model, X, y, **settings()).history["loss"]
    assert second != first
    assert second[0] == pytest.approx(float(np.mean(y**2)), rel=1e-5)  # of a constant, normalised
    moving = model.layers[1].moving_mean
    moving.assign(np.full(4, 7.0))
    with strategy.weights(model, "global"):
        pass
    np.testing.assert_array_equal(moving, 7.0)


def test_a_weight_that_is_too_large_for_a_message_is_named(monkeypatch):
    strategy, model = made()
    monkeypatch.setattr(strategy._processes, "is_simulated", False)
    monkeypatch.setattr(models, "LARGEST_BYTES", 70)
    with pytest.raises(ValueError, match=r"kernel' has 0.0 GB, .* less than 2 GB. Divide it"):
        strategy.fit(model, X, Y, **settings())


def test_a_rate_by_staleness_needs_a_rate():
    strategy = tfpara.simulate_async(1, tfpara.ASGD(rate_by_staleness=True))
    with strategy.scope():
        model = compiled()
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
        model.compile(keras.optimizers.SGD(decay), "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="rate_by_staleness=True divides"):
        strategy.fit(model, X, Y, **settings())


def test_data_without_a_minibatch_are_refused():
    strategy, model = made()
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    for empty in (rows.take(0), rows.filter(lambda x, y: tf.reduce_any(y < 0))):
        with pytest.raises(ValueError, match="epoch 0 had no minibatch: the dataset is empty"):
            strategy.fit(model, empty, verbose=0)


@pytest.mark.nightly
def test_periods_and_chunks_that_do_not_fit_are_refused():
    strategy, model = made(1, sync_period=4)
    with pytest.raises(ValueError, match="seed=-1 must be a whole number"):
        made(seed=-1)
    with pytest.raises(ValueError, match="there are no arrays in x"):
        strategy.fit(model, [], Y)
    with pytest.raises(ValueError, match="sync_period=4 exceeds the 3 minibatches of a chunk"):
        strategy.fit(model, X, Y, chunks=4, **settings())
    with pytest.raises(ValueError, match="chunks"):
        strategy.fit(model, X, Y, chunks=0, **settings())
    strategy.fit(model, X, Y, chunks=3, **settings())
    assert strategy.statistics(model).pushes == 3
    with pytest.raises(ValueError, match="exceeds the 2 minibatches.* Give a shorter period.$"):
        strategy.fit(model, X[:16], Y[:16], **settings())
    with strategy.scope(), pytest.raises(ValueError, match="inside of `with strategy.scope"):
        strategy.fit(model, X, Y)


@pytest.mark.nightly
def test_a_chunk_has_at_least_the_minibatches_of_a_push():
    strategy, model = made(2, sync_period=5)
    strategy.fit(model, X, Y, **settings())
    assert [push.chunk for push in strategy.record(model)].count(0) == 2  # of 5 and 1 minibatches
    assert strategy.statistics(model).pushes == 4
