"""Outer optimizers as pure functions: against recurrences by hand and Keras on real variables."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.lib.random_examples import random_examples
from tfpara.algorithms import BMUF, BSP
from tfpara.algorithms.outer import DiLoCo, Outer, SlowMo

O = keras.optimizers  # noqa: E741

models = hnp.arrays(np.float32, 5, elements=st.floats(-10, 10, width=32))
trajectories = st.lists(models, min_size=2, max_size=5)


def schedule():
    return O.schedules.PiecewiseConstantDecay([1, 2], [0.5, 0.25, 0.125])


OPTIMIZERS = {
    "sgd": lambda: O.SGD(0.3),
    "momentum": lambda: O.SGD(0.3, momentum=0.9),
    "nesterov": lambda: O.SGD(0.3, momentum=0.9, nesterov=True),
    "decay": lambda: O.SGD(0.3, momentum=0.5, weight_decay=0.1, clipvalue=0.5),
    "schedule": lambda: O.Adam(schedule()),
    "adam": lambda: O.Adam(0.1, beta_2=0.95),
    "amsgrad": lambda: O.Adam(0.1, beta_2=0.9, amsgrad=True),
    "adamw": lambda: O.AdamW(0.1, weight_decay=0.05),
    "adagrad": lambda: O.Adagrad(0.1),
    "adadelta": lambda: O.Adadelta(1.0),
    "adamax": lambda: O.Adamax(0.1),
    "nadam": lambda: O.Nadam(0.1),
    "lion": lambda: O.Lion(0.1),
    "rmsprop": lambda: O.RMSprop(0.1, momentum=0.5, centered=True),
}


@functools.cache
def rule_of(name):
    return Outer(OPTIMIZERS[name]())


def follow(rule, start, averages, parts=None):
    """The points that a rule broadcasts for these averages, of blocks or parts of a block."""
    rule = rule.resolve(2)
    state, points = rule.init(start), []
    for average, part in zip(averages, parts or [1.0] * len(averages), strict=False):
        before, state = state, rule.update(state, average, 2, part)
        points.append(rule.restart(average, rule.broadcast(before, state)))
    return points


def data(size=6, syncs=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=size).astype("f"), rng.normal(size=(syncs, size)).astype("f")


def nesterov_as_in_torch(start, averages, lr, momentum):
    """b ← μb + g;  p ← p − lr (g + μb), in double precision."""
    point, buffer, points = np.float64(start), 0.0, []
    for average in averages:
        gradient = point - average
        buffer = momentum * buffer + gradient
        point = point - lr * (gradient + momentum * buffer)
        points.append(point)
    return points


def test_diloco_by_hand():
    # G = −1: b = −1, W = 0 + ½(1 + ½) = ¾.  G = ¾ − 3: b = −½ − 2¼, W = ¾ + ½(2¼ + ½·2¾).
    assert follow(DiLoCo(0.5, 0.5), 0.0, [1.0, 3.0]) == [0.75, 2.5625]


def test_slowmo_by_hand():
    # v = −1, W = ½.  v = −½ − 2½ = −3, W = ½ + ½·3 = 2.  v = −1½ + 1 = −½, W = 2¼.
    assert follow(SlowMo(0.5, 0.5), 0.0, [1.0, 3.0, 1.0]) == [0.5, 2.0, 2.25]


def test_adagrad_by_hand():
    # accumulator 0 + 2² → W = 4 − 2/2 = 3;  4 + 3² = 13 → 3 − 3/√13.
    rule = Outer(O.Adagrad(1.0, initial_accumulator_value=0.0, epsilon=1e-12))
    np.testing.assert_allclose(follow(rule, 4.0, [2.0, 0.0]), [3.0, 3 - 3 / np.sqrt(13)], rtol=1e-6)


def test_defaults_are_the_papers():
    diloco, slowmo = repr(DiLoCo().resolve(2)), repr(SlowMo().resolve(2))
    assert diloco == "Outer(SGD(learning_rate=0.7, momentum=0.9, nesterov=True))"
    assert slowmo == "Outer(SGD(learning_rate=1.0, momentum=0.7))"


@given(models, trajectories)
def test_sgd_of_one_is_model_averaging(start, averages):
    got = follow(Outer(O.SGD(1.0)), start, averages)
    np.testing.assert_allclose(got, follow(BSP(), start, averages), atol=5e-6)


@given(models, trajectories, st.floats(0.125, 1.5), st.floats(0.0, 0.9375))
@random_examples(30)
def test_diloco_is_torchs_recurrence_and_nesterov_bmuf(start, averages, lr, momentum):
    got = follow(DiLoCo(lr, momentum), start, averages)
    by_hand = nesterov_as_in_torch(start, averages, lr, momentum)
    scale = 1e-5 * (10 + np.abs(by_hand).max())
    np.testing.assert_allclose(got, by_hand, atol=scale)
    np.testing.assert_allclose(got, follow(BMUF(momentum, lr), start, averages), atol=scale)


@pytest.mark.parametrize("nesterov", [True, False])
def test_parts_of_blocks_are_to_sgd_what_they_are_to_bmuf(nesterov):
    (start, averages), parts = data(), [1.0, 0.5, 0.125, 1.0, 0.875]
    outer = (DiLoCo if nesterov else SlowMo)(0.75, 0.9)
    want = follow(BMUF(0.9, 0.75, nesterov), np.float64(start), averages, parts)
    np.testing.assert_allclose(follow(outer, start, averages, parts), want, atol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_part_of_a_block_is_that_part_of_the_step_that_it_would_have_been(name):
    start, averages = data(syncs=2)
    variable, optimizer = keras.Variable(start), OPTIMIZERS[name]()
    optimizer.build([variable])
    optimizer.apply([variable - averages[0]])
    before = variable.numpy()
    optimizer.apply([(variable - averages[1]) / 0.25])
    want = before + 0.25 * (variable.numpy() - before)
    got = follow(rule_of(name), start, averages, [1.0, 0.25])[1]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@given(models, trajectories, st.floats(0.125, 1.5), st.floats(0.0, 0.9375))
@random_examples(30)
def test_slowmo_is_classical_bmuf(start, averages, lr, momentum):
    got = follow(SlowMo(lr, momentum), start, averages)
    expected = follow(BMUF(momentum, lr, nesterov=False), start, averages)
    np.testing.assert_allclose(got, expected, atol=1e-5 * (10 + np.abs(expected).max()))


def test_slowmo_is_the_papers_recurrence_at_a_constant_rate():
    start, averages = data()
    gamma, alpha, beta = 0.05, 0.8, 0.6
    point, u, points = np.float64(start), 0.0, []
    for average in averages:
        u = beta * u + (point - average) / gamma
        point = point - alpha * gamma * u
        points.append(point)
    np.testing.assert_allclose(follow(SlowMo(alpha, beta), start, averages), points, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_optimizer_on_a_variable(name):
    start, averages = data()
    variable, optimizer = keras.Variable(start), OPTIMIZERS[name]()
    optimizer.build([variable])
    points = []
    for average in averages:
        optimizer.apply([variable - average])
        points.append(variable.numpy())
    np.testing.assert_allclose(follow(rule_of(name), start, averages), points, rtol=1e-6, atol=1e-7)
    assert len({p.tobytes() for p in points}) == len(points)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_parts_of_the_whole(name):
    start, averages = data()
    whole = np.array(follow(rule_of(name), start, averages))
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        got = follow(rule_of(name), start[part], averages[:, part])
        np.testing.assert_allclose(got, whole[:, part], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_a_graph_on_parts_of_different_sizes(name):
    """As the synchronizer calls it: variables hold the state, a non-inlined function updates it."""
    rule, (start, averages) = rule_of(name), data()
    parts = [slice(0, 2), slice(2, 6)]
    states = [
        [tf.Variable(tf.convert_to_tensor(v, tf.float32)) for v in rule.init(start[p])]
        for p in parts
    ]

    def sync(average):
        points = []
        for part, variables in zip(parts, states, strict=True):
            before = rule.init(start[part])._make(v.read_value() for v in variables)
            after = rule.update(before, average[part], 2)
            for variable, value in zip(variables, after, strict=True):
                variable.assign(value)
            points.append(rule.broadcast(before, after))
        return tf.concat(points, 0)

    step = tf.function(sync, autograph=False, experimental_attributes={"_noinline": True})
    run = tf.function(lambda average: step(average), autograph=False)
    got = [run(tf.constant(average)).numpy() for average in averages]
    np.testing.assert_allclose(got, follow(rule, start, averages), rtol=1e-5, atol=1e-6)
    assert [float(variables[-1]) for variables in states] == [5.0, 5.0]


def test_in_a_graph_after_eager_use_and_again_in_another():
    """Nothing of an earlier call is read in a later one."""
    rule, (start, averages) = rule_of("adam"), data()
    expected = follow(rule, start, averages)

    @tf.function(autograph=False)
    def graph(state, average):
        return rule.update(state, average, 2)

    state = rule.init(start)._replace(iterations=tf.constant(0.0))
    for average, point in zip(averages, expected, strict=True):
        follow(rule, start * 3, averages[:2])
        state = graph(state, tf.constant(average))
        np.testing.assert_allclose(state.global_model.numpy(), point, rtol=1e-6)


def test_a_failed_step_leaves_the_rule_usable():
    rule, (start, averages) = rule_of("adam"), data()
    with pytest.raises(tf.errors.InvalidArgumentError):
        rule.update(rule.init(tf.constant(start)), tf.constant(start[:4]), 2)
    np.testing.assert_array_equal(
        follow(rule, start, averages), follow(Outer(O.Adam(0.1, beta_2=0.95)), start, averages)
    )


def test_the_optimizer_given_is_left_alone():
    optimizer = O.Adam(0.1)
    rule = Outer(optimizer)
    follow(rule, *data())
    assert not optimizer.built
    assert int(optimizer.iterations) == 0


def test_no_variables_are_made_by_updates():
    rule, (start, averages) = Outer(O.Nadam(0.1)), data()
    follow(rule, start, averages)
    gc.collect()
    count = sum(isinstance(o, tf.Variable) for o in gc.get_objects())
    follow(rule, start, averages)
    gc.collect()
    assert sum(isinstance(o, tf.Variable) for o in gc.get_objects()) == count


def test_arrays_in_arrays_out_tensors_in_tensors_out():
    start, averages = data()
    for dtype in (np.float32, np.float64):
        state = rule_of("adam").update(rule_of("adam").init(dtype(start)), dtype(averages[0]), 2)
        assert isinstance(state.global_model, np.ndarray)
        assert state.global_model.dtype == state.velocity.dtype == dtype
        assert state._fields == ("global_model", "momentum", "velocity", "iterations")
    state = rule_of("adam").init(tf.constant(start))
    assert tf.is_tensor(rule_of("adam").update(state, tf.constant(averages[0]), 2).global_model)


def test_repr_is_the_same_on_every_worker_and_tells_settings_apart():
    assert repr(Outer(O.Adam(0.1))) == repr(Outer(O.Adam(0.1, name="other")))
    assert repr(Outer(O.Adam(0.1))) != repr(Outer(O.Adam(0.2)))
    assert repr(Outer(O.Adam(schedule()))) == repr(Outer(O.Adam(schedule())))
    assert "0x" not in repr(Outer(O.Adam(schedule())))


def test_repr_before_the_strategy_calls_no_function():
    made = []
    rule = Outer(lambda: made.append(O.Adam(0.1)) or made[-1])
    assert repr(rule) == "Outer(a function, called when the strategy is made)" and not made
    assert repr(rule.resolve(2)) == repr(Outer(O.Adam(0.1)))
    assert len(made) == 1


def test_a_rate_assigned_before_counts():
    optimizer = O.SGD(0.5)
    optimizer.learning_rate = 0.25
    assert follow(Outer(optimizer), 0.0, [4.0]) == [1.0]


def test_made_in_a_strategys_scope():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        rule = DiLoCo(0.5, 0.5)
        assert follow(rule, 0.0, [1.0]) == [0.75]


class Centred(O.SGD):
    """A step that takes the mean out of the gradient."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(
            gradient - keras.ops.mean(gradient) * keras.ops.ones_like(gradient),
            variable,
            learning_rate,
        )


class Anchored(O.SGD):
    """A slot that starts at the weights."""

    def build(self, variables):
        super().build(variables)
        self.anchors = self.add_optimizer_variables(variables, "anchor")
        for anchor, variable in zip(self.anchors, variables, strict=True):
            self.assign(anchor, variable)


class FromSlots(O.Optimizer):
    """Computes the weights from a sum of gradients, as Ftrl does."""

    def build(self, variables):
        super().build(variables)
        self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign(variable, -learning_rate * total)


def excluding():
    optimizer = O.SGD(0.1, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: O.Adafactor(), "Adafactor cannot be an outer optimizer: it scales"),
        (lambda: O.Lamb(), "Lamb cannot be an outer optimizer: it scales"),
        (lambda: O.Ftrl(), "Ftrl cannot be an outer optimizer: it computes the weights from its"),
        (lambda: FromSlots(0.1), "FromSlots cannot be an outer optimizer: its first step"),
        (lambda: O.LossScaleOptimizer(O.SGD(0.1)), "LossScaleOptimizer cannot"),
        (lambda: O.SGD(0.1, clipnorm=1.0), r"clipnorm=1.0.*use clipvalue"),
        (lambda: O.SGD(0.1, global_clipnorm=2.0), r"global_clipnorm=2.0.*use clipvalue"),
        (lambda: O.SGD(0.1, use_ema=True), "use_ema=True.*tfpara.EMA"),
        (lambda: O.SGD(0.1, gradient_accumulation_steps=2), "longer sync_period"),
        (lambda: O.SGD(0.1, loss_scale_factor=8.0), "loss_scale_factor=8.0"),
        (lambda: O.SGD(lambda: 0.1), "a function's result may differ"),
        (excluding, "excludes variables from weight decay"),
        (lambda: Centred(0.1), "Centred cannot be an outer optimizer: its step"),
        (lambda: Anchored(0.1), "Anchored cannot be an outer optimizer"),
    ],
)
def test_what_is_not_element_by_element_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        Outer(make())


@pytest.mark.parametrize("name", ["Muon", "ScheduleFreeAdamW"])
def test_newer_optimizers_are_refused(name):
    if not hasattr(O, name):
        pytest.skip(f"this Keras has no {name}")
    with pytest.raises(ValueError, match=f"{name} cannot be an outer optimizer: it"):
        Outer(getattr(O, name)())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Outer("sgd"), TypeError, r"Outer\('sgd'\): give a Keras optimizer object"),
        (lambda: Outer(O.SGD), TypeError, "give a Keras optimizer object"),
        (lambda: DiLoCo(0.0), ValueError, "learning_rate=0.0 must be a positive number"),
        (lambda: DiLoCo(momentum=1.0), ValueError, r"momentum=1.0 is outside \[0, 1\)"),
        (lambda: SlowMo(float("nan")), ValueError, "slow_learning_rate=nan"),
        (lambda: SlowMo(slow_momentum=-0.1), ValueError, "slow_momentum=-0.1"),
    ],
)
def test_bad_values_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
