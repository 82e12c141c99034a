"""The script of docs/engines/spark.md under Spark itself, where that is installed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.lib.cluster_of_processes import HERE
from tests.lib.engine_scripts import assert_close, steps, train_here, weights

MISSING = "Spark is not installed: pip install pyspark spark-tensorflow-distributor, and Java 17"
pytest.importorskip("pyspark", reason=MISSING)
pytest.importorskip("spark_tensorflow_distributor", reason=MISSING)
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "engines" / "spark" / "train.py"
DEADLINE = 600.0  # seconds; reached only by a hang


def test_a_killed_worker_a_reused_python_worker_and_leaving(tmp_path, monkeypatch):
    env = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
    }
    program = [sys.executable, HERE / "programs" / "under_spark.py", SCRIPT, tmp_path]
    done = subprocess.run(
        program,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout
    killed, again, left = (tmp_path / name for name in ("killed", "again", "left"))
    assert json.loads((tmp_path / "ends.json").read_text()) == [True, True, False], done.stdout
    whole = train_here(SCRIPT, tmp_path / "whole", 2, monkeypatch)

    # Epochs have 20 steps, with a sync after every 4 and a checkpoint after every 8.
    assert steps(killed, 1) == [30, 80 - 28]
    assert "Resuming from checkpoint 5: epoch 2, step 8." in done.stdout
    assert_close(weights(killed), whole)

    assert done.stdout.count("A task has failed. All are started again.") == 3
    assert "this process has trained with other workers before" in done.stdout
    assert "under Spark set spark.python.worker.reuse=false." in done.stdout
    assert steps(again, 0) == [80]
    assert_close(weights(again), whole)

    assert "Asked to end: checkpoint written" in done.stdout
    assert not (left / "model.keras").exists() and steps(left, 0) == [16]
    assert_close(train_here(SCRIPT, left, 2, monkeypatch), whole)
