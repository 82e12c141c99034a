"""Rules whose workers have optimizers of their own: rates, schedules, resuming."""

import keras
import numpy as np
import pytest

import tfpara

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
TRUE = np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
BATCH = 8
MINIBATCHES = [X[k : k + BATCH].astype("float64") for k in range(0, 96, BATCH)]

RULES = [tfpara.Downpour(), tfpara.AsyncEASGD(0.5)]


def made(rule, optimizer, workers=1, constraint=None, **options):
    """A linear model that starts at zero."""
    options = {"sync_period": 3} | options
    strategy = tfpara.simulate_async(workers, rule, **options)
    with strategy.scope():
        start = {"kernel_initializer": "zeros", "kernel_constraint": constraint}
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1, use_bias=False, **start)]
        )
        model.compile(optimizer, "mse")
    return strategy, model


def train(strategy, model, epochs=1, callbacks=(), **options):
    options = {"batch_size": BATCH, "shuffle": False, "chunks": 4, "verbose": 0} | options
    return strategy.fit(model, X, X @ TRUE, epochs=epochs, callbacks=list(callbacks), **options)


def gradient(x, w):
    return 2 * x.T @ (x @ (w - TRUE)) / len(x)


def by_hand(rates):
    """Plain SGD over the minibatches, as often as there are rates."""
    w = np.zeros((4, 1))
    for k, rate in enumerate(rates):
        w = w - rate * gradient(MINIBATCHES[k % len(MINIBATCHES)], w)
    return w


def is_by_hand(model, rates):
    np.testing.assert_allclose(model.get_weights()[0], by_hand(rates), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rate_that_a_callback_sets_reaches_the_workers(rule):
    strategy, model = made(rule, keras.optimizers.SGD(0.05), workers=3)
    still = keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)
    train(strategy, model, 2, [still])
    np.testing.assert_array_equal(model.get_weights()[0], np.zeros((4, 1)))


def test_rates_by_epoch_are_those_of_plain_training():
    strategy, model = made(tfpara.Downpour(), keras.optimizers.SGD(1.0))
    rates = [0.05, 0.02, 0.01]
    train(strategy, model, 3, [keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])])
    is_by_hand(model, np.repeat(rates, len(MINIBATCHES)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Ftrl", "ScheduleFreeAdamW"])
def test_an_optimizer_whose_step_would_undo_a_pull_is_refused(name):
    for rule in (tfpara.Downpour(), tfpara.ASGD()):
        strategy, model = made(rule, getattr(keras.optimizers, name)(0.05), workers=2)
        if rule == tfpara.ASGD():
            train(strategy, model)
            continue
        with pytest.raises(ValueError, match=f"{name} computes weights from its slots"):
            train(strategy, model)


def scheduled():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.6))


DECAYING = [0.05 * 0.6 ** (k / 5) for k in range(2 * len(MINIBATCHES))]


def test_a_schedule_counts_the_minibatches_of_all_workers():
    # One pushes at a time, so the order is that of plain training, whoever it is.
    strategy, model = made(tfpara.Downpour(max_staleness=0), scheduled(), workers=3)
    train(strategy, model, 2)
    assert (strategy.statistics(model).by_worker > 0).all()
    order = [p.chunk for p in strategy.record(model)]
    assert order == sorted(order[:4]) + sorted(order[4:])  # else the data came in another order
    is_by_hand(model, DECAYING)
    assert int(model.optimizer.iterations) == len(DECAYING)  # what TensorBoard shows scores by


@pytest.mark.parametrize("optimizer", [scheduled, lambda: keras.optimizers.SGD(0.05)])
def test_a_run_goes_on_from_a_checkpoint(optimizer, tmp_path):
    """With the schedule where it was, or with the rate that a callback has set."""
    lower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    callbacks = [] if optimizer is scheduled else [lower]
    strategy, model = made(tfpara.Downpour(), optimizer())
    train(strategy, model, 1, [*callbacks, tfpara.AsyncCheckpoint(tmp_path)])
    again, resumed = made(tfpara.Downpour(), optimizer())
    history = train(again, resumed, 2, [*callbacks, tfpara.AsyncCheckpoint(tmp_path)])
    assert len(history.history["loss"]) == 1
    rates = DECAYING if callbacks == [] else np.repeat([0.025, 0.0125], len(MINIBATCHES))
    is_by_hand(resumed, rates)
    counted = again.statistics(resumed)
    assert (counted.pushes, counted.samples) == (2 * 4, 2 * 96)


def test_several_workers_go_on_from_a_checkpoint_with_every_minibatch_once(tmp_path):
    averages = {"ema": tfpara.EMA(0.9), "average": tfpara.RunningThenMean(0.1)}
    for epochs in (1, 2):
        strategy, model = made(tfpara.Downpour(), "adam", workers=3, averages=averages)
        train(strategy, model, epochs, [tfpara.AsyncCheckpoint(tmp_path)])
        counted = strategy.statistics(model)
        assert (counted.pushes, counted.samples) == (epochs * 4, epochs * 96)
        assert counted.staleness.sum() == counted.pushes


def train_in_step(strategy, model, workers, epochs, callbacks=()):
    """In an epoch each worker has a block of three minibatches, and all pull before one pushes."""
    count = workers * 3 * BATCH
    options = {"batch_size": BATCH, "shuffle": False, "chunks": workers, "verbose": 0}
    options["callbacks"] = list(callbacks)
    strategy.fit(model, X[:count], (X @ TRUE)[:count], epochs=epochs, **options)


def mean_of_workers(start, workers, rate):
    """The mean of the weights after such a block of plain SGD."""
    local = []
    for worker in range(workers):
        w = start
        for minibatch in MINIBATCHES[3 * worker : 3 * worker + 3]:
            w = w - rate * gradient(minibatch, w)
        local.append(w)
    return np.mean(local, 0)


@pytest.mark.nightly_cases("2")
@pytest.mark.parametrize("workers", [2, 4])
def test_the_mean_of_all_blocks_is_model_averaging(workers):
    """ζ = 1/N, and all push before one pulls again: W ← the mean of the local models."""
    rule = tfpara.Downpour(block_learning_rate=1 / workers)
    strategy, model = made(rule, keras.optimizers.SGD(0.05), workers, speeds=tfpara.Speed())
    train_in_step(strategy, model, workers, epochs=2)
    w = np.zeros((4, 1))
    for _ in range(2):
        w = mean_of_workers(w, workers, 0.05)
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly_cases("2")
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_in_step_under_block_momentum_are_bmuf(workers):
    """Chen & Huo's Nesterov form: G = w̄ − B; Δ ← ηΔ + G; W ← W + Δ; B = W + ηΔ."""
    # In blocks of three steps momentum 0.9 is none, and the rate five times as high.
    optimizer = keras.optimizers.SGD(0.006, momentum=0.9)
    rule = tfpara.AsyncBMUF("linear")
    strategy, model = made(rule, optimizer, workers, speeds=tfpara.Speed())
    train_in_step(strategy, model, workers, epochs=5)
    w = b = delta = np.zeros((4, 1))
    for block in range(5):
        mean = mean_of_workers(b, workers, 0.03)
        eta, later = (min(1 - 1 / workers, 1 - 1 / (t + 1)) for t in (block, block + 1))
        delta = eta * delta + mean - b
        w = w + delta
        b = w + later * delta
    np.testing.assert_allclose(model.get_weights()[0], b, rtol=1e-4, atol=1e-6)


CONSTRAINED = {
    "ASGD": tfpara.ASGD(),
    "Downpour": tfpara.Downpour(),
    "AsyncBMUF": tfpara.AsyncBMUF(0.5, warmup=False),
    "AsyncEASGD": tfpara.AsyncEASGD(0.4),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONSTRAINED)
def test_constraints_hold_on_servers_and_workers_and_in_averages(name, tmp_path):
    """As Keras does after a step: W, which files have, what a worker goes on from, averages."""

    def unit(w):
        return w / (1e-7 + np.linalg.norm(w))

    strategy, model = made(
        CONSTRAINED[name],
        keras.optimizers.SGD(0.05),
        workers=2,
        constraint=keras.constraints.UnitNorm(),
        speeds=tfpara.Speed(),
        averages={"ema": tfpara.EMA(0.5, num_updates=False)},
    )
    file = tmp_path / "w.weights.h5"
    saving = keras.callbacks.ModelCheckpoint(file, save_weights_only=True)
    train_in_step(strategy, model, 2, 3, [saving])
    w = ema = delta = np.zeros((4, 1))
    local = [w, w]
    for _ in range(3):
        pulled, moved = w, []
        for worker in range(2):
            local[worker] = local[worker] if name == "AsyncEASGD" else pulled
            own = MINIBATCHES[3 * worker : 3 * worker + 3]
            for minibatch in own:
                local[worker] = unit(local[worker] - 0.05 * gradient(minibatch, local[worker]))
            moved.append(local[worker] - pulled)
            if name == "ASGD":
                moved[worker] = -0.05 * sum(gradient(minibatch, pulled) for minibatch in own)
        for worker in range(2):
            if name in ("ASGD", "Downpour"):
                w = w + moved[worker]
            elif name == "AsyncEASGD":
                move = 0.4 * (local[worker] - w)
                w, local[worker] = w + move, unit(local[worker] - move)
            else:
                w = w + moved[worker] / 2
                if worker == 1:
                    delta = 0.5 * delta + np.mean(moved, 0)
                    w = w + 0.5 * delta
            w = unit(w)
            ema = ema + 0.5 * (w - ema)
    np.testing.assert_allclose(model.get_weights()[0], w, atol=1e-5)
    with strategy.weights(model, "ema"):
        np.testing.assert_allclose(model.get_weights()[0], unit(ema), atol=1e-5)
    model.load_weights(file)
    np.testing.assert_allclose(model.get_weights()[0], w, atol=1e-5)


def test_local_momentum_is_fitted_to_the_block():
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
    strategy, model = made(tfpara.AsyncBMUF(0.5), optimizer, sync_period=8)
    train(strategy, model, 2, chunks=1)
    m, rate = 1 - 5 / 8, 0.01 * 0.5 * (5 / 8) / 0.1
    w, velocity, delta = np.zeros((4, 1)), 0.0, 0.0
    for start, end in 2 * [(0, 8), (8, 12)]:
        pulled = w
        for minibatch in MINIBATCHES[start:end]:
            g = gradient(minibatch, w)
            velocity = m * velocity - rate * g
            w = w + m * velocity - rate * g
        delta = 0.5 * delta + w - pulled
        w = w + 0.5 * delta
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-4, atol=1e-6)


def test_weight_decay_is_that_of_the_optimizers_own_rate():
    """As under BMUF: the steps are five times as long in blocks of three, and the decay is not."""
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, weight_decay=0.5)
    strategy, model = made(tfpara.AsyncBMUF(0.5), optimizer)
    train(strategy, model, 1, chunks=1)
    w, delta = np.zeros((4, 1)), 0.0
    for start in range(0, 12, 3):
        pulled = w
        for minibatch in MINIBATCHES[start : start + 3]:
            w = w * (1 - 0.01 * 0.5)
            w = w - 0.05 * gradient(minibatch, w / (1 - 0.01 * 0.5))
        delta = 0.5 * delta + w - pulled
        w = w + 0.5 * delta
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly_cases("rule0")
@pytest.mark.parametrize("rule", [tfpara.Downpour(), tfpara.AsyncBMUF(0.0)])
def test_a_rate_may_be_a_function(rule):
    optimizer = keras.optimizers.SGD(lambda: 0.02)
    strategy, model = made(rule, optimizer)
    train(strategy, model)
    np.testing.assert_allclose(model.get_weights()[0], by_hand([0.02] * 12), rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_block_momentum_of_weights_of_other_types(dtype, request):
    """Against float32; bfloat16 has three digits. With float64 the rate has this type, too."""
    request.addfinalizer(lambda: keras.config.set_floatx("float32"))
    found = []
    for kind in ("float32", dtype):
        keras.config.set_floatx("float64" if kind == "float64" else "float32")
        strategy = tfpara.simulate_async(1, tfpara.AsyncBMUF(0.5), sync_period=3)
        with strategy.scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=kind)
            model = keras.Sequential([keras.Input((4,), dtype=kind), layer])
            model.compile(keras.optimizers.SGD(0.02), "mse")
        train(strategy, model)
        state = strategy._models.of(model).server.shards[0].kept[0]
        assert (state.delta.dtype, float(state.rounds)) == (kind, 4.0)
        found.append(model.get_weights()[0].astype("float64"))
    np.testing.assert_allclose(found[1], found[0], atol=0.1 if dtype == "bfloat16" else 1e-5)


@pytest.mark.nightly
def test_the_fit_of_local_momentum_is_told_of_once(capfd):
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    strategy, model = made(tfpara.AsyncBMUF(0.5), optimizer)
    train(strategy, model)
    train(strategy, model)
    said = "momentum is 0 in place of 0.9, and each step 5 times as large"
    assert capfd.readouterr().err.count(said) == 1


def test_weights_that_are_set_lose_block_momentum_and_no_round():
    strategy, model = made(tfpara.AsyncBMUF(0.7, warmup=5.0), keras.optimizers.SGD(0.02))
    train(strategy, model)  # four pushes of one worker, which are four rounds
    state = strategy._models.of(model).server.shards[0].kept[0]
    assert float(state.rounds) == 4.0 and np.abs(state.delta.numpy()).max() > 0.0
    model.set_weights([np.ones((4, 1), np.float32)])
    strategy.write(model)
    assert float(state.rounds) == 4.0
    np.testing.assert_array_equal(state.delta, 0.0)


def test_a_round_that_other_workers_have_begun_counts_by_its_pushes():
    """Six pushes of some of eight workers, and two workers go on: the mean is of seven."""
    rule = tfpara.AsyncBMUF(0.5, warmup=False)
    w, state = 0.0, rule.resolve(8).init(0.0)
    for _ in range(6):
        w, state = rule.resolve(8).update(w, state, difference=1.0)
    w, state = rule.resolve(2).update(w, state, difference=8.0)
    assert (state.delta, state.gathered, state.pushes, state.rounds) == (2.0, 0.0, 0.0, 1.0)
    assert w == 6 / 8 + 8 / 2 + 0.5 * 2.0


@pytest.mark.nightly
def test_block_momentum_goes_on_with_other_workers(tmp_path):
    for workers, epochs in ((4, 1), (2, 2), (3, 3)):
        strategy, model = made(tfpara.AsyncBMUF(), keras.optimizers.SGD(0.02), workers)
        train(strategy, model, epochs, [tfpara.AsyncCheckpoint(tmp_path)])
        assert strategy.statistics(model).pushes == 4 * epochs
        assert strategy.rule.workers == workers
    strategy, model = made(tfpara.AsyncBMUF(workers=5), keras.optimizers.SGD(0.02), 3)
    with pytest.raises(tfpara.CheckpointError, match="rule: the checkpoint has .*workers=None"):
        train(strategy, model, 4, [tfpara.AsyncCheckpoint(tmp_path)])


@pytest.mark.nightly
def test_block_momentum_goes_on_from_a_checkpoint(tmp_path):
    found = []
    for folder, stops in (("whole", (4,)), ("parts", (2, 4))):
        for epochs in stops:
            strategy, model = made(tfpara.AsyncBMUF(0.7), keras.optimizers.SGD(0.02), workers=1)
            train(strategy, model, epochs, [tfpara.AsyncCheckpoint(tmp_path / folder)])
        found.append(model.get_weights()[0])
    np.testing.assert_array_equal(*found)
    strategy, model = made(tfpara.Downpour(), keras.optimizers.SGD(0.02), workers=1)
    train(strategy, model, 4)
    assert np.abs(model.get_weights()[0] - found[0]).max() > 1e-3


@pytest.mark.nightly
def test_the_default_over_adam_is_told_of(capfd):
    strategy, model = made(tfpara.AsyncBMUF(), "adam", workers=4)
    train(strategy, model)
    said = "for this local optimizer the rule is AsyncBMUF(block_momentum=None"
    assert said in capfd.readouterr().err
    assert strategy._models.of(model).server.rule.warmup == 5.0
