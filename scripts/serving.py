"""What a served model does around the network: from an utterance's features to its posteriors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from input import features
from input.index import CorpusIndex
from scripts.data import is_recurrent


class Serving(NamedTuple):
    """The ends of a SavedModel, as `tfpara.export.export` takes them.

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


def serving(corpus: CorpusIndex, description: Mapping[str, Any]) -> Serving:
    """The ends of a model that was trained on a corpus.

    What the corpus says of how its features were made is done here once more: its deltas, and
    normalisation by the utterance's own mean. What a served model cannot know, the mean of a
    speaker or features of a `feats.scp`, has to be in the frames that it is given.

    Args:
        corpus: that of the training.
        description: of the model.
    """
    made = corpus.options
    deltas = int(made.get("deltas", 2))
    frame_dim = corpus.feature_dim // (deltas + 1)
    coefficients = description["coefficients"]
    delay = description["label_delay"] if is_recurrent(description) else 0
    of_utterance = made.get("cmvn") == "utterance"

    def preprocessing(frames: tf.Tensor) -> tf.Tensor:
        if of_utterance:
            stats = features.cmvn_stats(frames)
            frames = features.apply_cmvn(frames, stats, bool(made.get("norm_vars")))
        wide = features.add_deltas(frames, deltas)
        seen = features.normalise(wide, corpus.mean, corpus.stddev)[:, :coefficients]
        taken = features.joined(seen, description["context"], description["stack"], delay)
        return taken[None] if is_recurrent(description) else taken

    def postprocessing(logits: tf.Tensor) -> dict[str, tf.Tensor]:
        if is_recurrent(description):
            logits = logits[0, delay:]
        return {"log_posteriors": tf.nn.log_softmax(logits), "logits": logits}

    return Serving(frame_dim, preprocessing, postprocessing, _about(made, frame_dim))


def _about(made: Mapping[str, Any], frame_dim: int) -> str:
    kind = made.get("features", "fbank")
    named = {"fbank": f"{frame_dim} log-mel energies", "mfcc": f"{frame_dim} MFCC"}
    about = named.get(kind, f"{frame_dim} features as in the feats.scp of the corpus")
    if made.get("cmvn") in ("speaker", "given"):
        return f"{about}, from which the mean has been taken as --cmvn={made['cmvn']} does"
    return about
