"""The held-out scores of a run: of its global model and of every average."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfpara.callbacks import HeldOut


def scores(
    validation: Any,
    averages: Sequence[str],
    run_dir: Path,
    times_per_epoch: int,
    steps_per_epoch: int | None,
) -> HeldOut:
    """Returns the callback that writes scores to the log, TensorBoard and RUN_DIR/held_out.csv.

    Args:
        validation: held-out data.
        averages: names of the averages.
        run_dir: directory of the run.
        times_per_epoch: how often the models are scored in an epoch.
        steps_per_epoch: number of minibatches of a replica in an epoch, None if epochs differ;
            needed if `times_per_epoch` is above 1.

    Raises:
        ValueError: `times_per_epoch` is above 1, and the epochs differ in length.
    """
    if times_per_epoch > 1 and steps_per_epoch is None:
        raise ValueError(
            f"--held_out_times_per_epoch={times_per_epoch} needs epochs of one length, which they "
            "are not with --warm_start_epochs or a --minibatch that changes. Leave out one of them."
        )
    return HeldOut(
        validation,
        ["global", *averages],
        times_per_epoch=times_per_epoch,
        steps_per_epoch=steps_per_epoch,
        csv=run_dir / "held_out.csv",
        log_dir=run_dir / "tensorboard",
    )
