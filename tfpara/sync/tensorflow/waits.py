"""Waits of this process for other workers: since when, for whom, and their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tfpara.cluster import Cluster, failures, whereabouts
from tfpara.cluster.place import Place, Purpose
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.topology import Topology
from tfpara.sync.workers.meetings import Control
from tfpara.sync.workers.watchdog import Watchdog

_log = logging.getLogger(__name__)


class Waits:
    """The waits of this process, in syncs and in exchanges that Python code calls.

    Args:
        found: the cluster.
        topology: the workers.
        place: the place of this process in its script.
        synchronizers: returns those of all trained models.
        overlap: whether syncs run beside the training.
        abort: ends the collectives under way, with a message.
    """

    def __init__(
        self,
        found: Cluster,
        topology: Topology,
        place: Place,
        synchronizers: Callable[[], Sequence[Synchronizer]],
        overlap: bool,
        abort: Callable[[str], None],
    ) -> None:
        self._found = found
        self._topology = topology
        self._place = place
        self._synchronizers = synchronizers
        self._overlap = overlap
        self._abort = abort
        self._whereabouts: whereabouts.Whereabouts | None = None

    def watch(self, timeout_seconds: float) -> None:
        """Starts the thread that reports long waits and ends those that last too long."""
        Watchdog(timeout_seconds, self.since, self._report, self._end)

    def connect(self, found: Cluster, control: Control, purpose: Purpose) -> None:
        """Connects the workers' whereabouts, for messages on waits; every worker must call it."""
        self._found = found
        self._whereabouts = whereabouts.begin(
            found,
            lambda port: control.together(purpose, port),
            lambda: whereabouts.Row(self._where(), self._exchanges()),
        )
        failures.ask(
            lambda: whereabouts.mute(self._table(), found),
            lambda: self._place.failed.advice if self._place.failed else "",
        )

    def since(self) -> float:
        """Returns when the present wait began, on the monotonic clock; 0 if there is none."""
        return max(
            self._place.began, *(s.graph.waiting_since() for s in self._synchronizers()), 0.0
        )

    def _where(self) -> str:
        text, line = self._place.text(False), whereabouts.line_of_script()
        return f"{text} [{line}]" if line else text

    def _exchanges(self) -> list[str]:
        """Returns the names of the exchanges in which this process waits."""
        names = [s.name for s in self._synchronizers() if s.graph.waiting_since()]
        return [*names, "meeting"] if self._place.began else names

    def _table(self) -> list[whereabouts.Row] | None:
        """Returns where all workers are in their scripts; None if it is not known."""
        return self._whereabouts.table() if self._whereabouts else None

    def _report(self, seconds: float) -> None:
        table = self._table()
        if table is None or not self.since():
            return
        _log.warning("%s", whereabouts.waiting_line(table, self._topology.rank, seconds))
        # Workers with a sync in flight may be in different exchanges without being apart.
        apart = "" if self._overlap else whereabouts.apart(table)
        if apart:
            self._abort(failures.note_apart(apart))

    def _end(self) -> None:
        self._abort(failures.note_silence(whereabouts.silent(self._table(), self._found)))
