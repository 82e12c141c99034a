"""The plan by which each layer of a model gets its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfpara.typing import Json

ROWS = "rows"  # natural, from the rows of the minibatch: Dense
MATRIX = "matrix"  # natural, from the summed gradient: convolutions
PLAIN = "plain"  # as it is: all others


def plan(model: keras.Model) -> list[tuple[keras.Layer, dict[str, Json]]]:
    """The layers with trainable weights, and for each how its gradient is made.

    An entry has the kind of the layer, the places of its variables (kernel first) in the model's
    trainable ones, and the width of its input rows.
    """
    place = {id(v): number for number, v in enumerate(model.trainable_variables)}
    found = []
    for layer, bare in _leaves(model):
        weights = [v for v in layer.trainable_variables if id(v) in place]
        kind = _kind(layer, weights) if bare else PLAIN
        entry: dict[str, Json] = {"kind": kind, "variables": [place.pop(id(v)) for v in weights]}
        if kind != PLAIN:
            entry["width"] = _size(weights[0]) // weights[0].shape[-1] + len(weights) - 1
        if weights:
            found.append((layer, entry))
    if place:  # weights that a model itself has
        found.append((model, {"kind": PLAIN, "variables": sorted(place.values())}))
    return found


def _leaves(layer: keras.Layer, bare: bool = True) -> list[tuple[keras.Layer, bool]]:
    """The layers that are made of no others, each once, and whether they are called as they are.

    Wrappers and recurrent layers call what they hold in loops or on parts of their input.
    """
    # Keras' own way to a layer's parts, which has no public name.
    parts = list(layer._flatten_layers(include_self=False, recursive=False))
    if not parts:
        return [(layer, bare)]
    bare = bare and not isinstance(layer, (keras.layers.Wrapper, keras.layers.RNN))
    # A layer may have weights of its own beside its parts.
    found: dict[int, tuple[keras.Layer, bool]] = {}
    for part in parts:
        for leaf, alone in _leaves(part, bare):
            found[id(leaf)] = (leaf, alone and found.get(id(leaf), (leaf, True))[1])
    return list(found.values())


def _kind(layer: keras.Layer, weights: Sequence[keras.Variable]) -> str:
    """`ROWS` or `MATRIX` where kernel and bias are all that a layer of that kind trains."""
    own = [
        v for v in (getattr(layer, "kernel", None), getattr(layer, "bias", None)) if v is not None
    ]
    if [id(v) for v in own] != [id(v) for v in weights]:
        return PLAIN
    if isinstance(layer, keras.layers.Dense) and type(layer).call is keras.layers.Dense.call:
        return ROWS
    convolutions = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
    return MATRIX if type(layer) in convolutions else PLAIN


def _size(variable: keras.Variable) -> int:
    return int(tf.TensorShape(variable.shape).num_elements())
