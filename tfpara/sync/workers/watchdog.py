"""The watchdog: it reports for which worker a sync waits, and ends a sync that waits too long."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

# A wait is reported after so many seconds, and then each time that it has become twice as long.
_TELL_SECONDS = 10.0


class Watchdog:
    """A thread that looks now and then whether a sync has lasted too long.

    Args:
        timeout_seconds: the longest that a sync may last.
        waiting_since: returns when the present sync began, on the monotonic clock; 0 if there is
            none.
        tell: reports for whom the sync waits; it takes the seconds of waiting so far.
        abort: makes the sync fail.
    """

    def __init__(
        self,
        timeout_seconds: float,
        waiting_since: Callable[[], float],
        tell: Callable[[float], None],
        abort: Callable[[], None],
    ) -> None:
        self._timeout = timeout_seconds
        self._waiting_since = waiting_since
        self._tell = tell
        self._abort = abort
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfpara-watchdog", daemon=True)
        self._thread.start()
        # The thread must not call TensorFlow while the interpreter is taken down.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = 0.0  # the begin of the last sync that was ended
        seen, tell_after = 0.0, _TELL_SECONDS  # the begin of the present sync; its next report
        while not self._stop.wait(min(1.0, self._timeout / 10.0)):
            began = self._waiting_since()
            if began != seen:
                seen, tell_after = began, _TELL_SECONDS
            waited = time.monotonic() - began
            if not began or began == ended:
                continue
            if waited > self._timeout:
                ended = began
                self._abort()
            elif waited > tell_after:
                tell_after *= 2.0
                self._tell(waited)
