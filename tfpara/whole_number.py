"""The check of arguments that are whole numbers."""

from __future__ import annotations

import numbers

LARGEST_COUNT = 2**53  # beyond it not every whole number is a float64, in which counts travel


def checked_whole(
    name: str, value: object, at_least: int = 1, of: str = "", at_most: int | None = None
) -> int:
    """Returns a whole number of Python or NumPy as an int of Python.

    Args:
        name: the argument's name, for the error.
        value: what was given.
        at_least: the smallest that is allowed.
        of: what it counts, as in "minibatches", for the error.
        at_most: the largest that is allowed; None: there is none.

    Raises:
        ValueError: it is no whole number, or outside of these limits.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        counted = f" of {of}" if of else ""
        raise ValueError(f"{name}={value!r} must be a whole number{counted}, at least {at_least}.")
    number = int(value)
    if at_most is not None and number > at_most:
        raise ValueError(f"{name}={value!r} is above {at_most}, the largest that can be counted.")
    return number
