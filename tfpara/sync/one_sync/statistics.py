"""Counts and times of a worker's syncs, and the agreement of all workers after a sync."""

from __future__ import annotations

from typing import NamedTuple

from tfpara.sync.one_sync.reports import Request


class SyncStatistics(NamedTuple):
    """Counts and times of a worker's syncs so far.

    Attributes:
        steps: minibatches taken by each replica.
        samples: samples processed by all local replicas.
        syncs: completed syncs.
        sync_seconds: seconds for which training stood still for syncs, with the time of waiting.
            The work of an overlapped sync during training does not count.
        wait_seconds: the part of `sync_seconds` in which this worker waited for the slowest worker,
            or for the result of an overlapped sync; 0 with one worker. For a small model it
            includes the exchange of the weights.
        distance: relative distance ‖w_i − w̄‖ / ‖w̄‖ of this worker's replicas before a sync, as a
            root mean square. If the global state is sharded, only the parts of the weights that
            the replicas store count. It is measured at the first 16 syncs and then at every 16th.
        bytes_sent: bytes sent to other workers in syncs, without headers.
        left_out: minibatches of all local replicas that were left out for NaN or Inf.
    """

    steps: int
    samples: int
    syncs: int
    sync_seconds: float
    wait_seconds: float
    distance: float
    bytes_sent: float = 0.0
    left_out: int = 0

    def and_then(self, later: SyncStatistics) -> SyncStatistics:
        """Returns the sums of these and later ones; the distance is that of the later ones."""
        sums = (one + other for one, other in zip(self, later, strict=True))
        return SyncStatistics._make(sums)._replace(distance=later.distance)

    def of_epoch(
        self, begin: SyncStatistics, first: SyncStatistics, seconds: float, times: float
    ) -> dict[str, float]:
        """Returns TensorBoard's values for an epoch; these are the statistics at its end.

        Args:
            begin: the statistics at the beginning of the epoch.
            first: the statistics after the first step of the epoch.
            seconds: the time since that step.
            times: the number of all replicas divided by that of this worker's replicas.
        """
        waited = self.sync_seconds - first.sync_seconds
        return {
            "samples_per_second": (self.samples - first.samples) * times / seconds,
            "syncs": float(self.syncs - begin.syncs),
            "sync_ms": 1000.0 * waited / max(self.syncs - first.syncs, 1),
            "sync_fraction": waited / seconds,
            "wait_fraction": (self.wait_seconds - first.wait_seconds) / seconds,
            "distance": self.distance,
        }


NO_SYNCS = SyncStatistics(0, 0, 0, 0.0, 0.0, 0.0)


class Agreement(NamedTuple):
    """The agreement of all workers after a sync.

    request: the largest request of any worker.
    all_running: whether every replica still had data; also true if none had, as when Python code on
        all workers has closed the block.
    syncs: committed syncs, plus one that is in flight.
    block_open: whether this worker has taken steps since the last sync.
    in_flight: whether another sync has begun, whose results are not known yet.
    """

    request: Request
    all_running: bool
    syncs: int
    block_open: bool
    in_flight: bool = False
