"""The partition of an epoch: M blocks of N splits each, with tau minibatches in a split.

In papers 000 and 003 (BMUF) the data are cut into M non-overlapping blocks, and each block into N
splits, one for each worker. Here every frame of an epoch is used exactly once:

1. The utterances are put in an order drawn for (seed, epoch), which gives each frame a *position*.
2. Positions are cut into *windows* of W frames, W = `shuffle_frames` rounded up to a multiple of
   the minibatch, and permuted within each window by a generator seeded by (seed, epoch, window).
3. The resulting sequence is cut into minibatches k = 0, 1, ...: none crosses two windows, and only
   the very last one of the epoch may be short.
4. Block m holds minibatches [m N tau, (m + 1) N tau); replica i's split of it is those with
   k mod N = i.

Steps 1 to 3 do not depend on N: runs on different numbers of replicas read the same sequence of
minibatches. At the end, replicas differ by one minibatch at most, and those that have one less are
the replicas with the highest numbers. This module has pure functions of NumPy, and reads no file.
"""

from typing import NamedTuple

import numpy as np


class Partition(NamedTuple):
    """The division of an epoch's frames. Make it with `partition`, which checks the arguments.

    `window` is in frames, `sync_period` in minibatches of one replica.
    """

    num_frames: int
    minibatch: int
    num_replicas: int
    sync_period: int
    window: int

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches of the epoch, over all replicas."""
        return -(-self.num_frames // self.minibatch)

    @property
    def num_windows(self) -> int:
        return -(-self.num_frames // self.window)

    @property
    def num_blocks(self) -> int:
        """M, the number of syncs in the epoch; the last block may be incomplete."""
        return -(-self.num_minibatches // (self.num_replicas * self.sync_period))

    @property
    def num_steps(self) -> int:
        """Number of minibatches of replica 0; no other replica has more."""
        return len(self.minibatches(0))

    def minibatches(self, replica: int) -> range:
        """Returns the numbers k of the minibatches of one replica, in order."""
        if not 0 <= replica < self.num_replicas:
            raise ValueError(f"replica must lie in [0, {self.num_replicas}). Received: {replica}")
        return range(replica, self.num_minibatches, self.num_replicas)

    def split(self, block: int, replica: int) -> range:
        """Returns the numbers k of one replica's minibatches in one block, at most tau."""
        first = block * self.sync_period
        return self.minibatches(replica)[first : first + self.sync_period]

    def frames(self, minibatch: int) -> range:
        """Returns the indices of one minibatch in the epoch's (shuffled) sequence of frames."""
        start = minibatch * self.minibatch
        return range(start, min(start + self.minibatch, self.num_frames))

    def window_frames(self, window: int) -> range:
        """Returns the positions of one window."""
        start = window * self.window
        return range(start, min(start + self.window, self.num_frames))

    def window_minibatches(self, window: int) -> range:
        """Returns the numbers k of the minibatches in one window."""
        frames = self.window_frames(window)
        return range(frames.start // self.minibatch, -(-frames.stop // self.minibatch))


def partition(
    num_frames: int,
    *,
    minibatch: int,
    num_replicas: int,
    sync_period: int,
    shuffle_frames: int,
) -> Partition:
    """Returns the division of `num_frames` frames.

    Args:
      num_frames: frames of the epoch.
      minibatch: frames of a minibatch.
      num_replicas: N, the number of replicas of all workers.
      sync_period: tau, minibatches of one replica between two syncs.
      shuffle_frames: frames that are permuted together, rounded up to a multiple of `minibatch`.

    Raises:
      ValueError: an argument is not an integer of at least 1.
    """
    for name, value in (
        ("num_frames", num_frames),
        ("minibatch", minibatch),
        ("num_replicas", num_replicas),
        ("sync_period", sync_period),
        ("shuffle_frames", shuffle_frames),
    ):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1. Received: {value!r}")
    window = -(-shuffle_frames // minibatch) * minibatch
    return Partition(
        int(num_frames), int(minibatch), int(num_replicas), int(sync_period), int(window)
    )


def utterance_order(num_utterances: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the utterances' numbers in the order of one epoch: int64 [num_utterances]."""
    return _generator(seed, epoch, 0).permutation(num_utterances)


def frame_order(plan: Partition, window: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the positions of one window, int64, in the order in which minibatches take them."""
    frames = plan.window_frames(window)
    return frames.start + _generator(seed, epoch, 1, window).permutation(len(frames))


def _generator(seed: int, *key: int) -> np.random.Generator:
    # If the key were appended to the seed, some keys would give the same random numbers: NumPy
    # extends a short seed by zeros, so [seed, 1, 0] and [seed, 1, 0, 0] are the same seed.
    # `spawn_key` tells such keys apart.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
