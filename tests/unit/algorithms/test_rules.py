"""The rules and averages as pure functions: trajectories by hand, identities, invariants."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tfpara.algorithms import BMUF, BSP, EASGD, EMA, MA, BMUFAdam
from tfpara.algorithms.local_momentum import in_a_block

models = hnp.arrays(np.float64, 5, elements=st.floats(-10, 10, width=32))
trajectories = st.lists(models, min_size=2, max_size=6)
etas = st.floats(0.0, 0.95)
shares = st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6)


def follow(rule, start, averages, num_replicas=2, parts=None):
    """The global models and broadcast points of a rule that sees these averages, at the ends of
    blocks or of parts of a block."""
    rule = rule.resolve(num_replicas)
    state = rule.init(start)
    out = []
    for average, part in zip(averages, parts or [1.0] * len(averages), strict=False):
        before, state = state, rule.update(state, average, num_replicas, part)
        out.append((state.global_model, rule.restart(average, rule.broadcast(before, state))))
    return out


def test_classical_bmuf_by_hand():
    # Δ: 1 → 0.5·1 + (3−1) = 2.5 → 1.25 + (3−3.5) = 0.75
    got = follow(BMUF(0.5, nesterov=False), 0.0, [1.0, 3.0, 3.0])
    assert got == [(1.0, 1.0), (3.5, 3.5), (4.25, 4.25)]


def test_nesterov_bmuf_by_hand():
    # B0 = 0; Δ = 1, W = 1, B = 1.5; G = 3 − 1.5, Δ = 2, W = 3, B = 4.
    assert follow(BMUF(0.5), 0.0, [1.0, 3.0]) == [(1.0, 1.5), (3.0, 4.0)]


def test_cntk_and_fairseq_by_hand():
    # CNTK, N = 2: Δ = (1−½)·2·1 = 1, W = 0 + 1 + ½ = 1.5; Δ = ½ + 1·(3 − 1.5) = 2, W = 4.5.
    assert follow(BMUF(0.5, compat="cntk"), 0.0, [1.0, 3.0]) == [(1.5, 1.5), (4.5, 4.5)]
    # fairseq: Δ = 1, W = 1 + ½; Δ = ½ + (3 − 1.5) = 2, W = 1.5 + 2 + 1.
    got = follow(BMUF(0.5, compat="fairseq"), 0.0, [1.0, 3.0], num_replicas=4)
    assert got == [(1.5, 1.5), (4.5, 4.5)]
    # fairseq without look-ahead: Δ = 1, W = 1; Δ = ½ + 2, W = 3.5.
    got = follow(BMUF(0.5, compat="fairseq", nesterov=False), 0.0, [1.0, 3.0], num_replicas=4)
    assert got == [(1.0, 1.0), (3.5, 3.5)]


def test_half_a_block_by_hand():
    # Δ = 1, W = 1. At its pace the block would have brought G = 2: Δ = ½ + 2, W = 3.5. Half of the
    # way: Δ = 1.75, W = 2.25; Nesterov's B = W + Δ/2. A whole block follows: Δ = 0.875 + 1.
    parts = [1.0, 0.5, 1.0]
    got = follow(BMUF(0.5, nesterov=False), 0.0, [1.0, 2.0, 3.25], parts=parts)
    assert got == [(1.0, 1.0), (2.25, 2.25), (4.125, 4.125)]
    got = follow(BMUF(0.5), 0.0, [1.0, 2.5, 4.125], parts=parts)
    assert got == [(1.0, 1.5), (2.25, 3.125), (4.125, 5.0625)]
    # CNTK, N = 2, without look-ahead: the same with Σ_i (w_i − W)/2.
    got = follow(BMUF(0.5, compat="cntk", nesterov=False), 0.0, [1.0, 2.0, 3.25], parts=parts)
    assert got == [(1.0, 1.0), (2.25, 2.25), (4.125, 4.125)]
    # EMA(½) of 8 and half of 4, from 0: 4; a quarter of the way to 4. MA: (8 + ½·4)/1.5.
    for average, wanted in ((EMA(0.5, num_updates=False), 4.0), (MA(), 20 / 3)):
        state = average.update(average.init(0.0), 8.0)
        assert average.value(average.update(state, 4.0, 0.5)) == pytest.approx(wanted)


def test_bmuf_with_a_warmup_by_hand():
    # η: 0, 1/2, 2/3, 3/4, and 3/4 from there on. B0 = 0; Δ = 1, W = 1, B = 1 + ½. G = 3/2,
    # Δ = ½ + 3/2, W = 3, B = 3 + 4/3. G = 5/3, Δ = 4/3 + 5/3, W = 6, B = 6 + 9/4. G = 0, Δ = 9/4,
    # W = 8.25, B = 8.25 + 27/16.
    got = follow(BMUF(), 0.0, [1.0, 3.0, 6.0, 8.25], num_replicas=4)
    assert got == [
        (1.0, 1.5),
        (3.0, pytest.approx(13 / 3)),
        (pytest.approx(6.0), 8.25),
        (8.25, 8.25 + 27 / 16),
    ]
    # Classical: Δ = 1, W = 1; Δ = ½ + 2, W = 3.5; Δ = 5/3 + 1, W = 3.5 + 8/3.
    got = follow(BMUF(nesterov=False), 0.0, [1.0, 3.0, 4.5], num_replicas=8)
    assert [w for w, _ in got] == pytest.approx([1.0, 3.5, 3.5 + 8 / 3])
    # Half a block: G = ½, so 1 at its pace: Δ = ½ + 1 and half of the way there, 1.25; W = 1.75.
    # η = 1 − 1/2.5: B = 1.75 + ¾. Then G = 1: Δ = ¾ + 1, W = 3.5, η = 1 − 1/3.5.
    got = follow(BMUF(), 0.0, [1.0, 2.0, 3.5], num_replicas=4, parts=[1.0, 0.5, 1.0])
    assert got == [(1.0, 1.5), (1.75, 2.5), (3.5, pytest.approx(3.5 + 1.75 * 5 / 7))]


def test_bmuf_with_a_slow_warmup_by_hand():
    # η: 0, 1/3, 1/2, 3/5, and 2/3 from there on. B0 = 0; Δ = 1, W = 1, B = 1 + 1/3. G = 2/3,
    # Δ = 1/3 + 2/3, W = 2, B = 2 + 1/2. G = 1/2, Δ = 1, W = 3, B = 3.6. G = 0.4, Δ = 1, W = 4,
    # B = 4 + 2/3. G = 1/3, Δ = 1, W = 5, B = 5 + 2/3.
    rule = BMUF("sqrt", warmup=2)
    got = follow(rule, 0.0, [1.0, 2.0, 3.0, 4.0, 5.0], num_replicas=9)
    anchors = [1 + 1 / 3, 2.5, 3.6, 4 + 2 / 3, 5 + 2 / 3]
    assert [w for w, _ in got] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [anchor for _, anchor in got] == pytest.approx(anchors)
    slow = BMUF("sqrt").resolve(4)  # a gain of 2 after 20 blocks
    momenta = [slow.momentum_after(blocks, 4) for blocks in (0.0, 5.0, 19.0, 20.0, 99.0)]
    assert momenta == pytest.approx([0.0, 1 / 5, 19 / 39, 0.5, 0.5])


@pytest.mark.parametrize(
    ("momentum", "steps", "expected"),
    [
        (0.9, 1, (0.0, 5.0)),
        (0.9, 8, (0.375, 3.125)),
        (0.9, 15, (2 / 3, 2.5)),  # three quarters of 10/3
        (0.9, 20, (0.75, 2.5)),
        (0.9, 40, (0.875, 1.25)),
        (0.9, 50, (0.9, 1.0)),
        (0.9, 2.0**62, (0.9, 1.0)),
        (0.5, 5, (0.0, 1.0)),
        (0.99, 10, (0.5, 25.0)),
    ],
)
def test_local_momentum_in_a_block_by_hand(momentum, steps, expected):
    assert in_a_block(momentum, float(steps)) == pytest.approx(expected)


def test_half_of_the_length_is_restored_where_updates_come_late():
    assert in_a_block(0.9, 20.0, delayed=True) == pytest.approx((0.75, 1.25))
    assert in_a_block(0.9, 1.0, delayed=True) == pytest.approx((0.0, 5.0))
    assert in_a_block(0.9, 50.0, delayed=True) == pytest.approx((0.9, 1.0))


@given(st.floats(0.5, 0.99), st.integers(1, 100), st.integers(2, 64), st.floats(0.01, 2.6))
def test_default_block_momentum_over_fitted_momentum_is_stable(momentum, steps, replicas, part):
    """On a parabola of curvature h, at rate·h = 2.6 (1 − m) and below, whatever N and τ are."""
    fitted, factor = in_a_block(momentum, float(steps))
    x = factor * part * (1.0 - momentum)  # the rate of a step times h
    eta = 1.0 - 1.0 / replicas
    # Weight and velocity of a replica after the block, from those before it.
    block = np.linalg.matrix_power(np.array([[1.0 - x, fitted], [-x, fitted]]), steps)
    # The same from (W, Δ, v), with B = W + ηΔ; then Δ' = ηΔ + (w − B) and W' = W + Δ'.
    weight, velocity = block @ np.array([[1.0, eta, 0.0], [0.0, 0.0, 1.0]])
    delta = weight - np.array([1.0, 0.0, 0.0])
    after = np.array([weight, delta, velocity])
    assert max(abs(np.linalg.eigvals(after))) < 1.0


@given(models, st.integers(2, 40), st.booleans())
def test_the_gain_of_a_warmup_grows_with_the_blocks(update, n, nesterov):
    """Blocks that all bring G: Δ = (t + 1)/2 G after t of them, up to the one before η's."""
    rule = BMUF(1.0 - 1.0 / n, nesterov=nesterov, warmup=True).resolve(n)
    state = rule.init(np.zeros(5))
    for t in range(1, n + 1):
        state = rule.update(state, rule.broadcast(None, state) + update, n)
        np.testing.assert_allclose(state.delta, (t + 1) / 2 * update, atol=1e-9)


@given(models, trajectories, st.booleans())
def test_two_replicas_need_no_warmup(start, averages, nesterov):
    got = follow(BMUF(nesterov=nesterov), start, averages, 2)
    wanted = follow(BMUF(warmup=False, nesterov=nesterov), start, averages, 2)
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
    assert BMUF(warmup=False).resolve(2) == BMUF(0.5).resolve(2)


@given(models, trajectories, etas, st.floats(0.1, 2.0), shares, st.booleans())
def test_however_blocks_are_cut_what_was_learned_counts_alike(
    start, updates, eta, zeta, parts, nesterov
):
    """Each update G moves the model by ζG/(1 − η) in the end."""
    rule = BMUF(eta, zeta, nesterov)
    state = rule.init(start)
    for update, part in [*zip(updates, parts, strict=False), *[(0.0, 1.0)] * 600]:
        state = rule.update(state, rule.broadcast(None, state) + update, 2, part)
    np.testing.assert_allclose(
        state.global_model, start + zeta / (1 - eta) * np.sum(updates, 0), atol=1e-6
    )


@given(models, trajectories, shares, st.booleans())
def test_parts_of_blocks_are_whole_ones_to_model_averaging(start, averages, parts, nesterov):
    got = follow(BMUF(0.0, nesterov=nesterov), start, averages, parts=parts)
    np.testing.assert_allclose(got, [(a, a) for a in averages], atol=1e-9)
    assert str(follow(BSP(), start, averages, parts=parts)) == str([(a, a) for a in averages])


@given(trajectories, st.floats(0.05, 0.99), shares)
def test_averages_weigh_models_by_their_part_of_a_block(averages, decay, parts):
    parts = parts[: len(averages)]
    ma, ema = MA(), EMA(decay, num_updates=False, zero_debias=True)
    of_ma, of_ema = ma.init(np.full(5, 123.0)), ema.init(np.full(5, 123.0))
    weights = []
    for model, part in zip(averages, parts, strict=True):
        of_ma, of_ema = ma.update(of_ma, model, part), ema.update(of_ema, model, part)
        new = part * (1 - decay)
        weights = [w * (1 - new) for w in weights] + [new]
    np.testing.assert_allclose(ma.value(of_ma), np.average(averages, 0, parts), atol=1e-8)
    np.testing.assert_allclose(ema.value(of_ema), np.average(averages, 0, weights), atol=1e-8)


def test_easgd_by_hand():
    rule = EASGD(0.25)
    before = rule.init(np.float64(1.0))
    local = np.array([3.0, 7.0])
    after = rule.update(before, local.mean(), 2)
    assert after.global_model == 1.0 + 0.25 * (2 + 6)
    np.testing.assert_array_equal(rule.restart(local, rule.broadcast(before, after)), [2.5, 5.5])


def test_default_block_momentum_is_one_minus_one_over_n_up_to_ten():
    assert [BMUF().resolve(n).block_momentum for n in (1, 2, 4, 8)] == [0.0, 0.5, 0.75, 0.875]
    assert [BMUF().resolve(n).block_momentum for n in (10, 11, 16, 64)] == [0.9] * 4
    assert BMUFAdam().resolve(16).block_momentum == 0.9
    published = (BMUF(warmup=False), BMUF(compat="cntk"))
    assert [rule.resolve(16).block_momentum for rule in published] == [0.9375] * 2
    assert BMUF(0.95, warmup=True).resolve(16).block_momentum == 0.95  # as it was given
    assert BMUF("linear").resolve(16) == BMUF().resolve(16)


def test_block_momentum_by_the_square_root():
    sizes = (1, 4, 16, 100, 144)
    momenta = [BMUF("sqrt").resolve(n).block_momentum for n in sizes]
    assert momenta == pytest.approx([0.0, 0.5, 0.75, 0.9, 0.9])
    assert BMUF("sqrt", warmup=False).resolve(144).block_momentum == pytest.approx(11 / 12)
    assert BMUF("sqrt").resolve(16) == BMUF(0.75, warmup=20.0).resolve(16)
    assert BMUF("sqrt", compat="cntk").resolve(16) == BMUF(0.75, compat="cntk").resolve(16)


@given(models, trajectories)
def test_of_many_replicas_each_update_counts_ten_times(start, averages):
    """BMUF() of 16 replicas is that of ten, as the mean of more of them is no shorter."""
    got, ten = (follow(BMUF(), start, averages, n) for n in (16, 10))
    np.testing.assert_array_equal(got, ten)


@given(models, trajectories, st.integers(1, 16), st.booleans())
def test_bmuf_without_momentum_is_bsp(start, averages, n, nesterov):
    got = follow(BMUF(0.0, nesterov=nesterov), start, averages, n)
    expected = follow(BSP(), start, averages, n)
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-12)


@given(models, trajectories, etas, st.floats(0.1, 2.0))
def test_nesterov_bmuf_is_sgd_nesterov_on_pseudo_gradients(start, averages, eta, zeta):
    # SGD-Nesterov: b ← ηb + g;  p ← p − ζ(g + ηb). Here p is the point that is broadcast.
    p, b = start.copy(), np.zeros_like(start)
    points = []
    for average in averages:
        g = p - average
        b = eta * b + g
        p = p - zeta * (g + eta * b)
        points.append(p)
    got = [broadcast for _, broadcast in follow(BMUF(eta, zeta), start, averages)]
    np.testing.assert_allclose(got, points, atol=1e-8)


def test_nesterov_bmuf_is_keras_sgd_nesterov():
    start, averages = np.float32([1, -2]), [np.float32([2, 0]), np.float32([0, 1])]
    variable = keras.Variable(start)
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    outer.build([variable])
    for average, (_, broadcast) in zip(
        averages, follow(BMUF(0.9, 0.7), start, averages), strict=True
    ):
        outer.apply([variable - average])
        np.testing.assert_allclose(variable.numpy(), broadcast, rtol=1e-5)


@given(models, trajectories, st.integers(1, 8))
def test_easgd_without_elasticity_leaves_everything_alone(start, averages, n):
    for average, (center, local) in zip(
        averages, follow(EASGD(0.0), start, averages, n), strict=True
    ):
        np.testing.assert_array_equal(center, start)
        np.testing.assert_array_equal(local, average)


@given(st.integers(1, 16), st.floats(0.1, 0.99), st.integers(0, 2**31))
def test_easgd_stability_bound_is_the_true_one(n, fraction, seed):
    """Below the bound idle replicas come together; what is above is refused."""
    bound = 2.0 / (n + 1)
    rule = EASGD(min(fraction * bound, 0.99)).resolve(n)
    local = np.random.default_rng(seed).normal(size=n)
    state = rule.init(np.float64(0.0))
    start = np.abs(local).max()
    for _ in range(2000):
        before, state = state, rule.update(state, local.mean(), n)
        local = rule.restart(local, rule.broadcast(before, state))
    assert np.abs(local - state.global_model).max() < 1e-3 * start
    if bound < 1.0:
        with pytest.raises(ValueError, match=f"{n} replicas"):
            EASGD(bound).resolve(n)


@given(models, trajectories, st.sampled_from([BSP, BMUF, BMUFAdam, EASGD]))
def test_rules_leave_a_common_model_alone(start, averages, kind):
    """If no replica moves, nothing moves."""
    for global_model, broadcast in follow(kind(), start, [start] * len(averages), 4):
        np.testing.assert_allclose(global_model, start, atol=1e-9)
        np.testing.assert_allclose(broadcast, start, atol=1e-9)


@given(models, trajectories, models, st.sampled_from([BSP, BMUF, BMUFAdam, EASGD]))
def test_rules_commute_with_translation(start, averages, shift, kind):
    plain = follow(kind(), start, averages, 3)
    moved = follow(kind(), start + shift, [a + shift for a in averages], 3)
    np.testing.assert_allclose(np.array(moved), np.array(plain) + shift, atol=1e-8)


@pytest.mark.parametrize("num_updates", [False, True])
def test_ema_equals_tensorflows(num_updates):
    rng = np.random.default_rng(0)
    trajectory = rng.normal(size=(30, 4)).astype("float32")
    variable = tf.Variable(trajectory[0])
    count = tf.Variable(0.0)
    reference = tf.train.ExponentialMovingAverage(0.9, count if num_updates else None)
    ema = EMA(0.9, num_updates=num_updates)
    state = ema.init(trajectory[0])
    reference.apply([variable])  # Creates the shadow; the value does not move.
    for model in trajectory[1:]:
        variable.assign(model)
        reference.apply([variable])
        count.assign_add(1.0)
        state = ema.update(state, model)
        np.testing.assert_allclose(
            ema.value(state), reference.average(variable).numpy(), rtol=2e-5, atol=1e-6
        )


@given(trajectories, st.floats(0.05, 0.99))
def test_zero_debiased_ema_is_a_weighted_mean_of_the_models_seen(averages, decay):
    ema = EMA(decay, num_updates=False, zero_debias=True)
    state = ema.init(np.full(5, 123.0))
    for model in averages:
        state = ema.update(state, model)
    weights = decay ** np.arange(len(averages))[::-1]
    expected = np.average(averages, axis=0, weights=weights)
    np.testing.assert_allclose(ema.value(state), expected, atol=1e-8)


@given(trajectories)
def test_ma_is_the_mean(averages):
    ma = MA()
    state = ma.init(np.full(5, 123.0))
    for model in averages:
        state = ma.update(state, model)
    np.testing.assert_allclose(ma.value(state), np.mean(averages, 0), atol=1e-8)


def test_a_young_average_is_mostly_of_its_last_models():
    """By hand: β is 1/10, 2/11, 3/12, …, up to 9/10."""
    ema = EMA(0.9)
    assert ema == EMA(0.9, num_updates=True)
    state = ema.init(100.0)
    for model, wanted in ((0.0, 10.0), (11.0, 119 / 11), (0.0, 119 / 44)):
        state = ema.update(state, model)
        assert ema.value(state) == pytest.approx(wanted)
    old = ema.update(state._replace(average=0.0, count=80.0), 1.0)
    assert ema.value(old) == pytest.approx(0.1)


def test_averages_of_a_start_without_syncs():
    assert EMA(0.5).value(EMA(0.5).init(3.0)) == 3.0
    assert MA().value(MA().init(3.0)) == 3.0
    debiased = EMA(0.5, num_updates=False, zero_debias=True)
    state = debiased.init(3.0)
    assert debiased.value(state) == 3.0
    state = debiased.update(state, 8.0)
    assert state.average == 4.0 and debiased.value(state) == 8.0  # nothing of the start


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EASGD("x"), r"elasticity='x' is no number. Give one, such as 0.9/N"),
        (lambda: BMUF(block_learning_rate="x"), "block_learning_rate='x' is no number"),
        (lambda: BMUF(1.0), r"block_momentum=1.0 is outside \[0, 1\)"),
        (lambda: BMUF(-0.1), "block_momentum=-0.1"),
        (lambda: BMUF(float("nan")), "block_momentum=nan"),
        (lambda: BMUF(0.5, 0.0), "block_learning_rate=0.0 must be positive"),
        (lambda: BMUF(0.5, float("inf")), "block_learning_rate=inf must be positive and finite"),
        (lambda: BMUF("square"), "block_momentum='square' is no number and none of linear, sqrt"),
        (lambda: BMUF(warmup=0.0), "warmup=0.0 is no positive number of blocks"),
        (lambda: BMUF(warmup=float("inf")), "warmup=inf"),
        (lambda: BMUF(compat="CNTK"), "compat='CNTK' is not one of"),
        (lambda: BMUF(compat="cntk", warmup=True), "warmup=True and compat='cntk' contradict"),
        (lambda: EASGD(-0.1), "elasticity=-0.1"),
        (lambda: EASGD(1.0), "elasticity=1.0"),
        (lambda: EASGD(0.7).resolve(2), "unstable with 2 replicas"),
        (lambda: EMA(1.0), r"decay=1.0 is outside \(0, 1\)"),
        (lambda: EMA(0.0), "decay=0.0"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
