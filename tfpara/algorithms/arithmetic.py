"""Functions that rules need, in arithmetic that NumPy and TensorFlow share."""

from __future__ import annotations

from tfpara.typing import Scalar


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """Returns min(a, b); exactly a where that is the smaller one.

    Example:
        >>> minimum(0.25, 0.5), minimum(0.5, 0.25)
        (0.25, 0.25)
    """
    return a + 0.5 * ((b - a) - abs(b - a))


def positive_part(x: Scalar) -> Scalar:
    """Returns max(x, 0).

    Example:
        >>> positive_part(-2.0), positive_part(2.0)
        (0.0, 2.0)
    """
    return 0.5 * (x + abs(x))
