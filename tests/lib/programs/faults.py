"""A worker that trains for a while and then makes a fault.

Options (JSON): those of PeriodicSyncStrategy (rule is an expression), units (of the model),
local_devices, look (whether it looks at the global model after a failure as well), schedules
(whether rates are searched and fall, an epoch is given up, and data are uneven), momentum (of the
optimizer), others (whether the model has a frozen layer and a normalisation), numpy (whether
tensors behave as arrays of NumPy, which a process cannot undo), and fault: null,
"nan" (weights become NaN), "kill" (SIGKILL of itself), "stop" (SIGSTOP of itself), "load" (other
weights than the chief's), "frozen" (in the frozen layer), "statistics" (of the normalisation),
"leave" (exits with 0 in the middle of training), "absent" (before it), "sleep" (longer than the
others wait), "rate" (a learning rate of its own), "own" (none, but data of its own), "empty" (no
data of its own).
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.sync.simulation import make_devices


class Fault(keras.callbacks.Callback):
    def __init__(self, strategy, kind):
        super().__init__()
        self.strategy, self.kind, self.epoch = strategy, kind, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4 and (self.epoch == 0 or self.kind != "stop"):
            print("fault", self.kind, flush=True)
            if self.kind == "nan":
                self.model.layers[-1].kernel.value.values[0].assign(
                    np.full((7, 4), np.nan, "float32")
                )
            elif self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.kind == "leave":
                sys.exit(0)
            elif self.kind == "sleep":
                time.sleep(15)
            elif self.kind == "rate":
                self.model.optimizer.learning_rate = 0.05


def schedules():
    """Returns callbacks: each worker sets rates of its own, and an epoch is given up."""

    class Scores(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = 1.0 + epoch

    class Falling(keras.callbacks.Callback):
        """Sets the rate by the number of minibatches that this worker has taken in all epochs."""

        taken = 0

        def on_epoch_begin(self, epoch, logs=None):
            rate = self.model.optimizer.learning_rate
            self.first = float(keras.ops.convert_to_numpy(rate))

        def on_train_batch_begin(self, batch, logs=None):
            self.taken += 1
            self.model.optimizer.learning_rate = self.first * 0.999**self.taken

    rule = tfpara.schedules.NewbobRule(reject_worse=True)
    return [Falling(), Scores(), tfpara.callbacks.Newbob("score", rule=rule)]


def main():
    options = json.loads(sys.argv[1])
    if options.pop("numpy", False):
        tf.experimental.numpy.experimental_enable_numpy_behavior()
    scheduled = options.pop("schedules", False)
    fault = options.pop("fault", None)
    units, momentum = options.pop("units", 7), options.pop("momentum", 0.0)
    others = options.pop("others", False)
    bins = options.pop("bins", None)
    local, look = options.pop("local_devices", 1), options.pop("look", False)
    make_devices(local)
    rule = eval(options.pop("rule", "tfpara.BSP()"))
    strategy = tfpara.PeriodicSyncStrategy(
        rule,
        devices=[f"CPU:{device}" for device in range(local)],
        **{"sync_period": 3, "timeout_seconds": 60, "startup_timeout_seconds": 60, **options},
    )
    with strategy.scope():
        frozen, norm = keras.layers.Dense(6, trainable=False), keras.layers.BatchNormalization()
        first = [keras.Input((6,)), *([frozen, norm] if others else [])]
        if bins:
            first += [keras.layers.Discretization(bins), keras.layers.Rescaling(1.0)]
        model = keras.Sequential(
            [*first, keras.layers.Dense(units), keras.layers.Dense(4, name="last")]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum), "mse")
    if fault == "load":
        model.set_weights([w + 1.0 for w in model.get_weights()])
    elif fault == "frozen":
        frozen.set_weights([w + 1.0 for w in frozen.get_weights()])
    elif fault == "statistics":
        norm.moving_mean.assign(norm.moving_mean + 1.0)
    x = np.random.default_rng(0).normal(size=(400, 6)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :4])).batch(8)
    if fault in ("own", "empty"):
        count = 0 if fault == "empty" else 20
        data = strategy.distribute_datasets_from_function(lambda _, all=data: all.take(count))
    if fault == "absent":
        return
    before = (None, "load", "frozen", "statistics", "own", "empty")
    callbacks = [Fault(strategy, fault)] if fault not in before else []
    if scheduled:
        callbacks += schedules()
        count = 20 + strategy.worker_index  # minibatches; the second worker has one more
        data = strategy.distribute_datasets_from_function(lambda _, all=data: all.take(count))
    try:
        log = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
    finally:
        if look:
            with strategy.weights(model, "global"):
                print("global model seen", flush=True)
    print("trained", log.get("learning_rate"), flush=True)


if __name__ == "__main__":
    main()
