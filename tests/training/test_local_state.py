"""What goes with weights, slots and steps where a sync, Python or a new compilation writes them.

The references are NumPy, plain Keras models trained alone, and runs that were left alone.
"""

import dataclasses
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib import simulation, stepwise_simulation
from tests.lib.replicas_here import TAU, data_of, make, network, of_replicas
from tfpara.optimizers import NGSGD
from tfpara.sync.notes import Notes
from tfpara.sync.one_sync.state_vars import model_slots
from tfpara.sync.settings import Settings, warn_of_outlasting_momentum

EVEN = [[4] * 8] * 2
UNEVEN = [[4] * 8, [4, 2]]  # the second replica's data end in the first block


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def built(strategy, optimizer):
    model = network(strategy)
    with strategy.scope():
        model.compile(optimizer(), loss())
        model.optimizer.build(model.trainable_variables)
    return model


def by_hand(initial, minibatches, optimizer, at_sync, epochs=2):
    """Plain Keras models, averaged by samples; `at_sync(models, shares)` sees to the slots."""
    models = []
    for _ in minibatches:
        layers = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(5)]
        models.append(keras.Sequential([keras.Input((6,)), *layers]))
        models[-1].compile(optimizer(), loss())
        models[-1].set_weights(initial)
        models[-1].optimizer.build(models[-1].trainable_variables)
    for _ in range(epochs):
        for start in range(0, len(minibatches[0]), TAU):
            samples = np.zeros(len(models))
            for replica, model in enumerate(models):
                for step, size in list(enumerate(minibatches[replica]))[start : start + TAU]:
                    model.train_on_batch(*simulation.batch(replica, step, size))
                    samples[replica] += size
            shares = samples / samples.sum()
            of_all = zip(*(m.get_weights() for m in models), strict=True)
            means = [np.average(ws, 0, shares) for ws in of_all]
            for model in models:
                model.set_weights(means)
            at_sync(models, shares)
    return simulation.flat(models[0].get_weights())


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.3),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, initial_accumulator_value=0.3),
    "sgd": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.9), momentum=0.9
    ),
}


@pytest.mark.nightly_cases("adagrad", "adamw", "sgd")
@pytest.mark.parametrize("name", ["adamw", "nadam", "adagrad", "sgd"])
def test_a_reset_optimizer_steps_like_a_new_one(name):
    strategy = make(tfpara.BSP(), local_state="reset")
    model = built(strategy, OPTIMIZERS[name])
    new = [v.numpy() for v in model.optimizer.variables]

    def renew(models, shares):
        for m in models:
            for variable, value in zip(m.optimizer.variables, new, strict=True):
                if name != "sgd" or "momentum" in variable.path:  # its schedule goes on
                    variable.assign(value)

    initial = model.get_weights()
    model.fit(data_of(strategy, EVEN), epochs=2, verbose=0)
    want = by_hand(initial, EVEN, OPTIMIZERS[name], renew)
    for got in of_replicas(strategy, model):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.nightly
def test_a_schedule_goes_on_where_slots_are_reset_and_blocks_are_by_speed():
    """Replicas have 2 and 4 of the 6 minibatches of a block, and count their mean."""
    options = {"local_state": "reset", "balance": [[2, 4]] * 2}
    strategy = tfpara.simulate(2, tfpara.BSP(), sync_period=3, **options)
    model = built(strategy, OPTIMIZERS["sgd"])
    model.fit(np.ones((12, 6)), np.zeros(12), batch_size=2, verbose=0)
    counts = strategy.experimental_local_results(model.optimizer.iterations.value)
    assert [int(count) for count in counts] == [6, 6]


@pytest.mark.nightly_cases("ftrl")
@pytest.mark.parametrize("name", ["adam", "ftrl"])
def test_replicas_with_the_same_averaged_moments_count_the_same_steps(name):
    strategy = make(tfpara.BSP(), local_state="average")
    model = built(strategy, OPTIMIZERS[name])

    def average(models, shares):
        slots = zip(*(list(m.optimizer.variables) for m in models), strict=True)
        for own in slots:
            count = "iteration" in own[0].path
            values = [v.numpy() for v in own]
            value = max(values) if count else np.average(values, 0, shares)
            for variable in own:
                variable.assign(value)

    initial = model.get_weights()
    model.fit(data_of(strategy, UNEVEN), epochs=2, verbose=0)
    want = by_hand(initial, UNEVEN, OPTIMIZERS[name], average)
    for got in of_replicas(strategy, model):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("local_state", "optimizer", "message"),
    [
        (
            "reset",
            lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9)),
            "from which its learning-rate schedule counts too",
        ),
        (
            "reset",
            lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
            "keeps a second copy of the weights",
        ),
        ("reset", OPTIMIZERS["ftrl"], "would undo the sync before it"),
        ("auto", OPTIMIZERS["ftrl"], "would undo the sync before it"),
    ],
)
def test_a_local_state_that_would_break_the_optimizer_is_refused(local_state, optimizer, message):
    strategy = make(tfpara.BSP(), local_state=local_state)
    model = built(strategy, optimizer)
    with pytest.raises(ValueError, match=message):
        model.fit(data_of(strategy, EVEN), verbose=0)


def test_a_first_worker_with_ftrl_is_refused_where_others_may_join():
    strategy = make(tfpara.BSP(), replicas=1)
    model = built(strategy, OPTIMIZERS["ftrl"])
    strategy.extended.models.company = types.SimpleNamespace(changes=True)
    with pytest.raises(ValueError, match="would undo the sync before it"):
        strategy.extended.models.make(model)


@pytest.mark.parametrize("changes", [False, True])
def test_a_schedule_that_counts_steps_is_told_of_where_workers_come_and_go(changes, capfd):
    strategy = make(tfpara.BSP())
    cosine = keras.optimizers.schedules.CosineDecay(0.1, 100)
    model = built(strategy, lambda: keras.optimizers.AdamW(cosine))
    models = strategy.extended.models
    models.company = types.SimpleNamespace(changes=changes)
    models._note_settings(model, models.settings, types.SimpleNamespace(weights=[], state=[]))
    assert ("callbacks.LearningRate(schedule, " in capfd.readouterr().err) == changes


@pytest.mark.nightly
def test_ftrl_inside_a_multi_optimizer_that_is_not_built_yet_is_refused():
    """Its function makes the optimizers when slots are made, in the first step at the latest."""
    strategy = make(tfpara.BSP())
    model = network(
        strategy, optimizer=lambda: keras.optimizers.MultiOptimizer(lambda _: OPTIMIZERS["ftrl"]())
    )
    with pytest.raises(ValueError, match="would undo the sync before it"):
        strategy.state_bytes(model)


@pytest.mark.nightly
def test_gradients_under_way_stay_through_a_reset():
    """Two minibatches make a step of the optimizer, and three a block."""
    strategy = make(tfpara.BSP(), local_state="reset", replicas=1)
    model = built(strategy, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
    seen = []
    steps = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(int(model.optimizer._iterations.numpy()))
    )
    model.fit(data_of(strategy, EVEN[:1]), verbose=0, callbacks=[steps])
    assert seen == [1, 2, 1, 2, 3, 0, 1, 2]


class OwnSGD(keras.optimizers.SGD):
    """An optimizer of a user's, with a step of its own."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(0.5 * gradient, variable, learning_rate)


LOCAL = {
    "own": lambda: OwnSGD(0.1, momentum=0.9),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "without momentum": lambda: keras.optimizers.SGD(0.1),
    "ng_sgd": lambda: NGSGD(0.1, 0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "muon": lambda: keras.optimizers.Muon(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.9),
}


FITTED = {
    "sgd": lambda model, rate, momentum: keras.optimizers.SGD(rate, momentum),
    "nesterov": lambda model, rate, momentum: keras.optimizers.SGD(rate, momentum, nesterov=True),
    "ng_sgd": lambda model, rate, momentum: NGSGD(rate, momentum).attach(model),
    "scaled": lambda model, rate, momentum: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(rate, momentum), initial_scale=8.0
    ),
    # Its steps are as long whatever its momentum is.
    "muon": lambda model, rate, momentum: keras.optimizers.Muon(
        0.02, momentum=min(0.5, momentum), adam_beta_1=momentum
    ),
    "accumulating": lambda model, rate, momentum: keras.optimizers.SGD(
        rate, momentum, gradient_accumulation_steps=2
    ),
}


@pytest.mark.parametrize(
    ("rule", "options", "optimizer", "fits", "warns"),
    [
        (tfpara.BMUF(), {}, "sgd", True, False),
        (tfpara.BMUF(0.75), {}, "ng_sgd", True, False),
        (tfpara.BMUF(0.1, nesterov=False), {}, "sgd", True, False),
        (tfpara.DiLoCo(0.7, 0.9), {}, "sgd", True, False),
        (tfpara.SlowMo(1.0, 0.5), {}, "sgd", True, False),
        (tfpara.BMUF(0.75), {"overlap": True}, "scaled", True, False),
        (tfpara.BMUF(0.75), {"fragments": 2}, "sgd", True, False),
        (tfpara.BMUF(), {"replicas": 1}, "sgd", False, False),  # 1 - 1/1
        (tfpara.BSP(), {}, "sgd", False, False),
        (tfpara.EASGD(), {}, "sgd", False, False),
        (tfpara.BMUF(0.9), {}, "without momentum", False, False),
        (tfpara.BMUF(0.9, nesterov=False), {}, "adam", True, False),
        (tfpara.BMUF(0.9), {}, "muon", True, False),
        (tfpara.BMUF(0.9), {}, "rmsprop", False, False),
        (tfpara.Outer(lambda: keras.optimizers.Adam(0.1)), {}, "sgd", False, False),
        (tfpara.BMUFAdam(0.9), {}, "adam", False, False),
        # What is not fitted, and not reset, is told.
        (tfpara.BMUF(0.75), {}, "own", False, True),
        (tfpara.BMUF(0.75), {"local_state": "keep"}, "sgd", False, True),
        (tfpara.BMUF(0.75), {"local_state": "average"}, "sgd", False, True),
        (tfpara.BMUF(0.75), {"local_state": "reset"}, "sgd", False, False),
        (tfpara.BMUF(0.75), {"local_state": "keep", "sync_period": 11}, "sgd", False, False),
    ],
)
def test_whose_momentum_is_fitted_to_the_block(rule, options, optimizer, fits, warns, recwarn):
    settings = make(rule, **options).extended.settings
    optimizer = LOCAL[optimizer]()
    assert settings.fits_momentum(optimizer) == fits
    warn_of_outlasting_momentum(settings, optimizer, settings.sync_period)
    assert bool([w for w in recwarn if "remembers about 10" in str(w.message)]) == warns


def on_rows():
    """A model whose first layer has gradients of some rows alone."""
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])


@pytest.mark.nightly_cases(
    *("options0-sgd-1", "options1-nesterov-1", "options2-ng_sgd-1"),
    *("options6-sgd-1", "options7-sgd-1"),
    "*-muon-1",
    "*-accumulating-2",
)
@pytest.mark.parametrize(
    ("options", "made", "accumulated"),
    [
        ({}, "sgd", 1),
        ({}, "nesterov", 1),
        ({}, "ng_sgd", 1),
        ({}, "scaled", 1),
        ({}, "muon", 1),
        ({}, "accumulating", 2),
        ({"overlap": 2}, "sgd", 1),
        ({"sync_period": 4, "fragments": 2}, "sgd", 1),
    ],
)
def test_replicas_with_the_same_data_are_one_with_the_fitted_momentum(options, made, accumulated):
    """The reference is plain Keras; a block momentum of nearly 0 leaves replicas as they are."""
    options = {"sync_period": 8, **options}
    strategy = make(tfpara.BMUF(1e-9), **options)
    make_optimizer = FITTED[made]
    with strategy.scope():
        model = on_rows()
        model.compile(make_optimizer(model, 0.02, 0.9), loss())
    plain = on_rows()
    plain.set_weights(model.get_weights())
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 5, (20, 1, 3, 2)), draw.integers(0, 2, (20, 1, 3))
    both = [np.repeat(each, 2, axis=1).reshape(-1, *each.shape[3:]) for each in (x, y)]
    alone = [each.reshape(-1, *each.shape[3:]) for each in (x, y)]
    for minibatches in (8, 16):  # of a block: the period is changed between two calls of fit
        steps = minibatches // accumulated
        if options.get("fragments") is None:
            strategy.set_sync_period(minibatches)
        else:
            steps = 8
        # By hand from the equation, for m = 0.9: 1 - 5/8, 1 - 5/16, and 0 below five steps.
        momentum, factor = {4: (0.0, 5.0), 8: (0.375, 3.125), 16: (0.6875, 2.5)}[steps]
        former = getattr(plain, "optimizer", None)
        plain.compile(make_optimizer(plain, 0.02 * factor, momentum or 1e-30), loss())
        plain.optimizer.build(plain.trainable_variables)
        for variable, value in zip(
            plain.optimizer.variables, former.variables if former else (), strict=False
        ):
            if "learning_rate" not in variable.path:
                variable.assign(value)
        model.fit(*both, batch_size=6, shuffle=False, verbose=0)
        plain.fit(*alone, batch_size=3, shuffle=False, verbose=0)
    for got in of_replicas(strategy, model):
        want = np.concatenate([w.numpy().ravel() for w in plain.trainable_variables])
        np.testing.assert_allclose(got, want, atol=2e-5)


RATE, MOMENTUM, ETA = 0.01, 0.9, 0.875  # η of eight replicas


def on_a_parabola(local_state, blocks, period):
    """W of Nesterov block momentum on replicas that descend the loss w² from w = 1, in NumPy."""
    rate, momentum = RATE, MOMENTUM
    if local_state == "auto":  # blocks of 5 steps: m' = 1 - 5/5, and half of the rate / (1 - m)
        rate, momentum = 0.5 * RATE / (1.0 - MOMENTUM), 0.0
    point, model, delta, velocity = 1.0, 1.0, 0.0, 0.0
    for _ in range(blocks):
        weight = point
        for _ in range(period):
            velocity = momentum * velocity - rate * 2.0 * weight
            weight += velocity
        delta = ETA * delta + (weight - point)
        model += delta
        point = model + ETA * delta
        velocity = 0.0 if local_state == "reset" else velocity
    return model


@pytest.mark.nightly_cases("keep-True", "reset-False")
@pytest.mark.parametrize(
    ("local_state", "grows"), [("auto", False), ("reset", False), ("keep", True)]
)
@pytest.mark.filterwarnings("ignore:the local optimizer's momentum")
def test_momentum_of_replicas_and_of_blocks_in_a_row(local_state, grows, capfd):
    """Where one replica is stable to a rate 200 times as high, so are those of the default."""
    blocks, period = 30, 5
    strategy = make(tfpara.BMUF(ETA), sync_period=period, local_state=local_state)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse")
    model.set_weights([np.ones((1, 1), np.float32)])
    ones = np.ones((2 * blocks * period, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((ones, 0.0 * ones)).batch(2)
    model.fit(data, verbose=0, shuffle=False)
    expected = on_a_parabola(local_state, blocks, period)
    assert (abs(expected) > 1.0) == grows
    with strategy.weights(model, "global"):
        np.testing.assert_allclose(model.get_weights()[0].item(), expected, rtol=1e-4, atol=1e-7)
    said = "momentum is 0 in place of 0.9, and each step 5 times as large"
    assert capfd.readouterr().err.count(said) == (local_state == "auto")


def on_one_weight(strategy, **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM, **options), "mse")
    model.set_weights([np.ones((1, 1), np.float32)])
    return model


def zeros_for_ones(steps, batch_size=2):
    ones = np.ones((2 * steps, 1), np.float32)
    return tf.data.Dataset.from_tensor_slices((ones, 0.0 * ones)).batch(batch_size)


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("by_epoch", [False, True])
def test_momentum_is_fitted_to_an_epoch_that_is_shorter_than_a_block(by_epoch, capfd):
    """NumPy, of blocks that all end with the epoch: shares of 1/4, with two steps each."""
    strategy = make(tfpara.BMUF(0.5), sync_period=8)
    model = on_one_weight(strategy)
    if by_epoch:  # each replica takes a minibatch of one row in turn
        data = strategy.datasets_by_epoch(lambda epoch, first: zeros_for_ones(2, 1))
    else:
        data = zeros_for_ones(2)
    model.fit(data, validation_data=data, epochs=6, verbose=0)
    weight, delta, point, share = 1.0, 0.0, 1.0, 0.25
    for _ in range(6):
        local = point
        for _ in range(2):  # m' = 0, and half of the rate / (1 - m)
            local -= 0.5 * RATE / (1.0 - MOMENTUM) * 2.0 * local
        update = local - point
        # W' = W + f ηΔ + ζG, and Δ' = (1 - f(1 - η))Δ + ζG: docs/rules.md.
        weight += share * 0.5 * delta + update
        delta = (1.0 - share * 0.5) * delta + update
        point = weight + 0.5 * delta
    with model.distribute_strategy.weights(model, "global"):
        np.testing.assert_allclose(model.get_weights()[0].item(), weight, rtol=1e-5)
    assert capfd.readouterr().err.count("of local SGD would reach from a block of 2 steps") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("steps", "told"), [(14, True), (24, False), (26, False)])
def test_a_last_block_that_local_momentum_outlasts_is_told_of(steps, told, capfd):
    model = on_one_weight(make(tfpara.BMUF(0.5), sync_period=12))
    model.fit(zeros_for_ones(steps), epochs=2, verbose=0)
    said = "an epoch has 14 steps, and its last block 2 of 12: shorter than what the local momentum"
    assert capfd.readouterr().err.count(said) == told


@pytest.mark.nightly
def test_where_gradients_are_accumulated_local_momentum_lasts_for_more_minibatches(capfd):
    """For 20 minibatches here, of which an optimizer without accumulation remembers 10."""
    model = on_one_weight(make(tfpara.BMUF(0.5), sync_period=24), gradient_accumulation_steps=2)
    model.fit(zeros_for_ones(38), verbose=0)
    assert "an epoch has 38 steps, and its last block 14 of 24" in capfd.readouterr().err


FEW = (
    "fit has 21 syncs of 4 replicas. With fewer than about 24 syncs, their model makes more errors"
)


def of_steps(replicas, steps):
    x = np.zeros((steps * replicas, 1), np.float32)
    return {"x": x, "y": x + 1.0, "batch_size": replicas, "verbose": 0}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("replicas", "period", "epochs", "told"),
    [(4, 3, 3, FEW), (4, 3, 4, ""), (2, 20, 2, ""), (4, 1, 1, ""), (4, 20, 1, "")],
)
def test_a_run_of_few_syncs_is_told_of_once(replicas, period, epochs, told, capfd):
    """20 minibatches of each replica in an epoch. A single epoch may be one of many calls."""
    model = on_one_weight(tfpara.simulate(replicas, tfpara.BSP(), sync_period=period))
    model.fit(**of_steps(replicas, 20), epochs=epochs)
    model.fit(**of_steps(replicas, 19), epochs=epochs)
    assert capfd.readouterr().err.count(told or "makes more errors") == bool(told)


@pytest.mark.nightly
@pytest.mark.parametrize("periods", [{0: 1, 1: 20}, {0: 20, 1: 1}])
def test_syncs_are_not_counted_where_a_callback_sets_their_period(periods, capfd):
    model = on_one_weight(tfpara.simulate(4, tfpara.BSP(), sync_period=20))
    periods = tfpara.callbacks.SyncPeriod(periods, verbose=0)
    model.fit(**of_steps(4, 20), epochs=2, callbacks=[periods])
    assert "makes more errors" not in capfd.readouterr().err


def test_how_many_syncs_are_few(capfd):
    def told(steps, replicas):
        company = types.SimpleNamespace(joining=False)
        worker = types.SimpleNamespace(replicas=replicas, rank=0, changes=False, company=company)
        settings = types.SimpleNamespace(device_sync_period=None, fragments=1)
        Notes(settings, worker).few_syncs(2, steps, 1)
        return capfd.readouterr().err

    assert told(np.int64(4), 4) == told(4, 4) != ""  # a count of NumPy's
    assert told(46, 4) != "" and told(47, 4) == ""
    assert told(4, 3) == ""


@pytest.mark.nightly
def test_few_syncs_are_told_of_where_only_the_data_know_their_length(capfd):
    strategy = tfpara.simulate(4, tfpara.BSP(), sync_period=3)
    model = on_one_weight(strategy)
    data = strategy.datasets_by_epoch(lambda epoch, first: zeros_for_ones(40, 1))
    model.fit(data, epochs=3, verbose=0)  # 20 minibatches of each
    assert FEW in capfd.readouterr().err


@pytest.mark.nightly
def test_a_fit_within_a_fit_does_not_begin_the_outer_one_again(capfd):
    strategy = tfpara.simulate(4, tfpara.BSP(), sync_period=3)
    model, other = on_one_weight(strategy), on_one_weight(strategy)

    class Within(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                other.fit(**of_steps(4, 9))

    model.fit(**of_steps(4, 20), epochs=4, callbacks=[Within()])
    assert "makes more errors" not in capfd.readouterr().err


@pytest.mark.nightly
def test_a_later_period_has_a_line_of_its_own(capfd):
    model = on_one_weight(make(tfpara.BMUF(0.5), sync_period=100))
    periods = tfpara.callbacks.SyncPeriod({0: 100, 1: 5}, verbose=0)
    model.fit(zeros_for_ones(200), epochs=3, verbose=0, callbacks=[periods])
    told = [line for line in capfd.readouterr().err.splitlines() if "and count twice" in line]
    assert len(told) == 1 and "a block of 5 steps" in told[0]


LINEAR, SQRT = tfpara.BMUF(0.75, warmup=5.0), tfpara.BMUF(0.5, warmup=20.0)
KEPT = {"local_state": "keep"}


@pytest.mark.parametrize(
    ("rule", "optimizers", "others", "wanted"),
    [
        (tfpara.BMUF(), ["AdamW"], {}, LINEAR),
        (tfpara.BMUF(), ["Muon", "Adam"], {}, LINEAR),
        (tfpara.BMUF(), ["RMSprop"], {}, LINEAR),  # no average of gradients
        (tfpara.BMUF(), ["Nadam"], {}, SQRT),  # whose average is not shortened
        (tfpara.BMUF(), ["ScheduleFreeAdamW"], {}, SQRT),
        (tfpara.BMUF(), ["AdamW"], KEPT, SQRT),
        (
            tfpara.BMUF(nesterov=False),
            ["Adam", "Lion"],
            {},
            dataclasses.replace(SQRT, nesterov=False),
        ),
        (tfpara.BMUF(warmup=3.0), ["Adam", "AdamW"], {}, dataclasses.replace(LINEAR, warmup=3.0)),
        (tfpara.BMUF(warmup=1.0), ["Adam"], {}, dataclasses.replace(LINEAR, warmup=True)),
        (tfpara.BMUFAdam(), ["Adam"], {}, tfpara.BMUFAdam(0.5, warmup=20.0)),
        (tfpara.BMUF(), ["SGD"], {}, None),
        (tfpara.BMUF(), ["SGD", "Adam"], {}, None),
        (tfpara.BMUF("linear"), ["Adam"], {}, None),
        (tfpara.BMUF(0.75), ["Adam"], {}, None),
        (tfpara.BMUF(warmup=False), ["Adam"], {}, None),  # as published
        (tfpara.BMUF(compat="fairseq"), ["Adam"], {}, None),
        (tfpara.BSP(), ["Adam"], {}, None),
    ],
)
def test_the_default_block_momentum_is_that_of_the_local_optimizer(
    rule, optimizers, others, wanted
):
    settings = Settings(
        rule=rule,
        sync_period=2,
        averages={},
        local_state=others.get("local_state", "auto"),
        aggregation="auto",
        timeout_seconds=1.0,
        communication="AUTO",
        collectives="auto",
        data_plan={},
        following_rule=rule,
    ).resolved(4)
    given = [getattr(keras.optimizers, name)() for name in optimizers]
    given[0] = keras.optimizers.LossScaleOptimizer(given[0])
    found = settings.for_optimizers(given)
    assert found.rule == (settings.rule if wanted is None else wanted)
    of_16 = found.following_rule.resolve(16)
    if wanted is None:
        assert of_16 == rule.resolve(16)
    else:
        assert of_16.block_momentum == (0.9 if wanted.block_momentum == 0.75 else 0.75)
        assert of_16.warmup == wanted.warmup
    assert found.of_a_run() == settings.of_a_run()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the local optimizer's momentum")
def test_of_two_optimizers_the_momentum_of_one_is_fitted():
    strategy = make(tfpara.BMUF(ETA), sync_period=2)
    with strategy.scope():
        models = [
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name=f"dense_{name}")])
            for name in "ab"
        ]
        optimizers = [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)]
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.build(model.trainable_variables)
    strategy.track(models, optimizers=optimizers)

    def step():
        for optimizer, model in zip(optimizers, models, strict=True):
            variables = model.trainable_variables
            optimizer.apply([tf.ones(v.shape) for v in variables], variables)

    for _ in range(2):
        strategy.run(tf.function(step))
    sgd, adam = ([v.numpy() for v in o.variables if "kernel" in v.path] for o in optimizers)
    for velocity in sgd:  # of the last step alone, which was 5 times as long
        np.testing.assert_allclose(velocity, -0.5, rtol=1e-6)
    assert np.all(adam) and optimizers[1].iterations.numpy() == 2


class BmufAdam:
    """Nesterov's block momentum with filtered moments, and the local Adams, in NumPy.

    ζ = 1; the equations of Chen, Ding & Huo (2020), with the corrected moments that Keras' single
    counter asks for.
    """

    betas = (0.9, 0.999)
    tau = TAU

    def __init__(self, start, replicas, eta, rate):
        self.eta, self.rate = eta, rate
        self.local = [start.copy() for _ in range(replicas)]
        self.moments = [[np.zeros_like(start), np.zeros_like(start)] for _ in range(replicas)]
        self.steps = [0] * replicas
        self.begin(start)

    def begin(self, start):
        """All replicas and the global model are at `start`; moments are averaged."""
        for own in self.local:
            own[:] = start
        self.w, self.delta, self.rho = start.copy(), np.zeros_like(start), 0.0
        self.share([np.mean(kind, 0) for kind in zip(*self.moments, strict=True)])

    def share(self, moments):
        self.of_block = moments
        self.moments = [[m.copy() for m in moments] for _ in self.local]
        self.steps = [max(self.steps)] * len(self.steps)

    def step(self, replica, gradient):
        self.steps[replica] += 1
        m, v = self.moments[replica]
        m += (1 - self.betas[0]) * (gradient - m)
        v += (1 - self.betas[1]) * (gradient**2 - v)
        b1, b2 = (1 - beta ** self.steps[replica] for beta in self.betas)
        self.local[replica] -= self.rate * (m / b1) / (np.sqrt(v / b2) + 1e-7 / np.sqrt(b2))

    def sync(self, samples, tau, part):
        shares = np.array(samples) / np.sum(samples)
        moved = shares @ np.array(self.local) - (self.w + self.eta * self.delta)
        # Part of the way that a block would have gone at this pace.
        delta = self.eta * self.delta + moved / part
        self.w = self.w + part * delta
        self.delta = self.delta + part * (delta - self.delta)
        rho, former = self.eta * self.rho + tau / part, self.rho
        self.rho = former + part * (rho - former)
        # From w̄, which is `tau` steps from where the replicas began: W + ηΔ.
        ahead = part * rho + self.eta * self.rho - self.eta * former - tau
        count, after = max(self.steps), []
        for beta, start, *ends in zip(self.betas, self.of_block, *self.moments, strict=True):
            mean = shares @ np.array(ends)
            gradient = (mean - beta**tau * start) / (1 - beta**tau)
            on = beta**ahead * mean + (1 - beta**ahead) * gradient
            after.append(on * (1 - beta**count) / (1 - beta ** (count + ahead)))
        self.share(after)
        for own in self.local:
            own[:] = self.w + self.eta * self.delta

    def epoch(self, minibatches, like, syncs=True):
        for start in range(0, len(minibatches[0]), self.tau):
            samples = [0] * len(minibatches)
            for replica, sizes in enumerate(minibatches):
                for step, size in list(enumerate(sizes))[start : start + self.tau]:
                    weights = simulation.unflat(self.local[replica], like)
                    _, gradients = simulation.gradients(
                        weights, *simulation.batch(replica, step, size)
                    )
                    self.step(replica, simulation.flat(gradients))
                    samples[replica] += size
            if syncs:
                steps = min(self.tau, len(minibatches[0]) - start)
                self.sync(samples, steps, steps / self.tau)


class FittedAdam(BmufAdam):
    """The same with the replicas' own moments, whose β₁ is 1 − 5/8 in blocks of 8 steps.

    After t blocks η is t/(t + 5), up to 1/2, which is 1 − 1/N.
    """

    betas = (0.375, 0.999)
    tau = 8
    blocks = 0.0

    def sync(self, samples, tau, part):
        shares = np.array(samples) / np.sum(samples)
        eta = min(0.5, self.blocks / (self.blocks + 5))
        moved = shares @ np.array(self.local) - (self.w + eta * self.delta)
        whole = eta * self.delta + moved / part
        self.w = self.w + part * whole
        self.delta = self.delta + part * (whole - self.delta)
        self.blocks += part
        eta = min(0.5, self.blocks / (self.blocks + 5))
        for own in self.local:
            own[:] = self.w + eta * self.delta


@pytest.mark.nightly_cases("Adam")
@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.AdamW])
def test_default_bmuf_over_adam_is_what_numpy_computes(optimizer, capfd):
    """Blocks of eight, eight and four steps, four times."""
    strategy = make(tfpara.BMUF(), sync_period=8)
    decay = {} if optimizer is keras.optimizers.Adam else {"weight_decay": 0.0}
    model = built(strategy, lambda: optimizer(0.01, **decay))
    initial = model.get_weights()
    reference = FittedAdam(simulation.flat(initial).astype("float64"), 2, 0.5, 0.01)
    minibatches = [[4] * 20, [2, 4] * 10]
    for _ in range(2):
        model.fit(data_of(strategy, minibatches), epochs=2, verbose=0)
    for _ in range(4):
        reference.epoch(minibatches, initial)
    assert reference.blocks > 5
    for got, want in zip(of_replicas(strategy, model), reference.local, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert strategy.rule == tfpara.BMUF(0.5, warmup=5.0) and model.optimizer.beta_1 == 0.9
    told = capfd.readouterr().err
    assert told.count("beta_1 is 0.38 in place") == 1
    assert told.count("divides by the size of gradients, the rule is BMUF (block_momentum=0.5") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("between", "aggregation"),
    [("warm", "sharded"), ("set", "replicated"), ("set", "sharded"), ("nothing", "replicated")],
)
def test_bmuf_adam_knows_how_old_the_moments_are(between, aggregation):
    """After an epoch of replicas alone, after weights were set, where one replica has few data."""
    strategy = make(tfpara.BMUFAdam(0.6), aggregation=aggregation)
    model = built(strategy, OPTIMIZERS["adam"])
    initial = model.get_weights()
    start = simulation.flat(initial).astype("float64")
    reference = BmufAdam(start, 2, 0.6, 0.01)
    warm = between == "warm"
    if warm:
        strategy.set_sync_period(None)
    epochs = 20 if warm else 2
    model.fit(data_of(strategy, UNEVEN), epochs=epochs, verbose=0)
    for _ in range(epochs):
        reference.epoch(UNEVEN, initial, syncs=not warm)
    if warm:
        strategy.broadcast_replica(model, 1)
        strategy.set_sync_period(TAU)
        reference.begin(reference.local[1])
    if between == "set":
        model.set_weights(initial)
        reference.begin(start)
    model.fit(data_of(strategy, UNEVEN), epochs=2, verbose=0)
    for _ in range(2):
        reference.epoch(UNEVEN, initial)
    for got, want in zip(of_replicas(strategy, model), reference.local, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def of_one_weight(period):
    """Two replicas of one weight w with the loss w², which is 1 at first, and their data."""
    strategy = make(tfpara.BMUF(0.5), 2, sync_period=period)
    with strategy.scope():
        ones = keras.initializers.Ones()
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=ones)
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model, np.ones((20, 1), "float32"), np.zeros((20, 1), "float32")


def with_momentum(steps):
    """w after steps of SGD with momentum 0.9, from the equation."""
    w, v = 1.0, 0.0
    for _ in range(steps):
        v = 0.9 * v - 0.01 * 2.0 * w
        w += v
    return w


@pytest.mark.nightly
def test_momentum_is_not_fitted_while_no_sync_is_due(capfd):
    """The epoch has ten steps, and its end is no sync that moves momentum on."""
    model, x, y = of_one_weight(60)
    model.distribute_strategy.set_sync_period(None)
    model.fit(x, y, batch_size=2, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0][0, 0], with_momentum(10), rtol=1e-5)
    assert "blocks are of" not in capfd.readouterr().err


@pytest.mark.nightly
def test_an_epoch_that_was_broken_off_does_not_shorten_later_blocks():
    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model, x, y = of_one_weight(100)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[Breaks()])
    model.set_weights([np.ones((1, 1))])
    for variable in model.optimizer.variables[2:]:  # after the step count and the rate
        variable.assign(np.zeros(variable.shape))
    for _ in range(12):
        model.train_on_batch(x[:2], y[:2])
    (replica, _) = of_replicas(model.distribute_strategy, model)
    np.testing.assert_allclose(replica, [with_momentum(12)], rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("aggregation", ["replicated", "sharded"])
def test_a_block_that_is_begun_anew_has_the_moments_of_its_beginning(aggregation):
    """As by a worker of an elastic run that missed a sync: where the last sync left replicas."""
    strategy = make(tfpara.BMUFAdam(0.6), aggregation=aggregation)
    model = built(strategy, OPTIMIZERS["adam"])

    def moments():
        optimizer = model.optimizer
        return [
            [value.numpy() for value in strategy.experimental_local_results(v.value)]
            for v in (*optimizer._momentums, *optimizer._velocities)
        ]

    model.fit(data_of(strategy, [[4] * TAU] * 2), verbose=0)
    weights, begun = of_replicas(strategy, model), moments()
    keeper = Keeper(moments)
    model.fit(data_of(strategy, [[4] * (TAU - 1)] * 2), verbose=0, callbacks=[keeper])
    assert np.ptp(keeper.within[0][0] - begun[0][0]) > 1e-4
    for got, want in zip(keeper.anew, begun, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(keeper.weights, weights, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


class Keeper(keras.callbacks.Callback):
    """Begins the block anew after its second step; keeps the moments before and after that."""

    def __init__(self, moments):
        super().__init__()
        self.moments = moments

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            strategy = self.model.distribute_strategy
            self.within = self.moments()
            synchronizer = strategy.synchronizer_of(self.model)
            synchronizer.start_from(synchronizer.broadcast_point())
            self.anew, self.weights = self.moments(), of_replicas(strategy, self.model)


@pytest.mark.nightly
def test_bmuf_adam_of_one_replica_is_adam_where_loss_scaling_leaves_steps_out():
    """All steps of the first block are, so that Adam has counted none where it is synced."""

    def compile_(model):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**127)
        model.compile(optimizer, loss(), loss_weights=[1000.0])

    strategy = make(tfpara.BMUFAdam(0.0), 1)
    model = network(strategy)
    with strategy.scope():
        compile_(model)
    initial = model.get_weights()
    model.fit(data_of(strategy, [[4] * 10]), epochs=2, verbose=0)
    plain = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(5)]
    )
    compile_(plain)
    plain.set_weights(initial)
    for _ in range(2):
        for step in range(10):
            plain.train_on_batch(*simulation.batch(0, step, 4))
    steps, plain_steps = (
        int(keras.ops.convert_to_numpy(m.optimizer.inner_optimizer.iterations))
        for m in (model, plain)
    )
    assert steps == plain_steps and TAU < 20 - steps < 20
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


ADOPTED = {
    "bmuf_adam": (tfpara.BMUFAdam(0.6), {}),
    "outer": (tfpara.Outer(lambda: keras.optimizers.Adam(0.1)), {"fragments": 2}),
    "easgd-int8": (tfpara.EASGD(0.3), {"compression": "int8", "overlap": True}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ADOPTED)
def test_compiling_with_the_same_optimizer_changes_nothing(name):
    ends = []
    for again in (False, True):
        rule, options = ADOPTED[name]
        averages = {"ema": tfpara.EMA(0.9, num_updates=True), "ma": tfpara.MA()}
        strategy = make(rule, averages=averages, **options)
        model = built(strategy, OPTIMIZERS["adam"])
        for _ in range(2):
            model.fit(data_of(strategy, UNEVEN), verbose=0)
            if again:
                with strategy.scope():
                    model.compile(model.optimizer, loss())
                strategy.extended.models.make(model)
        ends.append(of_replicas(strategy, model))
        for which in averages:
            with strategy.weights(model, which):
                ends[-1] += of_replicas(strategy, model)
    for left_alone, compiled_again in zip(*ends, strict=True):
        np.testing.assert_array_equal(compiled_again, left_alone)


@pytest.mark.nightly
def test_freezing_keeps_what_rounding_has_left_out():
    strategy = make(tfpara.BMUF(0.6), compression="int8")
    model = network(strategy)
    model.fit(data_of(strategy, EVEN), verbose=0)

    def left_out(synchronizer):
        """Of the last layer's weights, on each replica."""
        wire, layout = synchronizer.graph.compressed, synchronizer.graph.replicas.layout
        errors = wire._errors
        sizes = [int(p.shape[0]) for p in wire.points]
        rows = [[e[:n] for e, n in zip(own, sizes, strict=True)] for own in errors]
        return [[t.numpy() for t in layout.unpack(row)[-2:]] for row in rows]

    before = left_out(strategy.synchronizer_of(model))
    assert np.abs(before[0][0]).max() > 0
    model.layers[0].trainable = False
    after = left_out(strategy.synchronizer_of(model))
    for own, kept in zip(before, after, strict=True):
        for a, b in zip(own, kept, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_an_outer_optimizer_starts_again_where_weights_are_set():
    """As in a new run from these weights; with plain SGD the replicas have nothing else."""
    rule, options = ADOPTED["outer"]
    ends, weights = [], None
    for former_epochs in (2, 0):
        strategy = make(rule, **options)
        model = network(strategy)
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), loss())
        if former_epochs:
            model.fit(data_of(strategy, EVEN), epochs=former_epochs, verbose=0)
            layer = model.layers[0]
            layer.set_weights([w + 0.1 for w in layer.get_weights()])
            weights = model.get_weights()
        else:
            model.set_weights(weights)
        model.fit(data_of(strategy, EVEN), epochs=2, verbose=0)
        ends.append(of_replicas(strategy, model)[0])
    np.testing.assert_allclose(*ends, atol=1e-6)


@pytest.mark.nightly
def test_block_momentum_is_as_old_as_before_where_weights_are_set():
    """A weight that is set loses its momentum, others keep theirs, and the warm-up is over."""
    strategy = make(tfpara.BMUF())
    model = network(strategy)
    model.fit(data_of(strategy, EVEN), epochs=2, verbose=0)

    def of_rule(field):
        cells = strategy.synchronizer_of(model).graph.global_state.cells()
        (found,) = (cell.variable.numpy() for cell in cells if cell.field == f"rule/{field}")
        return found

    blocks, before = of_rule("blocks"), of_rule("delta")
    assert blocks > 1 and np.abs(before).min() > 0
    kernel = model.layers[0].kernel
    kernel.assign(kernel + 0.1)
    strategy.synchronize()
    after = of_rule("delta")
    lost = kernel.shape.num_elements()
    assert (after == 0).sum() == lost and (after == before).sum() == len(before) - lost
    assert of_rule("blocks") == blocks


@pytest.mark.nightly
def test_devices_are_not_averaged_while_replicas_are_independent():
    strategy = make(tfpara.BSP(), device_sync_period=1)
    model = network(strategy)
    initial = model.get_weights()
    strategy.set_sync_period(None)
    model.fit(data_of(strategy, EVEN), epochs=2, verbose=0)
    alone = [
        simulation.simulate(
            "bsp", initial, [[], []][:replica] + [EVEN[replica]], TAU, sgd, epochs=2
        )
        for replica in range(2)
    ]
    for got, (local, _, _) in zip(of_replicas(strategy, model), alone, strict=True):
        np.testing.assert_allclose(got, local[-1], atol=1e-5)


def sgd():
    return simulation.Momentum(0.2, 0.9)


@pytest.mark.nightly
def test_a_replica_is_broadcast_as_the_closing_sync_leaves_it():
    """Under BSP that is the mean of the replicas, also of their statistics."""
    strategy = make(tfpara.BSP(), sync_period=4)
    model = network(strategy, norm=True)
    seen = []

    def broadcast(batch, logs):
        if batch == 4:  # a step after a sync
            seen.append(of_replicas(strategy, model, model.weights))
            strategy.broadcast_replica(model, 1)
            seen.append(of_replicas(strategy, model, model.weights))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=broadcast)
    model.fit(data_of(strategy, EVEN), verbose=0, callbacks=[callback])
    before, after = seen
    assert np.abs(before[0] - before[1]).min() > 0
    for own in after:
        np.testing.assert_allclose(own, np.mean(before, 0), atol=1e-6)


def mean_of_all(minibatches, loss, rate, initial):
    """A plain model that takes one step on all replicas' minibatches together."""
    model = keras.Sequential([keras.Input((None, 6)), keras.layers.Dense(5)])
    model.compile(keras.optimizers.SGD(rate), loss)
    model.set_weights(initial)
    for step in minibatches:
        longest = max(w.shape[1] for _, _, w in step)
        padded = [
            [np.pad(a, [(0, 0), (0, longest - a.shape[1])] + [(0, 0)] * (a.ndim - 2)) for a in one]
            for one in step
        ]
        model.train_on_batch(*(np.concatenate(part) for part in zip(*padded, strict=True)))
    return model.get_weights()


def of_sequences(loss_of_frames):
    strategy = make(tfpara.BSP(), sync_period=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((None, 6)), keras.layers.Dense(5)])
        model.compile(keras.optimizers.SGD(0.5), loss_of_frames)
    return strategy, model


def sequence_data(strategy, minibatches):
    of_frames = [tf.TensorSpec([None, None], kind) for kind in ("int32", "float32")]
    spec = (tf.TensorSpec([None, None, 6]), *of_frames)
    return strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_generator(
            lambda: (one for step in minibatches for one in step), output_signature=spec
        )
    )


def sequences(rng, rows, frames, real):
    """Rows of frames with labels and weights, of which `real` frames count."""
    weights = np.zeros(rows * frames, "float32")
    weights[rng.permutation(rows * frames)[:real]] = 1.0
    x = rng.normal(size=(rows, frames, 6)).astype("float32")
    y = rng.integers(0, 5, (rows, frames)).astype("int32")
    return x, y, weights.reshape(rows, frames)


PADDED, SHORTER = [(4, 6, 20), (4, 6, 3)], [(4, 6, 20), (2, 2, 3)]  # rows, frames, real frames
# How the loss reduces, and what both losses together are divided by (None: as Keras does).
WEIGHTED = {
    "padding": ("sum_over_batch_size", PADDED, None),
    "shorter": ("sum_over_batch_size", SHORTER, 24 + 4),
    "real frames": ("mean_with_sample_weight", SHORTER, None),
    "sum": ("sum", SHORTER, 2),
}


@pytest.mark.nightly_cases("padding", "real frames", "sum")
@pytest.mark.parametrize("name", WEIGHTED)
def test_every_frame_has_the_same_say_whichever_replica_it_came_to(name):
    """Model averaging at every step is plain SGD on all minibatches together."""
    reduction, kinds, divisor = WEIGHTED[name]
    rng = np.random.default_rng(0)
    minibatches = [[sequences(rng, *kind) for kind in kinds] for _ in range(4)]
    loss_of_frames = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    strategy, model = of_sequences(loss_of_frames)
    initial = model.get_weights()
    model.fit(sequence_data(strategy, minibatches), verbose=0)
    rate = 0.5
    if divisor:
        rows, longest = sum(r for r, _, _ in kinds), max(t for _, t, _ in kinds)
        rate *= (1 if reduction == "sum" else rows * longest) / divisor
    want = mean_of_all(minibatches, loss_of_frames, rate, initial)
    for got, value in zip(model.get_weights(), want, strict=True):
        np.testing.assert_allclose(got, value, atol=1e-6)


@pytest.mark.nightly
def test_a_minibatch_counts_what_the_user_says():
    """The real frames, where the loss divides by all: those of a replica count more."""
    rng = np.random.default_rng(0)
    minibatches = [[sequences(rng, *kind) for kind in PADDED] for _ in range(4)]
    loss_of_frames = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    strategy, model = of_sequences(loss_of_frames)
    strategy.weigh_minibatches(lambda minibatch: tf.reduce_sum(minibatch[2]))
    initial = model.get_weights()
    model.fit(sequence_data(strategy, minibatches), verbose=0)
    with pytest.raises(ValueError, match="right after the strategy is made"):
        strategy.weigh_minibatches(len)
    says = np.float32([2 * 20 / 23, 2 * 3 / 23])
    said = [
        [(x, y, w * say) for (x, y, w), say in zip(step, says, strict=True)] for step in minibatches
    ]
    want = mean_of_all(said, loss_of_frames, 0.5, initial)
    for got, value in zip(model.get_weights(), want, strict=True):
        np.testing.assert_allclose(got, value, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "weight", [lambda _: 1, lambda minibatch: tf.reduce_mean(minibatch[0]) ** 0]
)
def test_a_replica_without_samples_does_not_count_whatever_the_user_says(weight):
    minibatches = [[4] * 5, [4] * 3]
    strategy = make(tfpara.BSP(), sync_period=1)
    strategy.weigh_minibatches(weight)
    model = network(strategy)
    initial = model.get_weights()
    model.fit(data_of(strategy, minibatches), epochs=2, verbose=0)
    want, *_ = stepwise_simulation.simulate(
        "bsp", initial, minibatches, 1, lambda: simulation.Momentum(0.2, 0.9), epochs=2
    )
    for got in of_replicas(strategy, model):
        np.testing.assert_allclose(got, want[0], atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1.0])
def test_what_cannot_be_counted_is_an_error(count):
    strategy, model = of_sequences(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    strategy.weigh_minibatches(lambda minibatch: tf.constant(count))
    rng = np.random.default_rng(0)
    data = sequence_data(strategy, [[sequences(rng, *kind) for kind in PADDED]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="replica 0 .* negative number, NaN"):
        model.fit(data, verbose=0)


class Scaled(keras.layers.Layer):
    """y = a b x, with weights of the shapes () and (1,)."""

    def build(self, shape):
        self.a = self.add_weight(shape=(), initializer="ones", name="a")
        self.b = self.add_weight(shape=(1,), initializer="ones", name="b")

    def call(self, x):
        return x * self.a * self.b


@pytest.mark.nightly
@pytest.mark.parametrize("local_state", ["average", "reset"])
@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.Nadam])
def test_slots_of_a_weight_without_a_shape_are_those_of_any_weight(kind, local_state):
    strategy = make(tfpara.BSP(), sync_period=1, local_state=local_state)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Scaled()])
        model.compile(kind(0.1), "mse")
    x, y = np.random.default_rng(5).random((2, 8, 3)).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0)
    for slots in (model.optimizer._momentums, model.optimizer._velocities):
        (a, b), (a_there, b_there) = of_replicas(strategy, model, slots)
        assert a == a_there == b == b_there and (a == 0.0) == (local_state == "reset")
    assert float(model.optimizer.learning_rate) == np.float32(0.1)


@pytest.mark.nightly
def test_nadam_inside_a_loss_scale_optimizer_keeps_its_product_of_momenta():
    strategy = make(tfpara.BSP(), sync_period=1, local_state="reset")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        inner = keras.optimizers.Nadam(0.1)
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    x, y = np.random.default_rng(5).random((2, 8, 3)).astype("float32")
    model.fit(x, y[:, :1], batch_size=8, verbose=0)
    products = strategy.experimental_local_results(inner._u_product.value)
    assert [float(product) for product in products] == [1.0, 1.0]  # a sync has reset them
    saved = {id(slot.variable) for slot in model_slots(model)}
    assert all(id(product) in saved for product in products)
