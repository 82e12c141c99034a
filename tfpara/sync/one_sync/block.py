"""The open block: what the local replicas have trained since the last sync, counted by parts.

A *part* of the model is what one exchange averages. Without fragments and without overlap there is
one part: the whole model. Otherwise each fragment of the weights is a part, and the last part is
the state that no rule updates (such as batch-norm statistics).
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfpara.sync.one_sync.replicas import Site
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.settings import Settings


class Block:
    """The counters of an open block.

    Args:
        settings: the strategy's settings.
        whole: whether each sync is of the whole model, so that there is one part.
        site: this worker's place and links.

    Attributes:
        parts: number of parts.
        period: τ, or `NEVER`.
        steps: minibatches of each replica since the last sync point. The sync is due at `period`;
            where a worker has missed the beginning of the others' block, it is counted, too.
        part_steps: minibatches of each replica since the last sync of each part, shape [parts].
        samples: for each local replica the sum of its minibatches' weights since the last sync of
            each part, shape [parts]. A minibatch weighs its samples unless the user says otherwise.
        turn: number of the fragment that is synced next.
    """

    def __init__(self, settings: Settings, whole: bool, site: Site) -> None:
        make = site.make
        self._fragments = settings.fragments
        self._whole = whole
        self.parts = settings.fragments + (0 if whole else 1)
        self.period = site.period
        self.steps = make(tf.zeros([], tf.int64), "pending_steps")
        self.part_steps = make(tf.zeros([self.parts], tf.float64), "block_steps")
        self.samples = [
            make(tf.zeros([self.parts], tf.float64), f"pending_samples_{replica}")
            for replica in range(len(site.devices))
        ]
        self.turn = make(tf.zeros([], tf.int32), "turn")

    @property
    def trained(self) -> int:
        """Minibatches of each replica since the last sync, of a block of the whole model."""
        return int(self.part_steps[0])

    @property
    def is_open(self) -> bool:
        """Whether a part of the model was trained since its last sync."""
        return bool(tf.reduce_max(self.part_steps) > 0.0)

    def count(self, weights: tf.Tensor) -> tf.Tensor:
        """Counts a minibatch of each local replica by its weight; returns `steps`."""
        for replica, pending in enumerate(self.samples):
            pending.assign_add(tf.fill(pending.shape, weights[replica]))
        self.part_steps.assign_add(tf.ones_like(self.part_steps))
        return self.steps.assign_add(1)

    def close(self, done: tf.Tensor, is_last: tf.Tensor) -> None:
        """Resets the counters after a sync.

        Args:
            done: number of the fragment that was synced.
            is_last: whether all parts were synced, as at the end of the data.
        """
        self.steps.assign(0)
        counters = (self.part_steps, *self.samples)
        if self._whole:  # so that a first step does not trace what would change nothing
            for pending in counters:
                pending.assign([0.0])
            return
        self.turn.assign(tf.where(is_last, 0, (done + 1) % self._fragments))
        kept = 1.0 - tf.one_hot(done, self.parts, dtype=tf.float64)
        for pending in counters:
            pending.assign(tf.where(is_last, tf.zeros_like(pending), kept * pending))

    def reopen(self, fragment: tf.Tensor, steps: tf.Tensor, samples: tf.Tensor) -> None:
        """Restores the counters of a fragment whose sync was started and has failed.

        Args:
            fragment: number of the fragment.
            steps: `part_steps` when the sync started.
            samples: `samples` when the sync started, shape [local replicas, parts].
        """
        carried = tf.one_hot(fragment, self.parts, dtype=tf.float64)
        self.turn.assign(fragment)
        # The part that was synced last has counted the steps since the last sync point alone.
        self.steps.assign_add(tf.cast(tf.reduce_min(steps), tf.int64))
        self.part_steps.assign_add(carried * steps)
        for replica, pending in enumerate(self.samples):
            pending.assign_add(carried * samples[replica])

    def give_up(self) -> None:
        """Sets all counters to 0: a checkpoint replaces what was trained since the last sync."""
        for counter in (self.steps, self.part_steps, *self.samples, self.turn):
            counter.assign(tf.zeros_like(counter))

    def slots(self) -> Iterator[Slot]:
        """Yields the counters that are not 0 after a sync of one of several parts."""
        if not self._whole:
            yield Slot("open/turn", Kind.BLOCK, self.turn)
            yield Slot("open/block_steps", Kind.BLOCK, self.part_steps, absent=0.0)
            for replica, pending in enumerate(self.samples):
                yield Slot("sync/pending_samples", Kind.BLOCK, pending, replica)
