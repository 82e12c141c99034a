"""The search for the learning rate of each chunk, on the worker that trains the chunk."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpara.algorithms.keras_step import KerasSteps
from tfpara.parameter_server.chunks import Chunks
from tfpara.parameter_server.exchange import Exchange
from tfpara.parameter_server.messages import Pulled
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.worker_step import ChooseRate, WorkerStep
from tfpara.schedules import candidate_rates
from tfpara.typing import Nest


@dataclasses.dataclass(frozen=True)
class ChunkRateSearch:
    """Tries several learning rates on the first part of each chunk and takes the best one.

    The worker that gets a chunk pulls the model. For each candidate rate it trains a copy of the
    model on the first minibatches of the chunk, the sample, with a new optimizer. The candidate
    with the smallest loss on the sample after that training wins; if losses are equal, the lowest
    rate. Losses that are not finite never win; if none is finite, the rate does not change. The
    chunk is then trained with the chosen rate. The candidates of the next chunks are multiples of
    the chosen rate, so the rate may rise or fall. The sample needs some tens of minibatches: after
    fewer minibatches, rates that are too high still look good.

    Args:
        factors: candidates, as multiples of the present rate, each > 0.
        part: the sample's part of a chunk, 0 < part ≤ 1; the sample has at least one minibatch.
            The number of minibatches must be known.
        minibatches: number of minibatches of the sample, in place of `part`.

    Raises:
        ValueError: a value outside its range.

    Source: paper 002, section 4.1, "ASGD-search", with about 3 % of a chunk of an hour of speech,
    from a rate of 0.008.
    """

    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    part: float = 0.03
    minibatches: int | None = None

    def __post_init__(self) -> None:
        candidate_rates(1.0, self.factors)
        if not 0.0 < self.part <= 1.0:
            raise ValueError(f"part={self.part!r} is outside (0, 1]. The paper's is 0.03.")
        if self.minibatches is not None and self.minibatches < 1:
            raise ValueError(f"minibatches={self.minibatches!r} must be at least 1.")

    def function(self, server: Server, work: WorkerStep, chunks: Chunks) -> ChooseRate:
        """Returns the graph function that chooses a chunk's rate; refuses what it is not for."""
        if server.learning_rate is None or work.local_models:
            raise ValueError(
                "search_rate needs an optimizer with a number as its learning rate, and a rule "
                "whose workers train the servers' model: ASGD, AveragedASGD, Downpour or AsyncBMUF."
            )
        count = self.minibatches
        if count is None:
            if chunks.num_minibatches is None:
                raise ValueError(
                    "search_rate: the number of minibatches of a chunk is not known. Give "
                    "ChunkRateSearch(minibatches=...)."
                )
            count = max(1, math.floor(self.part * chunks.num_minibatches / chunks.count))
        return functools.partial(_Trial(server, work, count).best, sorted(set(self.factors)))


class _Trial:
    """Trains a copy of the global model on a sample."""

    def __init__(self, server: Server, work: WorkerStep, count: int) -> None:
        self._server, self._work, self._count = server, work, count
        self._steps = KerasSteps(work.model.optimizer, work.model.trainable_variables)
        self._at: Any = self._steps.rate_index

    def best(self, factors: list[float], read: Callable[[], tf.data.Dataset]) -> tf.Tensor:
        """Returns the best rate, present rate × one of `factors`, and sets it on the servers.

        `read` makes a new dataset of the chunk's minibatches.
        """

        def sample() -> tf.data.Dataset:
            return read().take(self._count)

        pulled = Exchange(self._server).read()
        before = self._server.rate()
        rates = tf.stack([before * factor for factor in factors])
        losses = tf.stack([self._loss(sample, pulled, before * factor) for factor in factors])
        finite = tf.math.is_finite(losses)
        place = tf.argmin(tf.where(finite, losses, losses.dtype.max))
        chosen = tf.where(tf.reduce_any(finite), tf.gather(rates, place), before)
        chosen = tf.cast(chosen, tf.float32)  # a chunk's rate is float32, whatever `floatx` is
        with tf.control_dependencies(self._server.set_rate(chosen)):
            return tf.identity(chosen)

    def _loss(
        self, sample: Callable[[], tf.data.Dataset], pulled: Pulled, rate: tf.Tensor
    ) -> tf.Tensor:
        """Returns the loss on the sample after training on the sample with `rate`."""
        own = self._work.own_start(tf.zeros([], tf.int64))
        start = [tf.convert_to_tensor(value) for value in self._steps.initial]
        start[self._at] = rate

        # `train` returns tuples, because tf.data would convert a list to one tensor.
        def train(place: Nest, data: Nest) -> Nest:
            weights, state, optimizer = place
            at = pulled._replace(weights=weights, state=state).with_rate(rate)
            block = self._work.add(self._work.begin(at, own, optimizer=optimizer), data)
            if self._work.local:
                weights, optimizer = block.weights, block.optimizer
            else:
                weights, optimizer = self._steps(weights, optimizer, block.gradients)
            return tuple(weights), tuple(block.state), tuple(optimizer)

        def score(total: Nest, data: Nest) -> Nest:
            loss, samples = self._work.loss(weights, state, own, data)
            return total[0] + loss * samples, total[1] + samples

        first = (tuple(pulled.weights), tuple(pulled.state), tuple(start))
        weights, state, _ = sample().reduce(tf.nest.map_structure(tf.identity, first), train)
        total, samples = sample().reduce((tf.zeros([]), tf.zeros([])), score)
        return total / samples
