"""This worker, and its relation to the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from tfpara.cluster.call_site import CallSite
from tfpara.contexts import attributes
from tfpara.sync.workers.company import Company
from tfpara.sync.workers.data_place import first_replica_of, replicas_of
from tfpara.sync.workers.meetings import Control


@dataclasses.dataclass(eq=False)
class Worker:
    """This worker: its number, devices, place in its script, and exchanges with the others.

    Attributes:
        company: the workers that take part.
        num_workers: number of workers; in an elastic run it changes, and so does `rank`.
        rank: number of this worker, by which data and seeds are divided; 0 is the chief.
        devices: names of this worker's devices, the lead device first.
        kind: kind of these devices, "CPU" or "GPU".
        host: the device, a CPU, on which small exchanges with other workers run.
        call_site: the place of this process in its script.
        control: exchanges between the workers that Python code starts.
    """

    company: Company
    num_workers: int = 1
    rank: int = 0
    devices: Sequence[str] = ()
    kind: str = "CPU"
    host: str = "CPU:0"
    call_site: CallSite = dataclasses.field(default_factory=CallSite)
    control: Control = dataclasses.field(init=False)
    # The number of devices of each worker, within a context of `as_one_of`; empty outside of it.
    _place: Sequence[int] = ()

    @property
    def changes(self) -> bool:
        return self.company.changes

    @property
    def replicas(self) -> int:
        """N, the replicas of all workers."""
        return replicas_of(self.num_workers, len(self.devices), self._of_workers)

    @property
    def first_replica(self) -> int:
        """The number, among 0 … N − 1, of this worker's first replica."""
        return first_replica_of(self.rank, len(self.devices), self._of_workers)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all workers' devices; of this worker's alone until the others' are known."""
        return self.company.kinds or frozenset([self.kind])

    @property
    def replica_ids(self) -> range:
        """The numbers, among 0 … N − 1, of this worker's replicas."""
        return range(self.first_replica, self.first_replica + len(self.devices))

    @property
    def among_unlike(self) -> bool:
        """Whether workers have unlike numbers of devices, except within `as_one_of`."""
        return bool(self.company.unlike_devices) and not self._place

    @property
    def _of_workers(self) -> Sequence[int]:
        """The number of devices of each worker; empty: all have as many as this one."""
        return self._place or self.company.unlike_devices

    def as_one_of(
        self, of_workers: Sequence[int], rank: int
    ) -> contextlib.AbstractContextManager[None]:
        """A context: objects made in it see this worker as one of others with so many devices."""
        return attributes(self, num_workers=len(of_workers), rank=rank, _place=of_workers)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """A context: objects made in it see this worker as the only one."""
        return self.as_one_of([len(self.devices)], 0)
