"""A worker's progress, for its launcher, the meeting point of an elastic run, and the live page."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpara import cluster
from tfpara.cluster import parent
from tfpara.cluster.status_board import Row
from tfpara.fit_call import number_of
from tfpara.status.run import RunStatus
from tfpara.status.server import StatusServer
from tfpara.sync.start_line import say
from tfpara.whole_number import checked_whole

_EVERY_SECONDS = 1.0
# The progress of the strategy that was made last. Only this strategy's progress is reported.
_latest: Progress | None = None


class Progress:
    """The progress of this worker, which a thread reports each second, from counts on the host."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._scores: dict[str, float] = {}
        self._stop = threading.Event()
        self._asking = threading.Lock()
        self._asked_at = 0.0

    def begin(self, status_port: int | None) -> None:
        """Begins to report; given a port, the chief serves the live page. May raise StatusError."""
        global _latest
        _latest = self
        if status_port is not None and self._strategy.is_chief:
            shows = "all workers" if self._strategy.num_workers > 1 else "the only worker"
            self._run = RunStatus(shows)
            server = StatusServer(status_port, self._of_all, f"status_port={status_port}")
            say(f"live page: {server.url}")
        if parent.unread() is not None or self._strategy.company.changes:
            thread = threading.Thread(target=self._report, name="tfpara-progress", daemon=True)
            thread.start()
            # The thread must not call TensorFlow while the interpreter shuts down. `atexit` calls
            # functions in reverse order, so the thread is told to stop before it is joined.
            atexit.register(thread.join)
            atexit.register(self._stop.set)

    def epoch_ends(self, epoch: int, history: Mapping[str, Sequence[Any]]) -> None:
        """Notes the log of the last epoch, number `epoch` from 0, and reports it."""
        numbers = {name: number_of(values[-1]) for name, values in history.items() if values}
        self._scores = {"epoch": epoch + 1.0}
        self._scores |= {name: float(n) for name, n in numbers.items() if n is not None}
        self.report()

    def report(self, last: bool = False) -> None:
        """Reports to the launcher, if there is one, and in an elastic run to the meeting point."""
        if self is not _latest:
            return
        unread, company = parent.unread(), self._strategy.company
        # The launcher gets a new report only after it has read all earlier ones, or the last one.
        tells = unread is not None and (last or not unread)
        if tells:
            parent.tell_progress(self.told())
        if company.changes:
            company.report(self._waits(), self._strategy.extended.waits.where())

    def told(self) -> dict[str, Any]:
        """Returns the progress, as `tfpara.status.run` describes it."""
        extended = self._strategy.extended
        place = extended.call_site
        with self._strategy.company.steady(), tf.device("CPU:0"):
            counts = extended.models.statistics()._asdict()
        return {
            "at": time.monotonic(),
            "rank": extended.worker.rank,
            "devices": [name.split("device:")[-1] for name in extended.worker_devices],
            "place": extended.waits.where(),
            "trains": counts["steps"] > 0 and not place.is_before_epochs,
            "joins": self._strategy.company.joining,
            "waits": self._waits(),
            **counts,
            "scores": self._scores,
        }

    def _waits(self) -> float:
        """Returns for how many seconds this worker has waited for others."""
        since = self._strategy.extended.waits.since()
        return time.monotonic() - since if since else 0.0

    def _report(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.report()

    def _of_all(self) -> dict[str, Any]:
        """Returns the status of all workers, which are asked at most once a second."""
        with self._asking:
            if time.monotonic() - self._asked_at > _EVERY_SECONDS:
                table = self._strategy.extended.waits.table() or [Row("", progress=self.told())]
                for rank, row in enumerate(table):
                    self._run.told(cluster.label(rank), row.progress)
                self._asked_at = time.monotonic()
            return self._run.now()


def checked_port(status_port: object, is_elastic: bool) -> int | None:
    """Returns `status_port`; ValueError: it is no port, or the run is elastic."""
    if status_port is None:
        return None
    if is_elastic:
        raise ValueError(
            f"status_port={status_port!r} with elastic=: the chief, which serves the page, may be "
            "lost. Leave it out, and start the workers by tfpara-launch --elastic --status_port=0."
        )
    port = checked_whole("status_port", status_port, at_least=0)
    if port > 65535:
        raise ValueError(f"status_port={port} is above 65535, the largest number of a port.")
    return port
