"""The check of arguments that are whole numbers."""

from __future__ import annotations

import numbers


def checked_whole(name: str, value: object, at_least: int = 1, of: str = "") -> int:
    """Returns a whole number of Python or NumPy as an int of Python.

    Args:
        name: the argument's name, for the error.
        value: what was given.
        at_least: the smallest that is allowed.
        of: what it counts, as in "minibatches", for the error.

    Raises:
        ValueError: it is no whole number, or smaller than `at_least`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        counted = f" of {of}" if of else ""
        raise ValueError(f"{name}={value!r} must be a whole number{counted}, at least {at_least}.")
    return int(value)
