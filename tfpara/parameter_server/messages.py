"""The messages between workers and parameter servers, as tuples of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

# Of tables that travel by rows, by index among the trainable weights: the ids of a block, int64
# [rows], rising and each once.
Rows: TypeAlias = Mapping[int, tf.Tensor]
NO_ROWS: Rows = {}  # all weights travel whole


class Pulled(NamedTuple):
    """The result of a pull: tensors on the worker, and `held` on the servers."""

    # the trainable weights, in the model's order; of a table that travels by rows, these rows
    weights: list[tf.Tensor]
    state: list[tf.Tensor]  # the averaged state (moving statistics), in the model's order
    versions: list[tf.Tensor]  # number of pushes so far on each server
    halted: tf.Tensor  # whether workers have to stop after this block
    minibatches: tf.Tensor | None = None  # in the model so far; None if servers have the optimizers
    # of the workers' optimizers; None without them, and for a schedule
    rate: tf.Tensor | None = None
    # the weights on the servers, for pushes that need them there (delay compensation); else empty
    held: Sequence[tf.Tensor] = ()

    def with_rate(self, rate: tf.Tensor) -> Pulled:
        """Returns it with a chunk's learning rate, unless `rate` is negative or it has no rate."""
        if self.rate is None:
            return self
        return self._replace(rate=tf.where(rate >= 0.0, rate, self.rate))


class Place(NamedTuple):
    """The position of a minibatch in the data: int64 scalars, each counted from 0."""

    epoch: tf.Tensor
    chunk: tf.Tensor  # number of the chunk in the epoch
    start: tf.Tensor  # number of the minibatch in the chunk


class Push(NamedTuple):
    """The content of a push: what a worker sends after a block of minibatches.

    Attributes:
        values: for each weight its gradient (ASGD), its change since the pull (Downpour), or the
            local weight (EASGD). Of a table in `rows`: those of these rows.
        state: s − D S_pulled, for each tensor of the averaged state S (moving statistics); s is the
            worker's state after the block. The server sets S ← D S + (s − D S_pulled). So S becomes
            the state of one worker with all minibatches, however many pushes came since the pull.
        kept: D, the factor of each element of the state: a product over the minibatches, such as
            ρ^τ for a moving average with decay ρ.
    """

    values: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]
    kept: Sequence[tf.Tensor]
    metrics: Sequence[tf.Tensor]  # increments of the metrics' variables, which are sums
    worker: tf.Tensor  # index of the worker
    place: Place  # the place of the block's first minibatch
    minibatches: tf.Tensor  # number of minibatches
    samples: tf.Tensor  # number of samples
    rate: tf.Tensor  # learning rate of this push; if negative, the servers' rate is used
    rows: Rows = NO_ROWS
    squares: Sequence[tf.Tensor] = ()  # sums of the gradients' squares; empty if not needed
    left_out: Sequence[tf.Tensor] = ()  # the number of minibatches left out; empty if none can be
    version: tf.Tensor | None = None  # of the server at the pull; in the part that a server gets


class Answer(NamedTuple):
    """The answer to a push.

    Attributes:
        settled: False if the push must be offered again later, because it would now make other
            workers' pushes too stale.
        included: whether the minibatches are in the model on all servers, by this or an earlier
            push.
    """

    versions: list[tf.Tensor]  # number of pushes on each server, with this one
    moves: list[tf.Tensor]  # what is subtracted from each local weight; empty without local models
    settled: tf.Tensor
    included: tf.Tensor


class Moment(NamedTuple):
    """The models on the servers at one moment, between two pushes."""

    weights: dict[str, list[tf.Tensor]]  # by "global" or an average's name, in the model's order
    state: list[tf.Tensor]  # the moving statistics, in the order of `Server.state`
    pushes: int  # pushes on the first server before that moment
