"""The inputs and layers that the recurrent models share."""

from __future__ import annotations

from typing import Any

import keras

from models.arguments import Seeds, kernel
from models.lstmp import LSTMPCell
from models.streaming import Streaming


def inputs(input_dim: int, streams: int | None) -> tuple[Any, Any, Any]:
    """Returns the inputs for `keras.Model`, the frames, and the reset flags.

    Without streams the inputs are the frames alone, and the flags are None. With streams the inputs
    are a dictionary of the frames and the flags.
    """
    frames = keras.Input((None, input_dim), name="frames")
    if streams is None:
        return frames, frames, None
    reset = keras.Input((), name="reset")
    return {"frames": frames, "reset": reset}, frames, reset


def lstm_layer(
    name: str,
    streams: int | None,
    seeds: Seeds,
    *,
    cells: int,
    projection: int = 0,
    output_projection: int = 0,
    cell_clip: float | None = None,
) -> Streaming:
    """Returns a unidirectional LSTM layer.

    Without projection it is `keras.layers.LSTM`, for which GPUs have fast kernels.
    """
    glorot = keras.initializers.GlorotUniform
    ends: dict[str, Any] = {"return_sequences": True, "return_state": True, "name": name}
    if not projection:
        layer = keras.layers.LSTM(
            cells,
            kernel_initializer=glorot(seeds()),
            recurrent_initializer=keras.initializers.Orthogonal(seed=seeds()),
            **ends,
        )
    else:
        cell = LSTMPCell(
            cells,
            projection,
            output_projection=output_projection,
            cell_clip=cell_clip,
            kernel_initializer=glorot(seeds()),
            recurrent_initializer=glorot(seeds()),
            projection_initializer=glorot(seeds()),
        )
        layer = keras.layers.RNN(cell, **ends)
    return Streaming(layer, streams, name=f"streaming_{name}")


def dense_layers(hidden: Any, count: int, width: int, activation: str, seeds: Seeds) -> Any:
    """Applies `count` Dense layers to the last axis."""
    for number in range(count):
        hidden = keras.layers.Dense(
            width,
            activation=activation,
            kernel_initializer=kernel(activation, seeds()),
            name=f"dense{number + 1}",
        )(hidden)
    return hidden
