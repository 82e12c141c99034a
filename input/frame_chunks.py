"""Chunks of minibatches of single frames; see `input.chunks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from input import blocks, features, pipeline
from input.chunks import SECONDS, CorpusChunks, Division
from input.graph_reader import GraphReader, Utterances, utterances
from input.index import CorpusIndex


def frame_chunks(
    corpus: CorpusIndex,
    split: str,
    *,
    minibatch: int | Callable[[float], int],
    seconds: float = SECONDS,
    seed: int = 0,
    context: int = 5,
    shuffle_frames: int = pipeline.SHUFFLE_FRAMES,
    shuffle: bool = True,
) -> CorpusChunks:
    """Returns chunks of minibatches of single frames, as `pipeline.minibatches` makes them.

    Only the last minibatch of each chunk may be short. A worker holds fewer than ten windows of
    unspliced frames: 0.3 GB at the default `shuffle_frames`, with 120 numbers in a frame.

    Args:
      corpus: from `index.read`.
      split: "train", "validation" or "test".
      minibatch: frames of a minibatch; or a function that returns them for the position, in epochs,
        at which a chunk begins.
      seconds: approximate length of a chunk; utterances stay whole.
      seed: decides, together with the epoch, the order of utterances and frames.
      context: frames of splice on each side.
      shuffle_frames: frames of a chunk that are permuted together, rounded up to a multiple of
        `minibatch`.
      shuffle: False keeps the order of the corpus.

    Returns:
      Chunks of (float32 [b, feature_dim * (2 * context + 1)], int32 [b]), b <= minibatch.

    Raises:
      ValueError: an argument is out of range, or there are more chunks than utterances.
    """
    division = Division(corpus, split, seconds, seed, shuffle)
    chosen = corpus.split(split)
    offsets = features.context_offsets(context, context)

    def plan(epoch: int, chunk: int) -> tuple[np.ndarray, blocks.Partition]:
        numbers = division(epoch, chunk)
        size = minibatch(epoch + chunk / division.count) if callable(minibatch) else minibatch
        return numbers, blocks.partition(
            int(chosen.frames[numbers].sum()),
            minibatch=size,
            num_replicas=1,
            sync_period=1,
            shuffle_frames=shuffle_frames,
        )

    def arguments(epoch: int, chunk: int) -> tuple[Any, ...]:
        numbers, part = plan(epoch, chunk)
        sizes = np.array([part.minibatch, part.window], np.int64)
        return (*utterances(chosen, numbers), sizes, division.seed(epoch, chunk))

    def dataset(epoch: Any, chunk: Any, *arguments: Any) -> tf.data.Dataset:
        del epoch, chunk
        *columns, sizes, seed = (tf.convert_to_tensor(a) for a in arguments)
        size, window = sizes[0], sizes[1]
        reader = GraphReader(corpus, split)
        windows = _Windows(reader, Utterances(*columns), window, seed if shuffle else None)
        return (
            windows.read()
            .map(
                lambda frames, *rest: (
                    features.normalise(frames, corpus.mean, corpus.stddev),
                    *rest,
                ),
                num_parallel_calls=1,
            )
            .prefetch(1)
            .flat_map(lambda *window: pipeline.window_minibatches(*window, size, offsets))
            .prefetch(2)
        )

    first = sum(plan(0, chunk)[1].num_minibatches for chunk in range(division.count))
    return CorpusChunks(division.count, dataset, arguments, first)


class _Windows:
    """The windows of a chunk.

    Args:
      reader: reader of the split.
      chosen: the chunk's utterances.
      window: int64, frames of a window.
      seed: int64 [2], seed of the permutation; None keeps the order.
    """

    def __init__(
        self, reader: GraphReader, chosen: Utterances, window: tf.Tensor, seed: tf.Tensor | None
    ) -> None:
        self._reader = reader
        self._chosen = chosen
        self._window = window
        self._seed = seed
        self._ends = tf.cumsum(chosen.frames)

    def read(self) -> tf.data.Dataset:
        """Returns the dataset of windows; its elements are those of `pipeline._WindowReader`."""
        count = -(-self._ends[-1] // self._window)
        numbers = tf.data.Dataset.range(count)
        return numbers.flat_map(self._records).map(self._decode, num_parallel_calls=1)

    def _records(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns one element: a window's number, and the records of utterances that overlap it."""
        chosen = self._overlapping(number)
        records = self._reader.records(chosen).batch(tf.size(chosen.id, tf.int64))
        return records.map(lambda found: (number, found))

    def _decode(self, number: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, ...]:
        chosen = self._overlapping(number)
        frames, labels = self._reader.decode(chosen, records)
        begin, stop = self._bounds(number)
        first = tf.searchsorted(self._ends, begin[None], side="right", out_type=tf.int64)[0]
        origin = tf.gather(self._ends - self._chosen.frames, first)
        positions = tf.range(begin - origin, stop - origin)
        if self._seed is not None:
            # Each window has its own seed, because equal seeds would shuffle all windows of the
            # same length in the same way. The chunk's seed has two words, which are drawn for each
            # chunk. The number of the window is added to the second word.
            seed = tf.stack([self._seed[0], self._seed[1] + number])
            positions = tf.random.experimental.stateless_shuffle(positions, seed)
        ends = tf.cumsum(chosen.frames)
        owner = tf.searchsorted(ends, positions, side="right")
        starts = tf.gather(ends - chosen.frames, owner)
        rest = (positions, starts, tf.gather(ends, owner) - 1)
        return (frames, labels, *(tf.cast(values, tf.int32) for values in rest))

    def _bounds(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        begin = number * self._window
        return begin, tf.minimum(begin + self._window, self._ends[-1])

    def _overlapping(self, number: tf.Tensor) -> Utterances:
        begin, stop = self._bounds(number)
        edges = tf.stack([begin, stop - 1])
        first, last = tf.unstack(
            tf.searchsorted(self._ends, edges, side="right", out_type=tf.int64)
        )
        return Utterances(*(column[first : last + 1] for column in self._chosen))
