"""The asynchronous rules as pure functions: by hand, closed forms, invariants."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpara.algorithms import ASGD, BMUF, AsyncBMUF, AsyncEASGD, AveragedASGD, Downpour
from tfpara.algorithms.asgd import RunningThenMean

weights = st.floats(-10, 10)
models = st.lists(weights, min_size=1, max_size=12)


def averaged(rule, start, before, after):
    """The average after the models `before`, then, as the mean, those `after`."""
    state = rule.init(start)
    for model in before:
        state = rule.update(state, model)
    running = rule.value(state)
    state = rule.start_mean(state)
    for model in after:
        state = rule.update(state, model)
    return running, rule.value(state)


def test_delay_compensation_by_hand():
    # g + λ g² (W − W_pulled): 3 + 0.5 · 9 · (1 − 2), and −1 + 0.5 · 1 · (4 − 0).
    got = ASGD(delay_compensation=0.5).gradient(
        np.array([3.0, -1.0]), pulled=np.array([2.0, 0.0]), current=np.array([1.0, 4.0])
    )
    np.testing.assert_array_equal(got, [-1.5, 1.0])


def test_several_gradients_are_compensated_each_by_its_own_square():
    # Of 3 and −1 at a distance of −2: (3 + 0.5 · 9 · −2) + (−1 + 0.5 · 1 · −2) = −8.
    got = ASGD(delay_compensation=0.5).gradient(
        3.0 - 1.0, pulled=1.0, current=-1.0, squares=9.0 + 1.0
    )
    assert got == -8.0


@given(weights, weights, st.floats(0, 2))
def test_nothing_is_compensated_without_delay_or_factor(gradient, w, factor):
    assert ASGD(delay_compensation=factor).gradient(gradient, pulled=w, current=w) == gradient
    assert ASGD().gradient(gradient, pulled=w, current=w + 1.0) == gradient


def test_rate_by_staleness_by_hand():
    rule = ASGD(rate_by_staleness=True)
    assert [rule.rate_factor(k) for k in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert ASGD().rate_factor(7) == 1.0


def test_a_block_of_local_steps_is_added_by_hand():
    # From 2 to 5, which is 3 further; of staleness 2: W is 10 by now.
    assert Downpour().difference(5.0, pulled=2.0) == 3.0
    assert Downpour().update(10.0, 3.0, staleness=2) == 13.0
    assert Downpour(rate_by_staleness=True).update(10.0, 3.0, staleness=2) == 11.0
    assert Downpour(block_learning_rate=0.5).update(10.0, 3.0, staleness=2) == 11.5


def test_momentum_once_a_round_by_hand():
    rule = AsyncBMUF(0.5, 0.8, workers=2)
    w, state = rule.update(10.0, rule.init(10.0), 4.0)
    assert (w, state) == (pytest.approx(11.6), (0.0, 4.0, 1.0, 0.0))  # 10 + 0.8 · 4 / 2
    w, state = rule.update(w, state, 2.0)
    # G = 3, Δ = 0.8 · 3 = 2.4; W = 11.6 + 0.8 · 2 / 2 + 0.5 · 2.4
    assert (w, *state) == pytest.approx((13.6, 2.4, 0.0, 0.0, 1.0))
    w, state = rule.update(w, state, 0.0)
    w, state = rule.update(w, state, -2.0)
    # G = -1, Δ = 0.5 · 2.4 - 0.8 = 0.4; W = 13.6 - 0.8 + 0.5 · 0.4
    assert (w, *state) == pytest.approx((13.0, 0.4, 0.0, 0.0, 2.0))


@given(st.integers(1, 12), st.lists(weights, min_size=1, max_size=40))
def test_rounds_of_pushes_are_nesterov_block_momentum(workers, means):
    """All pull at the beginning of a round: W is the point that BMUF's replicas go on from."""
    rule, plain = AsyncBMUF("linear").resolve(workers), BMUF().resolve(workers)
    w, kept = 1.0, rule.init(1.0)
    state = plain.init(1.0)
    for mean in means:
        pulled = w
        for worker in range(workers):
            local = pulled + mean + worker - (workers - 1) / 2
            w, kept = rule.update(w, kept, rule.difference(local, pulled=pulled))
        state = plain.update(state, plain.broadcast(None, state) + mean, workers)
        scale = 1.0 + max(map(abs, means)) * len(means) * workers
        assert w == pytest.approx(plain.broadcast(None, state), abs=1e-9 * scale)


def test_block_momentum_of_workers_is_that_of_as_many_replicas():
    assert AsyncBMUF("linear").resolve(4).filter == BMUF().resolve(4)
    rule = AsyncBMUF().resolve(4)
    assert rule.filter == BMUF(0.75, warmup=True) and rule.has_momentum
    assert AsyncBMUF().resolve(2).filter == BMUF(0.5, warmup=True)
    assert AsyncBMUF().resolve(16).filter == rule.filter
    assert [rule.filter.momentum_after(t) for t in (0.0, 1.0, 9.0)] == [0.0, 0.5, 0.75]
    assert not AsyncBMUF().resolve(1).has_momentum
    assert AsyncBMUF().for_optimizer(short=True).resolve(4).filter.warmup == 5.0
    assert AsyncBMUF().for_optimizer(short=False).resolve(4).filter.warmup == 20.0
    assert AsyncBMUF(warmup=True).for_optimizer(short=True).warmup == 5.0
    assert AsyncBMUF(warmup=1).for_optimizer(short=True).warmup == 1
    assert AsyncBMUF(warmup=False).for_optimizer(short=True).resolve(4).filter.warmup is False
    assert AsyncBMUF(0.9, 0.7).for_optimizer(short=False) == AsyncBMUF(0.9, 0.7)
    with pytest.raises(ValueError, match="resolve"):
        AsyncBMUF().update(0.0, AsyncBMUF().init(0.0), 1.0)


@given(weights, weights, weights, st.integers(0, 9))
def test_one_local_step_is_that_of_asgd(pulled, current, gradient, staleness):
    rule = Downpour()
    difference = rule.difference(pulled - 0.1 * gradient, pulled=pulled)
    wanted = current - 0.1 * ASGD().gradient(gradient, pulled=pulled, current=current)
    assert rule.update(current, difference, staleness) == pytest.approx(wanted, abs=1e-9)


@given(weights, weights, st.floats(0, 1))
def test_elastic_moves_keep_the_sum_and_approach(local, center, alpha):
    move = AsyncEASGD(alpha).move(local, center)
    w, c = local - move, center + move
    assert w + c == pytest.approx(local + center, abs=1e-9)
    assert abs(w - c) <= abs(local - center) * max(1.0, abs(1 - 2 * alpha)) + 1e-9
    assert AsyncEASGD(0.0).move(local, center) == 0.0


def test_default_elasticity_is_for_all_workers_together():
    assert AsyncEASGD().resolve(6).elasticity == 0.15
    assert AsyncEASGD(0.4).resolve(6).elasticity == 0.4


def test_running_average_by_hand():
    # r = 0.5: 4 → 6 → 3.
    assert averaged(RunningThenMean(0.5), 4.0, [8.0, 0.0], [])[0] == 3.0


@given(weights, models, models, st.sampled_from([0.5, 0.1, 0.01]))
def test_the_mean_counts_the_running_average_as_models(start, before, after, r):
    running, mean = averaged(RunningThenMean(r), start, before, after)
    own = 1 / r - 1
    wanted = (own * running + sum(after)) / (own + len(after))
    assert mean == pytest.approx(wanted, abs=1e-9)


@given(weights, models, st.floats(0.01, 1))
def test_averages_stay_among_the_models(start, before, r):
    running, mean = averaged(RunningThenMean(r), start, before, before)
    lowest, highest = min([start, *before]), max([start, *before])
    for value in (running, mean):
        assert lowest - 1e-9 <= value <= highest + 1e-9


def test_a_rate_of_one_is_the_mean_of_the_models_alone():
    assert averaged(RunningThenMean(1.0), 99.0, [1.0], [2.0, 6.0, 10.0]) == (1.0, 6.0)


def test_averaged_asgd_brings_its_average():
    rule = AveragedASGD(running_rate=0.2, max_staleness=3)
    assert rule.average == RunningThenMean(0.2)
    assert rule.max_staleness == 3
    assert dataclasses.replace(rule, running_rate=0.5).average == RunningThenMean(0.5)


def test_averaged_asgd_takes_no_number_without_its_name():
    """The first one was the staleness, and is the rate of all other averages."""
    with pytest.raises(TypeError, match="positional argument"):
        AveragedASGD(5)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ASGD(max_staleness=-1), "max_staleness=-1"),
        (lambda: ASGD(max_staleness=1.0), "max_staleness=1.0"),
        (lambda: ASGD(max_staleness=True), "max_staleness=True"),
        (lambda: ASGD(delay_compensation=-0.1), "delay_compensation=-0.1"),
        (lambda: ASGD(delay_compensation=float("nan")), "delay_compensation=nan"),
        (lambda: ASGD(reduction="max"), "reduction='max'.*sum, mean"),
        (lambda: AveragedASGD(running_rate=0.0), "running_rate=0.0"),
        (lambda: Downpour(max_staleness=-1), "max_staleness=-1"),
        (lambda: Downpour(block_learning_rate=0.0), "block_learning_rate=0.0.*1/N"),
        (lambda: Downpour(block_learning_rate=float("inf")), "block_learning_rate=inf"),
        (lambda: AsyncBMUF(1.0), "block_momentum=1.0"),
        (lambda: AsyncBMUF("cubic"), "block_momentum='cubic'"),
        (lambda: AsyncBMUF(block_learning_rate=0.0), "block_learning_rate=0.0"),
        (lambda: AsyncBMUF(warmup=-1), "warmup=-1"),
        (lambda: AsyncBMUF(workers=0), "workers=0"),
        (lambda: AsyncBMUF(max_staleness=-1), "max_staleness=-1"),
        (lambda: AsyncEASGD(1.5), "elasticity=1.5.*0.9/N"),
    ],
)
def test_values_outside_their_range_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
