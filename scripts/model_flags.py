"""Flags that choose the model, and the description of that model, which a run keeps.

Import this module before TensorFlow, and after `scripts.common`.
"""

from __future__ import annotations

import os
from typing import Any

from absl import flags

from input import features
from input.index import CorpusIndex
from models import presets
from scripts import common

_PLAIN = "dnn"

_MODEL = flags.DEFINE_enum(
    "model", _PLAIN, [_PLAIN, *presets.PRESETS], "dnn, shaped by the flags below, or a paper's"
)
_SCALE = flags.DEFINE_float(
    "scale", 1.0, "factor of the widths of a paper's model, positive; 0.25 fits a laptop"
)
_LAYERS = flags.DEFINE_integer("layers", 6, "hidden layers", lower_bound=0)
_WIDTH = flags.DEFINE_integer("width", 1024, "units of a hidden layer", lower_bound=1)
_ACTIVATION = flags.DEFINE_string(
    "activation", "relu", "of the hidden layers, as Keras names it; pretrain: sigmoid"
)
_CONTEXT = flags.DEFINE_integer("context", 5, "frames spliced on each side", lower_bound=0)
_BANDS = flags.DEFINE_integer(
    "bands",
    None,
    "cldnn-003: filterbank channels, which all columns of a feats.scp must be; of other corpora "
    "the number is known",
    lower_bound=1,
)


def recurrent() -> bool:
    """Returns whether the chosen model takes sequences of frames."""
    return _MODEL.value != _PLAIN and presets.get(_MODEL.value).recurrent


def description(corpus: CorpusIndex, coefficients: int | None = None) -> dict[str, Any]:
    """Returns the description of the chosen model for a corpus, in a form that JSON can hold.

    Args:
        corpus: the corpus, which gives the width of frames and the classes.
        coefficients: number of coefficients of each frame that a recurrent model uses, from the
            first; None for all.

    Returns:
        `kind`, a name in `presets.BUILDERS`, and the builder's `arguments`; `context`, the number
        of frames spliced on each side, `stack`, the number of frames joined to one, and
        `coefficients`; the absolute path of the `corpus`, and its fingerprint.

    Raises:
        ValueError: flags do not go together, a value is out of range, or the CLDNN would get frames
            of something else than filterbanks.
    """
    plain = _MODEL.value == _PLAIN
    shape = (_LAYERS, _WIDTH, _ACTIVATION, _CONTEXT)
    common.only_for(plain, shape, f"--model={_PLAIN}; a paper's model has a shape of its own")
    common.only_for(not plain, (_SCALE,), "a paper's model, such as --model=dnn-003")
    has_bands = not plain and presets.get(_MODEL.value).kind == "cldnn"
    common.only_for(has_bands, (_BANDS,), "--model=cldnn-003")
    if plain:
        kind, context, stack = _PLAIN, _CONTEXT.value, 1
        arguments = {
            "input_dim": corpus.feature_dim * (2 * context + 1),
            "num_classes": corpus.num_classes,
            "layers": _LAYERS.value,
            "width": _WIDTH.value,
            "activation": _ACTIVATION.value,
        }
    else:
        preset = presets.get(_MODEL.value)
        kind, context, stack = preset.kind, preset.context, preset.stack
        frame_dim = min(corpus.feature_dim, coefficients or corpus.feature_dim)
        changes = {"bands": _bands(corpus, frame_dim)} if has_bands else {}
        arguments = preset.resolve(
            _SCALE.value, preset.input_dim(frame_dim), corpus.num_classes, **changes
        )
    return {
        "kind": kind,
        "arguments": arguments,
        "context": context,
        "stack": stack,
        "coefficients": coefficients,
        "corpus": os.path.abspath(corpus.directory),
        "corpus_fingerprint": corpus.fingerprint,
    }


def about_width(description: dict[str, Any]) -> str | None:
    """Returns a sentence if frames are not as wide as in the paper of --model; else None."""
    if _MODEL.value == _PLAIN:
        return None
    preset = presets.get(_MODEL.value)
    frames = 2 * preset.context + preset.stack
    width = description["arguments"]["input_dim"] // frames
    if width == preset.frame_dim:
        return None
    return (
        f"--model={_MODEL.value}: frames are {width} wide here, and {preset.frame_dim} in the "
        "paper. docs/recipes.md (The papers' recipes) has the flags that make the paper's features."
    )


def sigmoid_dnn(corpus: CorpusIndex) -> dict[str, Any]:
    """Returns the `description` of a DNN of sigmoids, which RBMs pretrain.

    Raises:
        ValueError: the flags choose a recurrent model, or another activation.
    """
    if recurrent():
        raise ValueError("RBMs pretrain DNNs. Choose --model=dnn or a paper's DNN.")
    made = description(corpus)
    if flags.FLAGS[_ACTIVATION.name].using_default_value and _MODEL.value == _PLAIN:
        made["arguments"]["activation"] = "sigmoid"
    activation = made["arguments"]["activation"]
    if activation != "sigmoid":
        what, fix = f"--model={_MODEL.value} has {activation} units", "Choose --model=dnn-001, say"
        if _MODEL.value == _PLAIN:
            what, fix = f"--activation={activation}", "Give --activation=sigmoid, here and to train"
        raise ValueError(f"{what}, and RBMs give the weights of sigmoid ones. {fix}.")
    return made


def _bands(corpus: CorpusIndex, frame_dim: int) -> int:
    """Returns the number of filterbank channels; `frame_dim` must be a multiple of it.

    Raises:
        ValueError: the frames have other features, or nothing tells which features they have, or
            `frame_dim` is no multiple.
    """
    made, where = corpus.options, f"--model={_MODEL.value} needs frames of filterbank channels"
    kind, blocks = made.get("features", "fbank"), int(made.get("deltas", 2)) + 1
    static = corpus.feature_dim // blocks
    fix = (
        f"Give --bands={static} if all are channels, in order of frequency; else prepare the "
        "corpus without the others (Kaldi's select-feats), or choose another model, such as "
        "--model=lstm-000."
    )
    if kind in ("mfcc", "plp") or made.get("pitch"):
        what = "pitch" if made.get("pitch") else kind.upper()
        raise ValueError(
            f"{where}, and those of {corpus.directory} have {what}. Prepare the corpus with "
            "--features=fbank and without --pitch, or choose another model, such as "
            "--model=lstm-000."
        )
    bands = _BANDS.value
    if bands is None:
        if kind == "given":
            raise ValueError(
                f"{where}, and nothing says what the {static} columns of the feats.scp of "
                f"{corpus.directory} are. {fix}"
            )
        bands = int(made.get("num_mel", features.NUM_MEL))
    if bands * blocks != corpus.feature_dim:
        raise ValueError(
            f"{where} alone, --bands={bands}, and those of {corpus.directory} have {static} "
            f"numbers before deltas. {fix}"
        )
    if frame_dim % bands:
        raise ValueError(
            f"--coefficients={frame_dim} must be a multiple of the {bands} filterbank channels, or "
            f"deltas would be cut. Give --coefficients={max(1, frame_dim // bands) * bands}."
        )
    return bands
