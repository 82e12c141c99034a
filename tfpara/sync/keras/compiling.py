"""Compilation by XLA: of each replica's step, not of the function around it as Keras has it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras

from tfpara.sync.keras.optimizer_steps import build_optimizers
from tfpara.sync.keras.replacing import Method, strategy_of_ours
from tfpara.sync.tensorflow.compiled_step import CompiledStep
from tfpara.typing import Nest


def compiled_by_default(resolve: Method) -> Method:
    """Replaces what decides for `jit_compile="auto"`: as without a strategy, for our devices."""

    @functools.wraps(resolve)
    def resolving(model: keras.Model) -> bool:
        strategy = strategy_of_ours(model)
        if strategy is None:
            return resolve(model)
        if not any("GPU" in device.upper() for device in strategy.extended.worker_devices):
            return False
        with _holding(model, "_distribute_strategy", None):
            return resolve(model)

    return resolving


@contextlib.contextmanager
def _holding(model: keras.Model, attribute: str, value: object) -> Iterator[None]:
    """Gives an attribute of a model another value for a while, past the checks of its property."""
    former = getattr(model, attribute)
    setattr(model, attribute, value)
    try:
        yield
    finally:
        setattr(model, attribute, former)


def compiled_by_replica(make: Method) -> Method:
    """Replaces what makes the functions of `fit` and `evaluate`.

    XLA compiles each replica's step, and not the function around it, which has the sync.
    """

    @functools.wraps(make)
    def making(model: keras.Model, step: Callable[..., Nest]) -> object:
        if strategy_of_ours(model) is None or not model.jit_compile or model.run_eagerly:
            return make(model, step)
        if step.__name__ == "train_step" and model.trainable_variables:
            build_optimizers(model)  # XLA makes no variables
        with _holding(model, "_jit_compile", False):
            return make(model, CompiledStep(step))

    return making
