"""A replica's step as a function of its own, which XLA compiles; the sync stays outside of it."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfpara.typing import Nest


class CompiledStep:
    """The `train_step` or `test_step` of a model with `jit_compile`, compiled by XLA.

    Keras compiles what all replicas do as one function, which XLA cannot where they exchange
    something in it; so Keras' "auto" is off under every strategy. Between syncs the replicas of a
    `PeriodicSyncStrategy` exchange nothing, and each one's step is compiled for its device.

    XLA compiles once for each shape of a minibatch, so a smaller last one is compiled again, once.

    Args:
        step: the bound method. This object has its name and its model, as the method has.
    """

    def __init__(self, step: Callable[..., Nest]) -> None:
        self.__self__: keras.Model = step.__self__  # type: ignore[attr-defined]
        self.__name__ = step.__name__
        self._step = step

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Nest, **kwargs: Nest) -> Nest:
        """Calls the step in the graph that Keras traces, for one replica."""
        # A replica's variables are its own, so each replica needs a function of its own.
        function = tf.function(self._step, jit_compile=True, autograph=False)
        return function(*args, **kwargs)
