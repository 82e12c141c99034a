"""The sizes of a run: workers, their devices, and which worker this is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass
class Topology:
    """The workers that take part and this worker's place; an elastic run changes both.

    Attributes:
        workers: the number of workers.
        rank: the number of this one, by which data and seeds are divided; 0 is the chief.
        devices: the names of this worker's devices, the lead device first; the others have as many.
        changes: whether workers come and go in this run, or did in the one that it repeats.
    """

    workers: int = 1
    rank: int = 0
    devices: Sequence[str] = ()
    changes: bool = False

    @property
    def replicas(self) -> int:
        """N, the replicas of all workers."""
        return self.workers * len(self.devices)

    @property
    def first_replica(self) -> int:
        """The number, among 0 … N − 1, of this worker's first replica."""
        return self.rank * len(self.devices)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Has this worker be the only one for what is made inside."""
        former, (self.workers, self.rank) = (self.workers, self.rank), (1, 0)
        try:
            yield
        finally:
            self.workers, self.rank = former
