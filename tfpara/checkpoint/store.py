"""Checkpoints that become visible only when they are complete, in any kind of storage.

DIRECTORY/lock                          locked by the run that writes here
DIRECTORY/checkpoint-00000012/          the twelfth checkpoint
    manifest.json                       facts about the run; SHA-256 of files and of itself; sizes
    part-00000.index, part-00000.data-00000-of-00001     worker 0's part, in TensorFlow's format

In a directory, a checkpoint becomes visible by one rename (`LocalStore`). On S3 and other stores it
becomes visible when its manifest is written, as the last file (`RemoteStore`).
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpara.checkpoint import manifest as manifests
from tfpara.checkpoint.manifest import part
from tfpara.files import regular
from tfpara.remote_files import RefusedError
from tfpara.typing import Array, Json

MANIFEST = "manifest.json"
NAME = re.compile(r"checkpoint-(\d{8})")  # the name of a checkpoint's folder
_LOCKS: dict[str, Store] = {}  # the stores that this process has locked, by `_key()`


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the checkpoint and the reason."""

    of_all_workers = True  # All workers raise this error at the same place, so all end in order.


def folder_of(number: int) -> str:
    """Returns the name of the folder of a checkpoint."""
    return f"checkpoint-{number:08d}"


def in_use(directory: object, holder: str) -> CheckpointError:
    """Returns the error for a directory that another run has locked."""
    return CheckpointError(
        f"checkpoint directory {directory} is in use by another run ({holder}). Wait for its end, "
        "or give this run a directory of its own."
    )


def no_lock(path: object, content: str | bytes) -> CheckpointError:
    """Returns the error for a file that has the lock's name, but that no run has written."""
    return CheckpointError(
        f"{path} is not the lock of a run: it begins with {content[:20]!r}. Move it away, or give "
        "another directory."
    )


class Store(abc.ABC):
    """A directory of checkpoints, shared by all workers. Each writes its part, the chief the rest.

    The methods raise CheckpointError if the directory cannot be used, or another run has it. `keep`
    is the number of the newest checkpoints that stay.

    Attributes:
        mark: a text that identifies this run; the same on all its workers.
        damaged: numbers of checkpoints that this run could not use. They do not count among the
            `keep` that stay, and are removed with the older ones.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self.directory = directory
        self.mark = "0"
        self.damaged: set[int] = set()
        self._keep = keep
        self._is_locked = False

    # -- defined by each kind of storage ---------------------------------------------------------

    @abc.abstractmethod
    def _key(self) -> str:
        """Returns a text that is the same for all stores of this directory in this process."""

    @abc.abstractmethod
    def _take(self) -> None:
        """Locks the directory, and removes checkpoints that killed runs have left unfinished."""

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Releases the lock of `_take`."""

    @abc.abstractmethod
    def numbers(self) -> list[int]:
        """Returns the numbers of the complete checkpoints, the newest first."""

    @abc.abstractmethod
    def path(self, number: int) -> str | os.PathLike[str]:
        """Returns the directory of a complete checkpoint."""

    @abc.abstractmethod
    def begin(self, number: int) -> None:
        """Makes room for the parts; may raise CheckpointError."""

    @abc.abstractmethod
    def _staging(self, number: int) -> contextlib.AbstractContextManager[Path]:
        """Yields a local folder to write a part into."""

    @abc.abstractmethod
    def _keep_file(self, number: int, path: Path) -> None:
        """Stores a file of the folder of `_staging` so that it survives a crash."""

    @abc.abstractmethod
    def _publish(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Makes a checkpoint visible, with all its parts; may raise OSError or CheckpointError."""

    @abc.abstractmethod
    def abandon(self, number: int) -> None:
        """Removes an unfinished checkpoint of this run."""

    @abc.abstractmethod
    def _manifest(self, number: int) -> bytes:
        """Returns the bytes of a checkpoint's manifest."""

    @abc.abstractmethod
    def _size(self, number: int, name: str) -> int:
        """Returns the size of a file in bytes; `name` is its path within the checkpoint."""

    @abc.abstractmethod
    def _copy(self, number: int, name: str) -> Path:
        """Returns the path of a local copy of a file, which stays until `drop_copies`."""

    @abc.abstractmethod
    def remove(self, number: int) -> None:
        """Removes a checkpoint."""

    @abc.abstractmethod
    def append(self, name: str, line: str) -> None:
        """Adds a line to a text file beside the checkpoints."""

    @abc.abstractmethod
    def drop_copies(self) -> None:
        """Removes the local copies of files; call it when their readers are no longer used."""

    # -- the same for each kind of storage --------------------------------------------------------

    def lock(self) -> None:
        """Locks the directory for this process, until `release` or the end of the process."""
        if self._is_locked:
            return
        former = _LOCKS.pop(self._key(), None)
        # A call of `fit` in this process may have failed before it released its lock.
        if former is not None:
            former.release()
        try:
            self._take()
        except OSError as error:
            raise self._unwritable(error) from error
        self._is_locked = True
        _LOCKS[self._key()] = self

    def release(self) -> None:
        """Releases the lock of the directory."""
        if self._is_locked:
            self._is_locked = False
            self._let_go()
            _LOCKS.pop(self._key(), None)

    def _unwritable(self, error: OSError) -> CheckpointError:
        where = f"{Path(error.filename).name}: " if error.filename else ""
        return CheckpointError(
            f"checkpoint directory {self.directory} cannot be written to ({where}"
            f"{error.strerror}). Give one that can."
        )

    def write_part(self, number: int, rank: int, tensors: Mapping[str, Array]) -> dict[str, Json]:
        """Writes a worker's part of a checkpoint; returns the manifest's entries of its files."""
        try:
            with self._staging(number) as folder:
                with tf.device("CPU:0"):
                    tf.raw_ops.SaveV2(
                        prefix=os.fspath(folder / part(rank)),
                        tensor_names=list(tensors),
                        shape_and_slices=[""] * len(tensors),
                        tensors=[tf.convert_to_tensor(t) for t in tensors.values()],
                    )
                written = sorted(folder.glob(f"{part(rank)}.*"))
                for path in written:
                    self._keep_file(number, path)
                return {path.name: _mark(path) for path in written}
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"cannot write {part(rank)} of {self.path(number)} ({_first_line(error)})"
            ) from error

    def commit(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Makes a checkpoint visible; removes those beyond `keep`; may raise CheckpointError."""
        try:
            self._publish(number, manifest)
        except OSError as error:
            raise CheckpointError(
                f"cannot complete {self.path(number)} ({_first_line(error)})"
            ) from error
        numbers = self.numbers()
        whole = [number for number in numbers if number not in self.damaged][: self._keep]
        for old in numbers:
            if len(whole) == self._keep and old < whole[-1]:
                self.remove(old)

    def read_manifest(self, number: int) -> dict[str, Json]:
        """Returns a checkpoint's manifest; raises CheckpointError if it is missing or damaged."""
        try:
            return manifests.parsed(self._manifest(number))
        except RefusedError:
            raise  # The store has failed. The manifest may be good, so no damage is reported.
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path(number)}/{MANIFEST} cannot be used ({_first_line(error)})"
            ) from error

    def check(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Raises CheckpointError if a file of a checkpoint is missing, or is not as it was kept."""
        for name, expected in manifest["files"].items():
            inside = manifests.inside(manifest, name)
            path = f"{self.path(number)}/{inside}"
            try:
                # A file of the wrong size is not read, since it may be huge.
                same_size = self._size(number, inside) == expected["bytes"]
                found = _mark(self._copy(number, inside)) if same_size else None
            except RefusedError:
                raise
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
            if found != expected:
                raise CheckpointError(f"{path} is damaged: its size or SHA-256 is not as written")

    def readers(self, number: int, manifest: Mapping[str, Json]) -> list[Any]:
        """Returns a reader for each worker's part, as `tf.train.load_checkpoint` makes it."""
        copies = {}
        for name in manifest["files"]:
            path = self._copy(number, manifests.inside(manifest, name))
            copies[path.with_suffix("")] = path
        return [_reader(prefix) for prefix in sorted(copies)]


def _reader(prefix: Path) -> Any:
    """Returns a reader of the part with this prefix.

    TensorFlow takes a path with "[" or a backslash for a pattern, which the path itself does not
    match. So in such a folder TensorFlow gets a path by the number of the folder's descriptor.
    """
    path = os.fspath(prefix)
    if not {"[", "\\"} & {*path}:
        return tf.train.load_checkpoint(path)
    with contextlib.ExitStack() as opened:
        folder = os.open(prefix.parent, os.O_RDONLY)
        opened.callback(os.close, folder)
        reader = tf.train.load_checkpoint(f"/proc/self/fd/{folder}/{prefix.name}")
        # The reader opens files later, too, so the descriptor stays open while the reader exists.
        weakref.finalize(reader, opened.pop_all().close)
    return reader


def _release_all() -> None:
    for store in list(_LOCKS.values()):
        store.release()


# A lock lasts until every process that has the lock file open has closed the file. A forked
# process, such as one that reads data, has the file open, too, and may outlive its parent. So each
# forked process closes the file at once; otherwise the next run could not take the lock.
os.register_at_fork(after_in_child=_release_all)


def _mark(path: Path) -> dict[str, Json]:
    with open(path, "rb", opener=regular) as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _first_line(error: Exception) -> str:
    text = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*?\]", "", text)  # removes the names of nodes and operations
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
