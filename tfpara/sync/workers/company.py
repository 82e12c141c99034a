"""Company: who takes part in a run, and how they do a thing together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfpara.cluster.place import Purpose
from tfpara.collectives.members import Members
from tfpara.strategy import StateHolder
from tfpara.typing import Json, Scalar

Fit = Callable[[Mapping[str, Any]], keras.callbacks.History]


class Epoch(Protocol):
    """How far the run is in its epoch, in units of which all workers know alike."""

    def units(self, steps: int | None) -> int:
        """Returns the length of the epoch; 0 if it is not known.

        Args:
            steps: of each of the replicas with which the run begins; None: not known.
        """

    def trained_units(self, steps: int) -> int:
        """Returns how much of it is in the model, at a sync after so many steps of a replica."""

    def reached(self, steps: int) -> int:
        """Returns how much of it is trained, where all are as far in the block as this worker."""

    def position(self) -> dict[str, Json]:
        """Returns the position within the epoch, at a sync, if other numbers than steps say it."""

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's position within the epoch that begins.

        Raises:
            ValueError: such workers cannot go on from there.
        """


class Company(Protocol):
    """Who takes part in a run, and how they do a thing together.

    Everybody else asks it, and never of which kind it is. Methods marked "all" are called by every
    worker alike.
    """

    changes: bool  # whether members may come and go

    @property
    def epoch(self) -> Epoch:
        """The position in the epoch."""

    @property
    def joining(self) -> bool:
        """Whether this worker has still to be let in."""

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files of which the run needs one."""

    @property
    def generation(self) -> int:
        """The number of the present set of members."""

    @property
    def completed_in(self) -> int:
        """The generation in which the last exchange of `together` has succeeded."""

    @property
    def members(self) -> Members | None:
        """The members as collectives read them; None if they do not change."""

    @property
    def leader(self) -> str:
        """TensorFlow's name of the task that coordinates collectives; "": TensorFlow's choice."""

    def replicas_now(self, devices: int) -> tuple[Scalar, Scalar]:
        """Returns N, and the number of this worker's first replica, as graphs read them.

        Args:
            devices: of each worker.
        """

    def founding_replicas(self, devices: int) -> int:
        """Returns N at the begin of the run."""

    # -- the start and the end ---------------------------------------------------------------

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Returns the workers for TensorFlow's server, which starts now."""

    def attach(self, extended: Any) -> None:
        """Takes the extended strategy, whose server runs; returns when all are connected."""

    def part(self) -> None:
        """All: waits for the others at the end of the program, as far as that is needed."""

    def program_ends(self) -> None:
        """Tells the others that a program ends which `tfpara.run` has not ended."""

    # -- exchanges ---------------------------------------------------------------------------

    def together(self, exchange: Callable[[], Json]) -> Any:
        """All: runs an exchange, once each; those that are left repeat it if a member is lost.

        Args:
            exchange: returns the same on all, as JSON has it.
        """

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        """All: has the chief write a file in the function `name`; returns when it is there."""

    def finish_block(self, synchronizer: Any, purpose: Purpose) -> None:
        """All: closes the open block of one model."""

    def finish_blocks(self, purpose: Purpose) -> None:
        """All: closes the open blocks of all models."""

    def sums(self, parts: Sequence[tf.Tensor], evaluates: bool) -> list[tf.Tensor]:
        """All: returns the sums of the workers' parts of metrics' variables.

        Args:
            parts: this worker's.
            evaluates: whether the metrics are those of an evaluation.
        """

    # -- fit ---------------------------------------------------------------------------------

    def fit(self, model: keras.Model, given: dict[str, Any], fit: Fit) -> keras.callbacks.History:
        """All: makes a call of `fit`.

        Args:
            model: that is trained.
            given: the arguments of the call by name, which are changed in place.
            fit: makes the call with such arguments.
        """

    def fit_begins(self) -> None:
        """Lets this worker in, where `fit` has begun and its callbacks know that."""

    def epoch_begins(self, epoch: int) -> None:
        """Begins an epoch of `fit`, before callbacks know that."""

    def check_step(self) -> None:
        """Has a step begin anew that would read other workers' data, before it trains anything."""

    # -- callbacks ---------------------------------------------------------------------------

    def leave(self) -> bool:
        """Has this worker leave at the next sync; returns whether all must leave with it."""

    def share_state(self, name: str, holder: StateHolder) -> None:
        """Has workers that join take over an object's state. See `Strategy.share_state`."""

    def keep_record(self, checkpoints: StateHolder, directory: Path) -> None:
        """Keeps a record of changes beside checkpoints, whose callback is `checkpoints`."""

    def write_record(self, syncs: int) -> None:
        """Adds the present members to the record, after so many syncs."""
