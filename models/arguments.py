"""Helpers of all builders: checks of arguments, initial weights, the layer of logits."""

from __future__ import annotations

import keras


def check_sizes(least: int = 1, **sizes: int) -> None:
    """Raises ValueError for the first size that is below `least`, and names it."""
    for name, value in sizes.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}. Received: {name}={value!r}")


def kernel(activation: str, seed: int | None) -> keras.initializers.Initializer:
    """Returns the initialiser of the kernel of a layer with this activation."""
    # The scaling of He et al. keeps the variance of activations the same through layers of ReLU and
    # similar functions. The scaling of Glorot and Bengio suits activations that saturate.
    kind = keras.initializers.HeNormal if "elu" in activation else keras.initializers.GlorotUniform
    return kind(seed)


class Seeds:
    """Seeds for layers, derived from one seed. Each call returns the next one; for None, None."""

    def __init__(self, seed: int | None) -> None:
        self._next = None if seed is None else seed * 1000

    def __call__(self) -> int | None:
        if self._next is None:
            return None
        self._next += 1
        return self._next


def logits(num_classes: int, seed: int | None) -> keras.layers.Layer:
    """Returns the linear layer of logits."""
    return keras.layers.Dense(
        num_classes,
        kernel_initializer=keras.initializers.GlorotUniform(seed),
        dtype="float32",  # even under mixed precision, because 16 bits are too few for the loss
        name="logits",
    )
