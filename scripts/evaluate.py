"""Scores a run on held-out speech: frame error rate and cross-entropy.

python -m scripts.evaluate --run_dir=runs/bmuf --split=test

Prints one line, and writes RUN_DIR/SPLIT.json. Under the launcher the workers share the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # before TensorFlow

import tensorflow as tf
from absl import flags

import tfpara
from input import index
from scripts import runs
from scripts.data import held_out

_RUN_DIR = flags.DEFINE_string(
    "run_dir", None, "directory of a run of scripts.train", required=True
)
_CORPUS = flags.DEFINE_string("corpus", None, "directory of a corpus; that of the run if not set")
_SPLIT = flags.DEFINE_enum("split", "test", index.SPLITS, "the part of the corpus")
_WEIGHTS = flags.DEFINE_string("weights", "global", "global, or an average such as ema-0.99")
_OUT = flags.DEFINE_string("out", None, "JSON file to write; RUN_DIR/SPLIT.json if not set")
_MINIBATCH = flags.DEFINE_integer("minibatch", 1024, "frames of a minibatch", lower_bound=1)
flags.adopt_module_key_flags(common)


def main() -> None:
    with common.bad_input():
        devices = common.setup_tensorflow()
        strategy = _strategy(devices)
        with (strategy or tf.distribute.get_strategy()).scope():
            model, description = runs.load(Path(_RUN_DIR.value), _WEIGHTS.value)
            runs.compile_for_scores(model)
        corpus = index.read(_CORPUS.value or description["corpus"])
        runs.check_corpus(corpus, description)
        dataset = held_out(corpus, _SPLIT.value, strategy, _MINIBATCH.value, description["context"])
    scores = model.evaluate(dataset, verbose=0, return_dict=True)
    if strategy is None or strategy.is_chief:
        _report(scores, corpus.num_frames(_SPLIT.value))
    common.part(strategy)


def _strategy(devices: list[str] | None) -> Any:
    if tfpara.cluster.read().num_workers == 1 and devices is None:
        return None
    return tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1, devices=devices)


def _report(scores: dict[str, float], frames: int) -> None:
    result = {
        "run": _RUN_DIR.value,
        "split": _SPLIT.value,
        "weights": _WEIGHTS.value,
        "frames": frames,
        **runs.named_scores(scores),
    }
    path = Path(_OUT.value or Path(_RUN_DIR.value) / f"{_SPLIT.value}.json")
    with common.bad_input():
        common.write_json(path, result)
    print(
        f"{result['split']} ({frames} frames), {result['weights']} weights: frame error rate "
        f"{result['frame_error_rate']:.2f} %, cross-entropy {result['cross_entropy']:.4f} nats"
    )


if __name__ == "__main__":
    common.run(main)
