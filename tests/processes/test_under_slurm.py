"""The batch scripts of docs/engines/slurm.md under Slurm itself, where that is installed."""

import os
import pathlib
import sys
import textwrap

import pytest

from tests.lib import slurm_here
from tests.lib.cluster_of_processes import HERE
from tests.lib.resumable_runs import Run, assert_same

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "engines" / "slurm.md"
# What the page's `python train.py` runs. The first starts last until Slurm ends them.
PROGRAM = """
import json, os, runpy, sys
start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
options = {options!r}
if start < {slow}:
    options |= {{"step_seconds": 2.0 + 3.0 * start, "marks": options["out"] + f".marks-{{start}}"}}
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
    scripts = [
        part for part in PAGE.read_text().split("\n\n") if part.startswith("    #!/bin/bash")
    ]
    return textwrap.dedent(scripts[number]) + "\n"


class Job:
    """A job of one of the page's batch scripts, in a directory of its own.

    Args:
        slurm: the running Slurm.
        path: the directory, which is made.
        number: the script, from 0 in their order on the page.
        slow: how many of its starts last until they are asked to end.
        options: of sbatch; they go before those of the script.
    """

    def __init__(self, slurm, path, number, slow, *options):
        self.slurm, self.run, self.restarts = slurm, Run(path, 2), 0
        program = str(HERE / "programs" / "train_resumable.py")
        text = PROGRAM.format(options=self.run.options, program=program, slow=slow)
        (path / "train.py").write_text(text)
        (path / "job.sh").write_text(batch_script(number).replace("-n 4", "-n 2"))
        launch = path / "tfpara-launch"  # as installed
        launch.write_text(f'#!/bin/bash\nexec {sys.executable} -m tfpara.launch "$@"\n')
        launch.chmod(0o755)
        self.log = path / "log"
        search = f"PATH={path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        where = [f"--export=ALL,{search}", f"--chdir={path}", f"--output={self.log}"]
        self.id = slurm.tell("sbatch", "--parsable", *where, *options, str(path / "job.sh"))
        assert self.id.isdecimal(), self.id

    def wait_for_steps(self):
        """Waits for a step of this start."""
        marks = pathlib.Path(self.run.options["out"] + f".marks-{self.restarts}")
        self.slurm.wait_for(f"a step of start {self.restarts}", marks.exists)

    def start_again(self):
        """Waits until the job is queued again, and runs again."""
        self.restarts += 1
        self.slurm.start_again(self.id, self.log, self.restarts)

    def assert_completes(self, expected):
        """Waits for the end, which has to be that of a run that was left alone."""
        self.slurm.wait_until(self.id, self.log, JobState="COMPLETED")
        text = self.log.read_text()
        assert text.count("checkpoint written, exit code 75") == self.restarts, text
        assert text.count("Resuming from checkpoint") == self.restarts, text
        assert_same(self.run.ends(), expected)


def test_batch_scripts_are_queued_again_at_the_time_limit_and_on_preemption(
    tmp_path, uninterrupted
):
    small = ["--nodes=2", "--cpus-per-task=1", "--time=2", "--signal=TERM@60"]
    with slurm_here.Slurm(tmp_path / "slurm") as slurm:
        tasks = Job(slurm, tmp_path / "tasks", 0, 2, *small)
        tasks.start_again()  # asked to end by --signal
        slurm.tell("scontrol", "update", f"JobId={tasks.id}", "TimeLimit=20")
        launcher = Job(slurm, tmp_path / "launcher", 1, 1, "--time=20")
        in_shell = Job(slurm, tmp_path / "shell", 2, 1, "--time=20")
        jobs = [tasks, launcher, in_shell]
        for job in jobs:
            job.wait_for_steps()
        # What --signal=B:TERM does.
        assert slurm.tell("scancel", "--batch", "--signal=TERM", in_shell.id) == ""
        slurm.wait_until(in_shell.id, in_shell.log, Restarts="1", JobState="PENDING")
        urgent = slurm.tell(
            "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive",
            f"--output={tmp_path / 'urgent'}", "--wrap=date",
        )  # fmt: skip
        slurm.wait_until(urgent, tmp_path / "urgent", JobState="COMPLETED")
        for job in jobs:
            job.start_again()
        for job in jobs:
            job.assert_completes(uninterrupted(2))
    assert "Slurm: rank 0 of 2, from SLURM_PROCID and SLURM_STEP_" in tasks.log.read_text()
