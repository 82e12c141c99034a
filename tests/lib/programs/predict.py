"""A worker of two devices that predicts with the others, and without them.

Options (JSON): elastic (whether members may change), killed (the rank that kills itself while it
predicts), out (npz path; `{rank}` is replaced). It fails at last, by data that differ.
"""

import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfpara

X = np.random.default_rng(0).normal(size=(23, 5)).astype("float32")


class Batches(keras.utils.PyDataset):
    read = 0

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.read += 1
        return (X[4 * index : 4 * index + 4],)


class Nested(keras.Model):
    """Two outputs, one of which counts classes; it may kill its process at its first prediction."""

    kills = False

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3)
        self.normal = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        rows = self.normal(self.hidden(x), training=training)
        return {"rows": rows, "more": (keras.ops.argmax(rows, 1), rows[:, None, :2] * 2)}

    def predict(self, *args, **kwargs):
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(*args, **kwargs)


def main():
    options = json.loads(sys.argv[1])
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, devices)
    elastic = tfpara.Elastic(min_workers=1, grace_seconds=5.0)
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.EASGD(),
        sync_period=2,
        devices=["CPU:0", "CPU:1"],
        averages={"ema": tfpara.EMA(0.5)},
        timeout_seconds=60,
        elastic=elastic if options.get("elastic") else None,
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Nested()
        model(X[:1])
        model.compile("sgd", {"rows": "mse"})
    rank = strategy.worker_index

    def predict(x, **given):
        return strategy.predict(model, x, **given)

    if "killed" in options:
        model.kills = rank == options["killed"]
        found = {"arrays": predict(X, batch_size=4)}
        batches = None
    else:
        targets = {"rows": np.ones([23, 3]), "more": (np.zeros(23), np.zeros([23, 1, 2]))}
        model.fit(X, targets, batch_size=4, epochs=2, verbose=0)
        rows, batches = tf.data.Dataset.from_tensor_slices(X), Batches()
        found = {
            "arrays": predict(X, batch_size=4),
            "dataset": predict(rows.batch(4)),
            "generator": predict(rows.batch(4).filter(lambda batch: True)),
            "py dataset": predict(batches),
            "one row": predict(X[:1], batch_size=4),
            "of the chief": predict(X, batch_size=4, only_chief=True),
            "ema": predict(X, which="ema", batch_size=4),
            "local": predict(X, which="local", batch_size=4),
        }
        with strategy.weights(model, "ema"):
            found["shown"] = predict(X, batch_size=4)
    for which in ("global", "ema"):
        with strategy.weights(model, which):
            found[f"alone {which}"] = model.predict(X, batch_size=4, verbose=0)
    flat = {
        f"{name}, {k}": leaf
        for name, outputs in found.items()
        if outputs is not None
        for k, leaf in enumerate(keras.tree.flatten(outputs))
    }
    flat["read"] = -1 if batches is None else batches.read
    flat["structure"] = str(keras.tree.map_structure(lambda _: 0, found["arrays"]))
    np.savez(options["out"].replace("{rank}", str(rank)), **flat)
    if "killed" not in options:
        predict(X[: 20 + rank])


if __name__ == "__main__":
    tfpara.run(main)
