"""Runs that are killed at any point and started again end as if nothing had happened.

Each start goes on from where the last kill left the run. What it ends with (weights of every
replica, global model, averages, slots, counters, the log of every epoch) is compared, bit for bit,
with what the same processes end with that were left alone.
"""

import pytest

from tests.lib.resumable_runs import Run, assert_same

# Where a start is killed, at which time that it comes there, and which workers: 0, 1 or both.
# `None`: so many seconds after its first step. The first leaves a checkpoint, which some need.
# Of the program's places each is in one list or the other, where what it does there is the same
# for any number of workers; before it looks for a checkpoint ("start") a kill changes nothing.
OF_ONE_PROCESS = [
    ("step", 3, [0]),
    ("begin", 2, [0]),
    ("written", 2, [0]),
    ("removing", 2, [0]),
    ("removed", 1, [0]),
]
OF_TWO_WORKERS = [
    ("renamed", 3, [0]),  # at step 8, after which worker 1 has no data left in that epoch
    ("sync", 2, [0]),
    ("sync", 1, [1]),
    ("part", 2, [1]),
    ("manifest", 1, [0]),
    ("restored", 1, [1]),
    (None, 0.3, [0, 1]),
]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("workers", "every_syncs", "kills"),
    [
        pytest.param(1, 1, OF_ONE_PROCESS, id="one process"),
        pytest.param(2, 2, OF_TWO_WORKERS, id="two workers"),
    ],
)
def test_killed_again_and_again(tmp_path, uninterrupted, workers, every_syncs, kills):
    run = Run(tmp_path / "run", workers, every_syncs=every_syncs)
    seen = run.kill_again_and_again(kills)
    assert seen > len(kills) // 2  # It made progress between them.
    assert_same(run.to_the_end(), uninterrupted(workers))
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(left) == 3 and left[-1] == "lock", left
