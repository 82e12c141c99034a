"""Reads Kaldi's archives: matrices of features, vectors of labels; binary, compressed or text.

Binary objects are decoded by kaldiio. Its general functions (`load_mat`, `load_ark`, `read_kaldi`)
run commands and load pickles if a file has them, so they are not used. The type of each object is
read here, and then kaldiio's function for that type is called. Text is parsed here, because kaldiio
takes a matrix for integers if its first number has no decimal point. One object is in memory at a
time.
"""

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from input import kaldi_tables, packages
from input.kaldi_tables import Location
from input.records import CorpusError
from tfpara.files import regular

_MAX_KEY = 1000  # bytes; a longer word does not count as a key
_BINARY = b"\0B"
# In a binary object, the name of its type follows `_BINARY`. kaldiio reads objects of these types.
_FLOATS = (b"FM ", b"FV ", b"DM ", b"DV ", b"CM ", b"CM2 ", b"CM3 ")
_INTEGERS = np.dtype([("size", "u1"), ("value", "<i4")])  # a number: its size, then its value
_MAX_LINE = 1 << 26  # bytes; a longer line counts as damaged
_WHITE = b" \t\r\n"
_OVERSHOOT = 3  # a range may exceed the matrix by this many rows, as in Kaldi (length_tolerance)
_DAMAGE = (ValueError, AssertionError, struct.error, IndexError, TypeError, UnicodeDecodeError)


class Item(NamedTuple):
    """An object of an archive."""

    key: str
    # Bytes from the start of the file to the object's value. (The value comes after the key.) An
    # scp file states the same number for the object.
    offset: int
    value: np.ndarray


def read_matrix(location: Location, dtype: type = np.float32) -> np.ndarray:
    """Reads the matrix that an scp line names: `dtype` [rows, columns].

    Raises:
      FileNotFoundError: there is no such file.
      CorpusError: the object is cut short or not a matrix, or the line's range is not in it. A
        range of rows may exceed the matrix by 3, as in Kaldi; the rows that exist are returned.
    """
    with _opened(location) as file:
        file.seek(location.offset)
        value = _read_value(file, str(location))
    if value.ndim != 2:
        raise CorpusError(f"{location}: a vector where a matrix is expected")
    _check_range(location, "rows", location.rows, len(value), _OVERSHOOT)
    _check_range(location, "columns", location.columns, value.shape[1], 0)
    with np.errstate(all="ignore"):  # no warning if a number becomes Inf in float32
        return value[location.rows, location.columns].astype(dtype)


def read_archive(file: BinaryIO, path: str) -> Iterator[Item]:
    """Yields the objects of an archive as they follow each other, with keys in any order.

    Args:
      file: the open archive, from `open_files.Archives`.
      path: its name, for messages.

    Raises:
      CorpusError: the archive is damaged; the message names the file, the key and the byte offset
        (of the uncompressed archive).
    """
    file.seek(0)
    while (key := _read_key(file, path)) is not None:
        offset = file.tell()
        yield Item(key, offset, _read_value(file, f"{path}, utterance {key} at byte {offset}"))


def read_vector(file: BinaryIO, offset: int, where: str) -> np.ndarray:
    """Reads the vector of integers at `offset` of an archive: int32 [length].

    Raises:
      CorpusError: the object is damaged, or is no vector of integers.
    """
    file.seek(offset)
    return as_labels(_read_value(file, where), where)


def as_labels(value: np.ndarray, where: str) -> np.ndarray:
    """Returns `value` as int32 [length].

    Raises:
      CorpusError: `value` is no vector of integers, or is empty.
    """
    if value.size == 0:
        raise CorpusError(f"{where}: no labels at all")
    if value.ndim != 1 or not np.array_equal(value, np.rint(value)) or np.abs(value).max() >= 2**31:
        raise CorpusError(
            f"{where}: a vector of integers is expected, such as ali-to-pdf writes. Received:"
            f" {value.dtype} {list(value.shape)}"
        )
    return value.astype(np.int32)


@contextmanager
def _opened(location: Location) -> Iterator[BinaryIO]:
    if location.pipe:
        yield io.BytesIO(kaldi_tables.run_pipe(location))
    else:
        try:
            with open(location.path, "rb", opener=regular) as file:
                yield file
        except (FileNotFoundError, IsADirectoryError) as error:
            raise FileNotFoundError(
                f"{location.where}: {location.path} is not a file. As in Kaldi, paths in scp files"
                " are taken from the current directory. If these begin elsewhere, start the program"
                " there, with PYTHONPATH set to tfpara's checkout"
            ) from error
        except OSError as error:
            raise CorpusError(
                f"{location.where}: {location.path[:80]} cannot be read ({error.strerror})"
            ) from error


def _check_range(location: Location, name: str, part: slice, size: int, overshoot: int) -> None:
    """Raises CorpusError unless the matrix, which has `size` rows or columns, has this part."""
    first, stop = part.start or 0, size if part.stop is None else part.stop
    if part != slice(None) and not (first < size and stop <= size + overshoot):
        asked = f"{first} to {stop - 1}" if stop > first else f"{first} and more"
        raise CorpusError(
            f"{location}: bad range: the line asks for {name} {asked}, and the matrix has {size}."
            " Correct the line, or make the archive again"
        )


def _read_key(file: BinaryIO, path: str) -> str | None:
    """Reads the key before the next object; returns None at the end of the archive."""
    start = file.tell()
    key = bytearray()
    while (byte := file.read(1)) and byte not in _WHITE:
        key += byte
        if len(key) > _MAX_KEY:
            break
    if not byte and not key:
        return None
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if byte in (b"", b"\n") or not kaldi_tables.is_key(text) or len(key) > _MAX_KEY:
        raise CorpusError(
            f"{path}, byte {start}: {bytes(key[:20])!r} is not the key of an object that follows;"
            " the archive is damaged, or no archive"
        )
    return text


def _read_value(file: BinaryIO, where: str) -> np.ndarray:
    """Reads the object that starts at the file's position."""
    matio = _matio()
    start = file.tell()
    head = file.read(8)
    file.seek(start)
    if head.removeprefix(_BINARY).startswith(b"<Nnet3"):  # such as <Nnet3Eg> or <Nnet3ChainEg>
        raise CorpusError(
            f"{where}: these are examples for nnet3 (egs), which are not read. Give the features"
            " and alignments that they were made of"
        )
    try:
        if head[:2] != _BINARY:
            return _read_text(file)
        if head[2:3] == b"\4":
            return _read_integers(_Whole(file))
        if not head[2:].startswith(_FLOATS):
            raise ValueError(f"unknown type {head[2:6]!r}")
        with np.errstate(all="ignore"):  # no warning: a damaged header can give NaN or Inf
            value = matio.read_matrix_or_vector(_Whole(file))
        if len(value) and not value.size:
            raise ValueError(f"a matrix of {value.shape[0]} rows and {value.shape[1]} columns")
        return value
    except _Short as error:
        raise CorpusError(
            f"{where}: the archive is cut short: the object goes on for {error} bytes after its end"
        ) from error
    except _DAMAGE as error:
        cut = file.read(1) == b""
        what = "the archive is cut short there" if cut else "the archive is damaged there"
        why = f" ({error})" if str(error) else ""
        raise CorpusError(f"{where}: {what}, or it is no archive of numbers{why}") from error


def _read_integers(file: "_Whole") -> np.ndarray:
    """Reads a vector of integers: its length, then each number after its size in bytes."""
    length = np.frombuffer(file.read(7)[2:], _INTEGERS)
    found = np.frombuffer(file.read(_INTEGERS.itemsize * int(length["value"][0])), _INTEGERS)
    if (length["size"] != 4).any() or (found["size"] != 4).any():
        raise ValueError("its numbers are not of 4 bytes")
    return found["value"].astype(np.int32)


def _read_text(file: BinaryIO) -> np.ndarray:
    """Reads a vector, which is a line, or a matrix between brackets, with one row on each line."""
    text = file.readline(_MAX_LINE)
    if b"[" not in text:
        if not text.endswith(b"\n"):
            raise ValueError("the last line does not end with a newline, as it does in Kaldi")
        return np.array(_numbers(text))
    lines = [text.replace(b"[", b" ", 1)]
    while b"]" not in lines[-1]:
        lines.append(file.readline(_MAX_LINE))
        if not lines[-1] or b"[" in lines[-1]:  # the file ends, or the next object begins
            raise ValueError("no closing bracket")
    lines[-1] = lines[-1].replace(b"]", b" ", 1)
    is_vector = len(lines) == 1
    rows = [_numbers(line) for line in lines if line.strip()]
    if not rows:
        return np.zeros((0, 0))
    numbers = np.array(rows)  # raises ValueError if rows differ in length
    return numbers[0] if is_vector else numbers


def _numbers(line: bytes) -> list[float]:
    # Python parses the words, because NumPy would first need an array of them. In such an array
    # each word takes as many bytes as the longest one, so one long word could fill the memory.
    if b"_" in line:  # float() allows _ in numbers, Kaldi does not
        raise ValueError("a number with _")
    return [float(word) for word in line.split()]


def _matio() -> Any:
    if not __debug__:
        raise ValueError(
            "kaldiio reads archives wrongly under python -O, which drops the assertions that it"
            " reads with. Run Python without -O and PYTHONOPTIMIZE"
        )
    return packages.load("kaldiio.matio")


class _Short(Exception):
    """Signals that a file ends too early; the message is the number of missing bytes."""


class _Whole:
    """A file whose `read` returns as many bytes as were asked for, or fails.

    kaldiio reads as many bytes as the header of a matrix says. If the header is damaged, that
    number may be more than the file has, or negative; then a plain `read` returns all of the rest.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        here = file.tell()
        self._end = file.seek(0, os.SEEK_END)
        file.seek(here)

    def read(self, size: int) -> bytes:
        if size < 0:
            raise ValueError(f"negative size {size}")
        missing = size - (self._end - self._file.tell())
        if missing > 0:
            raise _Short(str(missing))
        return self._file.read(size)
