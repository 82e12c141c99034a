"""Reports of a process to the launcher that has started it, over a separate pipe.

The launcher names the writing end of a pipe in TFPARA_LAUNCHER. The process writes lines of JSON:
``because`` (the names of the workers that caused its failure) with ``at`` (the time when it noticed
that, in seconds of `time.monotonic()`), ``saves`` (it was asked to end, and writes a checkpoint
first), and ``progress`` (see `tfpara.status.run`). The program's output is not read for these.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import termios
from collections.abc import Mapping

from tfpara.typing import Json

_VARIABLE = "TFPARA_LAUNCHER"
# This variable tells the runs of launchers apart. Each run has a value of its own. All processes of
# a run have the same value, also after a restart.
RUN_ID = "TFPARA_RUN_ID"
_LONGEST = 4096  # bytes of a line; a pipe takes a line of this length completely or not at all
_READ = 1 << 16


def variables(descriptor: int) -> dict[str, str]:
    """Returns the variable that tells a process which descriptor is the pipe's writing end."""
    return {_VARIABLE: f"{descriptor}:{os.fstat(descriptor).st_ino}"}


def tell(environ: Mapping[str, str] = os.environ, **said: object) -> bool:
    """Reports to the launcher, if there is one; never waits, never fails.

    Returns False if the report is too long, so that it was not sent.
    """
    line = json.dumps(said).encode() + b"\n"
    with contextlib.suppress(OSError, ValueError, OverflowError):
        if len(line) <= _LONGEST:
            os.write(_pipe(environ), line)
    return len(line) <= _LONGEST


def tell_progress(progress: Mapping[str, Json]) -> None:
    """Reports progress to the launcher; leaves out some of its scores if there are too many."""
    scores = list(progress.get("scores", {}).items())
    while not tell(progress={**progress, "scores": dict(scores)}) and scores:
        del scores[len(scores) // 2 :]


def is_there(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a launcher has started this process, whose output it then passes on."""
    return unread(environ) is not None


def unread(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of bytes that the launcher has yet to read; None without a launcher.

    A report that the next one makes obsolete, such as progress, is sent only when this is 0. So
    such reports leave room for others in the pipe while the launcher is stopped.
    """
    with contextlib.suppress(OSError, ValueError, OverflowError):
        return int.from_bytes(
            fcntl.ioctl(_pipe(environ), termios.FIONREAD, bytes(4)), sys.byteorder
        )
    return None


def _pipe(environ: Mapping[str, str]) -> int:
    """Returns the launcher's pipe; raises OSError, ValueError or OverflowError if there is none."""
    descriptor, _, pipe = environ.get(_VARIABLE, "").partition(":")
    # A child of this process inherits the variable. But in the child, the descriptor with this
    # number may be of another file, so the type and the inode of the file are compared.
    found = os.fstat(int(descriptor))
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != int(pipe):
        raise ValueError("another file")
    return int(descriptor)


class Reports:
    """The launcher's end of the pipe from one process."""

    def __init__(self) -> None:
        # The launcher closes `writer`, the descriptor of the writing end, once the process has
        # inherited it.
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self.writer, False)  # so that a process never waits for the launcher
        self._rest = b""
        self._said: dict[str, Json] = {}

    def read(self) -> dict[str, Json]:
        """Returns everything reported so far: the latest value of each key."""
        with contextlib.suppress(OSError):
            while chunk := os.read(self._reader, _READ):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError, RecursionError):
                        told = json.loads(line)
                        self._said |= told if isinstance(told, dict) else {}
                if len(self._rest) > _LONGEST:
                    self._rest = b""
        return self._said

    def close(self) -> None:
        """Reads what is left in the pipe, and closes this end."""
        self.read()
        os.close(self._reader)
