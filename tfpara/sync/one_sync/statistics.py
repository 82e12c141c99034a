"""Counts and times of a worker's syncs, and the agreement of all workers after a sync."""

from __future__ import annotations

from typing import NamedTuple

from tfpara.sync.one_sync.reports import Request


class SyncStatistics(NamedTuple):
    """Counts and times of a worker's syncs so far.

    Attributes:
        steps: minibatches taken by each replica.
        samples: samples processed by all local replicas.
        syncs: committed syncs.
        sync_seconds: seconds for which training stood still for syncs, waiting included. It leaves
            out the work of an overlapped sync beside the training, and the copying of its snapshot
            in the next step.
        wait_seconds: the part of `sync_seconds` spent waiting for the slowest worker, or for an
            overlapped sync to arrive; 0 with one worker. It includes the exchange of a small
            model's weights, which travel with the reports.
        distance: relative distance ‖w_i − w̄‖ / ‖w̄‖ of the local replicas before a sync, root mean
            square. If the global state is sharded, it is computed from the part of the weights that
            each replica keeps. It is measured at the first 16 syncs and then at every 16th.
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
        """Returns the sums of these statistics and `later` ones; the distance is the later one."""
        sums = (one + other for one, other in zip(self, later, strict=True))
        return SyncStatistics._make(sums)._replace(distance=later.distance)

    def of_epoch(
        self, begin: SyncStatistics, first: SyncStatistics, seconds: float, times: float
    ) -> dict[str, float]:
        """Returns TensorBoard's values of an epoch; these are the statistics at its end.

        Args:
            begin: the statistics at the beginning of the epoch.
            first: the statistics after the epoch's first step.
            seconds: the time since the epoch's first step.
            times: the number of all replicas divided by that of this worker's, since statistics
                count the samples of this worker alone.
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

    all_running: whether every replica still had data; also true if none had data, as when Python
        code on all workers has closed the block.
    syncs: committed syncs, plus one that is in flight.
    block_open: whether this worker has taken steps since the last sync.
    """

    request: Request
    all_running: bool
    syncs: int
    block_open: bool
