"""Checks of arguments that are whole numbers, or numbers of seconds."""

from __future__ import annotations

import numbers

# Workers send counts as float64, which holds all whole numbers up to this number exactly.
LARGEST_COUNT = 2**53
LONGEST_SECONDS = 1e9  # 31 years; TensorFlow, sockets and locks cannot wait much longer


def checked_whole(
    name: str, value: object, at_least: int = 1, of: str = "", at_most: int | None = None
) -> int:
    """Returns a whole number of Python or NumPy as an int of Python.

    Raises ValueError if it is no whole number, or outside of the limits. For the message, `name` is
    the argument's name, and `of` what the number counts, such as "minibatches".
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        counted = f" of {of}" if of else ""
        raise ValueError(f"{name}={value!r} must be a whole number{counted}, at least {at_least}.")
    number = int(value)
    if at_most is not None and number > at_most:
        raise ValueError(f"{name}={value!r} is above {at_most}, the largest that can be counted.")
    return number


def checked_seconds(name: str, seconds: float) -> float:
    """Returns a positive number of seconds, else raises ValueError."""
    if not isinstance(seconds, numbers.Real) or not seconds > 0:
        raise ValueError(f"{name}={seconds!r} must be a positive number of seconds.")
    if seconds > LONGEST_SECONDS:
        raise ValueError(
            f"{name}={seconds!r} is above {LONGEST_SECONDS:g} seconds, the longest time for which "
            "processes can wait."
        )
    return float(seconds)
