"""A recurrent layer that goes on from where the last batch ended."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from models.lstm import lstm
from models.lstmp import LSTMPCell
from models.streaming import Streaming

DIM, CLASSES, STREAMS, T = 3, 4, 5, 4


def recurrent(kind, name=None):
    ends = {"return_sequences": True, "return_state": True, "name": name}
    if kind == "lstmp":
        return keras.layers.RNN(LSTMPCell(6, 4, output_projection=1), **ends)
    if kind == "stacked":
        return keras.layers.RNN([keras.layers.LSTMCell(4), keras.layers.GRUCell(3)], **ends)
    return {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}[kind](5, **ends)


def pair(kind):
    """The same layer with streams and without."""
    layer = recurrent(kind)
    layer.build((None, None, DIM))
    return Streaming(layer, STREAMS), Streaming(layer)


def frames(rng, count):
    return rng.normal(size=(STREAMS, count, DIM)).astype("float32")


@pytest.fixture(name="rng")
def _rng():
    return np.random.default_rng(11)


@pytest.mark.parametrize("kind", ["lstm", "gru", "lstmp", "stacked"])
def test_pieces_give_what_the_whole_gives(kind, rng):
    streaming, whole = pair(kind)
    xs = frames(rng, 3 * T)
    streaming(frames(rng, T))  # leaves a state that the resets clear
    starts = [np.full(STREAMS, piece == 0) for piece in range(3)]
    pieces = [streaming(xs[:, T * k : T * k + T], reset=starts[k]) for k in range(3)]
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole(xs), atol=1e-6)


@pytest.mark.parametrize("kind", ["lstm", "lstmp"])
def test_resets_isolate_utterances_stream_by_stream(kind, rng):
    """Stream i starts an utterance at every (i + 2)-th batch."""
    streaming, whole = pair(kind)
    xs = frames(rng, 9 * T)
    outputs = []
    for k in range(9):
        reset = np.array([k % (i + 2) == 0 for i in range(STREAMS)])
        outputs.append(streaming(xs[:, T * k : T * k + T], reset=reset.astype("float32")))
    outputs = np.concatenate(outputs, 1)
    for i in range(STREAMS):
        for start in range(0, 9 * T, (i + 2) * T):
            utterance = slice(start, start + (i + 2) * T)
            expected = whole(xs[i : i + 1, utterance])[0]
            np.testing.assert_allclose(outputs[i, utterance], expected, atol=1e-6)


def test_gradients_end_with_the_batch(rng):
    """The first piece moves the second's outputs, but not through its gradient."""
    streaming, _ = pair("lstm")
    first, second = frames(rng, T), frames(rng, T)
    streaming(first, reset=np.ones(STREAMS))
    state = [v.numpy() for v in streaming.states]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(streaming(second) ** 2)
    got = tape.gradient(loss, [v.value for v in streaming.trainable_variables])
    with tf.GradientTape() as tape:
        outputs, *_ = streaming.layer(second, initial_state=state)
        loss = tf.reduce_sum(outputs**2)
    expected = tape.gradient(loss, [v.value for v in streaming.layer.trainable_variables])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_masked_frames_leave_the_state(rng):
    streaming, whole = pair("lstmp")
    xs = frames(rng, 2 * T)
    mask = np.ones((STREAMS, T), bool)
    mask[1, 2:] = False
    streaming(xs[:, :T], reset=np.ones(STREAMS), mask=tf.constant(mask))
    outputs = streaming(xs[:, T:])
    joined = np.concatenate([xs[1:2, :2], xs[1:2, T:]], 1)
    np.testing.assert_allclose(outputs[1], whole(joined)[0, 2:], atol=1e-6)
    np.testing.assert_allclose(outputs[0], whole(xs[:1])[0, T:], atol=1e-6)


def test_a_mask_is_handed_on(rng):
    streaming, _ = pair("gru")
    masked = keras.layers.Masking()(tf.constant(frames(rng, T)))
    assert streaming(masked)._keras_mask.shape == (STREAMS, T)


def test_reset_state_clears_all(rng):
    streaming, _ = pair("lstm")
    first = streaming(frames(rng, T))
    assert all(np.abs(v.numpy()).max() > 0 for v in streaming.states)
    streaming.reset_state()
    assert not any(v.numpy().any() for v in streaming.states)
    assert first.shape == (STREAMS, T, 5)


def build(streams=STREAMS, **options):
    return lstm(DIM, CLASSES, cells=6, width=5, projection=4, streams=streams, seed=3, **options)


def test_the_state_is_no_weight_and_files_fit_with_and_without_streams(tmp_path, rng):
    with_streams, without = build(), build(streams=None, layers=2)
    assert with_streams.count_params() == without.count_params()
    assert not with_streams.non_trainable_variables
    xs = frames(rng, T)
    taken = {"frames": xs, "reset": np.ones(STREAMS)}
    without.set_weights([w + 0.1 for w in without.get_weights()])
    path = tmp_path / "model.weights.h5"
    without.save_weights(path)
    with_streams.load_weights(path)
    np.testing.assert_allclose(with_streams(taken), without(xs), atol=1e-6)
    with_streams.set_weights([w * 0.5 for w in with_streams.get_weights()])
    with_streams.save_weights(path)
    without.load_weights(path)
    np.testing.assert_allclose(with_streams(taken), without(xs), atol=1e-6)


@pytest.mark.parametrize("streams", [STREAMS, None])
def test_a_saved_model_is_the_same_model(streams, tmp_path, rng):
    model = build(streams)
    xs = frames(rng, T)
    taken = {"frames": xs, "reset": np.ones(STREAMS)} if streams else xs
    expected = model(taken)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(taken), expected)
    tfpara.export(
        build(None),
        tmp_path / "export",
        signature=[tf.TensorSpec([None, None, DIM], tf.float32, name="frames")],
    )
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    np.testing.assert_allclose(
        next(iter(served(frames=tf.constant(xs)).values())), expected, atol=1e-6
    )


def test_mixed_precision_keeps_the_state_in_float32(rng):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        streaming = Streaming(recurrent("lstmp"), STREAMS)
        outputs = [streaming(frames(rng, T)) for _ in range(3)]
    finally:
        keras.config.set_dtype_policy(policy)
    assert outputs[-1].dtype == "bfloat16"
    assert {v.dtype for v in streaming.states} == {"float32"}
    assert all(np.isfinite(v.numpy()).all() and v.numpy().any() for v in streaming.states)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Streaming(keras.layers.Dense(3)), TypeError, "must be a keras.layers.RNN"),
        (
            lambda: Streaming(keras.layers.LSTM(3, return_sequences=True)),
            ValueError,
            "return_sequences=True, return_state=True",
        ),
        (
            lambda: Streaming(
                keras.layers.LSTM(3, return_sequences=True, return_state=True, stateful=True)
            ),
            ValueError,
            "must not be stateful",
        ),
        (
            lambda: Streaming(
                keras.layers.GRU(3, return_sequences=True, return_state=True, go_backwards=True)
            ),
            ValueError,
            "nor go backwards",
        ),
        (lambda: Streaming(recurrent("lstm"), 0), ValueError, "streams=0"),
        (
            lambda: Streaming(recurrent("lstm"))(np.zeros((2, 3, DIM)), reset=np.ones(2)),
            ValueError,
            "without streams",
        ),
        (
            lambda: Streaming(recurrent("lstm"), 5)(np.zeros((2, 3, DIM), "float32")),
            ValueError,
            "the state of 5 streams.*Build the model with streams=",
        ),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_batch_of_other_rows_is_refused_where_its_shape_is_not_known():
    layer = Streaming(recurrent("lstm"), STREAMS)
    layer.build((None, None, DIM))
    run = tf.function(lambda x: layer(x), input_signature=[tf.TensorSpec([None, T, DIM])])
    assert run(tf.zeros([STREAMS, T, DIM])).shape == (STREAMS, T, 5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="keeps the state of 5 streams"):
        run(tf.zeros([1, T, DIM]))
