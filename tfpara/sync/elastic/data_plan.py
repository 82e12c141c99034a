"""This worker's data of an epoch, which a plan of all workers deals out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpara.elastic.plan import Plan, begin
from tfpara.strategy import EpochUnits
from tfpara.sync.data.elastic_data import Began, check_dealt
from tfpara.sync.elastic.connection import Connection
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.workers.data_place import DataPlace, making
from tfpara.typing import Json


class DataPlan(EpochUnits):
    """The plan of the epoch, and this worker's data by it.

    Args:
        extended: of the strategy.
        connection: whose generation the plan is for.

    Attributes:
        plan: who trains what of the epoch.
        iterator: over this worker's data by the plan; None: those that `fit` has.
        facts: of the data, beyond those of their element spec; compared with a joiner's.
    """

    def __init__(self, extended: PeriodicSyncExtended, connection: Connection) -> None:
        self._extended, self._connection = extended, connection
        self._devices = len(extended.worker_devices)
        self.plan = begin(0, connection.form.tasks)
        self.iterator: Iterator[Any] | None = None
        self.facts: Mapping[str, Json] = {}
        self._dataset_fn: Callable[..., tf.data.Dataset] | None = None  # of the present `fit`

    @property
    def began(self) -> Began:
        """The replicas with which the run began, and those of each worker."""
        return Began(self._connection.founders * self._devices, self._devices)

    def take(self, given: Mapping[str, Any]) -> None:
        """Takes the data of a call of `fit`.

        Raises:
            ValueError: they cannot be dealt out anew where workers come and go.
        """
        check_dealt(
            given,
            "elastic=",
            steps="workers take as many steps as are left to them",
            data="elastic= deals the data of an epoch out anew where workers come and go. Give fit "
            "arrays, a tf.data.Dataset or PyDataset of whole epochs, or "
            "strategy.minibatches_by_epoch(...).",
        )
        self._dataset_fn = given["x"].dataset_fn
        self.facts = getattr(given["x"], "facts", {})

    # -- the plan ----------------------------------------------------------------------------

    def begin(self, epoch: int, fit: int) -> None:
        """Begins an epoch of a call of `fit`."""
        # A worker that joined has made passes over data of its own, which are no epochs.
        self._extended.data.position.move(epoch, self._extended.models.steps_seen)
        if self.plan.at == (fit, epoch):
            # The other members have begun this epoch. This worker may have met them before its
            # `fit` had data.
            self.iterator = self.iterator or self.data()
        else:
            self.plan = begin(epoch, self._connection.form.tasks, fit)
            self.iterator = None
            self.forget_trained()

    def go_on(self, plan: Plan, has_data: bool) -> None:
        """Takes a plan of a new generation, of which nothing is trained yet.

        Args:
            plan: the plan.
            has_data: whether this worker has data of the plan's epoch, and the epoch is open.
        """
        self.plan = plan
        self.forget_trained()
        self.iterator = self.data() if has_data else None

    def forget_trained(self) -> None:
        """Notes that no unit of the plan is in the model yet."""
        for synchronizer in self._extended.models.synchronizers:
            count = len(self._connection.form.tasks)
            synchronizer.graph.dealt.assign(tf.zeros([count], tf.int64))

    def trained_steps(self) -> list[int]:
        """Returns for each rank how many of its steps by the plan are in the model."""
        if not self._extended.models.synchronizers:
            return [0] * len(self._connection.form.tasks)
        (synchronizer,) = self._extended.models.synchronizers
        return synchronizer.graph.dealt.numpy().tolist()

    # -- data --------------------------------------------------------------------------------

    def data(self) -> Iterator[Any]:
        """Returns this worker's data from the begin of the plan to the end of the epoch."""
        rank, epoch = self._connection.rank, self.plan.epoch
        parts = [
            self._units(epoch, each.start, each.step, 0).take(len(each) * self._devices)
            for each in self.plan.ranges(rank)
        ]
        parts.append(self._units(epoch, self.plan.first, self.plan.size, rank))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.concatenate(part)
        # The plan leaves out the steps before a resume, so they must not be skipped again.
        self._extended.data.position.take_steps()
        return iter(self._extended._distribute_datasets_from_function(lambda context: whole, None))

    def whole_epoch(self, epoch: int) -> tf.data.Dataset:
        """Returns all minibatches of an epoch."""
        return self._units(epoch, 0, 1, 0)

    def _units(self, epoch: int, first: int, size: int, rank: int) -> tf.data.Dataset:
        """Returns the units first + rank, first + rank + size, … of an epoch."""
        assert self._dataset_fn is not None
        with making(DataPlace(rank, size, self._devices, epoch, first * self._devices)):
            return self._dataset_fn(None)

    # -- where in the epoch the run is ---------------------------------------------------------

    def trained(self, steps: int = 0) -> int:
        """Returns the units of the epoch in the model; at a sync the same on all workers."""
        del steps  # workers take different numbers of them
        return self.plan.in_the_model(self.trained_steps())

    def reached(self, steps: int = 0) -> int:
        """Returns the units trained, if all workers are as far in the open block as this one.

        Workers that have taken as many steps since the last sync get the same number.
        """
        del steps
        open_steps = sum(each.graph.block.trained for each in self._extended.models.synchronizers)
        return self.trained() + open_steps * self.plan.size

    def total(self, steps: int | None) -> int:
        """Returns the number of units of the epoch; 0 if it is not known.

        Args:
            steps: of each founding replica in an epoch, for data of unknown length.
        """
        minibatches = int(self.whole_epoch(self.plan.epoch).cardinality())
        if minibatches > 0:
            return -(-minibatches // self._devices)
        parts = self._extended.data.order.parts or self.began.replicas
        return (steps or 0) * parts // self._devices

    def position(self) -> dict[str, Json]:
        """Returns the position at a sync, as a checkpoint keeps it.

        `minibatches` are done, over all replicas, except those of the units `owed`.
        """
        rest = self.plan
        if self._extended.models.synchronizers:
            rest = rest.after(self.trained_steps(), [0] * rest.size, rest.tasks)
        return {
            "minibatches": rest.first * self._devices,
            "owed": list(rest.owed),
            "devices": self._devices,
        }

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's position, in an epoch that begins.

        Raises:
            ValueError: the rest cannot be dealt out to workers with as many devices as here.
        """
        tasks, owed = self._connection.form.tasks, position.get("owed", ())
        first, rest = divmod(position["minibatches"], self._devices)
        if rest or (owed and position["devices"] != self._devices):
            raise ValueError(
                f"the checkpoint is of workers with {position.get('devices', 'other')} devices, in "
                f"the middle of an epoch, and this one has {self._devices}. Go on with as many "
                "devices for each worker; their number may change where an epoch begins."
            )
        self.plan = Plan(epoch, tasks, ((),) * len(tasks), tuple(owed), first, self.plan.fit)
        self.iterator = self.data()
