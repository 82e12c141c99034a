"""Company: the workers that take part in a run, and their common operations."""

# ruff: noqa: B027 - a run whose members do not change needs no action

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpara.cluster.call_site import Purpose
from tfpara.collectives.members import Members
from tfpara.strategy import EpochUnits, StateHolder
from tfpara.typing import Json, Scalar

Fit: TypeAlias = Callable[[Mapping[str, Any]], keras.callbacks.History]


class Company(abc.ABC):
    """The workers that take part in a run, and their common operations.

    Other code calls these methods and never asks for the kind of company. Every worker must call
    the methods marked "all". Methods that are not abstract do nothing if members do not change.

    Attributes:
        changes: whether workers may join and leave.
        syncs_in_steps: whether the graph of a training step has the sync; else Python code calls
            each sync after the step.
        epoch_units: the position in the epoch.
        unlike_devices: the number of devices of each worker, by rank, if they differ; else empty.
        kinds: the kinds of all workers' devices, such as "CPU"; empty: not told yet.
    """

    changes = False
    syncs_in_steps = True
    epoch_units: EpochUnits
    unlike_devices: Sequence[int] = ()
    kinds: frozenset[str] = frozenset()

    @property
    def joining(self) -> bool:
        """Whether this worker waits to be admitted."""
        return False

    @property
    def generation(self) -> int:
        """The number of the present set of members."""
        return 0

    @property
    def completed_in(self) -> int:
        """The generation in which the last exchange of `together` has succeeded."""
        return 0

    @property
    def members(self) -> Members | None:
        """The members as collectives read them; None if they do not change."""
        return None

    @property
    def leader(self) -> str:
        """TensorFlow's name of the task that coordinates collectives; "": TensorFlow's choice."""
        return ""

    @property
    @abc.abstractmethod
    def is_chief(self) -> bool:
        """Whether this worker writes the files of which the run needs one copy."""

    @abc.abstractmethod
    def replicas_now(self, devices: int) -> tuple[Scalar, Scalar]:
        """Returns N, and the index of this worker's first replica, for its number of `devices`.

        In an elastic run both are tensors, which are read anew each time the graph runs.
        """

    @abc.abstractmethod
    def founding_replicas(self, devices: int) -> int:
        """Returns N at the start of the run."""

    @abc.abstractmethod
    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Returns the workers for TensorFlow's server, which starts now."""

    @abc.abstractmethod
    def attach(self, extended: Any) -> None:
        """Stores the extended strategy, whose server runs; returns when all are connected."""

    @abc.abstractmethod
    def part(self) -> None:
        """All: waits for the others at the end of the program, if that is needed."""

    def program_ends(self) -> None:
        """Tells the others that a program ends without `tfpara.run`."""

    def together(self, exchange: Callable[[], Json]) -> Any:
        """All: runs an exchange, which returns the same JSON value on all, once on each worker.

        If a member is lost, the others repeat the exchange.
        """
        return exchange()

    def check_in_fit(self) -> None:
        """Raises ValueError if a step trains outside of `fit`, and this company needs `fit`."""

    @abc.abstractmethod
    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        """All: the chief writes a file in the function `name`; returns when the file exists."""

    @abc.abstractmethod
    def finish_block(self, synchronizer: Any, purpose: Purpose) -> None:
        """All: closes the open block of one model."""

    @abc.abstractmethod
    def finish_blocks(self, purpose: Purpose) -> None:
        """All: closes the open blocks of all models."""

    @abc.abstractmethod
    def sums(self, parts: Sequence[tf.Tensor], evaluates: bool) -> list[tf.Tensor]:
        """All: returns the sums of the workers' `parts` of metrics' variables.

        `evaluates`: whether the metrics are those of an evaluation.
        """

    @abc.abstractmethod
    def fit(self, model: keras.Model, given: dict[str, Any], fit: Fit) -> keras.callbacks.History:
        """All: makes a call of `fit` with arguments by name, which are changed in place."""

    def fit_begins(self) -> None:
        """Admits this worker, once `fit` has begun and its callbacks know that."""

    def epoch_begins(self, epoch: int) -> None:
        """Begins an epoch of `fit`, before its callbacks know that."""

    def check_step(self) -> None:
        """Restarts a step that would read other workers' data, before it trains anything."""

    def report(self, waits: float, place: str) -> None:
        """Reports how many seconds this worker has waited, and its place in its script."""

    def leave(self) -> bool:
        """Makes this worker leave at the next sync; returns whether all must leave with it."""
        return True

    def share_state(self, name: str, holder: StateHolder) -> None:
        """Registers an object whose state joiners receive. See `Strategy.share_state`."""

    def keep_record(self, checkpoints: StateHolder, append: Callable[[str, str], None]) -> None:
        """Keeps a record of changes beside checkpoints, whose callback is `checkpoints`."""

    def write_record(self, syncs: int) -> None:
        """Appends the present members to the record, after `syncs` syncs."""
