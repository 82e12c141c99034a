"""A worker that trains a small network on data it draws itself, and saves the results.

Options (JSON), or a list of them for one training after the other: rule (Python expression),
sync_period, local_devices, optimizer (expression), epochs, minibatches (a list for each replica of
minibatch sizes), local_state, averages, aggregation, overlap, fragments, compression,
device_sync_period, steps_per_execution, loss (expression), scales (of the inputs), evaluated
(whether on the same data afterwards), constrained (whether weights have constraints), with_reports
(the bytes of weights that may travel with reports), out (npz path, beside which the chief saves the
model).
Weights are initialised differently on each worker on purpose.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.sync.one_sync import weight_exchange
from tfpara.sync.simulation import make_devices

WITH_REPORTS_BYTES = weight_exchange.WITH_REPORTS_BYTES
# Those of `simulation.within`.
HIDDEN = {
    "kernel_constraint": keras.constraints.UnitNorm(axis=0),
    "bias_constraint": keras.constraints.NonNeg(),
}
OUTPUT = {"kernel_constraint": lambda weight: keras.ops.clip(weight, -0.3, 0.3)}


def batch(replica, step, size):
    rng = np.random.default_rng([replica, step])
    return rng.normal(size=(size, 6)).astype("float32"), rng.integers(0, 5, size).astype("int32")


def main():
    options = json.loads(sys.argv[1])
    trainings = options if isinstance(options, list) else [options]
    make_devices(max(training["local_devices"] for training in trainings))
    for training in trainings:
        train(training)


def train(options):
    local = options["local_devices"]
    weight_exchange.WITH_REPORTS_BYTES = options.get("with_reports", WITH_REPORTS_BYTES)
    strategy = tfpara.PeriodicSyncStrategy(
        eval(options["rule"]),
        sync_period=options["sync_period"],
        averages=eval(options.get("averages", "None")),
        local_state=options.get("local_state", "keep"),
        aggregation=options.get("aggregation", "auto"),
        overlap=options.get("overlap", False),
        fragments=options.get("fragments", 1),
        compression=options.get("compression", "none"),
        device_sync_period=options.get("device_sync_period"),
        devices=[f"CPU:{i}" for i in range(local)],
        data_plan=options.get("data_plan"),
        timeout_seconds=options.get("timeout_seconds", 60),
        startup_timeout_seconds=options.get("startup_timeout_seconds", 60),
    )
    keras.utils.set_random_seed(strategy.worker_index)
    hidden, output = (HIDDEN, OUTPUT) if options.get("constrained") else ({}, {})
    with strategy.scope():
        # It has a name, so that the names of variables do not depend on what was trained before.
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(7, activation="tanh", name="hidden", **hidden),
                keras.layers.Dense(5, name="output", **output),
            ],
            name="model",
        )
        model.compile(
            eval(options["optimizer"]),
            eval(options["loss"])
            if "loss" in options
            else keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=options.get("steps_per_execution", 1),
            jit_compile=options.get("jit_compile", "auto"),
        )
    initial = model.get_weights()
    sizes = [options["minibatches"][r] for r in strategy.local_replica_ids]
    steps = max(len(s) for s in sizes)

    def examples():
        for step in range(steps):
            for replica, of_replica in zip(strategy.local_replica_ids, sizes, strict=True):
                x, y = batch(replica, step, of_replica[step] if step < len(of_replica) else 0)
                yield x * np.float32(options.get("scales", 1.0)), y

    spec = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int32))
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_generator(examples, output_signature=spec)
    )
    history = model.fit(data, epochs=options.get("epochs", 1), verbose=0).history
    results = {f"initial_{i}": w for i, w in enumerate(initial)}
    if strategy.is_chief:  # as in a script that knows of workers: the others are not asked
        path = options["out"] + ".weights.h5"
        model.save_weights(path)
        layers = [keras.layers.Dense(7, name="hidden"), keras.layers.Dense(5, name="output")]
        saved = keras.Sequential([keras.Input((6,)), *layers])
        saved.load_weights(path)
        results |= {f"saved_{i}": w for i, w in enumerate(saved.get_weights())}
    for which in ["global", *strategy.averages]:
        with strategy.weights(model, which):
            results |= {f"{which}_{i}": w for i, w in enumerate(model.get_weights())}
    of_replicas = {f"_{i}": v for i, v in enumerate(model.trainable_variables)}
    of_replicas |= {f":{v.path.rpartition('/')[2]}": v for v in model.optimizer.variables}
    for name, variable in of_replicas.items():
        kind = "optimizer" if name.startswith(":") else "replica"
        for replica, component in zip(
            strategy.local_replica_ids,
            strategy.experimental_local_results(variable.value),
            strict=True,
        ):
            results[f"{kind}{replica}{name}"] = component.numpy()
    results["loss"] = history["loss"][-1]
    results["accuracy"] = history["accuracy"][-1]
    if options.get("evaluated"):
        results["evaluation"] = model.evaluate(data, verbose=0)
    results["syncs"] = strategy.statistics().syncs
    if {"compression", "with_reports"} & options.keys():
        results["bytes_sent"] = strategy.statistics().bytes_sent
    np.savez(options["out"], **results)


if __name__ == "__main__":
    main()
