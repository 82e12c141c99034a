"""Blocks by speed: a slow worker trains less, and every minibatch counts once."""

import numpy as np
import pytest

from tests.lib.cluster_of_processes import run, run_all_well

MINIBATCHES, PERIOD = 125, 5


def expected(record, epochs):
    """The weights under BSP: n_i / Σ n_j for a minibatch of worker i, by the shares of blocks."""
    weights, first, epoch = np.zeros((epochs, MINIBATCHES)), 0, 0
    for shares in record:
        places = sorted((c / n, i) for i, n in enumerate(shares) for c in range(n))
        owners = np.array([i for _, i in places])[: MINIBATCHES - first]
        counts = np.bincount(owners, minlength=len(shares))
        weights[epoch, first : first + len(owners)] = counts[owners] / len(owners)
        first += len(owners)
        if first == MINIBATCHES:
            first, epoch = 0, epoch + 1
    assert epoch == epochs  # the record has all blocks
    return weights.ravel()


@pytest.mark.nightly_cases("False-1", "True-1")
@pytest.mark.parametrize(("killed", "execution"), [(False, 1), (True, 1), (False, 4)])
def test_every_minibatch_counts_once(killed, execution, tmp_path):
    """Three workers, of which one pauses three times as long; killed in the second epoch.

    With several minibatches of a call, a block ends within a call.
    """
    options = {
        "minibatches": MINIBATCHES,
        "epochs": 2,
        "period": PERIOD,
        "options": {"balance": True},
        "execution": execution,
        "pauses": [0.01, 0.03, 0.01],
        "out": str(tmp_path / "{rank}.npz"),
    }
    if killed:
        options["checkpoints"] = str(tmp_path / "run")
        run("count_minibatches.py", [{**options, "killed": dict.fromkeys(range(3), 12)}] * 3)
    run_all_well("count_minibatches.py", [options] * 3)
    found = [np.load(tmp_path / f"{rank}.npz") for rank in range(3)]
    record = found[0]["record"].tolist()
    for each in found:
        assert each["record"].tolist() == record
        np.testing.assert_array_equal(each["global"], found[0]["global"])
        assert each["global"].min() > 0.0  # each once at least
        if not killed:
            np.testing.assert_allclose(each["global"], expected(record, 2), rtol=1e-5)
    assert sum(int(each["steps"]) for each in found) == 2 * MINIBATCHES  # and once at most
    fast, slow, other = np.mean(record[-6:], 0)
    assert fast + slow + other == 3 * PERIOD
    assert slow < min(fast, other)  # by how much is for benchmarks: other work delays all of them
    if execution > 1:  # the record, replayed by workers of equal speed, gives the same weights
        again = {**options, "pauses": [0.0] * 3, "out": str(tmp_path / "again_{rank}.npz")}
        run_all_well("count_minibatches.py", [{**again, "options": {"balance": record}}] * 3)
        replayed = np.load(tmp_path / "again_0.npz")
        assert replayed["record"].tolist() == record
        np.testing.assert_array_equal(replayed["global"], found[0]["global"])
