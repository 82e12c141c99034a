"""The cost model against numbers worked out by hand from paper 003, and what must always hold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpara.planner import Costs, Link, calibrated_link

# 100 MB/s, 50 MB: an all-reduce of two workers sends 50 MB each, so 0.5 s.
LINK = Link(100e6)
COSTS = Costs(step_seconds=0.1, model_bytes=50e6, link=LINK, local_seconds=0.1)


def test_an_all_reduce_sends_its_share_of_the_buffer():
    assert LINK.reduce_seconds(50e6, 1) == 0.0
    assert LINK.reduce_seconds(50e6, 2) == pytest.approx(0.5)  # 2 · 1/2 · 50 MB
    assert LINK.reduce_seconds(50e6, 4) == pytest.approx(0.75)  # 2 · 3/4 · 50 MB
    delayed = Link(100e6, delay_seconds=0.01)
    assert delayed.reduce_seconds(50e6, 4) == pytest.approx(0.75 + 6 * 0.01)


def test_mbit_are_millions_of_bits():
    assert Link.of_mbit(104.5, 10) == Link(12.5e6, 0.01)  # 4.5 % are headers
    assert Link(12.5e6).mbit == pytest.approx(104.5)


@pytest.mark.parametrize(
    ("workers", "period", "expected"),
    [
        # 2 · τ · 0.1 s of work in τ · 0.1 s and a sync of 0.1 + 0.5 s
        (2, 1, 0.2 / 0.7),
        (2, 20, 4.0 / 2.6),
        (2, 80, 16.0 / 8.6),
        # four workers: a sync of 0.1 + 0.75 s
        (4, 20, 8.0 / 2.85),
        (1, 1, 1.0),
    ],
)
def test_speedup_by_hand(workers, period, expected):
    assert COSTS.speedup(workers, period) == pytest.approx(expected)


def test_speedup_is_equation_17():
    # An epoch of 1200 minibatches on N = 4 replicas with τ = 20: 15 syncs of 0.85 s.
    costs = Costs(0.1, 50e6, LINK, 0.1, slowdown=1.25)
    t_s, t_c, alpha, n = 1200 * 0.1, 1200 / (4 * 20) * 0.85, 1.25, 4
    assert costs.speedup(4, 20) == pytest.approx(1 / (alpha / n + t_c / t_s))


def test_smallest_period_by_hand():
    # The loss 0.6 / (0.1 τ + 0.6) is below 0.07 from τ > 79.7 on.
    assert COSTS.smallest_period(2, loss=0.07) == 80
    assert COSTS.loss(2, 114) == pytest.approx(0.05)
    assert COSTS.smallest_period(1) == 1


def test_overlap_hides_travel_and_nothing_else():
    costs = Costs(0.1, 50e6, LINK, local_seconds=0.1, overlap=True)
    # 0.5 s of travel hide behind 5 minibatches; 0.1 s of packing and the rule do not.
    assert costs.block_seconds(2, 5) == pytest.approx(0.6)
    assert costs.block_seconds(2, 2) == pytest.approx(0.6)
    assert costs.block_seconds(2, 20) == pytest.approx(2.1)
    # The loss 0.1 / (0.1 τ + 0.1) is below 0.07 from τ > 13.3 on.
    assert costs.smallest_period(2, loss=0.07) == 14


def test_an_all_to_all_among_three_or_more_takes_longer():
    scattered = Costs(0.1, 50e6, LINK, local_seconds=0.1, scattered=True)
    assert scattered.sync_seconds(2) == COSTS.sync_seconds(2) == pytest.approx(0.6)
    assert scattered.sync_seconds(4) == pytest.approx(0.1 + 1.2 * 0.75)
    assert COSTS.compressed("int8") == Costs(0.1, 12.5e6, LINK, 0.1, scattered=True)
    assert COSTS.compressed("none") == COSTS


def test_no_period_is_long_enough():
    assert Costs(1e-9, 50e6, Link(1e6)).smallest_period(2) is None


def test_calibration_gives_the_measured_time_back():
    link = calibrated_link(0.08, 50e6, 2)
    assert link.bytes_per_second == pytest.approx(625e6)
    assert link.reduce_seconds(50e6, 2) == pytest.approx(0.08)
    delayed = calibrated_link(0.08, 50e6, 4, empty_seconds=0.03)
    assert delayed.delay_seconds == pytest.approx(0.005)  # six messages, one after the other
    assert delayed.reduce_seconds(50e6, 4) == pytest.approx(0.08)
    with pytest.raises(ValueError, match="says nothing of a link"):
        calibrated_link(0.08, 50e6, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_seconds": 0.0}, "step_seconds=0.0 must be above 0"),
        ({"step_seconds": math.nan}, "step_seconds=nan must be a finite number"),
        ({"model_bytes": -1}, "model_bytes=-1 must be a finite number of at least 0"),
        ({"slowdown": 0.9}, "slowdown=0.9 must be at least 1"),
        ({"local_seconds": "fast"}, "local_seconds='fast' must be a finite number"),
    ],
)
def test_bad_costs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Costs(**{"step_seconds": 0.1, "model_bytes": 50e6, "link": LINK} | arguments)


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="bytes_per_second=0 must be above 0"):
        Link(0)
    with pytest.raises(ValueError, match="sync_period=0 must be a whole number"):
        COSTS.speedup(2, 0)
    with pytest.raises(ValueError, match="num_workers=1.5 must be a whole number"):
        COSTS.speedup(1.5, 1)
    with pytest.raises(ValueError, match="loss=1.0 must be a share"):
        COSTS.smallest_period(2, 1.0)


COSTS_OF_ALL_KINDS = st.builds(
    Costs,
    step_seconds=st.floats(1e-4, 10),
    model_bytes=st.floats(1e3, 1e10),
    link=st.builds(Link, st.floats(1e5, 1e11), st.floats(0, 0.2)),
    local_seconds=st.floats(0, 1),
    slowdown=st.floats(1, 3),
    overlap=st.booleans(),
)


@given(COSTS_OF_ALL_KINDS, st.integers(1, 64), st.integers(1, 2000))
def test_speedup_is_bounded_and_grows_with_the_period(costs, workers, period):
    speedup = costs.speedup(workers, period)
    assert 0 < speedup <= workers * (1 + 1e-9)
    assert costs.speedup(workers, period + 1) >= speedup * (1 - 1e-9)
    assert -1e-9 <= costs.loss(workers, period) < 1


@given(COSTS_OF_ALL_KINDS, st.integers(2, 64), st.floats(0.01, 0.9))
def test_smallest_period_is_the_first_that_suffices(costs, workers, loss):
    period = costs.smallest_period(workers, loss)
    if period is None:
        assert costs.loss(workers, 10**6) >= loss
        return
    assert costs.loss(workers, period) < loss
    assert period == 1 or costs.loss(workers, period - 1) >= loss
