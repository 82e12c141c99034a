"""The reports of replicas and what all workers decide from them, in NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfpara.cluster import failures
from tfpara.sync.one_sync.reports import NONFINITE, SAMPLES, Columns, decide, problem_of, report_of
from tfpara.sync.settings import NEVER

COLUMNS = Columns.of(parts=2, counts=1, rates=1)


def report(samples, steps, *, count=7, running=True, request=0.0, **changed):
    """A replica's row; what it trained since the last sync of each of two parts."""
    given = {
        "running": running,
        "signature": 5.0,
        "others": 6.0,
        "request": request,
        "mark": np.zeros(3),
        "taken": 9,
        "any_rates": False,
        "never": False,
    } | changed
    weights = given.pop("weights", [0.5, 1.0])
    rates = [given.pop("rate", 0.1)]
    return report_of(weights, np.array(samples), [count], rates, steps=np.array(steps), **given)


def test_the_decision_by_hand():
    """Two workers with two replicas each, of which the last has no data left; blocks of 8."""
    table = np.stack(
        [
            report([30.0, 0.0], [4.0, 0.0], count=7),
            report([10.0, 0.0], [4.0, 0.0], count=9, request=2.0),
            report([40.0, 0.0], [6.0, 0.0], count=8),
            report([0.0, 0.0], [0.0, 0.0], count=2, running=False),
        ]
    )
    alike = {"local": slice(2, 4), "first_replicas": [0, 2]}
    found = decide(table, COLUMNS, "", replicas=4, block=8.0, **alike)
    assert not found.is_last
    assert found.agreed.tolist() == [2.0, 3.0, 4.0]
    assert found.counts.tolist() == [9.0]
    assert found.trained.tolist() == [4.0, 6.0]
    assert found.committed.tolist() == [True, False]
    assert found.steps.tolist() == [6.0, 0.0]
    assert found.of_block.tolist() == [0.75, 0.0]
    assert found.portions[0].tolist() == [0.5, 0.0]
    assert found.divisor.tolist() == [1.0, 4.0]
    # The same replicas on workers of one and of three devices.
    unlike = {"local": slice(1, 4), "first_replicas": [0, 1]}
    found = decide(table, COLUMNS, "", replicas=4, block=8.0, **unlike)
    assert found.trained.tolist() == [4.0, 4.0]
    assert found.portions[0].tolist() == [0.125, 0.5, 0.0]
    table[2, NONFINITE] = 0.0
    assert problem_of(table, COLUMNS, ["w"], [0, 1]).startswith("replica 2 (worker 1) has NaN")
    assert problem_of(table, COLUMNS, ["w"], [0, 1, 2]).startswith("replica 2 (worker 2) has NaN")


@pytest.mark.parametrize(
    ("taken", "words"), [((9, 9), "replica 1 (worker 1) has other frozen weights"), ((9, 10), "")]
)
def test_what_is_not_trained_is_compared_after_the_same_minibatches(taken, words):
    """A callback may set it before every minibatch, and a worker may have more of these."""
    rows = [report([8.0, 8.0], [4.0, 4.0], taken=t, others=float(k)) for k, t in enumerate(taken)]
    problem = problem_of(np.stack(rows), COLUMNS, ["v", "w"], [0, 1])
    assert problem.startswith(words) and bool(problem) == bool(words)


def test_each_sentence_is_found_in_the_error_that_tensorflow_makes_of_it():
    for changed in (
        {"weights": [np.nan, 1.0]},
        {"signature": 4.0},
        {"others": 4.0},
        {"rate": 0.2},
        {"samples": [-8.0, 8.0]},
    ):
        rows = [
            report([8.0, 8.0], [4.0, 4.0]),
            report(**{"samples": [8.0, 8.0]} | changed, steps=[4.0, 4.0]),
        ]
        problem = problem_of(np.stack(rows), COLUMNS, ["v", "w"], [0, 1])
        assert problem, changed
        text = f"assertion failed: [{problem}]\n\t [[{{{{node cond/Assert}}}}]] [Op:__inference_1]"
        error = tf.errors.InvalidArgumentError(None, None, text)
        assert failures.explain(error).sentence == problem


def test_where_all_sample_weights_are_0_those_count_that_took_steps():
    """Of three replicas the second has had no data; the last row is of an idle one."""
    rows = [report([0.0, 8.0], [steps, 2.0]) for steps in (3.0, 0.0, 2.0, 3.0)]
    given = {"local": slice(0, 4), "first_replicas": [0], "replicas": 3}
    found = decide(np.stack(rows), COLUMNS, "", block=4.0, **given)
    assert found.committed.tolist() == [True, True]
    assert found.portions[0].tolist() == [0.5, 0.0, 0.5, 0.0]
    independent = decide(np.stack(rows), COLUMNS, "", block=float(NEVER), **given)
    assert independent.committed.tolist() == [False, True]


@pytest.mark.parametrize("block", [6.0, 3.0, float(2**62)])
def test_a_block_is_at_most_whole_and_a_problem_forbids_all(block):
    table = np.stack([report([8.0, 8.0], [6.0, 3.0], running=False)] * 2)
    given = {"local": slice(0, 2), "first_replicas": [0], "replicas": 2}
    found = decide(table, COLUMNS, "NaN", block=block, **given)
    assert found.of_block.tolist() == [min(1.0, 6 / block), min(1.0, 3 / block)]
    assert found.is_last and not found.committed.any()
    assert found.divisor.tolist() == [2.0, 2.0]


@given(
    st.lists(st.lists(st.integers(0, 512), min_size=2, max_size=2), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_shares_of_all_workers_add_up_to_one(samples, workers):
    """And they are as the samples are, on whichever worker a replica is."""
    counted = [[float(n) for n in each] for each in samples]
    rows = [report(each, [min(n, 1.0) for n in each]) for each in counted] * workers
    table, own = np.stack(rows), len(samples)
    given = {"first_replicas": range(0, len(rows), own), "replicas": 9, "block": 1.0}
    found = [
        decide(table, COLUMNS, "", local=slice(w * own, (w + 1) * own), **given)
        for w in range(workers)
    ]
    portions = np.concatenate([each.portions for each in found], 1)
    for part in range(2):
        counts = np.array([each[part] for each in samples] * workers)
        assert all(each.committed[part] == (counts.sum() > 0) for each in found)
        if counts.any():
            np.testing.assert_allclose(portions[part] * counts.sum(), counts, rtol=1e-12)
            assert found[0].divisor[part] == (9.0 if len(set(counts)) == 1 else 1.0)


def test_a_replica_that_trained_nothing_reports_no_rate_and_independent_ones_no_samples():
    row = report([4.0, 2.0], [1.0, 1.0])
    assert row[COLUMNS.rates] == [0.1] and row[COLUMNS.samples].tolist() == [4.0, 2.0]
    assert np.isnan(report([0.0, 0.0], [0.0, 0.0], any_rates=True)[COLUMNS.rates])
    never = report([4.0, 2.0], [1.0, 1.0], never=True)
    assert np.isnan(never[COLUMNS.rates]) and not never[COLUMNS.samples].any()
    assert never[COLUMNS.taken] == [9.0] and never[COLUMNS.others] == [6.0]
    assert never[COLUMNS.counts] == [7.0]
    assert len(row) == COLUMNS.width == SAMPLES + 2 + 2 + 1 + 1 + 1 + 1 + 1


@pytest.mark.parametrize(
    ("weights", "first"),
    [([1.0, 2.0], -1), ([1.0, np.nan], 1), ([np.inf, np.nan], 0), ([-np.inf, 0.0], 0)],
)
def test_the_first_weight_that_is_not_finite_is_reported(weights, first):
    assert report([1.0, 1.0], [1.0, 1.0], weights=weights)[1] == first
