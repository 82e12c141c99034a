"""What is not trained and workers share: moving statistics and counters, beside NumPy."""

import keras
import numpy as np
import pytest

import tfpara

pytestmark = pytest.mark.latest

BATCH, MINIBATCHES, CHUNKS, DECAY = 4, 192, 8, 0.9
X = np.random.default_rng(0).normal(3.0, 2.0, size=(BATCH * MINIBATCHES, 3)).astype("float32")


class Count(keras.layers.Layer):
    """Counts the minibatches that it is called with."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1.0)
        return x


class Scale(keras.layers.Layer):
    """Multiplies by its first number, which is not trained."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = np.asarray(numbers)

    def build(self, shape):
        self.scale = self.add_weight(
            shape=self.numbers.shape,
            dtype=str(self.numbers.dtype),
            initializer=lambda shape, dtype: keras.ops.convert_to_tensor(self.numbers, dtype),
            trainable=False,
        )

    def call(self, x):
        return x * keras.ops.cast(self.scale[0], x.dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("numbers", [[2, 3], [2, 3, 4], [True, False]], ids=str)
def test_workers_have_the_integers_of_the_chief(numbers):
    strategy = tfpara.simulate_async(2, tfpara.ASGD())
    with strategy.scope():
        layer = Scale(numbers)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    for _ in range(2):
        loss = strategy.fit(model, X, X[:, :1], verbose=0).history["loss"][0]
        np.testing.assert_allclose(loss, model.evaluate(X, X[:, :1], verbose=0), rtol=1e-5)
        layer.scale.assign(np.zeros_like(layer.numbers))


def made(strategy):
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(momentum=DECAY), Count(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def pushed_minibatches(strategy, model, period, epochs):
    """All minibatches, in the order of their pushes."""
    each = MINIBATCHES // CHUNKS
    done = [0] * CHUNKS
    for push in strategy.record(model):
        for _ in range(period):
            at = done[push.chunk] % each
            yield X[(push.chunk * each + at) * BATCH :][:BATCH]
            done[push.chunk] += 1
    assert done == [epochs * each] * CHUNKS


@pytest.mark.one_version
@pytest.mark.nightly_cases("ASGD(max_staleness=None, delay*", "Downpour(*)-24-4", "Downpour(*-8-1")
@pytest.mark.parametrize(
    ("rule", "period", "workers"),
    [
        (tfpara.Downpour(), 8, 8),
        (tfpara.ASGD(), 1, 8),
        (tfpara.Downpour(), 8, 1),
        (tfpara.Downpour(), 24, 4),
        (tfpara.AsyncEASGD(0.2), 24, 4),
    ],
    ids=str,
)
def test_they_are_those_of_one_worker_that_had_all_minibatches(rule, period, workers):
    strategy = tfpara.simulate_async(workers, rule, sync_period=period)
    model = made(strategy)
    options = {"batch_size": BATCH, "shuffle": False, "chunks": CHUNKS, "verbose": 0}
    strategy.fit(model, X, X[:, :1], epochs=2, **options)
    mean, variance, count = np.zeros(3), np.ones(3), 0
    for x in pushed_minibatches(strategy, model, period, epochs=2):
        mean = DECAY * mean + (1 - DECAY) * x.mean(0)
        variance = DECAY * variance + (1 - DECAY) * x.var(0)
        count += 1
    norm, counter, _ = model.layers
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-4)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-4)
    assert float(counter.count) == count == 2 * MINIBATCHES


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_averages_of_weights_of_other_types(dtype):
    """Eight steps of 1/8 down from 1, whose mean is 7/16 and whose moving average is near 3/4.

    Averages of bfloat16 have more bits than the weights.
    """
    averages = {
        "ma": tfpara.MA(),
        "ema": tfpara.EMA(0.99, num_updates=False),
        "counted": tfpara.EMA(0.99),
        "running": tfpara.RunningThenMean(),
    }
    strategy = tfpara.simulate_async(1, tfpara.ASGD(), averages=averages)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=dtype)
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.125), lambda y, predicted: predicted)
    ones = np.ones((8, 1), np.float32)
    strategy.fit(model, ones, ones, batch_size=1, chunks=1, verbose=0)
    weights = 1.0 - np.arange(1, 9) / 8
    decays = 0.01 * 0.99 ** np.arange(7, -1, -1)
    expected = {"ma": weights.mean(), "ema": 0.99**8 + (decays * weights).sum()}
    expected["counted"] = 1.0
    for t, weight in enumerate(weights):
        decay = (1 + t) / (10 + t)
        expected["counted"] = decay * expected["counted"] + (1 - decay) * weight
    for name in averages:
        with strategy.weights(model, name):
            found = float(np.asarray(model.get_weights()[0], np.float64).item())
        rtol = 1e-7 if dtype == "float64" else 4e-3
        np.testing.assert_allclose(found, expected.get(name, expected["ema"]), rtol=rtol)
