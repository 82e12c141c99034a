"""Ends syncs in which another worker stays silent."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable


class Watchdog:
    """A thread that looks now and then whether a sync has lasted too long.

    Args:
        timeout_seconds: the longest that a sync may last.
        waiting_since: when the sync under way began, on the monotonic clock; 0 if none is.
        abort: makes the sync fail with a message.
    """

    def __init__(
        self,
        timeout_seconds: float,
        waiting_since: Callable[[], float],
        abort: Callable[[str], None],
    ) -> None:
        self._timeout = timeout_seconds
        self._waiting_since = waiting_since
        self._abort = abort
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfpara-watchdog", daemon=True)
        self._thread.start()
        # The thread must not look at TensorFlow while the interpreter is taken down.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = 0.0  # when that sync began which was ended last
        while not self._stop.wait(min(1.0, self._timeout / 10.0)):
            began = self._waiting_since()
            if began and began != ended and time.monotonic() - began > self._timeout:
                ended = began
                self._abort(
                    f"a sync lasted longer than timeout_seconds={self._timeout:g}; "
                    "another worker is silent"
                )
