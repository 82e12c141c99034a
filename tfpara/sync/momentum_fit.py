"""The length of a block in steps, and local momentum that is fitted to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfpara.algorithms.local_momentum import in_a_block
from tfpara.keras_model import (
    memory_of,
    minibatches_of_a_step,
    momentum_of,
    optimizers,
    told_of_fit,
)
from tfpara.sync.notes import Notes
from tfpara.sync.settings import NEVER, Settings, warn_of_outlasting_momentum
from tfpara.sync.start_line import counted
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Nest


class MomentumFit:
    """The length of a block, which ends with the epoch at the latest, and momentum fitted to it.

    `make(value, name)` makes a plain variable.

    Attributes:
        period: the variable of the sync period in minibatches, which graphs read.
        sync_period: the sync period for Python code; None: no syncs.
        is_scheduled: whether callbacks of `fit` set the sync period.
    """

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        notes: Notes,
        make: Callable[[Nest, str], tf.Variable],
    ) -> None:
        self.settings = settings
        self._worker = worker
        self._notes = notes
        self.sync_period: int | None = settings.sync_period
        self.is_scheduled = False
        self._steps_in_epoch = NEVER
        # How many minibatches each local replica takes in the present block. If empty, each takes
        # as many as the sync period.
        self._shares: Sequence[int] = ()
        # The arguments `model` and `epochs` of `begin_epoch`, if the length of the epoch is not
        # known yet; else None.
        self._without_length: tuple[keras.Model, int] | None = None
        with tf.device("CPU:0"):
            self.period = make(tf.constant(settings.sync_period, tf.int64), "sync_period")
        self._make = make
        # Each optimizer has one variable on each device, with the momentum and the factor of the
        # learning rate. One variable for all devices would not do, because a step that XLA has
        # compiled reads only variables of its own device.
        self._fitted: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, list[tf.Variable]]
        self._fitted = weakref.WeakKeyDictionary()

    def set_period(self, sync_period: int | None) -> None:
        """Sets τ for all models, also within a block; None: no syncs. Every worker must call it.

        With `elastic` and `balance`, workers that join would deal minibatches out by the old one.
        """
        if self.settings.balance and self._worker.changes and sync_period != self.sync_period:
            raise ValueError(
                f"sync_period={sync_period} in place of {self.sync_period}: with elastic= and "
                "balance= the period cannot change. Leave one of the two out, or SyncPeriod."
            )
        self.sync_period = sync_period
        self.is_scheduled |= self._worker.call_site.fits > 0
        self.period.assign(NEVER if sync_period is None else sync_period)
        self._write_blocks()

    def set_shares(self, shares: Sequence[int]) -> None:
        """Sets each local replica's minibatches in the present block; empty: the sync period."""
        if list(shares) != list(self._shares):
            self._shares = shares
            self._write_blocks()

    def begin_epoch(self, model: keras.Model, steps: int | None, epochs: int = 0) -> None:
        """Notes that an epoch of `fit` begins; prints notes on what does not go with its length.

        Args:
            model: the model that is trained.
            steps: the epoch's minibatches of each replica; None: `set_length` follows.
            epochs: in the first epoch of a call that has several, those of the run; else 0, since a
                single epoch may be one of several calls.
        """
        self._steps_in_epoch = NEVER if steps is None or self._worker.changes else steps
        self._write_blocks()
        period = None if self.is_scheduled else self.sync_period
        if period and self._steps_in_epoch < period:
            self._notes.tell(
                f"sync_period={period} is longer than an epoch, at whose end the replicas meet in "
                f"any case, so after {counted(self._steps_in_epoch, 'step')}"
            )
        if period and epochs and steps is not None:
            self._notes.few_syncs(period, steps, epochs)
        self._without_length = None if steps or self._worker.changes else (model, epochs)
        for optimizer in filter(self.settings.fits_momentum, optimizers(model)):
            self._note_fit(optimizer)
            self._note_short_block(optimizer)

    def end_fit(self) -> None:
        """Notes that `fit` is over, perhaps by an error."""
        self._without_length = None
        self._steps_in_epoch = NEVER
        self._write_blocks()

    def set_length(self, steps: int) -> None:
        """Notes the steps of the epoch that has begun, where Keras does not know them."""
        if self._without_length is not None:
            model, epochs = self._without_length
            self.begin_epoch(model, steps, epochs)

    def note(self, model: keras.Model, settings: Settings) -> None:
        """Prints notes on the local momentum of a model that is about to be trained."""
        for optimizer in optimizers(model):
            steps = self._steps_of_a_block(optimizer, settings.sync_period)
            warn_of_outlasting_momentum(settings, optimizer, steps)
            if settings.fits_momentum(optimizer):
                self._note_fit(optimizer)

    def _note_fit(self, optimizer: keras.optimizers.Optimizer) -> None:
        if self.sync_period is None:
            return  # there are no syncs, as in a warm start
        steps = self._steps_of_a_block(optimizer, self.sync_period)
        fitted, factor = in_a_block(memory_of(optimizer), steps)
        text = told_of_fit(optimizer, steps, float(fitted), float(factor))
        if text:
            self._notes.tell(f'{text}; local_state="keep" would leave the optimizer as it is.')

    def _note_short_block(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Prints a note if every second block is too short for the local momentum."""
        if not momentum_of(optimizer):
            return  # there is no momentum, or the optimizer bounds its steps, as Adam does
        block = (self.sync_period or NEVER) * self.settings.fragments
        steps = self._steps_in_epoch
        rest = steps % block
        memory = minibatches_of_a_step(optimizer) / (1.0 - momentum_of(optimizer))
        if block < steps < 2 * block and 0 < rest < memory < block:
            self._notes.tell(
                f"an epoch has {steps} steps, and its last block {rest} of {block}: shorter than "
                f"what the local momentum {momentum_of(optimizer):g} remembers, so that training "
                f"may diverge. Choose a sync_period that divides {steps}, or one below "
                f"{steps // 2}."
            )

    def of_step(
        self, optimizer: keras.optimizers.Optimizer, replica: int
    ) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Returns the momentum of a step (β₁ for Adam), and the factor of SGD's learning rate.

        None: the optimizer keeps its own momentum and rate. See `tfpara.algorithms.local_momentum`.
        """
        if not self.settings.fits_momentum(optimizer):
            return None
        if optimizer not in self._fitted:
            made: list[tf.Variable] = []
            for k, device in enumerate(self._worker.devices):
                with tf.init_scope(), tf.device(device):
                    made.append(self._make(self._fit(optimizer, k), "fitted"))
            self._fitted[optimizer] = made
        momentum, factor = tf.unstack(self._fitted[optimizer][replica].read_value())
        return momentum, factor

    def _fit(self, optimizer: keras.optimizers.Optimizer, replica: int) -> tf.Tensor:
        """Returns an optimizer's momentum in a replica's block, and the factor of its rate."""
        period = self._shares[replica] if self._shares else self.sync_period
        steps = tf.constant(self._steps_of_a_block(optimizer, period))
        return tf.stack(in_a_block(memory_of(optimizer), steps))

    def _steps_of_a_block(self, optimizer: keras.optimizers.Optimizer, period: int | None) -> float:
        """Returns the number of an optimizer's steps in a block of `period` minibatches."""
        if period is None:
            return float(NEVER)
        minibatches = min(period * self.settings.fragments, self._steps_in_epoch)
        return float(minibatches) / minibatches_of_a_step(optimizer)

    def _write_blocks(self) -> None:
        for optimizer, variables in list(self._fitted.items()):
            for replica, variable in enumerate(variables):
                variable.assign(self._fit(optimizer, replica))
