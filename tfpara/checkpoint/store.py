"""Checkpoints on disk, each of which is complete or not visible.

DIRECTORY/lock                          held by the run that writes here
DIRECTORY/checkpoint-00000012/          the twelfth; made visible by one rename
    manifest.json                       facts about the run; every file's size and SHA-256; its own
    part-00000.index, part-00000.data-00000-of-00001     worker 0's part, in TensorFlow's format
DIRECTORY/.partial-…/                   a checkpoint being written, or left by a killed run
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfpara.checkpoint import manifest as manifests
from tfpara.checkpoint.manifest import part
from tfpara.files import cleared, no_link, regular, sync_to_disk
from tfpara.typing import Array, Json

_NAME = re.compile(r"checkpoint-(\d{8})")
_PARTIAL = ".partial-"
_HOLDER = "process "  # the beginning of the lock's content
# Error numbers of flock for a lock that another process holds; EACCES and EAGAIN come from NFS.
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
_LOCKS: dict[str, Store] = {}  # the directories that this process has locked


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be used. The message says which and why."""

    of_all_workers = True  # it is raised on all workers, at the same place


class Store:
    """A directory of checkpoints. All workers see the same one, and the chief makes the changes.

    Args:
        directory: path of the directory.
        keep: number of the newest checkpoints that stay.
        fields: further keys of the manifests of such a run, beside those of all, and their types.

    Attributes:
        mark: identifies this run; the same on all its workers, and different in other runs.
        damaged: numbers of checkpoints that this run could not use. They do not count among the
            `keep` that stay, and are removed with the older ones.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int,
        fields: Mapping[str, type] = MappingProxyType({}),
    ) -> None:
        self.directory = Path(directory)
        self._fields = fields
        self.mark = "0"
        self.damaged: set[int] = set()
        self._keep = keep
        self._lock: int | None = None

    def lock(self) -> None:
        """Locks the directory for this process, until the process ends.

        Raises:
            CheckpointError: another run has it, or it cannot be locked or written to.
        """
        if self._lock is not None:
            return
        former = _LOCKS.pop(os.path.realpath(self.directory), None)
        if former is not None:  # locked by a fit of this process that ended with an error
            former.release()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = no_link(self.directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._take(lock)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _LOCKS[os.path.realpath(self.directory)] = self
        for left_over in self.directory.glob(f"{_PARTIAL}*"):
            cleared(left_over)

    def _take(self, lock: int) -> None:
        """Locks the open file, and writes the holder into it: this process and its host."""
        holder = os.pread(lock, 200, 0).decode(errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._not_locked(error, holder or "an unknown process") from error
        if holder and not holder.startswith(_HOLDER):  # it may be a second name of another file
            raise CheckpointError(
                f"{self.directory / 'lock'} is not the lock of a run: it begins with "
                f"{holder[:20]!r}. Move it away, or give another directory."
            )
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{_HOLDER}{os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as error:
            raise self._unwritable(error) from error

    def _not_locked(self, error: OSError, holder: str) -> CheckpointError:
        if error.errno in _HELD:
            return CheckpointError(
                f"checkpoint directory {self.directory} is in use by another run ({holder}). Wait "
                "for its end, or give this run a directory of its own."
            )
        if error.errno in _NO_LOCKS:
            return CheckpointError(
                f"checkpoint directory {self.directory} is on a file system without locks (flock: "
                f"{error.strerror}), so a second run in it would not be noticed. Have it mounted "
                "with locks, or give a directory on another one."
            )
        return self._unwritable(error)

    def _unwritable(self, error: OSError) -> CheckpointError:
        where = f"{Path(error.filename).name}: " if error.filename else ""
        return CheckpointError(
            f"checkpoint directory {self.directory} cannot be written to ({where}"
            f"{error.strerror}). Give one that can."
        )

    def release(self) -> None:
        """Releases the lock of the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _LOCKS.pop(os.path.realpath(self.directory), None)

    def numbers(self) -> list[int]:
        """Returns the numbers of the complete checkpoints, the newest first."""
        if not self.directory.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.directory.iterdir()]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, number: int) -> Path:
        """Returns the directory of a complete checkpoint."""
        return self.directory / f"checkpoint-{number:08d}"

    def partial(self, number: int) -> Path:
        """Returns the directory of a checkpoint that is being written."""
        return self.directory / f"{_PARTIAL}{number:08d}-{self.mark}"

    def begin(self, number: int) -> str:
        """Makes an empty directory for a checkpoint to write; returns the name of this host.

        Raises:
            CheckpointError: it cannot be made.
        """
        cleared(self.partial(number))
        try:
            self.partial(number).mkdir()
        except OSError as error:
            raise self._unwritable(error) from error
        return socket.gethostname()

    def write_part(
        self, number: int, rank: int, tensors: Mapping[str, Array], begun_on: str = "its host"
    ) -> dict[str, Json]:
        """Writes a worker's part of a checkpoint; returns the manifest's entries of its files.

        Args:
            number: the checkpoint.
            rank: the worker.
            tensors: what the part holds, by name.
            begun_on: the host on which the chief has made the directory, for the message.

        Raises:
            CheckpointError: the directory is not there, or the part cannot be written.
        """
        partial = self.partial(number)
        if not partial.is_dir():
            raise CheckpointError(
                f"{partial}, which the chief has made on {begun_on}, is not there on "
                f"{socket.gethostname()}: {self.directory} must be one directory that all workers "
                "share."
            )
        prefix = partial / part(rank)
        try:
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=os.fspath(prefix),
                    tensor_names=list(tensors),
                    shape_and_slices=[""] * len(tensors),
                    tensors=[tf.convert_to_tensor(t) for t in tensors.values()],
                )
            written = sorted(partial.glob(f"{part(rank)}.*"))
            for path in written:
                sync_to_disk(path)
            return {path.name: _mark(path) for path in written}
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(f"cannot write {prefix} ({_first_line(error)})") from error

    def commit(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Makes a checkpoint visible, and removes those older than the `keep` newest whole ones.

        Raises:
            CheckpointError: the manifest cannot be written, or the directory not renamed.
        """
        partial = self.partial(number)
        try:
            path = partial / "manifest.json"
            path.write_text(manifests.text(manifest))
            sync_to_disk(path)
            sync_to_disk(partial)
            partial.rename(self.path(number))
            sync_to_disk(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"cannot complete {self.path(number)} ({_first_line(error)})"
            ) from error
        numbers = self.numbers()
        whole = [number for number in numbers if number not in self.damaged][: self._keep]
        for old in numbers:
            if len(whole) == self._keep and old < whole[-1]:
                self.remove(old)

    def abandon(self, number: int) -> None:
        """Removes a checkpoint that is being written."""
        cleared(self.partial(number))

    def read_manifest(self, number: int) -> dict[str, Json]:
        """Returns the manifest of a checkpoint; raises CheckpointError if it has no whole one."""
        path = self.path(number) / "manifest.json"
        try:
            with open(path, "rb", opener=regular) as file:
                return manifests.parsed(file.read(), self._fields)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be used ({_first_line(error)})") from error

    def check(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Compares every file of a checkpoint with its manifest.

        Raises:
            CheckpointError: a file is missing or damaged; the message names it.
        """
        for name, expected in manifest["files"].items():
            path = self.path(number) / name
            try:
                # A file of another size, which may be huge, is not read.
                same_size = path.stat().st_size == expected["bytes"]
                found = _mark(path) if same_size else None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
            if found != expected:
                raise CheckpointError(f"{path} is damaged: its size or SHA-256 is not as written")

    def readers(self, number: int, manifest: Mapping[str, Json]) -> list[Any]:
        """Returns a reader for each worker's part, of the type of `tf.train.load_checkpoint`."""
        folder = self.path(number)
        return [
            tf.train.load_checkpoint(os.fspath(folder / part(rank)))
            for rank in range(manifest["workers"])
        ]

    def remove(self, number: int) -> None:
        """Removes a checkpoint."""
        # It is renamed first, so that a kill in the middle leaves nothing that looks complete.
        dying = self.directory / f"{_PARTIAL}old-{number:08d}"
        with contextlib.suppress(OSError):
            self.path(number).rename(dying)
        cleared(dying)


def _release_all() -> None:
    for store in list(_LOCKS.values()):
        store.release()


# A lock is held until the last process has closed it. A forked process, such as one that reads
# data, may outlive this one, and would keep the next run out.
os.register_at_fork(after_in_child=_release_all)


def _mark(path: Path) -> dict[str, Json]:
    digest = hashlib.sha256()
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _first_line(error: Exception) -> str:
    text = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
