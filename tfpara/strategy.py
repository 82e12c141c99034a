"""The protocol by which callbacks use the strategy that a model trains under."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import keras

from tfpara.algorithms.rule import Average
from tfpara.cluster.place import Purpose
from tfpara.typing import Json


class StateHolder(Protocol):
    """An object whose state checkpoints keep."""

    def get_state(self) -> Json:
        """Returns the state, as JSON can carry it."""

    def set_state(self, state: Json) -> None:
        """Takes it back."""


class Strategy:
    """A strategy as callbacks see it; the base of `PeriodicSyncStrategy` and `AsyncStrategy`.

    What is here is right for a process that trains alone, so that the same callbacks work under
    TensorFlow's own strategies and under none.

    Attributes:
        running: the `fit` of an `AsyncStrategy` that is under way; else None.
    """

    running: Any = None

    @staticmethod
    def of(model: keras.Model) -> Strategy:
        """The one that a model was made under; of others than tfpara's, what stands for it."""
        found: Any = model.distribute_strategy
        return found if isinstance(found, Strategy) else Strategy()

    @property
    def num_workers(self) -> int:
        """Processes that train."""
        return 1

    @property
    def worker_index(self) -> int:
        """This process among those that run callbacks; 0 is the chief."""
        return 0

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        return self.worker_index == 0

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes, each with weights of its own."""
        return 1

    @property
    def local_replica_ids(self) -> list[int]:
        """The numbers of this process's replicas among them."""
        return [0]

    @property
    def sync_period(self) -> int | None:
        """τ, minibatches of each replica between two syncs; None while there are none."""
        return None

    @property
    def averages(self) -> Mapping[str, Average]:
        """The averages of the global model, by name."""
        return {}

    @property
    def weight_names(self) -> list[str]:
        """The names that `weights` takes."""
        return ["local", "global"]

    def weights(self, model: keras.Model, which: str) -> contextlib.AbstractContextManager[None]:
        """Puts these weights into `model` for a while."""
        del model, which
        return contextlib.nullcontext()

    def statistics(self) -> Any:
        """Counts of what was synchronised; None where nothing is."""
        return None

    def keep_state(self, name: str, holder: StateHolder) -> None:
        """Has the state of an object kept in checkpoints, where the strategy has any.

        Args:
            name: the state's; a second object under one name replaces the first.
            holder: `get_state()` returns what JSON can carry, `set_state(state)` takes it back.
        """

    def everyones(self, value: Json, purpose: Purpose) -> list[Json]:
        """Returns what each process that runs callbacks has, by rank. All of them must call it.

        Args:
            value: anything that JSON can carry.
            purpose: what it is called for.
        """
        del purpose
        return [value]

    def steps_resumed(self, epoch: int) -> int:
        """Minibatches of each replica that an earlier process has trained of this epoch."""
        del epoch
        return 0
