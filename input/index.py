"""The index of a prepared corpus: its utterances, and their places in files.

A corpus is a directory of an `index.json` and the shards that it lists. The index has the width of
a frame, the class names, the mean and standard deviation of the training frames, the options that
made the corpus, and for each utterance its shard, byte offset, length, CRC-32, number of frames,
id and speaker.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from input import records
from input.records import CorpusError, Place

VERSION = 1
FILE_NAME = "index.json"
SPLITS = ("train", "validation", "test")
COLUMNS = ("shard", "offset", "length", "crc32", "frames", "id", "speaker")
_REMEDY = "Prepare the corpus again with the program that made it, such as scripts.prepare_speech"


@dataclass(frozen=True)
class Split:
    """The utterances of one split, as columns of equal length."""

    shards: tuple[str, ...]  # paths
    shard: np.ndarray  # int64: which of `shards`
    offset: np.ndarray  # int64, bytes
    length: np.ndarray  # int64, bytes
    crc32: np.ndarray  # int64
    frames: np.ndarray  # int64
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
    mean: np.ndarray  # float32 [feature_dim], of the training frames
    stddev: np.ndarray  # float32 [feature_dim], of the training frames; positive
    options: dict[str, Any]  # options that the corpus was made with
    splits: dict[str, Split]
    fingerprint: str  # equal for corpora of equal content

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
    the others is checked when they are read, or all at once by `verify`.

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
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, AttributeError) as error:
        raise CorpusError(f"{path} is not a corpus index ({error!r}). {_REMEDY}") from error
    for split in index.splits.values():
        _check_first_utterances(index, split)
    return index


def verify(index: CorpusIndex) -> None:
    """Reads every utterance of the corpus and checks it: CRC-32, width, finite, class range.

    Raises:
      CorpusError: an utterance is wrong; the message names the first such one, its file and its
        byte offset.
    """
    for split in index.splits.values():
        with open_shards(split) as files:
            for utterance in range(len(split)):
                read_utterance(index, split, files, utterance)


@contextmanager
def open_shards(split: Split) -> Iterator[list[int]]:
    """Opens the shards of a split, and closes them at the end; gives their file descriptors."""
    files = [os.open(path, os.O_RDONLY) for path in split.shards]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


def read_utterance(
    index: CorpusIndex, split: Split, files: list[int], utterance: int
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
    mean = np.array(content["mean"], np.float32)
    stddev = np.array(content["stddev"], np.float32)
    for name, value in (("mean", mean), ("stddev", stddev)):
        if value.shape != (dim,) or not np.isfinite(value).all():
            raise CorpusError(f"{path}: {name} must be {dim} finite numbers. {_REMEDY}")
    if (stddev <= 0).any():
        raise CorpusError(f"{path}: stddev must be positive in every dimension. {_REMEDY}")
    return CorpusIndex(
        directory,
        dim,
        tuple(content["class_names"]),
        mean,
        stddev,
        content["options"],
        {name: _parse_split(directory, content["splits"][name]) for name in SPLITS},
        fingerprint,
    )


def _parse_split(directory: str, content: dict[str, Any]) -> Split:
    columns = content["utterances"]
    paths = tuple(os.path.join(directory, shard["name"]) for shard in content["shards"])
    split = Split(
        paths,
        *(np.array(columns[name], np.int64) for name in COLUMNS[:5]),
        *(tuple(columns[name]) for name in COLUMNS[5:]),
    )
    if len({len(columns[name]) for name in COLUMNS}) != 1 or (split.frames < 1).any():
        raise CorpusError(
            f"{directory}/{FILE_NAME}: the columns of its utterances must be of one length, and"
            f" frames positive. {_REMEDY}"
        )
    for number, (shard, path) in enumerate(zip(content["shards"], paths, strict=True)):
        _check_length(split, number, path, shard["bytes"])
    return split


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
