"""The launcher's terminal, which shows lines of many workers and the progress bar of the chief."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from typing import BinaryIO

_COLOURS = (36, 33, 32, 35, 34, 31)
_ERASE_LINE = b"\r\x1b[K"
_LONGEST_LINE = 1 << 16  # at most so many bytes are held back until the end of their line comes


class Console:
    """Writes whole lines to the streams `out` and `err`, and keeps a progress bar below intact.

    `prefix`: whether each line starts with the name of its worker.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO, prefix: bool = True) -> None:
        self._out, self._err, self._prefix = out, err, prefix
        self._lock = threading.Lock()
        self._bar = b""  # the unfinished line (a progress bar) on the screen, with its prefix

    def line(self, rank: int, name: str, text: bytes, to_stderr: bool) -> None:
        """Writes one line above the progress bar; raises OSError if the stream is closed."""
        stream = self._err if to_stderr else self._out
        with self._lock:
            if self._bar:
                self._write(self._out, _ERASE_LINE)
            self._write(stream, self._label(rank, name, stream) + text + b"\n")
            self._write(self._out, self._bar)

    def progress(self, rank: int, name: str, text: bytes) -> None:
        """Passes on terminal output as it comes, with a prefix after each carriage return.

        Raises OSError if stdout is closed.
        """
        with self._lock:
            for part in re.split(rb"([\r\n])", text):
                if part in (b"\r", b"\n"):
                    self._bar = b""
                elif part and not self._bar:
                    part = self._label(rank, name, self._out) + part
                self._bar += part.strip(b"\r\n")
                self._write(self._out, part)

    def _label(self, rank: int, name: str, stream: BinaryIO) -> bytes:
        if not self._prefix:
            return b""
        label = f"[{name}]"
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if stream.isatty() and not plain:
            label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        return label.encode() + b" "

    @staticmethod
    def _write(stream: BinaryIO, text: bytes) -> None:
        if text:
            stream.write(text)
            stream.flush()


def read_chunks(descriptor: int, log: BinaryIO | None) -> Iterator[bytes]:
    """Yields the bytes from a pipe or terminal until its end, copying them to `log`."""
    while True:
        try:
            chunk = os.read(descriptor, 1 << 16)
        except OSError:  # a pseudo-terminal that no process writes to any more
            return
        if not chunk:
            return
        if log is not None and not log.closed:
            log.write(chunk)
        yield chunk


def read_lines(descriptor: int, log: BinaryIO | None) -> Iterator[bytes]:
    """Yields lines without newlines; of a line with carriage returns, the text after the last."""
    pending = b""
    for chunk in read_chunks(descriptor, log):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from map(_last_state, lines)
        if len(pending) > _LONGEST_LINE:
            yield _last_state(pending)
            pending = b""
    if pending:
        yield _last_state(pending)


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def open_terminal(columns_used: int) -> tuple[int, int]:
    """Opens a pseudo-terminal as wide as stdout less `columns_used`; returns (reader, writer)."""
    reader, writer = pty.openpty()
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # leaves "\n" unchanged; the user's terminal translates it
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(1)
        rows_columns = struct.pack("HHHH", size.lines, max(20, size.columns - columns_used), 0, 0)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, rows_columns)
    return reader, writer
