"""A second strategy in the processes of a cluster, which several trainings of one script need."""

import numpy as np
import pytest

from tests.lib.cluster_of_processes import run_all_well

pytestmark = pytest.mark.latest


@pytest.mark.nightly
@pytest.mark.parametrize("late", [0, 1])
def test_a_second_strategy_waits_for_a_worker_that_is_late(tmp_path, late):
    """Both train as if there was no other, also where the first goes on after the second began."""
    outs = [tmp_path / f"{rank}.npz" for rank in range(2)]
    run_all_well(
        "two_strategies.py",
        [{"late": rank == late, "out": str(out)} for rank, out in enumerate(outs)],
    )
    found = [dict(np.load(out)) for out in outs]
    assert np.ptp(found[0]["first"]) > 0.1
    for worker in found:
        np.testing.assert_array_equal(worker["first"], worker["second"])
        assert worker["mae/1"] < worker["mae/0"]
    np.testing.assert_array_equal(found[0]["first"], found[1]["first"])
    assert found[0]["mae/0"] == found[1]["mae/0"]
