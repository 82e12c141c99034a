"""The directory of a training run: what `train` leaves there, and other programs read.

model.json               the model's arguments, its corpus and context
model.weights.h5         the global model; AVERAGE.weights.h5 for each average
history.json             the log of every epoch, and a summary
flags.txt                the flags of the run, for --flagfile
tensorboard/             event files
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras

from input.index import CorpusIndex
from models.dnn import dnn
from scripts import common


def weights_path(run_dir: Path, which: str) -> Path:
    """Where the weights `which` of a run are: "global" or an average's name."""
    return run_dir / ("model.weights.h5" if which == "global" else f"{which}.weights.h5")


def save_weights(model: keras.Model, path: Path) -> None:
    """Writes weights so that they are there whole or not at all."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        model.save_weights(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def clear(run_dir: Path) -> None:
    """Makes the directory, and removes the results of an earlier run in it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for old in (*run_dir.glob("*.weights.h5"), *run_dir.glob("*.json")):
        old.unlink()
    for old in run_dir.glob("tensorboard/events.out.*"):
        old.unlink()


def describe(run_dir: Path, model: dict[str, Any], context: int, corpus: str, mark: str) -> None:
    """Writes model.json: arguments of `dnn`, frames of context, the corpus and its fingerprint."""
    content = {"dnn": model, "context": context, "corpus": corpus, "corpus_fingerprint": mark}
    common.write_json(run_dir / "model.json", content)


def load(run_dir: Path, which: str = "global") -> tuple[keras.Model, dict[str, Any]]:
    """The trained model of a run, and what its model.json says.

    Raises:
        FileNotFoundError: there is no such run, or it has no such weights.
        ValueError: model.json or the weights are damaged.
    """
    path = run_dir / "model.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"--run_dir={run_dir} has no model.json, so no run of scripts.train has been there."
        )
    weights = weights_path(run_dir, which)
    if not weights.is_file():
        there = sorted(p.name.split(".weights")[0] for p in run_dir.glob("*.weights.h5"))
        there = ["global" if name == "model" else name for name in there]
        raise FileNotFoundError(
            f"{weights} does not exist. This run has the weights: {', '.join(there) or 'none yet'}."
        )
    try:
        description = json.loads(path.read_text())
        model = dnn(**description["dnn"])
        context = int(description["context"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the description of a run: {error}") from error
    load_weights(model, weights)
    return model, {**description, "context": context}


def load_weights(model: keras.Model, path: Path) -> None:
    """Loads weights, with one clear error where they do not fit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no weights file, or one of another model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"weights file {path} does not exist.")
    try:
        model.load_weights(path)
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} does not hold weights of this model ({reason}). Give the --layers, --width "
            "and --context that it was trained with."
        ) from error


def compile_for_scores(model: keras.Model) -> None:
    """Gives a model of frames the training loss and the frame accuracy, and no optimizer."""
    model.compile(
        optimizer=None,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="frame_accuracy")],
    )


def check_corpus(corpus: CorpusIndex, description: dict[str, Any]) -> None:
    """Raises ValueError if a run's model does not fit the frames and classes of a corpus."""
    width = corpus.feature_dim * (2 * description["context"] + 1)
    trained = (description["dnn"]["input_dim"], description["dnn"]["num_classes"])
    if (width, corpus.num_classes) != trained:
        raise ValueError(
            f"corpus {corpus.directory} has spliced frames {width} wide and {corpus.num_classes} "
            f"classes, but the model was trained on {trained[0]} and {trained[1]}. Choose the "
            "corpus with --corpus."
        )


def named_scores(scores: dict[str, Any]) -> dict[str, float]:
    """Results of `evaluate`: frame error rate in %, cross-entropy in nats per frame."""
    error = 100.0 * (1.0 - float(scores["frame_accuracy"]))
    return {"frame_error_rate": error, "cross_entropy": float(scores["loss"])}


def speed(history: list[dict[str, float]]) -> dict[str, float]:
    """Speed over the whole run: epochs have the same frames, so rates are averaged harmonically."""
    means = {}
    speeds = [log["samples_per_second"] for log in history if log.get("samples_per_second")]
    if speeds:
        means["samples_per_second"] = len(speeds) / sum(1 / speed for speed in speeds)
    for name in ("sync_fraction", "sync_ms"):
        values = [log[name] for log in history if name in log]
        means[name] = sum(values) / len(values) if values else 0.0
    return means
