"""Files and folders that appear whole or not at all; no TensorFlow.

A writer gets a scratch folder beside the final path. When the writer is done, the content of the
folder is moved to that path; readers see the former content until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

# The names of files and folders that Keras and TensorFlow write for a saved model.
_OF_A_MODEL = {
    *("saved_model.pb", "saved_model.pbtxt", "keras_metadata.pb", "fingerprint.pb"),
    *("variables", "assets", "assets.extra", "debug"),
    *("config.json", "metadata.json", "model.weights.h5"),
}
# This folder in the scratch folder keeps the old content until the new content is in its place.
_FORMERS = ".formers"
_IRREGULAR = "it is a FIFO or a device, and no regular file"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants for Linux's system call renameat2


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path to write a file or folder to; it appears at `path` when the block has ended.

    If the block raises, `path` stays as it was. Other files that the block writes beside the
    yielded path are moved, too, before `path`. Where the system can swap two folders (Linux on
    local disks), a new folder replaces a former one in one step. Elsewhere, and with several files,
    there is a moment without `path`, so that no reader finds new files beside a former one. If the
    process is killed in that moment, the next call puts the former content back. Missing parent
    folders are made. A FIFO or a device at `path` is refused.
    """
    path = Path(os.path.realpath(path))
    # A rename would replace a device, such as /dev/null, by a plain file, for all programs of the
    # machine. So devices and FIFOs are refused.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, _IRREGULAR, os.fspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(path)
    scratch = path.with_name(f"{_prefix(path)}{os.getpid()}.partial")
    scratch.mkdir()
    try:
        with naming(path):
            yield scratch / path.name
        # A .json file may list other files. It is moved after them, so that a reader who finds the
        # list also finds the files. The file or folder for `path` is moved last.
        entries = sorted(
            scratch.iterdir(), key=lambda e: (e.name == path.name, e.suffix == ".json")
        )
        for entry in entries:
            for written in [*entry.rglob("*"), entry]:
                sync_to_disk(written)
        places = [path.with_name(entry.name) for entry in entries]
        if not (len(entries) == 1 and _replaced(entries[0], places[0])):
            _take_away([path, *places], scratch / _FORMERS)
            for entry, place in zip(entries, places, strict=True):
                os.rename(entry, place)
        sync_to_disk(path.parent)
    finally:
        _put_back(path, scratch)
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """A context for writing a file: an OSError without a name, as of a full disk, gets its name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def foreign_entries(names: Iterable[str]) -> list[str]:
    """Returns those names of a folder's content that belong to no saved model."""
    return sorted({*names} - _OF_A_MODEL)


def holds_a_model_alone(folder: Path) -> bool:
    """Returns whether a folder has a saved model and nothing else, and is no mount point."""
    names = os.listdir(folder)
    return bool(names) and not foreign_entries(names) and not os.path.ismount(folder)


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file; to be given to Python's `open` as `opener`. Refuses a FIFO or a device.

    To open a FIFO would wait for its other end, and a device may have no end.
    """
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, _IRREGULAR, path)


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file as `regular` does, but refuses a symbolic link, which could lead anywhere.

    Use it for names that the user has not given, in folders that others may write to.
    """
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a symbolic link", path)
    return regular(path, flags | os.O_NOFOLLOW)


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file, but not to a link, by one call of the system; makes a missing file."""
    with naming(path), open(path, "ab", buffering=0, opener=no_link) as file:
        file.write(f"{line}\n".encode())


def cleared(path: Path) -> None:
    """Removes a folder, a file or a link, as far as the system lets it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_to_disk(path: Path) -> None:
    """Has the system write a file, or the names in a folder, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replaced(new: Path, place: Path) -> bool:
    """Moves a new file or folder to its place in one step; returns False if it cannot."""
    if new.is_dir() and place.is_dir():
        return _exchange(new, place)
    os.replace(new, place)
    return True


def _take_away(places: Iterable[Path], formers: Path) -> None:
    """Moves the former files to the scratch folder, in this order."""
    formers.mkdir()
    for place in places:
        if place.exists():
            os.rename(place, formers / place.name)


def _put_back(path: Path, scratch: Path) -> None:
    """Moves the former files back, the one at `path` last, unless a new file is at `path`."""
    formers = scratch / _FORMERS
    if path.exists() or not formers.exists():
        return
    for former in sorted(formers.iterdir(), key=lambda former: former.name == path.name):
        os.replace(former, path.with_name(former.name))


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one step; returns False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return renameat2(*paths, _RENAME_EXCHANGE) == 0


def _clear_up(path: Path) -> None:
    """Removes the scratch folders of processes that were killed while they wrote `path`.

    Only processes of this machine count. Former content that they had moved away is put back.
    """
    for left in path.parent.glob(f"{glob.escape(_prefix(path))}*.partial"):
        number = left.name.removeprefix(_prefix(path)).removesuffix(".partial")
        if not number.isdigit() or _runs_beside(int(number)):
            continue
        _put_back(path, left)
        shutil.rmtree(left, ignore_errors=True)


def _runs_beside(process: int) -> bool:
    """Returns whether another process than this one has this number."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _prefix(path: Path) -> str:
    return f".{path.name}.{socket.gethostname()}."
