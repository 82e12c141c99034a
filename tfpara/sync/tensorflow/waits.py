"""Waits of this process for other workers: since when, for which workers, and until when."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from tfpara.cluster import Cluster, failures, status_board
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.tensorflow.links import START
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Json

# The first report comes after a wait of this many seconds. Each time the wait has doubled, another
# report comes.
_TELL_SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Waits:
    """The waits of this process, in syncs and in exchanges that Python code calls.

    Attributes:
        abort: ends the collectives under way, with a message; set before `watch`.
        progress: returns how far this process is, for the live page; set before `connect`.
    """

    found: Cluster
    worker: Worker
    overlap: bool
    synchronizers: Callable[[], Sequence[Synchronizer]] = tuple
    abort: Callable[[str], None] = dataclasses.field(init=False)
    progress: Callable[[], dict[str, Json]] = dict
    _status_board: status_board.StatusBoard | None = dataclasses.field(default=None, init=False)
    _stop: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)

    def watch(self, timeout_seconds: float) -> None:
        """Starts the watchdog, which reports long waits and ends those that last too long."""
        watch = functools.partial(self._watch, timeout_seconds)
        thread = threading.Thread(target=watch, name="tfpara-watchdog", daemon=True)
        thread.start()
        # The thread must not call TensorFlow while the interpreter shuts down. `atexit` calls
        # functions in reverse order, so the thread is told to stop before it is joined.
        atexit.register(thread.join)
        atexit.register(self._stop.set)

    def _watch(self, timeout_seconds: float) -> None:
        # The start time of the wait that this thread has ended last; 0 if it has ended none.
        ended = 0.0
        # `seen` is the time when the present wait began. When this wait has lasted `tell_after`
        # seconds, this thread reports it the next time.
        seen, tell_after = 0.0, _TELL_SECONDS
        while not self._stop.wait(min(1.0, timeout_seconds / 10.0)):
            began = self.since()
            if began != seen:
                seen, tell_after = began, _TELL_SECONDS
            waited = time.monotonic() - began
            if not began or began == ended:
                continue
            if waited > timeout_seconds:
                ended = began
                self._end()
            elif waited > tell_after:
                tell_after *= 2.0
                self._report(waited)

    def connect(self, found: Cluster) -> None:
        """Connects the workers' status boards, for messages on waits; every worker must call it."""
        self.found = found
        self._status_board = status_board.begin(
            found,
            lambda port: self.worker.control.together(START, port),
            lambda: status_board.Row(self.where(), self._exchanges(), self.progress()),
        )
        failures.ask(
            lambda: status_board.mute(self.table(), found),
            lambda: self.worker.call_site.failed.advice if self.worker.call_site.failed else "",
        )

    def since(self) -> float:
        """Returns when the longest present wait began, on the monotonic clock; 0: there is none."""
        with self.worker.company.steady():
            syncs = [synchronizer.graph.waiting_since() for synchronizer in self.synchronizers()]
        return min(filter(None, (self.worker.call_site.began, *syncs)), default=0.0)

    def where(self) -> str:
        text, line = self.worker.call_site.text(False), status_board.line_of_script()
        return f"{text} [{line}]" if line else text

    def _exchanges(self) -> list[str]:
        names = [s.name for s in self.synchronizers() if s.graph.waiting_since()]
        return [*names, "meeting"] if self.worker.call_site.began else names

    def table(self) -> list[status_board.Row] | None:
        """Returns the places of all workers in their scripts; None if they are not known."""
        return self._status_board.table() if self._status_board else None

    def _report(self, seconds: float) -> None:
        table = self.table()
        if table is None or not self.since():
            return
        _log.warning("%s", status_board.waiting_line(table, self.worker.rank, seconds))
        # With overlapped syncs, it is no error if workers wait in different exchanges.
        apart = "" if self.overlap else status_board.apart(table)
        if apart:
            self.abort(failures.note_apart(apart))

    def _end(self) -> None:
        self.abort(failures.note_silence(status_board.silent(self.table(), self.found)))
