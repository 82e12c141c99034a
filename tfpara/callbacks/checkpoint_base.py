"""The base of the callbacks that write checkpoints, for both kinds of run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import keras

from tfpara import fit_call
from tfpara.checkpoint.base import IF_DAMAGED, Checkpoints, store_at
from tfpara.cluster import exit_codes
from tfpara.keras_model import optimizers, rate_can_be_set
from tfpara.typing import Json, Logs
from tfpara.whole_number import checked_whole


class Preempted(SystemExit):
    """Raised after a program was asked to end and has written a checkpoint; ends the program.

    The exit code is 75, unless another one was set. If the program must not end the process, as
    in a train function of Ray, catch this exception around `fit` and return.
    """


class CheckpointBase(fit_call.Callback):
    """Checks the arguments, resumes from the newest checkpoint, and says that the program ends."""

    order = fit_call.Order.SAVES

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_minutes: float | None,
        keep: int,
        if_damaged: str,
        restart_exit_code: int | None = None,
    ) -> None:
        super().__init__()
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes={every_minutes!r} must be positive, or None.")
        self._keep = checked_whole("keep", keep, of="checkpoints")
        if if_damaged not in IF_DAMAGED:
            raise ValueError(f"if_damaged={if_damaged!r} is not one of {', '.join(IF_DAMAGED)}.")
        if not os.fspath(directory):
            raise ValueError("directory='' is empty. Give the directory of the checkpoints.")
        self._directory = directory
        store_at(directory, keep)  # If the URL is invalid, this raises an error before `fit`.
        self._every_minutes = every_minutes
        self._if_damaged = if_damaged
        self._exit_code = exit_codes.restart(restart_exit_code)
        self._saved_at = time.monotonic()
        # The learning rates before and after the callbacks' `on_epoch_begin` of the present epoch.
        self._rates: list[list[float]] = [[], []]
        # A resume fills these lists, and the beginning of the resumed epoch empties them. The first
        # list has the rates after `on_epoch_begin` in the former process. The second list has the
        # rates of the checkpoint, which callbacks may have changed later in that epoch.
        self._resumed_rates: list[list[float]] = [[], []]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._rates, self._resumed_rates = [self._rates_now(), []], [[], []]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        (former, restored), self._resumed_rates = self._resumed_rates, [[], []]
        self._rates[1] = self._rates_now()
        # If the callbacks have set the same rates as in the former process, the epoch continues
        # with the checkpoint's rates. Otherwise the script now has other callbacks, and the rates
        # that they have set stay.
        if self._rates[1] == former:
            self._set_rates(restored)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._rates[0] = self._rates_now()

    def _begin_again(self, position: Mapping[str, Json]) -> None:
        """Sets the learning rates with which the epoch of a checkpoint's position began.

        The callbacks' `on_epoch_begin` of this epoch is called once more, and may compute a rate
        from the present one, as `LearningRateScheduler` does with a function of epoch and rate.
        """
        goes_on = position["epoch"] < self.params.get("epochs", 1) and not position["finished"]
        before, begun = position.get("rates", [[], []])
        if goes_on and begun:
            self._resumed_rates = [begun, self._rates_now()]
            self._set_rates(before)
        self._rates = [self._rates_now(), []]

    def _rates_now(self) -> list[float]:
        return [float(keras.ops.convert_to_numpy(o.learning_rate)) for o in self._with_rate()]

    def _set_rates(self, rates: Sequence[float]) -> None:
        for optimizer, rate in zip(self._with_rate(), rates, strict=False):
            optimizer.learning_rate = rate

    def _with_rate(self) -> list[keras.optimizers.Optimizer]:
        """Returns the optimizers whose learning rate callbacks can set."""
        return list(filter(rate_can_be_set, optimizers(self.model)))

    @property
    def _is_late(self) -> bool:
        """Whether `every_minutes` have passed since the last checkpoint."""
        minutes = (time.monotonic() - self._saved_at) / 60.0
        return self._every_minutes is not None and minutes > self._every_minutes

    def _restore(self, checkpoints: Checkpoints) -> dict[str, Json] | None:
        """Locks the directory and resumes from its newest checkpoint; returns its position."""
        checkpoints.lock()
        try:
            restored = checkpoints.restore(self._if_damaged)
        except BaseException:
            checkpoints.store.release()
            raise
        finally:
            checkpoints.store.drop_copies()
        if restored is None:
            return None
        number, position = restored[0], restored[1]["position"]
        self._begin_again(position)
        if self.model.distribute_strategy.is_chief:
            epochs = self.params.get("epochs", 1)
            print(_resumed(self._directory, number, position, epochs), flush=True)
        return position

    def _say_end(self, how: str) -> None:
        print(
            f"Asked to end: checkpoint written, {how}. Start the program again to go on.",
            flush=True,
        )


def _resumed(
    directory: str | os.PathLike[str], number: int, position: dict[str, Json], epochs: int
) -> str:
    """Returns the message on a resumed run: where it continues, or that it is complete."""
    done = position["epoch"]
    if not position["finished"] and done < epochs:
        where = ", within it" if position.get("within") else ""
        where = f", step {position['steps']}" if position.get("steps") else where
        return f"Resuming from checkpoint {number}: epoch {done + 1}{where}."
    if position["finished"]:
        why = f"it stopped by itself after {done} epochs"
        longer = (
            "To go on after it, call fit once more after this one, with "
            f"initial_epoch={done} and a Checkpoint of another directory. "
        )
    else:
        why = f"{epochs} of {epochs} epochs are trained"
        longer = "To train longer, give more epochs. "
    return (
        f"The run in {os.fspath(directory)!r} is complete: {why} (checkpoint {number}), so nothing "
        f"is trained now. {longer}To begin anew, give another directory or remove this one."
    )
