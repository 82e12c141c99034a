"""The interface that every collectives backend has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf


class Collectives(Protocol):
    """Operations that every worker of a group takes part in; usable eagerly and in graphs.

    Where a peer has died or was silent for longer than the timeout, all of them raise a `tf.errors`
    of the backend's, of which `tfpara.cluster.failures.explain` makes a sentence. Called eagerly
    they raise `UnavailableError` for the dead and `DeadlineExceededError` for the silent.

    size: of the group. rank: of this worker, 0 … size − 1. summed: the dtypes that all_reduce and
    reduce_scatter add up. full_duplex: whether reduce_scatter, all_to_all and all_gather between
    two workers send and receive at the same time, as all_reduce does.
    """

    size: int
    rank: int
    summed: frozenset[tf.DType]
    full_duplex: bool

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Element-wise sums over the workers of each float buffer; buffers travel in parallel."""

    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Of each float buffer, this rank's part of the sums over the workers.

        Lengths are multiples of `size`; rank r gets the r-th of `size` equal parts.
        """

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Row r of each worker's int32 rows goes to rank r; returns the rows received, by sender.

        The rows have the shape [size, ...].
        """

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The workers' buffers (of equal shape) stacked by rank, shape [size, ...]."""

    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The buffer of rank 0."""

    def barrier(self, name: str) -> None:
        """Returns once every worker has called it."""
