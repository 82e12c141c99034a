"""Many replicas in a process of one thread, and the end of a run that is stuck."""

import json
import signal
import subprocess
import sys

import numpy as np

from tests.lib.cluster_of_processes import HERE

REPLICAS = 12


def gradient_descent():
    """What the mean of the replicas is where all sync after each minibatch."""
    x = np.random.default_rng(0).normal(size=(6 * REPLICAS, 3)).astype("float32")
    w = np.ones(3)
    for _ in range(2):
        for batch in np.split(x, 3):
            w -= 0.1 * 2 / len(batch) * batch.T @ (batch @ w - batch[:, 0])
    return w


def test_one_thread_is_enough_and_a_run_that_is_stuck_ends_when_it_is_asked_to(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    options = {"replicas": REPLICAS, "overlap": False, "directory": str(tmp_path / "run")}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "programs/simulate_many.py"), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    try:
        weights, stuck = process.stdout.readline(), process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    np.testing.assert_allclose(json.loads(weights), gradient_descent(), atol=1e-5)
    assert "a sync of 12 devices in one process would never end" in errors
    assert stuck == "stuck\n"
    assert process.returncode == 75
    assert "has not returned for timeout_seconds=3: ends without a checkpoint" in errors
