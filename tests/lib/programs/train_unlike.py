"""A worker of so many devices that trains on data of several kinds, evaluates and predicts.

Options (JSON): devices, trainings (each: name, rule and optimizer (Python expressions), options of
the strategy), kind (of the devices, which it pretends to have), directory (of checkpoints), killed
(the syncs after which the process kills itself), whole (whether it also trains on other kinds of
data), out (npz path; `{rank}` is replaced), first (number of the first device), timeout_seconds,
connect_seconds (the limit of `startup.guard`).
"""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.cluster import startup
from tfpara.sync.simulation import make_devices
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from counting import Kill  # noqa: E402

ROWS, BATCH = 50, 12  # the last batch has 2 rows, which is fewer than there are replicas


def arrays(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, rng.integers(0, 4, rows).astype("int32"), rng.uniform(0.5, 2.0, rows)


class Batches(keras.utils.PyDataset):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def __len__(self):
        return -(-len(self.data[0]) // BATCH)

    def __getitem__(self, index):
        return tuple(a[index * BATCH : (index + 1) * BATCH] for a in self.data)


def network():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", name="hidden"),
            layers.BatchNormalization(momentum=0.9, name="normal"),
            layers.Dropout(0.3, seed=3, name="noise"),
            layers.Dense(4, name="output"),
        ],
        name="model",
    )


def compile_with(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])


def evaluations(model, whole):
    """Returns the losses and accuracies of arrays; if `whole`, also of other kinds of data."""
    x, y, w = arrays(41, 1)
    found = [model.evaluate(x, y, sample_weight=w, batch_size=BATCH, verbose=0)]
    if whole:
        rows = tf.data.Dataset.from_tensor_slices((x, y, w))
        more = (rows.batch(7), Batches((x, y, w)))
        found += [model.evaluate(data, verbose=0) for data in more]
    return np.array(found)


def train(strategy, training, options):
    """Returns what a training ends with, by name."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network()
        compile_with(model, eval(training["optimizer"]))
    x, y, w = arrays()
    callbacks = []
    if "directory" in options:
        callbacks.append(tfpara.callbacks.Checkpoint(options["directory"], every_syncs=1))
    if "killed" in options:
        callbacks.append(Kill(options["killed"]))
    given = {"verbose": 0, "callbacks": callbacks}
    histories = [
        model.fit(x, y, sample_weight=w, batch_size=BATCH, epochs=3, **given).history,
    ]
    if not callbacks:
        histories.append(model.fit(x[:31], y[:31], batch_size=BATCH, **given).history)
    if options.get("whole"):
        rows = tf.data.Dataset.from_tensor_slices((x, y))
        own = strategy.minibatches_by_epoch(lambda epoch: rows.shuffle(50, seed=epoch).batch(4))
        more = [(Batches((x, y, w)), 2), (rows.batch(BATCH), 1), (own, 2)]
        histories += [
            model.fit(data, epochs=epochs, validation_data=(x[:7], y[:7]), **given).history
            for data, epochs in more
        ]
    found = {f"loss {k}": each["loss"] for k, each in enumerate(histories)}
    found |= {f"validation {k}": each.get("val_loss", 0) for k, each in enumerate(histories)}
    for which in ("global", *strategy.averages):
        with strategy.weights(model, which):
            found |= {f"{which} {k}": value for k, value in enumerate(model.get_weights())}
    with strategy.weights(model, "global"):
        found["evaluated"] = evaluations(model, options.get("whole"))
        found["predicted"] = strategy.predict(model, x)
    variables = [*model.variables, *model.optimizer.variables]
    for k, variable in enumerate(variables):
        components = strategy.experimental_local_results(variable.value)
        for replica, component in zip(strategy.local_replica_ids, components, strict=True):
            found[f"replica {replica}, {k}"] = component.numpy()
    of_replica = strategy.run(
        lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 1
    )
    found["sum of replicas"] = strategy.reduce("SUM", of_replica, axis=None)
    batch = strategy.extended.batch_reduce_to("SUM", [(of_replica, "CPU:0"), (of_replica, "CPU:0")])
    np.testing.assert_array_equal(batch, [found["sum of replicas"]] * 2)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    found["numbers"] = strategy.gather(
        strategy.run(lambda value: tf.reshape(value, [1]), args=(values,)), 0
    )
    strategy.broadcast_replica(model, 1)
    found |= {f"of replica 1, {k}": value for k, value in enumerate(model.get_weights())}
    return {f"{training['name']}: {name}": value for name, value in found.items()}


def main():
    options = json.loads(sys.argv[1])
    make_devices(options["devices"])
    startup._CONNECT_SECONDS = options.get("connect_seconds", 120.0)
    first = options.get("first", 0)
    if options.get("kind"):
        PeriodicSyncExtended._local_device_type = property(
            lambda extended: options["kind"], lambda extended, kind: None
        )
    found = {}
    for training in options["trainings"]:
        strategy = tfpara.PeriodicSyncStrategy(
            eval(training["rule"]),
            sync_period=2,
            averages={"ema": tfpara.EMA(0.8)},
            devices=[f"CPU:{first + k}" for k in range(options["devices"])],
            timeout_seconds=options.get("timeout_seconds", 60),
            startup_timeout_seconds=60,
            **training.get("options", {}),
        )
        found |= train(strategy, training, options)
    np.savez(options["out"].replace("{rank}", str(strategy.worker_index)), **found)


if __name__ == "__main__":
    main()
