"""One worker of the suite `balance`.

Its steps take at least `step_seconds`, as on a device of its own. Otherwise the machine's cores,
which all workers share, would set the speeds.

Options: `sizes`, the widths of a dense network; `batch`; `sync_period`; `blocks`, the number of
timed blocks, if all workers take equally many steps; `step_seconds` of each worker; `changes`,
whether the workers swap their `step_seconds` halfway; `balance`, of the strategy; `seed` of weights
and data.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np

import tfpara
from scripts.benchmarks.peers.process import wait_for_the_others


class _Pace(keras.callbacks.Callback):
    """Makes a step, without its sync, take `seconds`, or, from time `change` on, `later`."""

    def __init__(self, strategy: tfpara.PeriodicSyncStrategy, seconds: float, later: float) -> None:
        super().__init__()
        self.strategy, self.seconds, self.later = strategy, seconds, later
        self.change = float("inf")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.began, self.before = time.time(), self.strategy.statistics()
        self.step_began = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        least = self.seconds if time.time() < self.change else self.later
        time.sleep(max(0.0, self.step_began + least - self._now()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended, self.after = time.time(), self.strategy.statistics()

    def _now(self) -> float:
        return time.time() - self.strategy.statistics().sync_seconds


def main() -> None:
    """Prints READY, waits for a line, trains, and prints the figures as a line of JSON."""
    print(json.dumps(_figures(json.loads(sys.argv[1]))), flush=True)


def _figures(options: dict[str, Any]) -> dict[str, float]:
    period, seconds, blocks = (options[k] for k in ("sync_period", "step_seconds", "blocks"))
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(), sync_period=period, balance=options["balance"]
    )
    keras.utils.set_random_seed(options["seed"])
    first, *hidden, last = options["sizes"]
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu") for width in hidden]
        model = keras.Sequential([keras.Input((first,)), *layers, keras.layers.Dense(last)])
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rank, batch = strategy.worker_index, options["batch"] * strategy.num_workers
    later = seconds[-1 - rank] if options["changes"] else seconds[rank]
    pace = _Pace(strategy, seconds[rank], later)

    def fit(blocks: int) -> None:
        x, y = _points(options, blocks * period * batch, [options["seed"], blocks])
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[pace])

    fit(2)  # these blocks, which are not timed, compile the step and the sync
    wait_for_the_others()
    fit(3)  # in these blocks the strategy measures the speeds of the workers
    half = blocks * period * len(seconds) / sum(1.0 / each for each in seconds) / 2
    pace.change = time.time() + half
    fit(blocks)
    with strategy.weights(model, "global"):
        loss = model.evaluate(*_points(options, 4000, [0]), batch_size=1000, verbose=0)
    before, after, took = pace.before, pace.after, pace.ended - pace.began
    return {
        "began": pace.began,
        "ended": pace.ended,
        "samples": (after.steps - before.steps) * options["batch"],
        "own_seconds": took - (after.sync_seconds - before.sync_seconds),
        "wait_fraction": (after.wait_seconds - before.wait_seconds) / took,
        "loss": loss,
    }


def _points(options: dict[str, Any], count: int, seed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns points and their classes, which a fixed random network gives them."""
    first, last = options["sizes"][0], options["sizes"][-1]
    fixed, draw = np.random.default_rng(0), np.random.default_rng(seed)
    inner, outer = fixed.normal(size=(first, 16)), fixed.normal(size=(16, last))
    x = draw.normal(size=(count, first))
    scores = np.tanh(2.0 * x @ inner / np.sqrt(first)) @ outer + draw.normal(size=(count, last))
    return x.astype(np.float32), scores.argmax(1).astype(np.int32)


if __name__ == "__main__":
    main()
