"""Twelve and more workers: TensorFlow orders them by the text of their names, 10 before 2.

Each minibatch is counted in the weights; see `counting`.
"""

import signal

import numpy as np
import pytest

from tests.lib import counting, elastic_runs
from tests.lib.cluster_of_processes import run, run_all_well

pytestmark = pytest.mark.latest

MINIBATCHES, PERIOD = 125, 2
SHARDED = {"aggregation": "sharded"}


def of_worker(path, of_strategy, uneven, **options):
    """The options of programs/count_minibatches.py."""
    return {
        "minibatches": MINIBATCHES,
        "period": PERIOD,
        "uneven": uneven,
        "options": of_strategy,
        "out": str(path / "{rank}.npz"),
        **options,
    }


def check(path, workers, uneven, epochs=1):
    """Checks that each minibatch is in every worker's weights once."""
    expected = np.tile(counting.shares(MINIBATCHES, workers, PERIOD, uneven), epochs)
    for rank in range(workers):
        found = np.load(path / f"{rank}.npz")
        for which in ("global", "local"):
            np.testing.assert_allclose(found[which], expected, rtol=1e-5)


@pytest.mark.nightly_cases("13*", "replicated,*", "3")
@pytest.mark.parametrize(
    ("workers", "of_strategy", "uneven"),
    [
        pytest.param(12, SHARDED, True, id="sharded, 12", marks=pytest.mark.one_version),
        pytest.param(3, {}, True, id="3"),
        pytest.param(12, {"aggregation": "replicated"}, True, id="replicated, 12"),
        pytest.param(13, {}, False, id="13"),
    ],
)
def test_every_minibatch_counts_once(workers, of_strategy, uneven, tmp_path):
    run_all_well("count_minibatches.py", [of_worker(tmp_path, of_strategy, uneven)] * workers)
    check(tmp_path, workers, uneven)


@pytest.mark.nightly
def test_every_minibatch_counts_once_in_a_run_that_is_resumed(tmp_path):
    options = of_worker(tmp_path, SHARDED, True, epochs=2, checkpoints=str(tmp_path / "run"))
    killed = dict.fromkeys(range(12), 3)
    ends = run("count_minibatches.py", [{**options, "killed": killed}] * 12)
    assert all(end.returncode for end in ends)
    run_all_well("count_minibatches.py", [options] * 12)
    check(tmp_path, 12, True, epochs=2)


@pytest.mark.nightly
def test_every_minibatch_counts_once_where_members_change(tmp_path):
    """Six workers, of tasks 8 to 13, and the first is killed.

    With a sync after each minibatch, one of M workers adds 1/M to a weight.
    """
    options = of_worker(tmp_path, {}, False, period=1, killed={"0": 4})
    options["elastic"] = {"min_workers": 1, "grace_seconds": 5.0}
    with elastic_runs.Run(
        tmp_path, 6, before=8, program="count_minibatches.py", **options
    ) as elastic:
        codes, outputs = elastic.ends()
        assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0, 0, 0], outputs
        members = [each.members for each in elastic.meeting.state.history]
        assert members == [(8, 9, 10, 11, 12, 13), (9, 10, 11, 12, 13)]
    for rank in range(1, 6):
        found = np.load(tmp_path / f"{rank}.npz")
        assert found["global"].min() > 0.0, "lost"
        one_of = 1.0 / found["global"]
        np.testing.assert_allclose(one_of, one_of.round(), rtol=1e-5)
        assert one_of.max() < 6.5
        assert found["global"].sum() == pytest.approx(found["syncs"], rel=1e-5)
