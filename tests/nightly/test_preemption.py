"""Runs under the launcher that are asked to end by SIGTERM or killed, and go on."""

import subprocess

import pytest

from tests.lib.launched import default_signals
from tests.lib.resumable_runs import DEADLINE, Run, assert_same

pytestmark = pytest.mark.timeout(900)


def launch(command):
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=default_signals,
    )


def test_sigterm_to_the_launcher_reaches_all_and_nothing_is_restarted(tmp_path, uninterrupted):
    run = Run(tmp_path / "run", 2)
    command = run.launch_command(
        "--max_restarts=3", "--grace=200", marks=str(run.marks), step_seconds=0.1
    )
    launcher = launch(command)
    try:
        run.wait_for_steps([launcher])
        launcher.terminate()
        output = launcher.communicate(timeout=DEADLINE)[0]
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 75, output
    assert "got SIGTERM" in output and "failed first: exit code 75" in output
    assert "restart " not in output
    assert_same(run.to_the_end(), uninterrupted(2))


def test_the_launcher_starts_a_killed_run_again(tmp_path, uninterrupted):
    run = Run(tmp_path / "run", 2)
    once = [1, str(tmp_path / "killed")]
    logs = tmp_path / "logs"
    command = run.launch_command(
        "--max_restarts=1", f"--log_dir={logs}", kill=["part", 4], kill_once=once
    )
    launcher = launch(command)
    try:
        output = launcher.communicate(timeout=2 * DEADLINE)[0]
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 0, output
    assert "restart 1 of 1: worker 1 failed first: killed by SIGKILL" in output
    assert "killed: part" in (logs / "worker-1.log").read_text()
    assert "Resuming from checkpoint 3" in (logs / "chief.log").read_text()
    assert_same(run.ends(), uninterrupted(2))
