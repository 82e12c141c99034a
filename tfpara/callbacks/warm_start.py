"""A callback that trains the first epochs like one replica, from whose model all then go on."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from tfpara import fit_call
from tfpara.callbacks.schedule import Schedule, close_block
from tfpara.strategy import Strategy
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Json, Logs, Nest
from tfpara.whole_number import checked_whole


class WarmStart(Schedule):
    """Trains the first epochs as one replica alone would; then all replicas start from that model.

    In Li et al. (2017), section 3.1, every parallel run starts from the model of one epoch of SGD
    with a single replica. With this callback, all replicas train on the same data in the first
    epochs, as one replica would, without syncs. Dropout makes their models differ slightly, so at
    the end of each such epoch all replicas take the weights and batch-norm statistics of replica 0.
    After the last such epoch block momentum and averages begin; the optimizers' slots stay.

    The function that makes the data must ask the method `replicas` which part to read, and return
    the result of `to_every_replica`: docs/schedules.md has an example.

    Args:
        epochs: number of such epochs, ≥ 0.
        verbose: 1: the chief prints a line when these epochs end; 0: none.

    Raises:
        TypeError: the model has several replicas, or asynchronous workers, but its strategy is not
            a `PeriodicSyncStrategy`.
        ValueError: `epochs` below 0.
    """

    order = fit_call.Order.START
    not_elastic = "it gives replicas other data in the first epochs than elastic= deals out."

    def __init__(self, epochs: int = 1, verbose: int = 1) -> None:
        super().__init__("warm_start", verbose, sets_rate=False)
        self._epochs = checked_whole("epochs", epochs, at_least=0)
        self._alone = False  # whether each replica trains alone at the moment
        self._asked = False  # whether the method `replicas` was called
        self._period: int | None = None  # the strategy's sync period after the first epochs

    def replicas(self, strategy: Strategy | None, epoch: int) -> tuple[int, list[int]]:
        """Returns how many replicas share an epoch's data, and for which of them this worker reads.

        Epochs are counted from 0. In a run without a strategy of tfpara `strategy` is None.
        """
        self._asked = True
        if strategy is None or epoch < self._epochs:
            return 1, [0]
        return strategy.num_replicas, strategy.local_replica_ids

    def to_every_replica(
        self, strategy: Strategy | None, epoch: int, dataset: tf.data.Dataset
    ) -> tf.data.Dataset:
        """Returns `dataset`; in the first epochs with a copy of each minibatch for each replica."""
        count = 1 if strategy is None else len(strategy.local_replica_ids)
        if count == 1 or epoch >= self._epochs:
            return dataset

        def repeated(*minibatch: Nest) -> tf.data.Dataset:
            element = minibatch if len(minibatch) > 1 else minibatch[0]
            return tf.data.Dataset.from_tensors(element).repeat(count)

        every = dataset.flat_map(repeated)
        length = int(dataset.cardinality())
        if length < 0:  # the cardinality is unknown or infinite
            return every
        return every.apply(tf.data.experimental.assert_cardinality(length * count))

    def get_state(self) -> dict[str, Json]:
        return {"sync_period": self._period}

    def set_state(self, state: Mapping[str, Json]) -> None:
        # In an epoch without syncs the strategy has no sync period, so a checkpoint has none,
        # either. Therefore this callback's state keeps the period of the later epochs.
        self._period = state["sync_period"]

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        strategy = model.distribute_strategy
        several = max(strategy.num_replicas_in_sync, self._strategy.num_workers) > 1
        if several and not isinstance(strategy, PeriodicSyncStrategy):
            raise TypeError(
                f"WarmStart: the model's strategy is {type(strategy).__name__}, whose replicas "
                "cannot train alone. Make and compile the model in the scope of a "
                "tfpara.PeriodicSyncStrategy."
            )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        fit_call.at_end(self._give_up)
        close_block(self.model)

    def _give_up(self) -> None:
        """Makes the next `fit` sync again if this one has failed."""
        if self._alone:
            self._alone = False
            self.model.distribute_strategy.put_back_sync_period(self._period)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        strategy = self.model.distribute_strategy
        if epoch < self._epochs and isinstance(strategy, PeriodicSyncStrategy):
            if strategy.sync_period is not None:
                self._period = strategy.sync_period
            self._alone = True
            strategy.set_sync_period(None)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        period = self._strategy.sync_period
        if self._alone and period is not None:
            raise RuntimeError(
                f"the sync period was set to {period} in an epoch of WarmStart, whose replicas "
                "must not sync. Set it when they are over."
            )

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        strategy = self.model.distribute_strategy
        if self._alone and not self._asked and strategy.num_replicas > 1:
            strategy.note(
                "WarmStart: the data did not ask `replicas`, so each replica trains on a part of "
                "them, and what all but the first learn in these epochs is dropped. Give fit "
                "strategy.datasets_by_epoch(...) of a function that reads what `replicas` says."
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._alone:
            return
        strategy = self.model.distribute_strategy
        # All replicas take over the first replica's weights before the block ends. Otherwise the
        # rule would combine the different weights of the replicas at the end of the block.
        strategy.broadcast_replica(self.model, 0)
        strategy.set_sync_period(self._period)
        self._alone = False
        if epoch + 1 == self._epochs:
            self.say(
                epoch, f"all {strategy.num_replicas} replicas go on from the model of the first."
            )
