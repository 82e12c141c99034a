"""The base of the callbacks that write checkpoints, for both kinds of run."""

from __future__ import annotations

import os
import time

from tfpara import fit_call
from tfpara.checkpoint.base import IF_DAMAGED, Checkpoints, store_at
from tfpara.cluster import exit_codes
from tfpara.typing import Json
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
