"""The division of an epoch between parallel streams of utterances.

A replica reads S streams side by side. A stream is a sequence of utterances, and every minibatch
has the next T frames of each stream. An utterance begins with a new step, and its last step is
padded. The division is a function of the utterances' lengths and (seed, epoch, N) alone, so workers
agree on it without communication:

1. The utterances are put in an order drawn for (seed, epoch).
2. In this order, each utterance goes to the one of the N·S streams that is free first; if several
   are, to the one with the lowest number. So the ends of streams differ by one utterance at most.
3. Stream k is row k // N of replica k mod N.

This module has pure functions of NumPy, and reads no file.
"""

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StreamPlan:
    """The stream and the steps of each utterance. Make it with `plan`, which checks the arguments.

    The columns have one entry for each utterance, in the order of the epoch.
    """

    num_replicas: int
    streams: int  # number of streams of each replica
    truncation: int  # number of frames of each stream in a step
    utterance: np.ndarray  # int64: index of the utterance in the split
    stream: np.ndarray  # int64: index of the utterance's stream, below num_replicas * streams
    first_step: np.ndarray  # int64: the first step that has frames of the utterance
    end_step: np.ndarray  # int64: the step after the last that has frames of the utterance

    @property
    def num_steps(self) -> int:
        """Number of minibatches of the replica that has the most."""
        return int(self.end_step.max())

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches of the epoch, over all replicas."""
        return sum(self.steps(replica) for replica in range(self.num_replicas))

    def steps(self, replica: int) -> int:
        """Returns the number of minibatches of one replica."""
        if not 0 <= replica < self.num_replicas:
            raise ValueError(f"replica must lie in [0, {self.num_replicas}). Received: {replica}")
        return int(self.end_step[self.stream % self.num_replicas == replica].max())

    def rows(self, replica: int) -> list[np.ndarray]:
        """Returns, for each stream of a replica, its utterances' positions in the columns."""
        mine = np.flatnonzero(self.stream % self.num_replicas == replica)
        row = self.stream[mine] // self.num_replicas
        by_row = mine[np.argsort(row, kind="stable")]
        return np.split(by_row, np.cumsum(np.bincount(row, minlength=self.streams))[:-1])


def plan(
    frames: np.ndarray,
    *,
    num_replicas: int,
    streams: int,
    truncation: int,
    order: np.ndarray | None = None,
) -> StreamPlan:
    """Returns the division of an epoch.

    Args:
      frames: int [utterances]: frames of each utterance, after stacking.
      num_replicas: N, the number of replicas of all workers.
      streams: S, rows of a replica's minibatch.
      truncation: T, frames of a step.
      order: the utterances' numbers in the order of the epoch; None for 0, 1, ...

    Raises:
      ValueError: an argument is out of range, or there are fewer utterances than replicas.
    """
    for name, value in (
        ("num_replicas", num_replicas),
        ("streams", streams),
        ("truncation", truncation),
    ):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1. Received: {value!r}")
    if len(frames) < num_replicas:
        raise ValueError(
            f"{len(frames)} utterances are too few for num_replicas={num_replicas}: every replica"
            " needs one at least. Start fewer replicas"
        )
    utterance = np.arange(len(frames)) if order is None else order
    steps = -(-np.asarray(frames, np.int64)[utterance] // truncation)
    stream, first_step = np.empty_like(steps), np.empty_like(steps)
    # A heap of pairs: the first step at which a stream is free, and the index of that stream.
    free = [(0, number) for number in range(num_replicas * streams)]
    for position, count in enumerate(steps.tolist()):
        since, number = free[0]
        first_step[position], stream[position] = since, number
        heapq.heapreplace(free, (since + count, number))
    return StreamPlan(
        num_replicas, streams, truncation, utterance, stream, first_step, first_step + steps
    )
