"""Keras callbacks for schedules by the position in the run, and the base of all that schedule.

Every decision is a function of the epoch's log and the position in the run. These are the same on
all workers, so all decide alike. The state of a schedule is saved with the strategy's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfpara import fit_call
from tfpara.schedules import AdaComm, Piecewise
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Json, Logs
from tfpara.whole_number import checked_whole


class Schedule(fit_call.Callback):
    """The base of callbacks that schedule: it keeps state, sets the rate and prints lines.

    `name` is that of the callback's state in a checkpoint; "" if it has no state.
    """

    _state: Any = None  # the state of the rule that the callback follows; None without such a rule

    def __init__(self, name: str, verbose: int, sets_rate: bool) -> None:
        super().__init__()
        self._state_name = name
        self._verbose = verbose
        self._sets_rate = sets_rate

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        rate = getattr(getattr(model, "optimizer", None), "learning_rate", None)
        if self._sets_rate and not isinstance(rate, keras.Variable):
            raise TypeError(
                "the learning rate of the model's optimizer cannot be set: the model is compiled "
                "with a LearningRateSchedule, a function or a MultiOptimizer, or not at all. "
                "Compile with one optimizer whose rate is a number, e.g. "
                "keras.optimizers.SGD(0.1)."
            )
        if self._state_name:
            self._strategy.keep_state(self._state_name, self)

    # The state does not include the learning rate, because a checkpoint keeps the rate anyway.
    def get_state(self) -> dict[str, Json]:
        """Returns the state to save: numbers and strings by name."""
        return self._state._asdict() if self._state else {}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Continues from a saved state."""
        kind = type(self._state)
        self._state = kind(**{field: state[field] for field in kind._fields})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None and self._sets_rate:
            logs["learning_rate"] = learning_rate(self.model)

    def say(self, epoch: int, text: str) -> None:
        """Prints a line on the chief."""
        if self._verbose and self._strategy.is_chief:
            print(f"Epoch {epoch + 1}: {type(self).__name__}: {text}", flush=True)


class LearningRate(Schedule):
    """Sets the learning rate to a function of the position in the run.

    Args:
        schedule: position in epochs → rate: `tfpara.schedules.Exponential`, `Hand`, `Piecewise`, or
            any function; or rates by the position from which each holds, `{0: 0.1, 2: 0.01}`.
        steps_per_epoch: minibatches of a replica in an epoch; in an elastic run, of a replica with
            which the run began; with a `tfpara.AsyncStrategy`, of all workers together. If given,
            the rate is set before every execution of `steps_per_execution` minibatches (with an
            AsyncStrategy several times a second). None: the rate is set when each epoch begins.
        verbose: 1: the chief prints a line when an epoch begins with another rate; 0: none.

    All workers have the same rate, even if some take more steps than others. (With a schedule
    inside the optimizer, the rate depends on the worker's own steps.)

    Raises:
        TypeError: the optimizer has a learning-rate schedule, or `schedule` has another type.
        ValueError: `steps_per_epoch` below 1, or a schedule that gives no finite rate ≥ 0.
    """

    order = fit_call.Order.RATE

    def __init__(
        self,
        schedule: Mapping[float, float] | Callable[[float], float],
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__("learning_rate", verbose, sets_rate=True)
        if steps_per_epoch is not None:
            steps_per_epoch = checked_whole("steps_per_epoch", steps_per_epoch, of="minibatches")
        self._schedule: Callable[[float], float]
        if isinstance(schedule, Mapping):
            self._schedule = Piecewise(schedule)
        elif callable(schedule):
            self._schedule = schedule
        else:
            raise TypeError(
                f"schedule={schedule!r} must be rates by epochs, such as {{0: 0.1, 2: 0.01}}, or a "
                "function of the position in epochs."
            )
        self._steps = steps_per_epoch
        self._epoch = -1
        self._before = 0  # number of minibatches of this epoch that an earlier process has trained
        self._done = 0  # number of minibatches of this epoch that are trained so far
        self._restored: tuple[int, int, float | None] | None = None
        self._rate: float | None = None
        self._used: float | None = None  # the rate of the last trained step of this epoch
        self._units = 1  # length of this epoch, in units of `CompanyBase.epoch_units`

    def get_state(self) -> dict[str, Json]:
        done = {"steps": self._done, "steps_per_epoch": self._steps}
        return {"epoch": self._epoch, "rate": self._used, **done}

    def set_state(self, state: Mapping[str, Json]) -> None:
        done, length = state["steps"], state.get("steps_per_epoch")
        if self._steps and length:
            # On another number of replicas an epoch may have another number of steps.
            done = done * self._steps // length
        self._restored = (state["epoch"], done, state.get("rate"))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        restored, self._restored = self._restored, None
        self._epoch = epoch
        self._done, self._used = 0, None
        if restored and restored[0] == epoch:
            _, self._done, self._used = restored
        # In an epoch that is resumed, Keras counts batches from the first one after the resumption,
        # so the earlier ones must be added. AsyncStrategy counts from the start of the epoch.
        is_async = self._strategy.running is not None
        self._before = 0 if is_async else self._done
        if self._steps:
            self._units = self._strategy.company.epoch_units.total(self._steps)
        before, self._rate = self._rate, None
        self._set(epoch + self._share(self._done))
        if self._rate != before:
            self.say(epoch, f"learning rate {self._rate:.4g}.")

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._steps is not None:
            self._set(self._epoch + self._share(self._before + batch))

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._done, self._used = self._before + batch + 1, self._rate
        if self._strategy.running is not None:
            # AsyncStrategy calls both hooks after the minibatch. The next one needs its rate now.
            self.on_train_batch_begin(batch + 1)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._used not in (None, self._rate) and not self._strategy.blocks_differ:
            # Keras may not know how many steps are left, for example in a resumed epoch. Then it
            # begins one step too many, which finds no data. The beginning of this step has changed
            # the rate, so the rate of the last trained step is restored. If `blocks_differ`,
            # workers may have taken different numbers of steps, so their last rates could differ.
            # Then nothing is restored, and all workers keep the rate for the end of the epoch.
            self.model.optimizer.learning_rate = self._rate = self._used
        super().on_epoch_end(epoch, logs)
        self._epoch = -1  # tells later checkpoints that no epoch is under way

    def _share(self, done: int) -> float:
        """Returns which share of the epoch, in [0, 1], `done` minibatches of a replica are."""
        if not self._steps:
            return 0.0
        return min(self._strategy.company.epoch_units.reached(done) / self._units, 1.0)

    def _set(self, position: float) -> None:
        rate = float(self._schedule(position))
        if not (math.isfinite(rate) and rate >= 0.0):
            raise ValueError(
                f"the schedule gives the learning rate {rate!r} at epoch {position:g}; it must be "
                "a number of at least 0."
            )
        if rate != self._rate:
            self.model.optimizer.learning_rate = rate
            self._rate = rate


class SyncPeriod(Schedule):
    """Changes the strategy's sync period when epochs begin: `SyncPeriod({0: 1, 2: 20, 4: 80})`.

    Args:
        periods: the periods, τ ≥ 1 minibatches, by the epoch from which each holds; epoch 0 is
            required. Or a function of the epoch, such as `tfpara.schedules.Quadratic`. Or a
            `tfpara.schedules.AdaComm`, which follows the epochs' training losses.
        verbose: 1: the chief prints a line for each change; 0: none.

    The log gets "sync_period".

    Raises:
        TypeError: the model's strategy has no sync period, or `periods` has another type.
        ValueError: an epoch or period that is not a whole number in its range.

    Source: Lin et al., "Don't use large mini-batches, use local SGD" (2020): post-local SGD.
    """

    order = fit_call.Order.PERIOD

    def __init__(
        self, periods: Mapping[int, int] | Callable[[int], int] | AdaComm, verbose: int = 1
    ) -> None:
        self._by_loss = periods if isinstance(periods, AdaComm) else None
        super().__init__("sync_period" if self._by_loss else "", verbose, sets_rate=False)
        self._periods: Callable[[int], int]
        if isinstance(periods, AdaComm):
            self._state = periods.init()
            self._periods = lambda epoch: self._state.period
        elif isinstance(periods, Mapping):
            self._periods = Piecewise(
                {
                    checked_whole("the epoch", epoch, at_least=0): checked_whole(
                        f"periods[{epoch}]", period, of="minibatches"
                    )
                    for epoch, period in periods.items()
                }
            )
        elif callable(periods):
            self._periods = periods
        else:
            raise TypeError(
                f"periods={periods!r} must be periods by epochs, such as {{0: 1, 2: 20}}, a "
                "function of the epoch, or a schedules.AdaComm."
            )

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if not isinstance(model.distribute_strategy, PeriodicSyncStrategy):
            raise TypeError(
                f"SyncPeriod: the model's strategy is {type(model.distribute_strategy).__name__}, "
                "which has no sync period. Make and compile the model in the scope of a "
                "tfpara.PeriodicSyncStrategy."
            )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        close_block(self.model)
        self.model.distribute_strategy.note_scheduled_period()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        strategy = self.model.distribute_strategy
        self._period = period = checked_whole(
            f"the sync period of epoch {epoch}", self._periods(epoch), of="minibatches"
        )
        if period != strategy.sync_period:
            self.say(epoch, f"syncs every {period} minibatches.")
            strategy.set_sync_period(period)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["sync_period"] = self._period
        if self._by_loss is not None:
            loss = (logs or {}).get("loss")
            if loss is None:
                raise ValueError(
                    "SyncPeriod(AdaComm(...)) goes by the epoch's training loss, and its log has "
                    'no "loss". Have train_step return it.'
                )
            self._state = self._by_loss.update(self._state, loss)


def close_block(model: keras.Model) -> None:
    """Closes a block that a failed `fit` has left open; every worker must call it."""
    if isinstance(model.distribute_strategy, PeriodicSyncStrategy):
        model.distribute_strategy.synchronize()


def learning_rate(model: keras.Model) -> float:
    """Returns the present rate of the model's optimizer."""
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
