"""BMUF-Adam's moments: against step-by-step recurrences, identities, invariants."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.lib.random_examples import random_examples
from tfpara.algorithms.bmuf import BMUF
from tfpara.algorithms.bmuf_adam import BMUFAdam

numbers = hnp.arrays(np.float64, 4, elements=st.floats(-10, 10))
squares = hnp.arrays(np.float64, 4, elements=st.floats(0, 100))


def adam_steps(beta, moment, gradient, steps):
    """`steps` steps of m ← βm + (1−β)g, one by one."""
    for _ in range(steps):
        moment = beta * moment + (1 - beta) * gradient
    return moment


@pytest.mark.parametrize(
    ("rule", "ahead"),
    [
        # τ = 16: ρ = 16, 24, 28, 30; Nesterov: ρ/2 steps ahead; classical: ρ − 16.
        (BMUFAdam(0.5, beta_1=0.9, beta_2=0.95), [8, 12, 14, 15]),
        (BMUFAdam(0.5, nesterov=False, beta_1=0.9, beta_2=0.95), [0, 8, 12, 14]),
        # ζ = 2: ρ = 32, 48, 56, 60; ρ/2 + 16 ahead.
        (BMUFAdam(0.5, 2.0, beta_1=0.9, beta_2=0.95), [32, 40, 44, 46]),
    ],
)
def test_four_blocks_step_by_step(rule, ahead):
    """Two replicas with their own gradients, constant in a block; the steps ahead really taken."""
    rng, tau = np.random.default_rng(0), 16
    state, taken = rule.init_moments(np.zeros(3), np.zeros(3)), 0
    for extra in ahead:
        gradients = rng.normal(size=(2, 3))
        starts, taken = (state.momentum, state.velocity), taken + tau
        averages, expected = [], []
        for beta, start, g in zip((0.9, 0.95), starts, (gradients, gradients**2), strict=True):
            ends = [adam_steps(beta, start, one, tau) for one in g]
            averages.append(np.mean(ends, 0))
            # Steps on from the average, then Keras' correction for the steps it has counted.
            on = adam_steps(beta, averages[-1], g.mean(0), extra)
            unbiased = on / adam_steps(beta, 0.0, 1.0, taken + extra)
            expected.append(unbiased * adam_steps(beta, 0.0, 1.0, taken))
        state = rule.update_moments(state, *averages, steps=tau, iterations=taken, num_replicas=2)
        np.testing.assert_allclose(state.momentum, expected[0], rtol=1e-10)
        np.testing.assert_allclose(state.velocity, expected[1], rtol=1e-10)


def test_published_coefficients():
    """Far from the start: [(1−β^(τ+ηρ)) m̄ − (β^τ − β^(τ+ηρ)) m] / (1−β^τ), ρ ← ηρ + τ."""
    rule, tau, eta, far = BMUFAdam(warmup=False), 5, 0.75, 10**6
    state, rho = rule.init_moments(0.3, 0.2), 0.0
    for m_mean, square in [(0.5, 0.3), (-0.2, 0.01), (0.1, 0.4)]:
        v_mean = adam_steps(0.999, state.velocity, square, tau)
        rho = eta * rho + tau
        expected = []
        for beta, start, mean in ((0.9, state.momentum, m_mean), (0.999, state.velocity, v_mean)):
            b, c = beta**tau, beta ** (tau + eta * rho)
            expected.append(((1 - c) * mean - (b - c) * start) / (1 - b))
        state = rule.update_moments(
            state, m_mean, v_mean, steps=tau, iterations=far, num_replicas=4
        )
        np.testing.assert_allclose(state[:2], expected, rtol=1e-9)
        assert state.equivalent_steps == rho


@given(
    st.floats(-5, 5),
    st.floats(0.0, 0.95),
    st.floats(0.2, 2.0),
    st.booleans(),
    st.sampled_from([1.0, 0.3]),
)
def test_moments_of_a_constant_gradient_stay_unbiased(gradient, eta, zeta, nesterov, share):
    """Keras' corrected moments are the gradient and its square, after syncs of any length."""
    rule, done = BMUFAdam(eta, zeta, nesterov), 0
    state = rule.init_moments(0.0, 0.0)
    for tau in (3, 1, 10, 2):
        done += tau
        state = rule.update_moments(
            state,
            adam_steps(0.9, state.momentum, gradient, tau),
            adam_steps(0.999, state.velocity, gradient**2, tau),
            steps=tau,
            iterations=done,
            num_replicas=2,
            share=share,
        )
        np.testing.assert_allclose(state.momentum / (1 - 0.9**done), gradient, atol=1e-9)
        np.testing.assert_allclose(state.velocity / (1 - 0.999**done), gradient**2, atol=1e-7)


@given(st.floats(0.0, 0.95), st.floats(0.5, 2.0), st.booleans(), st.booleans())
def test_the_moments_go_on_as_far_as_the_weights(eta, zeta, nesterov, warmup):
    """Replicas that move by 1 in each step: Δ is ρ, and B − w̄ the steps from w̄ to B."""
    rule = BMUFAdam(eta, zeta, nesterov, beta_1=0.9, warmup=warmup)
    tau, beta = 10, 0.9
    weights, moments = rule.init(0.0), rule.init_moments(0.3, 0.0)
    for steps in (10, 4, 10, 1):
        average = rule.broadcast(None, weights) + steps
        weights = rule.update(weights, average, 2, steps / tau)
        ahead = rule.broadcast(None, weights) - average
        end = adam_steps(beta, moments.momentum, 0.7, steps)
        moments = rule.update_moments(
            moments, end, 0.0, steps=steps, iterations=10**6, num_replicas=2, share=steps / tau
        )
        np.testing.assert_allclose(moments.equivalent_steps, weights.delta, rtol=1e-9)
        expected = beta**ahead * end + (1 - beta**ahead) * 0.7
        np.testing.assert_allclose(moments.momentum, expected, rtol=1e-9)


@given(numbers, squares, numbers, squares, st.integers(1, 100), st.booleans())
def test_without_block_momentum_the_moments_are_averages(m, v, m_mean, v_mean, tau, nesterov):
    rule = BMUFAdam(0.0, nesterov=nesterov)
    state = rule.update_moments(
        rule.init_moments(m, v), m_mean, v_mean, steps=tau, iterations=2 * tau, num_replicas=8
    )
    np.testing.assert_array_equal(state.momentum, m_mean)
    np.testing.assert_array_equal(state.velocity, v_mean)


@given(squares, squares, st.integers(1, 50), st.floats(0, 0.95), st.floats(0.2, 2), st.booleans())
def test_second_moment_is_never_negative(v, v_mean, tau, eta, zeta, nesterov):
    """Whatever is given, even an average that no Adam could have come to."""
    rule = BMUFAdam(eta, zeta, nesterov)
    state = rule.init_moments(0 * v, v)
    for block in range(1, 4):
        state = rule.update_moments(
            state, 0 * v, v_mean, steps=tau, iterations=block * tau, num_replicas=2
        )
        assert np.all(state.velocity >= 0)
        assert np.all(np.isfinite(state.velocity))


def test_parts_are_parts_of_the_whole_and_tensors_work_in_a_graph():
    rng = np.random.default_rng(0)
    start, end = rng.uniform(size=(2, 2, 7)).astype("f")
    rule = BMUFAdam(0.75, warmup=True)

    def update(part, steps, iterations):
        state = rule.init_moments(*start[:, part])._replace(equivalent_steps=12.0, blocks=9.0)
        return rule.update_moments(
            state, *end[:, part], steps=steps, iterations=iterations, num_replicas=4
        )

    whole = update(slice(None), 10, 40)
    graph = tf.function(lambda s, t: [update(p, s, t) for p in (slice(0, 3), slice(3, 7))])
    parts = graph(tf.constant(10.0), tf.constant(40.0))
    for field in range(2):
        got = np.concatenate([p[field] for p in parts])
        np.testing.assert_allclose(got, whole[field], rtol=1e-4)
        assert got.dtype == np.float32
    assert [float(p.equivalent_steps) for p in parts] == [19.0, 19.0]


@given(numbers, numbers, numbers)
@random_examples(20)
def test_weights_are_those_of_bmuf(start, first, second):
    a, b = BMUFAdam().resolve(4), BMUF().resolve(4)
    x, y = a.init(start), b.init(start)
    for average in (first, second):
        x, y = a.update(x, average, 4), b.update(y, average, 4)
        np.testing.assert_array_equal(a.broadcast(None, x), b.broadcast(None, y))
    assert isinstance(a, BMUFAdam)
    assert a.block_momentum == 0.75


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BMUFAdam(beta_1=1.0), r"beta_1=1.0 is outside \(0, 1\)"),
        (lambda: BMUFAdam(beta_2=float("nan")), "beta_2=nan"),
        (lambda: BMUFAdam(1.0), "block_momentum=1.0"),
        (lambda: BMUFAdam(compat="cntk"), "compat='cntk': BMUFAdam has no such form"),
        (lambda: BMUFAdam().check_optimizer(keras.optimizers.SGD(0.1)), "filters the moments"),
        (lambda: BMUFAdam().check_optimizer(keras.optimizers.Nadam(0.1)), "filters the moments"),
        (
            lambda: BMUFAdam().check_optimizer(keras.optimizers.Adam(amsgrad=True)),
            r"Adam\(amsgrad=True\)",
        ),
        (
            lambda: BMUFAdam().check_optimizer(keras.optimizers.Adam(beta_2=0.98)),
            "beta_2 is 0.999 in BMUFAdam and 0.98 in the local optimizer",
        ),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_adam_and_adamw_are_accepted():
    BMUFAdam().check_optimizer(keras.optimizers.Adam())
    BMUFAdam(beta_2=0.98).check_optimizer(keras.optimizers.AdamW(beta_2=0.98))
