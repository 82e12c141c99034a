"""RBM pretraining: CD-1 against NumPy, energies, and what it makes of a model."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lib.small import strategy_of
from tfpara.pretraining import BERNOULLI, GAUSSIAN, RBM, cd1, hidden_layers, pretrain

layers = keras.layers


def expit(x):
    return 1 / (1 + np.exp(-x))


def dnn(*widths, inputs=8, outputs=5, activation="sigmoid", **options):
    hidden = [layers.Dense(w, activation, name=f"hidden{i}") for i, w in enumerate(widths, 1)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)], **options)


def data(n=400, width=8, batch=50, seed=0):
    """Normalised vectors of few causes, and labels that must not matter."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)) @ rng.normal(size=(3, width)) + 0.3 * rng.normal(size=(n, width))
    x = ((x - x.mean(0)) / x.std(0)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, np.zeros(n))).batch(batch)


def random_rbm(seed=0, visible=6, hidden=4, n=9):
    rng = np.random.default_rng(seed)
    w, a, b = rng.normal(size=(visible, hidden)), rng.normal(size=visible), rng.normal(size=hidden)
    return w, a, b, rng.random((n, visible)), rng.random((n, hidden))


def free_energy(kind, v, w, a, b):
    """−log Σ_h exp(−E(v, h)), by summing over all states of the hidden units."""
    states = np.array(list(itertools.product([0.0, 1.0], repeat=len(b))))
    energy = -(v @ w @ states.T) - states @ b
    energy = energy + (0.5 * np.sum((v - a) ** 2, 1) if kind == GAUSSIAN else -v @ a)[:, None]
    return -np.log(np.exp(-energy).sum(1))


@pytest.mark.parametrize("kind", [GAUSSIAN, BERNOULLI])
def test_cd1_equals_numpy_with_the_same_draws(kind):
    w, a, b, v, u = random_rbm()
    gradient = [np.zeros_like(p) for p in (w, a, b)]
    errors = []
    for row, draws in zip(v, u, strict=True):  # sample by sample, as the guide describes it
        p = expit(b + row @ w)
        h = np.where(draws < p, 1.0, 0.0)
        rebuilt = a + w @ h
        if kind == BERNOULLI:
            rebuilt = expit(rebuilt)
        q = expit(b + rebuilt @ w)
        gradient[0] += np.outer(row, p) - np.outer(rebuilt, q)
        gradient[1] += row - rebuilt
        gradient[2] += p - q
        errors.append((row - rebuilt) ** 2)
    got = cd1(*(tf.constant(t, tf.float64) for t in (v, w, a, b, u)), kind)
    for found, expected in zip(got, gradient, strict=False):
        np.testing.assert_allclose(found, expected / len(v), rtol=1e-10)
    assert float(got.error) == pytest.approx(np.mean(errors))


@pytest.mark.parametrize("kind", [GAUSSIAN, BERNOULLI])
def test_cd1_is_the_difference_of_the_free_energies_slopes(kind):
    """d/dθ of F(v') − F(v), with v' held fixed; F from the energy of every hidden state."""
    w, a, b, v, u = random_rbm(1)
    p = expit(v @ w + b)
    rebuilt = (u < p) @ w.T + a
    if kind == BERNOULLI:
        rebuilt = expit(rebuilt)

    def gap(w, a, b):
        return np.mean(free_energy(kind, rebuilt, w, a, b) - free_energy(kind, v, w, a, b))

    got = cd1(*(tf.constant(t, tf.float64) for t in (v, w, a, b, u)), kind)
    for number, parameter in enumerate((w, a, b)):
        slope = np.zeros_like(parameter)
        for place in np.ndindex(parameter.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [t.copy() for t in (w, a, b)]
                moved[number][place] += step
                ends.append(gap(*moved))
            slope[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(got[number], slope, atol=1e-8)


def make_rbm(kind=BERNOULLI, visible=6, hidden=5, **options):
    chosen = {
        "learning_rate": 0.5,
        "momentum": 0.9,
        "momentum_minibatches": 10,
        "weight_decay": 0.01,
        "initial_stddev": 0.1,
        "seed": (0, 0),
    }
    return RBM(visible, hidden, kind, **{**chosen, **options})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_learning_follows_its_equation(momentum):
    """Momentum that rises from 0.5, and decay of the kernel alone."""
    rbm = make_rbm(momentum=momentum)
    rows = tf.constant(np.random.default_rng(0).random((7, 6)), tf.float32)
    u = [np.zeros((6, 5)), np.zeros(6), np.zeros(5)]
    fold = tf.random.experimental.stateless_fold_in
    for number in range(15):
        w, a, b = (v.numpy().astype(float) for v in (rbm.kernel, rbm.visible_bias, rbm.hidden_bias))
        # The numbers that the RBM draws for this minibatch.
        uniform = tf.random.stateless_uniform([7, 5], fold(fold([0, 0], 1), np.int64(number)))
        g = cd1(*(tf.cast(t, tf.float64) for t in (rows, w, a, b, uniform)), BERNOULLI)
        m = min(0.5 + 0.4 * number / 10, 0.9) if momentum else 0.0
        step = [g.kernel.numpy() - 0.01 * w, g.visible_bias.numpy(), g.hidden_bias.numpy()]
        u = [m * old + (1 - m) * 0.5 * new for old, new in zip(u, step, strict=True)]
        rbm.learn(rows)
        for got, before, move in zip(
            (rbm.kernel, rbm.visible_bias, rbm.hidden_bias), (w, a, b), u, strict=True
        ):
            np.testing.assert_allclose(got, before + move, atol=1e-5)


def test_learning_raises_the_likelihood_of_the_data():
    """An RBM small enough to sum over all its states."""
    patterns = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], np.float32)
    rows = tf.constant(np.repeat(patterns, 20, 0))
    states = np.array(list(itertools.product([0.0, 1.0], repeat=6)))
    rbm = make_rbm(weight_decay=0.0)

    def log_likelihood():
        w, a, b = (v.numpy().astype(float) for v in (rbm.kernel, rbm.visible_bias, rbm.hidden_bias))
        partition = np.log(np.exp(-free_energy(BERNOULLI, states, w, a, b)).sum())
        return float(np.mean(-free_energy(BERNOULLI, patterns, w, a, b)) - partition)

    before = log_likelihood()
    assert before == pytest.approx(-6 * np.log(2), abs=0.3)
    for _ in range(300):
        rbm.learn(rows)
    assert log_likelihood() > -1.5  # ln 2 = 0.69 is the best there is
    assert rbm.is_finite()


@pytest.mark.parametrize("kind", [GAUSSIAN, BERNOULLI])
def test_visible_bias_starts_at_the_mean(kind):
    rbm = make_rbm(kind)
    rows = np.random.default_rng(0).random((10, 6)).astype("float32") * 0.5
    rows[:, 0], rows[:, 1] = 0, 1
    rbm.start_bias([tf.constant(rows[:4]), tf.constant(rows[4:])])
    mean = rows.mean(0)
    found = rbm.visible_bias.numpy()
    if kind == GAUSSIAN:
        np.testing.assert_allclose(found, mean, rtol=1e-6)
    else:
        np.testing.assert_allclose(expit(found[2:]), mean[2:], rtol=1e-5)
        np.testing.assert_array_equal(found[:2], [-8, 8])


def test_reduces_the_reconstruction_error_of_every_layer():
    model = dnn(12, 10, 6)
    output = [w.copy() for w in model.layers[-1].get_weights()]
    results = pretrain(
        model, data(), epochs=8, gaussian_learning_rate=0.1, momentum_minibatches=20, verbose=0
    )
    assert [r.layer for r in results] == ["hidden1", "hidden2", "hidden3"]
    assert [r.visible for r in results] == [GAUSSIAN, BERNOULLI, BERNOULLI]
    assert [len(r.errors) for r in results] == [16, 8, 8]
    # An RBM that knows the means alone has error 1 on normalised data.
    assert results[0].errors[-1] < 0.7 * results[0].errors[0]
    assert results[0].errors[-1] < 0.5
    for result in results[1:]:
        assert result.errors[-1] < result.errors[0]
    for got, want in zip(model.layers[-1].get_weights(), output, strict=True):
        np.testing.assert_array_equal(got, want)


def test_second_layer_sees_what_the_first_puts_out():
    """Its RBM, trained by hand on the first layer's outputs, has the same weights."""
    model = dnn(7, 4)
    pretrain(model, data(), seed=3, verbose=0)
    rbm = make_rbm(
        visible=7,
        hidden=4,
        learning_rate=0.4,
        momentum_minibatches=1000,
        weight_decay=2e-4,
        seed=(3, 1),
    )
    rows = [tf.sigmoid(x @ model.layers[0].kernel + model.layers[0].bias) for x, _ in data()]
    rbm.start_bias(rows)
    for minibatch in rows:
        rbm.learn(minibatch)
    np.testing.assert_allclose(model.layers[1].kernel, rbm.kernel, atol=1e-5)
    np.testing.assert_allclose(model.layers[1].bias, rbm.hidden_bias, atol=1e-5)


def test_seed_decides_everything():
    kernels = []
    for seed in (1, 1, 2):
        model = dnn(6, 4)
        pretrain(model, data(), seed=seed, verbose=0)
        kernels.append(model.get_weights()[:4])
    for first, again, other in zip(*kernels, strict=True):
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


def test_dataset_may_be_a_function_of_the_epoch():
    asked = []

    def by_epoch(epoch):
        asked.append(epoch)
        return data(100).map(lambda x, y: x)

    pretrain(dnn(4, 3), by_epoch, epochs=2, gaussian_epochs=3, verbose=0)
    # Once more at the start of each layer, for the visible bias.
    assert asked == [0, 0, 1, 2, 3, 3, 4]


def test_shows_progress_and_error(capsys):
    results = pretrain(dnn(4), data(60), epochs=1, verbose=2)  # the last minibatch has 10 samples
    out = capsys.readouterr().out
    assert "hidden1, layer 1 of 1, gaussian visible units: epoch 2 of 2" in out
    assert f"reconstruction_error: {results[0].errors[1]:.4f}" in out


def test_functional_models_with_dropout_and_layers_before_the_stack():
    inputs = keras.Input((2, 4))
    x = layers.Flatten()(inputs)
    x = layers.Dropout(0.5)(layers.Dense(6, "sigmoid")(x))
    x = layers.Dense(5, "sigmoid")(x)
    model = keras.Model(inputs, layers.Activation("softmax")(layers.Dense(3)(x)))
    flat = dnn(6, 5)
    shaped = data().map(lambda x, y: (tf.reshape(x, [-1, 2, 4]), y))
    pretrain(model, shaped, verbose=0)
    pretrain(flat, data(), verbose=0)
    for got, want in zip(model.get_weights()[:4], flat.get_weights()[:4], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_each_frame_of_a_sequence_is_a_sample():
    hidden = [layers.Dense(6, "sigmoid"), layers.Dense(5, "sigmoid")]
    model = keras.Sequential([keras.Input((5, 8)), *hidden, layers.Dense(3)])
    flat = dnn(6, 5)
    pretrain(model, data().map(lambda x, y: (tf.reshape(x, [-1, 5, 8]), y)), verbose=0)
    pretrain(flat, data(), verbose=0)
    for got, want in zip(model.get_weights()[:4], flat.get_weights()[:4], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_is_the_start_of_every_replica_under_a_strategy():
    strategy = strategy_of()
    with strategy.scope():
        model = dnn(6, 4)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pretrain(model, data(), verbose=0)
    alone = dnn(6, 4)
    pretrain(alone, data(), verbose=0)
    for variable, want in zip(model.weights[:4], alone.get_weights(), strict=False):
        for component in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(component, want, atol=1e-6)


def branching():
    inputs = keras.Input((8,))
    first, second = layers.Dense(4, "sigmoid")(inputs), layers.Dense(4, "sigmoid")(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([first, second])))


def shared():
    dense, inputs = layers.Dense(8, "sigmoid"), keras.Input((8,))
    return keras.Model(inputs, layers.Dense(2)(dense(dense(inputs))))


def sequential(*middle):
    return keras.Sequential([keras.Input((8,)), *middle, layers.Dense(3)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sequential(), "no hidden layer below its output layer"),
        (lambda: sequential(layers.Dense(4, "relu", name="h")), "layer 'h' has activation 'relu'"),
        (lambda: sequential(layers.Dense(4, "sigmoid", False, name="h")), "'h' has no bias"),
        (lambda: sequential(layers.Reshape((8, 1)), layers.LSTM(4, name="r")), "'r' is LSTM"),
        (
            lambda: sequential(
                layers.Dense(4, "sigmoid"), layers.UnitNormalization(name="n"), layers.Dense(4)
            ),
            "has activation 'linear'",
        ),
        (
            lambda: sequential(layers.Dense(4, "sigmoid"), layers.UnitNormalization(name="n")),
            "layer 'n' is UnitNormalization; between",
        ),
        (lambda: sequential(layers.Flatten(name="f")), "no hidden layer"),
        (lambda: keras.Sequential([layers.Dense(4, "sigmoid"), layers.Dense(2)]), "not a chain"),
        (branching, "not a chain"),
        (shared, "not a chain"),
    ],
    ids=[
        "linear",
        "relu",
        "no-bias",
        "lstm",
        "activation",
        "between",
        "flat",
        "unbuilt",
        "branching",
        "shared",
    ],
)
def test_refuses_models_that_it_cannot_pretrain(build, message):
    with pytest.raises(ValueError, match=message):
        pretrain(build(), data(), verbose=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("gaussian_epochs", 1.5),
        ("momentum_minibatches", 0),
        ("learning_rate", 0.0),
        ("gaussian_learning_rate", float("inf")),
        ("initial_stddev", -1.0),
        ("weight_decay", -0.1),
        ("momentum", 0.3),
        ("momentum", 1.0),
    ],
)
def test_refuses_values_out_of_range(name, value):
    said = rf"{name}(={value} must be a whole number| must .*Received: {value!r})"
    with pytest.raises(ValueError, match=said):
        pretrain(dnn(4), data(), verbose=0, **{name: value})


def test_refuses_data_that_it_cannot_use():
    with pytest.raises(TypeError, match="Keras model. Received: int"):
        hidden_layers(3)
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset.*Received: ndarray"):
        pretrain(dnn(4), np.zeros((5, 8)), verbose=0)
    with pytest.raises(TypeError, match="Received: dict"):
        pretrain(dnn(4), data().map(lambda x, y: {"x": x}), verbose=0)
    with pytest.raises(ValueError, match="no minibatches"):
        pretrain(dnn(4), data().take(0), verbose=0)


def test_says_when_it_has_diverged():
    with pytest.raises(ValueError, match="Lower gaussian_learning_rate"):
        pretrain(dnn(40), data(), gaussian_learning_rate=50.0, momentum=0.0, epochs=20, verbose=0)
