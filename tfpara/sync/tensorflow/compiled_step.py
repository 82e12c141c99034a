"""A replica's step as a function of its own, which XLA compiles; it does not include the sync."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpara.typing import Nest


class CompiledStep:
    """The `train_step` or `test_step` of a model with `jit_compile`, compiled by XLA.

    Keras compiles the steps of all replicas as one function. XLA cannot compile this function if
    replicas exchange something in it, so Keras' "auto" is off under every strategy. The replicas of
    a `PeriodicSyncStrategy` exchange nothing between syncs, so the step of each replica is compiled
    by itself, for the replica's device.

    XLA compiles once for each shape of a minibatch, so once more for a smaller last minibatch. The
    object has the name and the model (`__self__`) of the bound method `step`.
    """

    def __init__(self, step: Callable[..., Nest]) -> None:
        self.__self__: keras.Model = step.__self__  # type: ignore[attr-defined]
        self.__name__ = step.__name__
        self._step = step

    def around(self, wrap: Callable[[Callable[..., Nest]], Callable[..., Nest]]) -> CompiledStep:
        """Returns a compiled step of the method that `wrap` makes from this step's method."""
        wrapped = CompiledStep(self)
        wrapped._step = wrap(self._step)
        return wrapped

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Nest, **kwargs: Nest) -> Nest:
        """Calls the step in the graph that Keras traces, for one replica."""

        def restored(leaves: list[Any]) -> Nest:
            tensors = [
                tf.bitcast(leaf, tf.int32) if was_int32 else leaf
                for leaf, was_int32 in zip(leaves, int32, strict=True)
            ]
            step_args, step_kwargs = tf.nest.pack_sequence_as((args, kwargs), tensors)
            return self._step(*step_args, **step_kwargs)

        # TensorFlow keeps int32 arguments of a function in the host's memory. To fetch such
        # arguments from a GPU (labels, for example), the host would have to wait until the GPU has
        # done the step before. To avoid this, the bits of int32 arguments are passed as float32.
        leaves = tf.nest.flatten((args, kwargs))
        int32 = [isinstance(leaf, tf.Tensor) and leaf.dtype == tf.int32 for leaf in leaves]
        carried = [
            tf.bitcast(leaf, tf.float32) if was_int32 else leaf
            for leaf, was_int32 in zip(leaves, int32, strict=True)
        ]
        # Each replica has variables of its own, so it also needs a function of its own.
        return tf.function(restored, jit_compile=True, autograph=False)(carried)


# `_NO_CODE` and `_NO_SHAPE` match XLA's messages about an operation for which XLA has no code, and
# about an operation whose shape depends on data. `_NODE` matches the name of the operation.
_NO_CODE = re.compile(r"trying to compile graph .*?: (\w+) \(No registered", re.DOTALL)
_NO_SHAPE = re.compile(r"must be a compile-time constant")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")


def explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' function of a compiled step, with errors that name what XLA cannot compile."""

    @functools.wraps(function)
    def calling(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.OpError as error:
            problem = _problem(str(error))
            if not problem:
                raise
            raise ValueError(problem) from error

    return calling


def _problem(message: str) -> str:
    """Returns a sentence on what XLA could not compile, or "" for any other error."""
    no_code, node = _NO_CODE.search(message), _NODE.search(message)
    if not (no_code or _NO_SHAPE.search(message)):
        return ""
    what = f"operation {no_code[1]}" if no_code else "an operation whose shape depends on its data"
    where = f" of {node[1]!r}" if node else ""
    return (
        f"jit_compile=True: XLA cannot compile {what}{where}. Compile the model with "
        "jit_compile=False, or write the layer without that operation."
    )
