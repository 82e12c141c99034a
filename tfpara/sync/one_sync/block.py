"""The open block: counts of the local replicas' minibatches since the last sync of each part.

A *part* of the model is what one exchange averages. Without fragments and without overlap there is
one part: the whole model. Otherwise each fragment of the weights is a part, and the last part is
the state that no rule updates (such as batch-norm statistics).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfpara.sync.one_sync.counter import Counter
from tfpara.sync.one_sync.replicas import Site
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.settings import Settings
from tfpara.typing import Scalar


class Block:
    """The counters of an open block; `whole`: there is one part, the whole model.

    Attributes:
        counts: the variable with all counters below except `turn`.
        period: a variable with τ, or with `NEVER` while there are no syncs.
        steps: minibatches of each replica since the last sync of any part; when they reach
            `period`, a sync is due. In an elastic run they include the minibatches of the block
            that this worker has missed.
        part_steps: minibatches of each replica since the last sync of each part, shape [parts].
        samples: for each local replica the sum of its minibatches' weights since the last sync of
            each part, shape [parts]. The weight of a minibatch is its number of samples, unless
            the user has set another one.
        taken: minibatches that each replica has trained in all blocks.
        seen: samples that all local replicas together have trained in all blocks.
        turn: number of the fragment that is synced next.
    """

    def __init__(self, settings: Settings, whole: bool, site: Site) -> None:
        make = site.make
        self._fragments = settings.fragments
        self._whole = whole
        self.parts = settings.fragments + (0 if whole else 1)
        self.period, self._balance = site.period, site.balance
        # All counters are in one variable, so that a step writes only one variable. float64 is
        # exact for whole numbers up to 2^53.
        parts, replicas = self.parts, range(len(site.devices))
        counts = make(tf.zeros([3 + parts * (1 + len(replicas))], tf.float64), "counts")
        self.counts = counts
        self.taken = Counter(counts, 0, [], tf.int64)
        self.seen = Counter(counts, 1, [])
        self.steps = Counter(counts, 2, [], tf.int64)
        self.part_steps = Counter(counts, 3, [parts])
        self.samples = [Counter(counts, 3 + (1 + r) * parts, [parts]) for r in replicas]
        # For each element of `counts`: the index of the term that the method `count` adds to it.
        self._terms = [0, 1, 0, *[0] * parts, *(2 + r for r in replicas for _ in range(parts))]
        self.turn = make(tf.zeros([], tf.int32), "turn")
        # How many steps each replica has taken since the last sync, shape [local replicas, 1]. It
        # is None if all replicas take equally many steps.
        self._stepped: tf.Variable | None = None
        if self._balance is not None and self._balance.simulates:
            self._stepped = make(tf.zeros([len(site.devices), 1], tf.float64), "stepped")

    def stepped(self) -> tf.Tensor:
        """Returns `part_steps` of each local replica if they may differ, else an empty tensor."""
        return tf.zeros([0, 1]) if self._stepped is None else self._stepped.read_value()

    @property
    def trained(self) -> int:
        """Minibatches of each replica since the last sync, if the whole model is one part."""
        return int(self.part_steps.numpy()[0])

    def due(self) -> tf.Tensor:
        """Returns the number of minibatches in the open block after which a sync is due."""
        period = self.period.read_value()
        if self._balance is None:
            return period
        share = self._balance.due.read_value()
        return tf.where(share > 0, share, period)

    @property
    def is_open(self) -> bool:
        """Whether any part of the model was trained since its last sync."""
        return bool(self.part_steps.numpy().any())

    def count(
        self, samples: tf.Tensor, weights: Sequence[tf.Tensor], each: Sequence[Scalar]
    ) -> tf.Tensor:
        """Counts a minibatch of each local replica; returns the new value of `steps`.

        `samples`, float64, is the sum of `each`, the numbers of samples of these minibatches. A
        replica without samples takes no step. `weights`, float64, are the minibatches' weights.
        """
        if self._stepped is not None:
            stepped = tf.stack([tf.cast(own, tf.int64) > 0 for own in each])
            self._stepped.assign_add(tf.cast(stepped, tf.float64)[:, tf.newaxis])
        # `steps` is read before `assign_add`, so that the read does not wait for `weights`, which
        # the devices compute.
        steps = self.steps.read_value() + 1
        terms = tf.stack([tf.ones([], tf.float64), samples, *weights])
        self.counts.assign_add(tf.gather(terms, self._terms))
        return steps

    def close(self, done: tf.Tensor, is_last: tf.Tensor) -> None:
        """Resets the counters of fragment `done` after its sync, or of all parts if `is_last`."""
        if self._whole:
            self._forget()
            return
        self.steps.assign(0)
        counters = (self.part_steps, *self.samples)
        self.turn.assign(tf.where(is_last, 0, (done + 1) % self._fragments))
        kept = 1.0 - tf.one_hot(done, self.parts, dtype=tf.float64)
        for pending in counters:
            value = kept * pending.read_value()
            pending.assign(tf.where(is_last, tf.zeros_like(value), value))

    def reopen(self, fragment: tf.Tensor, steps: tf.Tensor, samples: tf.Tensor) -> None:
        """Restores the counters of a fragment whose sync was started and has failed.

        `steps`, shape [parts], and `samples`, shape [local replicas, parts], are the values of
        `part_steps` and `samples` when the sync was started.
        """
        carried = tf.one_hot(fragment, self.parts, dtype=tf.float64)
        self.turn.assign(fragment)
        # The smallest element of `steps` belongs to the part that was synced last. So this
        # element is the number of steps since the last sync of any part.
        self.steps.assign_add(tf.cast(tf.reduce_min(steps), tf.int64))
        self.part_steps.assign_add(carried * steps)
        for replica, pending in enumerate(self.samples):
            pending.assign_add(carried * samples[replica])

    def give_up(self) -> None:
        """Sets the counters of the open block to 0, since a checkpoint replaces its work."""
        self._forget()
        self.turn.assign(0)

    def _forget(self) -> None:
        """Sets all counters except `taken` and `seen` to 0."""
        self.counts[2:].assign(tf.zeros([self.counts.shape[0] - 2], tf.float64))
        if self._stepped is not None:
            self._stepped.assign(tf.zeros_like(self._stepped))

    def slots(self) -> Iterator[Slot]:
        """Yields the counters that may be above 0 after a sync; none if the model is one part."""
        if not self._whole:
            yield Slot("open/turn", Kind.BLOCK, self.turn)
            yield Slot("open/block_steps", Kind.BLOCK, self.part_steps, absent=0.0)
            for replica, pending in enumerate(self.samples):
                yield Slot("sync/pending_samples", Kind.BLOCK, pending, replica)
