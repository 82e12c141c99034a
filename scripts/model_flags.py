"""Flags of the model, and what they make of it: the description that a run keeps of its model.

Import it before TensorFlow, after `scripts.common`.
"""

from __future__ import annotations

from typing import Any

from absl import flags

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
_ACTIVATION = flags.DEFINE_string("activation", "relu", "of the hidden layers, as Keras names it")
_CONTEXT = flags.DEFINE_integer("context", 5, "frames spliced on each side", lower_bound=0)


def recurrent() -> bool:
    """Returns whether the chosen model takes sequences of frames."""
    return _MODEL.value != _PLAIN and presets.get(_MODEL.value).recurrent


def description(corpus: CorpusIndex, coefficients: int | None = None) -> dict[str, Any]:
    """The chosen model for a corpus, in a form that JSON can hold.

    Args:
        corpus: has the frames and classes.
        coefficients: the first ones of each frame that a recurrent model sees; None: all.

    Returns:
        `kind`, a name in `presets.BUILDERS`, and the builder's `arguments`; `context`, frames
        spliced on each side, `stack`, frames put together to one, and `coefficients`; the `corpus`
        and its fingerprint.

    Raises:
        ValueError: flags that do not go together, or a value out of range.
    """
    plain = _MODEL.value == _PLAIN
    shape = (_LAYERS, _WIDTH, _ACTIVATION, _CONTEXT)
    common.only_for(plain, shape, f"--model={_PLAIN}; a paper's model has a shape of its own")
    common.only_for(not plain, (_SCALE,), "a paper's model, such as --model=dnn-003")
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
        changes = {"bands": _bands(corpus)} if kind == "cldnn" else {}
        arguments = preset.resolve(
            _SCALE.value, preset.input_dim(frame_dim), corpus.num_classes, **changes
        )
    return {
        "kind": kind,
        "arguments": arguments,
        "context": context,
        "stack": stack,
        "coefficients": coefficients,
        "corpus": str(corpus.directory),
        "corpus_fingerprint": corpus.fingerprint,
    }


def _bands(corpus: CorpusIndex) -> int:
    """Mel bands of a frame: what the corpus says of itself, else 40."""
    return int(corpus.options.get("num_mel") or 40)
