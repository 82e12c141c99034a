"""Utterances as records of a TFRecord file, written in order and read at random.

A record is a `tf.train.Example` of four byte strings: `features` (little-endian float32
[frames, feature_dim]), `labels` (little-endian int32 [frames]), `id` and `speaker` (UTF-8). Any
TFRecord reader can read the file in order. The corpus' index has the place and the CRC-32 of each
record, so that a record can be read alone, and every error names its file, offset and utterance.
"""

import os
import zlib
from typing import BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

# A record has 12 bytes before its data: the length of the data, and a checksum of the length. It
# has 4 bytes after its data: a checksum of the data.
_HEADER, _FOOTER = 12, 4


class CorpusError(ValueError):
    """An error of a corpus: a file is missing or damaged, or does not fit the other files."""


class Place(NamedTuple):
    """The place of an utterance in a file, and what is expected there."""

    path: str
    offset: int  # bytes from the start of the file
    length: int  # bytes of the whole record
    crc32: int  # checksum of the whole record
    frames: int
    id: str

    def __str__(self) -> str:
        return f"{self.path}, utterance {self.id} at byte {self.offset}"


def encode(features: np.ndarray, labels: np.ndarray, utterance: str, speaker: str) -> bytes:
    """Returns one utterance as a serialised example.

    Args:
      features: [frames, dim]; stored as float32.
      labels: [frames]; stored as int32.
      utterance: id of the utterance.
      speaker: id of its speaker.
    """
    values = {
        "features": features.astype("<f4").tobytes(),
        "labels": labels.astype("<i4").tobytes(),
        "id": utterance.encode(),
        "speaker": speaker.encode(),
    }
    example = tf.train.Example()
    for name, value in values.items():
        example.features.feature[name].bytes_list.value.append(value)
    return example.SerializeToString(deterministic=True)


def record_length(data: bytes) -> int:
    """Returns the bytes that `data` takes in a TFRecord file."""
    return _HEADER + len(data) + _FOOTER


def read(file: BinaryIO, place: Place, feature_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads and checks one utterance.

    Args:
      file: the open file at `place.path`.
      place: place of the utterance.
      feature_dim: expected width of a frame.

    Returns:
      features float32 [frames, feature_dim] and labels int32 [frames].

    Raises:
      CorpusError: the record is cut short, damaged, of another width or length, or not finite.
    """
    descriptor = file.fileno()
    left = max(0, os.fstat(descriptor).st_size - place.offset)
    try:
        record = os.pread(descriptor, min(place.length, left), place.offset)
    except OSError as error:
        raise CorpusError(f"{place}: the file cannot be read ({error.strerror})") from error
    if len(record) < place.length:
        raise CorpusError(
            f"{place}: the file ends after {len(record)} of the record's {place.length} bytes."
            " Prepare the corpus again"
        )
    if zlib.crc32(record) != place.crc32:
        raise CorpusError(
            f"{place}: the record is damaged (its CRC-32 is not the one in the index)."
            " Prepare the corpus again"
        )
    return decode(record[_HEADER:-_FOOTER], place, feature_dim)


def decode(data: bytes, place: Place, feature_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Decodes the result of `encode` and checks it; result and errors are those of `read`."""
    try:
        example = tf.train.Example.FromString(data).features.feature
        name, labels, features = (
            example[key].bytes_list.value[0] for key in ("id", "labels", "features")
        )
        labels, features = np.frombuffer(labels, "<i4"), np.frombuffer(features, "<f4")
    except (DecodeError, IndexError, ValueError) as error:
        raise CorpusError(
            f"{place}: the record is not an example of id, labels (int32) and features (float32)"
        ) from error
    found = name.decode("utf-8", "replace")
    if found != place.id:
        raise CorpusError(f"{place}: the record is that of utterance {found}")
    if len(labels) != place.frames:
        raise CorpusError(
            f"{place}: it has labels for {len(labels)} frames where the index says {place.frames}"
        )
    if features.size != place.frames * feature_dim:
        raise CorpusError(
            f"{place}: its frames are {features.size / place.frames:g} wide where the index says"
            f" {feature_dim}. Prepare the corpus again"
        )
    if not np.isfinite(features).all():
        frame = int(np.argmin(np.isfinite(features))) // feature_dim
        raise CorpusError(f"{place}: its features have NaN or Inf, first in frame {frame}")
    return features.reshape(place.frames, feature_dim), labels
