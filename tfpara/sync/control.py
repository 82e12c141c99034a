"""Where the workers meet from Python: exchanges that all must come to, for the same purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpara.cluster.place import Place, Purpose, sentence
from tfpara.collectives import Collectives

# Before a worker fails: by then the others have what says why.
_GRACE_SECONDS = 1.0


class MismatchError(RuntimeError):
    """Workers have come to different exchanges. The message says who is where."""


class Control:
    """Exchanges between workers that are called from Python.

    Args:
        collectives: between the workers' hosts, with a timeout.
        place: where this process is.
        synchronizers: gives those of the models that were trained, in the same order everywhere.

    Attributes:
        collectives: for what follows `together`, of which all workers know by it.
    """

    def __init__(
        self, collectives: Collectives, place: Place, synchronizers: Callable[[], Sequence[Any]]
    ) -> None:
        self.collectives = collectives
        self.size, self.rank = collectives.size, collectives.rank
        self._place = place
        self._synchronizers = synchronizers

    def together(self, purpose: Purpose, number: int = 0) -> list[int]:
        """Returns once every worker has called it for this purpose.

        Syncs that are in the air are waited for.

        Args:
            purpose: the same on every worker.
            number: below 2^53, to tell the others.

        Returns:
            Each worker's number, by rank.

        Raises:
            MismatchError, tf.errors.InvalidArgumentError: on every worker, if one has come to
                another exchange.
        """
        if self.size == 1:
            return [number]
        with self._place.meeting(purpose):
            synchronizers = self._synchronizers()
            for other in synchronizers[1:]:
                other.land()
            if synchronizers:
                return [int(each) for each in synchronizers[0].meet(float(number))]
            return self._meet(number)

    def _meet(self, number: int) -> list[int]:
        """As a synchronizer's, where there is none."""
        met, purpose, _ = self._place.mark()
        mine = tf.constant([met, purpose, number], tf.float64)
        with self._place.waiting():
            rows = self.collectives.all_gather(mine, "meeting").numpy()
            if (rows[:, :2] != rows[0, :2]).any():
                told = tf.constant(self._place.told())
                table = self.collectives.all_gather(told, "places").numpy()
                time.sleep(_GRACE_SECONDS)
                raise MismatchError(sentence(table))
        return [int(each) for each in rows[:, 2]]
