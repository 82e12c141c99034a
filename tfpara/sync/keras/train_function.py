"""Replacement of the function that Keras calls for a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras


@contextlib.contextmanager
def stepping(
    model: keras.Model, step: Callable[[Callable[..., Any], Iterator[Any]], Any]
) -> Iterator[None]:
    """A context in which `fit` calls `step(function, iterator)` in place of Keras' own `function`.

    Keras makes that function in `fit`, unless an earlier `fit` has made it.
    """
    make = model.make_train_function

    def making(force: bool = False) -> None:
        make(force)
        function = model.train_function
        if not hasattr(function, "inner"):

            def ours(iterator: Iterator[Any]) -> Any:
                return step(function, iterator)

            ours.inner = function  # type: ignore[attr-defined]
            model.train_function = ours

    model.make_train_function = making
    try:
        yield
    finally:
        del model.make_train_function
        model.train_function = getattr(model.train_function, "inner", model.train_function)
