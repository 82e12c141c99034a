"""A corpus in chunks, read by TensorFlow operations alone.

Chunks are for asynchronous training: workers get chunks of speech one at a time (paper 002, section
2.4; an hour each, section 4.2), and a worker runs a graph and no Python program. The process that
hands out the chunks computes with NumPy which utterances a chunk has. It sends their places in the
files to the worker as `arguments`, and the worker reads and shuffles the utterances.

1. The utterances are put in the order of `blocks.utterance_order`, drawn for (seed, epoch). So a
   chunk has speech of many speakers, and its first few percent are typical of all of it. The
   utterances of a chunk lie scattered over the shards, so each costs a seek; that is little, since
   a record has about 0.2 MB.
2. The order is cut into `count` runs of whole utterances, of about equal length, none empty. The
   number of chunks is the same in every epoch.
3. A chunk of frames is cut into windows and minibatches as `input.blocks` does with an epoch; see
   `input.frame_chunks`. A chunk of streams is divided by `input.stream_plan`; see
   `input.stream_chunks`.

So every frame is in one minibatch of one chunk, and the contents of a chunk are a function of the
corpus and (seed, epoch, chunk).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from input import blocks, features
from input.index import CorpusIndex

SECONDS = 3600.0  # default length of a chunk, from section 4.2 of paper 002 in docs/papers.md


class CorpusChunks(NamedTuple):
    """A corpus in chunks: the arguments of `tfpara.Chunks`, in the same order.

    Attributes:
      count: number of chunks of an epoch.
      dataset: a function that returns the minibatches of a chunk. It is called with int64 tensors,
        while a graph is made, as `dataset(epoch, chunk, *arguments)`. When the dataset runs, an
        utterance that cannot be read raises tf.errors.InvalidArgumentError, which names the
        utterance and its file.
      arguments: a function that returns the arrays that tell `dataset` what to read. It is called
        with numbers, as `arguments(epoch, chunk)`.
      num_minibatches: number of minibatches of the first epoch, if known. In other epochs each
        chunk may have one minibatch more or less, or, with streams, a few.
    """

    count: int
    dataset: Callable[..., tf.data.Dataset]
    arguments: Callable[[int, int], tuple[Any, ...]]
    num_minibatches: int | None


class Division:
    """The division of a split's utterances into chunks.

    Args:
      corpus: from `index.read`.
      split: "train", "validation" or "test".
      seconds: approximate length of a chunk; a split that is shorter is one chunk.
      seed: decides, together with the epoch, the order of the utterances.
      shuffle: False keeps the order of the corpus.

    Raises:
      ValueError: an argument is out of range, the split has no frames, or it would have more chunks
        than utterances.
    """

    def __init__(
        self, corpus: CorpusIndex, split: str, seconds: float, seed: int, shuffle: bool
    ) -> None:
        self._split = corpus.split(split)
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds of a chunk must be positive. Received: {seconds!r}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more. Received: {seed}")
        num_frames = corpus.num_frames(split)
        if num_frames == 0:
            raise ValueError(f"split {split!r} of {corpus.directory} has no frames")
        self.count = math.ceil(num_frames / (seconds / features.FRAME_SHIFT))
        if self.count > len(self._split):
            raise ValueError(
                f"chunks of {seconds:g} seconds would be {self.count}, more than the"
                f" {len(self._split)} utterances of split {split!r} of {corpus.directory}, which"
                " are not cut. Raise --chunk_minutes"
            )
        self._seed, self._shuffle = seed, shuffle
        self._kept: tuple[int, np.ndarray, np.ndarray] | None = None

    def __call__(self, epoch: int, chunk: int) -> np.ndarray:
        """Returns the utterances of a chunk as their numbers in the split, int64, in order."""
        for name, value in (("epoch", epoch), ("chunk", chunk)):
            if value < 0:
                raise ValueError(f"{name} must be 0 or more. Received: {value}")
        if chunk >= self.count:
            raise ValueError(f"chunk must be below {self.count}. Received: {chunk}")
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, *self._divide(epoch))
        _, order, bounds = self._kept
        return order[bounds[chunk] : bounds[chunk + 1]]

    def _divide(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the order of an epoch, and the bounds of its chunks in that order."""
        count, total = self.count, len(self._split)
        order = np.arange(total)
        if self._shuffle:
            order = blocks.utterance_order(total, self._seed, epoch)
        ends = np.cumsum(self._split.frames[order])
        # Ideal bounds would make all chunks equally long, but an ideal bound may lie within an
        # utterance. So each bound is placed after the last utterance whose middle lies before the
        # ideal bound. Then equal bounds are moved apart, so that no chunk is empty.
        middles = ends - self._split.frames[order] / 2
        number = np.arange(count + 1)
        bounds = np.searchsorted(middles, ends[-1] * number / count)
        bounds = np.maximum.accumulate(bounds - number) + number
        return order, np.minimum(bounds, total - count + number)

    def seed(self, epoch: int, chunk: int) -> np.ndarray:
        """Returns the seed of the order of the frames in a chunk, int64 [2].

        The second number of the spawn key is 2, since input.blocks uses 0 and 1 there.
        """
        words = np.random.SeedSequence(self._seed, spawn_key=(epoch, 2, chunk)).generate_state(2)
        return words.astype(np.int64)
