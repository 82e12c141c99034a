"""The online natural gradient against NumPy, and what must hold of it for any rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.natural_gradient_reference import Reference
from tests.lib.random_examples import random_examples
from tfpara.optimizers import OnlineNaturalGradient, Scatter
from tfpara.optimizers.online_natural_gradient import arbitrary_basis, orthonormal, sensible_rank
from tfpara.optimizers.preconditioner import Preconditioner


def preconditioner(rank, width, period=4, **options):
    method = OnlineNaturalGradient(rank, **options)
    variables = [keras.Variable(value) for value in method.arbitrary(width)]
    return Preconditioner(method, period, *variables, keras.Variable(0, dtype="int32"))


def fisher(side):
    r = side.basis.numpy().astype(np.float64)
    return r.T @ np.diag(side.diagonal.numpy()) @ r + side.rho.numpy() * np.eye(r.shape[1])


def random_rows(rng, step, n, width):
    return rng.normal(size=(n, width))


def ill_conditioned_rows(rng, step, n, width):
    """Standard deviations from 1 down to 1e-3 along directions that are not the axes'."""
    turn = np.linalg.qr(np.random.default_rng(7).normal(size=(width, width)))[0]
    return rng.normal(size=(n, width)) * np.logspace(0, -3, width) @ turn


def drifting_rows(rng, step, n, width):
    """The scale grows a thousandfold and the main direction turns."""
    rows = rng.normal(size=(n, width)) * 10 ** (step / 17)
    rows[:, step % width] *= 5
    return rows


def shifted_rows(rng, step, n, width):
    """Sigmoid outputs: positive, with a 1 at the end, so a large common direction."""
    rows = 1 / (1 + np.exp(-rng.normal(size=(n, width))))
    rows[:, -1] = 1
    return rows


def small_rows(rng, step, n, width):
    """Near epsilon when squared."""
    return 1e-4 * rng.normal(size=(n, width)) * np.logspace(0, -2, width)


KINDS = [random_rows, ill_conditioned_rows, drifting_rows, shifted_rows, small_rows]


@pytest.mark.nightly_cases("*-eager")
@pytest.mark.parametrize("compiled", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_numpy_over_50_steps(kind, compiled):
    width, rank = 24, 8
    side, reference = preconditioner(rank, width), Reference(rank)
    call = tf.function(side, input_signature=[tf.TensorSpec([None, width])]) if compiled else side
    rng = np.random.default_rng(0)
    for step in range(50):
        rows = kind(rng, step, 100 if step % 3 else 37, width).astype("float32")
        got, want = call(tf.constant(rows)).numpy(), reference.step(rows)
        assert np.linalg.norm(got - want) < 2e-4 * np.linalg.norm(want), step
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(rows), rel=1e-5)
        f, g = fisher(side), reference.fisher()
        assert np.linalg.norm(f - g) < 2e-4 * np.linalg.norm(g), step
    assert side.minibatches.numpy() == 50
    # It has done something: on data whose scatter is not that of the unit matrix.
    if kind is not random_rows:
        assert np.linalg.norm(got - rows) > 0.05 * np.linalg.norm(rows)


@pytest.mark.parametrize("options", [{"alpha": 0.5}, {"history": 300.0}, {"delta": 1e-2}], ids=str)
def test_equals_numpy_with_other_settings(options):
    side, reference = preconditioner(5, 12, period=2, **options), Reference(5, period=2, **options)
    rng = np.random.default_rng(1)
    for step in range(20):
        rows = ill_conditioned_rows(rng, step, 64, 12).astype("float32")
        got, want = side(tf.constant(rows)).numpy(), reference.step(rows)
        assert np.linalg.norm(got - want) < 2e-4 * np.linalg.norm(want), step


@random_examples(40)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    width=st.integers(2, 20),
    scale=st.floats(-6, 6),
    jump=st.floats(-4, 4),
)
def test_basis_stays_orthonormal_and_rows_keep_their_norm(seed, n, width, scale, jump):
    rank = sensible_rank(20, width)
    method = OnlineNaturalGradient(rank)
    rng = np.random.default_rng(seed)
    scatter = method.arbitrary(width)
    for step in range(4):
        rows = 10 ** (scale + step * jump / 4) * rng.normal(size=(n, width))
        rows = tf.constant(rows * (rng.random(width) < 0.7), tf.float32)  # dead columns
        scatter = method.update(scatter, rows)
        product = scatter.basis @ tf.transpose(scatter.basis)
        np.testing.assert_allclose(product, np.eye(rank), atol=2e-3)
        assert np.min(scatter.diagonal) > 0 and scatter.rho > 0
        norm = np.linalg.norm(rows)
        assert np.linalg.norm(method.precondition(scatter, rows)) == pytest.approx(norm, rel=1e-4)


def test_an_update_keeps_the_trace():
    """tr F' = eta tr S + (1 - eta) tr F, where no floor is in the way."""
    rows = tf.constant(np.random.default_rng(0).normal(size=(50, 10)), tf.float32)
    method = OnlineNaturalGradient(4)
    scatter = Scatter(arbitrary_basis(4, 10), tf.constant([4.0, 3.0, 2.0, 1.0]), tf.constant(0.5))
    after = method.update(scatter, rows)
    eta = 1 - np.exp(-50 / 2000)
    expected = eta * np.mean(np.sum(np.square(rows), 1)) + (1 - eta) * (10 * 0.5 + 10.0)
    assert float(10 * after.rho + np.sum(after.diagonal)) == pytest.approx(expected, rel=1e-5)


def test_directions_are_shortened_by_their_variance():
    """With alpha = 0 and the true scatter, rows are whitened along the directions followed."""
    scatter = Scatter(tf.eye(2, 4), tf.constant([8.0, 3.0]), tf.constant(1.0))
    method = OnlineNaturalGradient(2, alpha=0.0)
    got = method.precondition(scatter, tf.ones([1, 4])).numpy()[0]
    np.testing.assert_allclose(got / got[-1], [1 / 9, 1 / 4, 1, 1], rtol=1e-5)


def test_eta_follows_the_history_up_to_its_limit():
    rows = tf.ones([4, 3])
    scatter = Scatter(tf.eye(1, 3), tf.constant([1.0]), tf.constant(1.0))

    def trace_after(**options):
        after = OnlineNaturalGradient(1, **options).update(scatter, rows)
        return float(3 * after.rho + after.diagonal[0])

    # tr S = 3 and tr F = 4.
    assert trace_after(history=1e-3) == pytest.approx(0.9 * 3 + 0.1 * 4, rel=1e-5)
    assert trace_after(history_minibatches=4.0) == pytest.approx(0.25 * 3 + 0.75 * 4, rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_rows_that_are_not_finite_leave_the_state_alone(bad):
    side = preconditioner(2, 4)
    good = tf.constant(np.random.default_rng(0).normal(size=(9, 4)), tf.float32)
    side(good)
    before = fisher(side)
    rows = tf.tensor_scatter_nd_update(good, [[3, 1]], [bad])
    np.testing.assert_array_equal(side(rows), rows)
    np.testing.assert_array_equal(fisher(side), before)
    assert side.minibatches.numpy() == 1


def test_zero_rows_stay_zero():
    side = preconditioner(2, 4)
    np.testing.assert_array_equal(side(tf.zeros([5, 4])), np.zeros([5, 4]))
    np.testing.assert_array_equal(side(tf.zeros([0, 4])), np.zeros([0, 4]))
    assert np.isfinite(side(tf.ones([5, 4]))).all()


def test_a_basis_that_was_lost_is_made_orthonormal_again():
    basis = tf.constant([[1.0, 0, 0, 0], [1.0, 0.1, 0, 0], [0.0, 0, 0, 0]], tf.float64)
    got = orthonormal(basis)
    np.testing.assert_allclose(got @ tf.transpose(got), np.eye(3), atol=1e-12)
    np.testing.assert_allclose(got[:2], [[1, 0, 0, 0], [0, 1, 0, 0]], atol=1e-12)


def test_sensible_rank():
    assert [sensible_rank(20, width) for width in (1, 2, 3, 10, 39, 100)] == [0, 1, 2, 5, 20, 20]


def test_arbitrary_basis_covers_all_columns():
    basis = arbitrary_basis(3, 8).numpy()
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-6)
    assert (np.count_nonzero(basis, 0) == 1).all()
