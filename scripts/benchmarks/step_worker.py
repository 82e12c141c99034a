"""One process of the suite `step`: a step and a local sync of one worker, beside plain Keras' step.

Both models take turns in one process, so that other work on the machine slows both. A figure is the
fastest of the turns.

Options: `sizes`, the widths of a dense network; `batch`; `execution`, minibatches of a call
(`steps_per_execution`); `devices` of the worker; `steps` of a turn; `turns`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from scripts.benchmarks.peers.process import wait_for_the_others
from scripts.benchmarks.worker import devices_of_cpu

# Dense networks. The key is the number of weights in millions. The value has the widths of the
# layers, and the number of minibatches that are timed together (`steps`). The last network is the
# one in the papers of docs/papers.md.
NETWORKS: dict[str, tuple[tuple[int, ...], int]] = {
    "0.1": ((128, 256, 256, 50), 160),
    "1.6": ((440, 640, 640, 640, 800), 100),
    "12.5": ((1320, *[1024] * 6, 5723), 40),
}


def main(options: dict[str, Any]) -> None:
    """Prints READY, waits for a line, trains, and prints the figures as a line of JSON."""
    print(json.dumps(_figures(options)), flush=True)


def _figures(options: dict[str, Any]) -> dict[str, float]:
    import tfpara

    devices = devices_of_cpu(options["devices"])
    never = 1_000_000
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=never, devices=devices)
    plain, ours = _Trained(options, None), _Trained(options, strategy)
    wait_for_the_others()
    steps = options["steps"]
    times = [(ours.train(steps), plain.train(steps)) for _ in range(options["turns"])]
    figures: dict[str, float] = {}
    for name, model, own in zip(
        ("", "plain_"), (ours, plain), zip(*times, strict=True), strict=True
    ):
        wall, processor = (1000 * min(series) for series in zip(*own, strict=True))
        figures[f"{name}operations"] = model.operations()
        figures |= {f"{name}step_ms": wall, f"{name}processor_ms": processor}
    # The first 17 syncs also measure the distances between replicas, so they take longer. They are
    # not timed: about 18 steps, each with a sync, come before the timed ones.
    strategy.set_sync_period(1)
    ours.train(options["execution"] * max(1, 18 // options["execution"]))
    syncs = []
    for _ in range(options["turns"]):
        before = strategy.statistics()
        ours.train(max(options["execution"], min(steps, 20)))
        now = strategy.statistics()
        count = now.syncs - before.syncs
        syncs.append(
            (
                (now.sync_seconds - before.sync_seconds) / count,
                (now.wait_seconds - before.wait_seconds) / count,
            )
        )
    found = min(syncs)
    return {**figures, "sync_ms": 1000 * found[0], "wait_ms": 1000 * found[1]}


class _Trained:
    """A model and its data. The model is trained by `fit`, and only its steps are timed."""

    def __init__(self, options: dict[str, Any], strategy: Any) -> None:
        import keras
        import numpy as np

        first, *hidden, last = options["sizes"]
        rng = np.random.default_rng(0)
        self._batch, rows = options["batch"], options["batch"] * options["steps"]
        self._x = rng.normal(size=(rows, first)).astype("float32")
        self._y = rng.integers(0, last, rows).astype("int32")
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.layers.Dense(width, "relu") for width in hidden]
            self._model = keras.Sequential(
                [keras.Input((first,)), *layers, keras.layers.Dense(last)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
            self._model.compile(optimizer, loss, steps_per_execution=options["execution"])

        self.train(options["execution"])

    def train(self, steps: int) -> tuple[float, float]:
        """Trains an epoch of `steps` steps; returns a step's wall time and processor time, seconds.

        The beginning and the end of the epoch do not count.
        """
        import keras

        marks: list[tuple[float, float]] = []

        class Marks(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                marks.append((time.perf_counter(), time.process_time()))

        rows = steps * self._batch
        x, y = self._x[:rows], self._y[:rows]
        self._model.fit(x, y, batch_size=self._batch, verbose=0, callbacks=[Marks()])
        timed = max(1, len(marks) - 1) * self._model.steps_per_execution
        wall, processor = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
        return wall / timed, processor / timed

    def operations(self) -> int:
        """Returns the number of operations in a step's graph and the functions that it calls.

        Syncs, which are functions that TensorFlow does not inline, are left out.
        """
        (cell,) = (
            c.cell_contents
            for c in self._model.train_function.__closure__
            if hasattr(c.cell_contents, "get_concrete_function")
        )
        made = cell._list_all_concrete_functions()[-1]
        graph = made.graph.as_graph_def()
        functions = {f.signature.name: f for f in graph.library.function}
        seen: set[str] = set()

        def of(nodes: Any) -> int:
            count = 0
            for node in nodes:
                count += 1
                named = [
                    name
                    for value in node.attr.values()
                    for name in (value.func.name, *(f.name for f in value.list.func))
                    if name
                ]
                for name in named:
                    if name in seen or name not in functions:
                        continue
                    seen.add(name)
                    if not functions[name].attr["_noinline"].b:
                        count += of(functions[name].node_def)
            return count

        return of(graph.node)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
