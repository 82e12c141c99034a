"""Trains a small task under a rule, for the study of many replicas; `scripts.study` calls it.

python -m scripts.study_task --task=digits --rate=0.05 --out=run.json --simulate_replicas=8

The tasks are

- speech: a deep network finds the phone state of a frame of a prepared corpus;
- characters: a small transformer predicts the next character of the text for synthetic speech;
- digits: a convolutional network with batch normalisation reads scikit-learn's handwritten digits.

The number of samples is the same for any number of replicas. The program writes the validation
errors of the global model, and of its averages, after each epoch.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfpara
from input import features, index, text
from scripts import async_flags, rule_flags

_LOCAL_MOMENTUM = 0.9
_TASK = flags.DEFINE_enum(
    "task", None, ["speech", "characters", "digits"], "what is learned", required=True
)
_CORPUS = flags.DEFINE_string("corpus", None, "of speech: directory of a prepared corpus")
_OUT = flags.DEFINE_string("out", None, "file for the result, JSON", required=True)
common.refuse_urls(_OUT)
_RATE = flags.DEFINE_float("rate", None, "highest learning rate, positive", 0.0, required=True)
_EPOCHS = flags.DEFINE_float(
    "epochs",
    1.0,
    "factor of the task's epochs, positive; with fewer than one, a part of the data is used",
    0.0,
)
_PERIOD = flags.DEFINE_integer("sync_period", 20, "minibatches of a replica between syncs", 1)
_FIRST_PERIOD = flags.DEFINE_integer(
    "first_period", 0, "the sync period in the first epoch; 0: --sync_period, too", 0
)
_SEED = flags.DEFINE_integer("seed", 0, "of initial weights and data order", 0, 2**32 - 1)

_MOMENTUM = flags.DEFINE_boolean(
    "local_momentum",
    True,
    f"speech and digits: SGD has momentum {_LOCAL_MOMENTUM}; without, its rate is divided by "
    f"{1.0 - _LOCAL_MOMENTUM:.1f}, so that steps are as long",
)

_ALL_REDUCE = flags.DEFINE_integer(
    "all_reduce",
    1,
    "--rule=none: minibatches of each step, so that it is the one of as many replicas that average "
    "their gradients",
    lower_bound=1,
)

for _module in (common, rule_flags, async_flags):
    flags.adopt_module_key_flags(_module)

_LOWEST = 0.04  # last learning rate of the cosine schedule, as a share of the highest one
_CONTEXT = 5  # a frame of speech is spliced with this number of frames on each side
_WINDOW = 64  # number of characters of a training sequence
_Arrays = tuple[np.ndarray, np.ndarray]


class _Task(NamedTuple):
    """A task: its data (x, y), the size of its minibatches, and its model."""

    train: _Arrays
    validation: _Arrays
    minibatch: int
    epochs: int
    model: Callable[[], keras.Model]
    optimizer: Callable[[Any], keras.optimizers.Optimizer]


def _sgd(rate: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=_LOCAL_MOMENTUM if _MOMENTUM.value else 0.0)


def _speech() -> _Task:
    if _CORPUS.value is None:
        raise ValueError("--task=speech needs --corpus, a directory that prepare_speech has made.")
    corpus = index.read(_CORPUS.value)
    train, validation = (_frames(corpus, split) for split in ("train", "validation"))

    def model() -> keras.Model:
        layers: list[Any] = [keras.Input(train[0].shape[1:])]
        for _ in range(3):
            layers.append(keras.layers.Dense(256, "relu", kernel_initializer="he_normal"))
        return keras.Sequential([*layers, keras.layers.Dense(len(corpus.class_names))])

    return _Task(train, validation, 128, 5, model, _sgd)


def _frames(corpus: Any, split: str) -> _Arrays:
    """Returns the frames of a split, each with its neighbours, and their classes."""
    utterances = corpus.split(split)
    frames, labels = [], []
    with index.open_shards(utterances) as files:
        for number in range(len(utterances)):
            own, classes = index.read_utterance(corpus, utterances, files, number)
            own = features.normalise(own, corpus.mean, corpus.stddev)
            frames.append(features.splice(own, _CONTEXT, _CONTEXT).numpy())
            labels.append(classes)
    return np.concatenate(frames), np.concatenate(labels)


def _characters() -> _Task:
    alphabet, codes = np.unique(list(text.default()), return_inverse=True)
    codes = codes.astype(np.int32)
    held_out = len(codes) // 20
    train, validation = (_windows(part) for part in (codes[:-held_out], codes[-held_out:]))
    return _Task(
        train,
        validation,
        8,
        2,
        lambda: _transformer(len(alphabet)),
        lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01),
    )


def _windows(codes: np.ndarray) -> _Arrays:
    """Returns pieces of text, and for each of their characters the next one."""
    count = (len(codes) - 1) // _WINDOW
    x, y = codes[: count * _WINDOW], codes[1 : count * _WINDOW + 1]
    return x.reshape(count, _WINDOW), y.reshape(count, _WINDOW)


class _Places(keras.layers.Layer):
    """Adds a learned vector for each position in the text."""

    def build(self, shape: Any) -> None:
        self.places = self.add_weight(shape=shape[1:], initializer="normal")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + self.places


def _transformer(alphabet: int, width: int = 64, blocks: int = 2) -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((_WINDOW,), dtype="int32")
    x = _Places()(layers.Embedding(alphabet, width)(inputs))
    for _ in range(blocks):
        own = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, width // 4)(own, own, use_causal_mask=True)
        own = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(own)
    return keras.Model(inputs, layers.Dense(alphabet)(layers.LayerNormalization()(x)))


def _digits() -> _Task:
    """Returns the task of 1797 images of 8 × 8; every fourth is held out."""
    place = importlib.util.find_spec("sklearn")
    if place is None or place.origin is None:
        raise ValueError("--task=digits needs scikit-learn's data. Run: pip install scikit-learn")
    path = Path(place.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    table = np.random.default_rng(0).permutation(table)
    x, y = table[:, :64].reshape(-1, 8, 8, 1) / 16.0, table[:, 64].astype(np.int32)
    held_out = np.arange(len(x)) % 4 == 0

    def model() -> keras.Model:
        layers = keras.layers
        parts: list[Any] = [keras.Input((8, 8, 1))]
        for filters in (16, 32):
            parts += [
                layers.Conv2D(filters, 3, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.MaxPooling2D(),
            ]
        return keras.Sequential([*parts, layers.Flatten(), layers.Dense(10)])

    train, validation = (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
    return _Task(train, validation, 4, 20, model, _sgd)


_MAKE = {"speech": _speech, "characters": _characters, "digits": _digits}


def main() -> None:
    began = time.monotonic()
    out = Path(_OUT.value)
    with common.bad_input():
        if not _RATE.value > 0.0 or not _EPOCHS.value > 0.0:
            raise ValueError(f"--rate={_RATE.value} and --epochs={_EPOCHS.value} must be positive.")
        sgd = _TASK.value != "characters"
        common.only_for(sgd, [_MOMENTUM], "--task=speech and digits, which train with SGD")
        common.only_for(rule_flags.rule_name() == "none", [_ALL_REDUCE], "--rule=none")
        common.only_for(not rule_flags.is_async(), [_FIRST_PERIOD], "synchronous rules")
        out.parent.mkdir(parents=True, exist_ok=True)
        # A synchronous strategy may simulate replicas on logical devices. Logical devices must be
        # made before any tensor, so the strategy is made before the task.
        strategy = None if rule_flags.is_async() else _strategy(_PERIOD.value)
        task = _MAKE[_TASK.value]()
        replicas = max(_ALL_REDUCE.value, rule_flags.simulated())
        passes = task.epochs * _EPOCHS.value
        epochs = max(1, round(passes))
        samples = int(len(task.train[0]) * min(1.0, passes))
        steps = samples // (task.minibatch * replicas)
        if not steps:
            raise ValueError(
                f"{samples} samples are no minibatch of {task.minibatch} for each of "
                f"{replicas} replicas. Give more data, or fewer replicas."
            )
        # The period is limited to an epoch. With a synchronous rule, a block ends with the epoch
        # anyway. With parameter servers, `fit` refuses a period of more minibatches than a worker
        # has in an epoch, because no push would have so many.
        period = min(_PERIOD.value, steps)
        strategy = strategy or _strategy(period)
        keras.utils.set_random_seed(_SEED.value)
    with strategy.scope():
        model = task.model()
        highest = _RATE.value / (1.0 if _MOMENTUM.value else 1.0 - _LOCAL_MOMENTUM)
        updates = steps * epochs * _updates_per_step(replicas, period)
        rate = keras.optimizers.schedules.CosineDecay(highest, max(1, round(updates)), _LOWEST)
        model.compile(
            task.optimizer(rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    which = [name for name in strategy.weight_names if name != "local"]
    scores, history = tfpara.callbacks.HeldOut(task.validation, which), keras.callbacks.History()
    # The samples at the end are left out if they do not fill a minibatch for every replica. So all
    # replicas take equally many steps.
    x, y = (array[: steps * task.minibatch * replicas] for array in task.train)
    callbacks = [scores, history]
    if _FIRST_PERIOD.value:
        periods = {0: min(_FIRST_PERIOD.value, steps), 1: period}
        callbacks.append(tfpara.callbacks.SyncPeriod(periods, verbose=0))
    options: dict[str, Any] = {"epochs": epochs, "verbose": 2, "callbacks": callbacks}
    diverged = False
    try:
        if isinstance(strategy, tfpara.AsyncStrategy):
            size = {"batch_size": task.minibatch, "chunks": replicas}
            strategy.fit(model, x, y, **size, **options)
        else:
            model.fit(x, y, batch_size=task.minibatch * replicas, **options)
    except tfpara.DivergedError:
        diverged = True
    except tf.errors.InvalidArgumentError as error:
        if "NaN or Inf" not in str(error):
            raise
        diverged = True
    curves = {name: _errors(history.history, name) for name in which}
    result = {
        "task": _TASK.value,
        "rule": str(strategy.rule),
        "replicas": replicas,
        "sync_period": _PERIOD.value,
        "rate": _RATE.value,
        "samples": steps * task.minibatch * replicas * epochs,
        "seed": _SEED.value,
        "curves": curves,
        "errors": {name: None if diverged else curve[-1] for name, curve in curves.items()},
        "exchanges": _exchanges(strategy, model),
        "parameters": model.count_params(),
        "seconds": time.monotonic() - began,
    }
    common.write_json(out, result)
    shown = "diverged" if diverged else f"{curves['global'][-1]:.4g}"
    print(f"{out}: validation error {shown}")


def _strategy(period: int) -> Any:
    return rule_flags.strategy(period, {"task": _TASK.value, "seed": _SEED.value})


def _updates_per_step(replicas: int, period: int) -> float:
    """Returns how many iterations the schedule's optimizer counts for one step of each replica."""
    if not rule_flags.is_async():
        return 1.0
    # An optimizer on the servers counts pushes. If each worker has its own optimizer, every
    # optimizer counts the minibatches of all workers.
    return replicas / (period if async_flags.counts_pushes(rule_flags.rule_name()) else 1)


def _exchanges(strategy: Any, model: keras.Model) -> int:
    """Returns the number of syncs, or, with parameter servers, of pushes."""
    if isinstance(strategy, tfpara.AsyncStrategy):
        return strategy.statistics(model).pushes
    statistics = strategy.statistics()
    return statistics.syncs if statistics else 0


def _errors(history: Mapping[str, Sequence[float]], which: str) -> list[float]:
    """Returns the validation error after each epoch, in % or bits per character."""
    name = "validation" if which == "global" else f"validation_{which}"
    if _TASK.value == "characters":
        return [loss / math.log(2.0) for loss in history.get(f"{name}_loss", ())]
    return [100.0 * (1.0 - accuracy) for accuracy in history.get(f"{name}_accuracy", ())]


if __name__ == "__main__":
    common.run(main)
