"""Averaged ASGD's choices: the rate of a chunk, and when the mean starts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.parameter_server import simulation
from tfpara.parameter_server.chunk_runner import chunk_function
from tfpara.parameter_server.worker_step import stream_of

X = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
TRUE = np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")


def made(rate, rule=None, workers=1, **options):
    strategy = tfpara.simulate_async(workers, rule or tfpara.AveragedASGD(), **options)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(rate), "mse")
    return strategy, model


class OfCluster:
    """Runs the graph that a cluster's worker runs, in this process."""

    def __init__(self, training):
        self.training, self.train = training, chunk_function(training)

    def submit(self, epoch, chunks):
        for chunk in chunks:
            stream = stream_of(self.training.order, epoch, chunk)
            place = (epoch, chunk, self.training.server.generation, stream)
            arguments = self.training.chunks.arguments(epoch, chunk)
            self.train(*(tf.constant(number, tf.int64) for number in place), *arguments)

    def wait(self, seconds):
        return True

    def halt(self):
        pass


def on_a_cluster(monkeypatch):
    monkeypatch.setattr(simulation._Simulated, "executor", lambda self, of: OfCluster(of))
    monkeypatch.setattr(
        tf.distribute.coordinator, "experimental_get_current_worker_index", lambda: 0
    )


def gradient(x, w):
    return 2 * x.T @ (x @ (w - TRUE)) / len(x)


@pytest.mark.parametrize(
    ("rule", "period"), [(tfpara.AveragedASGD(), 1), (tfpara.Downpour(), 3)], ids=str
)
def test_the_searched_rates_are_those_of_numpy(rule, period):
    factors, batch, sample = (0.5, 1.0, 3.0), 8, 2
    strategy, model = made(0.05, rule, sync_period=period)
    search = tfpara.ChunkRateSearch(factors, minibatches=sample)
    strategy.fit(
        model, X, X @ TRUE, batch_size=batch, shuffle=False, chunks=4, verbose=0, search_rate=search
    )
    w, rate, chosen = np.zeros((4, 1)), 0.05, []
    for chunk in np.split(X.astype("float64"), 4):
        minibatches = np.split(chunk, len(chunk) // batch)
        losses = []
        for factor in factors:
            trial = w
            for x in minibatches[:sample]:
                trial = trial - rate * factor * gradient(x, trial)
            part = np.concatenate(minibatches[:sample])
            losses.append(np.mean((part @ (trial - TRUE)) ** 2))
        rate *= factors[int(np.argmin(losses))]
        chosen.append(rate)
        for x in minibatches:
            w = w - rate * gradient(x, w)
    assert len(set(chosen)) > 1  # it rises or falls
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-4, atol=1e-5)


def test_after_an_epoch_the_optimizer_has_the_searched_rate():
    search = tfpara.ChunkRateSearch((0.5,), minibatches=2)  # halves it for each chunk
    strategy, model = made(0.08)
    options = {"batch_size": 32, "shuffle": False, "chunks": 2, "verbose": 0}
    strategy.fit(model, X, X @ TRUE, search_rate=search, **options)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02)
    before = model.get_weights()[0]
    model.optimizer.learning_rate = 0.08  # the rate that the optimizer had at first
    strategy.fit(model, X, X @ TRUE, **options)
    for x in np.split(X, 4):
        before = before - 0.08 * gradient(x, before)
    np.testing.assert_allclose(model.get_weights()[0], before, rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_rates_of_other_types_are_searched_on_a_cluster(dtype, request, monkeypatch):
    request.addfinalizer(lambda: keras.config.set_floatx("float32"))
    keras.config.set_floatx(dtype)
    on_a_cluster(monkeypatch)
    strategy, model = made(0.125)
    search = tfpara.ChunkRateSearch((0.5, 1.0), minibatches=2)
    strategy.fit(model, X, X @ TRUE, batch_size=8, verbose=0, chunks=1, search_rate=search)
    assert strategy._models.of(model).server.learning_rate in (0.0625, 0.125)


@pytest.mark.nightly_cases("one")
@pytest.mark.parametrize("factors", [(1.0, 1e30), (1e30, 1e38)], ids=["one", "all"])
def test_a_diverging_candidate_never_wins(factors):
    """The rate stays where none is left, and other workers and later chunks see nothing of it."""
    found = []
    for search in (tfpara.ChunkRateSearch(factors, minibatches=2), None):
        strategy, model = made(0.05, workers=2)
        log = strategy.fit(
            model, X, X @ TRUE, batch_size=8, chunks=4, epochs=2, verbose=0, search_rate=search
        )
        found.append((model.get_weights()[0], log.history["loss"]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_search_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="part=0"):
        tfpara.ChunkRateSearch(part=0)
    with pytest.raises(ValueError, match="minibatches=0"):
        tfpara.ChunkRateSearch(minibatches=0)
    with pytest.raises(ValueError, match="positive"):
        tfpara.ChunkRateSearch((1.0, -1.0))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    for strategy, model in (made(schedule), made(0.1, tfpara.AsyncEASGD())):
        with pytest.raises(ValueError, match="search_rate needs"):
            strategy.fit(model, X, X @ TRUE, verbose=0, search_rate=tfpara.ChunkRateSearch())
    strategy, model = made(0.1)

    def read(epoch, chunk):
        return tf.data.Dataset.from_tensors((X[:8], X[:8] @ TRUE))

    with pytest.raises(ValueError, match="number of minibatches"):
        strategy.fit(model, tfpara.Chunks(2, read), verbose=0, search_rate=tfpara.ChunkRateSearch())


@pytest.mark.nightly
@pytest.mark.parametrize("of_cluster", [False, True])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_search_leaves_a_shuffled_dataset_in_its_order(of_cluster, in_chunks, monkeypatch):
    """Each sample adds 1 to a weight of its own, in the simulation and the graph of a cluster."""
    samples, chunks, epochs = 24, 3, 2

    def numbers(seed=None):
        data = tf.data.Dataset.range(samples).shuffle(samples, seed).batch(2)
        return data.map(lambda k: (tf.one_hot(k, samples), tf.zeros([2, 1])))

    if of_cluster:
        on_a_cluster(monkeypatch)
    strategy = tfpara.simulate_async(2, tfpara.ASGD())
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((samples,)), layer])
        model.compile(keras.optimizers.SGD(1.0), lambda y, output: -tf.reduce_sum(output))
    data = numbers()
    if in_chunks:
        data = tfpara.Chunks(chunks, lambda e, k: numbers(e + 1).shard(chunks, k))
    search = tfpara.ChunkRateSearch((1.0,), minibatches=2)
    given = {} if in_chunks else {"chunks": chunks}
    strategy.fit(model, data, epochs=epochs, verbose=0, search_rate=search, **given)
    np.testing.assert_allclose(model.get_weights()[0], np.full((samples, 1), epochs), rtol=1e-5)


def test_a_seed_by_epoch_needs_another_global_seed_than_0():
    """TensorFlow cannot combine a graph's number with a global seed of 0: said with the mend."""

    def shuffled(epoch, chunk):
        data = tf.data.Dataset.from_tensor_slices((X[:16], X[:16] @ TRUE))
        return data.shuffle(16, seed=epoch).shard(2, chunk).batch(4)

    def fit():
        strategy, model = made(0.1)
        search = tfpara.ChunkRateSearch((1.0,), minibatches=1)
        strategy.fit(model, tfpara.Chunks(2, shuffled), verbose=0, search_rate=search)

    keras.utils.set_random_seed(0)
    with pytest.raises(ValueError, match=r"the global seed is 0.*set_random_seed\(1\)"):
        fit()
    keras.utils.set_random_seed(1)
    fit()


@pytest.mark.nightly_cases("rule1-averages1")
@pytest.mark.parametrize(
    ("rule", "averages"),
    [
        (tfpara.AveragedASGD(running_rate=0.2), None),
        (tfpara.Downpour(), {"average": tfpara.RunningThenMean(0.2)}),
    ],
)
def test_the_mean_starts_once_the_average_is_better(rule, averages):
    # A rate so high that the model swings about its goal, and the average settles.
    rng = np.random.default_rng(3)
    noisy = X @ TRUE + rng.normal(size=(128, 1)).astype("float32")
    strategy, model = made(0.12, rule, workers=2, averages=averages)
    held_out = tf.data.Dataset.from_tensors((X, X @ TRUE))
    start = tfpara.StartMean((X, X @ TRUE), verbose=0)
    logs = strategy.fit(
        model, X, noisy, batch_size=2, epochs=4, chunks=4, verbose=0, callbacks=[start]
    )
    started = logs.history["mean_started"]
    assert started[-1] == 1.0 and started == sorted(started)
    mine = model.evaluate(held_out, verbose=0)
    with strategy.weights(model, "average"):
        assert model.evaluate(held_out, verbose=0) < mine


@pytest.mark.nightly
def test_the_mean_starts_again_where_the_average_does():
    """In a second fit with the same callback, after weights that are set in between."""
    noisy = X @ TRUE + np.random.default_rng(3).normal(size=(128, 1)).astype("float32")
    strategy, model = made(0.12, tfpara.AveragedASGD(running_rate=0.2), workers=2)
    start = tfpara.StartMean(tf.data.Dataset.from_tensors((X, X @ TRUE)), verbose=0)
    options = {"batch_size": 2, "chunks": 4, "verbose": 0, "callbacks": [start]}

    def means():
        state = strategy._models.of(model).server.shards[0].averages["average"][0]
        return float(state.mean), float(state.weight)

    for _ in range(2):
        strategy.fit(model, X, noisy, epochs=3, **options)
        mean, weight = means()
        # The n-th model of the mean counts 1/n; of the running average, always 0.2.
        assert mean == 1.0 and weight < 0.05
        model.set_weights([np.zeros((4, 1))])
        with strategy.weights(model, "average"):
            np.testing.assert_array_equal(model.get_weights()[0], 0.0)
        assert means() == (0.0, pytest.approx(0.2))


@pytest.mark.parametrize("first", [0, 1])
def test_the_average_is_compared_after_every_chunks_of_this_fit(first, monkeypatch):
    scored = []
    monkeypatch.setattr(
        "tfpara.callbacks.start_mean.evaluate", lambda *_: scored.append(1) or {"loss": 1.0}
    )
    strategy, model = made(0.01)
    options = {"batch_size": 8, "chunks": 4, "initial_epoch": first, "epochs": first + 1}
    start = tfpara.StartMean((X, X @ TRUE), every_chunks=4)
    strategy.fit(model, X, X @ TRUE, verbose=0, callbacks=[start], **options)
    assert len(scored) == 2  # the model and its average, once


@pytest.mark.nightly
def test_the_mean_starts_at_the_same_push_however_long_the_pushes_take(monkeypatch):
    """The chief looks after every push, and after chunks only."""
    noisy = X @ TRUE + np.random.default_rng(3).normal(size=(128, 1)).astype("float32")
    averages = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", seconds)
        strategy, model = made(0.12, tfpara.AveragedASGD(running_rate=0.1), workers=2)
        start = tfpara.StartMean((X, X @ TRUE), verbose=0)
        logs = strategy.fit(
            model, X, noisy, batch_size=2, chunks=16, epochs=2, verbose=0, callbacks=[start]
        )
        assert logs.history["mean_started"][-1] == 1.0
        with strategy.weights(model, "average"):
            averages.append(model.get_weights()[0])
    np.testing.assert_array_equal(*averages)


def test_start_mean_needs_averaged_asgd():
    strategy, model = made(0.1, tfpara.ASGD())
    with pytest.raises(ValueError, match="AveragedASGD"):
        strategy.fit(
            model, X, X @ TRUE, verbose=0, callbacks=[tfpara.StartMean(tf.data.Dataset.range(1))]
        )
    with pytest.raises(ValueError, match="every_chunks=0"):
        tfpara.StartMean(tf.data.Dataset.range(1), every_chunks=0)
