"""The LSTM with projection, against the equations written out in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.lstmp import LSTMPCell

UNITS, PROJECTION, OUTPUT, DIM = 5, 3, 2, 4


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def random_weights(rng, units=UNITS, projection=PROJECTION, output=OUTPUT, dim=DIM):
    """One matrix for each symbol of the equations."""
    of_gate = {
        "W": lambda: rng.normal(size=(units, dim)),
        "R": lambda: rng.normal(size=(units, projection)),
        "b": lambda: rng.normal(size=units),
    }
    weights = {name + gate: make() for name, make in of_gate.items() for gate in "ifco"}
    weights |= {"p" + gate: rng.normal(size=units) for gate in "ifo"}
    weights["rm"] = rng.normal(size=(projection, units))
    weights["pm"] = rng.normal(size=(output, units))
    return weights


def forward(w, xs, r=None, c=None, clip=np.inf, mask=None):
    """Sak et al. (2014), frame by frame, for one sequence [frames, dim]; also the last state."""
    r = np.zeros(w["rm"].shape[0]) if r is None else r
    c = np.zeros(w["rm"].shape[1]) if c is None else c
    outputs = []
    for t, x in enumerate(xs):
        if mask is not None and not mask[t]:
            outputs.append(outputs[-1] if outputs else np.zeros(len(w["rm"]) + len(w["pm"])))
            continue
        i = sigmoid(w["Wi"] @ x + w["Ri"] @ r + w["pi"] * c + w["bi"])
        f = sigmoid(w["Wf"] @ x + w["Rf"] @ r + w["pf"] * c + w["bf"])
        c = f * c + i * np.tanh(w["Wc"] @ x + w["Rc"] @ r + w["bc"])
        c = np.minimum(np.maximum(c, -clip), clip)
        o = sigmoid(w["Wo"] @ x + w["Ro"] @ r + w["po"] * c + w["bo"])
        m = o * np.tanh(c)
        r = w["rm"] @ m
        outputs.append(np.concatenate([r, w["pm"] @ m]))
    return np.stack(outputs), r, c


def layer_with(w, dtype="float64", **options):
    """keras.layers.RNN of a cell that has the weights of `random_weights`."""
    output = len(w["pm"])
    cell = LSTMPCell(
        w["rm"].shape[1], len(w["rm"]), output_projection=output, dtype=dtype, **options
    )
    layer = keras.layers.RNN(cell, return_sequences=True, return_state=True, dtype=dtype)
    layer.build((None, None, w["Wi"].shape[1]))
    values = {
        "kernel": np.concatenate([w["W" + g].T for g in "ifco"], 1),
        "recurrent_kernel": np.concatenate([w["R" + g].T for g in "ifco"], 1),
        "bias": np.concatenate([w["b" + g] for g in "ifco"]),
        "peepholes": np.stack([w["p" + g] for g in "ifo"]),
        "projection": np.concatenate([w["rm"], w["pm"]]).T,
    }
    for variable in cell.weights:
        variable.assign(values[variable.name])
    return layer


@pytest.fixture(name="rng")
def _rng():
    return np.random.default_rng(3)


def test_forward_is_the_papers(rng):
    w = random_weights(rng)
    xs = rng.normal(size=(2, 7, DIM))
    outputs, r, c = layer_with(w)(xs)
    assert outputs.shape == (2, 7, PROJECTION + OUTPUT)
    for row in range(2):
        expected, last_r, last_c = forward(w, xs[row])
        np.testing.assert_allclose(outputs[row], expected, atol=1e-12)
        np.testing.assert_allclose(r[row], last_r, atol=1e-12)
        np.testing.assert_allclose(c[row], last_c, atol=1e-12)


def test_without_peepholes_and_output_projection(rng):
    w = random_weights(rng, output=0)
    xs = rng.normal(size=(1, 6, DIM))
    without = {**w, **{"p" + gate: np.zeros(UNITS) for gate in "ifo"}}
    outputs, *_ = layer_with(w, peepholes=False)(xs)
    assert outputs.shape == (1, 6, PROJECTION)
    np.testing.assert_allclose(outputs[0], forward(without, xs[0])[0], atol=1e-12)
    assert np.abs(forward(w, xs[0])[0] - forward(without, xs[0])[0]).max() > 0.01


def test_cells_are_clipped(rng):
    w = random_weights(rng)
    xs = 4 * rng.normal(size=(1, 30, DIM))
    outputs, _, cells = layer_with(w, cell_clip=0.4)(xs)
    expected, _, last = forward(w, xs[0], clip=0.4)
    np.testing.assert_allclose(outputs[0], expected, atol=1e-12)
    np.testing.assert_allclose(cells[0], last, atol=1e-12)
    assert np.abs(forward(w, xs[0])[2]).max() > 0.4  # so that the bound was met


def test_masked_frames_are_skipped(rng):
    w = random_weights(rng)
    xs = rng.normal(size=(2, 6, DIM))
    mask = np.array([[1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1]], bool)
    outputs, r, c = layer_with(w)(xs, mask=tf.constant(mask))
    for row in range(2):
        expected, last_r, last_c = forward(w, xs[row], mask=mask[row])
        np.testing.assert_allclose(outputs[row], expected, atol=1e-12)
        np.testing.assert_allclose(r[row], last_r, atol=1e-12)
        np.testing.assert_allclose(c[row], last_c, atol=1e-12)


def test_gradient_is_the_numerical_one(rng):
    w = random_weights(rng, units=3, projection=2, output=1, dim=2)
    xs = rng.normal(size=(4, 2))
    directions = rng.normal(size=(4, 3))
    layer = layer_with(w)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(xs[None])[0][0] * directions)
    gradients = dict(
        zip(
            [v.name for v in layer.trainable_variables],
            tape.gradient(loss, [v.value for v in layer.trainable_variables]),
            strict=True,
        )
    )

    def numerical(name):
        """Central differences of the NumPy forward."""
        slope = np.zeros_like(w[name])
        for at in np.ndindex(slope.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = w[name].copy()
                moved[at] += step
                sides.append(np.sum(forward({**w, name: moved}, xs)[0] * directions))
            slope[at] = (sides[0] - sides[1]) / 2e-5
        return slope

    kernels = {"W": "kernel", "R": "recurrent_kernel"}
    for number, gate in enumerate("ifco"):
        part = slice(3 * number, 3 * number + 3)
        for letter, name in kernels.items():
            got = gradients[name][:, part].numpy().T
            np.testing.assert_allclose(got, numerical(letter + gate), atol=1e-8)
        got = gradients["bias"][part].numpy()
        np.testing.assert_allclose(got, numerical("b" + gate), atol=1e-8)
    for number, gate in enumerate("ifo"):
        got = gradients["peepholes"][number].numpy()
        np.testing.assert_allclose(got, numerical("p" + gate), atol=1e-8)
    got = gradients["projection"].numpy().T
    np.testing.assert_allclose(got[:2], numerical("rm"), atol=1e-8)
    np.testing.assert_allclose(got[2:], numerical("pm"), atol=1e-8)


def test_keras_stateful_carries_both_states(rng):
    w = random_weights(rng)
    xs = rng.normal(size=(2, 8, DIM))
    plain = layer_with(w)
    cell = LSTMPCell.from_config(plain.cell.get_config())
    layer = keras.layers.RNN(cell, return_sequences=True, stateful=True, dtype="float64")
    layer.build((2, 4, DIM))
    layer.set_weights(plain.get_weights())
    pieces = [layer(xs[:, :4]), layer(xs[:, 4:])]
    np.testing.assert_allclose(np.concatenate(pieces, 1), plain(xs)[0], atol=1e-12)


def test_a_saved_model_is_the_same_model(tmp_path):
    cell = LSTMPCell(
        UNITS,
        PROJECTION,
        output_projection=OUTPUT,
        cell_clip=3.0,
        activation="relu",
        recurrent_activation="hard_sigmoid",
        unit_forget_bias=False,
        bias_initializer=keras.initializers.RandomUniform(-1, 1, seed=4),
    )
    rnn = keras.layers.RNN(cell, return_sequences=True)
    model = keras.Sequential([keras.Input((None, DIM)), rnn, keras.layers.Dense(2)])
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert again.layers[0].cell.get_config() == cell.get_config()
    x = np.random.default_rng(0).normal(size=(3, 5, DIM)).astype("float32")
    np.testing.assert_array_equal(model(x), again(x))


def test_the_forget_gate_starts_open():
    cell = LSTMPCell(UNITS, PROJECTION)
    cell.build((None, DIM))
    expected = np.repeat([0.0, 1.0, 0.0, 0.0], UNITS)
    np.testing.assert_array_equal(cell.bias.numpy(), expected)


def test_mixed_precision(rng):
    w = random_weights(rng)
    xs = rng.normal(size=(2, 6, DIM)).astype("float32")
    outputs, *_ = layer_with(w, dtype="mixed_bfloat16")(xs)
    assert outputs.dtype == "bfloat16"
    np.testing.assert_allclose(
        tf.cast(outputs[0], tf.float64), forward(w, xs[0].astype("float64"))[0], atol=0.15
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": 0}, "units=0"),
        ({"projection": 0}, "projection=0"),
        ({"output_projection": -1}, "output_projection=-1"),
        ({"cell_clip": 0.0}, r"cell_clip=0\.0"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        LSTMPCell(**{"units": 2, "projection": 1, **change})
