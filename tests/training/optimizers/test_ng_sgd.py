"""NG-SGD in Keras: against NumPy, beside other layers, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lib.natural_gradient_reference import Reference
from tests.lib.networks import (
    LOSS,
    compiled,
    dense_model,
    fisher_variables,
    minibatches,
    mixed_model,
    targets,
)
from tfpara.optimizers import NGSGD
from tfpara.optimizers.layer_plan import MATRIX, PLAIN, ROWS

layers = keras.layers


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_50_steps_of_a_network_equal_numpy(momentum):
    rate, rank = 0.05, 6
    ranks = {"input_rank": rank, "output_rank": 5}
    # Not a softmax, whose derivatives have a null direction in which rounding alone decides.
    model = compiled(dense_model(), rate, momentum, max_change=None, loss="mse", **ranks)
    # Ranks are capped at half the width: 13 and 10, 11 and 4.
    sides = [[Reference(6), Reference(5)], [Reference(6), Reference(2)]]
    w = [np.vstack([k, b]).astype(np.float64) for k, b in (v.get_weights() for v in model.layers)]
    velocity = [0.0, 0.0]
    for x, y in zip(*minibatches(50), strict=True):
        n = len(x)
        x1 = np.hstack([x.astype(np.float64), np.ones((n, 1))])
        x2 = np.hstack([np.tanh(x1 @ w[0]), np.ones((n, 1))])
        e2 = (x2 @ w[1] - targets(y)) / 2  # of each frame's own loss, a mean over 4 outputs
        e1 = (e2 @ w[1][:-1].T) * (1 - x2[:, :-1] ** 2)
        for layer, (inputs, errors) in enumerate([(x1, e1), (x2, e2)]):
            gradient = sides[layer][0].step(inputs).T @ sides[layer][1].step(errors) / n
            velocity[layer] = momentum * velocity[layer] - rate * gradient
            w[layer] = w[layer] + velocity[layer]
        model.train_on_batch(x, targets(y))
    for layer, expected in zip(model.layers, w, strict=True):
        got = np.vstack(layer.get_weights())
        assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()


def test_kernel_gradient_of_sequences_is_that_of_their_frames():
    """A Dense layer on [batch, time, features] sees batch x time rows."""
    x, _ = minibatches(1, 24)
    target = np.random.default_rng(1).normal(size=(24, 10)).astype("float32")
    results = []
    for shape in ((24, 12), (4, 6, 12)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input(shape[1:]), layers.Dense(10)])
        compiled(model, 0.1, loss="mse")
        for _ in range(3):
            model.train_on_batch(x[0].reshape(shape), target.reshape(*shape[:-1], 10))
        results.append(model.get_weights())
    for frames, sequences in zip(*results, strict=True):
        np.testing.assert_allclose(frames, sequences, atol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
def test_convolutions_are_preconditioned_on_their_gradient(use_bias):
    keras.utils.set_random_seed(0)
    conv = layers.Conv2D(8, (3, 2), use_bias=use_bias)
    model = keras.Sequential([keras.Input((6, 5, 2)), conv])
    compiled(model, 1.0, loss="mse", max_change=None)
    assert [entry["kind"] for entry in model.optimizer.get_config()["layers"]] == [MATRIX]
    width = 12 + use_bias
    options = {"eta": 0.25, "epsilon": 1e-16}
    sides = Reference(-(-width // 2), **options), Reference(4, **options)
    rng = np.random.default_rng(0)
    for _ in range(15):
        x, y = rng.normal(size=(8, 6, 5, 2)), rng.normal(size=(8, 4, 4, 8))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        raw = tape.gradient(loss, model.trainable_variables)
        matrix = np.vstack([np.reshape(g, (-1, 8)) for g in raw])
        expected = sides[1].step(sides[0].step(matrix.T).T)
        before = np.vstack([w.reshape(-1, 8) for w in model.get_weights()])
        model.train_on_batch(x, y)
        after = np.vstack([w.reshape(-1, 8) for w in model.get_weights()])
        np.testing.assert_allclose(before - after, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.nightly
def test_layers_without_a_rule_get_plain_sgd():
    """Recurrent, wrapped and embedding layers end where SGD takes them, bit for bit."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (96, 7))
    y = rng.normal(size=(96, 7, 3))

    def build():
        keras.utils.set_random_seed(1)
        wrapped = layers.TimeDistributed(layers.Dense(3))
        norm = layers.LayerNormalization()
        return keras.Sequential(
            [keras.Input((7,)), layers.Embedding(20, 6), layers.LSTM(5, return_sequences=True)]
            + [norm, wrapped]
        )

    ng, plain = compiled(build(), 0.1, 0.9, loss="mse"), build()
    plain.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    for model in (ng, plain):
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert {entry["kind"] for entry in ng.optimizer.get_config()["layers"]} == {PLAIN}
    for got, want in zip(ng.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.nightly
def test_run_eagerly_is_the_same():
    results = []
    for eager in (True, False):
        keras.utils.set_random_seed(0)
        model = dense_model()
        model.compile(NGSGD(0.1).attach(model), "mse", run_eagerly=eager)
        for x, y in zip(*minibatches(12), strict=True):
            model.train_on_batch(x, targets(y))
        results.append(model.get_weights())
    for eager, graph in zip(*results, strict=True):
        np.testing.assert_allclose(eager, graph, atol=1e-4)


def test_evaluation_and_the_forward_pass_are_those_of_the_layers():
    model = dense_model()
    x, y = (a[0] for a in minibatches(1))
    plain, trained = model(x), model(x, training=True)
    compiled(model)
    np.testing.assert_array_equal(model(x), plain)
    np.testing.assert_array_equal(model(x, training=True), trained)
    model.evaluate(x, y, verbose=0)
    assert not any(v.numpy() for v in fisher_variables(model) if "minibatches" in v.path)


def test_derivatives_for_the_inputs_are_the_ordinary_ones():
    model = dense_model()
    x = tf.constant(minibatches(1)[0][0])

    def derivative():
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(outputs, x)

    ordinary = derivative()
    compiled(model)
    np.testing.assert_allclose(derivative(), ordinary, rtol=1e-5)


def test_another_optimizer_gets_ordinary_gradients():
    x, y = minibatches(5)
    results = []
    for attach in (True, False):
        keras.utils.set_random_seed(0)
        model = dense_model()
        if attach:
            compiled(model)
        model.compile("sgd", LOSS)
        for step in range(5):
            model.train_on_batch(x[step], y[step])
        results.append(model.get_weights())
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


def test_max_change_limits_a_layers_step():
    x, y = (a[0] for a in minibatches(1))
    steps = {}
    for limit in (None, 0.01):
        keras.utils.set_random_seed(0)
        model = compiled(dense_model(), 5.0, max_change=limit)
        before = [np.vstack(layer.get_weights()) for layer in model.layers]
        model.train_on_batch(x, y)
        after = [np.vstack(layer.get_weights()) for layer in model.layers]
        steps[limit] = [a - b for a, b in zip(after, before, strict=True)]
    for free, limited in zip(steps[None], steps[0.01], strict=True):
        assert np.linalg.norm(free) > 0.1
        assert np.linalg.norm(limited) == pytest.approx(0.01, rel=1e-3)
        # Kernel and bias keep their direction together.
        np.testing.assert_allclose(limited, free * 0.01 / np.linalg.norm(free), atol=1e-6)


def test_max_change_of_an_embedding_counts_a_row_once():
    """The row of class 0 is looked up four times: its derivatives add up before the norm."""
    model = keras.Sequential([keras.Input((4,)), layers.Embedding(3, 2), layers.Flatten()])
    compiled(model, 1.0, loss=lambda _, outputs: tf.reduce_sum(outputs, -1), max_change=0.5)
    before = model.get_weights()[0]
    model.train_on_batch(np.zeros((1, 4), "int32"), np.zeros((1, 1)))
    assert np.linalg.norm(model.get_weights()[0] - before) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.nightly
def test_beats_sgd_at_equal_steps_on_ill_conditioned_data():
    """Each at the best of three learning rates."""
    x, y = minibatches(150, 128, 20, seed=3, scales=(0.5, -1.0), mean=2.0)
    best = {}
    for kind in ("sgd", "ng"):
        scores = []
        for rate in (0.1, 0.2, 0.4):
            model = keras.Sequential([keras.Input((20,)), layers.Dense(4, None, True, "zeros")])
            sgd = NGSGD(rate).attach(model) if kind == "ng" else keras.optimizers.SGD(rate)
            model.compile(sgd, LOSS)
            model.fit(tf.data.Dataset.from_tensor_slices((x[:100], y[:100])), verbose=0)
            held_out = x[100:].reshape(-1, 20), y[100:].reshape(-1)
            scores.append(model.evaluate(*held_out, batch_size=6400, verbose=0))
        best[kind] = min(scores)
    assert best["ng"] < 0.8 * best["sgd"], best


@pytest.mark.nightly
def test_refuses_to_train_a_model_that_it_was_not_shown():
    model = dense_model()
    model.compile(NGSGD(0.1), LOSS, metrics=["accuracy"])
    x, y = (a[0] for a in minibatches(1))
    with pytest.raises(ValueError, match=r"NGSGD\(\.\.\.\)\.attach\(model\)"):
        model.train_on_batch(x, y)
    model.optimizer.attach(model)
    model.train_on_batch(x, y)


def test_refuses_models_that_do_not_fit():
    optimizer = NGSGD(0.1).attach(dense_model())
    with pytest.raises(ValueError, match="new NGSGD for each model"):
        optimizer.attach(dense_model())
    with pytest.raises(ValueError, match="other trainable layers"):
        optimizer.attach(mixed_model())
    model, built = dense_model(), NGSGD(0.1)
    built.build(model.trainable_variables)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="other trainable weights of this one.*after freezing"):
        built.attach(model)
    unbuilt = keras.Sequential([layers.Dense(3)])
    # `build` makes no weights of many models that are classes of their own, and a call does.
    with pytest.raises(ValueError, match=r"keras\.Input, or call it on a minibatch"):
        NGSGD(0.1).attach(unbuilt)
    unbuilt(np.zeros((2, 5), np.float32))
    NGSGD(0.1).attach(unbuilt)
    with pytest.raises(TypeError, match="Keras model. Received: Dense"):
        NGSGD(0.1).attach(layers.Dense(3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_rank", 0),
        ("output_rank", 2.5),
        ("update_period", True),
        ("history", 0.0),
        ("alpha", -1.0),
        ("epsilon", 0.0),
        ("delta", float("inf")),
        ("max_change", 0.0),
        ("max_change", float("nan")),
    ],
)
def test_refuses_values_out_of_range(name, value):
    said = rf"{name}(={value} must be a whole number| must be .*Received: {value!r})"
    with pytest.raises(ValueError, match=said):
        NGSGD(**{name: value})


def test_config_makes_an_equal_optimizer():
    first = NGSGD(0.3, 0.5, input_rank=7, max_change=None, clipnorm=2.0).attach(dense_model())
    again = NGSGD.from_config(first.get_config())
    assert again.get_config() == first.get_config()
    assert [e["kind"] for e in again.get_config()["layers"]] == [ROWS, ROWS]
