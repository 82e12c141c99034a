"""The position of a run in its data: the epoch, and the trained part of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from tfpara.contexts import attributes


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass over the data that an earlier process has begun; it may last several epochs.

    Attributes:
        epoch: the epoch in which the pass began.
        first: number of the pass's trained minibatches, over all replicas.
        steps: number of the pass's trained minibatches of each replica.
    """

    epoch: int
    first: int
    steps: int


@dataclasses.dataclass
class Position:
    """The present or next epoch, and the part of it that an earlier process has trained.

    Attributes:
        epoch: number of the epoch, from 0.
        first: number of minibatches that an earlier process has trained, over all replicas.
        steps: number of minibatches of each replica that must still be skipped.
        begun: the pass that continues, if `fit` has `steps_per_epoch`; None: a new pass begins.
        resumed: number of steps of each replica in this epoch that an earlier process has taken,
            counted as steps of this run's number of replicas.
    """

    epoch: int = 0
    first: int = 0
    steps: int = 0
    begun: Pass | None = None
    resumed: int = 0
    _steps_seen: int = 0

    def move(
        self, epoch: int, steps_seen: int, first: int = 0, steps: int = 0, begun: Pass | None = None
    ) -> None:
        """Sets the position, after `steps_seen` training steps of this process."""
        self.epoch, self.first, self.steps, self._steps_seen = epoch, first, steps, steps_seen
        self.begun, self.resumed = begun, steps

    def enter(self, epoch: int, steps_seen: int) -> None:
        """Notes that `fit` begins an epoch; a position that is in it, as after a resume, stays."""
        if epoch != self.epoch or steps_seen > self._steps_seen:
            self.move(epoch, steps_seen)

    def begin(self, steps_seen: int) -> tuple[int, int]:
        """Notes that a pass over the data begins; returns its epoch and `first`."""
        # A pass in which Keras only inspects the first batch begins no epoch.
        if steps_seen > self._steps_seen:
            self.move(self.epoch + 1, steps_seen)
        return self.epoch, self.first

    @contextlib.contextmanager
    def aside(self, steps_seen: Callable[[], int]) -> Iterator[None]:
        """A context for a `fit` that a callback of `fit` calls; keeps the outer one's position."""
        former, taken = vars(self).copy(), steps_seen() - self._steps_seen
        try:
            yield
        finally:
            vars(self).update(former)
            self._steps_seen = steps_seen() - taken

    def take_steps(self) -> int:
        """Returns how many minibatches of each replica to skip now; the next call returns 0."""
        steps, self.steps, self.begun = self.steps, 0, None
        return steps

    def within(self, begun: Pass) -> contextlib.AbstractContextManager[None]:
        """A context in which an iterator is made that continues the pass `begun`."""
        self.steps = begun.steps
        return attributes(self, epoch=begun.epoch, first=begun.first)
