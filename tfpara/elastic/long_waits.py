"""Long waits of an elastic run's members for others, of which the meeting point prints a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# A member that has waited for longer than this counts as waiting. Waiting members wait for those
# that do not count as waiting. The limit is not 0, because every sync has short waits.
_WAIT_SECONDS = 2.0
_SILENT_SECONDS = 5.0  # a worker whose last report is older than this does not count as waiting
_TELL_SECONDS = 10.0  # the first line comes when the others have waited this long for a member


class _Report(NamedTuple):
    """A worker's latest report: the seconds of its wait, its place in its script, and the time."""

    waits: float
    place: str
    heard: float


class LongWaits:
    """The members for which the others wait, by the workers' reports, which come each second."""

    def __init__(self) -> None:
        self._reports: dict[int, _Report] = {}
        # For each worker for which others wait, by task number: the number of seconds after which
        # the next line is printed. The seconds count from the beginning of the wait.
        self._tell_after: dict[int, float] = {}

    def hear(self, task: int, waits: float, place: str, now: float) -> None:
        """Event: a worker has reported how long it has waited for others, and its place."""
        self._reports[task] = _Report(waits, place, now)

    def line(self, members: Mapping[int, str], now: float) -> str:
        """Returns a line on the members for which the others have waited for 10 s; mostly "".

        There is another line each time the wait for one of these members has doubled. `members` are
        names, by task number.
        """
        here = {task: its for task in members if (its := self._reports.get(task))}
        waits = {
            task: its.waits
            for task, its in here.items()
            if its.waits > _WAIT_SECONDS and now - its.heard <= _SILENT_SECONDS
        }
        seconds, awaited = max(waits.values(), default=0.0), sorted(here.keys() - waits.keys())
        self._tell_after = {
            task: self._tell_after.get(task, _TELL_SECONDS) for task in awaited if waits
        }
        if all(seconds < after for after in self._tell_after.values()):
            return ""
        self._tell_after = dict.fromkeys(awaited, 2.0 * seconds)
        who = (f"{members[t]} ({here[t].place})" if here[t].place else members[t] for t in awaited)
        return f"the other workers have waited for {', '.join(who)} for {seconds:.0f} s"
