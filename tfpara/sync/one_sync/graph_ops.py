"""Helpers for graphs: Python in them, functions that are not inlined, branches, the time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.typing import Nest


def in_python(
    function: Callable[..., Sequence[Any]], arguments: Sequence[Any], *specs: tf.TensorSpec
) -> list[tf.Tensor]:
    """Calls a Python function from a graph; its results are returned as tensors of the `specs`."""

    def called(*values: np.ndarray) -> list[np.ndarray]:
        returned = function(*values)
        return [np.asarray(r, s.dtype.as_numpy_dtype) for r, s in zip(returned, specs, strict=True)]

    results = tf.numpy_function(called, arguments, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    return results


def where(condition: tf.Tensor, function: Callable[[], object]) -> tf.Tensor:
    """Calls `function` if the condition holds; returns the condition, as a control dependency."""

    def called() -> tf.Tensor:
        function()
        return tf.constant(True)

    return tf.cond(condition, called, lambda: tf.constant(False))


def if_running(runs: tf.Tensor) -> tf.Tensor:
    """Returns a control dependency for operations that are to be left out if `runs` is False.

    All operations that use their results are left out as well, up to `unless_left_out`. A `tf.cond`
    would do the same, but it has a `Switch` for every tensor that its branches use.
    """
    _, token = tf.raw_ops.Switch(data=runs, pred=runs)
    # The `Switch` itself is never left out, so a control dependency on it would have no effect.
    return tf.identity(token)


def unless_left_out(runs: tf.Tensor, value: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
    """Returns `value`, which depends on `if_running(runs)`, or `otherwise` if it was left out."""
    instead, _ = tf.raw_ops.Switch(data=otherwise, pred=runs)
    return tf.raw_ops.Merge(inputs=[instead, value])[0]


class NotInlined:
    """A graph function that TensorFlow does not inline, traced once, at the first call.

    A tf.function would be traced twice, at a cost of half a second or more: once in the graph of a
    training step, and once for the first call from Python, which is outside of the strategy's
    scope.
    """

    def __init__(self, function: Callable[..., Nest], *specs: tf.TensorSpec) -> None:
        attributes = {"_noinline": True}
        in_graph = tf.function(function, specs, autograph=False, experimental_attributes=attributes)
        self._made = functools.cache(in_graph.get_concrete_function)

    @property
    def is_traced(self) -> bool:
        return self._made.cache_info().currsize > 0

    def __call__(self, *arguments: Any) -> Nest:
        return on_host(self._made(), *arguments)


def on_host(function: Callable[..., Nest], *arguments: Any) -> Nest:
    """Calls a graph function with the CPU as the device of all operations that name none."""
    # On a GPU, a result that the host needs would wait for all earlier work of the GPU.
    with tf.device("CPU:0"):
        return function(*arguments)


def compiles_on(device: str) -> bool:
    """Returns whether `fused` compiles for a device."""
    return "GPU" in device.upper()


def fused(function: Callable[..., Nest], device: str) -> Callable[..., Nest]:
    """Returns `function`, compiled by XLA into a few kernels on a GPU."""
    # Otherwise a GPU would wait for the launch of each small operation. On a CPU, XLA would round
    # otherwise than NumPy.
    if not compiles_on(device):
        return function
    return tf.function(function, jit_compile=True, autograph=False)


def now() -> tf.Tensor:
    """Returns the seconds on the monotonic clock, float64."""
    # The time is converted to np.float64, because numpy_function would turn a Python float into
    # float32 in eager mode.
    return tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
