"""A lock that several threads may hold together, or one thread alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class SharedLock:
    """A lock that several threads hold in shared mode, or one thread in exclusive mode.

    A thread that waits for the exclusive mode goes before threads that want to share the lock. A
    thread that shares the lock may share it once more, but must not ask for the exclusive mode.

    Args:
        patience_seconds: longest wait for the exclusive mode; after it the thread goes on although
            others still share the lock.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._changed = threading.Condition()
        self._sharing = 0  # number of threads that hold the lock in shared mode
        self._wanted = False  # whether a thread waits for the exclusive mode
        self._own = threading.local()  # `depth`: how often this thread holds the lock

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which this thread shares the lock."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._wanted)
                self._sharing += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if depth == 0:
                with self._changed:
                    self._sharing -= 1
                    self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which no other thread holds the lock."""
        with self._changed:
            self._wanted = True
            try:
                self._changed.wait_for(lambda: not self._sharing, self._patience)
                yield  # the condition's own lock keeps the others out
            finally:
                self._wanted = False
                self._changed.notify_all()
