"""What Keras users write on their first day gives what plain Keras gives.

With model averaging after each minibatch, N replicas take the step that one takes on all of it.
Custom loops, GANs and kinds of data have tests of their own.
"""

import csv
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.cluster_of_processes import run_all_well
from tests.lib.programs import first_day


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return first_day.results(None, str(tmp_path_factory.mktemp("plain")))


def assert_as_plain(found, plain, tolerance=2e-4):
    for name, expected in plain.items():
        # bfloat16 has three digits, and a batch is summed in other parts.
        rounding = 0.05 if name == "mixed_precision" else tolerance
        for kind in ("history", "weights", "predicted"):
            pairs = zip(
                keras.tree.flatten(found[name][kind]),
                keras.tree.flatten(expected[kind]),
                strict=True,
            )
            for got, wanted in pairs:
                np.testing.assert_allclose(got, wanted, atol=rounding, rtol=rounding)


@pytest.mark.nightly
def test_on_two_devices_of_a_process(plain, tmp_path):
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1, devices=["CPU:0", "CPU:1"])
    assert_as_plain(first_day.results(strategy, str(tmp_path)), plain)


@pytest.mark.nightly
def test_on_two_workers(plain, tmp_path):
    options = {"devices": 1, "folder": str(tmp_path)}
    run_all_well("first_day.py", [options] * 2, timeout=400)
    for rank in range(2):
        assert_as_plain(json.loads((tmp_path / f"results-{rank}.json").read_text()), plain)
    history = plain["classifier_with_callbacks"]["history"]
    epochs = len(history["loss"])
    with open(tmp_path / "new/log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(epochs))
    np.testing.assert_allclose([float(row["loss"]) for row in rows], history["loss"], rtol=2e-4)
    saved = sorted(path.name for path in (tmp_path / "new").glob("*.keras"))
    assert saved == [f"m{epoch + 1}.keras" for epoch in range(epochs)]
    for name in saved:
        keras.models.load_model(tmp_path / "new" / name)
    events = list((tmp_path / "board/train").glob("events.out.tfevents.*"))
    assert len(events) == 1
    steps = [
        event.step
        for record in tf.data.TFRecordDataset([str(events[0])])
        for event in [tf.compat.v1.Event.FromString(record.numpy())]
        for value in event.summary.value
        if value.tag == "epoch_loss"
    ]
    assert steps == list(range(epochs))
