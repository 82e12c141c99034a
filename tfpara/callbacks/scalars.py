"""A writer of numbers for TensorBoard."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfpara.keras_model import array_of
from tfpara.typing import Array, Scalar

_LARGEST = 10_000  # approximate limit of the number of values written for a distribution


def flat(values: Mapping[str, Scalar | Array]) -> dict[str, Scalar]:
    """Returns the values by name; an array's values have the names name/0, name/1, …"""
    return {
        f"{name}/{k}" if np.ndim(value) else name: one
        for name, value in values.items()
        for k, one in enumerate(np.ravel(array_of(value)))
    }


class Scalars:
    """Writes scalars to event files in a directory; if that is None, nothing is written.

    The files are made at the first write.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else os.fspath(directory)

    @functools.cached_property
    def _writer(self) -> tf.summary.SummaryWriter:
        # In `tf.init_scope` the writer is made in eager mode, even while a graph is traced.
        with tf.init_scope():
            return tf.summary.create_file_writer(self._directory)

    def write(self, step: int, values: Mapping[str, Scalar | Array]) -> None:
        """Writes the numbers of a step by name, but no texts.

        An array is written as name/0, name/1, …
        """
        if self._directory is None:
            return
        with self._writer.as_default(step=step):
            for name, value in flat(values).items():
                if np.asarray(value).dtype.kind not in "SUO":  # a step may return texts, too
                    tf.summary.scalar(name, value)
        self._writer.flush()

    def write_histogram(self, step: int, name: str, values: Array, counts: Array) -> None:
        """Writes a distribution at a step: how often each of `values` has occurred."""
        if self._directory is None:
            return
        # `tf.summary.histogram` takes an array that has each value as often as it has occurred.
        # Large counts are scaled down, because this array would become too large.
        shares = np.ceil(np.asarray(counts) * min(1.0, _LARGEST / max(1, np.sum(counts))))
        with self._writer.as_default(step=step):
            tf.summary.histogram(name, np.repeat(values, shares.astype(int)))
        self._writer.flush()
