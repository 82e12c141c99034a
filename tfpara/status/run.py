"""The status of a run, made of its workers' reports of progress. No TensorFlow is imported.

A worker reports once a second. Its report has the keys

- ``at``: time of the report, in seconds of `time.monotonic()`;
- ``rank``, ``devices``, ``place`` (in its script, in words);
- ``trains``: whether it has made steps, and is not at the beginning of `fit`, where a checkpoint
  may replace the counts;
- ``joins``: whether an elastic run has yet to admit this worker;
- ``waits``: length of its present wait for others, in seconds; 0 if it does not wait;
- the counts of `tfpara.SyncStatistics`;
- ``scores``: the logs of its last epoch, values by name.

An evaluator reports ``scores`` alone. Other keys, and values of other types, are left out.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpara.typing import Json

_WINDOW_SECONDS = 30.0  # speed and waiting are averaged over this time
_SILENT_SECONDS = 5.0  # a process without a report for so long counts as silent
_WAIT_SECONDS = 2.0  # shorter waits, such as those in each sync, are not shown
_NUMBERS = (
    *("at", "rank", "waits", "steps", "samples", "syncs", "sync_seconds", "wait_seconds"),
    *("distance", "bytes_sent", "left_out"),
)
# Limits of a report: at most `_MOST` scores, `_MOST` devices, and `_LONGEST` characters in each
# text.
_MOST, _LONGEST = 50, 200
_MOST_EVENTS = 1000


class Grown(NamedTuple):
    """Growth of a worker's counts in training: seconds passed, samples, and seconds of waiting."""

    seconds: float = 0.0
    samples: float = 0.0
    waited: float = 0.0

    def plus(self, other: Grown) -> Grown:
        return Grown(*(one + more for one, more in zip(self, other, strict=True)))


@dataclasses.dataclass
class _Worker:
    """A process of the run."""

    pid: int = 0
    starts: int = 0
    end: str = ""  # how the process has ended; empty while it runs
    told: dict[str, Any] = dataclasses.field(default_factory=dict)  # its latest report
    heard: float = 0.0  # time of its latest report
    synced: float = 0.0  # time of the latest report in which its number of syncs had grown
    recent: deque[tuple[float, Grown]] = dataclasses.field(default_factory=deque)

    def hear(self, told: dict[str, Any], now: float) -> Grown:
        """Takes a report; returns how much the counts have grown since the last one."""
        former, self.told, self.heard = self.told, told, now
        if told.get("syncs", 0) > former.get("syncs", 0):
            self.synced = now
        if not (former.get("trains") and told.get("trains")):
            return Grown()
        names = ("at", "samples", "wait_seconds")
        grown = Grown(*(told.get(name, 0) - former.get(name, 0) for name in names))
        if min(grown) < 0.0:
            return Grown()
        self.recent.append((now, grown))
        while len(self.recent) > 1 and self.recent[0][0] < now - _WINDOW_SECONDS:
            self.recent.popleft()
        return grown

    def row(self, now: float) -> dict[str, Any]:
        """Returns what the page shows of this process."""
        told, lately, runs = self.told, Grown(), not self.end
        for at, grown in self.recent:
            if runs and at > now - 2.0 * _WINDOW_SECONDS:
                lately = lately.plus(grown)
        row: dict[str, Any] = {
            "pid": self.pid or None,
            "starts": self.starts,
            "runs": runs,
            "state": self._state(self.silence(now)),
        }
        row |= {name: told[name] for name in told if name not in ("at", "trains", "joins", "waits")}
        if "at" in told:
            row["samples_per_second"] = lately.samples / lately.seconds if lately.seconds else 0.0
            row["wait_share"] = lately.waited / lately.seconds if lately.seconds else 0.0
            row["waiting_seconds"] = told.get("waits", 0.0) if runs else 0.0
            row["last_sync_seconds"] = now - self.synced if self.synced else None
        return row

    def silence(self, now: float) -> float:
        """Returns the seconds since its last report; 0 if it has ended or never reported."""
        return now - self.heard if self.heard and not self.end else 0.0

    def _state(self, silent: float) -> str:
        if self.end:
            return self.end
        if silent > _SILENT_SECONDS and "at" in self.told:
            return f"silent for {silent:.0f} s"
        if self.told.get("joins"):
            return "waits until it is let in"
        if self.told.get("waits", 0.0) > _WAIT_SECONDS:
            return f"waits for {self.told['waits']:.0f} s"
        return "trains" if self.told.get("trains") else "runs"


class RunStatus:
    """The status of the workers that `shows` names; several threads may use it at once."""

    def __init__(self, shows: str) -> None:
        self._shows = shows
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=_MOST_EVENTS)
        self._noted = self._faults = 0
        self._total = Grown()
        self._trained_from = self._trained_to = 0.0

    def started(self, name: str, pid: int) -> None:
        """Notes that a process was started."""
        with self._lock:
            starts = self._workers[name].starts if name in self._workers else 0
            self._workers[name] = _Worker(pid, starts + 1)

    def told(self, name: str, report: Json) -> None:
        """Takes the latest report of a process; the same report may come again."""
        checked, now = _checked(report), time.monotonic()
        with self._lock:
            worker = self._workers.setdefault(name, _Worker(starts=1))
            if not checked or checked == worker.told:
                return
            grown = worker.hear(checked, now)
            self._total = self._total.plus(grown)
            if grown.samples:
                self._trained_from = self._trained_from or now - grown.seconds
                self._trained_to = now

    def ended(self, name: str, how: str, is_fault: bool) -> None:
        """Notes that a process has ended."""
        with self._lock:
            self._workers[name].end = how
            self._faults += is_fault
        if is_fault:
            self.note(f"{name}: {how}")

    def note(self, text: str) -> None:
        """Notes a fault, or another change of the processes."""
        with self._lock:
            self._noted += 1
            self._events.append((time.monotonic() - self._began, text))

    def now(self) -> dict[str, Any]:
        """Returns the status as values for JSON; times are in seconds."""
        now = time.monotonic()
        with self._lock:
            rows = {name: worker.row(now) for name, worker in self._workers.items()}
            waited_for = self._waited_for(now)
            events = [{"at": round(at, 1), "text": text} for at, text in self._events]
        scores = {name: of_it for name, row in rows.items() if (of_it := row.pop("scores", None))}
        # An epoch's logs are the same on all workers, so those of the first running worker are
        # taken.
        of_workers = sorted(
            (name for name in scores if "steps" in rows[name]),
            key=lambda name: not rows[name]["runs"],
        )
        return {
            "shows": self._shows,
            "seconds": now - self._began,
            "samples_per_second": sum(row.get("samples_per_second", 0.0) for row in rows.values()),
            "waits_for": waited_for,
            "workers": [{"name": name, **row} for name, row in rows.items()],
            "scores": {name: scores[name] for name in scores if name not in of_workers[1:]},
            "faults": self._faults,
            "events": events,
        }

    def _waited_for(self, now: float) -> list[str]:
        """Returns the names of workers for which others wait."""
        running = {name: worker for name, worker in self._workers.items() if not worker.end}
        waiting = {
            name
            for name, worker in running.items()
            if worker.told.get("waits", 0.0) > _WAIT_SECONDS
            and worker.silence(now) <= _SILENT_SECONDS
        }
        members = {n for n, w in running.items() if "at" in w.told and not w.told.get("joins")}
        return sorted(members - waiting) if waiting else []

    def summary(self, shown: int = 10) -> list[str]:
        """Describes the run in a few lines; in none if no training was seen."""
        total = self._total
        if not total.samples:
            return []
        seconds = max(self._trained_to - self._trained_from, 1e-9)
        lines = [
            f"{seconds:.1f} s of training: {total.samples / seconds:,.0f} samples/s; workers "
            f"waited in {total.waited / total.seconds:.0%} of their time; processes: "
            f"{len(self._workers)}, starts: {sum(each.starts for each in self._workers.values())}"
        ]
        if self._noted > shown:
            lines.append(f"the last {shown} of {self._noted} faults and changes:")
        return lines + [f"after {at:.1f} s: {text}" for at, text in list(self._events)[-shown:]]


def _checked(report: Json) -> dict[str, Any]:
    """Returns the valid entries of a report of progress; a process may send anything."""
    if not isinstance(report, dict):
        return {}
    found: dict[str, Any] = {}
    for name in _NUMBERS:
        value: Any = report.get(name)
        if _is_number(value) and math.isfinite(value):
            found[name] = value
    found |= {name: report.get(name) is True for name in ("trains", "joins") if name in report}
    if isinstance(report.get("place"), str):
        found["place"] = report["place"][:_LONGEST]
    if isinstance(devices := report.get("devices"), list):
        found["devices"] = [str(each)[:_LONGEST] for each in devices[:_MOST]]
    if isinstance(scores := report.get("scores"), Mapping):
        numbers = {str(k)[:_LONGEST]: v for k, v in scores.items() if _is_number(v)}
        found["scores"] = dict(list(numbers.items())[:_MOST])
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)
