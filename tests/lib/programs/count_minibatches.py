"""A worker that counts minibatches in the weights; see `counting`.

Options (JSON): minibatches (of an epoch), epochs, period, uneven (whether minibatches differ in
their rows), options (of the strategy), elastic (settings of a run whose members change),
checkpoints (a directory), killed (for each rank that kills itself, the syncs after which it does),
devices (of this worker), pauses (seconds of each rank after a call), execution (minibatches of a
call), adam (whether Adam trains, under BMUF), simulated (how many replicas of one process play the
workers), out (npz path; `{rank}` is replaced).
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np

import tfpara
from tfpara.sync.simulation import make_devices

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from counting import Kill, counting_model, minibatches  # noqa: E402


class Pause(keras.callbacks.Callback):
    """Sleeps after each minibatch."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


class Numbers(keras.callbacks.Callback):
    """Keeps the numbers of the minibatches with which each call begins and ends."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun = batch  # after the last one Keras finds that the data have ended

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append((self.begun, batch))


def main():
    options = json.loads(sys.argv[1])
    count, epochs = options["minibatches"], options.get("epochs", 1)
    uneven = options.get("uneven", False)
    settings = {"sync_period": options["period"], **options.get("options", {})}
    if "devices" in options:
        make_devices(options["devices"])
        settings["devices"] = [f"CPU:{k}" for k in range(options["devices"])]
    rule = tfpara.BMUF() if options.get("adam") else tfpara.BSP()
    if "simulated" in options:
        strategy = tfpara.simulate(options["simulated"], rule, **settings)
    else:
        strategy = tfpara.PeriodicSyncStrategy(
            rule,
            timeout_seconds=60,
            elastic=tfpara.Elastic(**options["elastic"]) if "elastic" in options else None,
            **settings,
        )
    with strategy.scope():
        model = counting_model(count * epochs)
        if options.get("adam"):
            # The rate falls by the steps, which a sync sets to the mean of the replicas.
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
            model.compile(keras.optimizers.Adam(rate), loss=model.loss)
    model.steps_per_execution = options.get("execution", 1)
    rank, numbers = strategy.worker_index, Numbers()
    callbacks = [numbers]
    if "checkpoints" in options:
        callbacks.append(tfpara.callbacks.Checkpoint(options["checkpoints"], every_syncs=1))
    if str(rank) in options.get("killed", {}):
        callbacks.append(Kill(options["killed"][str(rank)]))
    if "pauses" in options:
        callbacks.append(Pause(options["pauses"][rank]))
    data = strategy.minibatches_by_epoch(lambda epoch: minibatches(epoch * count, count, uneven))
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    found = {}
    for which in ("local", "global"):
        with strategy.weights(model, which):
            found[which] = model.get_weights()[0]
    found["syncs"] = strategy.statistics().syncs
    found["record"], found["steps"] = strategy.balance_record, strategy.statistics().steps
    found["calls"] = numbers.calls
    np.savez(options["out"].replace("{rank}", str(rank)), **found)


if __name__ == "__main__":
    main()
