"""Overlapped, fragmented and hierarchical syncs in one process of several logical CPU devices.

The reference is `distributed/stepwise_simulation.py`, NumPy alone.
"""

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib import simulation, stepwise_simulation
from tests.lib.replicas_here import TAU, data_of, make, network, of_replicas
from tfpara.collectives import Loopback
from tfpara.sync.one_sync import compression, reports
from tfpara.sync.one_sync.consensus import Consensus
from tfpara.sync.one_sync.graph import SyncGraph
from tfpara.sync.one_sync.graph_ops import NotInlined
from tfpara.sync.one_sync.overlap import Overlap
from tfpara.sync.one_sync.state_vars import slots_of
from tfpara.sync.one_sync.weight_exchange import Shares

pytestmark = pytest.mark.latest

RULES = {
    "bsp": (tfpara.BSP(), "bsp", {}),
    "bmuf": (tfpara.BMUF(0.6, 1.2), "nesterov", {"eta": 0.6, "zeta": 1.2}),
    "classical": (tfpara.BMUF(0.5, nesterov=False), "classical", {"eta": 0.5}),
    "easgd": (tfpara.EASGD(0.2), "elastic", {"alpha": 0.2}),
    "stiff easgd": (tfpara.EASGD(0.39), "elastic", {"alpha": 0.39}),
    "diloco": (tfpara.DiLoCo(0.8, 0.6), "nesterov", {"eta": 0.6, "zeta": 0.8}),
}
EVEN = [[4] * 10] * 2
UNEVEN = [[4] * 10, [4] * 6 + [2]]
# The runs of variables, of 42, 7, 35 and 5 elements, that are fragments.
RUNS = {1: [(0, 4)], 2: [(0, 1), (1, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


def in_levels(x, highest, group):
    """Each run of `group` numbers in steps of 1/highest of its largest."""
    x = np.asarray(x, np.float32)
    out = []
    for at in range(0, len(x), group):
        scale = np.abs(x[at : at + group]).max() / np.float32(highest)
        out.append(np.rint(x[at : at + group] / scale) * scale if scale else x[at : at + group])
    return np.concatenate(out)


FORMATS = {
    "bf16": lambda x: np.asarray(x, tf.bfloat16.as_numpy_dtype).astype("float64"),
    "fp16": lambda x: np.asarray(x, np.float16).astype("float64"),
    "int8": lambda x: in_levels(x, 127, 256),
    "int4": lambda x: in_levels(x, 7, 64),
}


def check(
    name,
    minibatches,
    epochs=2,
    delay=0,
    fragments=1,
    steps_per_execution=1,
    atol=1e-5,
    exact=False,
    constrained=False,
    adam=False,
    **options,
):
    """Trains and compares; `exact`: with what the rule is without compression."""
    rule, kind, settings = RULES[name]
    options = {"local_state": "keep", **options}
    strategy = make(rule, len(minibatches), fragments=fragments, **options)
    given = {"optimizer": lambda: keras.optimizers.Adam(0.05)} if adam else {}
    model = network(
        strategy, steps_per_execution=steps_per_execution, constrained=constrained, **given
    )
    initial = model.get_weights()
    within = simulation.within if constrained else None
    fit = model.fit(data_of(strategy, minibatches), epochs=epochs, verbose=0)
    devices = {}
    if options.get("device_sync_period"):
        devices = {"device_period": options["device_sync_period"], "devices": len(minibatches)}
    local, points, loss = stepwise_simulation.simulate(
        kind,
        initial,
        minibatches,
        TAU,
        lambda: simulation.Adam(0.05) if adam else simulation.Momentum(0.2, 0.9),
        epochs=epochs,
        delay=delay,
        runs=RUNS[fragments],
        rounded=None if exact else FORMATS.get(options.get("compression")),
        replicated=options.get("aggregation") == "replicated",
        within=within,
        **devices,
        **settings,
    )
    for got, want in zip(of_replicas(strategy, model), local, strict=True):
        np.testing.assert_allclose(got, want, atol=atol)
    center = points[name == "diloco"]  # its W is the point that replicas go on from
    if within:
        shown = simulation.flat(within(simulation.unflat(center, initial)))
        assert np.abs(shown - center).max() > 1e-4  # the rule's own state is without constraints
        center = shown
    with strategy.weights(model, "global"):
        np.testing.assert_allclose(simulation.flat(model.get_weights()), center, atol=atol)
    np.testing.assert_allclose(fit.history["loss"][-1], loss, rtol=atol)
    return strategy, model


@pytest.mark.one_version
@pytest.mark.quick
def test_a_replica_with_a_share_of_one_third_among_unequal_ones():
    check("bmuf", [[2] * 6, [4] * 6, [6] * 6], aggregation="sharded")


@pytest.mark.nightly
def test_replicas_count_by_samples_in_a_block_within_which_the_data_were_divided_anew(monkeypatch):
    """That happens in elastic runs. In such a block, only rates are not compared."""
    always_0 = property(lambda consensus: 0, lambda consensus, value: None)
    monkeypatch.setattr(Consensus, "divided_in", always_0, raising=False)
    check("bsp", [[2] * TAU, [6] * TAU], epochs=1)


CONSTRAINED = {
    "sharded, of unequal shares": ("bmuf", UNEVEN, {"aggregation": "sharded"}),
    "Adam": ("bsp", EVEN, {"adam": True}),
    "whose replicas stay apart": ("easgd", UNEVEN, {"overlap": True, "delay": TAU}),
    "of fragments beside the training": (
        "diloco",
        EVEN,
        {"fragments": 2, "overlap": 1, "delay": 1},
    ),
    "compressed": ("bmuf", EVEN, {"compression": "bf16", "atol": 1e-3}),
    "of two levels": ("classical", UNEVEN, {"device_sync_period": 1}),
}


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("case", CONSTRAINED)
def test_constraints_hold_in_what_replicas_go_on_from_and_in_what_is_shown(case):
    """With the mean of the replicas as they are, and a state of the rule without constraints."""
    name, minibatches, options = CONSTRAINED[case]
    averages = {"ema": tfpara.EMA(0.5)}
    strategy, model = check(name, minibatches, constrained=True, averages=averages, **options)
    for which in strategy.weight_names:
        with strategy.weights(model, which):
            weights = model.get_weights()
        for found, wanted in zip(weights, simulation.within(weights), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=which)


@pytest.mark.nightly
def test_replicas_that_begin_beside_the_broadcast_point_keep_their_lead_where_it_is_compressed():
    """As those of a resumed run do, whose fragments were trained since their last sync."""
    strategy, _ = check("bmuf", EVEN, epochs=1, compression="bf16", atol=1e-2, constrained=True)
    (synchronizer,) = strategy.extended.models.synchronizers
    start = [weight + 1.0 for weight in synchronizer.broadcast_point()]
    synchronizer.start_from(start)
    graph = synchronizer.graph
    shares = Shares(tf.constant([0.5, 0.5]), tf.constant(2.0), tf.constant(1.0))
    means, _ = graph.compressed.gather(graph.replicas.all_weights(0), shares, 0)
    found = graph.global_state.aggregation.spread(means, "means")[0]
    wanted = graph.replicas.layout.pack(simulation.within([w.numpy() for w in start]))
    np.testing.assert_allclose(found, wanted, atol=0.02)


@pytest.mark.one_version
@pytest.mark.nightly_cases("classical")
@pytest.mark.parametrize("name", ["diloco", "classical"])
def test_an_overlapped_sync_is_merged_where_the_next_begins(name):
    check(name, UNEVEN, overlap=True, delay=TAU)


@pytest.mark.one_version
@pytest.mark.nightly_cases("2-1")
@pytest.mark.parametrize(("delay", "steps_per_execution"), [(1, 4), (2, 1)])
def test_a_delay_is_that_many_steps(delay, steps_per_execution):
    check("bmuf", EVEN, overlap=delay, delay=delay, steps_per_execution=steps_per_execution)


@pytest.mark.nightly_cases("4-0")
@pytest.mark.parametrize(("fragments", "delay"), [(2, 2), (4, 0)])
def test_fragments_take_turns(fragments, delay):
    check("bmuf", UNEVEN, fragments=fragments, overlap=delay or False, delay=delay)


def after_the_first_start(strategy, model, act):
    """Trains; calls `act` once, after the step with which the first overlapped sync has begun."""
    one = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: act() if batch == TAU - 1 else None
    )
    model.fit(data_of(strategy, EVEN), verbose=0, callbacks=[one])


@pytest.mark.one_version
def test_a_weight_stays_as_it_is_set_if_other_weights_arrive_meanwhile(monkeypatch):
    """In an elastic run they are another worker's, if one is lost while a sync is under way."""
    strategy = make(tfpara.BSP(), overlap=True)
    model = network(strategy)
    kernel, calls, found = model.trainable_variables[0], [], []

    def landing(synchronizer):
        calls.append(synchronizer.in_flight)
        for component in kernel.value.values:
            component.assign(tf.zeros_like(component))

    def sets():
        with monkeypatch.context() as patch:
            patch.setattr(strategy.company, "land", landing)
            kernel.assign(tf.ones(kernel.shape))
        found.extend(component.numpy() for component in kernel.value.values)

    after_the_first_start(strategy, model, sets)
    assert calls == [True]
    np.testing.assert_array_equal(found, np.ones((2, 6, 7)))


@pytest.mark.one_version
@pytest.mark.parametrize("how", ["settle", "finish_block"])
def test_members_stop_for_no_sync_after_they_have_met_or_closed_the_block(how):
    """In the sync under way they agree to meet. One that joined later would not stop with them."""
    strategy = make(tfpara.BSP(), overlap=True)
    model = network(strategy)
    with strategy.scope():
        synchronizer = strategy.synchronizer_of(model)
    overlap, found = synchronizer._overlap, []
    overlap._changes = True  # as in an elastic run
    synchronizer.graph.request(reports.Request.MEET)

    def lands():
        assert overlap.flight.in_the_air
        getattr(synchronizer, how)()
        found.append((synchronizer.graph.syncs, bool(overlap.flight.stops)))

    after_the_first_start(strategy, model, lands)
    assert found == [(1, False)]


@pytest.mark.one_version
@pytest.mark.nightly_cases("easgd-False")
@pytest.mark.parametrize(("name", "overlap"), [("bsp", True), ("easgd", False)])
def test_devices_of_a_worker_are_averaged_more_often(name, overlap):
    check(name, UNEVEN, device_sync_period=1, overlap=overlap, delay=TAU if overlap else 0)


@pytest.mark.one_version
@pytest.mark.nightly_cases("bmuf-int4-True-sharded", "easgd-int8-False-sharded")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "kind", "adam", "aggregation"),
    [
        ("bmuf", "int8", False, "sharded"),
        ("easgd", "int8", False, "sharded"),
        ("bmuf", "int4", True, "sharded"),
        ("bmuf", "int4", True, "replicated"),
        ("easgd", "int8", False, "replicated"),
    ],
)
def test_error_feedback(name, kind, adam, aggregation):
    options = {"compression": kind, "aggregation": aggregation}
    strategy, model = check(name, UNEVEN, adam=adam, atol=2e-5, **options)
    if name != "easgd":
        first, second = of_replicas(strategy, model)
        np.testing.assert_array_equal(first, second)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize(("kind", "atol", "overlap"), [("fp16", 1e-3, False), ("int8", 2e-2, True)])
def test_compressed_easgd_is_the_same_rule(kind, atol, overlap):
    """Near the stability bound of N = 4, against the equation without any rounding."""
    delay = TAU if overlap else 0
    options = {"overlap": overlap, "delay": delay, "compression": kind, "exact": True}
    check("stiff easgd", [[4] * 60] * 4, epochs=1, atol=atol, **options)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_half_precision_on_the_wire_overlapped(kind):
    # A last bit of fp16 may differ, for the reference computes in float64.
    check("bmuf", EVEN, compression=kind, overlap=True, delay=TAU, atol=2e-4)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 256, 600])
def test_formats(kind, length):
    rows = np.random.default_rng(length).normal(size=(3, length)).astype("float32")
    rows[1] = 0
    rows[2] *= 1e-30 if kind != "fp16" else 1e6
    words = compression.encode(tf.constant(rows), kind)
    assert words.dtype == tf.int32 and words.shape == (3, compression.words_of(length, kind))
    got = compression.decode(words, length, kind).numpy()
    for row, want in zip(got, rows, strict=True):
        want = np.clip(want, -65504, 65504) if kind == "fp16" else want
        np.testing.assert_allclose(row, FORMATS[kind](want), rtol=1e-6)


def test_int4_by_hand():
    """A row of 70 numbers is a group of 64 with scale 0.5, a group of 6 with 2, and zeros."""
    row = np.zeros(70, np.float32)
    # The numbers halfway between two levels get the even one.
    row[:8] = [3.5, -3.5, 0.25, 0.75, -0.25, -0.75, 1.25, 1.3]
    row[64:] = [14.0, -14.0, 1.0, 3.0, 5.0, -2.9]
    of_first = [7, -7, 0, 2, 0, -2, 2, 3]
    of_second = [7, -7, 0, 2, 2, -1]  # the second group is the second half of the row
    levels = np.zeros((2, 64), int)
    levels[0, :8], levels[1, :6] = of_first, of_second
    words = compression.encode(tf.constant(row[None]), "int4").numpy()[0]
    assert words[:16].tobytes() == (levels[0] + 16 * levels[1]).astype(np.int8).tobytes()
    np.testing.assert_array_equal(words[16:].view(np.float32), [0.5, 2.0])
    assert len(words) == compression.words_of(70, "int4") == 18
    got = compression.decode(tf.constant(words[None]), 70, "int4").numpy()[0]
    wanted = np.concatenate([0.5 * levels[0], 2.0 * levels[1, :6]])
    np.testing.assert_array_equal(got, wanted)


def test_each_pair_of_levels_has_a_byte_of_its_own():
    ones, sixteens = np.meshgrid(np.arange(-7, 8), np.arange(-7, 8))
    sent = np.zeros((225, 2, 64), np.float32)
    sent[:, 0, 0], sent[:, 1, 0], sent[:, :, 1] = ones.ravel(), sixteens.ravel(), 7
    words = compression.encode(tf.constant(sent.reshape(225, 128)), "int4")
    assert len(np.unique(words.numpy().view(np.int8)[:, 0])) == 225
    got = compression.decode(words, 128, "int4").numpy()
    np.testing.assert_array_equal(got.reshape(sent.shape), sent)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int4_keeps_a_number_that_is_not_finite_in_its_group(bad):
    """Its group shares bytes with another one, which arrives as it was."""
    row = np.random.default_rng(0).normal(size=(1, 256)).astype(np.float32)
    clean = compression.decode(compression.encode(row, "int4"), 256, "int4").numpy()
    row[0, 70] = bad
    got = compression.decode(compression.encode(row, "int4"), 256, "int4").numpy()
    assert not np.isfinite(got[0, 70])
    others = np.r_[0:64, 128:256]
    np.testing.assert_array_equal(got[0, others], clean[0, others])


@pytest.mark.one_version
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_error_feedback_loses_nothing_in_the_long_run(kind):
    """A constant that is far below a step arrives in full, on the average."""
    x = np.array([1.0, 1e-3], np.float32)
    error, total = np.zeros(2, np.float32), np.zeros(2)

    @tf.function
    def arrived(row):
        return compression.decode(compression.encode(row[None], kind), 2, kind)[0]

    for _ in range(1000):
        sent = arrived(tf.constant(x + error)).numpy()
        error = x + error - sent
        total += sent
    step = {"int8": 1 / 127, "int4": 1 / 7}[kind]
    np.testing.assert_allclose(total / 1000, x, atol=0.6 * step / 1000 + 1e-6)


BAD = [
    ({"overlap": True}, tfpara.BMUFAdam(), "BMUFAdam has no delayed form"),
    ({"overlap": 4}, tfpara.BSP(), "longer than sync_period=3"),
    ({"overlap": 0.5}, tfpara.BSP(), "overlap=0.5 must be True, False, or a whole number"),
    ({"overlap": True, "local_state": "reset"}, tfpara.BSP(), "belong to the steps under way"),
    ({"fragments": 0}, tfpara.BSP(), "fragments=0 must be a whole number, at least 1"),
    ({"fragments": 2}, tfpara.BMUFAdam(), "moments of a whole block"),
    ({"compression": "int3"}, tfpara.BSP(), "'int3' is not one of none, bf16, fp16, int8, int4"),
    ({"compression": "int8"}, tfpara.BMUFAdam(), "sends the moments as they are"),
    ({"device_sync_period": 2}, tfpara.BSP(), "does not divide sync_period=3"),
    ({"device_sync_period": 0}, tfpara.BSP(), "device_sync_period=0 must be a whole number"),
]


@pytest.mark.parametrize(("options", "rule", "message"), BAD)
def test_bad_options(options, rule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(rule, **options)


def test_a_delay_may_be_a_number_of_numpy():
    settings = make(tfpara.BSP(), overlap=np.int64(2)).extended.settings
    assert settings.overlap == 2 and type(settings.overlap) is int


@pytest.mark.nightly
def test_more_fragments_than_variables():
    strategy = make(tfpara.BSP(), fragments=5)
    model = network(strategy)
    with pytest.raises(ValueError, match="fragments=5: the model has 4 trainable variables"):
        model.fit(data_of(strategy, EVEN), verbose=0)


def test_the_period_is_not_set_to_less_than_the_delay():
    strategy = make(tfpara.BSP(), overlap=3, device_sync_period=3)
    with pytest.raises(ValueError, match="longer than sync_period=2"):
        strategy.set_sync_period(2)
    with pytest.raises(ValueError, match="does not divide sync_period=4"):
        strategy.set_sync_period(4)


def spoiling(model, replica, when):
    """A callback that puts NaN into the weights of a replica after a minibatch."""

    def spoil(batch, logs):
        if batch == when:
            model.layers[-1].kernel.value.values[replica].assign(np.full((7, 5), np.nan, "f4"))

    return keras.callbacks.LambdaCallback(on_train_batch_end=spoil)


@pytest.mark.one_version
@pytest.mark.nightly_cases("1-1")
@pytest.mark.parametrize(("overlap", "fragments"), [(False, 2), (1, 1)])
def test_nan_on_one_of_several_devices_is_named_and_a_second_fit_trains(overlap, fragments):
    strategy = make(tfpara.BSP(), 4, overlap=overlap, fragments=fragments)
    model = network(strategy)
    good = model.get_weights()
    data = data_of(strategy, EVEN * 2)
    nan = pytest.raises(tf.errors.InvalidArgumentError, match="replica 2 .* has NaN or Inf")
    for _ in range(2):
        with nan:
            model.fit(data, verbose=0, callbacks=[spoiling(model, 2, 3)])
    with nan, strategy.weights(model, "global"):
        pass
    model.set_weights(good)
    for momentum in model.optimizer.momentums:
        for component in momentum.value.values:
            component.assign(tf.zeros_like(component))
    strategy.synchronize()  # closes the block in which it failed
    model.fit(data, verbose=0)
    local, *_ = stepwise_simulation.simulate(
        "bsp",
        good,
        EVEN * 2,
        TAU,
        lambda: simulation.Momentum(0.2, 0.9),
        epochs=1,
        delay=int(overlap),
        runs=RUNS[fragments],
    )
    for got, want in zip(of_replicas(strategy, model), local, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("overlap", [False, 1])
def test_a_rate_that_one_replica_alone_has_is_named(overlap):
    strategy = make(tfpara.BSP(), 4, overlap=overlap)
    model = network(strategy)
    data = data_of(strategy, EVEN * 2)
    rate = model.optimizer.learning_rate

    def set_one(batch, logs):
        if batch == 7:
            rate.value.values[2].assign(0.1)

    words = "replica 0 .worker 0. 0.2, replica 2 .worker 0. 0.1. Set the rate on every worker alike"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        one = keras.callbacks.LambdaCallback(on_train_batch_end=set_one)
        model.fit(data, verbose=0, callbacks=[one])
    assert strategy.statistics().syncs == 2
    model.optimizer.learning_rate = 0.1
    strategy.synchronize()  # closes the block in which it failed
    # Replicas that are independent may have rates of their own.
    strategy.set_sync_period(None)
    rate.value.values[2].assign(0.05)
    model.fit(data, verbose=0)
    strategy.broadcast_replica(model, 2)
    strategy.set_sync_period(TAU)
    model.optimizer.learning_rate = 0.1
    model.fit(data, verbose=0)
    assert np.ptp(of_replicas(strategy, model), 0).max() == 0.0


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        # Of each replica: minibatches in the open block, all that it has taken, two rates.
        ([(2, 9, 0.1, 0.2), (2, 9, 0.1, 0.2), (2, 9, 0.1, 0.2)], ""),
        (
            [(2, 9, 0.1, 0.2), (2, 9, 0.1, 0.2), (2, 9, 0.1, 0.3)],
            "0 (worker 0) 0.2, 2 (worker 1) 0.3",
        ),
        (
            [(2, 9, 0.1, 0.2), (2, 8, 0.3, 0.2), (2, 8, 0.1, 0.2)],
            "1 (worker 0) 0.3, 2 (worker 1) 0.1",
        ),
        # A rate that falls with every minibatch, of which the second worker has had fewer.
        ([(2, 9, 0.1, 0.2), (2, 9, 0.1, 0.2), (2, 8, 0.11, 0.2)], ""),
        ([(2, 9, 0.1, 0.2), (2, 9, 0.1, 0.2), (1, 9, 0.11, 0.2)], ""),
        # Other machines round otherwise, and who has taken no step has no rate.
        ([(2, 9, 0.1, 0.2), (2, 9, 0.1, 0.2), (2, 9, 0.1 + 1e-8, 0.2)], ""),
        ([(0, 9, NAN, NAN), (0, 9, NAN, NAN), (0, 9, 0.3, 0.4)], ""),
        ([(0, 9, 0.0, 0.0), (0, 9, 0.0, 0.0), (0, 9, 0.0, 0.0)], ""),
    ],
)
def test_rates_of_replicas_that_have_trained_alike_are_compared(rows, words):
    at = reports.SAMPLES
    columns = reports.Columns.of(parts=1, counts=0, rates=2)
    together = [1.0, -1.0, *[0.0] * (at - 2)]
    table = np.array([[*together, 8.0, *row[:2], 0.0, 0.0, *row[2:]] for row in rows])
    problem = reports.problem_of(table, columns, ["w"], [0, 2])
    assert (problem != "") == (words != "")
    assert words in problem.replace("replica ", "")


@pytest.mark.nightly
def test_the_operations_of_a_sync_are_made_once(monkeypatch):
    """For the step's graph and for what is called from Python, as at the end of an epoch."""
    made = []
    for kind, name in ((SyncGraph, "_sync_step"), (Overlap, "_merge_step")):
        former = getattr(kind, name)

        def noted(self, *arguments, name=name, former=former):
            made.append(name)
            return former(self, *arguments)

        monkeypatch.setattr(kind, name, noted)
    strategy = make(tfpara.BSP(), overlap=1)
    model = network(strategy)
    model.fit(data_of(strategy, EVEN), epochs=2, verbose=0)
    strategy.set_sync_period(2)
    with strategy.weights(model, "global"):
        pass
    model.fit(data_of(strategy, EVEN), verbose=0)
    assert sorted(made) == ["_merge_step", "_sync_step"]


def fail():
    raise MemoryError("no room")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "message"),
    [("_fly", "MemoryError: no room"), ("_launch", "the step failed that starts it")],
)
def test_an_error_beside_the_training_is_raised_in_it_and_wherever_it_is_asked(
    part, message, monkeypatch
):
    strategy = make(tfpara.BSP(), overlap=1)
    model = network(strategy)
    monkeypatch.setattr(strategy.synchronizer_of(model)._overlap.flight, part, fail)
    with pytest.raises(tf.errors.OpError, match="MemoryError: no room"):
        model.fit(data_of(strategy, EVEN), verbose=0)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            strategy.synchronize()


class Breakable(Loopback):
    """Collectives of one worker that fail while they are broken."""

    def __init__(self):
        self.broken = tf.Variable(False)

    def all_reduce(self, buffers, name):
        if buffers:  # else nothing is sent, so that nothing can fail
            with tf.control_dependencies(buffers):  # as a real one, which has to have them
                works = tf.debugging.Assert(~self.broken.read_value(), ["the collective is broken"])
            with tf.control_dependencies([] if works is None else [works]):  # and then gives none
                buffers = [tf.identity(buffer) for buffer in buffers]
        return super().all_reduce(buffers, name)


@pytest.mark.nightly
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_sync_that_fails_leaves_its_block_open(fragments):
    strategy = make(tfpara.BSP(), fragments=fragments, aggregation="replicated")
    strategy.extended.links.collectives = collectives = Breakable()
    model = network(strategy)
    synchronizer = strategy.synchronizer_of(model)
    data = data_of(strategy, [[4] * 6, [2] * 6])
    collectives.broken.assign(True)
    for _ in range(2):
        with pytest.raises(tf.errors.OpError):
            model.fit(data, verbose=0)
        # The watchdog does not end a later sync for it.
        assert synchronizer.graph.waiting_since() > 0
        next(iter(data))
        assert synchronizer.graph.waiting_since() == 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
        strategy.synchronize()
    assert synchronizer.graph.waiting_since() == 0
    assert strategy.statistics().syncs == 0
    first, second = of_replicas(strategy, model)
    assert np.abs(first - second).max() > 1e-3
    # The first minibatch of the second fit was the fourth of the block: it failed again at once.
    shares = np.array([4 * 4, 4 * 2]) / 24
    collectives.broken.assign(False)
    strategy.synchronize()
    for got in of_replicas(strategy, model):
        np.testing.assert_allclose(got, shares @ [first, second], atol=1e-6)


@pytest.mark.nightly
def test_weights_set_while_a_sync_is_in_the_air_stay():
    strategy = make(tfpara.BMUF(0.6), overlap=2, compression="int8")
    model = network(strategy)
    values = [np.full_like(w, 0.5) for w in model.get_weights()]
    seen = []

    def set_them(batch, logs):
        if batch == 3:  # the first sync has begun after the step before
            model.set_weights(values)
            model.optimizer.learning_rate = 0.0
            for momentum in model.optimizer.momentums:
                for component in momentum.value.values:
                    component.assign(tf.zeros_like(component))
        if batch > 3:
            seen.extend(of_replicas(strategy, model))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=set_them)
    model.fit(data_of(strategy, EVEN), verbose=0, callbacks=[callback])
    for weights in seen:
        np.testing.assert_allclose(weights, 0.5, atol=1e-6)


@pytest.mark.nightly
def test_statistics_of_normalised_batches_are_averaged_where_a_block_is_closed():
    strategy = make(tfpara.BSP(), overlap=True)
    model = network(strategy, norm=True)
    model.fit(data_of(strategy, [[4] * 6, [4] * 3]), verbose=0)
    mean = model.layers[1].moving_mean.value
    first, second = (c.numpy() for c in strategy.experimental_local_results(mean))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first).max() > 1e-3
    assert strategy.statistics().syncs == 2


@pytest.mark.nightly
@pytest.mark.one_version
def test_waiting_for_an_overlapped_sync_is_counted_once():
    strategy = make(tfpara.BSP(), overlap=True, sync_period=1)
    model = network(strategy)
    model.fit(data_of(strategy, EVEN), verbose=0)
    flight = strategy.extended.models.synchronizers[0]._overlap.flight
    fly = flight._fly

    def fly_late():
        time.sleep(1.0)
        fly()

    flight._fly = fly_late
    before, began = strategy.statistics().sync_seconds, time.monotonic()
    model.fit(data_of(strategy, EVEN), verbose=0)
    assert 1.0 < strategy.statistics().sync_seconds - before < time.monotonic() - began


@pytest.mark.parametrize(
    "options",
    [
        {"averages": {"ema": tfpara.EMA(0.9)}, "local_state": "average"},
        {"fragments": 2},
        {"compression": "int8"},
        {"nonfinite": "skip"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_to_prepare_a_sync_changes_nothing(options):
    """A sync that is prepared within a block leaves all state, and the later syncs, as they are."""

    def trained(prepare):
        keras.utils.set_random_seed(1)
        strategy = make(tfpara.BMUF(0.6), 2, **options)
        model = network(strategy, optimizer=lambda: keras.optimizers.Adam(0.05))
        compared = []

        def state():
            return {slot.key([0, 1]): slot.variable.numpy() for slot in slots_of(model)}

        def after(batch, logs):
            if batch != TAU + 1:
                return
            (synchronizer,) = strategy.extended.models.synchronizers
            synchronizer.meet(0.0)
            if prepare:
                assert synchronizer.graph.block.is_open
                before, met = state(), strategy.extended.call_site.met
                synchronizer.graph.prepare()
                synchronizer.graph.await_prepared()
                assert (strategy.extended.call_site.met, state().keys()) == (met, before.keys())
                for name, value in state().items():
                    np.testing.assert_array_equal(value, before[name], name)
                compared.append(batch)

        step = keras.callbacks.LambdaCallback(on_train_batch_end=after)
        data = data_of(strategy, EVEN)
        model.fit(data, epochs=2, verbose=0, callbacks=[step])
        assert len(compared) == 2 * prepare
        return state()

    expected = trained(prepare=False)
    for name, value in trained(prepare=True).items():
        if name != "counter/seconds":
            np.testing.assert_array_equal(value, expected[name], name)


def test_a_sync_waits_until_it_is_prepared(monkeypatch):
    """And a function that was never called is not prepared: the thread would have to trace it."""
    strategy = make(tfpara.BSP(), 2)
    network(strategy).fit(data_of(strategy, EVEN), verbose=0)
    (synchronizer,) = strategy.extended.models.synchronizers
    graph, called, calls = synchronizer.graph, NotInlined.__call__, []

    def slow(function, *arguments):
        runs = bool(arguments[-1])
        time.sleep(0.0 if runs else 0.5)
        result = called(function, *arguments)
        calls.append((function, runs))
        return result

    monkeypatch.setattr(NotInlined, "__call__", slow)
    graph.prepare()
    assert not calls
    strategy.synchronize()
    assert calls == [(graph._sync, False), (graph._sync, True)]
    assert graph._sync.is_traced and not graph._meet.is_traced
