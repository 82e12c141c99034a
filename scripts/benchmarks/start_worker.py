"""One process of the suite `start`: the time from a process's start to the end of its first step.

A figure is the processor time that the process has used until an event, in milliseconds; and for
the last event also the wall time since all processes began.

Options: `system`, "plain" for plain Keras, else "tfpara".
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from scripts.benchmarks.peers.process import wait_for_the_others


def main(options: dict[str, Any]) -> None:
    """Prints READY, waits for a line, trains three steps, and prints the figures as JSON."""
    wait_for_the_others()
    began, figures = time.monotonic(), {}

    def reached(event: str) -> None:
        figures[f"{event}_ms"] = 1000 * time.process_time()

    import keras
    import numpy as np
    import tensorflow as tf  # noqa: F401

    reached("imported")
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if options["system"] != "plain":
        import tfpara

        scope = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=2).scope()
    reached("made")
    with scope:
        hidden = [keras.layers.Dense(256, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((128,)), *hidden, keras.layers.Dense(50)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)

    class Marks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                reached("begun")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                reached("stepped")
                figures["stepped_wall_ms"] = 1000 * (time.monotonic() - began)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * 64, 128)).astype("float32")
    y = rng.integers(0, 50, len(x)).astype("int32")
    model.fit(x, y, batch_size=64, verbose=0, callbacks=[Marks()])
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
