"""Compilation by XLA of each replica's step, rather than of the function around it as in Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfpara.sync.keras.optimizer_steps import build_optimizers
from tfpara.sync.keras.replacing import Method, for_ours
from tfpara.sync.keras.several_steps import several_steps
from tfpara.sync.tensorflow.compiled_step import CompiledStep, explained
from tfpara.typing import Nest


@for_ours
def compiled_by_default(resolve: Method, strategy: Any, model: keras.Model) -> bool:
    """Decides `jit_compile="auto"` by the strategy's devices, as Keras does without a strategy."""
    if not any("GPU" in device.upper() for device in strategy.extended.worker_devices):
        return False
    with _holding(model, "_distribute_strategy", None):
        return resolve(model)


@for_ours
def compiled_by_replica(
    make: Method, strategy: Any, model: keras.Model, step: Callable[..., Nest]
) -> object:
    """Makes a function of `fit` or `evaluate`; XLA compiles each replica's step, not the sync."""
    compiles = model.jit_compile and not model.run_eagerly
    guarded = strategy.extended.steps.guard is not None  # by values before the step
    trains = step.__name__ == "train_step" and model.trainable_variables
    # XLA makes no variables. All workers must make them here, and those on CPUs may not use XLA.
    if trains and (compiles or guarded or len(strategy.extended.worker.kinds) > 1):
        build_optimizers(model)
    if not compiles:
        return _made(make, model, step)
    with _holding(model, "_jit_compile", False):
        return explained(_made(make, model, CompiledStep(step)))


def _made(make: Method, model: keras.Model, step: Callable[..., Nest]) -> Callable[..., Nest]:
    function = make(model, step)
    if model.run_eagerly or model.steps_per_execution == 1:
        return function
    return several_steps(model, step, function)


@contextlib.contextmanager
def _holding(model: keras.Model, attribute: str, value: object) -> Iterator[None]:
    """Gives an attribute of a model another value for a while, past the checks of its property."""
    former = getattr(model, attribute)
    setattr(model, attribute, value)
    try:
        yield
    finally:
        setattr(model, attribute, former)
