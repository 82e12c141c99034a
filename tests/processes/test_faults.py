"""Faults end in one clear message and a non-zero exit on every worker that is left."""

import os
import signal
import subprocess
import sys

import pytest

from tests.lib.cluster_of_processes import Workers, run

pytestmark = pytest.mark.latest


def both(option, other):
    return run("faults.py", [option, other])


@pytest.mark.nightly
@pytest.mark.one_version
def test_without_a_fault_all_train():
    """Neither a worse epoch is a fault, nor a rate that each worker sets by its own minibatches."""
    for result in run("faults.py", [{"schedules": True}] * 2, fresh=True):
        assert result.returncode == 0, result.output
        assert "trained [0.09" in result.output


@pytest.mark.one_version
@pytest.mark.nightly_cases("option2-*", "option3-*")
@pytest.mark.parametrize(
    ("option", "other", "words"),
    [
        (
            {"data_plan": {"seed": 1}},
            {
                "sync_period": 4,
                "rule": "tfpara.BMUF()",
                "local_state": "reset",
                "data_plan": {"seed": 2},
            },
            [
                "sync_period: worker 0 has '3', worker 1 has '4'",
                "rule: worker 0 has 'BSP()'",
                "BMUF(block_momentum=0.5",
                "local_state: worker 0 has 'auto'",
                "data_plan.seed: worker 0 has 1, worker 1 has 2",
            ],
        ),
        ({"data_plan": {"seed": 1}}, {}, ["data_plan.seed: worker 0 has", "worker 1 has None"]),
        ({}, {"units": 8}, ["(6, 7)", "(6, 8)", "model, variable"]),
        (
            {"bins": [0.0, 1.0]},
            {"bins": [0.0, 2.0]},
            [
                "of Discretization, which adapt makes",
                "'0.0, 1.0 (2 entries",
                "'0.0, 2.0 (2 entries",
            ],
        ),
        (
            {"momentum": 0.9},
            {"momentum": 0.5},
            ["optimizer's momentum: worker 0 has 0.9, worker 1 has 0.5"],
        ),
    ],
)
def test_different_settings_are_named_before_the_first_step(option, other, words):
    for result in both(option, other):
        assert result.returncode != 0
        assert "trained" not in result.output
        for word in ["FingerprintError", *words]:
            assert word in result.output


@pytest.mark.one_version
@pytest.mark.nightly_cases("load-*", "nan-*", "statistics*", "rate-replica 0 (worker 0) 0.1,*")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "replica 2 (worker 1) has NaN or Inf in weight "),
        ("load", "replica 2 (worker 1) starts from other weights than replica 0"),
        ("frozen", "replica 2 (worker 1) has other frozen weights or statistics, "),
        ("statistics", "replica 2 (worker 1) has other frozen weights or statistics, "),
        ("rate", "replica 0 (worker 0) 0.1, replica 2 (worker 1) 0.05. Set the rate on every"),
    ],
)
def test_bad_weights_on_one_worker_stop_all(fault, message):
    options = {"local_devices": 2, "others": fault in ("frozen", "statistics")}
    for result in both(options, {**options, "fault": fault}):
        assert result.returncode != 0
        assert message in result.output


@pytest.mark.nightly_cases("leave-*")
@pytest.mark.parametrize(("fault", "devices"), [("kill", 2), ("leave", 1)])
def test_a_dead_peer_is_named(fault, devices):
    options = {"local_devices": devices}
    with Workers("faults.py", [options, {**options, "fault": fault}]) as workers:
        survivor, gone = workers.results()
    assert gone.returncode == (-signal.SIGKILL if fault == "kill" else 0)
    assert survivor.returncode != 0
    assert "trained" not in survivor.output
    how = "is gone" if fault == "kill" else "has ended its program while others went on"
    assert f"because worker 1 ({workers.addresses[1]}) {how}" in survivor.output


@pytest.mark.one_version
def test_a_silent_peer_is_an_error_after_the_timeout():
    options = {"local_devices": 2, "timeout_seconds": 15}
    with Workers("faults.py", [options, {**options, "fault": "stop"}]) as workers:
        try:
            output = workers.processes[0].communicate(timeout=120)[0]
        finally:
            os.kill(workers.processes[1].pid, signal.SIGCONT)
        assert workers.processes[0].returncode != 0
        assert "trained" not in output
        silent = f"worker 1 ({workers.addresses[1]}) was silent for longer than timeout_seconds=15"
        assert f"a sync failed because {silent}" in output


ASKED_OFTEN = """
import gc, threading
from tfpara.cluster.status_board import main_frame
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
for number in range(500):
    cycle = [threading.local()]  # as a graph of TensorFlow has it
    cycle.append(cycle)
    gc.set_threshold(1 + number % 7, 1, 1)
    assert main_frame()
assert gc.isenabled()
"""


def test_a_process_goes_on_where_garbage_is_collected_while_its_place_is_asked():
    """Python 3.11 stands still if `_current_frames` starts a collection that ends a local."""
    subprocess.run([sys.executable, "-c", ASKED_OFTEN], check=True, timeout=100)
