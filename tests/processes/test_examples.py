"""The examples, on two workers."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lib import examples, warm
from tests.lib.cluster_of_processes import finished, free_ports, tf_config
from tests.lib.launched import Launched
from tfpara.examples import classify

DEADLINE = 180.0  # seconds; reached only by a hang


def run(module, folder, *arguments):
    """Runs an example on two workers; returns what the chief printed."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    threads = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    workers = [
        warm.Popen(
            ["-m", f"tfpara.examples.{module}", *arguments],
            env=os.environ | threads | {"TF_CONFIG": tf_config(addresses, rank)},
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    outputs = [output for output, _ in finished(workers, DEADLINE)]
    assert "tfpara: 2 workers, 2 replicas" in outputs[0]
    return outputs[0]


@pytest.mark.nightly
def test_the_classifier_learns_and_leaves_a_model_that_loads(tmp_path):
    said = run("classify", tmp_path, "--epochs=2")
    found = dict(re.findall(r"(\w+) weights: accuracy ([\d.]+)", said))
    assert float(found["global"]) > 0.85 and float(found["ema"]) > 0.85, said
    served = tf.saved_model.load(tmp_path / "classify" / "model")
    x, labels = classify.points(1_000, seed=3)
    accuracy = float((np.argmax(served.serve(x), 1) == labels).mean())
    assert abs(accuracy - float(found["ema"])) < 0.002


# In each run: workers that adapt layers, and several models. The others are nightly.
@pytest.mark.nightly_cases("cnn", "transformer", "sequences", "vae", "loop", "finetune")
@pytest.mark.parametrize("name", examples.SCORES)
def test_two_workers_learn_and_leave_one_model_that_loads(name, tmp_path):
    assert examples.learned(name, run(name, tmp_path)) > 0.8
    (file,) = tmp_path.iterdir()
    model = keras.models.load_model(file)
    if name == "loop":
        x = np.linspace(-3, 3, 101, dtype="float32")[:, None]
        assert np.mean((np.asarray(model(x)) - np.sin(x)) ** 2) < 0.1


@pytest.mark.nightly
def test_a_worker_of_the_elastic_example_is_killed_and_comes_again(tmp_path):
    command = ("python", "-m", "tfpara.examples.elastic", "--epochs=1000")
    arguments = ("-n", 2, "--elastic", "--threads", 1, "--", *command)
    with Launched(*arguments, cwd=tmp_path, stderr=subprocess.STDOUT) as launched:
        launched.read_until("Epoch 2/")
        children = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}/children")
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        launched.read_until("1 worker trains on", "has come: 2 workers train on")
        after = launched.seen.count(b"Epoch ")
        until = time.monotonic() + DEADLINE
        while launched.seen.count(b"Epoch ") < after + 2 and time.monotonic() < until:
            launched.read_more("epoch")
