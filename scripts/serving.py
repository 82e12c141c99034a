"""The steps of a served model before and after the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from input import features, pitch, streams
from input.index import CorpusIndex
from scripts.data import is_recurrent
from scripts.runs import Frames


class Serving(NamedTuple):
    """The steps before and after the network in a SavedModel, as arguments of `tfpara.export`.

    Attributes:
        frame_dim: width of an input frame, static features without deltas.
        preprocessing: float32 [num_frames, frame_dim] -> the model's input.
        postprocessing: the model's logits -> `log_posteriors` and `logits`, [num_outputs, classes].
        about: requirements on the frames, in words.
    """

    frame_dim: int
    preprocessing: Callable[[tf.Tensor], tf.Tensor]
    postprocessing: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    about: str


def serving(trained: Frames, description: Mapping[str, Any]) -> Serving:
    """Returns the steps before and after a model that was trained on frames of a corpus.

    The served model computes deltas, and normalises by the utterance's own mean, if that was done
    for the corpus of the training. It cannot subtract the mean of a speaker, or compute the
    features of a `feats.scp`: its input must already be such features, with that mean subtracted.

    Args:
        trained: description of the training frames, from `runs.frames`.
        description: description of the model, as in model.json.
    """
    made = trained.options
    deltas = int(made.get("deltas", 2))
    frame_dim = trained.feature_dim // (deltas + 1)
    to_input = model_input(trained, description)
    delay = label_delay(description)
    of_utterance = made.get("cmvn") == "utterance"

    def preprocessing(frames: tf.Tensor) -> tf.Tensor:
        if of_utterance:
            stats = features.cmvn_stats(frames)
            frames = features.apply_cmvn(frames, stats, bool(made.get("norm_vars")))
        taken = to_input(features.add_deltas(frames, deltas))
        return taken[None] if is_recurrent(description) else taken

    def postprocessing(logits: tf.Tensor) -> dict[str, tf.Tensor]:
        if is_recurrent(description):
            logits = logits[0, delay:]
        return {"log_posteriors": tf.nn.log_softmax(logits), "logits": logits}

    return Serving(frame_dim, preprocessing, postprocessing, _about(made, frame_dim))


def model_input(
    trained: CorpusIndex | Frames, description: Mapping[str, Any]
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that makes a model's input from an utterance's frames with deltas.

    Args:
        trained: from `runs.frames` or `runs.corpus_for`, with the mean and standard deviation of
            the training frames, for "global" normalisation.
        description: description of the model, as in model.json. Frames are normalised as
            `normalisation` says (default "global"), and cut to their first `coefficients` (all).
            Then `context` frames are spliced on each side, `stack` frames (1) are joined to one,
            and the last input is repeated `label_delay` times (0).

    Returns:
        A function float32 [num_frames, dim] -> [num_outputs + label_delay, input_dim].
    """
    kind = description.get("normalisation", "global")

    def normalised(frames: tf.Tensor) -> tf.Tensor:
        if kind == "none":
            return frames
        if kind == "utterance":
            mean, variance = tf.nn.moments(frames, 0)
            return features.normalise(
                frames, mean, tf.maximum(tf.sqrt(variance), streams.MIN_STDDEV)
            )
        return features.normalise(frames, trained.mean, trained.stddev)

    def taken(frames: tf.Tensor) -> tf.Tensor:
        seen = normalised(frames)[:, : description.get("coefficients")]
        context, stack = description["context"], description.get("stack", 1)
        return features.joined(seen, context, stack, label_delay(description))

    return taken


def label_delay(description: Mapping[str, Any]) -> int:
    """Returns by how many outputs a model lags behind its input; 0 if it is not recurrent."""
    return int(description.get("label_delay", 0)) if is_recurrent(description) else 0


def _about(made: Mapping[str, Any], frame_dim: int) -> str:
    named = {"fbank": "log-mel energies", "mfcc": "MFCC", "plp": "PLP coefficients"}
    kind = named.get(made.get("features", "fbank"))
    about = f"{frame_dim} {kind or 'features as in the feats.scp of the corpus'}"
    if kind and made.get("pitch"):
        about = f"{frame_dim - pitch.DIM} {kind} and {pitch.DIM} pitch features"
    if made.get("cmvn") in ("speaker", "given"):
        return f"{about}, from which the mean has been taken as --cmvn={made['cmvn']} does"
    return about
