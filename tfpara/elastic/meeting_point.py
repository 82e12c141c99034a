"""The meeting point of an elastic run, which enrols workers, watches them, and lets them meet.

`Meeting` is a thread of the launcher or of `tfpara-meet`. It passes messages between its
connections and `membership.Membership`, and tells `Membership` the time. When a worker's connection
ends, the worker is lost at once. If the connection is silent for too long, the worker counts as
lost, and learns that when it connects again.

The methods of `meeting.Line`, a worker's end of the connection, describe what workers send, and
`Membership` describes the answers. Messages are signed with the run's secret (`messages.py`); empty
ones, from both ends, are signs of life. Only the standard library is imported.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfpara.cluster import ports
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.elastic.long_waits import LongWaits
from tfpara.elastic.meeting import PURPOSE, TICK_SECONDS, is_member
from tfpara.elastic.membership import Limits, Membership, Say
from tfpara.typing import Json

_GUESTS = 1024
_LONGEST_NAME, _LONGEST_PLACE = 80, 200
_MEETING_SECONDS = 300.0  # longest wait of a member for another that does not come to a meeting
_log = logging.getLogger(__name__)


class Meeting:
    """The service, which listens until `close`; OSError: the port is in use.

    An empty `host` means all interfaces, and 0 a free `port`. `founders` is the number of workers
    with which the run begins, and `start_seconds` the longest wait for them.
    """

    def __init__(
        self, host: str, port: int, founders: int, start_seconds: float, secret: bytes
    ) -> None:
        listener = ports.listen(_to_listen_on(host), port)
        self.port = int(listener.getsockname()[1])
        self._workers, self._start_seconds = founders, start_seconds
        # The first state is provisional: the first worker sends the limits of the run, and a state
        # with these limits then replaces the provisional one. Other objects read `state`, but do
        # not change it.
        now = time.monotonic()
        self.state = Membership(Limits(founders, 1, None, math.inf, math.inf, math.inf), now)
        self._settings: dict[str, Json] | None = None  # the first worker's settings
        self._silence = math.inf
        # The connections of enrolled workers are the door's `guests`, by task number.
        self._door = Door[int](listener, secret, PURPOSE, _GUESTS)
        self._addresses: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._waits = LongWaits()
        self._ended: set[int] = set()  # task numbers of workers whose processes have ended
        self._beat_at = 0.0
        self._looked_at = now
        self._open = True
        self._thread = threading.Thread(target=self._run, name="tfpara-meeting", daemon=True)
        self._thread.start()

    def follow(self, name: str) -> Callable[[], bool]:
        """Notes that a worker's process has ended, so that nobody waits until it is back.

        Returns a function that tells whether the run has continued without the latest worker of
        this name.
        """
        task = max((task for task, own in list(self._names.items()) if own == name), default=None)
        if task is not None:
            self._ended.add(task)

        def goes_on() -> bool:
            history = self.state.history
            return bool(history) and task not in history[-1].members

        return goes_on

    def close(self) -> None:
        """Ends all connections, and frees the port."""
        self._open = False
        self._thread.join()

    @property
    def is_deaf(self) -> bool:
        """Whether an error has ended the service before `close`."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._open:
                self._listen()
        finally:
            # The door is closed after an error, too. Otherwise workers would wait for answers in
            # vain.
            self._door.close()

    def _listen(self) -> None:
        self._door.wait(TICK_SECONDS)
        self._notice_pause()
        self._door.serve(self._hear, lambda task: self._lose(task, "is lost"))
        now = time.monotonic()
        for task, channel in list(self._door.guests.items()):
            if now - channel.heard > self._silence:
                # A worker whose connection is dropped reconnects when it can. Then it learns
                # whether the others have gone on without it.
                self._door.drop(channel)
                self._lose(task, f"was silent for {self._silence:g} s")
        for task in self._ended & self.state.absent:
            self._lose(task, "is lost")
        self._tell(self.state.tick(now))
        names = {t: self._names.get(t) or f"worker {t}" for t in self.state.members}
        if line := self._waits.line(names, now):
            _log.warning("tfpara: %s.", line)
        if now >= self._beat_at:
            self._beat_at = now + self._silence / 5.0
            self._door.tell_guests()

    def _notice_pause(self) -> None:
        """Detects that this process itself was stopped, so that its workers only seemed silent."""
        now = time.monotonic()
        former, self._looked_at = self._looked_at, now
        if now - former > self._silence / 2.0:
            _log.warning("tfpara: the meeting point did not run for %.1f s.", now - former)
            self.state.stood_still(now)
            for channel in self._door.guests.values():
                channel.heard = now

    def _lose(self, task: int, why: str) -> None:
        self._tell(self.state.gone(task, why, time.monotonic()))

    def _hear(self, channel: Channel, task: int | None, message: Mapping[str, Json]) -> None:
        now, state = time.monotonic(), self.state
        if task is None:
            self._enrol(channel, message, now)
            return
        if channel.closed and message.keys() & {"met", "register"}:
            # No answer would reach the worker. If it is alive, it asks again over a new connection.
            return
        match message:
            case {"register": _} | {"where": _} if state.phase == "founding":
                # This meeting point is new. No member of the run that the worker wants to join has
                # come here yet, so the run is not known here.
                channel.send(evicted="no member of its run is here")
            case {"where": _}:
                channel.send(**state.where())
            case {"begins": int() as fit, "histories": list() as histories}:
                self._tell(state.begins(task, fit, histories))
            case {"register": _, "terms": dict() as terms, "fit": int() as fit}:
                address, name = self._addresses[task], self._names[task]
                self._tell(state.register(task, address, terms, now, name, fit))
            case {"met": int() as generation, "report": report, "failed": bool() as failed}:
                admits = message.get("admits") is not False
                self._tell(state.met(task, generation, report, failed, now, admits))
            case {"agreed": int() as fit, "terms": dict() as terms}:
                self._tell(state.agreed(task, terms, fit))
            case {"ready": int() as generation}:
                self._tell(state.ready(task, generation, now))
            case {"done": _}:
                self._tell(state.done(task, now))
            case {"out": _}:
                self._tell(state.wants_out(task, now))
            case {"waits": int() | float() as seconds, "place": str() as place}:
                self._waits.hear(task, seconds, _printable(place, _LONGEST_PLACE), now)

    def _enrol(self, channel: Channel, message: Mapping[str, Json], now: float) -> None:
        match message:
            case {"enrol": [str() as host, int() as port], "settings": dict() as settings} if (
                ports.is_place(host, port)
            ):
                address, guests = ports.joined(host, port), self._door.guests
            case _:
                self._door.drop(channel)  # the other end is no worker
                return
        wanted, name = message.get("task"), _printable(message.get("name"), _LONGEST_NAME)
        if settings != self._settings and self.state.phase == "founding" and not guests:
            # No other worker is connected, so the run takes the settings of this worker.
            limits = _limits_of(settings, self._workers, self._start_seconds)
            if limits is None:
                channel.send(refused=f"the meeting point cannot read its elastic={settings}")
                return
            self._settings = settings
            self._addresses.clear()
            self._names.clear()
            self._silence, self._beat_at = float(settings["silence_seconds"]), now
            self.state = Membership(limits, now)
        if settings != self._settings:
            channel.send(refused=f"the run has elastic={self._settings}, this worker {settings}")
            return
        if isinstance(wanted, int) and self._addresses.get(wanted) == address and wanted in guests:
            # The worker has connected again, but this process has not noticed yet that the former
            # connection has ended.
            self._door.drop(guests[wanted])
            self._lose(wanted, "is lost")
        again, missed = _membership_of(message.get("again")), list[Say]()
        if again is not None and isinstance(wanted, int):
            generation, members, fit, histories = again
            self._tell(self.state.resume(generation, members, now))
            told = self.state.returned(wanted, generation, name)
            if told is None:
                evicted = {"evicted": "the others have gone on without it"}
                channel.send(**(self.state.where() if self.state.is_over else evicted))
                return
            missed = told + self.state.begins(wanted, fit, histories)
        known = isinstance(wanted, int) and (wanted in self._addresses or again is not None)
        task: int | None = wanted if known and wanted not in guests else None
        task = self.state.number() if task is None else task
        self._addresses[task], self._names[task] = address, name
        self._door.let_in(channel, task)
        founding = self.state.phase == "founding" and message.get("founds") is True
        channel.send(enrolled=task, founding=founding, founders=self.state.limits.founders)
        self._tell(missed)
        if founding:
            # A founder is registered at once. So when the last founder is here, the run begins, and
            # a later worker learns that it is to join.
            self._tell(self.state.register(task, address, {}, now, name))

    def _tell(self, said: list[Say]) -> None:
        members: list[list[Any]] = []  # every message with the key "form" contains this list
        for task, message in said:
            if "form" in message:
                members = members or self._reached(message["members"])
                message = {**message, "members": members}
            channel = self._door.guests.get(task)
            if channel is not None:
                channel.send(**message)
            if "form" in message and task == message["members"][0][0]:
                _log.info("tfpara: generation %s: %s.", message["form"], message["why"])

    def _reached(self, members: Json) -> list[list[Any]]:
        """Returns the members with addresses at which all members can reach them."""
        guests = self._door.guests
        hosts = [guests[task].own_host for task, _ in members if task in guests]
        found = ports.reached_by_all(dict(members), hosts)
        return [[task, address] for task, address in found.items()]


def _to_listen_on(host: str) -> str:
    """Returns the host to listen on, so that others reach this machine by `host`."""
    if host == "localhost" or ports.is_address(host):
        return host
    is_here = any(ports.is_loopback(own) for own, _ in ports.places(f"{host}:0"))
    return "" if is_here else host


def _membership_of(told: Json) -> tuple[int, dict[int, str], int, list[Json]] | None:
    """Returns a worker's generation, its members, its call of `fit`, and earlier histories."""
    match told:
        case {"form": int() as form, "members": [_, *_] as members, "fit": int() as fit,
              "histories": list() as histories} if all(map(is_member, members)):  # fmt: skip
            return form, dict(members), fit, histories
    return None


def _printable(told: Json, longest: int) -> str:
    """Returns what may be printed of a text in a message, which anyone may send."""
    text = told if isinstance(told, str) else ""
    return "".join(filter(str.isprintable, text[:longest]))


def _limits_of(settings: Mapping[str, Json], founders: int, start_seconds: float) -> Limits | None:
    """Returns the limits of a run by the settings of its first worker; None if invalid."""
    match settings:
        case {
            "min_workers": int() as fewest,
            "max_workers": int() | None as most,
            "grace_seconds": int() | float() as grace,
            "silence_seconds": int() | float() as silence,
        }:
            if 1 <= fewest <= (most or fewest) and grace > 0 and silence > 0:
                own = min(founders, most or founders)
                return Limits(own, fewest, most, start_seconds, grace, _MEETING_SECONDS)
    return None
