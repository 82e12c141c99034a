"""The minibatches that replicas have left out for NaN or Inf: how many, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfpara.sync.one_sync.replicas import Site
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.typing import Json

# A replica keeps the numbers of only the first 32 minibatches that it leaves out in an epoch.
NAMED = 32


class LeftOut:
    """The minibatches that the local replicas leave out: in the present epoch, and in `total`."""

    def __init__(self, site: Site) -> None:
        # Each replica has a vector. It begins with the number of minibatches in the epoch so far,
        # and the number of those that were left out. Then come the numbers, counted from 1 in the
        # epoch, of the first `NAMED` minibatches that were left out.
        self._of_epoch = [
            site.make(tf.zeros([2 + NAMED], tf.float64), f"left_out_{replica}")
            for replica in range(len(site.devices))
        ]
        self.total = site.make(tf.zeros([], tf.float64), "left_out")

    def count(self, nonfinite: Sequence[tf.Tensor]) -> None:
        """Counts a minibatch of each local replica, and notes whether it was left out."""
        for kept, bad in zip(self._of_epoch, nonfinite, strict=True):
            value, one = kept.read_value(), tf.cast(bad, tf.float64)
            number = value[0] + 1.0
            at = tf.range(NAMED, dtype=tf.float64) == value[1]
            named = tf.where(at & bad, number, value[2:])
            kept.assign(tf.concat([[number, value[1] + one], named], 0))
            self.total.assign_add(one)

    def begin_epoch(self) -> None:
        for kept in self._of_epoch:
            kept.assign(tf.zeros_like(kept))

    def go_on(self, steps: int) -> None:
        """Continues an epoch after `steps` minibatches of each replica."""
        # A checkpoint of other replicas, or of a run that leaves none out, lacks this number.
        for kept in self._of_epoch:
            kept[0].assign(tf.maximum(kept[0], float(steps)))

    def of_epoch(self, replica: int) -> tf.Tensor:
        """Returns a local replica's count of minibatches in the epoch, and of those left out."""
        return self._of_epoch[replica].read_value()[:2]

    def told(self) -> list[Json]:
        """Returns for each local replica how many it left out in the epoch, and their numbers."""
        values = [kept.numpy() for kept in self._of_epoch]
        return [[int(v[1]), v[2:][v[2:] > 0.0].astype(np.int64).tolist()] for v in values]

    def slots(self) -> Iterator[Slot]:
        """Yields the counts of the epoch, which go on when a resumed run continues the epoch."""
        for replica, kept in enumerate(self._of_epoch):
            yield Slot("counter/left_out_of_epoch", Kind.BLOCK, kept, replica, absent=0.0)
