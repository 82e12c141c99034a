"""The state of a run: every variable that training changes, as slots of one list.

A checkpoint, a restore and a return to an earlier epoch are loops over these slots.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpara.keras_model import is_seed, training_variables
from tfpara.sync.one_sync.counter import Counter


class Kind(enum.Enum):
    """The owner of a slot, which decides where its value comes from when a run is resumed.

    The number of replicas may have changed by then.

    SHARED: the value is the same on all workers.
    HOLDER: a part of a field of the global state. It is cut anew from the whole field.
    MODEL: a replica's variable of the Keras model. Replica i takes the value of replica (i mod the
        former number of replicas).
    RANDOM: a state of a seed generator. It is taken like MODEL, but a replica beyond the former
        number of replicas keeps its own state.
    REPLICA: a replica's own value. It is dropped if the number of replicas has changed, or their
        division among workers.
    BLOCK: a value of the open block, either of one replica or the same on all workers. It is
        restored when `fit` continues the epoch, and dropped if the number of replicas has changed.
    WORKER: a counter of one worker. A return to an earlier epoch does not change it.
    SUM: a term of a sum over replicas or workers. The sum is divided anew among them, so that it
        stays the same. A term is restored again when `fit` continues the epoch. A return to an
        earlier epoch does not change it.
    MEAN: like SUM, for a term of a mean. If the number of replicas has changed, each replica takes
        the mean.
    FIRST: like SUM, but only the first replica's value counts. Replica i takes the value of replica
        (i mod the former number of replicas).
    """

    SHARED = "shared"
    HOLDER = "holder"
    MODEL = "model"
    RANDOM = "random"
    REPLICA = "replica"
    BLOCK = "block"
    WORKER = "worker"
    SUM = "sum"
    MEAN = "mean"
    FIRST = "first"

    @property
    def is_aggregated(self) -> bool:
        """Whether one number is made of the values of all replicas or workers."""
        return self in (Kind.SUM, Kind.MEAN, Kind.FIRST)


# Maps the `aggregation` of a metric's variable in Keras to the kind of the variable's slot.
_OF_METRIC = {"mean": Kind.MEAN, "only_first_replica": Kind.FIRST, "none": Kind.FIRST}


# A worker that is new, or behind the others, receives the slots of these kinds from another worker.
TRAVELLING = (Kind.SHARED, Kind.HOLDER, Kind.MODEL)


class Slot(NamedTuple):
    """One variable of the state.

    name: the key in a checkpoint; "global/FIELD/BUCKET/START" for a holder's part.
    replica: the local replica that owns it; None if it belongs to the whole worker.
    empty: whether its value has no meaning now, so that a checkpoint leaves it out.
    absent: its value if it is missing in a checkpoint of an earlier version; None if every version
        writes it.
    """

    name: str
    kind: Kind
    variable: tf.Variable | Counter
    replica: int | None = None
    empty: bool = False
    absent: Any = None

    def key(self, replica_ids: Sequence[int]) -> str:
        if self.replica is None:
            return self.name
        return f"replica-{replica_ids[self.replica]}/{self.name}"


def model_slots(model: keras.Model) -> Iterator[Slot]:
    """Yields the variables of a model, its optimizers and metrics, for every local replica."""
    local_results = model.distribute_strategy.experimental_local_results
    for name, variable in training_variables(model):
        group = name.split("/")[0]
        for replica, component in enumerate(local_results(variable.value)):
            kind = Kind.MODEL
            if group == "metrics":
                kind = _OF_METRIC.get(variable.aggregation, Kind.SUM)
            if is_seed(variable.path):
                kind = Kind.RANDOM
            # The group "product" is Nadam's product of its momenta. Checkpoints of version 0.2.0
            # lack it, so a resume from them sets it to 1.
            yield Slot(name, kind, component, replica, absent=1.0 if group == "product" else None)


def slots_of(model: keras.Model) -> list[Slot]:
    """Returns the model's slots and, where its replicas are synchronised, the synchronizer's."""
    strategy: Any = model.distribute_strategy
    slots = list(model_slots(model))
    if hasattr(strategy, "synchronizer_of"):
        with strategy.scope():
            slots += strategy.synchronizer_of(model).slots()
    return slots
