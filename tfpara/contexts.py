"""Contexts in which attributes of an object, or a context variable, have other values."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

_Value = TypeVar("_Value")


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
