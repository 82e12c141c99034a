"""The schedules as pure functions: traces by hand from the papers' rules, and invariants."""

import json
import math

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpara.schedules import (
    AdaComm,
    AdaCommState,
    Exponential,
    Hand,
    NewbobRule,
    NewbobState,
    OverfittingRule,
    OverfittingState,
    Piecewise,
    Quadratic,
    best_rate,
    candidate_rates,
    linear_scaling,
    minibatch_sizes,
)

losses = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20)
errors = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20)


def follow(rule, scores):
    """(rate, stopped, rejected) after each score, from rate 1, until the rule stops."""
    rate, state, out = 1.0, rule.init(), []
    for score in scores:
        state = rule.update(state, score)
        rate *= rule.factor if state.fading and not state.stopped else 1.0
        out.append((rate, state.stopped, state.rejected))
        if state.stopped:
            break
    return out


def test_newbob_by_cross_entropy():
    # Falls of 5 %, 1.6 %, 0.53 % (begins to halve), 3.2 % (goes on halving), 0.11 %, 0.06 %.
    scores = [2.0, 1.9, 1.87, 1.86, 1.80, 1.798, 1.797, 1.0]
    assert [rate for rate, _, _ in follow(NewbobRule.cross_entropy(), scores)] == [
        *(1, 1, 1),
        *(0.5, 0.25, 0.125),
        0.125,
    ]
    assert [stopped for _, stopped, _ in follow(NewbobRule(), scores)] == [False] * 6 + [True]


def test_newbob_by_frame_accuracy():
    # Rises of 2, 0.6, 0.49 (begins to halve), 0.8, 0.11 and 0.09 points.
    scores = [0.50, 0.52, 0.526, 0.5309, 0.5389, 0.54, 0.5409, 0.9]
    assert follow(NewbobRule.accuracy(), scores) == [
        *[(1, False, False)] * 3,
        (0.5, False, False),
        (0.25, False, False),
        (0.125, False, False),
        (0.125, True, False),
    ]


def test_newbob_at_the_thresholds_themselves():
    rule = NewbobRule(start=0.25, stop=0.125)
    kept = rule.update(rule.update(rule.init(), 4.0), 3.0)  # exactly a quarter
    assert not kept.fading
    fading = rule.update(kept, 2.5)
    assert fading.fading
    assert not rule.update(fading, 2.1875).stopped  # exactly an eighth
    assert rule.update(fading, 2.19).stopped


def test_newbob_never_stops_in_the_epoch_that_begins_the_fading():
    rule = NewbobRule()
    state = rule.update(rule.update(rule.init(), 1.0), 2.0)
    assert (state.fading, state.stopped) == (True, False)
    assert rule.update(state, 2.0).stopped


def test_newbob_that_rejects_compares_with_the_model_it_kept():
    rule = NewbobRule.cross_entropy(reject_worse=True)
    state = rule.update(rule.update(rule.init(), 2.0), 2.5)
    assert (state.score, state.rejected, state.fading) == (2.0, True, True)
    state = rule.update(state, 1.9)
    assert (state.score, state.rejected, state.stopped) == (1.9, False, False)
    assert state.gain == pytest.approx(0.05)
    # Without rejecting, the worse score is what the next one is compared with.
    state = NewbobRule().update(NewbobState(score=2.0), 2.5)
    assert NewbobRule().update(state, 1.9).gain == pytest.approx(0.24)


def kaldi_nnet1(scores, start=0.01, stop=0.001):
    """(rate, stopped, rejected) after each score, as the loop of Kaldi's train_scheduler.sh has it.

    The first score is that of the initial model.
    """
    loss, halving, rate, out = scores[0], False, 1.0, [(1.0, False, False)]
    for loss_new in scores[1:]:
        loss_prev = loss
        accepted = loss_new < loss
        if accepted:
            loss = loss_new
        improvement = (loss_prev - loss) / loss_prev
        if halving and improvement < stop:
            return [*out, (rate, True, not accepted)]
        if improvement < start:
            halving = True
        if halving:
            rate = rate * 0.5
        out.append((rate, False, not accepted))
    return out


@given(st.one_of(losses, st.lists(st.sampled_from([1.0, 1.005, 1.02, 2.0]), min_size=1)))
def test_newbob_that_rejects_is_kaldis_schedule(scores):
    assert follow(NewbobRule(reject_worse=True), scores) == kaldi_nnet1(scores)
    never_stops = NewbobRule(stop=0.0, reject_worse=True)
    assert follow(never_stops, scores) == kaldi_nnet1(scores, stop=0.0)


@given(losses, st.booleans(), st.booleans(), st.booleans())
def test_newbob_never_raises_the_rate_and_halves_to_the_end(scores, rising, relative, reject):
    rule = NewbobRule(rising=rising, relative=relative, reject_worse=reject)
    found = follow(rule, scores)
    rates = [1.0, *(rate for rate, _, _ in found)]
    steps = [b / a for a, b in zip(rates, rates[1:], strict=False)]
    assert set(steps) <= {1.0, 0.5}
    if 0.5 in steps:
        running = steps[: len(steps) - found[-1][1]]
        assert set(running[steps.index(0.5) :]) == {0.5}
    else:
        assert not found[-1][1]


@given(losses, st.integers(0, 19))
def test_newbob_goes_on_from_a_saved_state(scores, at):
    rule = NewbobRule()
    state = rule.init()
    for number, score in enumerate(scores):
        if number == at:
            state = NewbobState(**json.loads(json.dumps(state._asdict())))
        state = rule.update(state, score)
    uninterrupted = rule.init()
    for score in scores:
        uninterrupted = rule.update(uninterrupted, score)
    assert state == uninterrupted


def test_newbob_of_a_score_of_zero():
    state = NewbobRule().update(NewbobState(score=0.0), 0.0)
    assert (state.gain, state.fading) == (0.0, True)


def test_overfitting_guard_by_hand():
    rule = OverfittingRule(threshold=0.05, patience=2)
    #       gap:  (−0.1 → 0)    0.02         0.06 open    0.04         0.06 open   0.07 open
    epochs = [(0.6, 0.5), (0.4, 0.42), (0.34, 0.4), (0.3, 0.34), (0.28, 0.34), (0.26, 0.33)]
    state, seen = rule.init(), []
    for training, validation in epochs:
        state = rule.update(state, training, validation)
        seen.append((state.epochs, state.stopped))
    assert seen == [(0, False), (0, False), (1, False), (0, False), (1, False), (2, True)]
    assert state.smallest == 0.0


def test_overfitting_guard_measures_from_the_smallest_gap():
    rule = OverfittingRule(threshold=0.05)
    state = rule.update(rule.init(), 0.30, 0.40)  # apart from the start
    assert not rule.update(state, 0.26, 0.40).stopped
    assert rule.update(state, 0.20, 0.36).stopped


@given(errors, st.integers(0, 19), st.integers(1, 3))
def test_overfitting_guard_goes_on_from_a_saved_state(epochs, at, patience):
    rule = OverfittingRule(patience=patience)
    state = uninterrupted = rule.init()
    gaps = []
    for number, pair in enumerate(epochs):
        if number == at:
            state = OverfittingState(**json.loads(json.dumps(state._asdict())))
        state, uninterrupted = rule.update(state, *pair), rule.update(uninterrupted, *pair)
        gaps.append(max(0.0, pair[1] - pair[0]))
        assert state == uninterrupted
        last = gaps[-patience:]
        smallest = [min(gaps[: len(gaps) - len(last) + k + 1]) for k in range(len(last))]
        opened = all(g > s + 0.05 for g, s in zip(last, smallest, strict=True))
        assert state.stopped == (len(last) == patience and opened)


def test_exponential_per_epoch_and_per_step():
    rate = Exponential(0.08, epochs=3)
    assert [rate(e) for e in range(5)] == pytest.approx([0.08, 0.008, 0.0008, 0.0008, 0.0008])
    assert rate(1.75) == rate(1)
    steps = Exponential(1.0, epochs=4, last=0.0625, per_step=True)
    assert [steps(p) for p in (0, 0.5, 2, 4, 9)] == pytest.approx(
        [1, 2**-0.5, 0.25, 0.0625, 0.0625]
    )
    assert Exponential(0.3, epochs=1)(0) == 0.3


def test_exponential_within_epochs_is_that_of_keras():
    ours = Exponential(0.32, epochs=15, per_step=True)
    theirs = keras.optimizers.schedules.ExponentialDecay(0.32, 15 * 40, 0.01)
    for step in (0, 1, 39, 40, 300, 600):
        assert ours(step / 40) == pytest.approx(float(theirs(step)), rel=1e-5)


def test_hand_multiplies_at_every_minibatch():
    rate, expected = Hand(0.08, steps_per_epoch=50), 0.08
    for step in range(120):
        assert rate(step // 50 + step % 50 / 50) == pytest.approx(expected)
        expected *= 0.999


def test_minibatch_sizes_of_the_paper():
    sizes = minibatch_sizes()
    assert [sizes(p) for p in (0, 0.2499, 0.25, 1, 2.2499, 2.25, 30)] == [
        *(64, 64),
        *(256, 256, 256),
        *(1024, 1024),
    ]
    assert sizes.segments(2, 1001) == [(0, 250, 256), (250, 1001, 1024)]
    assert sizes.segments(3, 10) == [(0, 10, 1024)]


@given(
    st.dictionaries(st.floats(0.01, 5), st.integers(), max_size=8),
    st.integers(0, 6),
    st.integers(1, 300),
)
def test_segments_cover_an_epoch_once(values, epoch, num_samples):
    schedule = Piecewise({0: -1, **values})
    segments = schedule.segments(epoch, num_samples)
    assert segments[0].first == 0
    assert segments[-1].end == num_samples
    assert all(s.first < s.end for s in segments)
    assert all(a.end == b.first for a, b in zip(segments, segments[1:], strict=False))
    # Far enough from a change to be clear of rounding, a sample has the value of its position.
    for segment in segments:
        middle = (segment.first + segment.end) / 2
        if segment.end - segment.first > 2:
            assert segment.value == schedule(epoch + middle / num_samples)


def test_linear_scaling():
    assert linear_scaling(0.08, 4) == 0.32
    assert linear_scaling(0.08, 1) == 0.08


def test_search_takes_the_lowest_loss_and_then_the_lowest_rate():
    assert candidate_rates(0.5, [2, 0.5, 1, 2]) == [0.25, 0.5, 1.0]
    with pytest.warns(FutureWarning, match="best_rate is deprecated and goes with version 0.4"):
        assert best_rate([0.25, 0.5, 1.0], [3.0, 2.0, 2.0]) == 0.5
    with pytest.warns(FutureWarning):
        assert best_rate([0.25, 0.5, 1.0], [math.nan, 7.0, math.inf]) == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NewbobRule(start=0.001, stop=0.01), "stop ≤ start"),
        (lambda: NewbobRule(stop=-1.0), "stop ≤ start"),
        (lambda: NewbobRule(factor=1.0), "factor=1.0"),
        (lambda: NewbobRule().update(NewbobRule().init(), math.nan), "diverged"),
        (lambda: OverfittingRule(threshold=0.0), "threshold=0.0"),
        (lambda: OverfittingRule(patience=0), "patience=0"),
        (lambda: OverfittingRule(patience=1.5), "patience=1.5"),
        (lambda: OverfittingRule().update(OverfittingState(), math.nan, 0.1), "diverged"),
        (lambda: Exponential(0.0, 3), "first=0.0"),
        (lambda: Exponential(0.1, 3, last=-1.0), "last=-1.0"),
        (lambda: Exponential(0.1, 0), "epochs=0"),
        (lambda: Hand(0.1, 0), "steps_per_epoch=0"),
        (lambda: Hand(0.1, 10, factor=1.1), "factor=1.1"),
        (lambda: Piecewise({1: 64}), "one must be 0"),
        (lambda: Piecewise({}), "one must be 0"),
        (lambda: Piecewise({0: 1, -1: 2}), "one must be 0"),
        (lambda: Piecewise({0: 1, math.inf: 2}), "finite"),
        (lambda: Piecewise({0: 1})(-0.5), "position=-0.5"),
        (lambda: Piecewise({0: 1}).segments(0, 0), "num_samples=0"),
        (lambda: linear_scaling(0.1, 0), "num_replicas=0"),
        (lambda: linear_scaling(math.nan, 2), "rate=nan"),
        (lambda: candidate_rates(0.1, []), "factors is empty"),
        (lambda: candidate_rates(0.1, [0.0, 1.0]), "must be positive"),
        pytest.param(
            lambda: best_rate([0.1, 0.2], [math.nan, math.inf]),
            "every candidate rate diverged",
            marks=pytest.mark.filterwarnings("ignore:tfpara.schedules.best_rate"),
        ),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_quadratic_periods():
    # Rates 0.1, 0.05, 0.025, 0.0125: (0.2 / rate)² is 4, 16, 64, 256.
    halving = Exponential(0.1, epochs=4, last=0.0125)
    assert [Quadratic(halving, 0.2, 10)(epoch) for epoch in range(4)] == [10, 16, 64, 256]
    # α = √τ₀ · the first rate: they grow at once, from exactly τ₀.
    assert Quadratic(halving, math.sqrt(7) * 0.1, 7)(0) == 7
    assert Quadratic(lambda _: 1e-200, 0.2, 10)(0) == Quadratic(lambda _: 1e-12, 0.2, 10)(0) < 2**62


@given(st.floats(1e-4, 1.0), st.floats(0.01, 0.99), st.floats(1e-3, 10.0), st.integers(1, 100))
def test_quadratic_periods_never_fall_where_the_rate_does(first, factor, alpha, period):
    schedule = Quadratic(Exponential(first, 8, first * factor), alpha, period)
    periods = [schedule(epoch) for epoch in range(10)]
    assert min(periods) >= period
    assert periods == sorted(periods)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Quadratic(0.1, 0.2, 5), TypeError, "rate=0.1 must be a function"),
        (lambda: Quadratic(lambda p: 0.1, 0.0, 5), ValueError, "alpha=0.0 must be a positive"),
        (lambda: Quadratic(lambda p: 0.1, 0.2, 0), ValueError, "first=0 must be"),
        (lambda: Quadratic(lambda p: 0.0, 0.2, 5)(3), ValueError, "rate at epoch 3 is 0.0"),
        (lambda: AdaComm(2.5), ValueError, "first=2.5 must be"),
        (lambda: AdaComm(5).update(AdaCommState(5), -1.0), ValueError, "loss=-1.0: AdaComm"),
        (lambda: AdaComm(5).update(AdaCommState(5), math.nan), ValueError, "loss=nan: AdaComm"),
    ],
)
def test_periods_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_periods_by_loss():
    rule, state, periods = AdaComm(20), AdaComm(20).init(), [20]
    for loss in (4.0, 2.0, 1.9, 3.0, 1.0, 0.04, 5.0, 5.0):
        state = rule.update(state, loss)
        periods.append(state.period)
    # √(2/4)·20 = 14.1; 13.8 is rounded up to 14, so half of 15; it rose: half of 8; √(1/4)·20 is
    # not below 4; √(0.01)·20 = 2 is not below 2; then halves.
    assert periods == [20, 20, 15, 14, 7, 4, 2, 1, 1]


@given(st.integers(1, 200), losses)
def test_periods_by_loss_only_fall_and_stay_whole(first, given_losses):
    rule = AdaComm(first)
    state, periods = rule.init(), [first]
    for loss in given_losses:
        state = rule.update(state, loss)
        state = AdaCommState(**json.loads(json.dumps(state._asdict())))  # as checkpoints have it
        periods.append(state.period)
    assert periods == sorted(periods, reverse=True)
    assert all(isinstance(period, int) and period >= 1 for period in periods)
