"""Faults that take long: slow, stopped and absent workers."""

import os
import signal
import time

import pytest

from tests.lib.cluster_of_processes import Workers, run

pytestmark = pytest.mark.latest


def test_a_worker_that_never_starts_is_named():
    with Workers("faults.py", [{"startup_timeout_seconds": 3}], absent=1) as workers:
        (result,) = workers.results()
    assert result.returncode != 0
    assert f"have not started: worker 1 ({workers.addresses[1]})" in result.output


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (
            "absent",
            "has ended its program while others went on; call fit on every worker or on none.",
        ),
        (
            "empty",
            "has failed (ValueError: fit got data without a single batch on worker 2. Every worker "
            "needs at least one: give it data, or start fewer workers.); start all workers again.",
        ),
    ],
)
def test_a_worker_without_fit_or_data_is_named(fault, why):
    with Workers("faults.py", [{"fault": "own"}, {"fault": "own"}, {"fault": fault}]) as workers:
        *others, odd = workers.results()
    assert odd.returncode == (0 if fault == "absent" else 1)
    for result in others:
        assert result.returncode != 0
        assert f"because worker 2 ({workers.addresses[2]}) {why}\n" in result.output


@pytest.mark.one_version
def test_a_long_wait_is_told_of():
    """While it lasts: for whom, and where that is."""
    options = {"timeout_seconds": 100}
    waiting, late = run("faults.py", [options, {**options, "fault": "sleep"}])
    assert waiting.returncode == late.returncode == 0
    line = next(line for line in waiting.output.splitlines() if line.startswith("Waiting for"))
    since, _, where = line.partition(" s: ")
    assert since.startswith("Waiting for worker 1 in a sync for 1")
    assert where.startswith("it is in callbacks of epoch 1 of fit, step 5 [faults.py, line ")
    assert "Waiting" not in late.output


def test_a_worker_that_stops_for_less_than_the_timeout_goes_on():
    """TensorFlow's coordination service is as patient as timeout_seconds; the chief serves it."""
    with Workers("faults.py", [{"fault": "stop"}, {}]) as workers:
        chief = workers.processes[0].pid
        for line in workers.processes[0].stdout:
            if line == "fault stop\n":
                break
        time.sleep(13)
        os.kill(chief, signal.SIGCONT)
        assert [result.returncode for result in workers.results()] == [0, 0]
