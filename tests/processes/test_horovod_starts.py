"""The ways in which workers on Horovod are started."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.lib import resumable_runs
from tests.lib.cluster_of_processes import HERE, free_ports, run_all_well
from tests.lib.horovod_here import needs_horovod

pytestmark = needs_horovod

DEADLINE = 500.0  # seconds; reached only by a hang


def words(arguments):
    """Runs a command; returns its exit code and output."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        arguments,
        env=os.environ | as_root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    return done.returncode, done.stdout


PROGRAM = [sys.executable, str(HERE / "programs" / "faults.py"), "{}"]
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "-np", "2"]
LAUNCH = [sys.executable, "-m", "tfpara.launch", "-n", "2", "--collectives=horovod"]


def has_mpi():
    import horovod.tensorflow

    return horovod.tensorflow.mpi_built()


@pytest.mark.nightly
@pytest.mark.parametrize("starter", [HOROVODRUN, LAUNCH], ids=["horovodrun", "tfpara-launch"])
def test_starters(starter):
    code, output = words([*starter, *PROGRAM])
    assert code == 0, output
    assert output.count("trained") == 2
    assert output.count("tfpara: collectives=horovod: ") == 1


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun():
    code, output = words(["mpirun", "--oversubscribe", "-np", "2", *PROGRAM])
    if has_mpi():
        assert code == 0, output
        assert output.count("trained") == 2
    else:  # then on TensorFlow's collectives
        assert code == 0, output
        assert output.count("trained") == 2
        assert "collectives=tensorflow: Horovod was built without MPI" in output
        assert "scripts/install_horovod.sh --mpi --venv=" in output


@pytest.mark.nightly
def test_a_cluster_of_tf_config_on_horovod():
    for result in run_all_well("faults.py", [{"collectives": "horovod"}] * 2):
        assert "trained" in result.output


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_launcher_restarts_and_the_run_goes_on(tmp_path, uninterrupted):
    resumed = resumable_runs.Run(tmp_path / "run", 2, every_syncs=2)
    once = [1, str(tmp_path / "killed")]
    (port,) = free_ports(1)  # which the first start's store must have left
    options = ["--collectives=horovod", "--max_restarts=1", f"--port={port}"]
    code, output = words(resumed.launch_command(*options, kill=["sync", 4], kill_once=once))
    assert code == 0, output
    assert "restart 1 of 1" in output and resumed.checkpoints()
    # What TensorFlow's collectives end with: two numbers have one sum.
    resumable_runs.assert_same(resumed.ends(), uninterrupted(2))
