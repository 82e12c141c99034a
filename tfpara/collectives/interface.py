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
    of `tf.errors`, which `tfpara.cluster.failures.explain` puts into a sentence. An eager operation
    raises `UnavailableError` for a dead worker and `DeadlineExceededError` for a silent one.

    Attributes:
        scatters_well: whether reduce_scatter and all_gather together take no longer than all_reduce
            on slow links. If they use an all-to-all, they take longer from three workers on: a
            worker's messages to several others share its link, and some links are idle while others
            are full.
    """

    @property
    def size(self) -> int:
        """The number of workers."""

    @property
    def rank(self) -> int:
        """This worker's rank, 0 … size − 1."""

    @property
    def scatters_well(self) -> bool: ...

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each buffer element-wise over the workers; buffers are sent in parallel."""

    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each buffer over the workers; returns this rank's parts of the sums.

        The buffers' lengths are multiples of `size`; rank r gets the r-th of `size` equal parts.
        """

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row r of this worker's rows to rank r; returns the received rows, by sender.

        The sent and the received rows have the shape [size, ...].
        """

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the workers' buffers, of equal shape, stacked by rank: shape [size, ...]."""

    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the buffer of rank 0."""

    def barrier(self, name: str) -> None:
        """Waits until every worker has called this."""
