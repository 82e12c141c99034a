"""Checkpoint directories that do not serve: every worker says why, and exits with an error."""

import fcntl
import socket

import pytest

from tests.lib.resumable_runs import DEADLINE, Run, assert_same

HOST = socket.gethostname()
pytestmark = pytest.mark.timeout(900)


def check_refused(run, *words, **of_a_worker):
    """Starts a run, which must fail on all workers with these words."""
    with run.start(**of_a_worker) as workers:
        results = workers.results(DEADLINE)
    for result in results:
        assert result.returncode not in (0, 75), result.output
        assert "trained" not in result.output
        missing = [word for word in ("CheckpointError", *words) if word not in result.output]
        assert missing == [], result.output


def test_a_directory_that_is_not_shared(tmp_path):
    run = Run(tmp_path / "run", 2)
    check_refused(
        run,
        "worker 1: ",
        f", which the chief has made, is not there on {HOST}: ",
        "must be one directory that all workers share",
        directory=[str(tmp_path / "a"), str(tmp_path / "b")],
    )
    assert not list(tmp_path.glob("[ab]/*checkpoint*")) + list(tmp_path.glob("[ab]/.partial*"))


@pytest.mark.nightly
def test_a_directory_of_which_only_the_chief_has_the_checkpoints(tmp_path):
    run = Run(tmp_path / "run", 2, every_syncs=None)
    run.kill_at("sync", 2, [0])
    directories = [str(tmp_path / "run" / "checkpoints"), str(tmp_path / "b")]
    check_refused(
        run,
        "that all workers share: "
        f"the chief on {HOST} and worker 1 on {HOST} see different checkpoints in it, [1] and [].",
        directory=directories,
    )
    assert run.checkpoints() == [1]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["file", "unwritable"])
def test_a_directory_that_cannot_be_written_to(tmp_path, kind):
    path = tmp_path / "file"
    path.touch()
    directory = str(path) if kind == "file" else "/proc/checkpoints"
    run = Run(tmp_path / "run", 2, directory=directory)
    check_refused(run, f"checkpoint directory {directory} cannot be written to (")


def test_a_directory_that_another_run_uses(tmp_path):
    run = Run(tmp_path / "run", 2)
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir()
    with (directory / "lock").open("w") as lock:
        lock.write("process 7 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_refused(run, "in use by another run (process 7 on elsewhere)")


@pytest.mark.nightly
def test_a_full_disk_of_one_worker_and_a_damaged_checkpoint(tmp_path, uninterrupted):
    run = Run(tmp_path / "run", 2)
    run.kill_at("removing", 2, [0])
    before = run.checkpoints()
    assert len(before) == 2
    # No file of worker 1 may grow longer: its part does not fit.
    check_refused(run, "worker 1: cannot write ", limit_bytes=[0, 1000])
    assert run.checkpoints() == before
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial*"))
    part = run.newest() / "part-00001.data-00000-of-00001"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with run.start() as workers:
        for result in workers.results(DEADLINE):
            assert result.returncode == 0, result.output
            assert f"{part} is damaged" in result.output
    assert_same(run.ends(), uninterrupted(2))
