"""Checkpoints in a directory of a file system with `rename` and `flock`, such as a disk or NFS.

DIRECTORY/.partial-…/ is an unfinished checkpoint of the present run, or of a run that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfpara.checkpoint import manifest as manifests
from tfpara.checkpoint.store import (
    MANIFEST,
    NAME,
    CheckpointError,
    Store,
    folder_of,
    in_use,
    no_lock,
)
from tfpara.files import append_line, cleared, no_link, regular, sync_to_disk
from tfpara.typing import Json

_PARTIAL = ".partial-"
_HOLDER = "process "  # the beginning of a lock file's content
# If another process has the lock, flock fails with one of these error numbers. On NFS it may fail
# with EAGAIN or EACCES.
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


class LocalStore(Store):
    """A directory of this machine, or one that machines share."""

    directory: Path
    _lock: int | None = None  # descriptor of the open lock file; None: it is not locked

    def _key(self) -> str:
        return os.path.realpath(self.directory)

    def _take(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = no_link(self.directory / "lock", os.O_RDWR | os.O_CREAT)
        try:
            self._hold(lock)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        for left_over in self.directory.glob(f"{_PARTIAL}*"):
            cleared(left_over)

    def _hold(self, lock: int) -> None:
        """Locks the open file `lock`, and writes this process and its host into the file."""
        holder = os.pread(lock, 200, 0).decode(errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._not_locked(error, holder or "an unknown process") from error
        # In tfpara's lock files the text begins with `_HOLDER`. A file with another text may be a
        # hard link to a file of the user, whose content must not be overwritten.
        if holder and not holder.startswith(_HOLDER):
            raise no_lock(self.directory / "lock", holder)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{_HOLDER}{os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _not_locked(self, error: OSError, holder: str) -> CheckpointError:
        if error.errno in _HELD:
            return in_use(self.directory, holder)
        if error.errno in _NO_LOCKS:
            return CheckpointError(
                f"checkpoint directory {self.directory} is on a file system without locks (flock: "
                f"{error.strerror}), so a second run in it would not be noticed. Have it mounted "
                "with locks, or give a directory on another one."
            )
        return self._unwritable(error)

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def numbers(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        matches = [NAME.fullmatch(path.name) for path in self.directory.iterdir()]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, number: int) -> Path:
        return self.directory / folder_of(number)

    def partial(self, number: int) -> Path:
        """Returns the directory of an unfinished checkpoint of this run."""
        return self.directory / f"{_PARTIAL}{number:08d}-{self.mark}"

    def begin(self, number: int) -> None:
        cleared(self.partial(number))
        try:
            self.partial(number).mkdir()
        except OSError as error:
            raise self._unwritable(error) from error

    @contextlib.contextmanager
    def _staging(self, number: int) -> Iterator[Path]:
        partial = self.partial(number)
        if not partial.is_dir():
            raise CheckpointError(
                f"{partial}, which the chief has made, is not there on {socket.gethostname()}: "
                f"{self.directory} must be one directory that all workers share."
            )
        yield partial

    def _keep_file(self, number: int, path: Path) -> None:
        sync_to_disk(path)

    def _publish(self, number: int, manifest: Mapping[str, Json]) -> None:
        partial = self.partial(number)
        path = partial / MANIFEST
        path.write_text(manifests.text(manifest))
        sync_to_disk(path)
        sync_to_disk(partial)
        partial.rename(self.path(number))
        sync_to_disk(self.directory)

    def abandon(self, number: int) -> None:
        cleared(self.partial(number))

    def _manifest(self, number: int) -> bytes:
        with open(self.path(number) / MANIFEST, "rb", opener=regular) as file:
            return file.read()

    def _size(self, number: int, name: str) -> int:
        return (self.path(number) / name).stat().st_size

    def _copy(self, number: int, name: str) -> Path:
        return self.path(number) / name

    def drop_copies(self) -> None:
        pass  # A local store makes no copies.

    def remove(self, number: int) -> None:
        # The process may be killed while it removes files. The folder is renamed first, so that the
        # remaining files then do not look like a complete checkpoint.
        dying = self.directory / f"{_PARTIAL}old-{number:08d}"
        with contextlib.suppress(OSError):
            self.path(number).rename(dying)
        cleared(dying)

    def append(self, name: str, line: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        append_line(self.directory / name, line)
