"""Chunks of minibatches of parallel streams, for truncated BPTT; see `input.chunks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from input import features, stream_plan, streams
from input.chunks import SECONDS, CorpusChunks, Division
from input.graph_reader import GraphReader, Utterances, utterances
from input.index import CorpusIndex
from input.streams import StreamOptions


def stream_chunks(
    corpus: CorpusIndex,
    split: str,
    options: StreamOptions,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    shuffle: bool = True,
) -> CorpusChunks:
    """Returns chunks of minibatches of parallel streams, as `streams.minibatches` makes them.

    Each chunk starts new streams: all rows have the reset flag in its first step. The streams of a
    chunk end at different steps, and are padded to the longest, so a chunk should have several
    utterances for each stream. A worker holds one utterance of each stream in memory.

    Args:
      corpus: from `index.read`.
      split: "train", "validation" or "test".
      options: options of the minibatches.
      seconds: approximate length of a chunk; utterances stay whole.
      seed: decides, together with the epoch, the order of the utterances.
      shuffle: False keeps the order of the corpus.

    Returns:
      Chunks of the minibatches of `streams.minibatches` for one replica.

    Raises:
      ValueError: an argument is out of range, or there are more chunks than utterances.
    """
    division = Division(corpus, split, seconds, seed, shuffle)
    streams.check_coefficients(corpus, options)
    chosen = corpus.split(split)

    def plan(epoch: int, chunk: int) -> stream_plan.StreamPlan:
        numbers = division(epoch, chunk)
        return stream_plan.plan(
            options.lengths(chosen.frames),
            num_replicas=1,
            streams=options.streams,
            truncation=options.truncation,
            order=numbers,
        )

    def arguments(epoch: int, chunk: int) -> tuple[Any, ...]:
        part = plan(epoch, chunk)
        rows = part.rows(0)
        columns = utterances(chosen, part.utterance[np.concatenate(rows)])
        bounds = np.cumsum([0, *map(len, rows)])
        steps = [int(part.end_step[row[-1]]) if len(row) else 0 for row in rows]
        return (*columns, bounds.astype(np.int64), np.array(steps, np.int64))

    def dataset(epoch: Any, chunk: Any, *arguments: Any) -> tf.data.Dataset:
        del epoch, chunk
        *columns, bounds, steps = (tf.convert_to_tensor(a) for a in arguments)
        reader = _StreamReader(corpus, split, options)
        chosen = Utterances(*columns)
        rows = tf.data.Dataset.range(options.streams)
        # The interleaved dataset gives one step of each row in turn. So `streams` successive
        # elements are one step of all rows, and a batch of them is a minibatch.
        return (
            rows.interleave(
                lambda row: reader.steps(
                    Utterances(*(column[bounds[row] : bounds[row + 1]] for column in chosen)),
                    steps[row],
                    tf.reduce_max(steps),
                ),
                cycle_length=options.streams,
                block_length=1,
            )
            .batch(options.streams, drop_remainder=True)
            .prefetch(2)
        )

    first = sum(plan(0, chunk).num_steps for chunk in range(division.count))
    return CorpusChunks(division.count, dataset, arguments, first)


class _StreamReader:
    """Reads the utterances of one stream of a chunk, step by step."""

    def __init__(self, corpus: CorpusIndex, split: str, options: StreamOptions) -> None:
        self._reader = GraphReader(corpus, split)
        self._corpus = corpus
        self._options = options

    def steps(self, chosen: Utterances, own: tf.Tensor, total: tf.Tensor) -> tf.data.Dataset:
        """Returns `own` steps of utterances, followed by padding up to `total` steps."""
        columns = tf.data.Dataset.from_tensor_slices(tuple(chosen))
        each = tf.data.Dataset.zip((columns, self._reader.records(chosen)))
        pieces = each.map(self._pieces, num_parallel_calls=1)
        padding = tf.data.Dataset.range(own, total).map(self._padding)
        return pieces.flat_map(
            lambda *steps: tf.data.Dataset.from_tensor_slices(steps)
        ).concatenate(padding)

    def _pieces(self, columns: tuple[tf.Tensor, ...], record: tf.Tensor) -> Any:
        """Returns the model's inputs, labels and weights for one utterance, cut into steps."""
        one = Utterances(*(column[None] for column in columns))
        frames, labels = self._reader.decode(one, record[None])
        options = self._options
        late = options.label_delay
        frames = streams.normalise(frames, options.normalisation, self._corpus)
        seen = features.joined(
            frames[:, : options.coefficients], options.context, options.stack, late
        )
        due = features.stack_labels(labels, options.stack)
        weights = tf.concat([tf.zeros([late]), tf.ones_like(due, tf.float32)], 0)
        due = tf.concat([tf.repeat(due[:1], late), due], 0)
        count = -(-tf.shape(due)[0] // options.truncation)
        reset = tf.one_hot(0, count)
        frames, labels, weights = (self._cut(whole, count) for whole in (seen, due, weights))
        return {"frames": frames, "reset": reset}, labels, weights

    def _cut(self, whole: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Cuts a tensor into `count` steps, with zeros at the end: [n, ...] -> [count, T, ...]."""
        size = self._options.truncation
        missing = count * size - tf.shape(whole)[0]
        padded = tf.pad(whole, [[0, missing], *([[0, 0]] * (len(whole.shape) - 1))])
        return tf.reshape(padded, [-1, size, *whole.shape[1:]])

    def _padding(self, step: tf.Tensor) -> Any:
        size = self._options.truncation
        frames = tf.zeros([size, self._options.input_dim(self._corpus.feature_dim)])
        reset = tf.cast(step == 0, tf.float32)
        return {"frames": frames, "reset": reset}, tf.zeros([size], tf.int32), tf.zeros([size])
