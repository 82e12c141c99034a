"""One process of the benchmark of parameter servers.

    python -m scripts.benchmarks.asynchronous_worker JSON

The system "tfpara" trains with `tfpara.AsyncStrategy`, by the `rule` and `sync_period` of the
options. "whole" does the same, but exchanges whole embedding tables, not only the rows in use.
"stock" is the loop of TensorFlow's guide: `ParameterServerStrategy`, and for each step a scheduled
function with Keras' optimizer. All run in the same kind of processes. The chief prints the figures
as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from models.dnn import dnn
from tfpara import algorithms
from tfpara.parameter_server import processes
from tfpara.parameter_server.chunks import Chunks
from tfpara.parameter_server.strategy import AsyncStrategy

# Number of chunks for each worker: the default of `AsyncStrategy.fit` for arrays. Because a worker
# has several short chunks, all workers end at about the same time.
_CHUNKS = 4
_STARTUP_SECONDS, _TIMEOUT_SECONDS = 300.0, 60.0


def main() -> None:
    """Trains, and prints pushes/s; the first epoch is not counted."""
    options = json.loads(sys.argv[1])
    # The number of steps is rounded down to a multiple of `of_chunk`, so that each chunk has whole
    # blocks.
    of_chunk = _CHUNKS * options.get("sync_period", 1)
    options["steps"] = max(1, options["steps"] // of_chunk) * of_chunk
    place = processes.join(_TIMEOUT_SECONDS, _STARTUP_SECONDS)
    seconds = (_stock if options["system"] == "stock" else _tfpara)(place, options)
    minibatches = options["steps"] * place.num_workers
    figures = {
        "pushes_per_second": minibatches / options.get("sync_period", 1) / seconds,
        "samples_per_second": minibatches * options["batch"] / seconds,
        "rows": float(np.mean([len(np.unique(each)) for each in _data(options)[0]])),
    }
    print("FIGURES", json.dumps(figures), flush=True)


def _model(options: dict[str, Any]) -> keras.Model:
    # With an embedding table, the optimizer is plain SGD. With plain SGD, workers get the same
    # model, whether they exchange the whole table or only the rows that they use.
    if "ids" in options:
        x = keras.Input((options["inputs"],), dtype="int64")
        pooled = keras.layers.GlobalAveragePooling1D()(
            keras.layers.Embedding(options["ids"], options["width"])(x)
        )
        model = keras.Model(x, keras.layers.Dense(options["classes"])(pooled))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model
    sizes = {"layers": options["layers"], "width": options["width"]}
    model = dnn(options["inputs"], options["classes"], **sizes)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _data(options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns some minibatches: inputs and classes."""
    draw = np.random.default_rng(0)
    count = 16 if "ids" in options else 1
    shape = (count, options["batch"], options["inputs"])
    x = (
        draw.integers(0, options["ids"], shape)
        if "ids" in options
        else draw.normal(size=shape).astype(np.float32)
    )
    return x, draw.integers(0, options["classes"], shape[:2])


def _tfpara(place: Any, options: dict[str, Any]) -> float:
    rule = getattr(algorithms, options.get("rule", "ASGD"))()
    strategy = AsyncStrategy(
        rule,
        sync_period=options.get("sync_period", 1),
        sparse_embeddings=options["system"] == "tfpara",
        _processes=place,
    )
    with strategy.scope():
        model = _model(options)
    x, y = _data(options)

    def part(epoch: Any, chunk: Any) -> tf.data.Dataset:
        del epoch, chunk
        minibatches = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
        return minibatches.take(options["steps"] // _CHUNKS)

    clock = _Clock()
    chunks = Chunks(place.num_workers * _CHUNKS, part)
    strategy.fit(model, chunks, epochs=2, verbose=0, callbacks=[clock])
    return clock.seconds


class _Clock(keras.callbacks.Callback):
    """A callback that measures the seconds of the last epoch."""

    async_safe = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begun = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.monotonic() - self._begun


def _stock(place: Any, options: dict[str, Any]) -> float:
    coordinator = place._coordinator
    strategy = coordinator.strategy
    x, y = _data(options)
    with strategy.scope():
        model = _model(options)
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(iterator: Any) -> None:
        def replica(data: Any) -> None:
            features, labels = data
            with tf.GradientTape() as tape:
                loss = model.compute_loss(y=labels, y_pred=model(features, training=True))
            variables = [v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica, args=(next(iterator),))

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(data))

    def epoch() -> float:
        begun = time.monotonic()
        for _ in range(options["steps"] * place.num_workers):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        return time.monotonic() - begun

    epoch()
    return epoch()


if __name__ == "__main__":
    main()
