"""Minibatches of one worker's replicas, read from a corpus by tf.data.

An epoch is divided as in `input.blocks`. The division is a function of the corpus and (seed, epoch,
N) alone, so workers agree on it without communication. For each window a worker reads the
utterances that overlap it, and splices only the frames of its own minibatches. Memory does not grow
with the corpus: it holds fewer than ten windows of unspliced frames, 0.3 GB at the default
`shuffle_frames`.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from input import blocks, features, index
from input.blocks import Partition
from input.index import CorpusIndex

SHUFFLE_FRAMES = 65536  # number of frames that are shuffled together: 11 minutes of speech


def minibatches(
    corpus: CorpusIndex,
    split: str,
    *,
    num_replicas: int,
    replica_ids: Sequence[int],
    minibatch: int,
    sync_period: int,
    epoch: int,
    seed: int,
    context: int = 5,
    shuffle_frames: int = SHUFFLE_FRAMES,
    shuffle: bool = True,
    first_minibatch: int = 0,
) -> tf.data.Dataset:
    """Returns the minibatches of an epoch that belong to this worker's replicas.

    Their order is that of their use: step 0 of replica_ids[0], step 0 of replica_ids[1], ...,
    step 1 of replica_ids[0], ... Every frame is in exactly one minibatch of one replica. Only the
    very last minibatch of the epoch may be short. If some replicas have no minibatch in the last
    step, these are the last replicas. So a consumer that gives the elements to its replicas in turn
    gives each replica its own.

    Args:
      corpus: from `index.read`.
      split: "train", "validation" or "test".
      num_replicas: N, the number of replicas of all workers.
      replica_ids: this worker's replicas, ascending.
      minibatch: frames of a minibatch of one replica.
      sync_period: tau, minibatches between two syncs.
      epoch: number of the epoch, from 0.
      seed: decides, together with `epoch`, the order of utterances and frames.
      context: frames of splice on each side.
      shuffle_frames: frames that are permuted together, rounded up to a multiple of `minibatch`.
      shuffle: False keeps the order of the corpus, for evaluation.
      first_minibatch: number of minibatches of the epoch, over all replicas, that are done already;
        they are left out. Minibatch first_minibatch + i goes to replica i mod N.

    Returns:
      A dataset of (float32 [b, feature_dim * (2 * context + 1)], int32 [b]), b <= minibatch.
      Reading a damaged utterance raises tf.errors.InvalidArgumentError that names it.

    Raises:
      ValueError: an argument is out of range, or the split has no frames.
    """
    plan = partition(
        corpus,
        split,
        num_replicas=num_replicas,
        minibatch=minibatch,
        sync_period=sync_period,
        shuffle_frames=shuffle_frames,
    )
    _check(plan, replica_ids, epoch, seed, first_minibatch)
    order = (seed, epoch) if shuffle else None
    reader = _WindowReader(corpus, split, plan, list(replica_ids), order, first_minibatch)
    offsets = features.context_offsets(context, context)
    first_window = first_minibatch * minibatch // plan.window
    windows = tf.data.Dataset.range(first_window, plan.num_windows).map(
        lambda window: reader(window, corpus.feature_dim), num_parallel_calls=1
    )
    prepared = windows.map(
        lambda frames, *rest: (features.normalise(frames, corpus.mean, corpus.stddev), *rest),
        num_parallel_calls=1,
    ).prefetch(1)
    return prepared.flat_map(
        lambda *window: window_minibatches(*window, minibatch, offsets)
    ).prefetch(2 * len(replica_ids))


def partition(
    corpus: CorpusIndex,
    split: str,
    *,
    num_replicas: int,
    minibatch: int,
    sync_period: int,
    shuffle_frames: int = SHUFFLE_FRAMES,
) -> Partition:
    """Returns the division of an epoch of `split` by `minibatches`.

    Its `num_steps` is the number of steps of an epoch, `num_blocks` that of its syncs, and
    `len(minibatches(i))` that of replica i's minibatches.
    """
    num_frames = corpus.num_frames(split)
    if num_frames == 0:
        raise ValueError(f"split {split!r} of {corpus.directory} has no frames")
    return blocks.partition(
        num_frames,
        minibatch=minibatch,
        num_replicas=num_replicas,
        sync_period=sync_period,
        shuffle_frames=shuffle_frames,
    )


def _check(
    plan: Partition, replica_ids: Sequence[int], epoch: int, seed: int, first_minibatch: int
) -> None:
    ids = list(replica_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= plan.num_replicas:
        raise ValueError(
            f"replica_ids must be ascending and in [0, {plan.num_replicas}), at least one."
            f" Received: {ids}"
        )
    for name, value in (("epoch", epoch), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more. Received: {value}")
    if not 0 <= first_minibatch <= plan.num_minibatches:
        raise ValueError(
            f"first_minibatch must lie in [0, {plan.num_minibatches}], minibatches of the epoch."
            f" Received: {first_minibatch}"
        )


def window_minibatches(
    frames: tf.Tensor,
    labels: tf.Tensor,
    positions: tf.Tensor,
    first: tf.Tensor,
    last: tf.Tensor,
    minibatch: int | tf.Tensor,
    offsets: np.ndarray,
) -> tf.data.Dataset:
    """Cuts one window into minibatches, in the order of `positions`.

    Args:
      frames: float32 [F, dim].
      labels: int32 [F].
      positions: int32 [P], the frames of the minibatches, in order.
      first: int32 [P], the first frame of each position's utterance.
      last: int32 [P], the last frame of each position's utterance; context beyond is repeated.
      minibatch: frames of a minibatch.
      offsets: int32, offsets of the frames that are spliced; see `features.context_offsets`.
    """
    width = frames.shape[1] * len(offsets)

    def gather(
        positions: tf.Tensor, first: tf.Tensor, last: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        indices = positions[:, None] + offsets[None, :]
        indices = tf.clip_by_value(indices, first[:, None], last[:, None])
        return (
            tf.reshape(tf.gather(frames, indices), [-1, width]),
            tf.gather(labels, positions),
        )

    chosen = tf.data.Dataset.from_tensor_slices((positions, first, last))
    return chosen.batch(minibatch).map(gather)


class _WindowReader:
    """Reads windows of a partition as NumPy arrays, for `tf.numpy_function`.

    Args:
      order: (seed, epoch) of the shuffle; None keeps the order of the corpus.
      first_minibatch: number of the first minibatch that is read; replica 0 gets it.
    """

    def __init__(
        self,
        corpus: CorpusIndex,
        split: str,
        plan: Partition,
        replica_ids: list[int],
        order: tuple[int, int] | None,
        first_minibatch: int,
    ) -> None:
        self._corpus = corpus
        self._split = corpus.split(split)
        self._plan = plan
        self._replica_ids = replica_ids
        self._order = order
        self._first = first_minibatch
        count = len(self._split)
        self._utterances = (
            np.arange(count) if order is None else blocks.utterance_order(count, *order)
        )
        self._ends = np.cumsum(self._split.frames[self._utterances])

    def __call__(self, window: tf.Tensor, feature_dim: int) -> tuple[tf.Tensor, ...]:
        """Returns frames [F, feature_dim], labels [F] and positions, first, last [P] of a window.

        Positions count from the first frame that was read. `first` and `last` are the first and
        last frame of the utterance of each position.
        """
        types = [tf.float32] + 4 * [tf.int32]
        frames, *rest = tf.numpy_function(self.read, [window], types)
        frames.set_shape([None, feature_dim])
        for tensor in rest:
            tensor.set_shape([None])
        return frames, *rest

    def read(self, window: int) -> tuple[np.ndarray, ...]:
        whole = self._plan.window_frames(int(window))
        begin = int(np.searchsorted(self._ends, whole.start, side="right"))
        end = int(np.searchsorted(self._ends, whole.stop - 1, side="right")) + 1
        with index.open_shards(self._split) as files:
            read = [
                index.read_utterance(self._corpus, self._split, files, int(utterance))
                for utterance in self._utterances[begin:end]
            ]
        origin = self._ends[begin] - len(read[0][1])
        ends = self._ends[begin:end] - origin
        positions = self._positions(int(window)) - origin
        utterance = np.searchsorted(ends, positions, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        return (
            np.concatenate([frames for frames, _ in read]),
            np.concatenate([labels for _, labels in read]),
            *(
                values.astype(np.int32)
                for values in (positions, starts[utterance], ends[utterance] - 1)
            ),
        )

    def _positions(self, window: int) -> np.ndarray:
        """Returns the positions of this worker's minibatches in a window, in the order of use."""
        whole = self._plan.window_frames(window)
        if self._order is None:
            sequence = np.arange(whole.start, whole.stop)
        else:
            sequence = blocks.frame_order(self._plan, window, *self._order)
        mine = [
            sequence[frames.start - whole.start : frames.stop - whole.start]
            for k in self._plan.window_minibatches(window)
            if k >= self._first and (k - self._first) % self._plan.num_replicas in self._replica_ids
            for frames in [self._plan.frames(k)]
        ]
        return np.concatenate(mine) if mine else np.zeros(0, np.int64)
