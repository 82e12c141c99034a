"""A worker that passes data of every kind to `fit`, and writes which rows it trained on."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import kinds_of_data as kinds
import numpy as np
import tensorflow as tf

import tfpara


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def refusals(strategy, model):
    """Returns the messages for data that are refused, by what is wrong, the same on all workers."""
    rank = strategy.worker_index
    x, y, _ = kinds.arrays()
    mine = x[rank::2], y[rank::2]
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    rng = np.random.default_rng(rank)
    processes = kinds.Batches((x, y), workers=2, use_multiprocessing=True)

    def drawn():
        while True:
            chosen = rng.permutation(len(x))[:8]
            yield x[chosen], y[chosen]

    cases = {
        "arrays of this worker": lambda: model.fit(*mine, verbose=0),
        "batch sizes": lambda: model.fit(x, y, batch_size=8 + rank, verbose=0),
        "shard": lambda: model.fit(rows.shard(2, rank).batch(8), verbose=0),
        "slices": lambda: model.fit(tf.data.Dataset.from_tensor_slices(mine).batch(8), verbose=0),
        "shuffle seeds": lambda: model.fit(rows.shuffle(9, seed=rank).batch(8), verbose=0),
        "PyDataset of this worker": lambda: model.fit(kinds.Batches(mine, batch=4), verbose=0),
        "generator of this worker": lambda: model.fit(kinds.generator(mine), verbose=0),
        "generator that draws": lambda: model.fit(drawn(), steps_per_epoch=2, verbose=0),
        "evaluate": lambda: model.evaluate(*mine, verbose=0),
        "processes": lambda: model.fit(processes, verbose=0),
        "unbatched": lambda: model.fit(rows, verbose=0),
        "read again": lambda: model.fit(kinds.generator((x, y)), epochs=2, verbose=0),
    }
    found = {name: refused(call) for name, call in cases.items()}
    return found


def main():
    options = json.loads(sys.argv[1])
    devices = [f"CPU:{k}" for k in range(options["devices"])]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * len(devices),
    )
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(),
        sync_period=2,
        devices=devices,
        timeout_seconds=120,
        balance=options.get("balance", False),
    )
    model = kinds.make(strategy)
    found = {"trained": {}}
    for kind in options["kinds"]:
        found["trained"][kind] = kinds.trained(model, kind, strategy)
    if "balance" in options:
        found["refused"] = {
            kind: refused(lambda kind=kind: kinds.trained(model, kind, strategy))
            for kind in options["not dealt"]
        }
        Path(options["out"]).write_text(json.dumps(found, default=float))
        return
    if options["devices"] == 1 and not options.get("unlike"):
        found["refused"] = refusals(strategy, model)
        # Refused data change nothing: the run goes on. The order of arrays is by the chief's seed.
        keras.utils.set_random_seed(strategy.worker_index)
        found["trained"]["arrays"] = kinds.trained(model, "arrays", strategy)
    x, y, w = kinds.arrays()
    model.rows()
    model.evaluate(kinds.Batches((x, y, w), workers=2), verbose=0)
    found["evaluated"] = model.rows()
    split = kinds.Epochs()
    model.fit(x, y, batch_size=8, validation_split=0.25, verbose=0, callbacks=[split])
    found["split"] = [split.rows[0], split.validated[0]]
    found["predicted"] = len(model.predict(kinds.Batches((x,), workers=2), verbose=0))
    Path(options["out"]).write_text(json.dumps(found, default=float))


if __name__ == "__main__":
    main()
