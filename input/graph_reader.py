"""Reads utterances by TensorFlow operations alone, for graphs that run in other processes.

The graph does what `index.read_utterance` does. Its inputs tell the place and the expected contents
of each utterance, and it checks what it reads. TensorFlow checks the CRC-32C of every record. Any
number of utterances are read and decoded together, and lie one after the other in memory.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from input.index import CorpusIndex, Split

_EXAMPLE = {
    name: tf.io.FixedLenFeature([], tf.string, default_value="")
    for name in ("features", "labels", "id")
}


class Utterances(NamedTuple):
    """Utterances to be read, as columns of equal length; arrays or tensors."""

    shard: Any  # int64: index of the shard in the split
    offset: Any  # int64: bytes from the start of the shard
    frames: Any  # int64: number of frames
    id: Any  # string


def utterances(split: Split, numbers: np.ndarray) -> Utterances:
    """Returns the columns for the utterances with these numbers in the split."""
    names = np.array([split.id[number].encode() for number in numbers], object)
    return Utterances(split.shard[numbers], split.offset[numbers], split.frames[numbers], names)


class GraphReader:
    """Reads utterances of a split. Call its methods while a graph is made.

    The graph has the absolute paths of the files, which must be the same wherever it runs.
    """

    def __init__(self, corpus: CorpusIndex, split: str) -> None:
        self._paths = [os.path.abspath(path) for path in corpus.split(split).shards]
        self._dim = corpus.feature_dim
        self._num_classes = corpus.num_classes

    def records(self, chosen: Utterances) -> tf.data.Dataset:
        """Returns the record of each utterance, in order, as a string; "" if it cannot be read."""
        paths = tf.constant(self._paths)

        def read(shard: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
            record = tf.raw_ops.TFRecordDatasetV2(
                filenames=tf.gather(paths, shard)[None],
                compression_type="",
                buffer_size=tf.zeros([], tf.int64),  # no buffer: a record is read once, as a whole
                byte_offsets=offset[None],
            )
            spec = tf.TensorSpec([], tf.string)
            return tf.data.experimental.from_variant(record, spec).take(1).get_single_element()

        def record_or_nothing(shard: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
            # TensorFlow's errors do not name the file. So they are only logged, and "" takes the
            # place of the record. When `decode` gets "", it raises an error that names the file.
            place = tf.data.Dataset.from_tensors((shard, offset))
            found = place.map(read).ignore_errors(log_warning=True)
            return found.concatenate(tf.data.Dataset.from_tensors("")).take(1)

        places = tf.data.Dataset.from_tensor_slices((chosen.shard, chosen.offset))
        return places.flat_map(record_or_nothing)

    def decode(self, chosen: Utterances, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the frames and labels of utterances, with the checks of `index.read_utterance`.

        Args:
          chosen: n ≥ 1 utterances.
          records: string [n], the records of these utterances.

        Returns:
          The frames, float32 [frames, feature_dim], and labels, int32 [frames], of all utterances
          one after the other.

        Raises:
          tf.errors.InvalidArgumentError: when the graph runs, for the first utterance that is
            missing, cut short, damaged, of another length or width, not finite or with a label that
            is not a class; it names file, utterance and byte offset.
        """
        self._refuse(
            records == "",
            chosen,
            "cannot be read: the file is missing, cut short or damaged there. Restore it, or "
            "prepare the corpus again",
        )
        found = tf.io.parse_example(records, _EXAMPLE)
        self._refuse(found["id"] != chosen.id, chosen, "has the record of another utterance")
        lengths = [tf.strings.length(found[name]) for name in ("features", "labels")]
        bytes_ = 4 * tf.cast(chosen.frames, tf.int32)
        whole = self._refuse(
            (lengths[0] != bytes_ * self._dim) | (lengths[1] != bytes_),
            chosen,
            f"has not as many frames and labels, or not of {self._dim} numbers, as the index says",
        )
        with tf.control_dependencies([whole]):
            joined = [tf.strings.reduce_join(found[name]) for name in ("features", "labels")]
        frames = tf.reshape(tf.io.decode_raw(joined[0], tf.float32), [-1, self._dim])
        labels = tf.io.decode_raw(joined[1], tf.int32)
        ends = tf.cumsum(chosen.frames)
        finite = tf.reduce_all(tf.math.is_finite(frames), 1)
        known = (labels >= 0) & (labels < self._num_classes)
        checks = [
            self._refuse(self._having(~finite, ends), chosen, "has features that are NaN or Inf"),
            self._refuse(
                self._having(~known, ends),
                chosen,
                f"has a label that is not one of the {self._num_classes} classes",
            ),
        ]
        with tf.control_dependencies(checks):
            return tf.identity(frames), tf.identity(labels)

    def _having(self, wrong: tf.Tensor, ends: tf.Tensor) -> tf.Tensor:
        """Returns bool [n], true for the utterance that has the first wrong frame, if there is one.

        Args:
          wrong: bool [frames] over all utterances.
          ends: int64 [n], the number of the frame after the last one of each utterance.
        """
        first = tf.argmax(wrong)
        owner = tf.searchsorted(ends, first[None], side="right", out_type=tf.int64)
        is_owner = tf.range(tf.size(ends, tf.int64)) == owner
        return is_owner & tf.reduce_any(wrong)

    def _refuse(self, wrong: tf.Tensor, chosen: Utterances, what: str) -> tf.Operation:
        """Returns an operation that raises for the first utterance in `wrong`, bool [n]."""
        first = tf.argmax(wrong)
        shard, offset, _, name = (tf.gather(column, first) for column in chosen)
        parts = [
            tf.gather(tf.constant(self._paths), shard),
            ", utterance ",
            name,
            " at byte ",
            tf.strings.as_string(offset),
            f", {what}",
        ]
        return tf.debugging.Assert(~tf.reduce_any(wrong), [tf.strings.join(parts)])
