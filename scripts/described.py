"""The check of a run's model.json before a model is built from it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from input.streams import NORMALISATIONS
from models.presets import BUILDERS

# The builders' arguments that are not sizes, and the types of these arguments' values.
_OTHERS = {"activation": (str,), "dropout": (int, float), "cell_clip": (int, float, type(None))}
# The program that builds a model sets these arguments of the builder. So a description must not
# have them among its "arguments".
_SEEDS = ("seed", "streams")
_LARGEST = 1 << 20  # limit for numbers that describe the data; the model's sizes have other limits
# A layer takes at least this many bytes in a file of weights. So the size of the file limits the
# number of layers.
_LAYER_BYTES = 100


def check(description: Any, room: int) -> None:
    """Refuses a description that no run wrote, or whose model is too large for its weights.

    So a damaged description cannot make a program allocate far more than the size of the weights.

    Args:
        description: content of model.json.
        room: size of the file of weights, in bytes.

    Raises:
        ValueError: the description is wrong; the message names the key and its value.
    """
    if not isinstance(description, dict) or not isinstance(description.get("arguments"), dict):
        raise ValueError("it has no arguments of a model")
    kind = description.get("kind")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise ValueError(f"kind={_shown(kind)} is not one of {', '.join(BUILDERS)}")
    sizes = _sizes(kind, description["arguments"])
    layers = sizes["layers"] + sizes.get("dense", 0)
    if layers * _LAYER_BYTES > room or least_weights(kind, sizes) > 4 * room:
        raise ValueError(
            f"its model has {layers} layers and {least_weights(kind, sizes)} weights or more, and "
            f"the file of its weights has {room} bytes"
        )
    for name in ("context", "stack"):
        _check_number(name, description.get(name), sizes["input_dim"])
    for name in ("streams", "truncation", "label_delay"):
        _check_number(name, description.get(name, 0), _LARGEST)
    if description.get("coefficients") is not None:
        _check_number("coefficients", description["coefficients"], sizes["input_dim"])
    if description.get("normalisation", "global") not in NORMALISATIONS:
        raise ValueError(f"normalisation={_shown(description['normalisation'])} is unknown")
    if "frames" in description:
        _check_frames(description["frames"])


def least_weights(kind: str, sizes: Mapping[str, int]) -> int:
    """Returns the number of weights in the large matrices: a lower limit for the whole model.

    Args:
        kind: name of the builder.
        sizes: the builder's arguments that are sizes, by name.
    """
    if kind == "dnn":
        return _dense(sizes["input_dim"], sizes["layers"], sizes)
    cells, back = sizes["cells"], sizes["projection"] or sizes["cells"]
    out = back + (sizes.get("output_projection", 0) if sizes["projection"] else 0)
    into, before = sizes["input_dim"], 0
    if kind == "cldnn":
        bands = max(1, sizes["bands"])
        pooled = (bands - sizes["band_filter"] + 1) // max(1, sizes["band_pool"])
        before = sizes["maps"] * sizes["band_filter"] * (into // bands)
        before += pooled * sizes["maps"] * sizes["reduction"]
        into = sizes["reduction"] or pooled * sizes["maps"]
    recurrent = 4 * cells * (into + back + (sizes["layers"] - 1) * (out + back))
    return before + recurrent + _dense(out, sizes["dense"], sizes)


def _dense(into: int, layers: int, sizes: Mapping[str, int]) -> int:
    """Returns the number of weights of Dense layers of one width, and of the logits after them."""
    width, classes = sizes["width"], sizes["num_classes"]
    if not layers:
        return into * classes
    return into * width + (layers - 1) * width**2 + width * classes


def _sizes(kind: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns all sizes of a model, including defaults."""
    try:
        bound = inspect.signature(BUILDERS[kind]).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"its arguments are not those of {kind} ({error})"[:200]) from None
    bound.apply_defaults()
    sizes = {}
    for name, value in bound.arguments.items():
        if name in _OTHERS:
            if type(value) not in _OTHERS[name] or value != value:
                raise ValueError(f"{name}={_shown(value)}")
        elif name not in _SEEDS:
            _check_number(name, value, 1 << 40)
            sizes[name] = value
        elif name in arguments:
            raise ValueError(f"{name} is no argument that a run keeps")
    return sizes


def _check_frames(frames: Any) -> None:
    if not isinstance(frames, dict) or set(frames) != {
        *("feature_dim", "mean", "stddev", "options", "classes")
    }:
        raise ValueError(f"frames={_shown(frames)} is no description of frames")
    dim, options = frames["feature_dim"], frames["options"]
    _check_number("feature_dim", dim, _LARGEST)
    for name in ("mean", "stddev"):
        values = frames[name]
        right = isinstance(values, list) and len(values) == dim and all(map(_is_finite, values))
        if not right or (name == "stddev" and min(values, default=0) <= 0):
            raise ValueError(f"{name}={_shown(values)} is not {dim} numbers that frames can have")
    if not isinstance(options, dict) or not isinstance(frames["classes"], str):
        raise ValueError("its frames have no options or no classes")
    for name, value in options.items():
        if type(value) in (int, float):
            _check_number(name, int(value) if _is_finite(value) else -1, _LARGEST)
        elif not isinstance(value, str | bool | None):
            raise ValueError(f"{name}={_shown(value)}")
    _check_number("deltas", options.get("deltas", 0), max(0, dim - 1))


def _check_number(name: str, value: Any, largest: int) -> None:
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{name}={_shown(value)} is no whole number from 0 to {largest}")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e38 and math.isfinite(value)


def _shown(value: Any) -> str:
    return repr(value)[:60]
