"""Tests of tfpara/callbacks.py."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.small import compiled_net, strategy_of
from tfpara import fit_call
from tfpara.callbacks.scalars import Scalars

PERIOD, BATCH, COUNT = 3, 8, 100  # 13 steps: four blocks and an open one
RNG = np.random.default_rng(0)
X = RNG.normal(size=(COUNT, 4)).astype(np.float32)
Y = RNG.integers(0, 3, COUNT)


def make_model(strategy=None):
    made = {"optimizer": lambda: keras.optimizers.SGD(0.5), "loss": "classes"}
    return compiled_net(strategy, 4, 3, **made, metrics=["accuracy"])


@pytest.fixture
def elastic():
    """A strategy whose global model is not its local one, even with one replica."""
    return tfpara.PeriodicSyncStrategy(tfpara.EASGD(0.1), sync_period=PERIOD)


@pytest.mark.nightly
def test_callbacks_run_after_those_that_they_need(elastic, tmp_path):
    """Given in the opposite order, a checkpoint and a log have what all others have done."""
    best, log = tmp_path / "best.keras", tmp_path / "log.csv"
    own, rates = keras.callbacks.LambdaCallback(), []
    see = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: rates.append(float(model.optimizer.learning_rate.numpy()))
    )
    stop, held_out = tfpara.callbacks.StopTogether(), tfpara.callbacks.HeldOut((X, Y))
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run")
    rate = tfpara.callbacks.LearningRate(lambda epoch: 0.25 / (1 + epoch))
    keras_own = [
        keras.callbacks.ModelCheckpoint(
            best, monitor="validation_loss", mode="min", save_best_only=True
        ),
        keras.callbacks.CSVLogger(log),
    ]
    given = [stop, checkpoint, *keras_own, see, own, held_out, rate]
    assert fit_call.arranged(given) == [rate, held_out, *keras_own, see, own, checkpoint, stop]
    model = make_model(elastic)
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=given)
    assert rates == [0.25, 0.125]
    assert best.exists()
    rows = list(csv.DictReader(log.open()))
    assert len(rows) == 2 and all("validation_loss" in r and "learning_rate" in r for r in rows)


def scalars(directory):
    """{tag: {step: value}} of all event files."""
    found = {}
    for path in directory.glob("events.out.tfevents.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, {})[event.step] = number
    return found


@pytest.mark.parametrize("which", ["global", "local"])
def test_held_out_scores_the_weights_asked_for(elastic, which):
    keras.utils.set_random_seed(1)  # by chance both losses could be the same
    model = make_model(elastic)
    held_out = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(8)
    other = {"global": "local", "local": "global"}[which]
    log = model.fit(
        X, Y, batch_size=BATCH, verbose=0, callbacks=[tfpara.callbacks.HeldOut(held_out, which)]
    ).history
    loss = {}
    for name in (which, other):
        with elastic.weights(model, name):
            logits = model(X[:20]).numpy().astype(np.float64)
        log_z = np.log(np.exp(logits).sum(1))
        loss[name] = float(np.mean(log_z - logits[np.arange(20), Y[:20]]))
    assert abs(loss[which] - loss[other]) > 1e-3
    assert log["validation_loss"][0] == pytest.approx(loss[which], abs=1e-5)
    assert set(log) >= {"validation_accuracy", "loss", "accuracy"}


@pytest.mark.parametrize("kind", ["plain", "two replicas"])
def test_held_out_takes_what_validation_data_takes(kind):
    """A dataset, arrays, and arrays with weights, whose loss is computed here."""
    strategy = None
    if kind == "two replicas":
        options = {"sync_period": PERIOD, "devices": ["CPU:0", "CPU:1"]}
        strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), **options)
    model = make_model(strategy)
    weight = np.linspace(0, 2, 20).astype(np.float32)
    forms = {
        "dataset": tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(8),
        "pair": (X[:20], Y[:20]),
        "list": [X[:20], Y[:20]],
        "triple": (X[:20], Y[:20], weight),
    }
    callbacks = [tfpara.callbacks.HeldOut(data, name=name) for name, data in forms.items()]
    newbob = tfpara.callbacks.Newbob(forms["pair"], name="newbob", verbose=0)
    log = model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[*callbacks, newbob]).history
    logits = model(X[:20]).numpy().astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(20), Y[:20]]
    for name in ("dataset", "pair", "list", "newbob"):
        assert log[f"{name}_loss"][0] == pytest.approx(np.mean(losses), abs=1e-5)
    if strategy is None:  # each replica divides by its own part
        assert log["triple_loss"][0] == pytest.approx(np.mean(losses * weight), abs=1e-5)


def test_held_out_works_without_a_strategy():
    model = make_model()
    callback = tfpara.callbacks.HeldOut(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), name="dev"
    )
    log = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[callback]).history
    assert log["dev_loss"][1] == pytest.approx(model.evaluate(X, Y, verbose=0)[0], abs=1e-5)


@pytest.mark.nightly
def test_a_metric_of_several_values_has_a_curve_and_a_column_for_each(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    targets = keras.utils.to_categorical(Y, 3)
    table = tmp_path / "scores.csv"
    callback = tfpara.callbacks.HeldOut((X, targets), log_dir=tmp_path, csv=table)
    log = model.fit(X, targets, verbose=0, callbacks=[callback]).history
    written = {tag.rpartition("f1")[2]: curve for tag, curve in scalars(tmp_path).items()}
    found = [float(*written[f"/{k}"].values()) for k in range(3)]
    np.testing.assert_allclose(found, log["validation_f1"][0], rtol=1e-6)
    assert np.ptp(found) > 0
    (row,) = csv.DictReader(table.open())
    np.testing.assert_allclose([float(row[f"f1/{k}"]) for k in range(3)], found, rtol=1e-6)


def test_all_weights_are_scored_within_epochs_and_training_goes_on_as_without(tmp_path):
    """Four times an epoch as in paper 000: at syncs, into a CSV file and TensorBoard."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(24 * BATCH, 4)).astype(np.float32)
    y = rng.integers(0, 3, len(x))
    held_out = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(8)
    logs, weights = [], []
    for scored in (False, True):
        keras.utils.set_random_seed(4)
        strategy = tfpara.PeriodicSyncStrategy(
            tfpara.BMUF(0.5), sync_period=PERIOD, averages={"ema": tfpara.EMA(0.5)}
        )
        model = make_model(strategy)
        callback = tfpara.callbacks.HeldOut(
            held_out, "all", times_per_epoch=4, csv=tmp_path / "scores.csv", log_dir=tmp_path
        )
        callbacks = [callback] if scored else []
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        logs.append(model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert logs[0]["loss"] == logs[1]["loss"]
    assert logs[0]["accuracy"] == logs[1]["accuracy"]
    names = {"validation_loss", "validation_local_accuracy", "validation_ema_loss"}
    assert names < set(logs[1])
    with (tmp_path / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # 24 steps: due after 6, 12 and 18, which are syncs.
    assert [float(r["epoch"]) for r in rows[::3]] == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert [int(r["syncs"]) for r in rows[::3]] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [r["weights"] for r in rows[:3]] == ["global", "local", "ema"]
    assert float(rows[-1]["loss"]) == logs[1]["validation_ema_loss"][-1]
    written = scalars(tmp_path)["validation/ema/loss"]
    assert written == pytest.approx({int(r["syncs"]): float(r["loss"]) for r in rows[2::3]})


@pytest.mark.nightly
def test_the_end_of_an_epoch_is_scored_once(tmp_path):
    """Its only sync is where the second half is due as well."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=8)
    held_out = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(8)
    callback = tfpara.callbacks.HeldOut(held_out, times_per_epoch=2, csv=tmp_path / "scores.csv")
    data = tf.data.Dataset.from_tensor_slices((X[:64], Y[:64])).batch(8)
    make_model(strategy).fit(data, epochs=2, verbose=0, callbacks=[callback])
    with (tmp_path / "scores.csv").open(newline="") as file:
        assert [float(row["epoch"]) for row in csv.DictReader(file)] == [1.0, 2.0]


@pytest.mark.nightly
def test_carried_states_go_on_as_without_scores_within_an_epoch():
    """A stateful layer's state after the scores is that before them."""
    x = RNG.normal(size=(8 * BATCH, 5, 4)).astype(np.float32)
    y = RNG.integers(0, 3, len(x))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    held_out = data.take(1).map(lambda x, y: (x + 1.0, y))
    weights = []
    for times in (1, 4):
        keras.utils.set_random_seed(4)
        strategy = strategy_of()
        with strategy.scope():
            layers = [keras.layers.SimpleRNN(6, stateful=True), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((5, 4), batch_size=BATCH // 2), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5), loss)
        callback = tfpara.callbacks.HeldOut(held_out, times_per_epoch=times)
        model.fit(data, verbose=0, callbacks=[callback])
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_held_out_refuses_what_there_is_not(elastic):
    with pytest.raises(ValueError, match="times_per_epoch=0"):
        tfpara.callbacks.HeldOut((X, Y), times_per_epoch=0)
    for none in (None, (None, None)):
        with pytest.raises(ValueError, match="held-out data are None"):
            tfpara.callbacks.HeldOut(none)
    for once in ((x for x in [X]), ((x for x in [X]), None)):
        with pytest.raises(ValueError, match="are a generator. It can be read only once"):
            tfpara.callbacks.HeldOut(once)
    model = make_model(elastic)
    unknown = tfpara.callbacks.HeldOut((X, Y), ["global", "ema"])
    with pytest.raises(ValueError, match="'ema'.*There are: local, global; or all"):
        model.fit(X, Y, verbose=0, callbacks=[unknown])
    stream = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).filter(lambda x, y: True)
    several = tfpara.callbacks.HeldOut(stream, times_per_epoch=4)
    with pytest.raises(ValueError, match="Give steps_per_epoch"):
        model.fit(stream, verbose=0, callbacks=[several])


def test_a_table_that_is_not_of_scores_is_not_touched(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("epoch,price\n3,2\n")
    with pytest.raises(ValueError, match="has the columns epoch, price, so it is no table of scor"):
        tfpara.callbacks.HeldOut((X, Y), csv=table)
    assert table.read_text() == "epoch,price\n3,2\n"


def test_telemetry_logs_and_writes_every_epoch(elastic, tmp_path):
    model = make_model(elastic)
    held_out = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    callbacks = [tfpara.callbacks.Telemetry(tmp_path), tfpara.callbacks.HeldOut(held_out)]
    log = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks).history
    written = scalars(tmp_path)
    expected = {"loss", "accuracy", "validation_loss", "samples_per_second"}
    assert set(written) >= expected | {"sync_ms", "sync_fraction", "distance"}
    assert set(written) == set(log)
    for name, values in log.items():
        assert written[name] == pytest.approx(dict(enumerate(values)))


def test_texts_of_a_log_are_no_curves(tmp_path):
    Scalars(tmp_path).write(7, {"loss": 2.0, "name": "ä", "names": np.array(["a", "b"])})
    assert scalars(tmp_path) == {"loss": {7: 2.0}}


def test_telemetry_divides_the_counts_by_the_time(elastic, monkeypatch):
    """Clock and counters in the test's hands: 2 s, of which 0.5 s in 5 syncs, for 92 samples."""
    model = make_model(elastic)
    marks = iter(
        [
            (10.0, tfpara.SyncStatistics(1, 8, 0, 0.25, 0.0, 0.0)),
            (12.0, tfpara.SyncStatistics(13, 100, 5, 0.75, 0.25, 0.125)),
        ]
    )
    telemetry = tfpara.callbacks.Telemetry()
    telemetry.set_model(model)

    class Clock:
        @staticmethod
        def perf_counter():
            seconds, statistics = next(marks)
            monkeypatch.setattr(elastic, "statistics", lambda: statistics)
            return seconds

    monkeypatch.setattr("tfpara.clock.time", Clock)
    telemetry.on_epoch_begin(0)
    for step in range(13):
        telemetry.on_train_batch_end(step)
    log = {}
    telemetry.on_epoch_end(0, log)
    assert log == pytest.approx(
        {
            "samples_per_second": 46.0,
            "syncs": 5.0,
            "sync_ms": 100.0,
            "sync_fraction": 0.25,
            "wait_fraction": 0.125,
            "distance": 0.125,
        }
    )


def test_telemetry_without_a_strategy_counts_what_it_is_told(tmp_path):
    model = make_model()
    telemetry = tfpara.callbacks.Telemetry(tmp_path, samples_per_epoch=COUNT)
    log = model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[telemetry]).history
    assert log["samples_per_second"][0] > 0
    assert "sync_ms" not in log
    assert set(scalars(tmp_path)) == set(log)


def test_tensorboard_shows_speed_and_syncs_and_the_log_stays_as_it_is(tmp_path):
    """Two fits with one callback: each epoch has numbers of its own, and nothing stays on it."""
    model = make_model(strategy_of(2, sync_period=PERIOD))
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    names = {"samples_per_second", "syncs", "sync_ms", "sync_fraction", "wait_fraction", "distance"}
    steps = -(-COUNT // BATCH)
    for first in (0, 2):
        epochs = {"initial_epoch": first, "epochs": first + 2}
        history = model.fit(X, Y, batch_size=BATCH, **epochs, verbose=0, callbacks=[board])
        assert set(history.history) == {"loss", "accuracy"}
        assert "on_epoch_end" not in vars(board)
    written = scalars(tmp_path / "train")
    assert {f"epoch_{name}" for name in names} <= set(written)
    assert set(written["epoch_syncs"]) == {0, 1, 2, 3}
    assert set(written["epoch_wait_fraction"].values()) == {0.0}  # there is no other worker
    assert set(written["epoch_syncs"].values()) == {float(-(-steps // PERIOD))}
    assert all(0 < part < 1 for part in written["epoch_sync_fraction"].values())
    assert all(value > 0 for value in written["epoch_distance"].values())


def test_a_number_of_the_users_own_is_the_one_that_tensorboard_shows(elastic, tmp_path):
    model = make_model(elastic)
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: logs.update(syncs=0.5))
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[own, board])
    assert scalars(tmp_path / "train")["epoch_syncs"] == {0: 0.5}


@pytest.mark.nightly
def test_a_variable_leaves_them_out_and_telemetry_measures_alone(elastic, tmp_path, monkeypatch):
    def fit(folder, *others):
        board = keras.callbacks.TensorBoard(tmp_path / folder, write_graph=False)
        make_model(elastic).fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[board, *others])
        return scalars(tmp_path / folder / "train")

    assert len(fit("both", tfpara.callbacks.Telemetry())["epoch_syncs"]) == 1
    monkeypatch.setenv("TFPARA_TENSORBOARD", "0")
    assert set(fit("off")) == {"epoch_loss", "epoch_accuracy", "epoch_learning_rate"}


def test_a_fit_that_fails_leaves_the_tensorboard_callback_as_it_was(elastic, tmp_path):
    def fail(*_):
        raise RuntimeError("of the test")

    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    failing = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(RuntimeError, match="of the test"):
        make_model(elastic).fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[board, failing])
    assert "on_epoch_end" not in vars(board)


def test_only_the_chief_writes(elastic, tmp_path, monkeypatch):
    model = make_model(elastic)
    monkeypatch.setattr(type(elastic), "is_chief", False)
    telemetry = tfpara.callbacks.Telemetry(tmp_path)
    log = model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[telemetry]).history
    assert "samples_per_second" in log
    assert not list(tmp_path.iterdir())
