"""What engines tell a process, and how processes that know their ranks find each other."""

import os
import subprocess
import sys

import pytest

from tests.lib.cluster_of_processes import run_all_well

LONG = 300.0  # seconds; reached only by a hang
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[03-04]"}
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


@pytest.mark.nightly
def test_the_line_follows_that_of_the_start():
    environ = {**os.environ, **BATCH_SCRIPT}
    environ.pop("TF_CONFIG", None)
    program = (
        "import tfpara; rule = tfpara.BSP(); tfpara.PeriodicSyncStrategy(rule, sync_period=2); "
        "tfpara.simulate(1, rule, sync_period=2)"  # one process, whatever the environment says
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LONG)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("tfpara: ")]
    assert [line[:30] for line in lines] == [
        "tfpara: 1 worker, 1 replica; BSP"[:30],
        "tfpara: SLURM_NTASKS=4, but srun"[:30],
        "tfpara: 1 worker, 1 replica; BSP"[:30],
    ]


def test_workers_that_know_their_ranks_train_together():
    options = {"others": True, "numpy": True}
    chief, worker = run_all_well("faults.py", [options] * 2, start="rank")
    assert "trained" in chief.output and "trained" in worker.output
    assert "tfpara: 2 workers, 2 replicas" in chief.output
    assert (
        chief.output.count("tfpara: by hand: rank 0 of 2, from TFPARA_RANK and TFPARA_SIZE; all")
        == 1
    )
