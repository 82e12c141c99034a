"""The script of docs/engines/ray.md under Ray itself, where that is installed."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.lib.cluster_of_processes import HERE
from tests.lib.engine_scripts import assert_close, steps, train_here, weights

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "engines" / "ray" / "train.py"
MINIBATCHES, EPOCHS = 40, 4
LEFT = 28 + 16  # steps after which the run has left: 28 are those of the fifth checkpoint
DEADLINE = 600.0  # seconds; reached only by a hang


def test_a_killed_worker_leaving_and_another_number_of_workers(tmp_path, monkeypatch):
    env = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
    }
    program = [sys.executable, HERE / "programs" / "under_ray.py", SCRIPT, tmp_path]
    done = subprocess.run(
        program,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout
    two, one = tmp_path / "two", tmp_path / "one"
    assert json.loads((tmp_path / "ends.json").read_text()) == [False, True], done.stdout

    # Worker 1 was killed after 30 steps, and after 13 more it asked all to leave. Epochs have 20
    # steps, with a sync after every 4 and a checkpoint after every 8.
    assert steps(two, 1) == [30, 16]
    assert steps(two, 0)[1:] == [16]
    assert "Resuming from checkpoint 5: epoch 2, step 8." in done.stdout
    assert "checkpoint written, fit raises Preempted" in done.stdout
    assert not (two / "model.keras").exists()
    (two / "leave").unlink()
    shutil.copytree(two / "checkpoints", tmp_path / "one here" / "checkpoints")
    whole = train_here(SCRIPT, tmp_path / "whole", 2, monkeypatch)
    assert_close(train_here(SCRIPT, two, 2, monkeypatch), whole)

    assert steps(one, 0) == [EPOCHS * MINIBATCHES - 2 * LEFT]
    assert_close(weights(one), train_here(SCRIPT, tmp_path / "one here", 1, monkeypatch))
