"""What workers and parameter servers send each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Pulled(NamedTuple):
    """The result of a pull: tensors on the servers.

    Attributes:
        weights: the trainable weights, in the model's order.
        state: the averaged state (moving statistics), in the model's order.
        versions: number of pushes so far on each server.
        halted: whether workers have to stop after this block.
        minibatches: minibatches in the model so far; None unless workers have local optimizers.
        rate: learning rate of the local optimizers; None if there are none, or it is a schedule.
    """

    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    versions: list[tf.Tensor]
    halted: tf.Tensor
    minibatches: tf.Tensor | None = None
    rate: tf.Tensor | None = None

    def with_rate(self, rate: tf.Tensor) -> Pulled:
        """Returns it with the learning rate of a chunk, unless that is negative, or it has none."""
        if self.rate is None:
            return self
        return self._replace(rate=tf.where(rate >= 0.0, rate, self.rate))


class Place(NamedTuple):
    """The position of a minibatch in the data: int64 scalars, each counted from 0.

    Attributes:
        epoch: the epoch.
        chunk: the chunk of the epoch.
        start: the minibatch of the chunk.
    """

    epoch: tf.Tensor
    chunk: tf.Tensor
    start: tf.Tensor


class Push(NamedTuple):
    """The content of a push: what a worker sends after a block of minibatches.

    Attributes:
        values: for each weight its gradient (ASGD), its change since the pull (Downpour), or the
            local weight (EASGD).
        state: s − D S_pulled, for each tensor of the averaged state S (moving statistics); s is the
            worker's after the block. The server sets S ← D S + (s − D S_pulled). So S becomes that
            of one worker with all minibatches, however many pushes came since the pull.
        kept: D, the factor of each element of the state: a product over the minibatches, such as
            ρ^τ for a moving average with decay ρ.
        metrics: the minibatches' contributions to the metrics' variables, which are sums.
        worker: index of the worker.
        place: position of the block's first minibatch.
        minibatches: number of minibatches.
        samples: number of samples.
        rate: learning rate of this push; if negative, the servers' rate is used.
        squares: for each weight, the gradients' squares over the block's minibatches; empty if the
            rule does not need them.
    """

    values: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]
    kept: Sequence[tf.Tensor]
    metrics: Sequence[tf.Tensor]
    worker: tf.Tensor
    place: Place
    minibatches: tf.Tensor
    samples: tf.Tensor
    rate: tf.Tensor
    squares: Sequence[tf.Tensor] = ()


class Answer(NamedTuple):
    """The answer to a push.

    Attributes:
        versions: number of pushes on each server after it.
        moves: for each weight, what is subtracted from the local model; empty if the rule has no
            local models.
        settled: False if the push must be offered again later, because it would now make other
            workers' pushes too stale.
        included: whether the minibatches are in the model on all servers, by this push or by a
            former one.
    """

    versions: list[tf.Tensor]
    moves: list[tf.Tensor]
    settled: tf.Tensor
    included: tf.Tensor


class Moment(NamedTuple):
    """Models on the servers that were read between two pushes.

    Attributes:
        weights: by "global" or an average's name the weights, in the model's order.
        state: the moving statistics, in the order of `Server.state`.
        pushes: the number of pushes before, on the first server.
    """

    weights: dict[str, list[tf.Tensor]]
    state: list[tf.Tensor]
    pushes: int
