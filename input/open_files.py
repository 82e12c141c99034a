"""Files of any number, of which only a few are open at a time."""

import gzip
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO, Self, cast

from input.records import CorpusError

# On most systems, a process may have at most 1024 open files, and it needs some for other purposes.
_MOST_OPEN = 64
_SHORT = 1 << 20  # bytes; if all unpacked files together are shorter, they stay in memory


class OpenFiles:
    """Files that are opened when they are used. A context manager, for one thread.

    `files[i]` is the open file at `paths[i]`. The caller must not keep it: if too many files are
    open, the one that was not used for the longest time is closed.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._open: dict[int, BinaryIO] = {}  # in order of use: the last file was used last

    def __getitem__(self, number: int) -> BinaryIO:
        file = self._open.pop(number, None)
        if file is None:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self._opened(number)
        self._open[number] = file
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _opened(self, number: int) -> BinaryIO:
        return open(self.paths[number], "rb")


class Archives(OpenFiles):
    """Files, gzipped or not, that can be read at any offset.

    All gzipped files are unpacked to one temporary file.

    Raises:
      FileNotFoundError: there is no such file.
      CorpusError: its compressed data is damaged; or, when the file is opened again, it is not the
        one that was opened at first.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self._unpacked = tempfile.SpooledTemporaryFile(_SHORT, prefix="kaldi-")  # noqa: SIM115
        # For each gzipped file, the range of its bytes in `_unpacked`.
        self._parts: dict[int, range] = {}
        # For each other file, its size and the time of its last change.
        self._marks: dict[int, tuple[int, int]] = {}
        try:
            for number, path in enumerate(paths):
                if not os.path.isfile(path):
                    what = "is no file" if os.path.exists(path) else "does not exist"
                    raise FileNotFoundError(f"archive {path} {what}")
                with open(path, "rb") as file:
                    if file.read(2) == b"\x1f\x8b":
                        self._parts[number] = self._unpack(path)
                    else:
                        self._marks[number] = _mark(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._unpacked.close()

    def _unpack(self, path: str) -> range:
        start = self._unpacked.tell()
        try:
            with gzip.open(path) as packed:
                shutil.copyfileobj(packed, self._unpacked, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            size = self._unpacked.tell() - start
            raise CorpusError(
                f"{path}: its gzip data is damaged after {size} unpacked bytes ({error})"
            ) from error
        return range(start, self._unpacked.tell())

    def _opened(self, number: int) -> BinaryIO:
        if number in self._parts:
            part = _Part(cast(BinaryIO, self._unpacked), self._parts[number])
            return cast(BinaryIO, io.BufferedReader(part))
        file = super()._opened(number)
        if _mark(file) != self._marks[number]:
            file.close()
            raise CorpusError(
                f"{self.paths[number]} was changed while it was in use. Start the program again, "
                "and leave the file as it is until the program ends"
            )
        return file


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file of their own."""

    def __init__(self, file: BinaryIO, part: range) -> None:
        self._file = file
        self._part = part
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, len(self._part))
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = self._part[self._at : self._at + len(buffer)]
        self._file.seek(left.start)
        data = self._file.read(len(left))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _mark(file: BinaryIO) -> tuple[int, int]:
    """Returns what tells a file from the one that replaces it: its size and time of change."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
