"""Runs whose checkpoints are in a store of objects, on a server of S3's protocol.

Each is killed, started again, and compared with a run that was left alone, bit for bit.
"""

import signal

import pytest

from tests.lib import elastic_runs
from tests.lib.lobby_processes import Processes
from tests.lib.resumable_runs import DEADLINE, RemoteRun, assert_same
from tfpara.remote_files import RemoteFolder

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


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "every_syncs", "kills"),
    [
        pytest.param(1, 1, OF_ONE_PROCESS, id="one process"),
        pytest.param(2, 2, OF_TWO_WORKERS, id="two workers"),
    ],
)
def test_killed_again_and_again(tmp_path, bucket, uninterrupted, workers, every_syncs, kills):
    run = RemoteRun(tmp_path / "run", workers, f"{bucket}/some/run", every_syncs=every_syncs)
    seen = run.kill_again_and_again(kills)
    assert seen >= 2  # it made progress between them
    assert_same(run.to_the_end(), uninterrupted(workers))
    folders = {name.split("/")[0] for name in run.names()}
    assert len(folders) == len(run.checkpoints()) == 2, run.names()
    assert len(run.names()) == 2 * (1 + 2 * workers)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_bucket_that_is_not_there(tmp_path, bucket):
    run = RemoteRun(tmp_path / "run", 2, bucket)
    with run.start(directory=[f"{bucket}-of-nobody/run"] * 2) as workers:
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


@pytest.mark.nightly
def test_another_worker_of_an_elastic_run_takes_the_lease_over(tmp_path, bucket):
    """The chief is killed in a checkpoint. All are asked to end later, and others go on."""
    options = {"checkpoints": f"{bucket}/run", "epochs": 4, "step_seconds": 0.1, "every_syncs": 2}
    with elastic_runs.Run(tmp_path, 3, {0: ["checkpoint", 3, "SIGKILL"]}, **options) as run:
        run.wait_until(run.of_rank(1), "epoch", 1)
        for number in (1, 2):
            run.processes[run.of_rank(number)].terminate()
        codes, outputs = run.ends()
        assert sorted(codes) == [-signal.SIGKILL, 75, 75], outputs
        assert not any("may hold it" in output for output in outputs), outputs
        before, doubtful = run.synced(), run.left_open({codes.index(-signal.SIGKILL)})
    folder = RemoteFolder(f"{bucket}/run")
    assert "lock" not in folder.sizes()
    assert folder.read("generations.jsonl").count(b"\n") >= 2
    (tmp_path / "again").mkdir()
    with elastic_runs.Run(tmp_path / "again", 2, **{**options, "step_seconds": 0}) as again:
        codes, outputs = again.ends()
        assert codes == [0, 0], outputs
        after = again.synced()
    assert before and after
    for own in (1000 * epoch + number for epoch in range(4) for number in range(60)):
        count = before.get(own, 0) + after.get(own, 0)
        assert count in ({0, 1} if own in doubtful else {1}), own


@pytest.mark.nightly
def test_an_asynchronous_run_whose_chief_is_killed(tmp_path, bucket):
    """The weight counts the minibatches that are in the model."""

    def start():
        run = Processes(2, 1, 120.0, 60.0, "train_async.py", [f"{bucket}/run", "2", "40", "2"])
        run.start_all()
        return run

    with start() as run:
        run["chief"].wait_for("epoch 0")
        run["chief"].wait_for("minibatch 1")
        run["chief"].signal(signal.SIGKILL)
        run.ends("chief")
    with start() as run:
        code, output = run.ends()["chief"]
    assert code == 0, output
    assert "waits for at most 2 s to see whether that run still uses it" in output
    assert "Resuming from checkpoint 1: epoch 2." in output
    assert "weight 400" in output  # of two epochs of 200 minibatches
    folder = RemoteFolder(f"{bucket}/run")
    assert {name.split("/")[0] for name in folder.sizes()} == {
        "checkpoint-00000001",
        "checkpoint-00000002",
    }
