"""A worker that calls all functions of Keras that write, as scripts for a single worker do.

Options (JSON): folder (of the files), rounds (of saves in a row), url (that RemoteMonitor posts
to), scratch (where temporary files go), out (npz path of what this worker has seen).
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras.models import save_model  # as scripts import it, before there is a strategy

import tfpara

K = keras.callbacks
X = np.random.default_rng(0).normal(size=(96, 16)).astype("float32")
Y = X.sum(1, keepdims=True)


@keras.saving.register_keras_serializable()
class Slow(keras.layers.Dense):
    """A layer that takes a while to save, so that a worker who does not wait comes too early."""

    seconds = 0.0

    def save_own_variables(self, store):
        time.sleep(self.seconds)
        super().save_own_variables(store)


class Evaluating(K.ModelCheckpoint):
    """A user's callback: all workers must run it, since it evaluates together."""

    scores = []

    def on_epoch_end(self, epoch, logs=None):
        self.scores.append(self.model.evaluate(X, Y, verbose=0))
        super().on_epoch_end(epoch, logs)


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((16,)), Slow(512, "relu", name="slow"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    return model


def make_lookup(strategy):
    with strategy.scope():
        layer = keras.layers.StringLookup(output_mode="one_hot")
        layer.adapt(tf.constant(["a", "a", "a", "b", "b", "c"]))
        text = keras.Input((1,), dtype="string")
        return keras.Model(text, layer(text))


def refused(model, callback):
    try:
        model.fit(X, Y, callbacks=[callback], verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing"


def callbacks_of(folder, url):
    """Every callback of Keras that writes, into folders that nobody has made."""
    return [
        K.ModelCheckpoint(folder / "new" / "all" / "m{epoch}.keras", verbose=1),
        K.ModelCheckpoint(folder / "new" / "best.keras", monitor="loss", save_best_only=True),
        K.ModelCheckpoint(folder / "new" / "steps-{epoch}-{batch}.keras", save_freq=2),
        K.ModelCheckpoint(folder / "new" / "last.weights.h5", save_weights_only=True),
        Evaluating(folder / "newer" / "mine.keras"),
        K.CSVLogger(folder / "logs" / "log.csv"),
        K.CSVLogger(folder / "added.csv", append=True),
        K.TensorBoard(folder / "board", histogram_freq=1, write_images=True, update_freq=1),
        K.RemoteMonitor(root=url, send_as_json=True),
        K.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        K.LearningRateScheduler(lambda epoch, rate: rate, verbose=1),
        K.TerminateOnNaN(),
    ]


class Batches(keras.utils.PyDataset):
    """Rows of X in batches of 10, the last of 2."""

    def __len__(self):
        return 3

    def __getitem__(self, k):
        return X[:22][10 * k : 10 * (k + 1)], Y[:22][10 * k : 10 * (k + 1)]


def predicted(strategy, model):
    """Predicts 22 rows in batches of 8, in all forms `predict` takes, and on the chief only."""
    rows = tf.data.Dataset.from_tensor_slices(X[:22])
    found = {
        "arrays": model.predict(X[:22], batch_size=8, verbose=0),
        "dataset": model.predict(rows.batch(8), verbose=0),
        "pydataset": model.predict(Batches(), verbose=0),
        "tensors": model.predict(tf.constant(X[:22]), batch_size=3, verbose=0),
        "one row": model.predict(X[:1], verbose=0),
    }
    if strategy.is_chief:
        found["alone"] = model.predict(X[:22], verbose=0)
    found["called"] = model(X[:22]).numpy()
    mine = model.predict(rows.shard(2, strategy.worker_index).batch(8), verbose=0)
    found["gathered"] = strategy.gather(tf.constant(mine), axis=0).numpy()
    return {f"predicted {name}": value for name, value in found.items()}


def main():
    options = json.loads(sys.argv[1])
    folder, seen = Path(options["folder"]), {}
    tempfile.tempdir = options["scratch"]
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(), sync_period=2, averages={"ema": tfpara.EMA(0.5)}, timeout_seconds=120
    )
    model = make_model(strategy)

    seen["refused"] = refused(model, K.BackupAndRestore(folder / "backup"))
    chosen = callbacks_of(folder, options["url"])
    for _ in range(2):  # a second fit: CSVLogger appends, and all paths are the user's again
        model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=chosen)
        seen["paths"] = [str(c.filepath) for c in chosen if hasattr(c, "filepath")]
        # The end of fit is where all workers may read what was written in it.
        Slow.seconds = 1.0
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[K.ModelCheckpoint(folder / "f.keras")])
        Slow.seconds = 0.0
        written = keras.models.load_model(folder / "f.keras").get_weights()
        with strategy.weights(model, "global"):
            pairs = list(zip(written, model.get_weights(), strict=True))
        seen["after fit"] = all(np.array_equal(a, b) for a, b in pairs)
    seen["scores"] = np.array(Evaluating.scores)

    model.save(folder / "saved.keras")
    save_model(model, folder / "function.keras")
    model.save(folder / "old.h5")
    model.save(folder / "unzipped", zipped=False)
    model.save_weights(folder / "w.weights.h5")
    model.save_weights(folder / "shards.weights.json", max_shard_size=4e-5)
    model.export(folder / "exported")
    model.export(folder / "model.tflite", format="litert", verbose=False)
    tfpara.export(model, folder / "ema", which="ema")
    with strategy.weights(model, "ema"):
        if strategy.is_chief:  # as in a script that knows of workers
            model.save(folder / "chief.keras")
        seen["ema"] = model(X).numpy()
    encoder = keras.Model(model.inputs, model.layers[0].output)  # outside of the scope
    encoder.save(folder / "encoder.keras")
    words = make_lookup(strategy)
    words.export(folder / "words", verbose=False)
    tfpara.export(words, folder / "words too")
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    plain.save(folder / f"plain-{strategy.worker_index}.keras")  # A model of no strategy.
    strategy.barrier()
    for name in ("saved.keras", "function.keras", "chief.keras", "unzipped", "old.h5"):
        loaded = keras.models.load_model(folder / name, compile=False)
        seen[name] = loaded.predict(X, verbose=0)
    with strategy.scope():
        again = keras.models.load_model(folder / "saved.keras")
    again.fit(X, Y, batch_size=16, verbose=0)
    again.load_weights(folder / "shards.weights.json")
    seen["sharded"] = again.predict(X, verbose=0)
    for name in ("exported", "ema"):
        served = tf.saved_model.load(str(folder / name))
        seen[f"served {name}"] = served.serve(X).numpy()
    for name in ("words", "words too"):  # whose tables were made on the chief
        served = tf.saved_model.load(str(folder / name))
        seen[f"served {name}"] = served.serve(tf.constant([["a"], ["c"]])).numpy()

    seen |= predicted(strategy, model)
    for k in range(options["rounds"]):
        model.fit(
            *(X, Y),
            batch_size=16,
            verbose=0,
            callbacks=[K.ModelCheckpoint(folder / "rounds" / f"fit{k}.keras")],
        )
        model.save(folder / "rounds" / f"saved{k}.keras")
        model.save(folder / "rounds" / "over.keras")
        model.export(folder / "rounds" / f"exported{k}", verbose=False)
    np.savez(options["out"], **seen)
    strategy.barrier()


if __name__ == "__main__":
    main()
