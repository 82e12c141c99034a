"""The plan of a model's layers: the kind of gradient for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfpara.typing import Json

# The natural gradient of a Dense layer is computed from two matrices: the layer's inputs, and the
# derivatives of its outputs. Both matrices have a row for each sample (or frame) of the minibatch.
# The natural gradient of a convolution is computed from its ordinary gradient over the minibatch.
ROWS = "rows"  # natural gradient of Dense layers
MATRIX = "matrix"  # natural gradient of convolutions
PLAIN = "plain"  # ordinary gradient of all other layers


def plan(model: keras.Model) -> list[tuple[keras.Layer, dict[str, Json]]]:
    """Returns the layers with trainable weights, each with its entry in the plan.

    An entry has the kind of the layer, and the indices of its variables (kernel first) among the
    model's trainable ones. Unless the kind is `PLAIN`, it also has the width of the input rows,
    with the 1 that is appended for a bias.
    """
    place = {id(v): number for number, v in enumerate(model.trainable_variables)}
    found = []
    for layer, bare in _leaves(model):
        weights = [v for v in layer.trainable_variables if id(v) in place]
        kind = _kind(layer, weights) if bare else PLAIN
        entry: dict[str, Json] = {"kind": kind, "variables": [place.pop(id(v)) for v in weights]}
        if kind != PLAIN:
            size = tf.TensorShape(weights[0].shape).num_elements()
            entry["width"] = int(size) // weights[0].shape[-1] + len(weights) - 1
        if weights:
            found.append((layer, entry))
    # The remaining weights belong to the model itself or to layers that contain other layers.
    if place:
        found.append((model, {"kind": PLAIN, "variables": sorted(place.values())}))
    return found


def _leaves(layer: keras.Layer, bare: bool = True) -> list[tuple[keras.Layer, bool]]:
    """Returns the layers that contain no others, each once, and whether each is bare.

    A layer is bare if no wrapper and no recurrent layer contains it: these call the layers inside
    them in loops or on parts of their input.
    """
    # Keras has no public method that gives the layers inside a layer.
    parts = list(layer._flatten_layers(include_self=False, recursive=False))
    if not parts:
        return [(layer, bare)]
    bare = bare and not isinstance(layer, (keras.layers.Wrapper, keras.layers.RNN))
    # A layer may have weights besides those of its parts. They are left out here, because `plan`
    # adds them to the model's entry.
    found: dict[int, tuple[keras.Layer, bool]] = {}
    for part in parts:
        for leaf, alone in _leaves(part, bare):
            found[id(leaf)] = (leaf, alone and found.get(id(leaf), (leaf, True))[1])
    return list(found.values())


def _kind(layer: keras.Layer, weights: Sequence[keras.Variable]) -> str:
    """Returns the kind of a layer; `PLAIN` unless it trains exactly its kernel and bias."""
    own = [
        v for v in (getattr(layer, "kernel", None), getattr(layer, "bias", None)) if v is not None
    ]
    if [id(v) for v in own] != [id(v) for v in weights]:
        return PLAIN
    if isinstance(layer, keras.layers.Dense) and type(layer).call is keras.layers.Dense.call:
        return ROWS
    convolutions = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
    return MATRIX if type(layer) in convolutions else PLAIN
