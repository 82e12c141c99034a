"""A worker's part of an epoch's data, as a user's function learns it when it makes a dataset."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpara.contexts import context_variable


def first_replica_of(worker: int, devices: int, unlike: Sequence[int] = ()) -> int:
    """Returns a worker's first replica; each has so many `devices`, or those in `unlike`."""
    return sum(unlike[:worker]) if unlike else worker * devices


def replicas_of(workers: int, devices: int, unlike: Sequence[int] = ()) -> int:
    """Returns N, the replicas of all workers; for the arguments see `first_replica_of`."""
    return first_replica_of(len(unlike) or workers, devices, unlike)


@dataclasses.dataclass(frozen=True)
class DataPlace:
    """A worker's part of the data, from an epoch and minibatch on.

    Attributes:
        worker, workers: number of the worker, from 0, and of all that share the data.
        devices: number of devices of this worker, with a replica on each.
        epoch: number of the epoch, from 0.
        first: number of minibatches of the epoch, over all replicas, that are left out.
        dealt: a `Dealt` of the worker's minibatches if the workers' speeds decide which they are;
            None: the number of the worker decides.
        unlike: number of devices of each worker, by rank, if they differ; else empty.
    """

    worker: int
    workers: int
    devices: int
    epoch: int
    first: int = 0
    dealt: Any = None
    unlike: Sequence[int] = ()

    @property
    def num_replicas(self) -> int:
        return replicas_of(self.workers, self.devices, self.unlike)

    @property
    def replica_ids(self) -> list[int]:
        """The numbers of the worker's replicas among all."""
        first = first_replica_of(self.worker, self.devices, self.unlike)
        return list(range(first, first + self.devices))


# The place for which a dataset is being constructed. Threads that read the dataset later do not
# inherit the place, so they find no place.
_PLACE: contextvars.ContextVar[DataPlace | None] = contextvars.ContextVar(
    "tfpara_data_place", default=None
)


def making(place: DataPlace) -> contextlib.AbstractContextManager[None]:
    """A context in which datasets are constructed for a worker's part of the data."""
    return context_variable(_PLACE, place)


def present() -> DataPlace | None:
    """Returns the place for which a dataset is being constructed; None outside of `making`."""
    return _PLACE.get()


def dealt() -> Any:
    """Returns `present().dealt`; None outside of `making`."""
    place = _PLACE.get()
    return None if place is None else place.dealt
