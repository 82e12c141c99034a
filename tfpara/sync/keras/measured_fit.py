"""A callback that measures a `fit` for `tfpara-plan --measure`, and then ends the program."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfpara.measuring import MARK
from tfpara.sync.one_sync.buckets import Layout
from tfpara.sync.one_sync.replicas import BUCKET_BYTES
from tfpara.sync.one_sync.statistics import NO_SYNCS, SyncStatistics
from tfpara.typing import Logs

_LONGEST_PERIOD = 10  # in minibatches; longer periods would only take more time
_WARM_BLOCKS = 4  # number of blocks before the measurement
_STEPS, _BLOCKS = 40, 6  # the smallest numbers of steps and of blocks that are measured
_REDUCES = 9  # number of all-reduces of each size; the median of their times counts
_REDUCED_BYTES = 4 << 20  # with fewer bytes an all-reduce would show only the link's latency


class MeasuredFit(keras.callbacks.Callback):
    """Measures blocks of a `fit` in place of its callbacks, prints the times, and ends the program.

    The callbacks are left out, so that no checkpoint is read and nothing is written. What is
    measured is the time from the end of a step to the end of the next in an epoch, with their syncs
    and data, without callbacks. Longer periods are shortened to 10 minibatches or half an epoch.
    """

    async_safe = False

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy
        self._blocks = 0  # the measurement ends after this number of blocks
        self._seconds = 0.0
        self._counted = self._former = NO_SYNCS
        self._left: float | None = None  # when `on_train_batch_end` last returned in this epoch
        self._told = 0  # the number of the last block that was printed

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._strategy.company.changes:
            self._fail("elastic= is not measured, since its syncs are not those of fixed workers")
        asked = self._strategy.sync_period or 1
        steps = self.params["steps"] or 2 * _LONGEST_PERIOD
        period = min(asked, _LONGEST_PERIOD, max(1, steps // 2))
        if period < asked:
            with contextlib.suppress(ValueError):  # raised if other settings need a longer period
                self._strategy.set_sync_period(period)
        self._blocks = _WARM_BLOCKS + max(_BLOCKS, -(-_STEPS // period))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._left = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        entered = time.perf_counter()
        now = self._strategy.statistics()
        if now.syncs > _WARM_BLOCKS and self._left is not None:
            self._seconds += entered - self._left
            grown = (later - earlier for later, earlier in zip(now, self._former, strict=True))
            self._counted = self._counted.and_then(SyncStatistics._make(grown))
        self._former = now
        if self._strategy.is_chief and now.syncs > self._told:
            self._told = now.syncs
            _say({"block": min(now.syncs, self._blocks), "of": self._blocks})
        if now.syncs >= self._blocks:
            self._end()
        self._left = time.perf_counter()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._end()

    def _end(self) -> NoReturn:
        counted, strategy = self._counted, self._strategy
        if counted.syncs < 2:
            steps = strategy.statistics().steps
            self._fail(
                f"the script's fit is too short to measure, with {steps} minibatches of each "
                "worker: give it more epochs, or longer ones"
            )
        # If a sync is under way, all workers complete it when they enter this context. So no sync
        # runs beside the all-reduces that are measured below.
        with strategy.weights(self.model, "global"):
            pass
        steps, syncs = max(counted.steps, 1), max(counted.syncs, 1)
        # Frozen weights are not counted, because a sync does not exchange them.
        replicas = strategy.extended.models.trained(self.model).graph.replicas
        layouts = (replicas.layout, replicas.state_layout, replicas.slot_layout)
        nbytes = 4 * sum(layout.num_elements for layout in layouts)
        reduced = max(nbytes, _REDUCED_BYTES)
        reduces = [self._reduce_ms(size) for size in (reduced, 4)]
        _say(
            {
                "batch": counted.samples / steps,
                "step_ms": 1e3 * (self._seconds - counted.sync_seconds) / steps,
                "sync_ms": 1e3 * counted.sync_seconds / syncs,
                "bytes": nbytes,
                "reduce_bytes": reduced,
                **dict(zip(("reduce_ms", "empty_ms"), reduces, strict=True)),
            }
        )
        strategy.company.part()
        _leave()

    def _reduce_ms(self, nbytes: int) -> float:
        """Returns the milliseconds of an all-reduce of so many bytes, in buckets as in a sync."""
        layout = Layout([tf.TensorShape([nbytes // 4])], BUCKET_BYTES)
        buffers = [tf.ones([size]) for size in layout.bucket_sizes]
        collectives = self._strategy.extended.links.collectives

        @tf.function
        def reduce() -> tf.Tensor:
            return tf.add_n([b[0] for b in collectives.all_reduce(buffers, "measured")])

        times = []
        for _ in range(_REDUCES):
            collectives.barrier("measured")
            began = time.perf_counter()
            reduce().numpy()
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)

    def _fail(self, why: str) -> NoReturn:
        _say({"error": f"{why}."})
        _leave()


def _say(what: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(what)}", flush=True)


def _leave() -> NoReturn:
    """Ends the process, so that nothing of the script after `fit` runs."""
    for output in (sys.stdout, sys.stderr):
        output.flush()
    os._exit(0)
