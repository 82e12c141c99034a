"""The interface of collectives backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf


class Collectives(Protocol):
    """Collective operations of a group of workers, for eager calls and graphs.

    Every worker of the group must take part in each operation. All backends accept float16,
    float32, float64, int32 and int64.

    If a worker has died, or was silent for longer than the timeout, each operation raises an error
    of `tf.errors`, which `tfpara.cluster.failures.explain` puts into a sentence. Called eagerly, it
    raises `UnavailableError` for a dead worker and `DeadlineExceededError` for a silent one.

    Attributes:
        full_duplex: whether reduce_scatter, all_to_all and all_gather between two workers send and
            receive at the same time, as all_reduce does.
    """

    @property
    def size(self) -> int:
        """The number of workers."""

    @property
    def rank(self) -> int:
        """This worker's rank, 0 … size − 1."""

    full_duplex: bool

    @property
    def way(self) -> str:
        """The connection of the workers, in words for the user."""

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each buffer element-wise over the workers; buffers are sent in parallel."""

    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each buffer over the workers; returns this rank's parts of the sums.

        Lengths are multiples of `size`; rank r gets the r-th of `size` equal parts.
        """

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row r of this worker's rows to rank r; returns the received rows, by sender.

        Both have the shape [size, ...].
        """

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the workers' buffers, of equal shape, stacked by rank: shape [size, ...]."""

    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the buffer of rank 0."""

    def barrier(self, name: str) -> None:
        """Waits until every worker has called it."""
