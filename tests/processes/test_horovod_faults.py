"""Faults under Horovod end as they do on TensorFlow's collectives."""

import os
import signal

import pytest

from tests.lib.cluster_of_processes import Workers, run
from tests.lib.horovod_here import needs_horovod

pytestmark = needs_horovod


@pytest.mark.nightly_cases("leave")
@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_a_dead_peer_is_named(fault):
    survivor, gone = run("faults.py", [{}, {"fault": fault}], start="horovod")
    assert gone.returncode == (-signal.SIGKILL if fault == "kill" else 0)
    assert survivor.returncode == 1
    assert "trained" not in survivor.output
    assert "a sync failed because worker 1 (127.0.0.1:" in survivor.output


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["stop", "sleep"])
def test_a_silent_peer_is_an_error_after_the_timeout(fault):
    options = {"timeout_seconds": 5}
    with Workers("faults.py", [options, {**options, "fault": fault}], start="horovod") as workers:
        try:
            output = workers.processes[0].communicate(timeout=120)[0]
        finally:
            os.kill(workers.processes[1].pid, signal.SIGCONT)
        assert workers.processes[0].returncode == 1
    assert "trained" not in output
    assert "a sync failed because worker 1 (127.0.0.1:" in output
    assert "was silent for longer than timeout_seconds=5" in output


@pytest.mark.nightly
def test_bad_weights_on_one_worker_stop_all():
    for result in run("faults.py", [{}, {"fault": "nan"}], start="horovod"):
        assert result.returncode == 1
        assert "replica 1 (worker 1) has NaN or Inf in weight " in result.output


@pytest.mark.nightly_cases("option1-*")
@pytest.mark.parametrize(
    ("option", "other", "word"),
    [
        ({}, {"sync_period": 4}, "sync_period: worker 0 has '3', worker 1 has '4'"),
        ({}, {"units": 8}, "model, variable"),
    ],
)
def test_different_settings_are_named_before_the_first_step(option, other, word):
    for result in run("faults.py", [option, other], start="horovod"):
        assert result.returncode == 1
        assert "trained" not in result.output
        assert "FingerprintError" in result.output and word in result.output


def test_other_collectives_are_named_before_they_start():
    options = [{"collectives": "tensorflow"}, {"collectives": "horovod"}]
    for result in run("faults.py", options):
        assert result.returncode == 1
        assert "collectives: worker 0 has 'tensorflow', worker 1 has 'horovod'" in result.output


@pytest.mark.nightly
def test_a_worker_that_never_starts_is_named():
    options = [{"startup_timeout_seconds": 3}]
    [result] = run("faults.py", options, absent=1, start="horovod")
    assert result.returncode == 1
    assert "after 3 s these workers have not started: worker 1." in result.output
