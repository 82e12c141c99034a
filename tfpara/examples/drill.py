"""Counts minibatches in a model's weights, for drills: each must count once, whatever happens.

    tfpara-chaos --every=20s --for=2m --faults=kill,stop,term --quiet_run -- \\
      tfpara-launch -n 4 --elastic --threads 1 -- python -m tfpara.examples.drill --out=drill-{run}

The model has a weight for each minibatch. A step of SGD with rate 1 on minibatch k raises weight k
by 1, or by 1000 if the weight is above 0 already. Under BSP a sync adds the mean over the replicas.
So at the end a minibatch that was lost has weight 0, one that was trained once has at most 1, and
one that was trained again after a sync has more.
"""

import argparse
import json
import os
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpara

PERIOD, AGAIN = 5, 1000.0


class Counter(keras.layers.Layer):
    """Returns the weights of minibatches, given their numbers."""

    def __init__(self, minibatches: int) -> None:
        super().__init__()
        self.minibatches = minibatches

    def build(self, shape: Any) -> None:
        self.counts = self.add_weight(shape=(self.minibatches,), initializer="zeros")

    def call(self, numbers: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.counts, numbers)


def loss(_: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Returns a loss whose gradient is -1 for a weight of 0, and -1000 for a larger weight."""
    return -counts * tf.stop_gradient(tf.where(counts > 0.0, AGAIN, 1.0))


class Progress(keras.callbacks.Callback):
    """Makes each step last `step_seconds`, and reports counted minibatches to `tfpara-chaos`."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.step_seconds, self.steps = step_seconds, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps % PERIOD == 0:
            counts = self.model.get_weights()[0]
            tell(time=time.monotonic(), pid=os.getpid(), done=int(np.count_nonzero(counts)))
        time.sleep(max(0.0, self.begun + self.step_seconds - time.monotonic()))


def tell(**line: object) -> None:
    """Adds a line to the file that `tfpara-chaos` reads, if there is one."""
    path = os.environ.get("TFPARA_CHAOS_PROGRESS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Trains, and prints how many minibatches were trained, lost and doubled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatches", type=int, default=1000, help="of an epoch")
    parser.add_argument("--step_seconds", type=float, default=0.05, help="shortest time of a step")
    parser.add_argument("--max_workers", type=int, help="most that train; others wait as spares")
    parser.add_argument("--fixed", action="store_true", help="without elastic=")
    parser.add_argument("--out", default="drill", help="folder of the checkpoints")
    options = parser.parse_args()

    elastic = None
    if not options.fixed:
        elastic = tfpara.Elastic(min_workers=1, max_workers=options.max_workers)
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=PERIOD, elastic=elastic)
    with strategy.scope():
        counter = Counter(options.epochs * options.minibatches)
        model = keras.Sequential([keras.Input((), dtype="int64"), counter])
        model.compile(keras.optimizers.SGD(1.0), loss)

    def minibatches(epoch: int) -> tf.data.Dataset:
        """Returns an epoch's minibatches: each has one row, its own number."""
        first = epoch * options.minibatches
        numbers = tf.data.Dataset.range(first, first + options.minibatches)
        return numbers.map(lambda number: (number[None], number[None]))

    model.fit(
        strategy.minibatches_by_epoch(minibatches),
        epochs=options.epochs,
        verbose=2,
        callbacks=[
            tfpara.callbacks.Checkpoint(f"{options.out}/checkpoints", every_syncs=50),
            Progress(options.step_seconds),
        ],
    )
    with strategy.weights(model, "global"):
        counts = model.get_weights()[0]
    found = {
        "trained": int((counts > 0.0).sum()),
        "lost": int((counts <= 0.0).sum()),
        "doubled": int((counts > 1.5).sum()),
    }
    if strategy.is_chief:
        tell(minibatches=found)
        print(f"minibatches: {found}", flush=True)


if __name__ == "__main__":
    tfpara.run(main)
