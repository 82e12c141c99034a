"""The length of a block, and local momentum that is fitted to it."""

from __future__ import annotations

from collections.abc import Callable

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
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Nest


class MomentumFit:
    """The steps of a block, which ends with the epoch at the latest; momentum is fitted to it.

    Args:
        settings: of the strategy.
        worker: this worker.
        notes: for the user.
        make: makes a plain variable, `make(value, name)`.

    Attributes:
        settings: of the strategy.
        period: the variable of the sync period in minibatches, which graphs read.
        sync_period: the same for Python code; None: no syncs.
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
        self._without_length: keras.Model | None = None  # in an epoch of unknown length
        self._epochs_to_note = 0  # of a `fit` whose epochs have no known length yet
        with tf.device("CPU:0"):
            self.period = make(tf.constant(settings.sync_period, tf.int64), "sync_period")
        # The steps of a block, on each device: what XLA compiles for one reads no other.
        self._blocks: list[tf.Variable] = []
        for device in worker.devices:
            with tf.device(device):
                steps = tf.constant(self._steps_of_a_block(self.sync_period))
                self._blocks.append(make(steps, "steps_of_a_block"))

    def set_period(self, sync_period: int | None, in_fit: bool) -> None:
        """Sets τ for all models, also within a block; None: no syncs.

        All workers must set it at the same sync.
        """
        self.sync_period = sync_period
        self.is_scheduled |= in_fit
        self.period.assign(NEVER if sync_period is None else sync_period)
        self._write_blocks()

    def begin_epoch(self, model: keras.Model, steps: int | None) -> None:
        """Notes that an epoch of `fit` begins, or that the last one is over.

        Blocks end with the epoch, so momentum is fitted to that where it is shorter than a block.

        Args:
            model: that is trained.
            steps: minibatches of each replica in the epoch; None: not known, or no epoch.
        """
        self._steps_in_epoch = NEVER if steps is None or self._worker.changes else steps
        self._write_blocks()
        period = self.sync_period
        if period and self._steps_in_epoch < period and not self.is_scheduled:
            self._notes.tell(
                f"sync_period={period} is longer than an epoch, at whose end the replicas meet in "
                f"any case, so after {self._steps_in_epoch}"
            )
        self._without_length = None if steps or self._worker.changes else model
        for optimizer in filter(self.settings.fits_momentum, optimizers(model)):
            self.note(optimizer)
            self._note_short_block(optimizer)

    def end_fit(self) -> None:
        """Notes that `fit` is over, also where callbacks have not heard of its end."""
        self._without_length = None
        self._steps_in_epoch = NEVER
        self._write_blocks()

    def set_epochs(self, steps: int | None, epochs: int) -> None:
        """Notes the length of a call of `fit`, which may have too few syncs.

        No note is printed where a callback sets the sync period, nor of a single epoch, which may
        be one of several calls. See docs/study.md.

        Args:
            steps: minibatches of each replica in an epoch; None: `set_length` follows.
            epochs: of the run, those before a resume included; 0 if this call has a single one.
        """
        self._epochs_to_note = epochs if steps is None else 0
        if epochs and steps is not None and self.sync_period and not self.is_scheduled:
            self._notes.few_syncs(self.sync_period, steps, epochs)

    def set_length(self, steps: int) -> None:
        """Notes the steps of the epoch that has begun, if Keras does not know them."""
        if self._without_length is not None:
            self.begin_epoch(self._without_length, steps)
            if self._epochs_to_note:
                self.set_epochs(steps, self._epochs_to_note)

    def check(self, optimizer: keras.optimizers.Optimizer, settings: Settings) -> None:
        """Warns, or prints a note, of a momentum that is longer than a block.

        Args:
            optimizer: of the model that is about to be trained.
            settings: for that model.
        """
        steps = self._steps_of_a_block(settings.sync_period) / minibatches_of_a_step(optimizer)
        warn_of_outlasting_momentum(settings, optimizer, steps)

    def note(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Prints a note on the momentum and rate with which an optimizer takes its steps."""
        if self.sync_period is None:
            return  # as in a warm start
        steps = self._steps_of_a_block(self.sync_period) / minibatches_of_a_step(optimizer)
        fitted, factor = in_a_block(memory_of(optimizer), steps)
        text = told_of_fit(optimizer, steps, float(fitted), float(factor))
        if text:
            self._notes.tell(f'{text}; local_state="keep" would leave both alone.')

    def _note_short_block(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Prints a note where every second block is too short for the local momentum."""
        if not momentum_of(optimizer):
            return  # Adam's steps stay bounded
        block = (self.sync_period or NEVER) * self.settings.fragments
        steps = self._steps_in_epoch
        rest = steps % block
        memory = minibatches_of_a_step(optimizer) / (1.0 - momentum_of(optimizer))
        if block < steps < 2 * block and 0 < rest < memory < block:
            self._notes.tell(
                f"an epoch has {steps} steps, and its last block {rest} of {block}: shorter than "
                f"what the local momentum {momentum_of(optimizer):g} remembers, so that training "
                f"may diverge. Choose a sync_period that divides {steps}, or one below "
                f"{steps // 2}: docs/rules.md"
            )

    def of_step(
        self, optimizer: keras.optimizers.Optimizer, replica: int
    ) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Returns the momentum with which an optimizer takes a step, and the factor of its rate.

        The momentum is Adam's β₁, which goes without that factor. None: its own. See
        `tfpara.algorithms.local_momentum`.

        Args:
            optimizer: that takes the step.
            replica: the local replica in which it does.
        """
        if not self.settings.fits_momentum(optimizer):
            return None
        steps = self._blocks[replica].read_value() / minibatches_of_a_step(optimizer)
        return in_a_block(memory_of(optimizer), steps)

    def _steps_of_a_block(self, period: int | None) -> float:
        """Returns a replica's minibatches in a block, which ends with the epoch at the latest."""
        if period is None:
            return float(NEVER)
        return float(min(period * self.settings.fragments, self._steps_in_epoch))

    def _write_blocks(self) -> None:
        for steps in self._blocks:
            steps.assign(self._steps_of_a_block(self.sync_period))
