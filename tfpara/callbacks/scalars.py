"""Numbers for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class Scalars:
    """Writes scalars to event files of a directory, which are made at the first ones.

    Args:
        directory: of the event files; None: nothing is written.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = directory
        self._writer: tf.summary.SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes values by name, as those of a step."""
        if self._directory is None:
            return
        if self._writer is None:
            # A writer is a resource: not one of the strategy's, even where fit runs in its scope.
            with tf.init_scope():
                self._writer = tf.summary.create_file_writer(os.fspath(self._directory))
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()
