"""The directory of a training run, which `train` writes and other programs read.

model.json               the model's kind and arguments, how its frames are made and normalised, and
                         its corpus
model.weights.h5         the global model; AVERAGE.weights.h5 for each average
history.json             the log of every epoch, and a summary
held_out.csv             the held-out scores of all weights
flags.txt                the flags of the run, for --flagfile
files.txt                the names of these files: see `run_files`
tensorboard/             event files
checkpoints/             checkpoints, from which a run is resumed
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from input import index
from input.index import CorpusIndex
from models.presets import BUILDERS
from scripts import described
from scripts.data import is_recurrent
from tfpara import files

# The options of a corpus that describe its features.
_MADE = (
    "features",
    "num_mel",
    "num_ceps",
    "pitch",
    "sample_rate",
    "cmvn",
    "norm_vars",
    "deltas",
    "frame_subsampling",
)


def weights_path(run_dir: Path, which: str) -> Path:
    """Returns the file of a run's weights; `which` is "global" or an average's name."""
    return run_dir / ("model.weights.h5" if which == "global" else f"{which}.weights.h5")


def save_weights(model: keras.Model, path: Path) -> None:
    """Writes weights to a file that appears whole or not at all."""
    with files.whole(path) as place:
        model.save_weights(place)


def build(description: Mapping[str, Any], **options: Any) -> keras.Model:
    """Builds the model that model.json describes; `options` are for the builder, such as seed=."""
    return BUILDERS[description["kind"]](**description["arguments"], **options)


def load(
    run_dir: Path, which: str = "global", streams: bool = False
) -> tuple[keras.Model, dict[str, Any]]:
    """Returns the trained model of a run, and the contents of its model.json.

    Args:
        run_dir: directory of a run of scripts.train.
        which: "global", or an average's name.
        streams: whether a recurrent model takes as many streams as in training; otherwise it takes
            whole utterances.

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
        described.check(description, weights.stat().st_size)
        in_streams = streams and is_recurrent(description)
        model = build(description, **({"streams": description["streams"]} if in_streams else {}))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the description of a run: {error!r}") from error
    load_weights(model, weights)
    return model, description


def load_weights(model: keras.Model, path: Path) -> None:
    """Loads weights, with one clear error if they do not fit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no weights file, or is of another model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"weights file {path} does not exist.")
    try:
        model.load_weights(path)
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} does not hold weights of this model ({reason}). Give the --model, --scale, "
            "--layers, --width and --context that it was trained with."
        ) from error


def beside(weights: Path) -> Path:
    """Returns NAME.json for NAME.weights.h5, in which `pretrain` and runs describe the model."""
    return weights.with_name(weights.name.removesuffix(".weights.h5") + ".json")


def check_activation(description: Mapping[str, Any], weights: Path) -> None:
    """Refuses weights of units with another activation, if a file beside them names one.

    Averages of a run have no file of their own; the run's model.json describes them too.

    Raises:
        ValueError: the description has another activation than the weights.
    """
    about = beside(weights)
    about = about if about.exists() else about.with_name("model.json")
    try:
        with open(about, "rb", opener=files.regular) as file:
            theirs = json.loads(file.read())["arguments"]["activation"]
        ours = description["arguments"]["activation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # one of the two activations is not known
    if theirs != ours:
        raise ValueError(
            f"{weights} has the weights of {theirs} units, says {about.name} beside it, "
            f"and this model has {ours} units. Give --model=dnn with --activation={theirs}, or a "
            "paper's model that has them."
        )


def metrics(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the loss and metrics for `compile`. Metrics of streams leave the padding out."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="frame_accuracy")
    if not is_recurrent(description):
        return {"loss": loss, "metrics": [accuracy]}
    # The loss is a mean over all frames, including padding, so it depends on how much padding there
    # is. The metric `entropy` is the mean over the real frames alone.
    entropy = keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True)
    return {"loss": loss, "weighted_metrics": [accuracy, entropy]}


def entropy_name(description: Mapping[str, Any]) -> str:
    """Returns the name of the cross-entropy per frame in the model's logs."""
    return "cross_entropy" if is_recurrent(description) else "loss"


class Frames(NamedTuple):
    """A description of the frames that a model was trained on, and therefore needs in use."""

    feature_dim: int
    mean: np.ndarray  # float32 [feature_dim]: mean of the training frames
    stddev: np.ndarray  # float32 [feature_dim]: their standard deviation
    options: dict[str, Any]  # options of the features
    classes: str  # a checksum of the names of the classes, in their order


def describe_frames(corpus: CorpusIndex) -> dict[str, Any]:
    """Returns the description of a corpus' frames for model.json, in a form that JSON can hold."""
    return {
        "feature_dim": corpus.feature_dim,
        "mean": corpus.mean.tolist(),
        "stddev": corpus.stddev.tolist(),
        "options": {name: corpus.options[name] for name in _MADE if name in corpus.options},
        "classes": _checksum(corpus.class_names),
    }


def frames(description: Mapping[str, Any]) -> Frames:
    """Returns the description of the frames that a run's model was trained on.

    Raises:
        FileNotFoundError, ValueError: model.json is of an older version without this description,
            and the corpus is gone or has changed.
    """
    if "frames" in description:
        kept = dict(description["frames"])
    else:
        corpus = index.read(description["corpus"])
        if corpus.fingerprint != description["corpus_fingerprint"]:
            raise ValueError(
                f"corpus {corpus.directory} has changed since the run was trained on it, so its "
                "statistics do not fit. Train again, or prepare that corpus again."
            )
        kept = describe_frames(corpus)
    both = {name: np.array(kept[name], np.float32) for name in ("mean", "stddev")}
    return Frames(**{**kept, **both})


def corpus_of_training(description: Mapping[str, Any]) -> CorpusIndex:
    """Returns the corpus that a run was trained on.

    Raises:
        FileNotFoundError: the corpus is no longer where it was.
    """
    directory = os.path.abspath(description["corpus"])
    if not os.path.isfile(os.path.join(directory, index.FILE_NAME)):
        raise FileNotFoundError(
            f"the corpus that the run was trained on is not in {directory} now. Give evaluate its "
            "present directory: --corpus=DIRECTORY."
        )
    return index.read(directory)


def corpus_for(description: Mapping[str, Any], directory: str | None = None) -> CorpusIndex:
    """Returns a corpus for a run's model, with the statistics of the training frames.

    Args:
        description: description of the run.
        directory: directory of the corpus; None for the corpus of the training.

    Raises:
        FileNotFoundError: the corpus of the training is no longer where it was.
        ValueError: the corpus has other frames or classes than the run's.
    """
    corpus = index.read(directory) if directory else corpus_of_training(description)
    trained = frames(description)
    _check_corpus(corpus, trained)
    about = about_features(corpus, trained)
    if about is not None:
        print(about, flush=True)
    # The corpus may have another training split than the run had, and so other statistics. But the
    # model needs frames that are normalised by the statistics of the run's training.
    return dataclasses.replace(corpus, mean=trained.mean, stddev=trained.stddev)


def about_features(corpus: CorpusIndex, trained: Frames) -> str | None:
    """Returns a sentence if a corpus may have other features than the training; else None.

    That is so if the features of just one of them come from a feats.scp, whose kind is not known.
    """
    theirs, ours = (made.get("features", "fbank") for made in (corpus.options, trained.options))
    if theirs == ours or "given" not in (theirs, ours):
        return None
    said = {"given": "taken from a feats.scp"}
    return (
        f"The features of {corpus.directory} are {said.get(theirs, theirs)}, those of the training "
        f"{said.get(ours, ours)}. Nobody checks that they are the same."
    )


def _check_corpus(corpus: CorpusIndex, trained: Frames) -> None:
    found = describe_frames(corpus)
    what = None
    if corpus.feature_dim != trained.feature_dim:
        what = f"frames of {corpus.feature_dim} numbers, and those of the run"
        what += f" have {trained.feature_dim}"
    elif found["classes"] != trained.classes:
        what = f"other classes ({corpus.num_classes}) than those of the run, or in another order"
    else:
        theirs, ours = found["options"], trained.options
        # A feats.scp does not say which kind of features it has. So if one of the two corpora comes
        # from a feats.scp, the kinds are not compared.
        given = "given" in (theirs.get("features"), ours.get("features"))
        names = [name for name in _MADE if name in theirs and name in ours]
        differing = [n for n in names if theirs[n] != ours[n] and not (given and n == "features")]
        if differing:
            name = differing[0]
            what = f"{name}={theirs[name]!r}, and that of the run had {ours[name]!r}"
    if what is not None:
        raise ValueError(
            f"corpus {corpus.directory} has {what}. Choose with --corpus one that was made as the "
            "training's."
        )


def _checksum(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]


def named_scores(scores: dict[str, Any]) -> dict[str, float]:
    """Returns the scores of `evaluate`: frame error rate in %, cross-entropy in nats per frame."""
    error = 100.0 * (1.0 - float(scores["frame_accuracy"]))
    entropy = scores.get("cross_entropy", scores["loss"])
    return {"frame_error_rate": error, "cross_entropy": float(entropy)}


def speed(history: list[dict[str, float]]) -> dict[str, float]:
    """Returns the speed over the whole run, and the times of syncs if there are any.

    Epochs have equally many frames, so their speeds are averaged harmonically.
    """
    means = {}
    speeds = [log["samples_per_second"] for log in history if log.get("samples_per_second")]
    if speeds:
        means["samples_per_second"] = len(speeds) / sum(1 / speed for speed in speeds)
    for name in ("sync_fraction", "sync_ms"):
        values = [log[name] for log in history if name in log]
        if values:
            means[name] = sum(values) / len(values)
    return means
