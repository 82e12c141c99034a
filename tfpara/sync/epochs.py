"""Where in the data a run is: the epoch, and how much of it is done."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Position:
    """The epoch that is trained, or comes next.

    Attributes:
        epoch: its number, from 0.
        first: minibatches of it, over all replicas, that an earlier process has trained.
        steps: the same in minibatches of one replica.
    """

    epoch: int = 0
    first: int = 0
    steps: int = 0
    _steps_seen: int = 0

    def move(self, epoch: int, steps_seen: int, first: int = 0, steps: int = 0) -> None:
        """Goes to an epoch, of which `first` minibatches are done.

        Args:
            epoch: its number.
            steps_seen: of training so far, in this process.
            first: minibatches done, over all replicas.
            steps: minibatches done by each replica.
        """
        self.epoch, self.first, self.steps, self._steps_seen = epoch, first, steps, steps_seen

    def begin(self, steps_seen: int) -> tuple[int, int]:
        """A pass over the data begins: returns the epoch and `first`.

        Where steps were taken since the last pass began, and nobody has said otherwise, it is the
        next epoch's: so an evaluation, or Keras' look at a first batch, does not count.
        """
        if steps_seen > self._steps_seen:
            self.move(self.epoch + 1, steps_seen)
        return self.epoch, self.first

    def take_steps(self) -> int:
        """Minibatches of each replica to pass over, once, in data that know no epochs."""
        steps, self.steps = self.steps, 0
        return steps
