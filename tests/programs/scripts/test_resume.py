"""A run that is asked to end, and started again, is the run that was not."""

import csv
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from scripts import runs
from tests.lib import warm

FLAGS = (
    "--rule=bmuf",
    "--simulate_replicas=2",
    "--sync_period=3",
    "--checkpoint_syncs=2",
    "--ema_decay=0.5",
    "--layers=1",
    "--width=16",
    "--context=1",
    "--minibatch=32,1.5:64",
)


def interrupted(environment, flags):
    """Starts a run, ends it in its third epoch, and returns its exit code and output."""
    program = warm.Popen(
        ["-m", "scripts.train", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=os.path.dirname(os.path.dirname(runs.__file__)),
    )
    lines = []
    for line in program.stdout:
        lines.append(line)
        if line.startswith("Epoch 3/"):
            program.send_signal(signal.SIGTERM)
    return program.wait(timeout=200), "".join(lines), program.stderr.read()


@pytest.fixture(scope="module")
def resumed(run_well, corpus_directory, tmp_path_factory):
    """(directory of a run that was interrupted and went on, of one that was not)."""
    base = tmp_path_factory.mktemp("resume")
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    flags = (f"--corpus={corpus_directory}", f"--run_dir={base / 'one'}", *FLAGS)
    code, out, err = interrupted(environment, (*flags, "--epochs=500"))
    assert code == 75, out + err
    assert "checkpoint written, exit code 75" in out
    reached = out.count("\nEpoch ")
    # Of a constant rate, so that the number of epochs may change.
    ended = run_well("train", *flags, f"--epochs={reached + 2}")
    whole = (f"--corpus={corpus_directory}", f"--run_dir={base / 'two'}", *FLAGS)
    run_well("train", *whole, f"--epochs={reached + 2}")
    return base / "one", base / "two", ended


def epochs(run_dir):
    return json.loads((run_dir / "history.json").read_text())["epochs"]


@pytest.mark.nightly
def test_its_weights_are_those_of_an_uninterrupted_run_bit_for_bit(resumed):
    one, two, ended = resumed
    assert "Resuming from checkpoint" in ended.out
    for which in ("global", "ema-0.5"):
        models = [runs.load(run_dir, which)[0] for run_dir in (one, two)]
        for a, b in zip(*(model.get_weights() for model in models), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_its_log_has_every_epoch_once(resumed):
    one, two, _ = resumed
    assert len(epochs(one)) == len(epochs(two)) >= 4
    for run_dir in (one, two):
        assert f"--epochs={len(epochs(one))}" in (run_dir / "flags.txt").read_text().splitlines()
    for name in ("loss", "frame_accuracy", "validation_loss", "learning_rate"):
        assert [log[name] for log in epochs(one)] == [log[name] for log in epochs(two)]


@pytest.mark.nightly
def test_tensorboard_goes_on(resumed):
    steps = []
    for path in sorted(resumed[0].glob("tensorboard/events.out.*"), key=os.path.getmtime):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            if any(value.tag == "validation_loss" for value in event.summary.value):
                steps.append(event.step)
    assert steps == list(range(len(epochs(resumed[0]))))


@pytest.mark.nightly
def test_other_settings_are_refused_and_starting_over_is_not(run, resumed, corpus_directory):
    one = resumed[0]
    flags = (f"--corpus={corpus_directory}", f"--run_dir={one}", *FLAGS, "--epochs=1", "--seed=8")
    refused = run("train", *flags)
    assert refused.returncode == 1
    assert "data_plan.seed: the checkpoint has '0', this run has '8'" in refused.err
    assert "--start_over" in refused.err
    assert len(epochs(one)) > 1
    anew = run("train", *flags, "--start_over")
    assert anew.returncode == 0, anew.err
    assert len(epochs(one)) == 1


# `scripts.train`, which is killed at the start of epoch 3, the first time. The chief begins when
# the evaluator waits for it.
KILLED_ONCE = """
import os, signal, sys, time
mark = sys.argv.pop(1)
from scripts import common, run_files
waits = run_files.wait_for_begin
def wait(*args):
    open(mark + "-waits", "w").close()
    waits(*args)
run_files.wait_for_begin = wait
evaluates = "evaluator" in os.environ.get("TF_CONFIG", "")
while not (evaluates or os.path.exists(mark + "-waits")):
    time.sleep(0.1)
import tfpara
old = tfpara.callbacks.Telemetry.on_epoch_begin
def begin(self, epoch, logs=None):
    if epoch == 2 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    old(self, epoch, logs)
tfpara.callbacks.Telemetry.on_epoch_begin = begin
from scripts import train
common.run(train.main, train.score_checkpoints)
"""


@pytest.mark.nightly
def test_a_restart_of_a_run_that_starts_over_continues_it(run_well, corpus_directory, tmp_path):
    """The former run has ended. The evaluator scores the new one alone."""
    run_dir = tmp_path / "run"
    flags = (f"--corpus={corpus_directory}", f"--run_dir={run_dir}", *FLAGS)
    run_well("train", *flags, "--epochs=1")
    script = tmp_path / "train.py"
    script.write_text(KILLED_ONCE)
    ended = subprocess.run(
        [sys.executable, "-m", "tfpara.launch", "--threads=1", "--max_restarts=1"]
        + ["--evaluator", script, tmp_path / "mark", *flags, "--epochs=3", "--start_over"],
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(runs.__file__))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "restart 1 of 1: chief failed first: killed by SIGKILL" in ended.stderr
    assert ended.stdout.count("[chief] Epoch 1/3") == 1
    assert len(epochs(run_dir)) == 3
    assert "start_over" not in (run_dir / "flags.txt").read_text()
    assert (run_dir / "best.weights.h5").is_file()
    with open(run_dir / "evaluator" / "scores.csv", newline="") as file:
        assert {row["epoch"] for row in csv.DictReader(file)} >= {"3"}
    assert "[evaluator] The evaluator waits until the chief has begun" in ended.stdout
    assert "[chief] --start_over is ignored" in ended.stdout
    assert "Resuming from checkpoint" in ended.stdout


def test_the_number_of_epochs_is_not_free_where_the_rate_depends_on_it():
    """Checked by data_plan, which `scripts.train` lets change for constant rates alone."""
    from absl import flags
    from absl.testing import flagsaver

    from scripts import schedule_flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    assert not schedule_flags.epochs_matter()
    with flagsaver.flagsaver(final_learning_rate=0.01):
        assert schedule_flags.epochs_matter()
