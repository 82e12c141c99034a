"""Pretrains a sigmoid DNN on a corpus as a stack of RBMs, without its labels.

python -m scripts.pretrain --corpus=corpus --out=runs/rbm/model.weights.h5 --layers=6 --width=1024
python -m scripts.train --corpus=corpus --run_dir=runs/dnn --activation=sigmoid \\
    --init=runs/rbm/model.weights.h5

The second command needs the same --model, --scale, --layers, --width and --context as the first.
The first command runs in one process, and every worker of the training then starts from its weights
file. A .json file beside the weights describes the network, and has the reconstruction errors of
each layer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

import keras
from absl import flags

import tfpara
from input import index, pipeline
from scripts import model_flags, runs
from tfpara import files
from tfpara.pretraining import Pretrained, pretrain

_CORPUS = flags.DEFINE_string("corpus", None, "directory of a prepared corpus", required=True)
_OUT = flags.DEFINE_string("out", None, "weights file (.weights.h5) to write", required=True)
common.refuse_urls(_OUT)

_EPOCHS = flags.DEFINE_integer(
    "epochs", 1, "passes over the training data for each layer but the first", lower_bound=1
)
_GAUSSIAN_EPOCHS = flags.DEFINE_integer(
    "gaussian_epochs",
    None,
    "the same for the first layer; twice --epochs if not set",
    lower_bound=1,
)
_MINIBATCH = flags.DEFINE_integer("minibatch", 128, "frames of a minibatch", lower_bound=1)
_RATE = flags.DEFINE_float(
    "learning_rate", 0.4, "of all layers but the first, per minibatch, positive"
)
_GAUSSIAN_RATE = flags.DEFINE_float(
    "gaussian_learning_rate", 0.01, "of the first layer, per minibatch, positive"
)
_MOMENTUM = flags.DEFINE_float(
    "momentum", 0.9, "to which it rises from 0.5; in [0.5, 1), or 0 for none"
)
_MOMENTUM_MINIBATCHES = flags.DEFINE_integer(
    "momentum_minibatches", 1000, "minibatches of a layer until it is there", lower_bound=1
)
_DECAY = flags.DEFINE_float("weight_decay", 2e-4, "of the kernels, 0 or more")
_SEED = flags.DEFINE_integer("seed", 0, "of all that is drawn, and of the order", 0, 2**32 - 1)
_SHUFFLE = flags.DEFINE_integer(
    "shuffle_frames", pipeline.SHUFFLE_FRAMES, "frames that are shuffled together", lower_bound=1
)

for _module in (common, model_flags):
    flags.adopt_module_key_flags(_module)


def main() -> None:
    with common.bad_input():
        out = _checked_out()
        if tfpara.cluster.read().num_workers > 1:
            raise ValueError("pretrain runs in one process. Start it without the launcher.")
        common.setup_tensorflow()
        corpus = index.read(_CORPUS.value)
        description = model_flags.sigmoid_dnn(corpus)
        model = runs.build(description, seed=_SEED.value)
        layers = _pretrain(model, corpus, description["context"])
        _write(model, layers, description, out)
    last = {layer.layer: round(layer.errors[-1], 4) for layer in layers}
    print(json.dumps({"weights": str(out), "reconstruction_error": last}))


def _checked_out() -> Path:
    """Returns the path of --out; checks its ending and makes its directory before the work."""
    out = Path(_OUT.value)
    if not out.name.endswith(".weights.h5"):
        raise ValueError(f"--out={out} must end in .weights.h5, as Keras wants it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out={out}: {out.parent} cannot be written to.")
    return out


def _pretrain(model: keras.Model, corpus: index.CorpusIndex, context: int) -> list[Pretrained]:
    def by_epoch(epoch: int) -> object:
        return pipeline.minibatches(
            corpus,
            "train",
            num_replicas=1,
            replica_ids=[0],
            epoch=epoch,
            minibatch=_MINIBATCH.value,
            sync_period=1,
            seed=_SEED.value,
            context=context,
            shuffle_frames=_SHUFFLE.value,
        )

    return pretrain(
        model,
        by_epoch,
        epochs=_EPOCHS.value,
        gaussian_epochs=_GAUSSIAN_EPOCHS.value,
        learning_rate=_RATE.value,
        gaussian_learning_rate=_GAUSSIAN_RATE.value,
        momentum=_MOMENTUM.value,
        momentum_minibatches=_MOMENTUM_MINIBATCHES.value,
        weight_decay=_DECAY.value,
        seed=_SEED.value,
        verbose=1 if os.isatty(1) else 2,
    )


def _write(
    model: keras.Model, layers: list[Pretrained], description: dict[str, Any], out: Path
) -> None:
    report = {
        "flags": common.resolved_flags().splitlines(),
        "arguments": description["arguments"],
        "layers": [layer._asdict() for layer in layers],
    }
    with files.whole(out) as place:  # both files appear, or neither does
        model.save_weights(place)
        runs.beside(place).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    common.run(main)
