"""A worker that trains with `tfpara.callbacks.Trace`; worker 1 comes late to one sync.

Options (JSON): log_dir, steps (first and last, or null), aggregation, late_step, late_seconds,
minibatches (in an epoch), sync_period, epochs, overlap, width (of the hidden layer).
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfpara


class Late(keras.callbacks.Callback):
    """Sleeps on worker 1 before a step."""

    def __init__(self, worker, options):
        super().__init__()
        self.wanted = options["late_step"] if worker == 1 else None
        self.seconds = options["late_seconds"]

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.wanted:
            time.sleep(self.seconds)


def main():
    options = json.loads(sys.argv[1])
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(),
        sync_period=options["sync_period"],
        averages={"ema": tfpara.EMA(0.9)},
        aggregation=options["aggregation"],
        overlap=options.get("overlap", False),
    )
    with strategy.scope():
        hidden = keras.layers.Dense(options.get("width", 6))
        model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((4, 8), "float32"), np.zeros(4, "int32")
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors((x, y)).repeat()
    )
    steps = options["steps"] and tuple(options["steps"])
    callbacks = [
        Late(strategy.worker_index, options),
        tfpara.callbacks.Trace(options["log_dir"], steps=steps),
    ]
    model.fit(
        data,
        epochs=options["epochs"],
        steps_per_epoch=options["minibatches"],
        verbose=0,
        callbacks=callbacks,
    )


if __name__ == "__main__":
    main()
