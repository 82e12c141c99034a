"""A worker of the suite `faults`.

    python -m scripts.benchmarks.goodput_worker JSON

It trains a small network in steps of at least `step_seconds`, as on a device of its own. The time
of faster steps would depend on the cores, which all workers of the machine share.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.examples.drill import tell

_BATCH, _FEATURES, _CLASSES = 32, 64, 10
_SYNCS = 5  # number of syncs from one checkpoint to the next


class _Watch(keras.callbacks.Callback):
    """Keeps the pace of steps, and reports progress to the drill."""

    def __init__(self, strategy: tfpara.PeriodicSyncStrategy, seconds: float) -> None:
        super().__init__()
        self.strategy, self.seconds = strategy, seconds

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # The worker tells its process number only now, when the run has admitted it, because the
        # drill kills only workers that have told their number.
        tell(pid=os.getpid())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(max(0.0, self.begun + self.seconds - time.monotonic()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        tell(time=time.monotonic(), done=epoch + 1)
        if self.strategy.is_chief:
            tell(minibatches={"loss": float((logs or {})["val_loss"])})


def main() -> None:
    """Trains `epochs` epochs. A worker's share of an epoch is `epoch_steps` minibatches."""
    options = json.loads(sys.argv[1])
    workers = options["workers"]
    elastic = tfpara.Elastic(min_workers=1, max_workers=workers) if options["elastic"] else None
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(),
        sync_period=options["sync_period"],
        averages={"ema": tfpara.EMA(0.9)},
        elastic=elastic,
    )
    keras.utils.set_random_seed(options["seed"])
    with strategy.scope():
        hidden = [keras.layers.Dense(options["width"], "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((_FEATURES,)), *hidden, keras.layers.Dense(_CLASSES)])
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    count = options["epoch_steps"] * workers

    # After each kill, `data` is called again for the same epoch. The cache keeps the epoch's
    # points, so that they need not be made again.
    @functools.lru_cache(1)
    def points(epoch: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = _points(count * _BATCH, (1, options["seed"], epoch))
        return x.reshape(count, _BATCH, _FEATURES), y.reshape(count, _BATCH)

    def data(epoch: int, first: int) -> tf.data.Dataset:
        # Each worker takes only its own minibatches, as in a run whose workers read only their own
        # data.
        own = slice(first + strategy.local_replica_ids[0], None, strategy.num_replicas)
        x, y = points(epoch)
        return tf.data.Dataset.from_tensor_slices((x[own], y[own]))

    model.fit(
        strategy.datasets_by_epoch(data),
        epochs=options["epochs"],
        verbose=0,
        validation_data=_points(2000, (0,)),
        validation_batch_size=2000,
        callbacks=[
            tfpara.callbacks.Checkpoint(f"{options['out']}/checkpoints", every_syncs=_SYNCS),
            _Watch(strategy, options["step_seconds"]),
        ],
    )


def _points(count: int, seed: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns points and their classes, which a fixed random network gives them."""
    fixed = np.random.default_rng(0)
    first = fixed.normal(size=(_FEATURES, 32)) / 8.0
    second = fixed.normal(size=(32, _CLASSES))
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, _FEATURES))
    scores = np.tanh(2.0 * x @ first) @ second + 0.5 * draw.normal(size=(count, _CLASSES))
    return x.astype(np.float32), scores.argmax(1).astype(np.int32)


if __name__ == "__main__":
    tfpara.run(main)
