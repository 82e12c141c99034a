"""A callback that tries learning rates on a sample of the data before each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfpara import fit_call
from tfpara.callbacks.held_out import evaluate
from tfpara.callbacks.schedule import Schedule, learning_rate
from tfpara.cluster.place import of_callback
from tfpara.schedules import best_rate, candidate_rates
from tfpara.steps import skip_empty
from tfpara.strategy import Strategy
from tfpara.sync.keras.training_state import TrainingState
from tfpara.typing import Data, Json, Logs, Nest

_TRIED = of_callback("SearchRate")


class SearchRate(Schedule):
    """Before each epoch, tries learning rates on a sample of its data and takes the best.

    For every candidate the replicas start from the present model and train on the sample, each on
    its part and without syncs. The candidate's score is the loss on the sample after that, over all
    replicas of all workers. Then weights, optimizer and random state are restored bit for bit. The
    lowest score wins; of equal scores the lower rate. The rate may rise or fall.

    Source: You & Xu (2014), section 4.1, "ASGD-search". They do so before each chunk of the data
    (an hour of speech) on about 3 % of it, from a rate of 0.008. One `fit` epoch reads one such
    chunk.

    Args:
        sample: minibatches to try on, a `tf.data.Dataset` (divided among the workers and replicas
            as `fit` does) or one of the strategy's distributed datasets; or a function of the epoch
            that returns one. Every worker needs at least one minibatch.
        factors: candidates, as multiples of the present rate. 1 keeps it.
        rates: the candidates themselves, in place of `factors`.
        held_out: data that scores the candidates in place of the sample, as `fit` takes
            `validation_data`.
        verbose: 1: the chief prints a line for each choice; 0: none.

    Raises:
        TypeError: the optimizer has a learning-rate schedule of its own; a sample of another kind.
        ValueError: no candidate, one that is not positive, or all of them diverge.
    """

    order = fit_call.Order.RATE
    not_elastic = "it searches where an epoch begins, and a worker may come within one."

    def __init__(
        self,
        sample: Data | Callable[[int], Data],
        factors: Sequence[float] = (0.5, 1.0, 2.0),
        *,
        rates: Sequence[float] | None = None,
        held_out: Data = None,
        verbose: int = 1,
    ) -> None:
        super().__init__("search_rate", verbose, sets_rate=True)
        candidate_rates(1.0, factors if rates is None else rates)  # refuses bad ones now
        self._sample: Callable[[int], Data] = sample if callable(sample) else lambda _: sample
        self._factors = tuple(factors)
        self._rates = None if rates is None else tuple(rates)
        self._held_out = held_out
        self._epoch = -1  # the epoch that is under way
        self._restored_epoch: int | None = None
        self._step: Callable[[Nest], None] | None = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._step = None

    def get_state(self) -> dict[str, Json]:
        return {**super().get_state(), "epoch": self._epoch}

    def set_state(self, state: Mapping[str, Json]) -> None:
        super().set_state(state)
        self._restored_epoch = state["epoch"]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch)
        restored, self._restored_epoch = self._restored_epoch, None
        self._epoch = epoch
        if restored == epoch:
            return  # Resumed inside an epoch, whose rate was chosen when it began.
        before = learning_rate(self.model)
        if self._rates is None:
            rates = candidate_rates(before, self._factors)
        else:
            rates = candidate_rates(1.0, self._rates)
        losses = self._losses(rates, self._distributed(self._sample(epoch)))
        chosen = best_rate(rates, losses)
        self.model.optimizer.learning_rate = chosen
        tried = ", ".join(f"{r:.4g}: {x:.4g}" for r, x in zip(rates, losses, strict=True))
        self.say(epoch, f"learning rate {chosen:.4g}, of losses {tried}.")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._epoch = -1

    def _distributed(self, sample: Data) -> Data:
        if isinstance(sample, tf.distribute.DistributedDataset):
            return sample
        if isinstance(sample, tf.data.Dataset):
            return self.model.distribute_strategy.experimental_distribute_dataset(sample)
        raise TypeError(
            f"sample is a {type(sample).__name__}; it must be a tf.data.Dataset of minibatches, a "
            "distributed dataset, or a function of the epoch that returns one."
        )

    def _losses(self, rates: Sequence[float], sample: Data) -> list[float]:
        """Returns each candidate's loss, infinite where it diverges; leaves the model as it was."""
        model = self.model
        before = TrainingState(model, shared=False)  # nothing is synchronised meanwhile
        former = learning_rate(model)
        losses = []
        for rate in rates:
            model.optimizer.learning_rate = rate
            try:
                self._train(sample)
                losses.append(math.inf if self._any_has_diverged(before) else self._score(sample))
            finally:
                before.restore()
                model.optimizer.learning_rate = former
        # The epoch's own metrics begin here, without those of the search.
        model.reset_metrics()
        return losses

    def _score(self, sample: Data) -> float:
        held_out = sample if self._held_out is None else self._held_out
        return float(evaluate(self.model, held_out)["loss"])

    def _any_has_diverged(self, before: TrainingState) -> bool:
        """Returns whether any replica has diverged; `evaluate`, which syncs, would fail then."""
        mine = before.has_diverged()
        return any(Strategy.of(self.model).everyones(mine, _TRIED))

    def _train(self, sample: Data) -> None:
        if self._step is None:
            self._step = self._make_step()
        for data in sample:
            self._step(data)

    def _make_step(self) -> Callable[[Nest], None]:
        model, strategy = self.model, self.model.distribute_strategy

        def step(data: Nest) -> None:
            # The `run` of the base class, since that of PeriodicSyncStrategy would count and sync.
            with strategy.scope():
                tf.distribute.Strategy.run(strategy, skip_empty(model.train_step), (data,))

        if model.run_eagerly:
            return step
        return tf.function(step, autograph=False, reduce_retracing=True)
