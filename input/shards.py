"""Writes a corpus directory, shards and index; it becomes visible when it is complete."""

import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from input import index, records
from input.records import CorpusError

_MIN_STDDEV = 1e-5


def exists(directory: str, options: dict[str, Any]) -> bool:
    """Returns whether `directory` already is a corpus made with `options`.

    Raises:
      CorpusError: it exists and is something else, which is not overwritten, or cannot be
        replaced.
    """
    path = Path(directory)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        if os.path.ismount(path) or (path.exists() and path.samefile(".")):
            raise CorpusError(
                f"{directory} is a mount point or the current folder, which a corpus cannot"
                " replace. Name a folder in it"
            )
        return False
    try:
        found = index.read(directory).options
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorpusError(
            f"{directory} exists and is not a whole corpus; it is not overwritten. Remove it, or"
            " choose another directory"
        ) from error
    differing = sorted(
        name for name in found.keys() | options.keys() if found.get(name) != options.get(name)
    )
    if differing:
        changes = ", ".join(
            f"{name} ({found.get(name)!r} there, {options.get(name)!r} now)" for name in differing
        )
        raise CorpusError(
            f"{directory} holds a corpus made with other options: {changes}. It is not overwritten."
            " Remove it, or choose another directory"
        )
    return True


class CorpusWriter:
    """Writes utterances, split by split, into a hidden directory that is renamed at the end.

    A context manager: leaving it normally makes the corpus visible at `directory`; leaving it by
    an exception removes what was written.

    Args:
      directory: directory of the corpus.
      options: options that it is made with, a JSON value that `exists` compares.
      class_names: name of each class; a label is an index in this list.
    """

    def __init__(self, directory: str, options: dict[str, Any], class_names: list[str]) -> None:
        # If `directory` is a link, its target is used, because os.rename cannot replace a link by a
        # directory.
        self._directory = Path(os.path.realpath(directory))
        self._options = options
        self._class_names = class_names
        self._splits: dict[str, dict[str, Any]] = {}
        self._split: dict[str, Any] = {}
        # Index of the first utterance of each shard; None if the length of the split is not known.
        self._starts: list[int] | None = None
        # The number of the training frames, their sum, and the sum of their squares.
        self._sums: list[Any] = [0.0, 0.0, 0.0]
        self._file: tf.io.TFRecordWriter | None = None

    def __enter__(self) -> "CorpusWriter":
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        self._hidden = Path(
            tempfile.mkdtemp(prefix=f".{self._directory.name}.", dir=self._directory.parent)
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish_split()
                self._publish()
            elif self._file is not None:
                self._file.close()
        finally:
            shutil.rmtree(self._hidden, ignore_errors=True)

    def start_split(self, split: str, num_shards: float, num_utterances: int) -> None:
        """Starts a split of known length.

        Args:
          split: "train", "validation" or "test".
          num_shards: number of shards, rounded down; at least 1, and at most one for each
            utterance.
          num_utterances: number of utterances of the split.
        """
        self._new_split(split)
        num_shards = int(min(max(num_shards, 1), num_utterances))
        self._starts = [number * num_utterances // num_shards for number in range(num_shards)]

    def start_stream(self, split: str, shard_bytes: float) -> None:
        """Starts a split of unknown length; a new shard begins after `shard_bytes` bytes."""
        self._new_split(split)
        self._shard_bytes = shard_bytes

    def _new_split(self, split: str) -> None:
        self._finish_split()
        columns: dict[str, list[Any]] = {name: [] for name in index.COLUMNS}
        self._split = {"shards": [], "utterances": columns}
        self._splits[split] = self._split
        self._split_name = split
        self._starts = None

    def _starts_shard(self) -> bool:
        """Returns whether the next utterance is the first of a shard."""
        shards = self._split["shards"]
        if self._starts is None:
            return not shards or shards[-1]["bytes"] >= self._shard_bytes
        done = len(self._split["utterances"]["id"])
        return len(shards) < len(self._starts) and done == self._starts[len(shards)]

    def add(self, features: np.ndarray, labels: np.ndarray, utterance: str, speaker: str) -> None:
        """Writes one utterance: features float32 [frames, dim], labels int32 [frames]."""
        columns = self._split["utterances"]
        if self._starts_shard():
            self._open_shard(f"{self._split_name}-{len(self._split['shards']):05d}.tfrecord")
        data = records.encode(features, labels, utterance, speaker)
        if self._file is None:
            raise ValueError("start a split before adding utterances")
        self._file.write(data)
        shard = self._split["shards"][-1]
        values = {
            "shard": len(self._split["shards"]) - 1,
            "offset": shard["bytes"],
            "length": records.record_length(data),
            "frames": len(labels),
            "id": utterance,
            "speaker": speaker,
        }
        for name, value in values.items():
            columns[name].append(value)
        shard["bytes"] += values["length"]
        self._dim = features.shape[1]
        if self._split_name == "train":
            wide = features.astype(np.float64)
            sums = [np.full(self._dim, float(len(wide))), wide.sum(0), np.square(wide).sum(0)]
            self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]

    def _open_shard(self, name: str) -> None:
        self._close_shard()
        self._split["shards"].append({"name": name, "bytes": 0})
        self._file = tf.io.TFRecordWriter(str(self._hidden / name))

    def _close_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._add_checksums(self._split, len(self._split["shards"]) - 1)

    def _finish_split(self) -> None:
        """Closes the last shard of a split, and renames the shards to SPLIT-NUMBER-of-COUNT."""
        self._close_shard()
        shards = self._split.get("shards", [])
        for number, shard in enumerate(shards):
            name = f"{self._split_name}-{number:05d}-of-{len(shards):05d}.tfrecord"
            os.rename(self._hidden / shard["name"], self._hidden / name)
            shard["name"] = name

    def _add_checksums(self, split: dict[str, Any], shard: int) -> None:
        """Adds the CRC-32 of every record of a shard, framing included, to the columns."""
        columns = split["utterances"]
        with open(self._hidden / split["shards"][shard]["name"], "rb") as file:
            for length in columns["length"][len(columns["crc32"]) :]:
                columns["crc32"].append(zlib.crc32(file.read(length)))
            os.fsync(file.fileno())

    def _publish(self) -> None:
        count, total, squares = self._sums
        mean = total / count
        stddev = np.sqrt(np.maximum(squares / count - mean**2, _MIN_STDDEV**2))
        content = {
            "version": index.VERSION,
            "feature_dim": self._dim,
            "class_names": self._class_names,
            "mean": mean.tolist(),
            "stddev": stddev.tolist(),
            "options": self._options,
            "splits": self._splits,
        }
        with open(self._hidden / index.FILE_NAME, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        self._hidden.chmod(0o755)  # mkdtemp gave only the owner access
        try:
            os.rename(self._hidden, self._directory)
        except OSError:
            # It is no error if another process has made the same corpus in the meantime.
            if not exists(str(self._directory), self._options):
                raise
