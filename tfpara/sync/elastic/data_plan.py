"""This worker's data of an epoch, which a plan of all workers assigns."""

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
        extended: the strategy's extended object.
        connection: the connection, for whose generation the plan is.

    Attributes:
        plan: the division of the epoch's data among workers.
        iterator: iterator over this worker's data by the plan; None: `fit` has the iterator.
        facts: facts about the data, beyond their element spec, compared with a joiner's.
    """

    def __init__(self, extended: PeriodicSyncExtended, connection: Connection) -> None:
        self._extended, self._connection = extended, connection
        self._devices = len(extended.worker_devices)
        self.plan = begin(0, connection.form.tasks)
        self.iterator: Iterator[Any] | None = None
        self.facts: Mapping[str, Json] = {}
        # function of the present `fit`
        self._dataset_fn: Callable[..., tf.data.Dataset] | None = None

    @property
    def began(self) -> Began:
        """The number of replicas at the start of the run, in all and of each worker."""
        return Began(self._connection.founders * self._devices, self._devices)

    def take(self, given: Mapping[str, Any]) -> None:
        """Stores the data of a call of `fit`.

        Raises:
            ValueError: the data cannot be divided again when workers join and leave.
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

    def begin(self, epoch: int, fit: int) -> None:
        # A joiner has made passes over its data while it was alone, which are not epochs.
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
        """Adopts a plan of a new generation, of which nothing is trained yet.

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
        """Returns for each rank the number of its steps by the plan that are in the model."""
        if not self._extended.models.synchronizers:
            return [0] * len(self._connection.form.tasks)
        (synchronizer,) = self._extended.models.synchronizers
        return synchronizer.graph.dealt.numpy().tolist()

    def data(self) -> Iterator[Any]:
        """Returns this worker's data from the beginning of the plan to the end of the epoch."""
        rank, epoch = self._connection.rank, self.plan.epoch
        parts = [
            self._units(epoch, each.start, each.step, 0).take(len(each) * self._devices)
            for each in self.plan.ranges(rank)
        ]
        parts.append(self._units(epoch, self.plan.first, self.plan.size, rank))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.concatenate(part)
        # The plan omits the steps before a resume, so they must not be skipped again.
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

    def trained(self, steps: int = 0) -> int:
        """Returns the number of units in the model; at a sync it is the same on all workers."""
        del steps  # differs between workers
        return self.plan.in_the_model(self.trained_steps())

    def reached(self, steps: int = 0) -> int:
        """Returns the number of trained units, if all workers are as far in the open block as this.

        Workers that have taken equally many steps since the last sync return the same number.
        """
        del steps
        open_steps = sum(each.graph.block.trained for each in self._extended.models.synchronizers)
        return self.trained() + open_steps * self.plan.size

    def total(self, steps: int | None) -> int:
        """Returns the number of units of the epoch; 0 if unknown.

        For data of unknown length, `steps` is that of each founding replica in an epoch.
        """
        minibatches = int(self.whole_epoch(self.plan.epoch).cardinality())
        if minibatches > 0:
            return -(-minibatches // self._devices)
        parts = self._extended.data.order.parts or self.began.replicas
        return (steps or 0) * parts // self._devices

    def position(self) -> dict[str, Json]:
        """Returns the position at a sync, for a checkpoint.

        `minibatches`, over all replicas, are done, except those of the units `owed`.
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
        """Continues from a checkpoint's position, in an epoch that begins.

        Raises:
            ValueError: the rest cannot be divided among workers with this number of devices.
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
