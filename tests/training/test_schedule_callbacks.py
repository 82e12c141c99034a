"""The callbacks of the schedules, with and without a strategy, on tiny models."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.callbacks import Checkpoint, HeldOut
from tfpara.callbacks.schedule import LearningRate, SyncPeriod, learning_rate
from tfpara.callbacks.stopping import Newbob, OverfittingGuard
from tfpara.callbacks.warm_start import WarmStart
from tfpara.schedules import (
    AdaComm,
    Exponential,
    Hand,
    NewbobRule,
    OverfittingRule,
    Piecewise,
    Quadratic,
)
from tfpara.steps import without_tuner
from tfpara.sync.keras.training_state import TrainingState

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype("float32")
Y = X[:, :3].argmax(1)


def minibatches(first=0, end=12):
    """Minibatches `first` … `end` − 1 of 12."""
    part = slice(8 * first, 8 * end)
    return without_tuner(tf.data.Dataset.from_tensor_slices((X[part], Y[part])).batch(8))


def held_out():
    return minibatches(0, 5)


def make_strategy(rule=None, **options):
    options = {"sync_period": 2, "devices": ["CPU:0", "CPU:1"], **options}
    return tfpara.PeriodicSyncStrategy(rule or tfpara.BMUF(), **options)


@pytest.fixture(params=["plain", "two replicas"])
def strategy(request):
    return None if request.param == "plain" else make_strategy()


def make_model(strategy=None, optimizer=None, dropout=0.0, normalise=False, **options):
    with (strategy or tf.distribute.get_strategy()).scope():
        layers = [keras.Input((4,)), keras.layers.Dense(6, activation="tanh")]
        layers += [keras.layers.BatchNormalization(momentum=0.5)] if normalise else []
        layers += [keras.layers.Dropout(dropout)] if dropout else []
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = optimizer or (lambda: keras.optimizers.SGD(0.5, momentum=0.5))
        model.compile(optimizer(), loss, metrics=["accuracy"], **options)
    return model


class Scores(keras.callbacks.Callback):
    """Puts given numbers into the logs, and collects what other callbacks did."""

    def __init__(self, **columns):
        super().__init__()
        self.columns = columns

    def on_epoch_end(self, epoch, logs=None):
        logs.update({name: values[epoch] for name, values in self.columns.items()})


def components(model):
    """Every component of every weight, slot and random state."""
    first = model.distribute_strategy.experimental_local_results
    variables = [*model.variables, *model.optimizer.variables]
    return [c.numpy() for v in variables for c in first(v.value)]


def to_the_begin(model):
    """Returns a function that makes the model's next `fit` begin as its first.

    One model is then traced once for two runs that are compared. What it failed to put back would
    be left over from the first run, and would part the second from it.
    """
    begin, rate = TrainingState(model), model.optimizer.learning_rate.numpy()

    def put_back():
        begin.restore()
        model.optimizer.learning_rate = rate

    return put_back


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def fit(model, callbacks, epochs=1, initial_epoch=0, data=None):
    return model.fit(
        data or minibatches(),
        epochs=epochs,
        initial_epoch=initial_epoch,
        callbacks=callbacks,
        verbose=0,
    ).history


LOSSES = [2.0, 1.9, 1.895, 1.8, 1.79, 1.7899, 1.0]  # halves from the third, stops at the sixth
RATES = [0.5, 0.5, 0.5, 0.25, 0.125, 0.0625]


def test_newbob_halves_and_stops(strategy, capsys):
    model = make_model(strategy)
    newbob = Newbob("validation_loss")
    log = fit(model, [Scores(validation_loss=LOSSES), newbob], epochs=7)
    assert log["learning_rate"] == RATES
    assert newbob.stopped
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0] == "Epoch 3: Newbob: validation_loss gained 0.263%; learning rate 0.25."
    assert lines[3].endswith("less than 0.1%: stops.")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["two replicas"], indirect=True)
def test_newbob_by_accuracy_with_one_fit_per_epoch(strategy):
    model = make_model(strategy)
    newbob = Newbob("accuracy_", rule=NewbobRule.accuracy(), verbose=0)
    callbacks = keras.callbacks.CallbackList(
        [Scores(accuracy_=[0.5, 0.52, 0.5249, 0.53, 0.5309, 1]), newbob],
        add_history=True,
        epochs=6,
        model=model,
    )
    rates = []
    for epoch in range(6):
        history = model.fit(
            minibatches(), initial_epoch=epoch, epochs=epoch + 1, callbacks=callbacks
        )
        rates.append(history.history["learning_rate"][-1])
        if model.stop_training:
            break
    assert rates == [0.5, 0.5, 0.5, 0.25, 0.125]
    assert newbob.stopped


@pytest.mark.nightly
def test_newbob_scores_the_global_model_itself():
    model = make_model(make_strategy(tfpara.EASGD(0.1)))
    newbob = Newbob(held_out(), verbose=0)
    log = fit(model, [newbob, HeldOut(held_out(), name="again")], epochs=2)
    assert log["validation_loss"] == log["again_loss"]
    assert log["validation_accuracy"] == log["again_accuracy"]
    gain = (log["validation_loss"][0] - log["validation_loss"][1]) / log["validation_loss"][0]
    assert newbob.get_state()["gain"] == pytest.approx(gain)


def test_newbob_compares_the_first_epoch_with_the_initial_model():
    model = make_model(optimizer=lambda: keras.optimizers.SGD(0.0))
    with_initial, without = Newbob(held_out(), verbose=0), Newbob(held_out(), score_first=False)
    assert fit(model, [with_initial], epochs=5)["learning_rate"] == [0.0, 0.0]
    assert with_initial.stopped
    assert len(fit(model, [without], epochs=5)["loss"]) == 3


def test_newbob_goes_on_from_its_saved_state():
    model = make_model()
    newbob = Newbob("validation_loss", verbose=0)
    scores = Scores(validation_loss=LOSSES)
    fit(model, [scores, newbob], epochs=4)
    state, rate = json.loads(json.dumps(newbob.get_state())), learning_rate(model)
    resumed, model = Newbob("validation_loss", verbose=0), make_model()
    resumed.set_state(state)
    model.optimizer.learning_rate = rate  # as Checkpoint does
    log = fit(model, [scores, resumed], epochs=7, initial_epoch=4)
    assert log["learning_rate"] == RATES[4:]
    assert resumed.stopped


def adam():
    return keras.optimizers.Adam(0.5)


@pytest.mark.nightly_cases("bmuf adam", "bmuf int8 overlapped", "easgd", "outer adam")
@pytest.mark.parametrize(
    ("rule", "optimizer", "options"),
    [
        (None, adam, {}),
        (tfpara.BMUF(0.5), None, {"overlap": True, "fragments": 2, "compression": "int8"}),
        (tfpara.BMUFAdam(0.5), adam, {"averages": {"ma": tfpara.MA()}}),
        (tfpara.EASGD(0.1), adam, {"averages": {"ema": tfpara.EMA(0.5)}}),
        (tfpara.Outer(lambda: keras.optimizers.Adam(0.1)), None, {"local_state": "average"}),
    ],
    ids=["plain", "bmuf int8 overlapped", "bmuf adam", "easgd", "outer adam"],
)
def test_a_rejected_epoch_leaves_no_trace_but_in_the_rate(rule, optimizer, options):
    """As if the epoch had not been: bit for bit on the way of a run without it."""
    strategy = None if rule is None else make_strategy(rule, **options)
    model = make_model(strategy, optimizer, dropout=0.2, normalise=True)
    rate = model.optimizer.learning_rate
    local_results = model.distribute_strategy.experimental_local_results
    put_back = to_the_begin(model)
    found = []
    # One run takes two epochs and goes on at half the rate. The other has between them an epoch
    # that is worse than the second.
    for scores, epochs in (([2.0, 1.0, 0.5], 3), ([2.0, 1.0, 1.5, 0.5], 4)):
        put_back()
        newbob = Newbob("s", rule=NewbobRule(reject_worse=True), verbose=0)
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: (0.5, 0.5, 0.25)[epoch])
        fit(model, [Scores(s=scores), newbob if epochs == 4 else halve], epochs=epochs)
        variables = [v for v in (*model.variables, *model.optimizer.variables) if v is not rate]
        values = [c.numpy() for v in variables for c in local_results(v.value)]
        for which in strategy.weight_names if strategy else ():
            with strategy.weights(model, which):
                values += [w.numpy() for w in model.trainable_variables]
        found.append(values)
    assert len(found[0]) > 15
    assert_same(*found)


@pytest.mark.nightly
def test_going_back_counts_what_was_done():
    strategy = make_strategy(tfpara.BSP())
    model = make_model(strategy)
    newbob = Newbob("s", rule=NewbobRule(reject_worse=True), verbose=0)
    fit(model, [Scores(s=[1.0, 2.0]), newbob], epochs=2)
    statistics = strategy.statistics()
    assert (statistics.steps, statistics.samples, statistics.syncs) == (24, 192, 12)


def test_overfitting_guard(capsys):
    model = make_model()
    #                   gaps:   0   0.1   0.14   0.17
    scores = Scores(t_accuracy=[0.5, 0.6, 0.7, 0.8, 0.9], v_accuracy=[0.6, 0.5, 0.56, 0.63, 0.9])
    guard = OverfittingGuard("t_accuracy", "v_accuracy", OverfittingRule(0.12, patience=2))
    log = fit(model, [scores, guard], epochs=5)
    assert len(log["loss"]) == 4
    assert guard.stopped
    assert "training error 0.2, validation error 0.37" in capsys.readouterr().out


@pytest.mark.nightly
def test_overfitting_guard_goes_on_from_its_saved_state():
    scores = Scores(t=[0.5, 0.5, 0.5, 0.5], v=[0.5, 0.6, 0.6, 0.6])
    first, second = (OverfittingGuard("t", "v", OverfittingRule(patience=3)) for _ in range(2))
    fit(make_model(), [scores, first], epochs=2)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert len(fit(make_model(), [scores, second], epochs=9, initial_epoch=2)["loss"]) == 2


def test_learning_rate_per_epoch_is_that_of_keras():
    schedule = Exponential(0.5, epochs=3)
    log = fit(make_model(), [LearningRate(schedule)], epochs=4)
    theirs = fit(make_model(), [keras.callbacks.LearningRateScheduler(schedule)], epochs=4)
    assert log["learning_rate"] == theirs["learning_rate"]
    assert log["learning_rate"] == pytest.approx([0.5, 0.05, 0.005, 0.005])


@pytest.mark.parametrize(
    ("strategy", "steps_per_execution"),
    [("plain", 1), ("two replicas", 3)],
    indirect=["strategy"],
)
def test_learning_rate_within_epochs(strategy, steps_per_execution):
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(learning_rate(model))
    )
    fit(model, [LearningRate(Hand(0.5, 12, factor=0.9), steps_per_epoch=12), look], epochs=2)
    steps = range(0, 24, steps_per_execution)
    assert seen == pytest.approx([0.5 * 0.9**step for step in steps])


def test_rates_may_be_given_by_epochs():
    log = fit(make_model(), [LearningRate({0: 0.1, 2: 0.01})], epochs=3)
    assert log["learning_rate"] == pytest.approx([0.1, 0.1, 0.01])


def test_hand_trains_as_keras_decay_at_every_step():
    ours, theirs = make_model(), make_model()
    theirs.set_weights(ours.get_weights())
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.9)
    theirs.compile(keras.optimizers.SGD(schedule, momentum=0.5), theirs.loss)
    fit(ours, [LearningRate(Hand(0.5, 12, factor=0.9), steps_per_epoch=12)], epochs=2)
    fit(theirs, [], epochs=2)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("before", [12, 24])
def test_learning_rate_resumes_inside_an_epoch(before):
    """`before`: the minibatches of a replica in an epoch; 24 if the run had half the replicas."""

    def rates(callback, initial_epoch, data, seen):
        model = make_model()
        look = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: seen.append(learning_rate(model)),
            on_train_batch_end=lambda batch, logs: states.append(callback.get_state()),
        )
        fit(model, [callback, look], epochs=3, initial_epoch=initial_epoch, data=data)
        return seen

    states = []
    whole = rates(LearningRate(Hand(0.5, 12), 12), 0, minibatches(), [])
    resumed = LearningRate(Hand(0.5, 12), 12)
    state = json.loads(json.dumps(states[12 + 4]))
    steps = state["steps"] * before // 12
    resumed.set_state({**state, "steps": steps, "steps_per_epoch": before})
    # The second epoch goes on with its last seven minibatches.
    rest = rates(resumed, 1, minibatches(5), [])
    assert rest[:7] == whole[17:24]
    assert rest[7:] == whole[24:31]  # and the third from its begin


def test_sync_period_by_epoch():
    strategy = make_strategy(tfpara.BSP())
    model = make_model(strategy)
    syncs = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: syncs.append(strategy.statistics().syncs)
    )
    log = fit(model, [SyncPeriod({0: 1, 2: 4, 3: 7}, verbose=0), look], epochs=4)
    assert log["sync_period"] == [1, 1, 4, 7]
    assert np.diff([0, *syncs]).tolist() == [12, 12, 3, 2]
    assert strategy.sync_period == 7


@pytest.mark.nightly
def test_sync_period_by_the_rate_and_by_the_loss():
    strategy = make_strategy(tfpara.BSP())
    model = make_model(strategy)
    by_rate = Quadratic(Exponential(0.4, 3, 0.1), alpha=0.8, first=5)
    assert fit(model, [SyncPeriod(by_rate, verbose=0)], epochs=3)["sync_period"] == [5, 16, 64]
    syncs = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: syncs.append(strategy.statistics().syncs)
    )
    before = strategy.statistics().syncs
    log = fit(model, [SyncPeriod(AdaComm(6), verbose=0), look], epochs=4)
    periods = [6, 6]
    for loss in log["loss"][1:3]:
        wanted = math.ceil(math.sqrt(loss / log["loss"][0]) * 6)
        periods.append(wanted if wanted < periods[-1] else math.ceil(periods[-1] / 2))
    assert log["sync_period"] == periods
    assert len(set(periods)) > 1
    assert np.diff([before, *syncs]).tolist() == [math.ceil(12 / period) for period in periods]


def test_what_gives_no_sync_periods():
    strategy = make_strategy(tfpara.BSP())
    model = make_model(strategy)
    with pytest.raises(ValueError, match="sync period of epoch 0=2.5 must be a whole number"):
        fit(model, [SyncPeriod(lambda epoch: 2.5)])
    with pytest.raises(TypeError, match="periods=20 must be periods by epochs"):
        SyncPeriod(20)


def warm_fit(strategy, model, warm, callbacks, epochs):
    """Every minibatch is in turn that of a replica; one fit for each epoch."""
    for epoch in range(epochs):

        def of_worker(_, epoch=epoch):
            count, mine = warm.replicas(strategy, epoch)
            numbered = minibatches().enumerate()
            mine = tf.constant(mine, tf.int64)
            dataset = numbered.filter(lambda k, _: tf.reduce_any(k % count == mine))
            return warm.to_every_replica(strategy, epoch, dataset.map(lambda _, batch: batch))

        data = strategy.distribute_datasets_from_function(of_worker)
        fit(model, callbacks, epoch + 1, epoch, data)


@pytest.mark.nightly_cases("EASGD")
@pytest.mark.parametrize(
    "rule", [tfpara.BMUF(0.9), tfpara.EASGD(0.3)], ids=lambda r: type(r).__name__
)
def test_warm_start_is_one_replica_alone(rule):
    strategy = make_strategy(rule, averages={"ma": tfpara.MA()})
    model = make_model(strategy, normalise=True)
    plain = make_model(normalise=True)
    plain.set_weights(model.get_weights())
    warm = WarmStart(epochs=2, verbose=0)
    warm_fit(strategy, model, warm, [warm, HeldOut(held_out())], 2)
    fit(plain, [], epochs=2)
    want = plain.get_weights()
    for which in ("global", "local", "ma"):
        with strategy.weights(model, which):
            for a, b in zip(model.get_weights(), want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6)
    assert strategy.statistics().syncs == 0
    assert strategy.sync_period == 2
    assert model.evaluate(held_out(), verbose=0) == pytest.approx(
        plain.evaluate(held_out(), verbose=0), rel=1e-4
    )
    # Then every replica has its own half, and they sync.
    warm_fit(strategy, model, warm, [warm], 3)
    assert strategy.statistics().syncs == 3


@pytest.mark.nightly
def test_warm_start_goes_on_from_the_first_replica_where_dropout_parts_them():
    strategy = make_strategy(tfpara.BMUF(0.9))
    model = make_model(strategy, dropout=0.5)
    before = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            first = strategy.experimental_local_results
            before[:] = [[c.numpy() for c in first(w.value)] for w in model.trainable_variables]

    warm = WarmStart(verbose=0)
    warm_fit(strategy, model, warm, [Look(), warm], 1)
    assert not np.array_equal(*before[0])
    for variable, (first, _) in zip(model.trainable_variables, before, strict=True):
        for component in strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(component.numpy(), first)


@pytest.mark.nightly
@pytest.mark.parametrize("asks", [False, True])
def test_warm_start_says_where_the_data_do_not_ask_it(capsys, asks):
    strategy = make_strategy()
    warm, model = WarmStart(verbose=0), make_model(strategy)
    if asks:
        warm_fit(strategy, model, warm, [warm], 1)
    else:
        fit(model, [warm])
    assert ("did not ask `replicas`" in capsys.readouterr().err) == (not asks)


def test_warm_start_without_a_strategy_changes_nothing():
    warm, model = WarmStart(), make_model()
    assert warm.replicas(None, 0) == warm.replicas(None, 5) == (1, [0])
    data = minibatches()
    assert warm.to_every_replica(None, 0, data) is data
    with_it, plain = make_model(), model
    with_it.set_weights(model.get_weights())
    fit(with_it, [warm])
    fit(plain, [])
    assert_same(with_it.get_weights(), plain.get_weights())


def test_warm_start_gives_every_replica_its_data():
    strategy = make_strategy()
    warm = WarmStart(epochs=1)
    assert warm.replicas(strategy, 0) == (1, [0])
    assert warm.replicas(strategy, 1) == (2, [0, 1])
    numbers = tf.data.Dataset.range(3)
    assert [int(n) for n in warm.to_every_replica(strategy, 0, numbers)] == [0, 0, 1, 1, 2, 2]
    assert int(warm.to_every_replica(strategy, 0, numbers).cardinality()) == 6
    assert warm.to_every_replica(strategy, 1, numbers) is numbers
    pairs = tf.data.Dataset.from_tensor_slices(([1, 2], [3, 4])).filter(lambda x, y: x > 1)
    twice = warm.to_every_replica(strategy, 0, pairs)
    assert [(int(x), int(y)) for x, y in twice] == [(2, 4), (2, 4)]


def test_warm_start_notices_that_syncs_are_on_again():
    strategy = make_strategy()
    on = keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, _: strategy.set_sync_period(3))
    with pytest.raises(RuntimeError, match="set to 3 in an epoch of WarmStart"):
        fit(make_model(strategy), [WarmStart(), on])


@pytest.mark.nightly
@pytest.mark.parametrize("given", [(0, 1), (1, 0)])
def test_warm_start_runs_after_sync_period(given):
    strategy = make_strategy()
    model = make_model(strategy)
    callbacks = [SyncPeriod({0: 3, 1: 4}, verbose=0), WarmStart(verbose=0)]
    fit(model, [callbacks[number] for number in given])
    assert (strategy.sync_period, strategy.statistics().syncs) == (3, 0)


def test_states_are_kept_by_a_strategy_that_can(monkeypatch):
    strategy, kept = make_strategy(), {}
    monkeypatch.setattr(type(strategy), "keep_state", lambda _, *a: kept.update([a]), raising=False)
    callbacks = [
        Newbob("loss", verbose=0),
        OverfittingGuard("loss", "loss"),
        LearningRate(Hand(0.1, 12)),
    ]
    model = make_model(strategy)
    for callback in callbacks:
        callback.set_model(model)
    assert list(kept.values()) == callbacks
    assert list(kept) == ["newbob", "overfitting_guard", "learning_rate"]
    json.dumps([obj.get_state() for obj in kept.values()])


def test_only_the_chief_speaks(monkeypatch, capsys):
    strategy = make_strategy()
    periods = SyncPeriod({0: 3, 1: 4})
    periods.set_model(make_model(strategy))
    periods.on_epoch_begin(0)
    monkeypatch.setattr(type(strategy), "is_chief", False)
    periods.on_epoch_begin(1)
    assert capsys.readouterr().out == "Epoch 1: SyncPeriod: syncs every 3 minibatches.\n"
    assert strategy.sync_period == 4


def test_a_scaled_loss_has_a_rate_too():
    model = make_model(
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    )
    log = fit(model, [Scores(validation_loss=LOSSES), Newbob("validation_loss")], epochs=4)
    assert log["learning_rate"] == RATES[:4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Newbob("loss"),
        lambda: LearningRate(Piecewise({0: 0.1})),
    ],
    ids=["newbob", "learning rate"],
)
def test_a_schedule_inside_the_optimizer_is_refused(make):
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(TypeError, match="a LearningRateSchedule, a function or a MultiOpt"):
        fit(make_model(optimizer=lambda: keras.optimizers.SGD(decay)), [make()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Newbob(held_out(), "error"), "whether higher is better"),
        (lambda: OverfittingGuard("loss", "validation_accuracy"), "same measure"),
        (lambda: LearningRate(Hand(0.1, 5), steps_per_epoch=0), "steps_per_epoch=0"),
        (lambda: LearningRate(Hand(0.1, 5), steps_per_epoch=1.5), "steps_per_epoch=1.5 must be a"),
        (lambda: HeldOut(None, times_per_epoch=1.5), "times_per_epoch=1.5 must be a whole number"),
        (lambda: HeldOut(None, times_per_epoch=float("nan")), "times_per_epoch=nan must be a"),
        (lambda: HeldOut(None, which=[]), r"which=\[\] names no weights"),
        (lambda: Checkpoint("never", every_syncs=0.5), "every_syncs=0.5 must be a whole number"),
        (lambda: Checkpoint("never", keep=1.5), "keep=1.5 must be a whole number of checkpoints"),
        (lambda: SyncPeriod({0: 0}), "at least 1"),
        (lambda: SyncPeriod({0: 2.5}), r"periods\[0\]=2.5 must be a whole number of minibatches"),
        (lambda: SyncPeriod({1: 5}), "one must be 0"),
        (lambda: WarmStart(-1), "epochs=-1"),
        (lambda: fit(make_model(), [Newbob("nothing_loss")]), "no 'nothing_loss'. It has: acc"),
        (lambda: fit(make_model(), [LearningRate(lambda _: -1.0)]), "rate -1.0 at epoch 0"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit(make_model(), [SyncPeriod({0: 1})]), "has no sync period"),
        (lambda: LearningRate(0.1), "schedule=0.1 must be rates by epochs"),
        (
            lambda: fit(
                make_model(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])), [WarmStart()]
            ),
            "cannot train alone",
        ),
        (
            lambda: WarmStart().set_model(make_model(tfpara.simulate_async(2, tfpara.ASGD()))),
            "AsyncStrategy, whose replicas cannot train alone",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()
