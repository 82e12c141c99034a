"""Requests to end the program while `fit` runs, by SIGTERM or a user's function."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from tfpara.cluster import parent
from tfpara.cluster.status_board import main_frame

_WATCH_SECONDS = 1.0
_log = logging.getLogger(__name__)
_LOOKS = 10  # the main thread is checked at least this many times within `patience_seconds`


class Termination:
    """Listens for SIGTERM on behalf of a callback, from `start` to `stop`.

    SIGTERM sets `asked`; the callback acts on that when all workers are at the same step.
    If the main thread is stuck in a TensorFlow call for `patience_seconds` after SIGTERM, the
    program ends at once with `exit_code`, which asks for a restart.

    `watcher` is called once a second, in a thread. A true result also sets `asked`.
    """

    def __init__(self, exit_code: int, watcher: Callable[[], bool] | None = None) -> None:
        self.asked = False
        self._exit_code, self.watcher = exit_code, watcher
        self._former: Callable[..., object] | int | None = None
        self._stopped = threading.Event()
        self._writer: socket.socket | None = None  # None while this object does not listen

    def start(self, patience_seconds: float) -> None:
        """Begins to listen. Signals are received only if the main thread calls this.

        `patience_seconds`: how long one TensorFlow call may last after SIGTERM.
        """
        self.stop()
        self._stopped = threading.Event()
        if self.watcher is not None:
            arguments = (self.watcher, self._stopped)
            threading.Thread(target=self._ask, args=arguments, daemon=True).start()
        if threading.current_thread() is not threading.main_thread():
            if self.watcher is None:
                _log.warning(
                    "tfpara: fit runs in a thread, where SIGTERM is not heard: it does what it "
                    "does without a Checkpoint. Give Checkpoint a termination_watcher, which is "
                    "asked in any thread, or call fit in the main thread."
                )
            return
        self._former = signal.signal(signal.SIGTERM, self._note)
        # While the main thread is inside TensorFlow, Python does not call the signal's handler. But
        # Python writes the signal's number to this socket at once, and the thread of `_watch` reads
        # the number.
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        watched = (reader, self._stopped, patience_seconds)
        threading.Thread(
            target=self._watch, args=watched, name="tfpara-sigterm", daemon=True
        ).start()

    def stop(self) -> None:
        """Stops listening and restores SIGTERM's former handler; call it in the thread of `start`.

        It may be called more than once.
        """
        self._stopped.set()
        if self._writer is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._former)
        present = signal.set_wakeup_fd(self._former_fd)
        # If other code has set another descriptor meanwhile, the other descriptor stays.
        if present != self._writer.fileno():
            signal.set_wakeup_fd(present)
        self._writer.close()  # ends `_watch` and its thread, since `recv` now returns b""
        self._writer = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _ask(self, watcher: Callable[[], bool], stopped: threading.Event) -> None:
        """Calls the watcher, once a second, until it returns true or `stopped` is set."""
        failed = False
        while not stopped.is_set() and not self.asked:
            try:
                if watcher() and not stopped.is_set():
                    self.asked = True
            except Exception as error:
                if not failed:
                    _log.warning("tfpara: termination_watcher fails (%s); asked again.", error)
                failed = True
            stopped.wait(_WATCH_SECONDS)

    def _watch(self, reader: socket.socket, stopped: threading.Event, patience: float) -> None:
        """Waits for SIGTERM, and then ends the program if the main thread is stuck."""
        with reader:
            while received := reader.recv(1):
                if self._former_fd >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._former_fd, received)
                if received[0] == signal.SIGTERM:
                    parent.tell(saves=True)
                    _end_if_stuck(stopped, patience, self._exit_code)


def _end_if_stuck(stopped: threading.Event, patience: float, exit_code: int) -> None:
    """Ends the program as soon as the main thread has been stuck for `patience` seconds."""
    seen: tuple[FrameType | None, int] | None = None
    since = time.monotonic()
    while not stopped.wait(min(1.0, patience / _LOOKS)):
        frame = main_frame()
        # As long as the main thread is stuck, each check finds the same frame and instruction.
        # `seen` keeps the frame object alive, so Python cannot use the object for another call.
        place = frame, frame.f_lasti if frame else 0
        if place != seen:
            seen, since = place, time.monotonic()
        elif time.monotonic() - since > patience:
            print(
                "tfpara: asked to end by SIGTERM, but a call of TensorFlow has not returned for "
                f"timeout_seconds={patience:g}: ends without a checkpoint, exit code "
                f"{exit_code}. Start the program again to go on from the last one.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(exit_code)
