"""Tests of tfpara/saved_model.py."""

import contextlib
import gc
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara import export
from tfpara.keras_model import strategy_of
from tfpara.sync.workers.company import Company

pytestmark = pytest.mark.latest

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)

# Run in a fresh, isolated interpreter: nothing of the project can be imported.
RELOAD = """
import sys
import numpy as np, tensorflow as tf
assert not any(m.split(".")[0] in ("tfpara", "models", "input") for m in sys.modules)
signature = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
inputs = {name: np.load(sys.argv[2]) for name in signature.structured_input_signature[1]}
np.savez(sys.argv[3], **{name: t.numpy() for name, t in signature(**inputs).items()})
"""


def outputs_in_a_fresh_process(path, x, tmp_path):
    np.save(tmp_path / "x.npy", x)
    arguments = [str(path), str(tmp_path / "x.npy"), str(tmp_path / "y.npz")]
    subprocess.run(
        [sys.executable, "-I", "-c", RELOAD, *arguments], check=True, cwd=tmp_path, timeout=120
    )
    return dict(np.load(tmp_path / "y.npz"))


def make_model(strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        layers = [keras.Input((4,), name="x"), keras.layers.Dense(6, activation="relu")]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
    return model


def test_a_fresh_process_computes_the_same(tmp_path):
    model = make_model()
    export(
        model,
        tmp_path / "model",
        signature=[tf.TensorSpec([None, 2], tf.float32, name="raw")],
        preprocessing=lambda raw: tf.concat([raw, 2.0 * raw], 1),
        postprocessing=lambda y: {"y": y, "log_posteriors": tf.nn.log_softmax(y)},
    )
    expected = model(np.concatenate([X[:, :2], 2 * X[:, :2]], 1)).numpy()
    found = outputs_in_a_fresh_process(tmp_path / "model", X[:, :2], tmp_path)
    assert set(found) == {"y", "log_posteriors"}
    np.testing.assert_allclose(found["y"], expected, atol=1e-6)
    np.testing.assert_allclose(np.exp(found["log_posteriors"]).sum(1), 1.0, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "x.npy", "y.npz"]


NAMES = {"a": 4, "b": 2, "c": 3}
STRUCTURES = {
    "dict": lambda a, b, c: {"b": b, "a": a, "c": c},
    "list": lambda a, b, c: [a, b, c],
    "nested": lambda a, b, c: ({"b": b, "c": c}, a),
}


@pytest.mark.one_version
@pytest.mark.nightly_cases("nested")
@pytest.mark.parametrize("kind", STRUCTURES)
def test_several_inputs_are_those_of_the_model(tmp_path, kind):
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=2, averages={"ema": tfpara.EMA(0.5)}
    )
    with strategy.scope():
        inputs = [keras.Input((size,), name=name) for name, size in NAMES.items()]
        parts = [keras.layers.Dense(2)(each) for each in inputs]
        outputs = {"sum": keras.layers.Add()(parts), "first": parts[0]}
        model = keras.Model(STRUCTURES[kind](*inputs), outputs)
        model.compile("sgd", "mse")
    values = [X[:, :size] for size in NAMES.values()]
    x = STRUCTURES[kind](*values)
    zeros = np.zeros((len(X), 2), np.float32)
    model.fit(x, {"sum": zeros, "first": zeros}, epochs=10, verbose=0)
    export(model, tmp_path / "model", which="ema")
    with strategy.weights(model, "ema"):
        expected = model.predict(x, verbose=0)
    loaded = tf.saved_model.load(tmp_path / "model")
    by_name = loaded.signatures["serving_default"](
        **{name: tf.constant(value) for name, value in zip(NAMES, values, strict=True)}
    )
    for found in (loaded.serve(tf.nest.map_structure(tf.constant, x)), by_name):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6)


def test_inputs_that_nobody_knows_are_asked_for(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x):
            return self.layer(x)

    model = Own()
    expected = model(X)
    with pytest.raises(ValueError, match="does not say which inputs it has.* Give signature="):
        export(model, tmp_path / "model")
    export(model, tmp_path / "model", signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.serve(tf.constant(X)), expected, atol=1e-6)


def test_a_model_that_its_first_data_built_takes_any_number_of_rows(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2)])  # without Input
    expected = model(X)
    export(model, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.serve(tf.constant(X[:3])), expected[:3], atol=1e-6)


def test_a_layer_with_words_comes_before_the_model(tmp_path):
    words = keras.layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
    assert not words.built
    model = make_model()
    signature = [tf.TensorSpec([None], tf.string, name="word")]
    export(model, tmp_path / "model", signature=signature, preprocessing=words)
    given = tf.constant(["b", "?"])
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.serve(given), model(words(given)), atol=1e-6)
    with pytest.raises(ValueError, match="Give the layer itself, or a Keras model with it"):
        export(model, tmp_path / "no", signature=signature, preprocessing=lambda x: words(x))


@pytest.mark.nightly
def test_a_part_of_a_model_that_was_trained_is_exported_with_its_averages(tmp_path):
    """That of a distiller's student, also where nobody has the distiller any more."""

    class Distiller(keras.Model):
        def __init__(self, teacher, student):
            super().__init__()
            self.teacher, self.student = teacher, student

        def call(self, x):
            return self.student(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((self.teacher(x, training=False) - y_pred) ** 2)

    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=2, averages={"ema": tfpara.EMA(0.5)}
    )
    teacher, student = make_model(strategy), make_model(strategy)
    teacher.fit(X, X[:, :3], epochs=2, verbose=0)
    teacher.trainable = False
    with strategy.scope():
        distiller = Distiller(teacher, student)
        distiller.compile("adam")
    distiller.fit(X, X[:, :3], epochs=9, verbose=0)
    with strategy.weights(distiller, "ema"):
        expected = student(X).numpy()
    assert np.abs(expected - student(X)).max() > 1e-4
    for name in ("before", "after"):
        export(student, tmp_path / name, which="ema")
        loaded = tf.saved_model.load(tmp_path / name)
        np.testing.assert_allclose(loaded.serve(tf.constant(X)), expected, atol=1e-6)
        distiller = None
        gc.collect()


@pytest.mark.nightly
def test_an_average_that_is_mostly_of_the_start_is_exported_with_a_warning(
    tmp_path, recwarn, capfd
):
    averages = {
        "slow": tfpara.EMA(0.9, num_updates=False),
        "quick": tfpara.EMA(0.3, num_updates=False),
        "counted": tfpara.EMA(0.9),
        "debiased": tfpara.EMA(0.9, num_updates=False, zero_debias=True),
        "ma": tfpara.MA(),
    }
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, averages=averages)
    model = make_model(strategy)
    with pytest.warns(UserWarning, match="which='quick': the model was not trained under this"):
        export(model, tmp_path / "quick", which="quick")
    model.fit(X[:4], X[:4, :3], batch_size=1, verbose=0)  # two syncs
    recwarn.clear()
    capfd.readouterr()
    for which in ("global", "quick", "counted", "debiased", "ma"):
        export(model, tmp_path / which, which=which)
        line = f"tfpara: the {which!r} weights are exported to {tmp_path / which}\n"
        assert capfd.readouterr().err.endswith(line)
    assert not [w for w in recwarn if "of this average" in str(w.message)]
    with pytest.warns(UserWarning, match="which='slow': 81% of this average are still the weights"):
        export(model, tmp_path / "slow", which="slow")
    model.weights[-1].assign(tf.zeros_like(model.weights[-1]))  # the averages start again
    with pytest.warns(UserWarning, match="which='debiased': 100% of this average are still the"):
        export(model, tmp_path / "debiased", which="debiased")


@pytest.mark.one_version
def test_exports_the_weights_asked_for_and_leaves_the_model_alone(tmp_path):
    strategy = tfpara.PeriodicSyncStrategy(tfpara.EASGD(0.1), sync_period=3)
    model = make_model(strategy)
    model.fit(X, X[:, :3], batch_size=1, epochs=2, verbose=0)
    before = model.get_weights()
    outputs = {}
    for which in ("global", "local"):
        export(model, tmp_path / which, which=which)
        with strategy.weights(model, which):
            outputs[which] = model(X).numpy()
        signature = tf.saved_model.load(tmp_path / which).signatures["serving_default"]
        (found,) = signature(x=tf.constant(X)).values()
        np.testing.assert_allclose(found, outputs[which], atol=1e-6)
    assert np.abs(outputs["global"] - outputs["local"]).max() > 1e-3
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_the_chief_writes(tmp_path, monkeypatch):
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=3)
    monkeypatch.setattr(Company, "is_chief", False)
    export(make_model(strategy), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_replaces_a_saved_model_and_keeps_it_when_the_new_one_fails(tmp_path, capfd):
    first, second = make_model(), make_model()
    export(first, tmp_path / "model")
    line = f"tfpara: the model is exported to {tmp_path / 'model'}\n"
    assert capfd.readouterr().err.endswith(line)

    def broken(x):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        export(second, tmp_path / "model", preprocessing=broken)
    for model in (first, second):
        if model is second:
            export(second, tmp_path / "model")
        (found,) = (
            tf.saved_model.load(tmp_path / "model")
            .signatures["serving_default"](x=tf.constant(X))
            .values()
        )
        np.testing.assert_allclose(found, model(X), atol=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failing_rename_leaves_the_old_model_or_the_new(tmp_path, monkeypatch, failing):
    """Where the system has no way to swap two folders."""
    models = [make_model(), make_model()]
    export(models[0], tmp_path / "model")
    rename, calls = os.rename, []

    def breaking(*args):
        calls.append(args)
        if len(calls) == failing:
            raise KeyboardInterrupt
        rename(*args)

    monkeypatch.setattr("tfpara.files._exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", breaking)
    with pytest.raises(KeyboardInterrupt) if failing < 3 else contextlib.nullcontext():
        export(models[1], tmp_path / "model")
    signature = tf.saved_model.load(tmp_path / "model").signatures["serving_default"]
    (found,) = signature(x=tf.constant(X)).values()
    np.testing.assert_allclose(found, models[failing == 3](X), atol=1e-6)
    assert len(calls) >= min(failing, 2) and os.listdir(tmp_path) == ["model"]


def test_refuses_a_directory_that_holds_something_else(tmp_path):
    model, path = make_model(), tmp_path / "model"
    export(model, path)
    for folder in (tmp_path, path):
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="is no SavedModel, or not that alone.*notes.txt"):
            export(model, folder)
        assert (folder / "notes.txt").read_text() == "mine"


def test_refuses_weights_that_are_not_there_and_to_guess_which_are_meant(tmp_path):
    with pytest.raises(ValueError, match="which='ema': the model has no weights of that name"):
        export(make_model(), tmp_path / "model", which="ema")
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=3, averages={"ema": tfpara.EMA(0.5)}
    )
    model = make_model(strategy)
    with pytest.raises(ValueError, match="which='mean' is unknown. There are: local, global, ema"):
        export(model, tmp_path / "model", which="mean")
    for which in ("ema", "local"):
        with (
            strategy.weights(model, which),
            pytest.raises(ValueError, match=rf"inside strategy.weights\(model, '{which}'\)"),
        ):
            export(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_finds_the_strategy_of_layers_that_are_put_together_outside_of_its_scope(tmp_path):
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=2, averages={"ema": tfpara.EMA(0.5)}
    )
    model = make_model(strategy)
    assert strategy_of(keras.Sequential(model.layers)) is strategy
    assert strategy_of(make_model()) is tf.distribute.get_strategy()


def test_refuses_a_model_without_weights(tmp_path):
    with pytest.raises(ValueError, match="no weights yet"):
        export(keras.Sequential([keras.layers.Dense(2)]), tmp_path / "model")
