"""One process of the suite `gpu`: trains a network on the card, if there is one.

Plain Keras' model and tfpara's take turns in one process. So XLA chooses the same kernels for both,
and other work on the machine slows both. A figure is the median of the turns.

Options: `network`; `system` ("keras", which is plain Keras and tfpara, or "torch"); `periods`, the
sync periods; `small`, sizes for a CPU; `steps`, the minibatches of a turn; `turns`; `execution`,
minibatches of a call (`steps_per_execution`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from scripts.benchmarks.peers.process import wait_for_the_others

# Each network has two entries, for a GPU and for a CPU: the shape of an example, the number of
# classes, and the size of the minibatch.
NETWORKS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "dnn": (((1320,), 5723, 1024), ((20,), 7, 4)),
    "dnn, float16": (((1320,), 5723, 4096), ((20,), 7, 4)),
    "cnn": (((32, 32, 3), 100, 256), ((8, 8, 3), 7, 4)),
    "transformer": (((128, 256), 256, 64), ((6, 8), 7, 4)),
    "lstm": (((20, 240), 5723, 64), ((4, 12), 7, 4)),
    "cldnn": (((20, 440), 5723, 64), ((4, 66), 7, 4)),
}
TORCH = ("dnn", "dnn, float16", "cnn", "transformer", "lstm")  # networks that PyTorch trains, too
_FRAMES = ("transformer", "lstm", "cldnn")  # networks with a label for each frame
_NEVER = 1_000_000


def main(options: dict[str, Any]) -> None:
    """Prints READY, waits for a line, trains, and prints the figures as a line of JSON."""
    figures = _torch if options["system"] == "torch" else _keras
    print(json.dumps(figures(options)), flush=True)


def _data(options: dict[str, Any]) -> tuple[Any, Any, int]:
    import numpy as np

    shape, classes, batch = NETWORKS[options["network"]][bool(options["small"])]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, *shape)).astype("float32")
    frames = shape[:1] if options["network"] in _FRAMES else ()
    return x, rng.integers(0, classes, (batch, *frames)).astype("int32"), classes


def _keras(options: dict[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    import tfpara

    # The benchmark starts each process with one thread, which is right for CPUs. To keep a GPU
    # busy, TensorFlow needs more threads. With 0, it chooses the number of threads itself.
    tf.config.threading.set_inter_op_parallelism_threads(0)
    tf.config.threading.set_intra_op_parallelism_threads(0)
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=_NEVER)
    plain, train = _trainer(options, None), _trainer(options, strategy)

    def with_period(period: int) -> dict[str, float]:
        strategy.set_sync_period(period)
        before, seconds = strategy.statistics(), train()
        now = strategy.statistics()
        synced, syncs = now.sync_seconds - before.sync_seconds, now.syncs - before.syncs
        return {"step": seconds, "sync": synced / max(1, syncs)}

    for period in options["periods"]:
        # This call is not timed, because it takes longer than later ones: it also traces the
        # functions of the syncs, and the first syncs measure the distances between the replicas.
        with_period(period)
    wait_for_the_others()
    turns: dict[str, list[dict[str, float]]] = {}
    for _ in range(options["turns"]):
        turns.setdefault("plain", []).append({"step": plain()})
        for period in (*options["periods"], _NEVER):
            name = "never" if period == _NEVER else f"period_{period}"
            turns.setdefault(name, []).append(with_period(period))
    steps = {k: statistics.median(turn["step"] for turn in of) for k, of in turns.items()}
    figures = {f"{name}_step_ms": 1000 * seconds for name, seconds in steps.items()}
    for period in options["periods"]:
        name = f"period_{period}"
        figures[f"{name}_of_plain"] = steps["plain"] / steps[name]
        # `sync_ms` is the time that a sync adds to the steps. `host_ms` is the time that the host
        # spends in a sync; it includes waits for earlier steps on the GPU.
        figures[f"{name}_sync_ms"] = 1000 * period * (steps[name] - steps["never"])
        figures[f"{name}_host_ms"] = 1000 * statistics.median(turn["sync"] for turn in turns[name])
    batch = NETWORKS[options["network"]][bool(options["small"])][-1]
    figures["plain_samples_per_second"] = batch / steps["plain"]
    cards = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(cards[0]) if cards else {}
    return figures | {"device": details.get("device_name", "CPU")}


def _trainer(options: dict[str, Any], strategy: Any) -> Callable[[], float]:
    """Returns a function that trains for a turn and returns the seconds of a step."""
    import keras
    import tensorflow as tf

    x, y, classes = _data(options)
    steps, execution = options["steps"], options["execution"]
    half = options["network"] == "dnn, float16"
    keras.config.set_dtype_policy("mixed_float16" if half else "float32")
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _network(options["network"], x.shape[1:], classes, options["small"])
        optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
        if options["network"] == "transformer":
            optimizer = keras.optimizers.AdamW(1e-4)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=execution)

    def repeated(_: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    data = strategy.distribute_datasets_from_function(repeated) if strategy else repeated()
    marks: list[float] = []

    class Marks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 in (execution, execution + steps):
                float(logs["loss"])  # waits until the GPU has done the steps
                marks.append(time.perf_counter())

    def train() -> float:
        del marks[:]
        model.fit(data, epochs=1, steps_per_epoch=execution + steps, verbose=0, callbacks=[Marks()])
        return (marks[1] - marks[0]) / steps

    train()  # compiles the step; this call is not timed
    return train


def _network(name: str, shape: tuple[int, ...], classes: int, small: bool) -> Any:
    import keras

    from models.cldnn import cldnn
    from models.dnn import dnn
    from models.lstm import lstm

    layers = keras.layers
    if name.startswith("dnn"):
        return dnn(shape[0], classes, **({"layers": 1, "width": 8} if small else {}))
    if name == "lstm":
        sizes = {"layers": 1, "cells": 4, "dense": 0} if small else {"layers": 2, "cells": 1024}
        return lstm(shape[-1], classes, **sizes)
    if name == "cldnn":
        sizes = {"bands": 22, "maps": 2, "reduction": 4, "layers": 1, "cells": 4, "projection": 2}
        sizes |= {"output_projection": 2, "dense": 1, "width": 4}
        return cldnn(shape[-1], classes, **(sizes if small else {}))
    entry = hidden = keras.Input(shape)
    if name == "cnn":
        for maps in (4,) if small else (64, 128, 256):
            hidden = layers.Conv2D(maps, 3, padding="same", use_bias=False)(hidden)
            hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
            hidden = layers.MaxPooling2D()(hidden)
        hidden = layers.GlobalAveragePooling2D()(hidden)
    else:
        width = shape[-1]
        for _ in range(1 if small else 4):
            normed = layers.LayerNormalization()(hidden)
            heads = layers.MultiHeadAttention(2 if small else 8, width // (2 if small else 8))
            hidden = layers.Add()([hidden, heads(normed, normed, use_causal_mask=True)])
            inner = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(hidden))
            hidden = layers.Add()([hidden, layers.Dense(width)(inner)])
    return keras.Model(entry, layers.Dense(classes)(hidden))


def _torch(options: dict[str, Any]) -> dict[str, Any]:
    """Measures PyTorch's usual loop, not compiled; matrix products in TF32, as in TensorFlow."""
    torch: Any = importlib.import_module("torch")
    nn = torch.nn
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, classes = _data(options)
    x, y = torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)
    if options["network"] == "cnn":
        x = x.permute(0, 3, 1, 2).contiguous()
    model = _torch_network(torch, options["network"], x.shape[1:], classes, options["small"])
    model = model.to(device)
    if options["network"] == "transformer":
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    half = options["network"] == "dnn, float16" and device == "cuda"
    scaler = torch.amp.GradScaler(device, enabled=half)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16, enabled=half):
                outputs = model(x).reshape(-1, classes)
                loss = nn.functional.cross_entropy(outputs, y.reshape(-1))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        loss.item()  # waits until the GPU has done the steps

    train(options["steps"])
    wait_for_the_others()
    seconds = []
    for _ in range(options["turns"]):
        began = time.perf_counter()
        train(options["steps"])
        seconds.append((time.perf_counter() - began) / options["steps"])
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"torch_step_ms": 1000 * statistics.median(seconds), "device": name}


def _torch_network(torch: Any, name: str, shape: Any, classes: int, small: bool) -> Any:
    nn = torch.nn
    if name.startswith("dnn"):
        width, layers = (8, 1) if small else (1024, 6)
        parts = [nn.Linear(shape[0], width), nn.ReLU()]
        for _ in range(layers - 1):
            parts += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(width, classes))
    if name == "cnn":
        parts, former = [], shape[0]
        for maps in (4,) if small else (64, 128, 256):
            parts += [nn.Conv2d(former, maps, 3, padding="same", bias=False), nn.BatchNorm2d(maps)]
            parts += [nn.ReLU(), nn.MaxPool2d(2)]
            former = maps
        return nn.Sequential(
            *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(former, classes)
        )

    class Frames(nn.Module):
        """A network with an output for each frame."""

        def __init__(self) -> None:
            super().__init__()
            width = shape[-1]
            if name == "lstm":
                cells, layers = (4, 1) if small else (1024, 2)
                self.body = nn.LSTM(width, cells, layers, batch_first=True)
                self.head = nn.Linear(cells, classes)
            else:
                heads, layers = (2, 1) if small else (8, 4)
                options = {"dropout": 0.0, "activation": "gelu"}
                options |= {"batch_first": True, "norm_first": True}
                layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)
                self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
                self.head = nn.Linear(width, classes)

        def forward(self, x: Any) -> Any:
            if name == "lstm":
                return self.head(self.body(x)[0])
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.head(self.body(x, mask=mask, is_causal=True))

    return Frames()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
