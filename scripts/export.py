"""Exports a run as a SavedModel that takes feature frames.

python -m scripts.export --run_dir=runs/bmuf --out=runs/bmuf/export
saved_model_cli show --dir runs/bmuf/export --all

The signature `serving_default` takes `frames`, float32 [num_frames, dim], the features of one
utterance without deltas, such as 40 log-mel energies, and gives `log_posteriors`, float32
[num_outputs, num_classes], and `logits`; a model that stacks frames has an output for each stack.
The SavedModel itself computes deltas, normalises (by the statistics of the training), splices and
stacks.
"""

from __future__ import annotations

from pathlib import Path

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

import tensorflow as tf
from absl import flags

import tfpara
from scripts import runs, serving

_RUN_DIR = flags.DEFINE_string(
    "run_dir", None, "directory of a run of scripts.train", required=True
)
_OUT = flags.DEFINE_string(
    "out", None, "directory or URL of the SavedModel; RUN_DIR/export if not set"
)
_WEIGHTS = flags.DEFINE_string(
    "weights", "global", "global, an average such as ema-0.99, or best: by an evaluator's scores"
)
flags.adopt_module_key_flags(common)


def main() -> None:
    with common.bad_input():
        if tfpara.cluster.read().num_workers > 1:
            raise ValueError("export runs in one process. Start it without the launcher.")
        common.setup_tensorflow()
        model, description = runs.load(Path(_RUN_DIR.value), _WEIGHTS.value)
        ends = serving.serving(runs.frames(description), description)
        path = _OUT.value or Path(_RUN_DIR.value) / "export"
        tfpara.export(
            model,
            path,
            signature=[tf.TensorSpec([None, ends.frame_dim], tf.float32, name="frames")],
            preprocessing=ends.preprocessing,
            postprocessing=ends.postprocessing,
        )
    # `tfpara.export` has already printed the path, so this line does not repeat it.
    print(f"exported {_WEIGHTS.value} weights of {_RUN_DIR.value}: takes {ends.about}")


if __name__ == "__main__":
    common.run(main)
