"""Limited-memory Adagrad against the equation in NumPy, and against Keras' Adagrad."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpara.schedules import Adapt

RNG = np.random.default_rng(0)
START = [RNG.normal(size=(3, 2)), RNG.normal(size=5)]
GRADIENTS = [[RNG.normal(size=(3, 2)), RNG.normal(size=5)] for _ in range(7)]


def by_equation(rate, constant, memory, scale):
    weights = [w.copy() for w in START]
    for t in range(len(GRADIENTS)):
        for j, w in enumerate(weights):
            first = 0 if memory is None else max(0, t - memory + 1)
            total = sum((scale * GRADIENTS[s][j]) ** 2 for s in range(first, t + 1))
            w -= rate / np.sqrt(constant + total) * scale * GRADIENTS[t][j]
    return weights


def by_keras(optimizer):
    variables = [keras.Variable(w.astype("float32")) for w in START]
    for gradients in GRADIENTS:
        optimizer.apply([keras.ops.convert_to_tensor(g, "float32") for g in gradients], variables)
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("memory", [1, 2, 3, 20, None])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_equals_the_equation(memory, scale):
    optimizer = Adapt(0.1, constant=0.5, memory=memory, gradient_scale=scale)
    expected = by_equation(0.1, 0.5, memory, scale)
    for got, want in zip(by_keras(optimizer), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_all_gradients_is_adagrad():
    adagrad = keras.optimizers.Adagrad(0.1, initial_accumulator_value=1.0, epsilon=1e-12)
    for got, want in zip(by_keras(Adapt(0.1, memory=None)), by_keras(adagrad), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_step_is_shorter_than_the_rate_whatever_the_gradient():
    variable = keras.Variable(np.zeros(3, "float32"))
    gradient = np.array([1e-3, 1.0, 1e6], "float32")
    Adapt(0.008).apply([keras.ops.convert_to_tensor(gradient)], [variable])
    np.testing.assert_allclose(
        variable.numpy(), -0.008 * gradient / np.sqrt(1 + gradient.astype(float) ** 2), rtol=1e-5
    )


@pytest.mark.parametrize("memory", [1, 2, None])
def test_an_embedding_trains_as_with_the_whole_gradient(memory):
    """Its gradient has a row for each look-up, also if several are of the same row."""
    rows, places = RNG.normal(size=(4, 3)).astype("float32"), [2, 0, 2, 1]
    whole = np.zeros((5, 3), "float32")
    np.add.at(whole, places, rows)
    found = []
    for gradient in (tf.IndexedSlices(rows, tf.constant(places), whole.shape), tf.constant(whole)):
        variable = keras.Variable(np.ones((5, 3), "float32"))
        optimizer = Adapt(0.1, memory=memory, gradient_scale=8)
        for _ in range(3):
            optimizer.apply([gradient], [variable])
        found.append(variable.numpy())
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert (found[0] != 1.0).any(1).tolist() == [True, True, True, False, False]


def test_trains_and_survives_saving(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Adapt(0.5, memory=2, gradient_scale=3.0), loss)
    x = RNG.normal(size=(120, 4)).astype("float32")
    y = x[:, :3].argmax(1)
    history = model.fit(x, y, epochs=3, batch_size=10, verbose=0, shuffle=False).history["loss"]
    assert history[-1] < 0.6 * history[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for one in (model, loaded):
        one.fit(x, y, batch_size=10, verbose=0, shuffle=False)
    for got, want in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "options", [{"constant": 0.0}, {"memory": 0}, {"gradient_scale": -1.0}], ids=str
)
def test_bad_values_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Adapt(**options)
