"""Simulated asynchronous training beside a simulation in NumPy, and beside itself."""

import gc
import heapq
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpara.algorithms import (
    ASGD,
    EMA,
    AsyncBMUF,
    AsyncEASGD,
    AveragedASGD,
    Downpour,
    RunningThenMean,
)
from tfpara.parameter_server.simulation import Speed, simulate_async

SAMPLES, INPUTS, CLASSES, BATCH = 44, 5, 3, 4  # 11 minibatches, which no number of chunks divides
RATE, MOMENTUM = 0.2, 0.5


def data():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
    return x, (x @ draw.normal(size=(INPUTS, CLASSES))).argmax(1)


def train(
    strategy, *, epochs=2, chunks=3, optimizer=None, dropout=0.0, jit_compile="auto", **options
):
    """Trains a linear classifier; the model and the history."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dropout(dropout)] if dropout else []
        model = keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(CLASSES)])
        model.compile(
            optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=jit_compile,
        )
        model.set_weights([np.ones((INPUTS, CLASSES), np.float32) / 8, np.zeros(CLASSES)])
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    history = strategy.fit(model, *data(), epochs=epochs, chunks=chunks, **options).history
    return model, history


class Momentum:
    """v ← m v − lr g; w ← w + v."""

    def __init__(self):
        self.velocity = 0.0

    def __call__(self, w, g, rate=RATE):
        self.velocity = MOMENTUM * self.velocity - rate * g
        return w + self.velocity


class Plain:
    """w ← w − lr g."""

    def __call__(self, w, g, rate=RATE):
        return w - rate * g


class Adam:
    """As Kingma and Ba have it, with Keras' constants; Keras adds ε to the corrected √v̂."""

    def __init__(self):
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, w, g, rate=0.05):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g**2
        corrected = np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        return w - rate * corrected * self.m / (np.sqrt(self.v) + 1e-7)


class Reference:
    """The same in NumPy: the model as one vector, workers, and a heap of events."""

    def __init__(self, workers, speeds, rule, period, step=Momentum):
        self.x, self.y = data()
        self.w = np.concatenate([np.full(INPUTS * CLASSES, 1 / 8), np.zeros(CLASSES)])
        self.workers, self.speeds = workers, speeds
        self.rule, self.period = rule, period
        self.version = 0
        self.ema, self.running = self.w.copy(), self.w.copy()
        self.stale, self.pushes = [], []
        self.local = [None] * workers
        self.step = step()  # the server's
        self.delta, self.round = np.zeros_like(self.w), []
        self.rounds = 0
        self.steps = [step() for _ in range(workers)]  # where workers have their own
        self.idle = list(range(workers))
        self.losses, self.right = [], []

    def gradient(self, w, rows):
        kernel, bias = w[: INPUTS * CLASSES].reshape(INPUTS, CLASSES), w[INPUTS * CLASSES :]
        x, y = self.x[rows], self.y[rows]
        logits = x @ kernel + bias
        logits = logits - logits.max(1, keepdims=True)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        self.loss_sum += -np.log(p[np.arange(len(y)), y]).sum()
        self.right_sum += (logits.argmax(1) == y).sum()
        p[np.arange(len(y)), y] -= 1
        p /= len(y)
        return np.concatenate([(x.T @ p).ravel(), p.sum(0)])

    def epoch(self, chunks):
        minibatches = [np.arange(k, k + BATCH) for k in range(0, SAMPLES, BATCH)]
        bounds = [len(minibatches) * k // chunks for k in range(chunks + 1)]
        waiting = [minibatches[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        mine = [[] for _ in range(self.workers)]
        self.loss_sum = self.right_sum = 0.0
        events = []
        clock = getattr(self, "clock", 0.0)
        idle = self.idle  # the one that is idle longest first
        blocks = {}
        while True:
            for k in list(idle):
                if not mine[k] and waiting:
                    mine[k] = list(waiting.pop(0))
                if mine[k]:
                    idle.remove(k)
                    rows, mine[k] = mine[k][: self.period], mine[k][self.period :]
                    blocks[k] = (self.w.copy(), self.version, *self.compute(k, rows))
                    heapq.heappush(events, (clock + self.speeds[k] * len(rows), k))
            if not events:
                break
            clock, k = heapq.heappop(events)
            self.push(k, *blocks.pop(k))
            idle.append(k)
        self.clock = clock
        self.losses.append(self.loss_sum / SAMPLES)
        self.right.append(self.right_sum / SAMPLES)

    def compute(self, k, rows):
        if isinstance(self.rule, AsyncEASGD | Downpour | AsyncBMUF):
            w = self.w if self.local[k] is None else self.local[k]
            for batch in rows:
                w = self.steps[k](w, self.gradient(w, batch))
            return w, None
        gradients = np.array([self.gradient(self.w, batch) for batch in rows])
        reduced = np.mean if self.rule.reduction == "mean" else np.sum
        return reduced(gradients, axis=0), reduced(gradients**2, axis=0)

    def momentum(self, rounds):
        given = self.rule.block_momentum
        return min(1 - 1 / self.workers, 0.75, 1 - 1 / (rounds + 1)) if given is None else given

    def push(self, k, pulled, version, value, squares):
        staleness = self.version - version
        if isinstance(self.rule, AsyncEASGD):
            move = self.rule.elasticity * (value - self.w)
            self.w = self.w + move
            self.local[k] = value - move
        elif isinstance(self.rule, AsyncBMUF):
            count, zeta = self.workers, self.rule.block_learning_rate
            self.w = self.w + zeta * (value - pulled) / count
            self.round.append(value - pulled)
            if len(self.round) == count:
                eta, later = (self.momentum(self.rounds + k) for k in (0, 1))
                self.delta = eta * self.delta + zeta * np.mean(self.round, axis=0)
                self.w = self.w + later * self.delta
                self.round, self.rounds = [], self.rounds + 1
        elif isinstance(self.rule, Downpour):
            share = 1 / (1 + staleness) if self.rule.rate_by_staleness else 1
            self.w = self.w + self.rule.block_learning_rate * share * (value - pulled)
        else:
            g = value + self.rule.delay_compensation * squares * (self.w - pulled)
            self.w = self.step(
                self.w, g, RATE / (1 + staleness) if self.rule.rate_by_staleness else RATE
            )
        self.version += 1
        self.stale.append(staleness)
        self.pushes.append(k)
        self.ema = 0.9 * self.ema + 0.1 * self.w
        self.running = 0.99 * self.running + 0.01 * self.w


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights])


def nightly(*case):
    """A case whose rule another case has, with more workers or more settings."""
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("rule", "speeds", "period"),
    [
        nightly(ASGD(), [1.0], 1),
        (ASGD(delay_compensation=0.5), [1.0, 1.3, 2.9], 1),
        (AveragedASGD(rate_by_staleness=True), [1.0, 1.0, 1.0, 10.0], 1),
        nightly(ASGD(reduction="mean"), [1.0, 1.7, 2.3], 3),
        nightly(ASGD(), [1.0, 3.0, 1.5, 1.5], 3),
        (ASGD(delay_compensation=2.0), [1.0, 1.7, 2.3], 3),
        (ASGD(delay_compensation=2.0, reduction="mean"), [1.0, 3.0, 1.5, 1.5], 2),
        nightly(AsyncEASGD(0.3), [1.0, 1.3, 2.9], 1),
        (AsyncEASGD(0.2), [1.0, 2.2, 1.7, 4.0], 3),
        nightly(Downpour(), [1.0, 2.2, 1.7, 4.0], 3),
        (Downpour(rate_by_staleness=True, block_learning_rate=0.5), [1.0, 1.3, 2.9], 2),
        (AsyncBMUF(), [1.0, 2.2, 1.7, 4.0], 3),
        nightly(AsyncBMUF(0.6, 0.7), [1.0, 1.3, 2.9], 2),
    ],
    ids=str,
)
def test_it_is_the_simulation_in_numpy(rule, speeds, period):
    # Blocks of up to five steps have no local momentum under a rule that has one.
    step = Plain if isinstance(rule, AsyncBMUF) else Momentum
    check_beside_numpy(rule, speeds, period, step, servers=max(1, len(speeds) // 2))


@pytest.mark.parametrize("rule", [Downpour(), AsyncEASGD(0.3)], ids=str)
def test_local_adam_on_several_servers_is_the_simulation_in_numpy(rule):
    check_beside_numpy(rule, [1.0, 1.7, 2.3], 2, Adam, servers=2)


def check_beside_numpy(rule, speeds, period, step=Momentum, servers=1):
    strategy = simulate_async(
        len(speeds),
        rule,
        speeds=[Speed(s) for s in speeds],
        sync_period=period,
        averages={"ema": EMA(0.9, num_updates=False)}
        | ({} if isinstance(rule, AveragedASGD) else {"average": RunningThenMean()}),
    )
    strategy._processes.server_devices = [f"CPU:{k}" for k in range(servers)]
    model, history = train(strategy, optimizer=adam() if step is Adam else sgd())
    wanted = Reference(len(speeds), speeds, rule, period, step)
    for _ in range(2):
        wanted.epoch(3)
    close = {"rtol": 2e-4, "atol": 2e-5}
    np.testing.assert_allclose(flat(model.get_weights()), wanted.w, **close)
    np.testing.assert_allclose(history["loss"], wanted.losses, **close)
    np.testing.assert_allclose(history["accuracy"], wanted.right, **close)
    statistics = strategy.statistics(model)
    assert statistics.pushes == wanted.version
    assert statistics.samples == 2 * SAMPLES
    histogram = np.bincount(wanted.stale, minlength=256)
    np.testing.assert_array_equal(statistics.staleness, histogram)
    assert statistics.mean_staleness == pytest.approx(np.mean(wanted.stale))
    np.testing.assert_array_equal(
        statistics.by_worker, np.bincount(wanted.pushes, minlength=len(speeds))
    )
    record = strategy.record(model)
    assert [p.worker for p in record] == wanted.pushes
    assert [p.version - p.pulled for p in record] == wanted.stale
    averages = {"ema": wanted.ema, "average": wanted.running}
    for name, average in averages.items():
        with strategy.weights(model, name):
            np.testing.assert_allclose(flat(model.get_weights()), average, **close)
    np.testing.assert_allclose(flat(model.get_weights()), wanted.w, **close)


def sgd():
    return keras.optimizers.SGD(RATE, momentum=MOMENTUM)


def adam():
    return keras.optimizers.Adam(0.05)


def decaying():
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7))


def muon():
    return keras.optimizers.Muon(0.05, exclude_layers=["dense"])


# Most optimizers are those of the simulation in NumPy, too.
@pytest.mark.nightly_cases("*-sgd", "*-adam", "rule4-1-muon")
@pytest.mark.parametrize(
    ("rule", "period", "optimizer"),
    [
        (ASGD(), 1, sgd),
        (ASGD(), 1, decaying),
        (ASGD(), 1, muon),
        (Downpour(), 1, adam),
        (Downpour(), 1, muon),
        (Downpour(), 4, sgd),
        (Downpour(), 4, decaying),
        (AsyncBMUF(), 4, sgd),
    ],
)
def test_one_worker_trains_like_keras(rule, period, optimizer):
    strategy = simulate_async(1, rule, sync_period=period)
    model, history = train(strategy, chunks=2, optimizer=optimizer())
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(CLASSES)])
    plain.set_weights([np.ones((INPUTS, CLASSES), np.float32) / 8, np.zeros(CLASSES)])
    plain.compile(
        optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    wanted = plain.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(flat(model.get_weights()), flat(plain.get_weights()), atol=1e-5)
    for name, values in wanted.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


def test_repr_tells_the_workers_and_the_settings():
    options = {"averages": {"mean": EMA(0.9)}, "record": True}  # it keeps a record anyway
    strategy = simulate_async(2, AsyncEASGD(), sync_period=3, **options)
    rule, averages = AsyncEASGD().resolve(2), {"mean": EMA(0.9)}
    assert "elasticity=0.45" in repr(rule)
    said = f"AsyncStrategy of 2 workers: {rule}, sync_period=3, averages={averages}"
    assert repr(strategy) == said


@pytest.mark.nightly
def test_without_elasticity_the_servers_model_stays():
    model, _ = train(simulate_async(2, AsyncEASGD(0.0)), epochs=1)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((INPUTS, CLASSES), 1 / 8))


@pytest.mark.nightly_cases("AsyncBMUF(block_momentum=None,*")
@pytest.mark.parametrize("rule", [ASGD(), AsyncBMUF(max_staleness=3)], ids=str)
def test_runs_repeat_bit_for_bit_and_a_record_is_followed(rule):
    speeds = Speed(1.0, spread=0.8)
    options = {"dropout": 0.3, "shuffle": True}
    strategy = simulate_async(3, rule, speeds=speeds, seed=1)
    model, history = train(strategy, **options)
    order = strategy.record(model)

    again = simulate_async(3, rule, speeds=speeds, seed=1)
    same, same_history = train(again, **options)
    assert again.record(same) == order
    assert same_history == history
    np.testing.assert_array_equal(flat(same.get_weights()), flat(model.get_weights()))

    other = simulate_async(3, rule, speeds=speeds, seed=2)
    different, _ = train(other, **options)
    assert other.record(different) != order

    # The order alone decides, not the speeds.
    replay = simulate_async(3, rule, speeds=Speed(5.0), seed=1, order=order)
    repeated, repeated_history = train(replay, **options)
    assert replay.record(repeated) == order
    assert repeated_history == history
    np.testing.assert_array_equal(flat(repeated.get_weights()), flat(model.get_weights()))
    assert len(order) == strategy.statistics(model).pushes == 22


@pytest.mark.nightly
def test_a_slow_worker_pushes_in_proportion():
    speeds = [Speed(1.0), Speed(1.0), Speed(4.0)]
    strategy = simulate_async(3, ASGD(), speeds=speeds)
    model, _ = train(strategy, epochs=1, chunks=11, batch_size=1)
    # 44 minibatches in 4-minibatch chunks: in the time of a slow worker's, the others do 4 each.
    pushes = strategy.statistics(model).by_worker
    assert pushes.sum() == SAMPLES
    assert pushes[2] in (4, 8)
    assert abs(pushes[0] - pushes[1]) <= 4


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "bound"), [(ASGD, 0), (ASGD, 1), (Downpour, 3), (ASGD, 7)])
def test_no_push_is_staler_than_the_bound(kind, bound):
    speeds = [Speed(1.0, 0.7)] * 7 + [Speed(10.0)]
    strategy = simulate_async(8, kind(max_staleness=bound), speeds=speeds)
    model, _ = train(strategy, epochs=1, chunks=11, batch_size=1)
    statistics = strategy.statistics(model)
    assert statistics.pushes == SAMPLES
    assert statistics.samples == SAMPLES
    assert statistics.staleness[bound + 1 :].sum() == 0
    assert bound == 0 or statistics.staleness[bound] > 0  # the bound is made use of


@pytest.mark.nightly
def test_a_bound_that_is_never_reached_changes_nothing():
    speeds = [Speed(1.0), Speed(1.3), Speed(2.9)]
    free, _ = train(simulate_async(3, ASGD(), speeds=speeds))
    bounded, _ = train(simulate_async(3, ASGD(max_staleness=20), speeds=speeds))
    np.testing.assert_array_equal(flat(free.get_weights()), flat(bounded.get_weights()))


def test_a_broken_chunk_is_named(tmp_path):
    from tfpara.parameter_server.chunks import Chunks
    from tfpara.parameter_server.errors import ChunkError

    for k in (0, 2):
        (tmp_path / str(k)).write_text("1 2 3 4 5\n1 2 3 4 5\n")

    def part(epoch, chunk):
        name = tf.strings.join([str(tmp_path), "/", tf.strings.as_string(chunk)])
        lines = tf.data.TextLineDataset(name)
        rows = lines.map(lambda s: tf.strings.to_number(tf.strings.split(s)))
        return rows.map(lambda r: (tf.ensure_shape(r, [INPUTS]), 1)).batch(1)

    strategy = simulate_async(2, ASGD())
    with strategy.scope():
        model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(CLASSES)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ChunkError, match=r"^chunk 1 of epoch 0 could not be .*/1; No such file"):
        strategy.fit(model, Chunks(3, part), verbose=0)


def test_the_cause_is_told_if_several_operations_have_failed():
    from tfpara.parameter_server.errors import explained

    local = (
        "2 root error(s) found.\n  (0) CANCELLED:  Function::Run\n  (1) UNIMPLEMENTED:  Cast "
        "string to float is not supported\n\t [[{{node while/Cast_3}}]]\n0 successful operations.\n"
        "1 derived errors ignored."
    )
    remote = local.replace("\n", "\\n").replace("\t", "\\t")
    for message in (local, f':{{"grpc_message":"{remote}","grpc_status":12}}'):
        error = tf.errors.UnimplementedError(None, None, message)
        told = str(explained(error, lambda: None))
        assert told == "a chunk could not be trained: Cast string to float is not supported"


@pytest.mark.parametrize(
    ("workers", "speeds", "told"),
    [(0, Speed(), "num_workers=0"), (True, Speed(), "True"), (2, [Speed()], "1 entries for 2")],
)
def test_numbers_that_do_not_fit_are_refused(workers, speeds, told):
    with pytest.raises(ValueError, match=told):
        simulate_async(workers, ASGD(), speeds=speeds)


@pytest.mark.parametrize("arguments", [(0.0,), (-1.0,), (float("inf"),), (1.0, -0.1)])
def test_speeds_outside_their_range_are_refused(arguments):
    with pytest.raises(ValueError, match="must be positive"):
        Speed(*arguments)


def test_speeds_have_their_mean():
    generator = np.random.default_rng(0)
    times = [Speed(3.0, 0.5).draw(generator) for _ in range(4000)]
    assert np.mean(times) == pytest.approx(3.0, rel=0.05)
    assert np.std(np.log(times)) == pytest.approx(0.5, rel=0.05)
    assert Speed(3.0).draw(generator) == 3.0


@pytest.mark.nightly
def test_a_part_of_a_trained_model_has_its_averages():
    strategy = simulate_async(2, ASGD(), averages={"ema": EMA(0.5)})
    model, _ = train(strategy)
    with strategy.scope():
        part = keras.Sequential(model.layers[:1])
    with strategy.weights(model, "ema"):
        wanted = model.get_weights()[0]
    with strategy.weights(part, "ema"):
        np.testing.assert_array_equal(part.get_weights()[0], wanted)
    assert not np.array_equal(part.get_weights()[0], wanted)


@pytest.mark.nightly
def test_a_model_that_is_forgotten_goes_and_may_be_trained_anew():
    strategy = simulate_async(2, ASGD(), averages={"ema": EMA(0.5)})
    model, _ = train(strategy)
    asks = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: strategy.forget(model))
    with pytest.raises(ValueError, match="forget.. in a callback of fit"):
        strategy.fit(model, *data(), callbacks=[asks], verbose=0)
    with strategy.weights(model, "ema"), pytest.raises(ValueError, match="inside strategy.weights"):
        strategy.forget(model)
    server = weakref.ref(strategy._models.of(model).server)
    weights = model.get_weights()
    strategy.forget(model)
    strategy.forget(model)  # nothing happens
    for which in ("global", "ema"):
        with strategy.weights(model, which):
            for found, expected in zip(model.get_weights(), weights, strict=True):
                np.testing.assert_array_equal(found, expected)
    strategy.fit(model, *data(), verbose=0)
    strategy.forget(model)
    gone = weakref.ref(model)
    model = asks = None
    gc.collect()
    assert server() is None and gone() is None


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [ASGD(), Downpour()])
def test_a_compiled_minibatch_is_the_minibatch_but_for_rounding(rule, monkeypatch):
    compiled = []
    function = tf.function

    def noted(*args, **options):
        compiled.append(options.get("jit_compile", False))
        return function(*args, **options)

    monkeypatch.setattr(tf, "function", noted)
    runs = []
    for jit_compile in (False, True):
        compiled.clear()
        model, history = train(simulate_async(2, rule, sync_period=2), jit_compile=jit_compile)
        assert any(compiled) is jit_compile
        runs.append([*model.get_weights(), history["loss"], history["accuracy"]])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
