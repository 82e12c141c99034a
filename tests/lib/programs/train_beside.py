"""A script that trains, and has an evaluator: train_beside.py OPTIONS.

Options (JSON): directory, kind ("workers", "elastic" or "servers"), epochs, step_seconds, kill (a
path: the evaluator kills itself where it scores its third model, unless the path is there),
wait_minutes.

The evaluator writes the scores that it returns to rows.json; the chief exports the global model of
the end to `end`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfpara

options = {
    "epochs": 3,
    "step_seconds": 0.0,
    "kill": None,
    "wait_minutes": 1,
    **json.loads(sys.argv[1]),
}
root, epochs = Path(options["directory"]), options["epochs"]
averages = {"ema": tfpara.EMA(0.6, num_updates=False), "ma": tfpara.MA()}
rng = np.random.default_rng(0)
x = rng.normal(size=(192, 6)).astype(np.float32)
y = (np.tanh(x[:, :3]) @ rng.normal(size=(3, 2))).astype(np.float32)
held_out = (x[:40], y[:40])


class KilledError(keras.metrics.Metric):
    """Kills this process where its third evaluation ends."""

    count = 0

    def result(self):
        return 0.0

    def update_state(self, *_, **__):
        pass

    def reset_state(self):
        KilledError.count += 1
        if options["kill"] and not Path(options["kill"]).exists() and KilledError.count > 3:
            Path(options["kill"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def build():
    layers = [keras.Input((6,)), keras.layers.Dense(7, "tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(options["step_seconds"])


def score():
    model = build()
    if options["kill"]:
        model.compile(loss="mse", metrics=["mae", KilledError(name="killed")])
    rows = tfpara.evaluate_checkpoints(
        model,
        root / "checkpoints",
        held_out,
        root / "scores",
        epochs=epochs,
        averages=averages,
        wait_minutes=options["wait_minutes"],
    )
    (root / "rows.json").write_text(json.dumps(rows))


def train():
    if options["kind"] == "servers":
        strategy = tfpara.AsyncStrategy(tfpara.ASGD(), averages=averages)
        saves = tfpara.AsyncCheckpoint(root / "checkpoints", keep=99)
    else:
        elastic = {"elastic": tfpara.Elastic(min_workers=1)} if options["kind"] == "elastic" else {}
        strategy = tfpara.PeriodicSyncStrategy(
            tfpara.BMUF(), sync_period=2, averages=averages, **elastic
        )
        saves = tfpara.callbacks.Checkpoint(root / "checkpoints", every_syncs=1, keep=99)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
    if options["kind"] == "servers":

        def read(epoch, chunk):
            rows = tf.data.Dataset.from_tensor_slices((x, y))
            return rows.skip(chunk * 48).take(48).batch(16)

        data = tfpara.Chunks(4, read, num_minibatches=12)
        strategy.fit(model, data, epochs=epochs, verbose=0, callbacks=[saves])
    else:
        model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=[Slow(), saves])
    tfpara.export(model, root / "end")


tfpara.run(score if tfpara.is_evaluator() else train)
