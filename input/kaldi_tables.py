"""Reads Kaldi's text tables (`wav.scp`, `segments`, `utt2spk`, `feats.scp`) and parses their lines.

A table has a key and a value on each line, is sorted as `LC_ALL=C sort` does, and has no key twice.
Kaldi's own programs rely on this order, so a table without it is damaged. White space is that of
ASCII, as in Kaldi, so keys may have other characters such as a no-break space.
"""

import math
import re
import subprocess
from codecs import BOM_UTF8
from pathlib import Path
from typing import NamedTuple

from input.records import CorpusError

_RANGE = re.compile(r"([0-9]*):([0-9]*)(?:,([0-9]*):([0-9]*))?")
_CHANNEL = re.compile(r"[0-9]{1,4}")
_OFFSET = re.compile(r":([0-9]+)$")
_MAX_DIGITS = 18  # offsets are below 2^63, so a number with more digits is no offset
_NOT_IN_KEYS = re.compile(r"[\0-\x20\x7f]")  # white space and control characters of ASCII


class Location(NamedTuple):
    """The data that a line of an scp file names: in a file, or the output of a command."""

    path: str  # path of the file, or the command if `pipe` is true
    offset: int  # bytes from the start of the file to the data
    rows: slice
    columns: slice
    pipe: bool
    where: str  # where the scp file names it: file, line and key, for messages
    channel: int | None = None  # channel of a recording, from 0; None if the line names none

    def __str__(self) -> str:
        return f"{self.where} ({self.path}, byte {self.offset})"


class Segment(NamedTuple):
    """A part of a recording."""

    recording: str
    start: float  # seconds
    end: float | None  # seconds; None: the end of the recording
    channel: int | None = None  # channel of the recording, from 0; None if the line names none


def read(path: str | Path) -> dict[str, str]:
    """Reads a table: a dictionary from each key to the rest of its line, in order.

    Line n has the n-th key.

    Raises:
      FileNotFoundError: there is no such file.
      CorpusError: the table is empty or not UTF-8, a line has no value, or a key is out of order or
        there twice; the message names the line.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"table {path} does not exist")
    table: dict[str, str] = {}
    last = None
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                parts = line.removeprefix(BOM_UTF8).split(None, 1)  # as Windows writes it
                if len(parts) < 2 or line[:1].isspace():
                    raise CorpusError(
                        f"{path}, line {number}: a line must be a key and a value."
                        f" Received: {line.strip().decode()[:80]!r}"
                    )
                key, value = parts[0].decode(), parts[1].strip().decode()
                _check_order(f"{path}, line {number}", key, last)
                table[key] = value
                last = key
    except UnicodeDecodeError as error:
        raise CorpusError(f"table {path} is not UTF-8 text (after line {len(table)})") from error
    if not table:
        raise CorpusError(f"table {path} is empty")
    return table


def is_key(text: str) -> bool:
    """Returns whether an archive can have this key: a word without ASCII control characters."""
    return bool(text) and not _NOT_IN_KEYS.search(text)


def words(text: str) -> list[str]:
    """Returns the words of a text, between ASCII white space."""
    return [word.decode() for word in text.encode().split()]


def _check_order(where: str, key: str, last: str | None) -> None:
    """Raises CorpusError unless `key` comes after `last` in the order of `LC_ALL=C sort`."""
    if last is None or key > last:  # strings have the order of their UTF-8 bytes
        return
    if key == last:
        raise CorpusError(f"{where}: key {key} is there twice. Remove one of the two")
    raise CorpusError(
        f"{where}: key {key} comes after {last}, so keys are not sorted, or one is there twice."
        " Sort the file with LC_ALL=C sort (Kaldi: utils/fix_data_dir.sh)"
    )


def segments(path: str | Path) -> dict[str, Segment]:
    """Reads a `segments` table: the segment of each utterance.

    A line has the utterance, its recording, start and end in seconds, and the number of a channel,
    from 0, where the recording has several. An end of -1 is the end of the recording.

    Raises:
      FileNotFoundError, CorpusError: as `read`, and for times that are not a segment.
    """
    found = {}
    for number, (key, value) in enumerate(read(path).items(), 1):
        parts = words(value)
        try:
            recording, start, end = parts[0], float(parts[1]), float(parts[2])
            valid = len(parts) <= 4 and start >= 0 and (start < end or end == -1)
            valid = valid and math.isfinite(start) and math.isfinite(end)
            channel = _channel(parts[3]) if len(parts) == 4 else None
        except (ValueError, IndexError):
            valid = False
        if not valid:
            raise CorpusError(
                f"{path}, line {number}: utterance {key} must have a recording, a start and a later"
                " end in seconds (or -1), and may have a channel, a whole number from 0. Received:"
                f" {value[:80]!r}"
            )
        found[key] = Segment(recording, start, None if end == -1 else end, channel)
    return found


def _channel(text: str) -> int:
    if not _CHANNEL.fullmatch(text):
        raise ValueError(text)
    return int(text)


def locate(text: str, where: str, allow_pipes: bool) -> Location:
    """Parses the rest of an scp line: `FILE`, `FILE:OFFSET`, or `COMMAND |`.

    Each may be followed by [ROWS] or [ROWS,COLUMNS]. These are ranges first:last, which include
    both ends, as in Kaldi. An end that is left out is that of the matrix: [:,0:12] has all rows.

    Args:
      text: the line without its key.
      where: file, line and key, for messages.
      allow_pipes: whether a `COMMAND |` is accepted; a shell runs the command at each reading.

    Raises:
      CorpusError: the text is a pipe and these are not allowed, it names nothing to read, or its
        range is bad.
    """
    line = text.strip()
    if "\0" in line:
        raise CorpusError(f"{where}: {line[:80]!r} has a zero byte, which no path has")
    text, rows, columns = _without_range(line, where)
    if text.endswith("|") or text.startswith("|"):
        command = text.strip("| ")
        if not allow_pipes:
            raise CorpusError(
                f"{where}: {line!r} is a command. Reading it would run whatever the file says in a"
                " shell, with your rights. If you trust the file, add --allow_pipes; else decode"
                " its audio or copy its archive into files first"
            )
        if text.startswith("|") or not command:
            raise CorpusError(f"{where}: {line!r} is a pipe to write to; a table is read from")
        return Location(command, 0, rows, columns, True, where)
    offset = _OFFSET.search(text)
    path = text[: offset.start()] if offset else text
    if not path or path == "-":
        raise CorpusError(f"{where}: {line!r} is not a file. Name one")
    start = _whole_number(offset[1], "an offset", where) if offset else 0
    return Location(path, start, rows, columns, False, where)


def _whole_number(digits: str, what: str, where: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise CorpusError(
            f"{where}: {digits[:80]} is too large for {what}. Correct the line, or make the table"
            " again"
        )
    return int(digits)


def _without_range(text: str, where: str) -> tuple[str, slice, slice]:
    """Returns the text before `[...]`, and the rows and columns in it; all if there is none."""
    name, bracket, inner = text.rpartition("[")
    if not bracket or not text.endswith("]"):
        return text, slice(None), slice(None)
    found = _RANGE.fullmatch(inner[:-1])
    if not found:
        raise CorpusError(
            f"{where}: bad range [{inner} of {name!r}: it must be [FIRST:LAST] of rows, or"
            " [FIRST:LAST,FIRST:LAST] of rows and columns, whole numbers from 0"
        )
    ends = [_whole_number(end, "a range", where) if end else None for end in found.groups()]
    for first, last in (ends[:2], ends[2:]):
        if first is not None and last is not None and first > last:
            raise CorpusError(
                f"{where}: bad range [{inner} of {name!r}: {first} comes after {last}. Write the"
                " lower number first"
            )
    stops = [None if end is None else end + 1 for end in ends]
    return name.strip(), slice(ends[0], stops[1]), slice(ends[2], stops[3])


def run_pipe(location: Location) -> bytes:
    """Runs the command of a pipe in a shell, and returns its output.

    Raises:
      CorpusError: the command fails.
    """
    try:
        done = subprocess.run(location.path, shell=True, capture_output=True, check=False)
    except OSError as error:  # for example, the command is too long
        raise CorpusError(
            f"{location.where}: the command {location.path[:80]!r} cannot be run ({error.strerror})"
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise CorpusError(
            f"{location.where}: the command {location.path!r} ended with code {done.returncode}"
            + (f": {said[-1]}" if said else "")
        )
    return done.stdout
