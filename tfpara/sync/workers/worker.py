"""This worker, and its relation to the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tfpara.cluster.call_site import CallSite
from tfpara.sync.workers.company import Company
from tfpara.sync.workers.meetings import Control


@dataclasses.dataclass(eq=False)
class Worker:
    """This worker: its number, its devices, its place, and its exchanges with the others.

    Attributes:
        company: the workers that take part.
        num_workers: number of workers; in an elastic run it changes, and so does `rank`.
        rank: number of this worker, by which data and seeds are divided; 0 is the chief.
        devices: names of this worker's devices, the lead device first; all workers have equally
            many.
        kind: kind of the devices, "CPU" or "GPU".
        host: the device for small exchanges.
        call_site: the place of this process in its script.
        control: exchanges between the workers that Python code calls.
    """

    company: Company
    num_workers: int = 1
    rank: int = 0
    devices: Sequence[str] = ()
    kind: str = "CPU"
    host: str = "CPU:0"
    call_site: CallSite = dataclasses.field(default_factory=CallSite)
    control: Control = dataclasses.field(init=False)

    @property
    def changes(self) -> bool:
        return self.company.changes

    @property
    def replicas(self) -> int:
        """N, the replicas of all workers."""
        return self.num_workers * len(self.devices)

    @property
    def first_replica(self) -> int:
        """The number, among 0 … N − 1, of this worker's first replica."""
        return self.rank * len(self.devices)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which new objects take this worker for the only one."""
        former, (self.num_workers, self.rank) = (self.num_workers, self.rank), (1, 0)
        try:
            yield
        finally:
            self.num_workers, self.rank = former
