"""Blocks by speed: a slow worker trains less, and every minibatch counts once."""

import itertools
import signal

import numpy as np
import pytest

from tests.lib import elastic_runs
from tests.lib.cluster_of_processes import run, run_all_well

KILLED = -signal.SIGKILL

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

    With several minibatches of a call, a block ends within a call, and the call with it.
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
    for each in [] if killed else found:  # batches are numbered by what was trained in the epoch
        begun, ended = each["calls"].T.tolist()
        following = list(zip(ended, [*begun[1:], 0], strict=True))
        assert all(first in (0, last + 1) for last, first in following)
        assert sum(last + 1 for last, first in following if first == 0) == int(each["steps"])
    fast, slow, other = np.mean(record[-6:], 0)
    assert fast + slow + other == 3 * PERIOD
    assert slow < min(fast, other)  # by how much is for benchmarks: other work delays all of them
    if execution > 1:  # the record, replayed by simulated workers, gives the same weights
        again = {**options, "pauses": [0.0] * 3, "options": {"balance": record}, "execution": 1}
        again |= {"simulated": 3, "out": str(tmp_path / "again.npz")}
        run_all_well("count_minibatches.py", [again])
        replayed = np.load(tmp_path / "again.npz")
        assert replayed["record"].tolist() == record
        np.testing.assert_allclose(replayed["global"], found[0]["global"], rtol=1e-5)


@pytest.mark.nightly
def test_a_simulation_replays_a_record(tmp_path):
    """Adam, whose β₁ is fitted to each worker's block, a rate that falls, and unlike minibatches.

    The record ends before the data; then all shares are τ.
    """
    record = [[3, 1, 2], [1, 4, 1], [2, 2, 2], [1, 1, 4], [4, 1, 1]]
    options = {
        "minibatches": 25,
        "epochs": 2,
        "period": 2,
        "uneven": True,
        "adam": True,
        "options": {"balance": record},
        "out": str(tmp_path / "{rank}.npz"),
    }
    run_all_well("count_minibatches.py", [options] * 3)
    simulated = {**options, "simulated": 3, "out": str(tmp_path / "simulated.npz")}
    run_all_well("count_minibatches.py", [simulated])
    found, again = np.load(tmp_path / "0.npz"), np.load(tmp_path / "simulated.npz")
    assert again["record"].tolist() == found["record"].tolist()
    assert found["record"].tolist()[: len(record)] == record
    assert np.ptp(found["global"]) > 0.1
    np.testing.assert_allclose(again["global"], found["global"], rtol=1e-5, atol=1e-6)


def steps_of(run, number):
    """The steps that a worker took before each of its syncs, in order."""
    steps, found = 0, []
    for event in run.events(number):
        steps += event[0] == "trained"
        if event[0] in ("synced", "dropped"):
            found, steps = [*found, *([steps] * (event[0] == "synced"))], 0
    return found


PACES = {"0": 0.01, "1": 0.05, "2": 0.01, "joins": 0.01}
OPTIONS = {"balance": True, "paces": PACES, "minibatches": 120}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "times", "rank"),
    [("step", 14, 0), ("weights", 4, 1), ("commit", 4, 2), ("written", 4, 0)],
)
def test_a_worker_is_lost_and_each_minibatch_counts_once(place, times, rank, tmp_path):
    """One of three, of which the second is slow; then the others train its minibatches as well."""
    options = {**OPTIONS, "adam": True, "rule": "tfpara.BMUF()"}
    with elastic_runs.Run(tmp_path, 3, {rank: [place, times, "SIGKILL"]}, **options) as run:
        ranks = [run.of_rank(each) for each in range(3)]
        assert len(run.check([KILLED], minibatches=120)) == 2
        steps = [steps_of(run, number) for number in ranks]
    if rank != 1:  # the slow one is left
        fast, slow = steps[2 - rank], steps[1]
        assert sum(slow) < 0.7 * sum(fast), (slow, fast)
        # After the change, too: the last blocks of an epoch may be short.
        assert np.mean(slow[-8:]) < np.mean(fast[-8:]), (slow, fast)


@pytest.mark.nightly
@pytest.mark.parametrize("execution", [1, 4])
def test_a_worker_joins_where_blocks_are_by_speed(execution, tmp_path):
    """It counts as the slowest at first, and later takes more."""
    options = {**OPTIONS, "epochs": 4, "steps_per_execution": execution}
    options["holds"] = {"1": "len(tasks) > 2 or comes"}
    with elastic_runs.Run(tmp_path, 2, **options) as run:
        number = run.start()
        assert len(run.check([], epochs=4, minibatches=120)) == 3
        joiner, slow = steps_of(run, number), steps_of(run, run.of_rank(1))
    assert len(joiner) > 10, "it came too late"
    if execution == 1:  # else a pause is of a call, and so longer for a minibatch of a short block
        assert joiner[0] <= max(slow[-len(joiner)], 3)
        assert np.mean(joiner[5:]) > np.mean(slow[-len(joiner) + 5 :]), (joiner, slow)


@pytest.mark.nightly
def test_all_are_asked_to_end_and_others_go_on_where_blocks_are_by_speed(tmp_path):
    """Two go on from the checkpoint of three, within an epoch."""
    options = {**OPTIONS, "checkpoints": str(tmp_path / "run")}
    with elastic_runs.Run(tmp_path, 3, **options) as run:
        run.wait_until(run.of_rank(0), "synced", count=4)
        before = run.stop()
    assert 0 < len(before) < 120
    (tmp_path / "again").mkdir()
    with elastic_runs.Run(tmp_path / "again", 2, **options) as again:
        codes, outputs = again.ends()
        assert codes == [0, 0], outputs
        after = again.synced()
    for own in itertools.chain(range(120), range(1000, 1120)):
        assert before.get(own, 0) + after.get(own, 0) == 1, own
