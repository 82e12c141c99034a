"""This worker among all that take part."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from tfpara.cluster.place import Place
from tfpara.collectives.members import Members
from tfpara.sync.workers.meetings import Control


@dataclasses.dataclass(eq=False)
class Worker:
    """This worker's number among all workers, its devices, its place, and its exchanges with them.

    Attributes:
        elastic: this worker's part in an elastic run; else None.
        changes: whether workers come and go in this run, or did in the one that it repeats.
        num_workers: the workers that take part; in an elastic run it changes, and so does `rank`.
        rank: the number of this one, by which data and seeds are divided; 0 is the chief.
        devices: the names of this worker's devices, the lead device first; the others have as many.
        place: the place of this process in its script.
        control: exchanges between the workers that Python code calls.
    """

    elastic: Any
    changes: bool
    num_workers: int = 1
    rank: int = 0
    devices: Sequence[str] = ()
    place: Place = dataclasses.field(default_factory=Place)
    control: Control = dataclasses.field(init=False)

    @property
    def replicas(self) -> int:
        """N, the replicas of all workers."""
        return self.num_workers * len(self.devices)

    @property
    def first_replica(self) -> int:
        """The number, among 0 … N − 1, of this worker's first replica."""
        return self.rank * len(self.devices)

    @property
    def members(self) -> Members | None:
        """The workers of an elastic run, as collectives know them; else None."""
        return self.elastic.members if self.elastic else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Has this worker be the only one for what is made inside."""
        former, (self.num_workers, self.rank) = (self.num_workers, self.rank), (1, 0)
        try:
            yield
        finally:
            self.num_workers, self.rank = former
