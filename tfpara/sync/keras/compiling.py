"""Compilation by XLA of each replica's step, rather than of the function around it as in Keras."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras

from tfpara.contexts import attributes
from tfpara.sync.keras.optimizer_steps import build_optimizers
from tfpara.sync.keras.replacing import Method, for_ours
from tfpara.sync.keras.several_steps import several_steps
from tfpara.sync.tensorflow.compiled_step import CompiledStep, explained
from tfpara.typing import Nest


@for_ours
def compiled_by_default(resolve: Method, strategy: Any, model: keras.Model) -> bool:
    """Decides whether `jit_compile="auto"` compiles: on GPUs if Keras would without a strategy."""
    if not any("GPU" in device.upper() for device in strategy.extended.worker_devices):
        return False
    with attributes(model, _distribute_strategy=None):  # the attribute has no public setter
        return resolve(model)


@for_ours
def compiled_by_replica(
    make: Method, strategy: Any, model: keras.Model, step: Callable[..., Nest]
) -> object:
    """Makes the function that `fit` or `evaluate` calls; XLA compiles the steps, not the sync."""
    step = _bound(step, model)
    compiles = model.jit_compile and not model.run_eagerly
    guarded = strategy.extended.steps.guard is not None
    trains = step.__name__ == "train_step" and model.trainable_variables
    # The optimizers' slots are made here, because XLA cannot create them in a step, and the NaN
    # guard reads them before each step. If some workers have GPUs and others have CPUs, XLA may
    # compile the step on GPUs only. Then the slots are also made here on CPUs, since all workers
    # must make variables at the same point.
    if trains and (compiles or guarded or len(strategy.extended.worker.kinds) > 1):
        build_optimizers(model)
    if not compiles:
        return _made(make, model, step)
    with attributes(model, _jit_compile=False):  # the public setter would check the model again
        return explained(_made(make, model, CompiledStep(step)))


def _bound(step: Callable[..., Nest], model: keras.Model) -> Callable[..., Nest]:
    """Returns a step as a method of its model, in which `run` finds the model and the step's name.

    A function assigned to `model.train_step`, or decorated by `tf.function`, is no method.
    """
    names = (each for each in ("train_step", "test_step") if getattr(model, each) == step)
    name = next(names, None) or step.__name__
    if getattr(step, "__self__", None) is model and step.__name__ == name:
        return step

    def bound(model: keras.Model, data: Nest) -> Nest:
        return step(data)

    bound.__name__ = name
    return types.MethodType(bound, model)


def _made(make: Method, model: keras.Model, step: Callable[..., Nest]) -> Callable[..., Nest]:
    function = make(model, step)
    if model.run_eagerly or model.steps_per_execution == 1:
        return function
    return several_steps(model, step, function)
