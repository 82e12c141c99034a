"""Signals that the launcher passes on, and the process that ends the workers if it is killed."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ADD, REMOVE = signal.SIGUSR1, signal.SIGUSR2  # a worker, while an elastic run goes on
# The program of the guardian. It reads the number of each worker's process group at the worker's
# start and again at its end. When the launcher ends, for whatever reason, it kills the groups of
# workers that have not ended.
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
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextlib.contextmanager
def signals_to(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Puts signals that arrive inside into a queue.

    Signals that are ignored, as under nohup, stay ignored, also by the workers.

    Args:
        events: the queue.
    """
    numbers = (*_SIGNALS, ADD, REMOVE)
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    former = {
        number: signal.signal(number, lambda received, _: events.put(received))
        for number in handled
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def guardian() -> Iterator[Callable[[int], None]]:
    """Starts the guardian, a process that ends the workers if the launcher is killed.

    Yields a function for the number of a worker's process group, to be called at the worker's start
    and at its end.
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
