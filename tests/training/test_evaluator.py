"""Tests of tfpara/evaluator.py: runs in this process, whose checkpoints are then scored."""

import csv
import json
import shutil
import signal
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.s3_server import DENIED, SLOW_DOWN
from tfpara import evaluator, remote_files
from tfpara.checkpoint import weights
from tfpara.remote_files import RemoteFolder

RNG = np.random.default_rng(0)
X = RNG.normal(size=(192, 6)).astype(np.float32)
Y = (np.tanh(X[:, :3]) @ RNG.normal(size=(3, 2))).astype(np.float32)
HELD_OUT = (X[:40], Y[:40])
AVERAGES = {
    "ema": tfpara.EMA(0.6, num_updates=False, zero_debias=True),
    "ma": tfpara.MA(),
}


def build(seed=0):
    """A model with all kinds of variables: constrained, frozen, integers, statistics and seeds."""
    keras.utils.set_random_seed(seed)
    frozen = keras.layers.Dense(5, name="frozen")
    frozen.trainable = False
    quantized = keras.layers.Dense(5, name="quantized")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            frozen,
            quantized,
            keras.layers.Dense(7, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.8)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2),
        ]
    )
    quantized.quantize("int8")
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def trained(directory, rule=None, epochs=2, checkpoint=None, **options):
    """Trains on devices of this process; returns the scores of the models at the end, by name."""
    options = {"sync_period": 2, "averages": AVERAGES, **options}
    strategy = tfpara.PeriodicSyncStrategy(
        rule or tfpara.BMUF(), devices=["CPU:0", "CPU:1"], **options
    )
    with strategy.scope():
        model = build()
    saves = tfpara.callbacks.Checkpoint(directory, keep=9, **(checkpoint or {}))
    model.fit(X, Y, batch_size=32, epochs=epochs, verbose=0, callbacks=[saves])
    return scored(strategy, model)


def scored(strategy, model):
    found = {}
    for name in ("global", *AVERAGES):
        with strategy.weights(model, name):
            found[name] = model.evaluate(*HELD_OUT, verbose=0, return_dict=True)
    return found


def evaluate(directory, out, model=None, **options):
    options = {"epochs": 2, "averages": AVERAGES, "wait_minutes": 1e-6, **options}
    if "save" not in options:
        options |= {"save": lambda model, path: model.save_weights(path)}
        options |= {"best": out / "best.weights.h5"}
    model = model or build(seed=9)  # nothing of it comes from the run
    return tfpara.evaluate_checkpoints(model, directory, HELD_OUT, out, **options)


def assert_last(rows, number, expected):
    last = [row for row in rows if row["checkpoint"] == str(number)]
    assert [row["weights"] for row in last] == list(expected)
    for row in last:
        found = {name: float(row[name]) for name in ("loss", "mae")}
        assert found == pytest.approx(expected[row["weights"]], rel=1e-5), row


@pytest.mark.nightly_cases("sharded", "overlap", "replicated")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (tfpara.BMUF(0.5, nesterov=True), {"aggregation": "replicated"}),
        (tfpara.EASGD(), {"aggregation": "sharded"}),
        (tfpara.DiLoCo(), {"fragments": 2, "aggregation": "sharded"}),
        (tfpara.BMUF(), {"overlap": True}),
    ],
    ids=["replicated", "sharded", "fragments", "overlap"],
)
def test_scores_are_those_of_the_run(tmp_path, rule, options):
    expected = trained(tmp_path / "run", rule, **options)
    rows = evaluate(tmp_path / "run", tmp_path / "out")
    assert [row["checkpoint"] for row in rows] == [str(n) for n in (1, 2, 3) for _ in range(3)]
    assert_last(rows, 3, expected)
    assert len({row["loss"] for row in rows[3:]}) == 6  # no two models are the same


@pytest.mark.nightly
def test_the_best_model_is_that_of_the_best_row(tmp_path):
    trained(tmp_path / "run", epochs=3, checkpoint={"every_syncs": 2})
    seen = []

    def save(model, path):
        seen.append(float(model.evaluate(*HELD_OUT, verbose=0)[1]))
        model.save_weights(path)

    best = tmp_path / "kept" / "best.weights.h5"
    rows = evaluate(
        tmp_path / "run", tmp_path / "out", epochs=3, monitor="mae", save=save, best=best
    )
    errors = [float(row["mae"]) for row in rows]
    # Each that was better than all before it was saved, and no other.
    expected = [e for k, e in enumerate(errors) if e < min(errors[:k], default=np.inf)]
    assert seen == pytest.approx(expected, rel=1e-6) and 1 < len(seen) < len(errors)
    other = build(seed=5)
    other.load_weights(best)
    assert other.evaluate(*HELD_OUT, verbose=0)[1] == pytest.approx(min(errors), rel=1e-6)
    url = f"memory://{tmp_path.name}/best"
    evaluate(tmp_path / "run", tmp_path / "to_url", epochs=3, monitor="mae", save=None, best=url)
    assert "saved_model.pb" in RemoteFolder(url).sizes()
    most = {"monitor": "mae", "mode": "max", "save": None}
    rows = evaluate(tmp_path / "run", tmp_path / "most", epochs=3, **most)
    loaded = keras.layers.TFSMLayer(tmp_path / "most" / "best", call_endpoint="serve")
    error = np.abs(loaded(HELD_OUT[0]).numpy() - HELD_OUT[1]).mean()
    assert error == pytest.approx(max(errors), rel=1e-5)


@pytest.mark.nightly
def test_servers_checkpoints(tmp_path):
    averages = {"ema": AVERAGES["ema"], "mean": tfpara.RunningThenMean(0.5)}
    strategy = tfpara.simulate_async(2, tfpara.ASGD(), averages=averages)
    with strategy.scope():
        model = build()

    def read(epoch, chunk):
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        return rows.skip(chunk * 48).take(48).batch(16)

    data = tfpara.Chunks(4, read, num_minibatches=12)
    saves = tfpara.AsyncCheckpoint(tmp_path / "run")
    strategy.fit(model, data, epochs=2, verbose=0, callbacks=[saves])
    expected = {}
    for name in ("global", *averages):
        with strategy.weights(model, name):
            expected[name] = model.evaluate(*HELD_OUT, verbose=0, return_dict=True)
    rows = evaluate(tmp_path / "run", tmp_path / "out", averages=averages)
    assert_last(rows, max(int(row["checkpoint"]) for row in rows), expected)


@pytest.mark.nightly
def test_it_goes_on_after_the_last_whole_row(tmp_path, monkeypatch):
    expected = trained(tmp_path / "run")
    whole = evaluate(tmp_path / "run", tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(tfpara.CheckpointError, match="no new checkpoint after checkpoint 3"):
        evaluate(tmp_path / "run", out, epochs=3)
    table = out / "scores.csv"
    lines = table.read_text().splitlines(keepends=True)
    # Killed in a row of checkpoint 2, of which "ema" is missing: two rows are made anew, and those
    # of checkpoint 3.
    table.write_text("".join([*lines[:5], lines[5][:-3]]))
    seen = []
    read = weights.read
    monkeypatch.setattr(
        weights, "read", lambda *given: seen.append((given[1], list(given[4]))) or read(*given)
    )
    rows = evaluate(tmp_path / "run", out)
    assert seen == [(2, ["ema", "ma"]), (3, ["ema", "ma"])]
    assert rows == whole
    assert_last(rows, 3, expected)
    assert evaluate(tmp_path / "run", out) == rows  # the run has ended, and all is scored
    assert len(seen) == 2


@pytest.mark.nightly
def test_checkpoints_that_go_and_that_are_damaged(tmp_path, monkeypatch, capsys):
    trained(tmp_path / "run", epochs=4)
    part = tmp_path / "run" / "checkpoint-00000002" / "part-00000.data-00000-of-00001"
    part.write_bytes(part.read_bytes()[:-1])
    read = weights.read

    def read_late(store, number, *rest):
        if number == 3:  # as where a run that writes checkpoint 5 removes it
            for each in (3, 4):
                shutil.rmtree(store.path(each))
        return read(store, number, *rest)

    monkeypatch.setattr(weights, "read", read_late)
    rows = evaluate(tmp_path / "run", tmp_path / "out", epochs=4)
    assert [row["checkpoint"] for row in rows[::3]] == ["1", "5"]
    said = capsys.readouterr().out
    assert "checkpoint 2 is not scored: " in said and "is damaged" in said
    assert "checkpoint 3 is not scored: removed too early; a larger keep=" in said
    assert "checkpoints 4 to 4 are not scored" in said


@pytest.mark.nightly
def test_a_run_that_begins_again_in_the_same_directory_is_noticed(tmp_path, monkeypatch):
    trained(tmp_path / "run")

    def begin_again(seconds):
        shutil.rmtree(tmp_path / "run" / "checkpoint-00000003")
        monkeypatch.undo()

    clock = types.SimpleNamespace(sleep=begin_again, monotonic=time.monotonic)
    monkeypatch.setattr(evaluator, "time", clock)
    with pytest.raises(tfpara.CheckpointError, match="had a checkpoint 3, and its newest one is n"):
        evaluate(tmp_path / "run", tmp_path / "out", epochs=3, averages=None, wait_minutes=1)


@pytest.mark.nightly
def test_a_store_that_does_not_answer_for_a_while(tmp_path, bucket, s3_server, monkeypatch, capsys):
    import s3fs

    expected = trained(f"{bucket}/run")
    monkeypatch.setattr(remote_files, "_WAITS", ())
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(evaluator, "_LOOK_SECONDS", 0.01)
    asked = []

    def refuse(method, path):  # lists, manifests and parts in turn
        asked.append(path)
        return SLOW_DOWN if len(asked) % 7 == 3 else None

    s3_server.refuse = refuse
    rows = evaluate(f"{bucket}/run", tmp_path / "out", wait_minutes=1)
    assert s3_server.refused > 2
    assert len(rows) == 9
    assert_last(rows, 3, expected)
    assert "run cannot be read (1 tries have failed: " in capsys.readouterr().out
    s3_server.refuse = lambda method, path: DENIED
    with pytest.raises(tfpara.CheckpointError, match="run cannot be read .*must be allowed to"):
        evaluate(f"{bucket}/run", tmp_path / "other", wait_minutes=1)
    s3_server.calm()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_where_python_drops_what_is_raised(run_of_two, tmp_path):
    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def save(model, path):
        path.touch()
        Dying()

    with pytest.raises(SystemExit) as ended:
        evaluate(run_of_two, tmp_path / "out", save=save, best=tmp_path / "best")
    assert ended.value.code == 75
    assert (tmp_path / "out" / "scores.csv").read_text().count("\n") == 4  # of one checkpoint


@pytest.mark.nightly
def test_results_are_on_this_machine(run_of_two):
    with pytest.raises(ValueError, match="out='s3://bucket/scores' must be a directory of this"):
        tfpara.evaluate_checkpoints(build(), run_of_two, HELD_OUT, "s3://bucket/scores", epochs=2)


class Pair(keras.Model):
    """Two networks with an optimizer each, and no `call`, as in a GAN."""

    def __init__(self, seed):
        super().__init__()
        keras.utils.set_random_seed(seed)
        self.parts = [
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]) for _ in range(2)
        ]
        self.compile()
        self.first, self.second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)
        self.error = keras.metrics.Mean(name="error")

    def train_step(self, data):
        for part, optimizer in zip(self.parts, (self.first, self.second), strict=True):
            with tf.GradientTape() as tape:
                error = tf.reduce_mean(tf.square(part(data[0]) - data[1]))
            optimizer.apply(tape.gradient(error, part.trainable_weights), part.trainable_weights)
        return self.test_step(data)

    def test_step(self, data):
        self.error.update_state([tf.square(part(data[0]) - data[1]) for part in self.parts])
        return {"error": self.error.result()}


def test_a_model_of_parts_that_is_never_called(tmp_path):
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=2, devices=["CPU:0"])
    with strategy.scope():
        model = Pair(seed=0)
    model.fit(X, Y, verbose=0, callbacks=[tfpara.callbacks.Checkpoint(tmp_path / "run")])
    rows = evaluate(
        tmp_path / "run",
        tmp_path / "out",
        Pair(seed=9),
        epochs=1,
        averages={},
        monitor="error",
        save=lambda model, path: model.parts[0].save(path),
        best=tmp_path / "out" / "first.keras",
    )
    with strategy.weights(model, "global"):
        expected = model.evaluate(*HELD_OUT, verbose=0, return_dict=True)
    assert float(rows[-1]["error"]) == pytest.approx(expected["error"], rel=1e-5)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    trained(directory)
    return directory


def of_other_shape():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def unbuilt():
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def of_no_inputs():
    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own()
    model(X)
    return model


def of_a_strategy():
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0"])
    with strategy.scope():
        return build()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mode": "lowest"}, ValueError, "mode='lowest' must be one of min, max."),
        ({"wait_minutes": 0}, ValueError, "wait_minutes=0 must be positive"),
        ({"epochs": 0}, ValueError, "epochs=0"),
        ({"monitor": "mea"}, ValueError, "monitor='mea' is no score of this model. There are: "),
        ({"model": unbuilt}, ValueError, "the model has no weights yet"),
        ({"model": of_no_inputs, "save": None}, ValueError, "Give save=, a function that writes t"),
        ({"model": of_a_strategy}, ValueError, "in the scope of a strategy of tfpara"),
        ({"model": of_other_shape}, tfpara.CheckpointError, "checkpoint-00000001 is of another mo"),
        (
            {"averages": {"ema": tfpara.EMA(0.6)}},
            tfpara.CheckpointError,
            "checkpoint-00000001 has not the average 'ema': EMA(decay=0.6, num_updates=True",
        ),
        (
            {"averages": {"other": tfpara.MA()}},
            tfpara.CheckpointError,
            "has not the average 'other': MA(): the run's averages are {'ema': EMA(decay=0.6, ",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(run_of_two, tmp_path, changes, error, words):
    changes = dict(changes)
    model = changes.pop("model", build)()
    with pytest.raises(error) as raised:
        evaluate(run_of_two, tmp_path / "out", model, **changes)
    assert words in str(raised.value)
    assert not (tmp_path / "out" / "scores.csv").exists()


@pytest.mark.nightly
def test_tables_that_do_not_fit(run_of_two, tmp_path):
    evaluate(run_of_two, tmp_path / "out")
    more = build()
    more.compile("sgd", "mse", metrics=["mae", "mape"])
    text = (tmp_path / "out" / "scores.csv").read_text()
    (tmp_path / "out" / "scores.csv").write_text("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="and the model now has the scores loss, mae, mape"):
        evaluate(run_of_two, tmp_path / "out", more)
    other = tmp_path / "other"
    trained(other, sync_period=3)
    with pytest.raises(tfpara.CheckpointError, match="are of another run. Give another out="):
        evaluate(other, tmp_path / "out")
    (tmp_path / "out" / "scores.csv").write_text("epoch,syncs\n1,2\n")
    with pytest.raises(ValueError, match="has the columns epoch, syncs, so it is no table of an"):
        evaluate(run_of_two, tmp_path / "out")


def test_without_checkpoints_it_says_how_long_it_waits(tmp_path, capsys):
    with pytest.raises(tfpara.CheckpointError, match=r"there was no new checkpoint in .* for 0.01"):
        evaluate(tmp_path / "none", tmp_path / "out", wait_minutes=0.01)
    assert f"waits for a new checkpoint in {tmp_path}/none, at most 0.01 minutes" in (
        capsys.readouterr().out
    )


@pytest.mark.nightly
def test_a_run_that_stopped_by_itself_has_ended(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0"])
    with strategy.scope():
        model = build()
    saves = tfpara.callbacks.Checkpoint(tmp_path / "run")
    model.fit(X, Y, batch_size=32, epochs=9, verbose=0, callbacks=[Stop(), saves])
    rows = evaluate(tmp_path / "run", tmp_path / "out", epochs=9, averages=None)
    assert [(row["checkpoint"], row["epoch"]) for row in rows] == [("1", "0"), ("2", "1")]
    # A second `fit` goes on. An evaluator that starts now does not end where the first had stopped.
    options = {"batch_size": 32, "epochs": 9, "initial_epoch": 1, "verbose": 0}
    model.fit(X, Y, callbacks=[Stop(), saves], **options)
    rows = evaluate(tmp_path / "run", tmp_path / "late", epochs=9, averages=None)
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]


@pytest.mark.nightly
def test_a_metric_of_several_values_has_a_column_for_each(tmp_path):
    def model():
        found = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        found.compile("sgd", "mse", metrics=[keras.metrics.F1Score()])
        return found

    with tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0"]).scope():
        trained = model()
    data = X, keras.utils.to_categorical(X[:, :3].argmax(1), 3)
    trained.fit(*data, verbose=0, callbacks=[tfpara.callbacks.Checkpoint(tmp_path / "run")])
    options = {"epochs": 1, "monitor": "f1_score/1", "mode": "max"}
    rows = tfpara.evaluate_checkpoints(model(), tmp_path / "run", data, tmp_path, **options)
    scores = trained.evaluate(*data, verbose=0, return_dict=True)["f1_score"]
    found = [float(rows[-1][f"f1_score/{k}"]) for k in range(3)]
    np.testing.assert_allclose(found, scores, rtol=1e-6)


def test_what_tensorboard_and_the_table_show(run_of_two, tmp_path):
    rows = evaluate(run_of_two, tmp_path / "out")
    with open(tmp_path / "out" / "scores.csv", newline="") as file:
        assert list(csv.DictReader(file)) == rows
    manifest = json.loads((run_of_two / "checkpoint-00000002" / "manifest.json").read_text())
    assert {(row["epoch"], row["step"]) for row in rows[3:6]} == {("1", "0")}
    assert manifest["position"]["epoch"] == 1
    shown = {}
    for path in (tmp_path / "out" / "tensorboard").glob("events.out.tfevents.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                shown[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    assert shown == pytest.approx(
        {
            (f"{row['weights']}/{name}", int(row["checkpoint"])): float(row[name])
            for row in rows
            for name in ("loss", "mae")
        }
    )
