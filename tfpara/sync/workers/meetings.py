"""Exchanges that Python code starts, which all workers must reach for the same purpose."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpara.cluster.call_site import CallSite, Purpose, sentence
from tfpara.collectives import Collectives, Loopback
from tfpara.sync.workers.company import Company, MismatchError
from tfpara.typing import Json

# Before a worker raises a MismatchError, it waits for this many seconds, so that the other workers
# still receive the reason.
_GRACE_SECONDS = 1.0


@dataclasses.dataclass(eq=False)
class Control:
    """Exchanges between workers that Python code starts.

    `collectives` are between the workers' hosts, with a timeout. All workers may use them right
    after `together`. `_synchronizers` returns those of trained models, in one order on all workers.
    """

    collectives: Collectives
    _call_site: CallSite
    _synchronizers: Callable[[], Sequence[Any]]
    _company: Company

    def together(self, purpose: Purpose, number: int = 0) -> list[int]:
        """Waits until every worker has called this for this purpose, and all syncs have ended.

        Returns each worker's `number`, below 2^53, by rank. Raises MismatchError or
        tf.errors.InvalidArgumentError on every worker, if one has reached another exchange.
        """
        if isinstance(self.collectives, Loopback):
            return [number]
        return self._company.together(lambda: self._together(purpose, number))

    def broadcast(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Returns rank 0's tensor; all workers must call it, with the same shape and dtype."""
        got = value

        def exchange() -> None:
            nonlocal got
            got = self.collectives.broadcast(value, name)
            if self._company.changes:
                # When a worker is lost, an exchange that any worker has completed is not repeated.
                # So a worker that has not received the tensor yet would never get it. The barrier
                # prevents that: no worker passes it before all workers have the tensor.
                self.collectives.barrier(name)

        self._company.together(exchange)
        return got

    def whole(self, exchange: Callable[[], Json]) -> Any:
        """Returns the result of an exchange of several steps, all repeated if a worker is lost."""
        return self._company.together(exchange)

    def _together(self, purpose: Purpose, number: int) -> list[int]:
        with self._call_site.meeting(purpose):
            synchronizers = self._synchronizers()
            for other in synchronizers[1:]:
                other.land()
            if synchronizers:
                return [int(each) for each in synchronizers[0].meet(float(number))]
            return self._meet(number)

    def _meet(self, number: int) -> list[int]:
        """Exchanges the numbers like `Synchronizer.meet`, while no model has been trained yet."""
        met, purpose, _ = self._call_site.mark()
        mine = tf.constant([met, purpose, number], tf.float64)
        with self._call_site.waiting():
            rows = self.collectives.all_gather(mine, "meeting").numpy()
            if (rows[:, :2] != rows[0, :2]).any():
                told = tf.constant(self._call_site.told())
                table = self.collectives.all_gather(told, "places").numpy()
                time.sleep(_GRACE_SECONDS)
                raise MismatchError(sentence(table))
        return [int(each) for each in rows[:, 2]]
