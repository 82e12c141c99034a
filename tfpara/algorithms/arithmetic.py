"""Functions for rules, in arithmetic that NumPy and TensorFlow share."""

from __future__ import annotations

import numbers

from tfpara.typing import Scalar


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """Returns min(a, b): exactly a if a is smaller, else b with a rounding error."""
    return a + 0.5 * ((b - a) - abs(b - a))


def check_number(name: str, value: object, usual: str) -> None:
    """Raises TypeError, which tells a `usual` value, if the argument `name` is not a number."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is no number. Give one, such as {usual}.")


def positive_part(x: Scalar) -> Scalar:
    """Returns max(x, 0)."""
    return 0.5 * (x + abs(x))
