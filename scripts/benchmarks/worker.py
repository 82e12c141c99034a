"""One process of a benchmark: trains the papers' DNN on data in memory and prints its figures.

scripts.benchmarks starts it, and writes a line to its standard input when all processes are ready.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from scripts.benchmarks.peers.process import peak_memory_bytes, sent_bytes, wait_for_the_others


def main(options: dict[str, Any]) -> None:
    """Measures the system in the options; prints READY, waits for a line, prints a JSON line."""
    figures = {
        "plain": _train,
        "tfpara": _train,
        "all_reduce": _all_reduce,
        "syncs": _syncs,
        "memory": _memory,
        "input": _input,
        "training": _demo_training,
    }[options["system"]]
    print(json.dumps(figures(options)), flush=True)


def devices_of_cpu(count: int) -> list[str]:
    """Divides the CPU into logical devices, before TensorFlow starts; returns their names."""
    import tensorflow as tf

    devices = [f"CPU:{k}" for k in range(count)]
    if count > 1:
        parts = [tf.config.LogicalDeviceConfiguration() for _ in devices]
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, parts)
    return devices


def _train(options: dict[str, Any]) -> dict[str, Any]:
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    import tfpara

    devices = devices_of_cpu(options.get("devices", 1))
    strategy, shortest = None, 1
    if options["system"] == "tfpara":
        given = options.get("strategy", {}) | ({"devices": devices} if len(devices) > 1 else {})
        shortest = given.get("device_sync_period", 1)
        strategy = tfpara.PeriodicSyncStrategy(
            tfpara.BSP(), sync_period=options["sync_period"], **given
        )
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _pausing(options) if "pause_seconds" in options else _dnn(options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    batch, steps = options["batch"], options["steps"]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, options.get("inputs", 1320))).astype("float32")
    y = rng.integers(0, options.get("classes", 5723), batch).astype("int32")

    def repeated(_: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    data = strategy.distribute_datasets_from_function(repeated) if strategy else repeated()
    long_block = strategy is not None and "first" in options
    # The model first trains a few short blocks, because the first syncs take longer: TensorFlow
    # still prepares their functions. With overlap, the first merges of a sync's result into the
    # weights take longer for the same reason.
    if strategy:
        strategy.set_sync_period(shortest)
    warm_up = shortest * (1 + options.get("warm_up", 3))
    model.fit(data, epochs=1, steps_per_epoch=warm_up, verbose=0)
    if strategy and not long_block:
        strategy.set_sync_period(options["sync_period"])
    wait_for_the_others()
    # The time is measured from the end of the first block to the end of a later one. So it contains
    # one sync for each timed block, and neither the beginning nor the end of `fit`. With overlap,
    # the sync of the first block ends within the measured time, and the sync of the last block ends
    # after it.
    #
    # The first block has `first` minibatches. It is not timed, so it may be shorter than the
    # others. If blocks are long, `first` is 1, which saves time.
    first = options.get("first") or options["sync_period"] or 1
    marks: list[tuple[float, Any, int, float]] = []

    def mark(batch: int, logs: Any) -> None:
        del logs
        if batch in (first - 1, first + steps - 1):
            found = strategy.statistics() if strategy else None
            marks.append((time.time(), found, sent_bytes(options), time.process_time()))
        if long_block and batch == first - 1:
            strategy.set_sync_period(options["sync_period"])

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=mark)]
    model.fit(data, epochs=1, steps_per_epoch=first + steps, verbose=0, callbacks=callbacks)
    (began, before, sent_before, used_before), (ended, now, sent, used) = marks
    figures = {
        "began": began,
        "ended": ended,
        "samples": steps * batch * len(devices),
        "sent_bytes": sent - sent_before,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if strategy:
        syncs = now.syncs - before.syncs
        waited = now.wait_seconds - before.wait_seconds
        synced = now.sync_seconds - before.sync_seconds
        figures["sync_ms"] = 1000 * (synced - waited) / syncs
        figures["wait_ms"] = 1000 * waited / syncs
        figures["sync_fraction"] = synced / (ended - began)
        if "pause_seconds" in options:
            figures["processor_ms"] = 1000 * (used - used_before) / syncs
    return figures


def _all_reduce(options: dict[str, Any]) -> dict[str, Any]:
    """Measures a bare all-reduce of the model's bytes, in buckets that travel in parallel."""
    import tensorflow as tf

    import tfpara
    from tfpara.sync.one_sync.buckets import Layout

    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=1, **options.get("strategy", {})
    )
    layout = Layout([tf.TensorShape([options["elements"]])], options["bucket_bytes"])
    buffers = [tf.ones([size]) for size in layout.bucket_sizes]
    collectives = strategy.extended.links.collectives

    @tf.function
    def reduce() -> tf.Tensor:
        return tf.add_n([b[0] for b in collectives.all_reduce(buffers, "bare")])

    times = []
    reduce()
    wait_for_the_others()
    for _ in range(options["steps"]):
        collectives.barrier("bare")
        began = time.perf_counter()
        reduce().numpy()
        times.append(time.perf_counter() - began)
    times.sort()
    return {"sync_ms": 1000 * times[len(times) // 2], "buckets": len(buffers)}


def _averages(which: str) -> dict[str, Any] | None:
    import tfpara

    three = {"ema-0.9": tfpara.EMA(0.9), "ema-0.99": tfpara.EMA(0.99), "ma": tfpara.MA()}
    return {"no": None, "one": {"ema": tfpara.EMA(0.99)}, "three": three}[which]


def _dnn(options: dict[str, Any]) -> Any:
    """Builds the papers' network, or one of the sizes in the options."""
    from models.dnn import dnn

    sizes = {"layers": options.get("layers", 6), "width": options.get("width", 1024)}
    return dnn(options.get("inputs", 1320), options.get("classes", 5723), **sizes)


def _pausing(options: dict[str, Any]) -> Any:
    """Builds the network with a step that only waits, as the CPU does while a GPU computes."""
    import keras
    import tensorflow as tf

    def pause() -> None:
        # TensorFlow calls this function for one device after the other. So each call waits for a
        # share of `pause_seconds`, and the calls of all devices together wait for the whole time.
        time.sleep(options["pause_seconds"] / options.get("devices", 1))

    class Pausing(keras.Model):
        def train_step(self, data: Any) -> dict[str, tf.Tensor]:
            del data
            tf.py_function(pause, [], [])
            return {"loss": tf.zeros([])}

    network = _dnn(options)
    return Pausing(network.inputs, network.outputs)


def _compiled(strategy: Any, options: dict[str, Any]) -> Any:
    import keras

    with strategy.scope():
        model = _dnn(options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def _syncs(options: dict[str, Any]) -> dict[str, Any]:
    """Measures syncs: trains with tiny minibatches and a sync after every second one."""
    import numpy as np
    import tensorflow as tf

    import tfpara

    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(),
        sync_period=2,
        averages=_averages(options["averages"]),
        **options["strategy"],
    )
    model = _compiled(strategy, options)
    x, y = np.ones((4, options.get("inputs", 1320)), "float32"), np.zeros(4, "int32")
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors((x, y)).repeat()
    )
    # The first 17 syncs also measure the distances between the replicas, so they take longer.
    # Therefore 18 untimed syncs come first. If fewer than 18 syncs are timed, the number of untimed
    # syncs is the same as that of the timed ones, to save time.
    warm_up = min(18, options["syncs"])
    model.fit(data, epochs=1, steps_per_epoch=2 * warm_up, verbose=0)
    before = strategy.statistics()
    wait_for_the_others()
    model.fit(data, epochs=1, steps_per_epoch=2 * options["syncs"], verbose=0)
    now = strategy.statistics()
    waited = now.wait_seconds - before.wait_seconds
    synced = now.sync_seconds - before.sync_seconds
    syncs = now.syncs - before.syncs
    return {"sync_ms": 1000 * (synced - waited) / syncs, "wait_ms": 1000 * waited / syncs}


def _memory(options: dict[str, Any]) -> dict[str, Any]:
    import tfpara

    strategy = tfpara.simulate(
        options["replicas"],
        tfpara.BMUF(),
        sync_period=1,
        aggregation=options["aggregation"],
        averages={"ema": tfpara.EMA(0.99), "ma": tfpara.MA()},
    )
    held = strategy.state_bytes(_compiled(strategy, options))
    wait_for_the_others()
    return {"state_bytes": max(held)}


def _input(options: dict[str, Any]) -> dict[str, Any]:
    """Measures the reading of an epoch of shuffled, spliced, normalised minibatches on one core."""
    import os

    import tensorflow as tf

    from input import index, pipeline

    corpus = index.read(options["corpus"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    single = tf.data.Options()
    single.threading.private_threadpool_size = 1
    single.autotune.enabled = False
    wait_for_the_others()
    plan = {"num_replicas": 1, "replica_ids": [0], "sync_period": 20, "seed": 0}
    data = [
        pipeline.minibatches(corpus, "train", minibatch=options["batch"], epoch=epoch, **plan)
        for epoch in range(2)
    ]
    for _ in data[0].take(1):
        pass
    began = time.perf_counter()
    frames = sum(int(labels.shape[0]) for _, labels in data[1].with_options(single))
    return {"frames_per_second": frames / (time.perf_counter() - began)}


def _demo_training(options: dict[str, Any]) -> dict[str, Any]:
    """Measures the training of the demo's model on frames in memory with one thread."""
    import keras
    import numpy as np
    import tensorflow as tf

    from input import index
    from models.dnn import dnn

    corpus = index.read(options["corpus"])
    width, batch, steps = 11 * corpus.feature_dim, options["batch"], options["steps"]
    model = dnn(width, corpus.num_classes, layers=4, width=512)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
    x, y = np.ones((batch, width), "float32"), np.zeros(batch, "int32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(data, steps_per_epoch=8, verbose=0)
    wait_for_the_others()
    began = time.perf_counter()
    model.fit(data, steps_per_epoch=steps, verbose=0)
    return {"frames_per_second": steps * batch / (time.perf_counter() - began)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
