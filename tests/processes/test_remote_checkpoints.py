"""Runs whose checkpoints are in a store of objects, on a server of S3's protocol.

Each is killed, started again, and compared with a run that was left alone, bit for bit.
"""

import random

import pytest

from tests.lib.resumable_runs import DEADLINE, RemoteRun, assert_same

pytestmark = pytest.mark.timeout(900)
# As in tests/nightly/test_kill.py. "lease": when the directory has been locked.
OF_ONE_PROCESS = [
    ("step", 3, [0]),
    ("part", 2, [0]),
    ("manifest", 1, [0]),
    ("removing", 1, [0]),
]
OF_TWO_WORKERS = [
    ("sync", 2, [0]),
    ("lease", 1, [0]),
    ("begin", 2, [0]),
    ("part", 2, [1]),
    ("written", 2, [1]),
    ("renamed", 2, [0]),
    ("restored", 1, [1]),
    ("removed", 1, [0]),
    (None, 0.3, [0, 1]),
]


@pytest.mark.long
@pytest.mark.nightly_cases("two workers")
@pytest.mark.parametrize(
    ("workers", "every_syncs", "kills"),
    [
        pytest.param(1, 1, OF_ONE_PROCESS, id="one process"),
        pytest.param(2, 2, OF_TWO_WORKERS, id="two workers"),
    ],
)
def test_killed_again_and_again(tmp_path, bucket, uninterrupted, workers, every_syncs, kills):
    run = RemoteRun(tmp_path / "run", workers, f"{bucket}/some/run", every_syncs=every_syncs)
    first, *others = kills
    random.Random(7).shuffle(others)
    seen = 0
    for kill in (first, *others):
        run.kill_at(*kill)
        newest = max(run.checkpoints(), default=0)
        assert newest >= seen, kill
        seen = newest
    assert seen >= 2  # it made progress between them
    assert_same(run.to_the_end(), uninterrupted(workers))
    folders = {name.split("/")[0] for name in run.names()}
    assert len(folders) == len(run.checkpoints()) == 2, run.names()
    assert len(run.names()) == 2 * (1 + 2 * workers)


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path, bucket, uninterrupted):
    run = RemoteRun(tmp_path / "run", 2, f"{bucket}/run")
    other = RemoteRun(tmp_path / "other", 1, f"{bucket}/run")
    with run.start_slowly() as workers:
        run.wait_for_steps(workers.processes)
        with other.start() as others:
            (refused,) = others.results(DEADLINE)
        for result in workers.results(DEADLINE):
            assert result.returncode == 0, result.output
    assert refused.returncode not in (0, 75)
    assert f"checkpoint directory {bucket}/run is in use by another run (pro" in refused.output
    assert "Traceback" not in refused.output.split("CheckpointError")[-1]
    assert_same(run.ends(), uninterrupted(2))


def test_a_bucket_that_is_not_there(tmp_path, bucket):
    run = RemoteRun(tmp_path / "run", 2, f"{bucket}-of-nobody/run")
    with run.start() as workers:
        results = workers.results(DEADLINE)
    for result in results:
        assert result.returncode not in (0, 75), result.output
        assert f"{bucket}-of-nobody/run cannot be written to" in result.output
        assert "make the bucket first" in result.output


def test_memory_that_each_worker_has_for_itself_is_refused(tmp_path):
    run = RemoteRun(tmp_path / "run", 2, "memory://run")
    with run.start() as workers:
        results = workers.results(DEADLINE)
    for result in results:
        assert result.returncode not in (0, 75), result.output
        assert "must be one directory that all workers share" in result.output
