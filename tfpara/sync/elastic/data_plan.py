"""This worker's data of an epoch, which a plan of all workers assigns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpara.elastic.plan import Plan, begin
from tfpara.strategy import EpochUnits
from tfpara.sync.data.balance import Balance
from tfpara.sync.data.dealt import Dealt
from tfpara.sync.data.elastic_data import Began, check_dealt
from tfpara.sync.elastic.connection import Connection
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.workers.data_place import DataPlace, making
from tfpara.typing import Json


class DataPlan(EpochUnits):
    """The plan by which the generation's workers share an epoch, and this worker's data by it.

    Attributes:
        iterator: iterator over this worker's data by the plan; None: Keras' own is read.
        facts: facts about the data, beyond their element spec, that must equal a joiner's.
    """

    def __init__(self, extended: PeriodicSyncExtended, connection: Connection) -> None:
        self._extended, self._connection = extended, connection
        self._devices = len(extended.worker_devices)
        self._plan = begin(0, connection.form.tasks)
        self.iterator: Iterator[Any] | None = None
        self.facts: Mapping[str, Json] = {}
        # The function that makes the datasets of the present call of `fit`; None before the first
        # call.
        self._dataset_fn: Callable[..., tf.data.Dataset] | None = None

    @property
    def _dealing(self) -> Balance | None:
        """The object that deals out data by the workers' speeds, while it does so; else None."""
        balance = self._extended.balance
        return None if balance is None or balance.plan is None else balance

    @property
    def plan(self) -> Plan:
        """The division of the epoch's data among workers; if by speed, as of the last sync."""
        balance = self._extended.balance
        return (balance and balance.plan) or self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        if self._extended.balance is not None:
            self._extended.balance.end()

    @property
    def began(self) -> Began:
        """The number of replicas at the start of the run, in all and of each worker."""
        return Began(self._connection.founders * self._devices, self._devices)

    def take(self, given: Mapping[str, Any]) -> None:
        """Stores the data of a call of `fit`; raises ValueError if they cannot be divided anew."""
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
        # A joiner has made passes over data while it was alone. The position is set here because
        # these passes do not count as epochs of the run.
        self._extended.data.position.move(epoch, self._extended.models.steps_seen)
        if self.plan.at == (fit, epoch):
            # The other members have already begun this epoch, and this worker has their plan.
            # But if this worker met them before its `fit` had data, it has no iterator yet.
            self.iterator = self.iterator or self.data()
        else:
            self.plan = begin(epoch, self._connection.form.tasks, fit)
            self.iterator = None
            self.forget_trained()

    def reader(self, of_fit: Iterator[Any]) -> Iterator[Any]:
        """Returns this worker's data; `of_fit` is the iterator that `fit` has."""
        if self.iterator is None and self._extended.balance is not None:
            self.iterator = self.data()
        return self.iterator or of_fit

    def go_on(self, plan: Plan, has_data: bool, ahead: Mapping[str, Any]) -> None:
        """Adopts the plan of a new generation, by the report of the worker that is furthest ahead.

        `has_data`: whether this worker has data of the plan's epoch, and the epoch is open.
        """
        self.plan = plan
        if self._extended.balance is not None:
            former = Plan.of(ahead["plan"]).tasks
            self._extended.balance.regroup(ahead["states"]["balance"], former, plan)
        self.forget_trained()
        self.iterator = self.data() if has_data else None

    def forget_trained(self) -> None:
        """Notes that no unit of the plan is in the model yet."""
        for synchronizer in self._extended.models.synchronizers:
            count = len(self._connection.form.tasks)
            synchronizer.graph.dealt.assign(tf.zeros([count], tf.int64))

    def trained_steps(self) -> list[int]:
        """Returns for each rank the number of its steps by the plan that are in the model."""
        if self._dealing or not self._extended.models.synchronizers:
            return [0] * self.plan.size
        (synchronizer,) = self._extended.models.synchronizers
        return synchronizer.graph.dealt.numpy().tolist()

    def data(self) -> Iterator[Any]:
        """Returns this worker's data from the beginning of the plan to the end of the epoch."""
        balance = self._extended.balance
        whole = self._by_rank() if balance is None else self._by_speed(balance)
        # In a resumed run, `position` has the number of the steps before the checkpoint. The plan
        # already leaves these steps out. So `take_steps` clears the number; otherwise the steps
        # would be skipped twice.
        self._extended.data.position.take_steps()
        return iter(self._extended.distribute_parts(whole))

    def _by_speed(self, balance: Balance) -> tf.data.Dataset:
        plan, rank, warm = self.plan, self._connection.rank, self._extended.models.steps_seen > 0
        dealt = balance.begin(plan, rank, warm)
        if dealt is None:
            raise ValueError(
                "sync_period=None with balance= and elastic=: minibatches are dealt out at syncs, "
                "and there are none. Leave balance out, or give a sync period."
            )
        return self._units(plan.epoch, dealt.first, plan.size, rank, dealt)

    def _by_rank(self) -> tf.data.Dataset:
        rank, epoch = self._connection.rank, self.plan.epoch
        parts = [
            self._units(epoch, each.start, each.step, 0).take(len(each) * self._devices)
            for each in self.plan.ranges(rank)
        ]
        parts.append(self._units(epoch, self.plan.first, self.plan.size, rank))
        return functools.reduce(tf.data.Dataset.concatenate, parts)

    def whole_epoch(self, epoch: int) -> tf.data.Dataset:
        """Returns all minibatches of an epoch."""
        return self._units(epoch, 0, 1, 0)

    def _units(
        self, epoch: int, first: int, size: int, rank: int, dealt: Dealt | None = None
    ) -> tf.data.Dataset:
        """Returns the units first + rank, first + rank + size, … of an epoch, or those `dealt`."""
        assert self._dataset_fn is not None
        with making(DataPlace(rank, size, self._devices, epoch, first * self._devices, dealt)):
            return self._dataset_fn(None)

    def trained(self, steps: int = 0) -> int:
        """Returns the number of units in the model; at a sync it is the same on all workers."""
        del steps  # workers may have taken different numbers of steps
        return self.plan.in_the_model(self.trained_steps())

    def reached(self, steps: int = 0) -> int:
        """Returns how many units are trained if all workers are as far in the block as this one."""
        del steps
        if self._dealing:
            return round(self._dealing.minibatches(self.plan))
        open_steps = sum(each.open_steps for each in self._extended.models.synchronizers)
        return self.trained() + open_steps * self.plan.size

    def total(self, steps: int | None) -> int:
        """Returns the number of units of the epoch; 0 if unknown; `steps` as in `EpochUnits`."""
        minibatches = int(self.whole_epoch(self.plan.epoch).cardinality())
        if minibatches > 0:
            return -(-minibatches // self._devices)
        parts = self._extended.data.order.parts or self.began.replicas
        return (steps or 0) * parts // self._devices

    def position(self) -> dict[str, Json]:
        """Returns the position at a sync: `minibatches` are done, but not those of units `owed`."""
        if self._dealing:
            return self._dealing.position()
        rest = self.plan
        if self._extended.models.synchronizers:
            rest = rest.after(self.trained_steps(), [0] * rest.size, rest.tasks)
        return {
            "minibatches": rest.first * self._devices,
            "owed": list(rest.owed),
            "devices": self._devices,
        }

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Continues within an epoch; ValueError: the rest cannot be divided among the devices."""
        tasks, owed = self._connection.form.tasks, position.get("owed", ())
        first, rest = divmod(position["minibatches"], self._devices)
        if rest or (owed and position["devices"] != self._devices):
            raise ValueError(
                f"the checkpoint is of workers with {position.get('devices', 'other')} devices, in "
                f"the middle of an epoch, and this one has {self._devices}. Go on with as many "
                "devices for each worker; their number may change where an epoch begins."
            )
        self.plan = begin(epoch, tasks, self.plan.fit, first, owed)
        self.iterator = self.data()
