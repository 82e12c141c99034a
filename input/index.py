"""The index of a prepared corpus: its utterances, and their places in files.

A corpus is a directory of an `index.json` and the shards that it lists. The index has the width of
a frame, the class names, the mean and standard deviation of the training frames, the options that
made the corpus, and for each utterance its shard, byte offset, length, CRC-32, number of frames,
id and speaker.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from input import records
from input.open_files import OpenFiles
from input.records import CorpusError, Place

VERSION = 1
FILE_NAME = "index.json"
SPLITS = ("train", "validation", "test")
COLUMNS = ("shard", "offset", "length", "crc32", "frames", "id", "speaker")
# Reading a damaged index may raise these errors, because Python and NumPy raise them for values of
# a wrong type or size.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_REMEDY = "Prepare the corpus again with the program that made it, such as scripts.prepare_speech"


@dataclass(frozen=True)
class Split:
    """The utterances of one split, as columns of equal length."""

    shards: tuple[str, ...]  # paths of the shards
    shard: np.ndarray  # int64: the shard of each utterance, as an index in `shards`
    offset: np.ndarray  # int64: bytes from the start of the shard to the record
    length: np.ndarray  # int64: bytes of the record
    crc32: np.ndarray  # int64: checksum of the record
    frames: np.ndarray  # int64: number of frames
    id: tuple[str, ...]
    speaker: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.id)

    def place(self, utterance: int) -> Place:
        """Returns the place of an utterance."""
        return Place(
            self.shards[self.shard[utterance]],
            int(self.offset[utterance]),
            int(self.length[utterance]),
            int(self.crc32[utterance]),
            int(self.frames[utterance]),
            self.id[utterance],
        )


@dataclass(frozen=True)
class CorpusIndex:
    """A corpus whose index was read and validated by `read`."""

    directory: str
    feature_dim: int
    class_names: tuple[str, ...]
    mean: np.ndarray  # float32 [feature_dim]: mean of the training frames
    stddev: np.ndarray  # float32 [feature_dim]: standard deviation of those frames; positive
    options: dict[str, Any]  # the options with which the corpus was made
    splits: dict[str, Split]
    fingerprint: str  # corpora with equal content have equal fingerprints

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def split(self, name: str) -> Split:
        """Returns the utterances of "train", "validation" or "test"."""
        if name not in self.splits:
            raise ValueError(f"split must be one of {', '.join(self.splits)}. Received: {name!r}")
        return self.splits[name]

    def num_frames(self, split: str) -> int:
        return int(self.split(split).frames.sum())


def read(directory: str | os.PathLike[str]) -> CorpusIndex:
    """Reads the index of a corpus and checks that its files are there and agree with it.

    Every shard's length is checked, and the first utterance of every shard is read. The CRC-32 of
    the other utterances is checked when they are read, or all at once by `verify`.

    Raises:
      FileNotFoundError: the directory, the index or a shard does not exist.
      CorpusError: the index is not valid, or a shard is cut short, empty, damaged or of another
        width; the message names the file and the byte offset.
    """
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        what = "has no index.json" if Path(directory).is_dir() else "does not exist"
        raise FileNotFoundError(
            f"corpus directory {directory} {what}. Make a corpus there with:"
            f" python -m scripts.prepare_speech --out={directory}"
        )
    text = path.read_bytes()
    try:
        index = _parse(str(directory), json.loads(text), hashlib.sha256(text).hexdigest()[:16])
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"{path} is not JSON (line {error.lineno}, column {error.colno}). {_REMEDY}"
        ) from error
    except CorpusError:
        raise
    except _DAMAGE as error:
        raise CorpusError(
            f"{path} is not a corpus index ({repr(error)[:200]}). {_REMEDY}"
        ) from error
    for split in index.splits.values():
        _check_first_utterances(index, split)
    return index


def verify(index: CorpusIndex) -> None:
    """Reads every utterance of the corpus; checks its CRC-32, width, finite values and labels.

    Raises:
      CorpusError: an utterance is wrong; the message names the first such one, its file and its
        byte offset.
    """
    for split in index.splits.values():
        with open_shards(split) as files:
            for utterance in range(len(split)):
                read_utterance(index, split, files, utterance)


def open_shards(split: Split) -> OpenFiles:
    """Returns the files of a split's shards, a context manager that closes them at the end.

    If a shard is replaced while it is in use, the CRC-32 of the utterances shows it.
    """
    return OpenFiles(split.shards)


def read_utterance(
    index: CorpusIndex, split: Split, files: OpenFiles, utterance: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reads and checks one utterance.

    Returns:
      Features, float32 [frames, feature_dim], and labels, int32 [frames].

    Raises:
      CorpusError: as `records.read`, and for a label that is not a class.
    """
    place = split.place(utterance)
    features, labels = records.read(files[split.shard[utterance]], place, index.feature_dim)
    if labels.min() < 0 or labels.max() >= index.num_classes:
        wrong = labels[(labels < 0) | (labels >= index.num_classes)][0]
        raise CorpusError(
            f"{place}: label {wrong} is not one of the {index.num_classes} classes. {_REMEDY}"
        )
    return features, labels


def _parse(directory: str, content: Any, fingerprint: str) -> CorpusIndex:
    path = os.path.join(directory, FILE_NAME)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise CorpusError(
            f"{path} has version {version!r}; this program reads version {VERSION}. {_REMEDY}"
        )
    dim = content["feature_dim"]
    if type(dim) is not int or dim < 1:
        raise CorpusError(f"{path}: feature_dim must be a whole number above 0. {_REMEDY}")
    numbers = {}
    for name in ("mean", "stddev"):
        with np.errstate(over="ignore"):
            numbers[name] = np.array(content[name], np.float32)
        if numbers[name].shape != (dim,) or not np.isfinite(numbers[name]).all():
            raise CorpusError(f"{path}: {name} must be {dim} finite numbers. {_REMEDY}")
    if (numbers["stddev"] <= 0).any():
        raise CorpusError(f"{path}: stddev must be positive in every dimension. {_REMEDY}")
    if not isinstance(content["options"], dict):
        raise CorpusError(f"{path}: options must be names with values. {_REMEDY}")
    return CorpusIndex(
        directory,
        dim,
        _column(content, "class_names", str),
        numbers["mean"],
        numbers["stddev"],
        content["options"],
        {name: _parse_split(directory, content["splits"][name]) for name in SPLITS},
        fingerprint,
    )


def _parse_split(directory: str, content: dict[str, Any]) -> Split:
    columns = content["utterances"]
    paths = tuple(os.path.join(directory, shard["name"]) for shard in content["shards"])
    split = Split(
        paths,
        *(np.array(_column(columns, name, int), np.int64) for name in COLUMNS[:5]),
        *(_column(columns, name, str) for name in COLUMNS[5:]),
    )
    if len({len(columns[name]) for name in COLUMNS}) != 1:
        raise CorpusError(
            f"{directory}/{FILE_NAME}: the columns of its utterances must be of one length."
            f" {_REMEDY}"
        )
    sizes = np.array([shard["bytes"] for shard in content["shards"]], np.int64)
    for number, path in enumerate(paths):
        _check_length(split, number, path, int(sizes[number]))
    _check_places(f"{directory}/{FILE_NAME}", split, sizes)
    return split


def _column(columns: dict[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    values = columns[name]
    if type(values) is not list or not all(type(value) is kind for value in values):
        what = "whole numbers" if kind is int else "texts"
        raise TypeError(f"{name} must be a list of {what}")
    return tuple(values)


def _check_places(path: str, split: Split, sizes: np.ndarray) -> None:
    """Checks that every utterance is within its shard, and has no more frames than bytes."""
    known = (split.shard >= 0) & (split.shard < len(sizes))
    size = np.append(sizes, 0)[np.where(known, split.shard, -1)]
    inside = (split.offset >= 0) & (split.offset <= size)
    room = np.where(inside, size - split.offset, 0)
    inside &= (split.length >= 0) & (split.length <= room)
    fits = (split.frames >= 1) & (split.frames <= split.length)
    wrong = np.flatnonzero(~(known & inside & fits))
    if len(wrong):
        first = int(wrong[0])
        values = ", ".join(f"{name} {getattr(split, name)[first]}" for name in COLUMNS[:5])
        raise CorpusError(
            f"{path}: utterance {split.id[first][:80]} must be within a shard, with at least one"
            f" frame and no more than it has bytes. Received: {values}. {_REMEDY}"
        )


def _check_length(split: Split, number: int, path: str, expected: int) -> None:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"shard {path}, which the index lists, does not exist. {_REMEDY}")
    size = os.path.getsize(path)
    if size == expected:
        return
    cut = np.flatnonzero((split.shard == number) & (split.offset + split.length > size))
    where = f": cut at {split.place(cut[0]).id}, byte {size}" if len(cut) else ""
    what = "is empty" if size == 0 else f"has {size} bytes"
    raise CorpusError(f"shard {path} {what} where the index says {expected}{where}. {_REMEDY}")


def _check_first_utterances(index: CorpusIndex, split: Split) -> None:
    with open_shards(split) as files:
        for utterance in np.unique(split.shard, return_index=True)[1]:
            read_utterance(index, split, files, int(utterance))
