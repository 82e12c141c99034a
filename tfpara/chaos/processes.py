"""The processes of a run, as /proc lists them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tfpara.elastic.meeting import NAME

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Worker(NamedTuple):
    """A process that a launcher has started: its id, and its name in messages."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


class Size(NamedTuple):
    """The resources of a process: bytes of memory, open descriptors, threads."""

    bytes: int
    descriptors: int
    threads: int


def tree(root: int) -> Iterator[int]:
    """Yields a process and all its descendants."""
    yield root
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{root}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{root}/task/{task}/children").read_text().split():
                    yield from tree(int(child))


def workers(root: int) -> list[Worker]:
    """Returns the running processes that the launcher `root` has started."""
    found = []
    for pid in tree(root):
        named = _name(pid)
        if named and not has_ended(pid):
            found.append(Worker(pid, named))
    # A worker's children inherit its environment, and with it the worker's name. Of the processes
    # with the same name, the first is kept. It is the worker, because `tree` yields a process
    # before its children.
    return list({worker.name: worker for worker in reversed(found)}.values())[::-1]


def state(pid: int) -> str:
    """Returns the letter of a process's state ("T": stopped), "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def has_ended(pid: int) -> bool:
    """Returns whether a process is gone, or waits to be reaped."""
    return state(pid) in ("", "Z", "X")


def size(pid: int) -> Size | None:
    """Returns the resources of a process now; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        if not pages:  # the process has just ended
            return None
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return Size(pages * _PAGE, descriptors, len(os.listdir(f"/proc/{pid}/task")))
    except (OSError, IndexError):
        return None


def _name(pid: int) -> str:
    """Returns the name that a launcher gave a process; "" if no launcher has started it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(f"{NAME}=".encode()):
                return line.partition(b"=")[2].decode(errors="replace")
    return ""
