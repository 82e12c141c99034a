"""The layers of a model that can be pretrained as RBMs; errors tell why a model has none."""

from __future__ import annotations

import keras


def hidden_layers(model: keras.Model) -> list[keras.layers.Dense]:
    """Returns the layers that `pretrain` sets, from the input up.

    Args:
        model: a model for `pretrain`.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the model is not a stack that can be pretrained; the message says where.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"pretrain needs a Keras model. Received: {type(model).__name__}")
    chain = _chain(model)
    with_weights = [layer for layer in chain if layer.weights]
    if not with_weights:
        raise ValueError(f"model {model.name!r} has no layers with weights to pretrain.")
    hidden = with_weights[:-1]
    for layer in with_weights:
        if not isinstance(layer, keras.layers.Dense):
            raise ValueError(
                f"layer {layer.name!r} is {type(layer).__name__}; RBM pretraining is for a stack "
                "of Dense layers."
            )
    if not hidden:
        raise ValueError(
            f"model {model.name!r} has no hidden layer below its output layer "
            f"{with_weights[-1].name!r} to pretrain."
        )
    for layer in hidden:
        _check_hidden(layer)
    first, last = chain.index(hidden[0]), chain.index(with_weights[-1])
    for layer in chain[first + 1 : last]:
        if layer not in hidden and not isinstance(layer, keras.layers.Dropout):
            raise ValueError(
                f"layer {layer.name!r} is {type(layer).__name__}; between the hidden layers only "
                "Dropout can be."
            )
    return hidden


def _check_hidden(layer: keras.layers.Dense) -> None:
    activation = keras.activations.serialize(layer.activation)
    if activation != "sigmoid":
        raise ValueError(
            f"layer {layer.name!r} has activation {activation!r}; the hidden units of an RBM are "
            'sigmoid. Build the model with activation="sigmoid".'
        )
    if layer.bias is None:
        raise ValueError(f"layer {layer.name!r} has no bias, and an RBM needs it: use_bias=True.")


def _chain(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers from the input to the output, each of which feeds the next one only."""
    refusal = ValueError(
        f"model {model.name!r} is not a chain of layers from one input to one output, built with "
        "keras.Sequential and keras.Input or keras.Model(inputs, outputs)."
    )
    if not model.built or len(getattr(model, "inputs", None) or []) != 1 or len(model.outputs) != 1:
        raise refusal
    layers = [la for la in model.layers if not isinstance(la, keras.layers.InputLayer)]
    feeding = model.inputs[0]
    for layer in layers:
        try:
            fed = layer.input
        except (AttributeError, ValueError) as error:  # if the layer is called twice, or never
            raise refusal from error
        if fed is not feeding:
            raise refusal
        feeding = layer.output
    return layers
