"""The position of a run in its data: the epoch, and how much of it is done."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Position:
    """The epoch that is trained, or comes next, and how much of it an earlier process has trained.

    Attributes:
        epoch: number of the epoch, from 0.
        first: minibatches of the epoch that an earlier process has trained, over all replicas.
        steps: minibatches of each replica that are still to be skipped.
    """

    epoch: int = 0
    first: int = 0
    steps: int = 0
    _steps_seen: int = 0

    def move(self, epoch: int, steps_seen: int, first: int = 0, steps: int = 0) -> None:
        """Sets the position to an epoch, of which `first` minibatches are done.

        Args:
            epoch: number of the epoch.
            steps_seen: training steps of this process so far.
            first: minibatches done, over all replicas.
            steps: minibatches done by each replica.
        """
        self.epoch, self.first, self.steps, self._steps_seen = epoch, first, steps, steps_seen

    def begin(self, steps_seen: int) -> tuple[int, int]:
        """Notes that a pass over the data begins; returns the epoch and `first`.

        The pass is of the next epoch if training steps were taken since the last `begin` or `move`.
        So a pass of an evaluation, or for Keras' look at a first batch, does not count.
        """
        if steps_seen > self._steps_seen:
            self.move(self.epoch + 1, steps_seen)
        return self.epoch, self.first

    def take_steps(self) -> int:
        """Returns how many minibatches of each replica to skip; 0 at the next call.

        It is for data that are the same dataset in every epoch.
        """
        steps, self.steps = self.steps, 0
        return steps
