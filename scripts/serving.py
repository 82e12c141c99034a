"""The steps of a served model: from an utterance's features to its posteriors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from input import features, pitch, streams
from input.index import CorpusIndex
from scripts.data import is_recurrent
from scripts.runs import Frames


class Serving(NamedTuple):
    """The ends of a SavedModel, as `tfpara.export` takes them.

    Attributes:
        frame_dim: width of a frame that is taken, static features without deltas.
        preprocessing: float32 [num_frames, frame_dim] -> the model's input.
        postprocessing: the model's logits -> `log_posteriors` and `logits`, [num_outputs, classes].
        about: what the frames must be, in words.
    """

    frame_dim: int
    preprocessing: Callable[[tf.Tensor], tf.Tensor]
    postprocessing: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    about: str


def serving(trained: Frames, description: Mapping[str, Any]) -> Serving:
    """The ends of a model that was trained on frames of a corpus.

    What is known of how the features were made is done here once more: their deltas, and
    normalisation by the utterance's own mean. What a served model cannot know, the mean of a
    speaker or features of a `feats.scp`, has to be in the frames that it is given.

    Args:
        trained: the frames of the training.
        description: of the model.
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
    """Returns a function that makes a model's input from an utterance's frames, with their deltas.

    Args:
        trained: has the mean and deviation of the training frames, which normalise unless each
            utterance has its own: from `runs.frames` or `runs.corpus_for`.
        description: of the model: `context` frames are spliced on each side, `stack` frames (1 if
            not given) put together, `label_delay` (0) added at the end; it sees the first
            `coefficients` of each frame (all), with `normalisation` ("global").

    Returns:
        float32 [num_frames, dim] -> [num_outputs + label_delay, input_dim].
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
    """Returns by how many outputs a model is late. Only a model of streams may be late."""
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
