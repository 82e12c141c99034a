"""The watchdog, which reports for which worker a sync waits, and ends waits that last too long."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

# The first report comes after a wait of this many seconds. Each time the wait has doubled, another
# report comes.
_TELL_SECONDS = 10.0


class Watchdog:
    """A thread that regularly checks whether a sync lasts too long.

    Args:
        timeout_seconds: longest duration of a sync.
        waiting_since: returns the time when the present sync began, on the monotonic clock; 0 if
            there is none.
        tell: reports for which workers the sync waits; its argument is the seconds so far.
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
        # The thread must not call TensorFlow while the interpreter shuts down.
        atexit.register(self.stop)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        # The time at which the sync began that this thread has aborted last; 0 if it has aborted
        # none.
        ended = 0.0
        # The time at which the present sync began, and the seconds of waiting after which this
        # thread next reports the wait.
        seen, tell_after = 0.0, _TELL_SECONDS
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
