"""Minibatches of parallel streams of utterances, for truncated BPTT, read from a corpus.

Papers 000 and 003 train recurrent models in this way, with 100 streams and steps of 20 frames.
`input.stream_plan` decides which utterances a stream has. Memory holds the unspliced frames of one
utterance for each stream of this worker, whatever the size of the corpus.

Keras' mean loss divides by all S * T frames of a minibatch, padding included, and in the mean of
the replicas each replica has that number as its weight. So every frame of an epoch has the same
weight in training. (With reduction="mean_with_sample_weight", the divisor and the replica's weight
are the number of real frames.) Use `weighted_metrics` for scores, since these count only real
frames.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from input import blocks, features, index, stream_plan
from input.index import CorpusIndex
from input.open_files import OpenFiles
from input.stream_plan import StreamPlan

STREAMS = 100
TRUNCATION = 20  # number of frames of each stream in a step
NORMALISATIONS = ("global", "utterance", "none")
_LEAST = {"streams": 1, "truncation": 1, "context": 0, "stack": 1, "label_delay": 0}
MIN_STDDEV = 1e-5  # utterances are divided by their standard deviation, but by no less than this


@dataclass(frozen=True)
class StreamOptions:
    """Options of the minibatches of streams.

    Attributes:
      streams: S, rows of a replica's minibatch.
      truncation: T, frames of a step, after stacking.
      context: frames spliced on each side; the utterance's first and last frames are repeated.
      stack: number of frames that are joined to one, without overlap. Its label is that of the
        middle frame (of two, the later one). If an utterance ends within a stack, its last frame is
        repeated.
      label_delay: number of frames, after stacking, by which outputs are late. The output for frame
        t is due at t + label_delay, when the network has seen that many more frames. At the end the
        last input is repeated; the first label_delay outputs have weight 0.
      normalisation: "global", by the corpus' mean and standard deviation; "utterance", by the
        utterance's own; or "none".
      coefficients: number of coefficients of each frame that are used, from the first; None for
        all. 80 of 120 leaves out the second derivatives.

    Raises:
      ValueError: a value is out of range.
    """

    streams: int = STREAMS
    truncation: int = TRUNCATION
    context: int = 0
    stack: int = 1
    label_delay: int = 0
    normalisation: str = "global"
    coefficients: int | None = None

    def __post_init__(self) -> None:
        for name, bound in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < bound:
                raise ValueError(
                    f"{name} must be an integer of at least {bound}. Received: {value!r}"
                )
        if self.normalisation not in NORMALISATIONS:
            raise ValueError(
                f"normalisation must be one of {', '.join(NORMALISATIONS)}. Received:"
                f" {self.normalisation!r}"
            )
        if self.coefficients is not None and self.coefficients < 1:
            raise ValueError(
                f"coefficients must be at least 1, or None. Received: {self.coefficients!r}"
            )

    def input_dim(self, frame_dim: int) -> int:
        """Returns the width of the model's input for frames of width `frame_dim`."""
        return (2 * self.context + self.stack) * min(frame_dim, self.coefficients or frame_dim)

    def lengths(self, frames: np.ndarray) -> np.ndarray:
        """Returns the number of frames that the model reads for utterances of `frames` frames."""
        return -(-frames // self.stack) + self.label_delay


def check_coefficients(corpus: CorpusIndex, options: StreamOptions) -> None:
    """Raises ValueError if a corpus' frames have fewer coefficients than `options` asks for."""
    if options.coefficients is not None and options.coefficients > corpus.feature_dim:
        raise ValueError(
            f"coefficients={options.coefficients} are more than the {corpus.feature_dim} that the"
            f" frames of {corpus.directory} have"
        )


def normalise(frames: tf.Tensor, kind: str, corpus: CorpusIndex) -> tf.Tensor:
    """Normalises an utterance: [num_frames, dim] -> [num_frames, dim], float32.

    `kind` is one of NORMALISATIONS; see `StreamOptions`.
    """
    if kind == "none":
        return frames
    mean, stddev = corpus.mean, corpus.stddev
    if kind == "utterance":
        mean, variance = tf.nn.moments(frames, 0)
        stddev = tf.maximum(tf.sqrt(variance), MIN_STDDEV)
    return features.normalise(frames, mean, stddev)


def partition(
    corpus: CorpusIndex,
    split: str,
    options: StreamOptions,
    *,
    num_replicas: int,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
) -> StreamPlan:
    """Returns the division of an epoch of `split` by `minibatches`.

    Raises:
      ValueError: an argument is out of range, or the split has fewer utterances than replicas.
    """
    for name, value in (("epoch", epoch), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more. Received: {value}")
    check_coefficients(corpus, options)
    frames = corpus.split(split).frames
    return stream_plan.plan(
        options.lengths(frames),
        num_replicas=num_replicas,
        streams=options.streams,
        truncation=options.truncation,
        order=blocks.utterance_order(len(frames), seed, epoch) if shuffle else None,
    )


def minibatches(
    corpus: CorpusIndex,
    split: str,
    options: StreamOptions,
    *,
    num_replicas: int,
    replica_ids: Sequence[int],
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    first_step: int = 0,
) -> tf.data.Dataset:
    """Returns the minibatches of an epoch that belong to this worker's replicas.

    Their order is that of their use: step 0 of replica_ids[0], step 0 of replica_ids[1], ...,
    step 1 of replica_ids[0], ... If a replica's streams end before those of another replica of this
    worker, it then gets minibatches of 0 rows, with which it takes no step. Every frame is in
    exactly one minibatch of one replica.

    Args:
      corpus: from `index.read`.
      split: "train", "validation" or "test".
      options: options of the minibatches.
      num_replicas: N, the number of replicas of all workers.
      replica_ids: this worker's replicas, ascending.
      epoch: number of the epoch, from 0.
      seed: decides, together with `epoch`, the order of the utterances.
      shuffle: False keeps the order of the corpus, for evaluation.
      first_step: number of steps of the epoch that each replica has done already. A stream that
        goes on in the middle of an utterance has no reset flag: there the model starts from the
        state that it keeps, which is zero in a new model.

    Returns:
      A dataset of ({"frames": float32 [S, T, dim], "reset": float32 [S]}, labels int32 [S, T],
      weights float32 [S, T]): the model's inputs, its targets, and sample weights, which are 0 for
      padding and for an utterance's first `label_delay` outputs, else 1. `reset` is 1 where an
      utterance starts and in all of step 0, else 0. Reading a damaged utterance raises
      tf.errors.InvalidArgumentError that names it.

    Raises:
      ValueError: an argument is out of range, or the split has fewer utterances than replicas.
    """
    division = partition(
        corpus,
        split,
        options,
        num_replicas=num_replicas,
        epoch=epoch,
        seed=seed,
        shuffle=shuffle,
    )
    ids = list(replica_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_replicas:
        raise ValueError(
            f"replica_ids must be ascending and in [0, {num_replicas}), at least one."
            f" Received: {ids}"
        )
    if first_step < 0:
        raise ValueError(f"first_step must be 0 or more. Received: {first_step}")

    def read() -> Iterator[Any]:
        with index.open_shards(corpus.split(split)) as files:
            reader = _Reader(corpus, split, files, options)
            replicas = [_Replica(reader, division, i, first_step) for i in ids]
            for step in range(first_step, max(division.steps(i) for i in ids)):
                yield from (replica.minibatch(step) for replica in replicas)

    # If a worker has several replicas, a replica whose data end early gets minibatches of 0 rows.
    # A worker with only one replica has no minibatch of 0 rows, so its number of rows is fixed.
    rows = options.streams if len(ids) == 1 else None
    shape = [rows, options.truncation]
    signature = (
        {
            "frames": tf.TensorSpec([*shape, options.input_dim(corpus.feature_dim)], tf.float32),
            "reset": tf.TensorSpec([rows], tf.float32),
        },
        tf.TensorSpec(shape, tf.int32),
        tf.TensorSpec(shape, tf.float32),
    )
    return tf.data.Dataset.from_generator(read, output_signature=signature).prefetch(2 * len(ids))


class _Reader:
    """Reads utterances, and cuts pieces for the model from them."""

    def __init__(
        self, corpus: CorpusIndex, split: str, files: OpenFiles, options: StreamOptions
    ) -> None:
        self.options = options
        self._corpus, self._split, self._files = corpus, corpus.split(split), files
        self.input_dim = options.input_dim(corpus.feature_dim)
        self._offsets = np.arange(-options.context, options.stack + options.context)

    def read(self, utterance: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns normalised frames, float32 [frames, coefficients], and labels, int32 [frames]."""
        frames, labels = index.read_utterance(self._corpus, self._split, self._files, utterance)
        mean, stddev = self._corpus.mean, self._corpus.stddev
        if self.options.normalisation == "utterance":
            mean, stddev = frames.mean(0), np.maximum(frames.std(0), MIN_STDDEV)
        if self.options.normalisation != "none":
            frames = (frames - mean) * (np.float32(1.0) / stddev)
        return frames[:, : self.options.coefficients], labels

    def piece(
        self, utterance: tuple[np.ndarray, np.ndarray], at: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the next piece of an utterance: inputs, labels and weights.

        Args:
          utterance: from `read`.
          at: first frame of the piece, after stacking.

        Returns:
          float32 [n, input_dim], int32 [n] and float32 [n], n <= truncation.
        """
        frames, labels = utterance
        stack, delay = self.options.stack, self.options.label_delay
        seen = -(-len(labels) // stack)
        steps = np.arange(at, min(at + self.options.truncation, seen + delay))
        spliced = np.minimum(steps, seen - 1)[:, None] * stack + self._offsets
        due = np.maximum(steps - delay, 0) * stack + stack // 2
        return (
            frames[np.clip(spliced, 0, len(labels) - 1)].reshape(len(steps), -1),
            labels[np.minimum(due, len(labels) - 1)],
            (steps >= delay).astype(np.float32),
        )


class _Replica:
    """The streams of one replica. Call `minibatch` for every step from `first_step` on."""

    def __init__(
        self, reader: _Reader, division: StreamPlan, replica: int, first_step: int
    ) -> None:
        self._reader = reader
        self._plan = division
        self._steps = division.steps(replica)
        # For each stream, the utterances that it has not begun yet. They are in reverse order, so
        # that `pop` returns the next one.
        self._waiting = [
            row[division.end_step[row] > first_step][::-1].tolist()
            for row in division.rows(replica)
        ]
        # For each stream, the position in the plan of the utterance that it has begun.
        self._begun: list[int | None] = [None] * division.streams
        self._utterance: list[Any] = [None] * division.streams

    def minibatch(self, step: int) -> Any:
        """Returns the minibatch of one step."""
        truncation = self._plan.truncation
        rows = self._plan.streams if step < self._steps else 0
        frames = np.zeros([rows, truncation, self._reader.input_dim], np.float32)
        labels = np.zeros([rows, truncation], np.int32)
        weights = np.zeros([rows, truncation], np.float32)
        reset = np.full([rows], step == 0, np.float32)
        for row in range(rows):
            position = self._at(row, step)
            if position is None:
                continue
            steps_done = step - self._plan.first_step[position]
            reset[row] = steps_done == 0
            parts = self._reader.piece(self._utterance[row], steps_done * truncation)
            for whole, part in zip((frames, labels, weights), parts, strict=True):
                whole[row, : len(part)] = part
        return {"frames": frames, "reset": reset}, labels, weights

    def _at(self, row: int, step: int) -> int | None:
        """Returns the position in the plan of a stream's utterance at a step; None after its end.

        The utterance is read when it begins.
        """
        begun = self._begun[row]
        if begun is None or step >= self._plan.end_step[begun]:
            waiting = self._waiting[row]
            begun = self._begun[row] = waiting.pop() if waiting else None
            self._utterance[row] = (
                None if begun is None else self._reader.read(int(self._plan.utterance[begun]))
            )
        return begun
