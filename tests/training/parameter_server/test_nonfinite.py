"""`nonfinite="skip"` with parameter servers: a run equals the one without the bad minibatches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.bad_minibatches import adam, sgd

pytestmark = pytest.mark.latest

COUNT, ROWS = 14, 4
BAD = (0, 5, 6, 7)  # with τ = 2 the whole of a block, and a half of two
rng = np.random.default_rng(0)
X = rng.normal(size=(COUNT, ROWS, 6)).astype("float32")
Y = rng.integers(0, 3, (COUNT, ROWS))
X[list(BAD), 1, 2] = [np.nan, np.inf, np.nan, np.inf]


def trained(rule, optimizer, numbers, period=1, epochs=2, jit_compile=False, share=0.5):
    strategy = tfpara.simulate_async(
        1,
        rule,
        sync_period=period,
        averages={"ema": tfpara.EMA(0.5)},
        nonfinite="skip",
        nonfinite_share=share,
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [
            keras.layers.Dense(5, "relu"),
            keras.layers.BatchNormalization(momentum=0.8),
        ]
        model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], jit_compile=jit_compile)
    data = tf.data.Dataset.from_tensor_slices((X[numbers], Y[numbers]))
    log = strategy.fit(model, data, epochs=epochs, verbose=0).history
    with strategy.weights(model, "ema"):
        averages = model.get_weights()
    return [*model.get_weights(), *averages], log


GOOD = [number for number in range(COUNT) if number not in BAD]


@pytest.mark.one_version
@pytest.mark.nightly_cases("rule0-adam-False", "rule1-sgd-False")
@pytest.mark.parametrize(
    ("rule", "optimizer", "jit_compile"),
    [(tfpara.ASGD(), adam, False), (tfpara.Downpour(), sgd, False), (tfpara.ASGD(), sgd, True)],
)
def test_equals_the_run_without_them(rule, optimizer, jit_compile, capfd):
    every = list(range(COUNT))
    # An average counts pushes, of which those without a minibatch are none.
    found, log = trained(rule, optimizer, every, jit_compile=jit_compile)
    said = capfd.readouterr().err
    for epoch in (1, 2):
        assert f"epoch {epoch} left out 4 minibatches whose loss or gradient had NaN" in said
        for number in BAD:
            assert f"worker 0 left out minibatch [{number}] of chunk 0 in epoch {epoch} (" in said
    expected, others = trained(rule, optimizer, GOOD, jit_compile=jit_compile)
    assert log.pop("left_out") == [4.0, 4.0] and others.pop("left_out") == [0.0, 0.0]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-6 if jit_compile else 0.0)
    for name in others:
        np.testing.assert_allclose(log[name], others[name], rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.one_version
def test_several_local_steps_equal_those_without_them():
    """One worker's local steps are those of one process, wherever a block ends."""
    found, _ = trained(tfpara.Downpour(), sgd, list(range(COUNT)), period=2)
    expected, _ = trained(tfpara.Downpour(), sgd, GOOD, period=2)
    half = len(found) // 2  # the averages count pushes
    for one, other in zip(found[:half], expected[:half], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_push_of_gradients_is_the_mean_of_those_that_count():
    """Blocks of which one minibatch counts are blocks of one."""
    rule = tfpara.ASGD(reduction="mean")
    found, _ = trained(rule, sgd, [0, 1, 2, 5, 6, 7, 8, 0], period=2, epochs=1, share=1)
    expected, _ = trained(rule, sgd, [1, 2, 8], epochs=1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_above_the_share_the_run_ends():
    with pytest.raises(tfpara.DivergedError, match=r"4 of 14 .* nonfinite_share=0.2 allows"):
        trained(tfpara.ASGD(), sgd, list(range(COUNT)), share=0.2)


def test_predict_says_who_predicts():
    with pytest.raises(RuntimeError, match=r"Call model.predict\(...\) on the chief"):
        tfpara.simulate_async(1, tfpara.ASGD()).predict(None, X)
