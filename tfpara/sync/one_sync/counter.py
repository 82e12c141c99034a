"""Counters that every training step changes, all in one variable, so that a step writes one."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfpara.typing import Array


class Counter:
    """One element of a variable that holds several counters, or, with `shape` [n], n of them.

    The variable `whole` is a float64 vector, exact for whole numbers up to 2^53.
    """

    def __init__(
        self, whole: tf.Variable, start: int, shape: Sequence[int], dtype: tf.DType = tf.float64
    ) -> None:
        self._whole = whole
        self._part = slice(start, start + shape[0]) if shape else start
        self.shape, self.dtype = tf.TensorShape(shape), dtype

    def read_value(self) -> tf.Tensor:
        return tf.cast(self._whole.read_value()[self._part], self.dtype)

    def of(self, whole: Array) -> Array:
        """Returns the counter's elements of `whole`, a value of the variable as a NumPy array."""
        return whole[self._part]

    def assign(self, value: Array | float) -> None:
        self._whole[self._part].assign(tf.cast(value, tf.float64))

    def assign_add(self, value: Array | float) -> None:
        self.assign(self._whole.read_value()[self._part] + tf.cast(value, tf.float64))

    def numpy(self) -> Array:
        return self.of(self._whole.numpy())

    def __int__(self) -> int:
        return int(self.numpy())
