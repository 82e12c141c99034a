"""Contexts with other values of attributes or context variables, or without the collector."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from collections.abc import Iterator
from typing import TypeVar

_Value = TypeVar("_Value")
_changing = threading.RLock()  # a handler of signals may come within it in the same thread
_without_collector = 0  # the number of contexts of `no_garbage_collection`, in all threads
_collects = True  # whether the collector was on before the first of these contexts


@contextlib.contextmanager
def attributes(owner: object, **values: object) -> Iterator[None]:
    """A context in which the named attributes of an object, or of a module, have these values."""
    former = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in former.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def context_variable(variable: contextvars.ContextVar[_Value], value: _Value) -> Iterator[None]:
    """A context in which a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context in which Python's collector of reference cycles does not run, in any thread."""
    global _without_collector, _collects
    with _changing:
        if not _without_collector:
            _collects = gc.isenabled()
        _without_collector += 1
        gc.disable()
    try:
        yield
    finally:
        with _changing:
            _without_collector -= 1
            if not _without_collector and _collects:
                gc.enable()
