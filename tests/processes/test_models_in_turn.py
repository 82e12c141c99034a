"""Several models that one script trains in turn, on two workers."""

import numpy as np
import pytest

from tests.lib.cluster_of_processes import run_all_well


@pytest.mark.nightly
def test_models_that_all_workers_have_deleted_are_dropped(tmp_path):
    """Python collects a model on one worker before it does on the other."""
    outs = [tmp_path / f"{rank}.npz" for rank in range(2)]
    options = [
        {"keeps": rank == 1, "out": str(out), "sync_period": 3} for rank, out in enumerate(outs)
    ]
    run_all_well("models_in_turn.py", options)
    found = [dict(np.load(out)) for out in outs]
    for worker in found:
        # Worker 1 still has three models when the third begins, and none but that after it.
        np.testing.assert_array_equal(worker["counts"], [1, 2, 3, 1, 1, 1])
        assert worker["steps"] == 6 * 2 * 13
        for name, value in worker.items():
            np.testing.assert_array_equal(value, found[0][name], err_msg=name)
        assert worker["loss/5"][-1] < worker["loss/0"][0]
