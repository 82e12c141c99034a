"""A lock that several threads may hold together, or one thread alone."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator

# If no thread has given its share back for so long, those that wait for a share get one: a thread
# that shares the lock may wait for one of them.
_STALLED_SECONDS = 0.25
_log = logging.getLogger(__name__)


class SharedLock:
    """A lock that several threads hold in shared mode, or one thread in exclusive mode.

    A thread that waits for the exclusive mode goes before threads that want to share the lock. All
    waits have an end, after which a thread goes on without the lock: a thread that reads data may
    take long, or may never return.

    Args:
        patience_seconds: longest wait for the exclusive mode.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._changed = threading.Condition(threading.Lock())
        self._sharing = 0  # number of threads that hold the lock in shared mode
        self._closed = False  # whether a thread has, or waits for, the exclusive mode
        self._owner = 0  # the thread that has the exclusive mode, or waits for it
        self._own = threading.local()  # `depth`: how often this thread shares the lock

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which this thread shares the lock."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0 and self._owner != threading.get_ident():
            # Nothing is created while the condition is held. Otherwise Python might collect garbage
            # there, and with it an iterator whose end waits for another thread in this method.
            until = time.monotonic() + 2.0 * self._patience
            with self._changed:
                while self._closed and time.monotonic() < until:
                    self._changed.wait(0.1)
                self._sharing += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if depth == 0 and self._owner != threading.get_ident():
                with self._changed:
                    self._sharing -= 1
                    if self._closed:
                        self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which no other thread holds the lock."""
        # The garbage may have an iterator over data, whose end waits for threads that now wait.
        collects = gc.isenabled()
        gc.disable()
        self._owner = threading.get_ident()
        try:
            left = self._wait_for_the_others()
            if left:
                _log.warning(
                    "tfpara: members change while %d threads of this process have read data for "
                    "more than %g seconds. If such a thread calls TensorFlow, the process may "
                    "crash.",
                    left,
                    self._patience,
                )
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
            self._owner = 0
            if collects:
                gc.enable()

    def _wait_for_the_others(self) -> int:
        """Waits until no thread shares the lock; returns how many still do when patience ends."""
        until = time.monotonic() + self._patience
        with self._changed:
            while True:
                self._closed = True
                before, stalled = self._sharing, time.monotonic() + _STALLED_SECONDS
                while self._sharing == before and time.monotonic() < stalled:
                    if not self._sharing:
                        return 0
                    self._changed.wait(_STALLED_SECONDS)
                if time.monotonic() > until:
                    return self._sharing
                if self._sharing >= before:
                    self._closed = False
                    self._changed.notify_all()
                    self._changed.wait(0.01)
