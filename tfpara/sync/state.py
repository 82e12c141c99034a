"""The state of a run: every variable that training changes, as slots of one list.

Who has state registers it once, by yielding its slots. To keep it in a checkpoint, to restore it
on as many replicas or on others, and to go back to an earlier epoch, are loops over the slots.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpara.keras_model import training_variables


class Kind(enum.Enum):
    """Whose a slot is, and so where its value comes from on another number of replicas.

    SHARED: the same on all workers. HOLDER: a part of a field of the global state, cut anew from
    the whole field. MODEL: a replica's variable of the Keras model; replica i takes that of i mod
    the former number. RANDOM: as MODEL, but a replica beyond the former number keeps its own.
    REPLICA: a replica's own, which others have no use for. BLOCK: of the block under way (a
    replica's, or the same on all workers), which only the same replicas can go on with; set where
    the epoch goes on. WORKER: what a worker has counted; going back leaves it as it is.
    SUM: a part of a sum over replicas or workers, of which nothing may get lost; set where the
    epoch goes on too, and left as it is by going back.
    """

    SHARED = "shared"
    HOLDER = "holder"
    MODEL = "model"
    RANDOM = "random"
    REPLICA = "replica"
    BLOCK = "block"
    WORKER = "worker"
    SUM = "sum"


class Slot(NamedTuple):
    """One variable of the state.

    name: in a checkpoint; a holder's is "global/FIELD/BUCKET/START". variable: its value. replica:
    the local replica that has it, if one has. empty: whether its value means nothing now, and is
    not kept. absent: the value it gets from a checkpoint of an earlier version, which lacks it;
    None: all have it.
    """

    name: str
    kind: Kind
    variable: tf.Variable
    replica: int | None = None
    empty: bool = False
    absent: Any = None

    def key(self, replica_ids: Sequence[int]) -> str:
        """Its name among those of all replicas, of which the local ones have these numbers."""
        if self.replica is None:
            return self.name
        return f"replica-{replica_ids[self.replica]}/{self.name}"


def model_slots(model: keras.Model) -> Iterator[Slot]:
    """The variables of the Keras model, its optimizers and metrics, of every local replica."""
    local_results = model.distribute_strategy.experimental_local_results
    for name, variable in training_variables(model):
        group = name.split("/")[0]
        for replica, component in enumerate(local_results(variable.value)):
            kind = Kind.SUM if group == "metrics" else Kind.MODEL
            if group == "state" and not component.dtype.is_floating:
                kind = Kind.RANDOM
            yield Slot(name, kind, component, replica)


def slots_of(model: keras.Model) -> list[Slot]:
    """The model's, and where its replicas are synchronised those of its synchronizer."""
    strategy: Any = model.distribute_strategy
    found = list(model_slots(model))
    if hasattr(strategy.extended, "synchronizer_of"):
        with strategy.scope():
            found += strategy.extended.synchronizer_of(model).slots()
    return found
