"""The protocol by which callbacks use the strategy that a model trains under."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras

from tfpara.algorithms.rule import Average
from tfpara.cluster.call_site import Purpose
from tfpara.typing import Json

# A key in the states that `get_state` returns. Its value tells whether the arrays in the object's
# attribute `weights` belong to the state, too.
HAS_WEIGHTS = "has weights"


class StateHolder(Protocol):
    """An object whose state checkpoints keep."""

    def get_state(self) -> Json:
        """Returns the state, in values that JSON can carry."""

    def set_state(self, state: Json) -> None:
        """Restores the state that `get_state` has returned."""


class EpochUnits:
    """The position in an epoch, in units that all workers count alike.

    The methods of this class itself are right if all replicas take the same number of steps.
    """

    def total(self, steps: int | None) -> int:
        """Returns the length of the epoch; 0 if it is not known.

        `steps` is that of each replica with which the run began; None if unknown.
        """
        return steps or 0

    def trained(self, steps: int) -> int:
        """Returns how many units are in the model, at a sync after so many steps of a replica."""
        return steps

    def reached(self, steps: int) -> int:
        """Returns how many units are trained if all workers are as far as this one, at `steps`."""
        return steps

    def position(self) -> dict[str, Json]:
        """Returns the position that a checkpoint at a sync stores besides the number of steps."""
        return {}

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's position within the epoch that begins."""
        if owed := position.get("owed"):
            raise ValueError(
                f"the checkpoint owes {len(owed)} steps: workers of its run, which had elastic= or "
                "balance=, were lost or had not come to them. Resume it with the same."
            )


class CompanyBase:
    """The workers of a run, as callbacks and programs use them.

    The methods of this class itself are right for a run which no worker leaves or joins.

    Attributes:
        changes: whether workers may leave and join while the run goes on.
        epoch_units: the position in the epoch, in units that all workers count alike.
    """

    changes = False
    epoch_units = EpochUnits()

    @property
    def joining(self) -> bool:
        """True while this worker waits until the others admit it."""
        return False

    @property
    def generation(self) -> int:
        """The number of the present set of members, which rises with each change of members."""
        return 0

    @property
    def completed_in(self) -> int:
        """The generation in which the last exchange started by Python code has succeeded."""
        return 0

    def share_state(self, name: str, holder: StateHolder) -> None:
        """Registers an object whose state workers take over when they join.

        A number is added to a name that another object has. If the state has `HAS_WEIGHTS`, the
        arrays of the object's `weights`, of equal shapes on all workers, travel, too.
        """

    def keep_record(self, checkpoints: StateHolder, append: Callable[[str, str], None]) -> None:
        """Makes a record of members' changes beside the checkpoints; `append` writes it."""

    def write_record(self, syncs: int) -> None:
        """Appends the present members to the record, with the number of syncs so far."""

    def leave(self) -> bool:
        """Makes this worker leave at the next sync; returns whether all must leave with it."""
        return True

    def part(self) -> None:
        """Waits for all workers at the end of the program, as far as that is needed."""

    def program_ends(self) -> None:
        """Tells the other workers that this program ends, if it ends without `tfpara.run`."""


class Strategy:
    """A strategy as callbacks see it; the base of `PeriodicSyncStrategy` and `AsyncStrategy`.

    The methods of this class itself are right for a process that trains alone. So the same
    callbacks work under TensorFlow's own strategies and without a strategy.
    """

    running: Any = None  # the present `fit` of an `AsyncStrategy`

    @staticmethod
    def of(model: keras.Model) -> Strategy:
        """Returns a model's strategy, or a plain `Strategy` if it is none of tfpara's."""
        found: Any = model.distribute_strategy
        return found if isinstance(found, Strategy) else Strategy()

    @property
    def company(self) -> CompanyBase:
        """The workers, which may leave and join in an elastic run."""
        return CompanyBase()

    @property
    def num_workers(self) -> int:
        """The number of processes that train."""
        return 1

    @property
    def worker_index(self) -> int:
        """The number of this process among those that run callbacks; 0 is the chief."""
        return 0

    @property
    def is_chief(self) -> bool:
        """True if this process writes the files of which a run needs only one."""
        return self.worker_index == 0

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all processes, each with weights of its own."""
        return 1

    @property
    def local_replica_ids(self) -> list[int]:
        """The numbers of this process's replicas among those of all processes."""
        return [0]

    @property
    def sync_period(self) -> int | None:
        """τ, minibatches of each replica between two syncs; None if there are no syncs."""
        return None

    @property
    def blocks_differ(self) -> bool:
        """True if blocks may be longer or shorter than the sync period, or unlike among workers."""
        return False

    @property
    def averages(self) -> Mapping[str, Average]:
        """The averages of the global model, by name."""
        return {}

    @property
    def weight_names(self) -> list[str]:
        """The names that `weights` takes."""
        return ["local", "global"]

    def weights(self, model: keras.Model, which: str) -> contextlib.AbstractContextManager[None]:
        """A context in which `model` has the weights that `which` names."""
        return contextlib.nullcontext()

    def at_one_moment(
        self, model: keras.Model, names: Sequence[str]
    ) -> contextlib.AbstractContextManager[Callable[[], int]]:
        """A context in which all calls of `weights` give the weights of one moment.

        The context yields a function that returns the number of syncs, or pushes, in these
        weights. Call that function after `weights`, which may sync. `names` are the names with
        which `weights` is called in this context.
        """

        def syncs() -> int:
            statistics = self.statistics_of(model)
            return statistics.syncs if statistics else 0

        return contextlib.nullcontext(syncs)

    def statistics_of(self, model: keras.Model) -> Any:
        """Returns counts and times of the syncs, or of the pushes, of `model`; None without any."""
        return self.statistics()

    def statistics(self) -> Any:
        """Returns counts and times of the syncs or pushes; None without any."""
        return None

    def keep_state(self, name: str, holder: StateHolder) -> None:
        """Registers an object whose state checkpoints keep; it replaces one of the same name.

        If the state has `HAS_WEIGHTS`, the arrays of the object's `weights` are kept, too.
        """
        self.states[name] = holder

    @functools.cached_property
    def states(self) -> dict[str, StateHolder]:
        """The objects given to `keep_state`, by name. Removing an object drops its state."""
        return {}

    # -- calls that all processes make together --------------------------------------------------

    def everyones(self, value: Json, purpose: Purpose) -> list[Json]:
        """Returns the JSON values of all processes that run callbacks, by rank. All call it."""
        return [value]

    def steps_resumed(self, epoch: int) -> int:
        """Returns how many minibatches of this epoch each replica has had in an earlier process."""
        return 0
