"""Files at URLs, such as s3://bucket/path, by fsspec; no TensorFlow.

Stores guarantee only that an object appears whole or not at all; not all can rename or lock files.
Errors of any store are raised as OSError, whose text says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import TypeVar

from tfpara import files

# The waits, in seconds, between the tries of an action. Within each try, the libraries of most
# stores also repeat failed requests by themselves.
_WAITS = (1.0, 2.0, 4.0)
# Errors after which an action is not repeated, since it would fail again in the same way.
_FINAL = (
    *(FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError),
    *(ImportError, NotImplementedError, TypeError, ValueError),
)
_FINAL_NUMBERS = (errno.EINVAL, errno.ENOSYS, errno.ENAMETOOLONG)
_PATTERN = re.compile(r"[*?\[\]{}]")  # characters that fsspec reads as a pattern
_TEMPORARY = "tfpara-copies-"
_Result = TypeVar("_Result")


class RefusedError(OSError):
    """A store refuses or fails, for another reason than that a file is not there."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL; ValueError: it was one, and lost a slash as a `Path`."""
    text = os.fspath(path)
    if isinstance(path, PurePath) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise ValueError(
            f"{text!r} is a Path made from a URL, and a Path drops one of its slashes: give the "
            "URL as a str."
        )
    return "://" in text


class RemoteFolder:
    """A folder at a URL. Names of files are paths relative to it.

    Its bucket must exist; the folder need not. A URL that cannot serve is refused by ValueError, or
    by ImportError if a package is missing.
    """

    def __init__(self, url: str) -> None:
        if _PATTERN.search(url):
            raise ValueError(
                f"{url!r} must have none of * ? [ ] {{ }}: fsspec takes them as a pattern."
            )
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(
                f"{url!r} needs fsspec, which is not installed: pip install 'tfpara[remote]'."
            ) from error
        self.url = url.rstrip("/")
        scheme, _, place = url.partition("://")
        if scheme in ("file", "local"):
            raise ValueError(f"{url!r} is of this machine: give its path, without {scheme}://.")
        if not scheme or not place.strip("/"):
            raise ValueError(f"{url!r} must be a URL such as s3://bucket/path.")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(
                f"{url!r} needs fsspec's package for {scheme}://, which is not installed: {error}."
            ) from error
        except ValueError as error:
            raise ValueError(f"{url!r} is no URL that fsspec knows: {error}.") from error
        self._root = root.rstrip("/")
        self.creates_in_one_step = True  # becomes False if fsspec refuses mode="create"

    def place(self, name: str) -> str:
        """Returns the URL of a file."""
        return f"{self.url}/{name}" if name else self.url

    def exists(self) -> bool:
        """Returns whether there is anything at the URL, a file or a folder."""

        def found() -> bool:
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._root))

        return self._tried(found, "")

    def sizes(self, below: str = "") -> dict[str, int]:
        """Returns the size in bytes of each file below a folder, by name."""

        def found() -> dict[str, int]:
            self._fs.invalidate_cache()
            folder, start = f"{self._root}/{below}".rstrip("/"), f"{self._root}/"
            entries = self._fs.find(folder, detail=True)
            return {
                path.removeprefix(start): int(entry["size"])
                for path, entry in entries.items()
                if path.startswith(start)
            }

        return self._tried(found, below)

    def size(self, name: str) -> int:
        """Returns the size of a file in bytes."""

        def found() -> int:
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(name))["size"])

        return self._tried(found, name)

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""
        return self._tried(lambda: self._fs.cat_file(self._path(name)), name)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, over a former one."""
        self._tried(lambda: self._fs.pipe_file(self._path(name), content), name, writes=True)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless there is one; returns whether the file has this content now.

        If the store cannot do this in one step, two processes may write at the same time.
        """

        def written() -> bool:
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError, ValueError):
                self.creates_in_one_step = False
                self._fs.invalidate_cache()
                if self._fs.exists(self._path(name)):
                    return False
                self._fs.pipe_file(self._path(name), content)
            return True

        # `written` also returns False if an earlier try has written the file, but the store's
        # answer was lost. So the content is compared.
        return self._tried(written, name, writes=True) or self.read(name) == content

    def upload(self, path: Path, name: str) -> None:
        """Writes a file with the content of a local file."""
        self._tried(lambda: self._fs.put_file(os.fspath(path), self._path(name)), name, writes=True)

    def download(self, name: str, path: Path) -> None:
        """Writes a local file with the content of a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = f"{path}.partial"
        self._tried(lambda: self._fs.get_file(self._path(name), scratch), name)
        os.replace(scratch, path)

    def remove(self, names: Iterable[str]) -> None:
        """Removes those of the files that are there."""
        paths = [self._path(name) for name in names]
        if paths:
            with contextlib.suppress(FileNotFoundError):
                self._tried(lambda: self._fs.rm(paths), "")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, action: Callable[[], _Result], name: str, writes: bool = False) -> _Result:
        """Calls an action, again if its error may be temporary; such errors name the URL."""
        for wait in (*_WAITS, None):
            try:
                return action()
            except Exception as error:  # each store's library may have its own kinds of errors
                if wait is None or _is_final(error):
                    raise _explained(error, self.place(name), writes) from error
                time.sleep(wait)
        raise AssertionError("the last turn returns or raises")


def _is_final(error: Exception) -> bool:
    known = isinstance(error, _FINAL) or getattr(error, "errno", None) in _FINAL_NUMBERS
    return known or _is_of_credentials(error) or "Validation" in type(error).__name__


def _is_of_credentials(error: Exception) -> bool:
    return "credential" in type(error).__name__.lower()


def _explained(error: Exception, url: str, writes: bool) -> OSError:
    said = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
    scheme = url.split("://", 1)[0]
    if _is_of_credentials(error):
        number = errno.EACCES
        said = f"{said}: set the credentials for {scheme}:// as its clients expect them"
    elif isinstance(error, PermissionError):
        number = errno.EACCES
        said = f"{said}: the account must be allowed to list, read, write and delete there"
    elif isinstance(error, FileNotFoundError):
        number = errno.ENOENT
        if not writes:
            return FileNotFoundError(number, said, url)
        said = f"{said}: make the bucket first, for none is made here"
    elif _is_final(error):
        number = getattr(error, "errno", None) or errno.EINVAL
    else:
        number, said = errno.EIO, f"{len(_WAITS) + 1} tries have failed: {said}"
    return RefusedError(number, said, url)


def whole(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Path]:
    """Yields a local path for a file or folder, which appears at `path` if the block succeeds."""
    return _uploaded(os.fspath(path)) if is_url(path) else files.whole(path)


def parent(url: str) -> tuple[RemoteFolder, str]:
    """Returns the folder in which a URL has a file or folder, and the name in it.

    Raises ValueError for a URL that cannot be used, and for one without a name, as s3://bucket.
    """
    place, _, name = url.rstrip("/").rpartition("/")
    is_bare = place.endswith(":/")
    folder = RemoteFolder(url if is_bare else place)
    if is_bare:
        raise ValueError(f"{url!r} names no file or folder in {name!r}: give a longer URL.")
    return folder, name


@contextlib.contextmanager
def _uploaded(url: str) -> Iterator[Path]:
    folder, name = parent(url)
    with temporary_folder() as scratch:
        yield scratch / name
        written = [path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file()]
        written.sort(key=lambda p: (-len(p.parts), str(p) == name, p.suffix == ".json"))
        # The former files directly in a folder, such as a SavedModel, are removed first, and their
        # new versions uploaded last. So a reader finds the new model or none.
        if (scratch / name).is_dir():
            former = folder.sizes(name)
            folder.remove(path for path in former if path.count("/") == 1)
        for path in written:
            folder.upload(scratch / path, path.as_posix())


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields an empty local folder, in TMPDIR or /tmp, which is removed at the end of the block.

    Each call also removes the folders of killed processes. A living process is known by a lock on
    its folder, not by its number, since containers that share TMPDIR may have equal numbers.
    """
    _clear_up()
    made = Path(tempfile.mkdtemp(prefix="tfpara-"))
    path = made.with_name(f"{_TEMPORARY}{made.name.removeprefix('tfpara-')}")
    handle = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Other processes remove unlocked folders whose names begin with `_TEMPORARY`. So the folder
        # is locked before it gets such a name.
        made.rename(path)
        yield path
    finally:
        files.cleared(path)
        os.close(handle)


def _clear_up() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid != os.getuid():
                continue
            handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)
