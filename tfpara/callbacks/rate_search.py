"""A callback that tries learning rates on a sample of the data before each epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfpara import fit_call
from tfpara.callbacks.held_out import evaluate
from tfpara.callbacks.schedule import Schedule, learning_rate
from tfpara.cluster.call_site import of_callback
from tfpara.schedules import best_rate, candidate_rates
from tfpara.steps import skip_empty
from tfpara.strategy import Strategy
from tfpara.sync.keras.training_state import TrainingState
from tfpara.typing import Data, Json, Logs, Nest

_TRIED = of_callback("SearchRate")


class SearchRate(Schedule):
    """Deprecated: tries learning rates on a sample before each epoch, and takes the best.

    For every candidate rate the replicas start from the present model and train on the sample, each
    replica on its part and without syncs. The score of a candidate is then the loss on the sample,
    over all replicas of all workers. Afterwards weights, optimizer and random state are restored
    bit for bit. The candidate with the lowest score is taken; of equal scores, the lower rate.

    Source: You & Xu (2014), section 4.1, "ASGD-search". There the rate is searched before each
        chunk of an asynchronous run, as `tfpara.ChunkRateSearch` does. From version 0.3 on there is
        only `tfpara.ChunkRateSearch`.

    Args:
        sample: minibatches on which the rates are tried. A `tf.data.Dataset`, which is divided
            among the workers and replicas as by `fit`; or one of the strategy's distributed
            datasets; or a function that takes the epoch and returns one of these. Every worker
            needs at least one minibatch.
        factors: candidates, as multiples of the present rate. The factor 1 is the present rate.
        rates: the candidates themselves, in place of `factors`.
        held_out: data on which candidates are scored, in place of the sample, in any form that
            `fit` takes as `validation_data`.
        verbose: 1: the chief prints a line for each choice; 0: none.

    Raises:
        TypeError: the optimizer has a learning-rate schedule; a sample of another kind.
        ValueError: there is no candidate, a candidate is not positive, or all of them diverge.
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
        warnings.warn(
            "tfpara.callbacks.SearchRate goes with version 0.3. Choose the rate by a shorter run, "
            "or lower it by tfpara.callbacks.Newbob; AsyncStrategy.fit(search_rate=) stays.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__("search_rate", verbose, sets_rate=True)
        candidate_rates(1.0, factors if rates is None else rates)  # refuses bad candidates now
        self._sample: Callable[[int], Data] = sample if callable(sample) else lambda _: sample
        self._factors = tuple(factors)
        self._rates = None if rates is None else tuple(rates)
        self._held_out = held_out
        self._epoch = -1  # the present epoch
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
        if self._rates is None:
            rates = candidate_rates(learning_rate(self.model), self._factors)
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
        """Returns each candidate's loss, infinite if it diverges; restores the model."""
        model = self.model
        before = TrainingState(model, shared=False)  # nothing is synchronised meanwhile
        former = learning_rate(model)
        scored = sample if self._held_out is None else self._held_out
        losses = []
        for rate in rates:
            model.optimizer.learning_rate = rate
            try:
                self._step = self._step or self._make_step()
                for data in sample:
                    self._step(data)
                # `evaluate`, which syncs, would fail if a replica has diverged.
                diverged = Strategy.of(model).everyones(before.has_diverged(), _TRIED)
                losses.append(math.inf if any(diverged) else evaluate(model, scored)["loss"])
            finally:
                before.restore()
                model.optimizer.learning_rate = former
        # The epoch's own metrics begin here, without those of the search.
        model.reset_metrics()
        return losses

    def _make_step(self) -> Callable[[Nest], None]:
        model, strategy = self.model, self.model.distribute_strategy

        def step(data: Nest) -> None:
            # The base class's `run`: that of PeriodicSyncStrategy would count and sync.
            with strategy.scope():
                tf.distribute.Strategy.run(strategy, skip_empty(model.train_step), (data,))

        if model.run_eagerly:
            return step
        return tf.function(step, autograph=False, reduce_retracing=True)
