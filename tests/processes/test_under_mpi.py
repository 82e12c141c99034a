"""The loop of docs/engines/mpi.md under Open MPI and MPICH, where these are installed."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.lib.cluster_of_processes import HERE
from tests.lib.launched import default_signals
from tests.lib.resumable_runs import DEADLINE, Run, assert_same

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "engines" / "mpi.md"
LOOP = "until mpirun -n 4 python train.py; do [ $? -eq 75 ] || break; done"
# What the page's `python train.py` runs. The first start lasts until it is asked to end.
PROGRAM = """
import json, os, pathlib, runpy, sys
options = {options!r}
first = not pathlib.Path(options["directory"]).exists()
if first:
    options |= {{"step_seconds": 0.1, "marks": {marks!r}}}
options["seed"] = 1 if first else 2
sys.argv = [{program!r}, json.dumps(options)]
runpy.run_path({program!r}, run_name="__main__")
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def process_of(rank_variable, rank, folder):
    """The number of the process that works in a folder and has this rank."""
    wanted = f"{rank_variable}={rank}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            of_this = (process / "cwd").resolve() == folder
            if of_this and wanted in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
        except OSError:
            continue  # It has ended meanwhile.
    pytest.fail(f"no process has {wanted}")


@pytest.mark.parametrize(
    ("starter", "rank_variable"),
    [
        ("mpirun.openmpi --oversubscribe", "OMPI_COMM_WORLD_RANK"),
        ("mpiexec.hydra", "PMI_RANK"),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_the_loop_starts_again_what_was_asked_to_end(
    starter, rank_variable, tmp_path, uninterrupted
):
    if shutil.which(starter.split()[0]) is None:
        pytest.skip(f"{starter.split()[0]} is not installed (apt-get install openmpi-bin mpich)")
    assert LOOP in PAGE.read_text()
    run = Run(tmp_path / "run", 2)
    program = str(HERE / "programs" / "train_resumable.py")
    text = PROGRAM.format(options=run.options, marks=str(run.marks), program=program)
    (run.path / "train.py").write_text(text)
    loop = LOOP.replace("mpirun -n 4 python", f"{starter} -n 2 {sys.executable}")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    threads = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    started = subprocess.Popen(
        ["bash", "-c", f"{loop}; echo the loop has ended"],
        cwd=run.path,
        env=os.environ | as_root | threads,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    try:
        run.wait_for_steps([started])
        os.kill(process_of(rank_variable, 1, run.path), signal.SIGTERM)
        output = started.communicate(timeout=DEADLINE)[0]
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert output.count("checkpoint written, exit code 75") == 1, output
    assert output.count("Resuming from checkpoint") == 1, output
    assert output.count("trained") == 2 and "the loop has ended" in output, output
    assert_same(run.ends(), uninterrupted(2))
