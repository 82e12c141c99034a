"""The batch script of docs/engines/slurm.md under Slurm itself, where that is installed."""

import os
import pathlib
import sys
import textwrap

import pytest
import slurm_here
from cluster_of_processes import HERE
from resumable_runs import Run, assert_same

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "engines" / "slurm.md"
# What the page's `python train.py` runs. The first two starts last until Slurm ends them.
PROGRAM = """
import json, os, runpy, sys
start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
options = {options!r}
if start < 2:
    options |= {{"step_seconds": 2.0, "marks": options["out"] + f".marks-{{start}}"}}
options["seed"] = 1 + start
sys.argv = [{program!r}, json.dumps(options)]
runpy.run_path({program!r}, run_name="__main__")
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm_here.missing()), reason=slurm_here.missing()),
]


def batch_script(number):
    """The page's batch script of this number, as it stands there."""
    _, _, text = PAGE.read_text().partition("## Batch scripts")
    scripts = [part for part in text.split("\n\n") if part.startswith("    #!/bin/bash")]
    return textwrap.dedent(scripts[number]) + "\n"


def test_a_batch_script_is_queued_again_at_the_time_limit_and_on_preemption(
    tmp_path, uninterrupted
):
    run = Run(tmp_path / "run", 2)
    program = str(HERE / "programs" / "train_resumable.py")
    (run.path / "train.py").write_text(PROGRAM.format(options=run.options, program=program))
    (run.path / "job.sh").write_text(batch_script(0))
    log = run.path / "log"
    # Options of the command line go before those of the script.
    small = ["--nodes=2", "--cpus-per-task=1", "--time=2", "--signal=TERM@60", f"--output={log}"]
    path = f"PATH={pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    with slurm_here.Slurm(tmp_path / "slurm") as slurm:
        submitted = slurm.tell(
            "sbatch",
            "--parsable",
            f"--export=ALL,{path}",
            f"--chdir={run.path}",
            *small,
            str(run.path / "job.sh"),
        )
        assert submitted.isdecimal(), submitted
        slurm.start_again(submitted, log, restarts=1)
        marks = pathlib.Path(run.options["out"] + ".marks-1")
        slurm.wait_for("a step of the second start", marks.exists)
        assert slurm.tell("scontrol", "requeue", submitted) == ""  # as preemption does
        slurm.start_again(submitted, log, restarts=2)
        slurm.wait_until(submitted, log, JobState="COMPLETED")
    text = log.read_text()
    assert text.count("checkpoint written, exit code 75") == 2, text
    assert text.count("Resuming from checkpoint") == 2
    assert "Slurm: rank 0 of 2, from SLURM_PROCID and SLURM_STEP_NUM_TASKS" in text
    assert_same(run.ends(), uninterrupted(2))
