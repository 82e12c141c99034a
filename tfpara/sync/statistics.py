"""What a worker knows of its syncs: counts and times, and what all workers have agreed on."""

from __future__ import annotations

from typing import NamedTuple

from tfpara.sync.reports import Request


class SyncStatistics(NamedTuple):
    """What a worker has done so far.

    steps: minibatches taken by each replica. samples: of all local replicas. syncs: committed.
    sync_seconds: for which training stood still for syncs, waiting included; what an overlapped
    sync does beside the training is not in it, nor the copying of its snapshot in the step after.
    wait_seconds: the part spent waiting, for the slowest replica or for an overlapped sync to
    arrive. distance: relative distance ‖w_i − w̄‖ / ‖w̄‖ of the local replicas before a sync, root
    mean square over them, on the parts of the weights that they hold where the global state is
    sharded; measured at the first 16 syncs and then at every 16th. bytes_sent: to other workers in
    syncs, headers left out.
    """

    steps: int
    samples: int
    syncs: int
    sync_seconds: float
    wait_seconds: float
    distance: float
    bytes_sent: float = 0.0


class Agreement(NamedTuple):
    """What all workers know alike after a sync.

    request: the largest that any worker made. all_running: whether every replica still had data
    (or none was asked to go on: Python code on all workers has closed the block).
    syncs: committed so far, with the one in the air. block_open: whether steps were taken since
    (this worker's). in_flight: whether another sync has begun since, whose results are not known
    yet.
    """

    request: Request
    all_running: bool
    syncs: int
    block_open: bool
    in_flight: bool = False
