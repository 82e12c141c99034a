"""Signals to the launcher, and a process that ends the workers if the launcher is killed."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ADD, REMOVE = signal.SIGUSR1, signal.SIGUSR2  # requests to add or remove a worker (elastic runs)
# The program of the guardian, a process that the launcher starts. The guardian reads the number of
# a worker's process group when the worker starts. When the worker ends, the guardian reads the
# number a second time and forgets the group. When the launcher has ended, for whatever reason, the
# guardian kills all groups that it has not forgotten.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


def name_of(number: int) -> str:
    """Returns a signal's name, such as "SIGTERM"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


@contextlib.contextmanager
def signals_to(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """A context in which signals are put into the queue `events`.

    Signals that are ignored, as under nohup, stay ignored, also by the workers. If a signal has
    come, all are ignored after the context: some schedulers repeat SIGTERM, and that must not
    change the exit code of a launcher that is about to end. SIGCHLD is not ignored any more: Linux
    would forget the exit codes of the workers.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        events.put(number)

    numbers = (*_SIGNALS, ADD, REMOVE)
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, note) for number in handled}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if received else handler)


@contextlib.contextmanager
def guardian() -> Iterator[Callable[[int], None]]:
    """A context with a guardian, a process that ends the workers if the launcher is killed.

    Yields a function that takes the number of a worker's process group, to be called when the
    worker starts and when it ends.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    ) as process:

        def tell(group: int) -> None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.write(b"%d\n" % group)

        yield tell
