"""The fully connected acoustic model of all four papers."""

from __future__ import annotations

import keras

from models.arguments import check_sizes, kernel, logits


def dnn(
    input_dim: int,
    num_classes: int,
    *,
    layers: int = 6,
    width: int = 1024,
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int | None = None,
) -> keras.Model:
    """Builds a DNN from spliced frames to logits: `layers` hidden Dense layers, then a linear one.

    Args:
        input_dim: width of a spliced frame, such as 1320 for 11 frames of 120.
        num_classes: number of tied states.
        layers: hidden layers; 0 gives a linear classifier.
        width: units of each hidden layer.
        activation: Keras' name of the hidden activation, e.g. "relu" or "sigmoid".
        dropout: share of hidden units dropped in training, in [0, 1).
        seed: seed of the initial weights and of dropout; None draws one.

    Returns:
        A model from float32 [batch, input_dim] to float32 logits [batch, num_classes].

    Raises:
        ValueError: an argument is out of range.

    Source: Li et al. (2017), section 3.1: 1320-6×1024-5723, which are 12.5 million parameters, not
    13.5 as the paper says. `models.presets` has a note on that, and the other papers' shapes.
    """
    check_sizes(input_dim=input_dim, width=width)
    check_sizes(2, num_classes=num_classes)
    check_sizes(0, layers=layers)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1). Received: dropout={dropout!r}")
    seeds = [None if seed is None else seed * 1000 + layer for layer in range(2 * layers + 1)]
    inputs = keras.Input((input_dim,), name="frames")
    hidden = inputs
    for layer in range(layers):
        hidden = keras.layers.Dense(
            width,
            activation=activation,
            kernel_initializer=kernel(activation, seeds[layer]),
            name=f"hidden{layer + 1}",
        )(hidden)
        if dropout:
            hidden = keras.layers.Dropout(dropout, seed=seeds[layers + layer])(hidden)
    return keras.Model(inputs, logits(num_classes, seeds[-1])(hidden), name="dnn")
