"""Evaluators as processes beside workers: killed, started again, and two of them."""

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.lib import warm
from tests.lib.cluster_of_processes import HERE
from tests.lib.launched import DEADLINE, launch

pytestmark = pytest.mark.timeout(600)

PROGRAM = str(HERE / "programs" / "train_beside.py")
MODELS = ["global", "ema", "ma"]
BY_HAND = {"TF_CONFIG": json.dumps({"task": {"type": "evaluator", "index": 0}})}
# An interpreter that knows nothing of the project evaluates a model that was exported.
ALONE = """
import sys
import numpy as np, tensorflow as tf
assert not any(m.split(".")[0] == "tfpara" for m in sys.modules)
rng = np.random.default_rng(0)
x = rng.normal(size=(192, 6)).astype(np.float32)
y = (np.tanh(x[:, :3]) @ rng.normal(size=(3, 2))).astype(np.float32)
for path in sys.argv[1:]:
    signature = tf.saved_model.load(path).signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    (found,) = signature(**{name: tf.constant(x[:40])}).values()
    print(np.square(found.numpy() - y[:40]).mean())
"""
FLAGS = {"workers": ["-n", 2], "elastic": ["-n", 2, "--elastic"], "servers": ["-n", 1, "--ps", 1]}


def options(directory, **changed):
    return json.dumps({"directory": str(directory), "kind": "workers", **changed})


def by_hand(directory, **changed):
    """Starts the same script as an evaluator, as on another machine."""
    return warm.Popen(
        [PROGRAM, options(directory, **changed)],
        env={**os.environ, **BY_HAND},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def table(directory):
    with open(directory / "scores" / "scores.csv", newline="") as file:
        return list(csv.DictReader(file))


def checkpoints(directory):
    return sorted(int(p.name[-8:]) for p in (directory / "checkpoints").glob("checkpoint-*"))


def check_table(directory):
    """Fails unless each checkpoint's models are there once, with the scores of what was saved."""
    rows = table(directory)
    found = [(int(row["checkpoint"]), row["weights"]) for row in rows]
    assert found == [(number, name) for number in checkpoints(directory) for name in MODELS]
    paths = [str(directory / "end"), str(directory / "scores" / "best")]
    said = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, *paths], capture_output=True, text=True, check=True
    )
    end, best = map(float, said.stdout.split())
    losses = {place: float(row["loss"]) for place, row in zip(found, rows, strict=True)}
    assert losses[max(checkpoints(directory)), "global"] == pytest.approx(end, rel=1e-4)
    assert min(losses.values()) == pytest.approx(best, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(FLAGS))
def test_beside_a_run_under_the_launcher(tmp_path, kind):
    flags = [*FLAGS[kind], "--threads=1", "--evaluator"]
    code, out, err = launch(*flags, PROGRAM, options(tmp_path, kind=kind))
    assert code == 0, (out, err)
    assert "[evaluator] tfpara: the run has ended; scores are in" in out
    count = "2 workers" if kind == "workers" else "2 processes" if kind == "elastic" else "3 pro"
    assert f"tfpara-launch: all {count}" in err  # the evaluator is none of them
    assert len(checkpoints(tmp_path)) >= 3
    check_table(tmp_path)
    assert json.loads((tmp_path / "rows.json").read_text()) == table(tmp_path)


@pytest.mark.nightly
def test_killed_and_started_again_while_others_train(tmp_path):
    killed = {"kill": str(tmp_path / "killed"), "step_seconds": 0.05, "epochs": 2}
    code, out, err = launch(
        "-n", 2, "--threads=1", "--evaluator", PROGRAM, options(tmp_path, **killed)
    )
    assert code == 0, (out, err)
    assert "evaluator failed: killed by SIGKILL; the run goes on without" in err
    # It was killed while it scored the second model of a checkpoint: that one has no row.
    before = table(tmp_path) if (tmp_path / "scores" / "scores.csv").exists() else []
    assert len(before) % len(MODELS) == 0 and len(before) < 3 * len(checkpoints(tmp_path))
    with by_hand(tmp_path, **killed) as again:
        out, err = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, (out, err)
    assert table(tmp_path)[: len(before)] == before
    check_table(tmp_path)


def test_two_evaluators_one_without_checkpoints_and_one_that_is_asked_to_end(tmp_path):
    (tmp_path / "scores").mkdir()
    with open(tmp_path / "scores" / "lock", "w") as lock:
        lock.write("process 7 on elsewhere")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        with by_hand(tmp_path) as second:
            out, err = second.communicate(timeout=DEADLINE)
    assert (second.returncode, out) == (1, "")
    assert err.strip().splitlines()[-1] == (
        f"tfpara: {tmp_path}/scores is in use by another evaluator (process 7 on elsewhere). One is"
        " enough: end it first, or give this one another out=."
    )
    with by_hand(tmp_path, wait_minutes=0.01) as alone:
        out, err = alone.communicate(timeout=DEADLINE)
    assert alone.returncode == 1 and "Traceback" not in err
    assert f"there was no new checkpoint in {tmp_path}/checkpoints for 0.01 minutes" in err
    with by_hand(tmp_path) as asked:
        assert "waits for a new checkpoint" in asked.stdout.readline()
        asked.send_signal(signal.SIGTERM)
        asked.communicate(timeout=DEADLINE)
    assert asked.returncode == 75


@pytest.mark.nightly
def test_a_script_that_has_none_ends_at_once(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, tfpara\n"
        "strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1)\n"
        "print('trains', strategy.num_workers)\n"
    )
    code, out, err = launch("-n", 1, "--threads=1", "--evaluator", path)
    assert code == 0 and out.count("trains 1") == 1
    assert "this process has the job 'evaluator' in TF_CONFIG, and nothing to do: " in err
    assert "tfpara.evaluate_checkpoints where tfpara.is_evaluator() is true" in err
