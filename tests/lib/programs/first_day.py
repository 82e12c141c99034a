"""Scripts as Keras users write them on their first day, with the strategy or, to compare, without.

JSON options: `devices` of each worker; `folder`, where the callbacks of all workers write.
"""

import contextlib
import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app

import tfpara

BATCH = 16  # samples of all replicas together


def images():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8, 8, 1)).astype("float32")
    return x, (x[:, 2, 3, 0] > 0).astype("int32")


def cnn():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy("ce", from_logits=True)],
    )
    return model


def classifier_with_callbacks(folder):
    """Early stopping that restores weights, a falling rate, files, class weights."""
    x, y = images()
    model = cnn()
    os.makedirs(f"{folder}/new", exist_ok=True)
    callbacks = [
        keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=0.05),
        keras.callbacks.ModelCheckpoint(f"{folder}/new/m{{epoch}}.keras"),
        keras.callbacks.CSVLogger(f"{folder}/new/log.csv", append=True),
        keras.callbacks.TensorBoard(f"{folder}/board"),
    ]
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=4,
        shuffle=False,
        validation_data=(x[::2], y[::2]),
        class_weight={0: 1.0, 1: 3.0},
        callbacks=callbacks,
    )
    return model, history.history


def text(folder):
    """Tokens of several lengths, a mask, sample weights, a tf.data pipeline of the user's."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 20, size=(48, 6)) * (np.arange(6) < rng.integers(1, 7, (48, 1)))
    labels = (tokens[:, 0] > 9).astype("float32")[:, None]
    weights = rng.uniform(0.5, 2.0, 48).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.LSTM(4),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["mae"], weighted_metrics=[keras.metrics.AUC(name="auc")])
    dataset = tf.data.Dataset.from_tensor_slices((tokens, labels, weights))
    history = model.fit(dataset.map(lambda *row: row).batch(BATCH).prefetch(1), epochs=2)
    return model, history.history


def functional_of_two_inputs(folder):
    """A dict of inputs, two outputs, a validation split, several steps in an execution."""
    x, _ = images()
    flat = x.reshape(64, -1)
    first, second = keras.Input((32,), name="first"), keras.Input((32,), name="second")
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")(
        keras.layers.Concatenate()([first, second])
    )
    outputs = {"a": keras.layers.Dense(1, name="a")(hidden)}
    outputs["b"] = keras.layers.Dense(1, name="b")(hidden)
    model = keras.Model({"first": first, "second": second}, outputs)
    model.compile(
        keras.optimizers.SGD(0.05),
        {"a": "mse", "b": "mae"},
        loss_weights={"a": 1.0, "b": 0.5},
        steps_per_execution=2,
    )
    history = model.fit(
        {"first": flat[:, :32], "second": flat[:, 32:]},
        {"a": flat[:, :1], "b": flat[:, 1:2]},
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        validation_split=0.5,
    )
    return model, history.history


def mixed_precision(folder):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        x, y = images()
        model = cnn()
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False)
        return model, history.history
    finally:
        keras.mixed_precision.set_global_policy("float32")


SCRIPTS = (classifier_with_callbacks, text, functional_of_two_inputs, mixed_precision)


def results(strategy, folder):
    """Returns history, weights and scores of each script, by its name."""
    found = {}
    for script in SCRIPTS:
        keras.utils.set_random_seed(3)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model, history = script(folder)
        x = [np.ones((3, *i.shape[1:]), i.dtype) for i in model.inputs]
        names = [i.name for i in model.inputs]
        x = dict(zip(names, x, strict=True)) if len(x) > 1 else x[0]
        predicted = keras.tree.map_structure(np.asarray, model.predict(x, verbose=0))
        found[script.__name__] = {
            "history": {name: [float(v) for v in values] for name, values in history.items()},
            "weights": [w.astype("float64").tolist() for w in model.get_weights()],
            "predicted": [p.astype("float64").tolist() for p in keras.tree.flatten(predicted)],
        }
    return found


def main(argv):
    options = json.loads(argv[1])
    devices = [f"CPU:{k}" for k in range(options["devices"])]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * len(devices),
    )
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1, devices=devices)
    found = results(strategy, options["folder"])
    with open(f"{options['folder']}/results-{strategy.worker_index}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    app.run(lambda argv: tfpara.run(lambda: main(argv)), argv=sys.argv[:2])
