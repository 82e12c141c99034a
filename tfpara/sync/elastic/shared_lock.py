"""A lock that several threads may hold together, or one thread alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from tfpara.contexts import no_garbage_collection

_POLL_SECONDS = 0.005
# If a thread has to wait longer than `_STALLED_SECONDS` for the exclusive mode, the lock opens for
# `_OPEN_SECONDS`. In this time, other threads that wait for a share can get one. After that the
# lock opens again and again, and each pause is twice as long as the one before. If the lock never
# opened, there could be a deadlock, because a thread that holds a share may wait for a thread that
# needs a share.
_STALLED_SECONDS = 0.25
_OPEN_SECONDS = 0.05
_log = logging.getLogger(__name__)


class SharedLock:
    """A lock that several threads hold in shared mode, or one thread in exclusive mode.

    A thread that waits for the exclusive mode goes before threads that want to share the lock. All
    waits have an end, after which a thread goes on without the lock, since a thread that reads data
    may never return: `patience_seconds` for the exclusive mode, twice as long for a share.
    """

    # A thread uses no lock of Python's `threading` to take or give back a share, because such a
    # lock could lead to a deadlock: while the thread holds it, Python's garbage collector may run
    # in the same thread, and delete an iterator over data. TensorFlow then waits until the
    # iterator's Python functions have returned. But these functions may themselves wait here for
    # the same lock.

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._sharing: set[int] = set()  # the threads that share the lock
        self._closed = False  # whether a thread has, or waits for, the exclusive mode
        self._owner = 0  # the id of the thread that has or awaits the exclusive mode; 0: none

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which this thread shares the lock."""
        me = threading.get_ident()
        counts = me not in self._sharing and self._owner != me
        if counts:
            self._come_in(me)
        try:
            yield
        finally:
            if counts:
                self._sharing.discard(me)

    def _come_in(self, me: int) -> None:
        until = time.monotonic() + 2.0 * self._patience
        while True:
            while self._closed and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            self._sharing.add(me)
            # Another thread may have closed the lock just before the share was added. Then this
            # thread takes the share back and waits again, unless it has waited long enough.
            if not self._closed or time.monotonic() >= until:
                return
            self._sharing.discard(me)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which no other thread holds the lock."""
        # The garbage collector might delete an iterator over data in this thread. The deletion
        # waits for the iterator's Python functions. If these waited for a share of this lock, there
        # would be a deadlock.
        with no_garbage_collection():
            try:
                self._owner = threading.get_ident()
                self._wait_for_the_others()
                yield
            finally:
                self._closed, self._owner = False, 0

    def _wait_for_the_others(self) -> None:
        """Waits until no thread shares the lock, or patience ends."""
        self._closed, now = True, time.monotonic()
        until, pause, opens = now + self._patience, _STALLED_SECONDS, now + _STALLED_SECONDS
        while self._sharing:
            if time.monotonic() > until:
                _log.warning(
                    "tfpara: members change while %d threads of this process have read data for "
                    "more than %g seconds. If such a thread calls TensorFlow, the process may "
                    "crash.",
                    len(self._sharing),
                    self._patience,
                )
                return
            if time.monotonic() > opens:
                self._closed = False
                time.sleep(_OPEN_SECONDS)
                self._closed = True
                pause *= 2.0
                opens = time.monotonic() + pause
            time.sleep(_POLL_SECONDS)
