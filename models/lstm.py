"""The recurrent acoustic model of the paper on exponential moving averages."""

from __future__ import annotations

import keras

from models.arguments import Seeds, check_sizes, logits
from models.recurrent import dense_layers, inputs, lstm_layer


def lstm(
    input_dim: int,
    num_classes: int,
    *,
    layers: int = 2,
    cells: int = 1024,
    projection: int = 0,
    dense: int = 1,
    width: int = 1024,
    activation: str = "relu",
    streams: int | None = None,
    seed: int | None = None,
) -> keras.Model:
    """Builds a model of unidirectional LSTM layers, Dense layers and logits.

    Args:
        input_dim: width of a frame, 252 for 3 stacked frames of 84.
        num_classes: number of tied states.
        layers: LSTM layers, at least 1.
        cells: number of memory cells of each LSTM layer.
        projection: width of the layers' recurrent projection (see `models.lstmp`); 0 for none.
        dense: number of Dense layers after the LSTM layers.
        width: units of each Dense layer.
        activation: Keras' name of the activation of the Dense layers.
        streams: for truncated BPTT, the number of rows of each batch. A row's state is carried over
            to the next batch (see `models.streaming`). None takes whole utterances.
        seed: seed of the initial weights; None draws one.

    Returns:
        A model from float32 [batch, frames, input_dim] to float32 logits [batch, frames,
        num_classes]. With streams its input is {"frames": [streams, frames, input_dim], "reset":
        [streams]}; "reset" is 1 for rows in which an utterance starts, and 0 for others.

    Raises:
        ValueError: an argument is out of range.

    Source: "Exponential moving average model in parallel speech recognition training" (2017),
    section 3.2: 84 × 3 inputs, two LSTM layers, a full-connection layer, 11088 states. The paper
    does not give the widths (1024 here), nor the Dense layer's activation (ReLU here), and its
    "sigmoid activation function" is read as that of the gates.
    """
    check_sizes(input_dim=input_dim, layers=layers, cells=cells, width=width)
    check_sizes(2, num_classes=num_classes)
    check_sizes(0, projection=projection, dense=dense)
    seeds = Seeds(seed)
    taken, hidden, reset = inputs(input_dim, streams)
    for number in range(layers):
        layer = lstm_layer(f"lstm{number + 1}", streams, seeds, cells=cells, projection=projection)
        hidden = layer(hidden, reset=reset)
    hidden = dense_layers(hidden, dense, width, activation, seeds)
    return keras.Model(taken, logits(num_classes, seeds())(hidden), name="lstm")
