"""The meeting point of an elastic run: where workers enrol, are watched, and meet.

`Meeting` is the service: a thread of the launcher, or a program of its own. It carries the messages
of `membership.Membership` between its connections, and is the clock of it. `Line` is a worker's
connection, kept for the whole run: a connection that ends is a worker that is lost, at once; one
that is silent for too long is given up, and told so when it speaks again.

Messages are signed with the run's secret (`messages.py`). Workers send ``enrol`` (their host and
port, with the ``settings`` of the run, and ``founds``: whether the worker can be one of those with
whom the run begins; the answer, ``enrolled``, has a task number, and whether it is one), ``where``
(in which call of `fit` is the run?), ``register`` with ``terms`` and ``fit`` (it wants to join),
``begins`` (the number of a call of `fit`) with the ``histories`` of those before it, ``agreed``
(the number of that call) with ``terms``, ``met`` (a generation) with ``report``, ``failed`` and
``admits``, ``ready`` (a generation), ``out`` (the worker wants to leave) and ``done`` (its program
ends). Empty messages, from both ends, are signs of life. The meeting point sends what `Membership`
says. Only the standard library is imported.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Mapping

from tfpara.cluster import messages, ports
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.elastic.membership import BEGUN, Generation, Limits, Membership, Say
from tfpara.typing import Json

ADDRESS = "TFPARA_MEETING"  # the variable that tells workers where the meeting point is
NAME = "TFPARA_WORKER_NAME"  # the variable by which a launcher gives a worker its name
_PURPOSE = "meeting"
_TICK_SECONDS = 0.05
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_GUESTS = 1024
_LONGEST_NAME = 80
_MEETING_SECONDS = 300.0  # longest wait for a member that is alive and does not come
_log = logging.getLogger(__name__)


class MeetingError(RuntimeError):
    """The meeting point does not let this worker take part. The message says why."""


class Evicted(MeetingError):
    """This worker was taken for lost, and the others went on; it may join anew."""


class Left(MeetingError):
    """This worker has left, as it was asked to."""


class Passed(MeetingError):
    """The members have begun a later call of `fit`, in which this worker may join them.

    Attributes:
        fit: its number, from 0.
        histories: what those before it have returned, as JSON.
    """

    def __init__(self, fit: int, histories: list[Json]) -> None:
        super().__init__(f"the others are in call {fit + 1} of fit.")
        self.fit, self.histories = fit, histories


class Ended(MeetingError):
    """The run is over: all others have ended or left.

    Attributes:
        complete: whether they have done all that there was to do.
    """

    def __init__(self, why: str, complete: bool) -> None:
        super().__init__(why)
        self.complete = complete


class Meeting:
    """The service, which listens until `close`.

    Args:
        host: to listen on; all interfaces if empty.
        port: 0 takes a free one.
        founders: workers with which the run begins.
        start_seconds: longest wait for them.
        secret: of the run; may be empty.

    Attributes:
        port: on which it listens.

    Raises:
        OSError: the port is in use.
    """

    def __init__(
        self, host: str, port: int, founders: int, start_seconds: float, secret: bytes
    ) -> None:
        listener = ports.bind(host, port)
        listener.listen(128)
        self.port = int(listener.getsockname()[1])
        self._founders, self._start_seconds = founders, start_seconds
        self._settings: dict[str, Json] | None = None  # as the first worker has them
        self._silence = math.inf
        self._door = Door(listener, secret, _PURPOSE, _GUESTS)
        self._membership: Membership | None = None  # once a worker has come
        self._channels: dict[int, Channel] = {}  # of those that may be spoken to, by task
        self._tasks: dict[Channel, int] = {}
        self._addresses: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._beat_at = 0.0
        self._looked_at = time.monotonic()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="tfpara-meeting", daemon=True)
        self._thread.start()

    @property
    def history(self) -> list[Generation]:
        """The generations so far."""
        return list(self._membership.history) if self._membership else []

    @property
    def terms(self) -> Mapping[str, Json]:
        """What the members have alike; empty until they have said it."""
        return self._membership.terms if self._membership else {}

    @property
    def phase(self) -> str:
        """What the run is doing: see `membership.Phase`."""
        return self._membership.phase if self._membership else "founding"

    @property
    def has_begun(self) -> bool:
        """Whether the members have trained."""
        return self._membership is not None and self._membership.has_begun

    @property
    def is_over(self) -> bool:
        """Whether the run comes to its end, or has ended."""
        return self._membership is not None and self._membership.is_over

    @property
    def why_ended(self) -> str:
        """Why the run has ended; empty before."""
        if self._membership is None or self.phase != "ended":
            return ""
        return str(self._membership.where()["ended"])

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended, and nothing is left to do."""
        return self._membership is not None and self._membership.is_complete

    def follow(self, name: str) -> Callable[[], bool]:
        """Returns what says, later, whether the members have gone on without a worker.

        Args:
            name: by which messages call it; the one that has come last under this name is meant.
        """
        task = max((task for task, own in list(self._names.items()) if own == name), default=None)
        return lambda: bool(self.history) and task not in self.history[-1].members

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
            self._door.close()  # after an error, too, so that no worker waits for an answer

    def _listen(self) -> None:
        self._door.wait(_TICK_SECONDS)
        self._notice_pause()
        for channel, said in self._door.poll():
            self._door.heed(channel, said, self._hear)
            if channel.closed:
                self._part(channel, "is lost")
        if self._membership is None:
            return
        now = time.monotonic()
        for channel in list(self._channels.values()):
            if now - channel.heard > self._silence:
                # It comes back when it can, and hears then whether the others have gone on.
                self._part(channel, f"was silent for {self._silence:g} s")
        self._tell(self._membership.tick(now))
        if now >= self._beat_at:
            self._beat_at = now + self._silence / 5.0
            self._door.tell_guests()

    def _notice_pause(self) -> None:
        """Looks whether this process itself was stopped, so that workers took it for lost."""
        now = time.monotonic()
        former, self._looked_at = self._looked_at, now
        if self._membership is not None and now - former > self._silence / 2.0:
            _log.warning("tfpara: the meeting point did not run for %.1f s.", now - former)
            self._membership.stood_still(now)
            for channel in self._channels.values():
                channel.heard = now

    def _part(self, channel: Channel, why: str) -> None:
        self._door.drop(channel)
        task = self._tasks.pop(channel, None)
        if task is not None and self._channels.get(task) is channel:
            del self._channels[task]
            if self._membership is not None:
                self._tell(self._membership.gone(task, why, time.monotonic()))

    def _hear(self, channel: Channel, message: Mapping[str, Json]) -> None:
        now = time.monotonic()
        task = self._tasks.get(channel)
        if task is None:
            match message:
                case {"enrol": [str() as host, int() as port], "settings": dict() as settings} if (
                    ports.is_place(host, port)
                ):
                    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                    self._enrol(channel, address, settings, message, now)
                case _:
                    self._door.drop(channel)  # not one of us
            return
        if self._membership is None or task not in self._channels:
            return
        match message:
            case {"register": _} | {"where": _} if self._membership.phase == "founding":
                # It wants to join a run of which nobody has told this meeting point yet.
                channel.send(evicted="no member of its run is here")
            case {"where": _}:
                channel.send(**self._membership.where())
            case {"begins": int() as fit, "histories": list() as histories}:
                self._tell(self._membership.begins(task, fit, histories))
            case {"register": _, "terms": dict() as terms, "fit": int() as fit}:
                address = self._addresses[task]
                registered, said = self._membership.register(
                    address, terms, now, task, self._names[task], fit
                )
                if registered is None:
                    channel.send(**said[0][1])
                else:
                    self._tell(said)
            case {"met": int() as generation, "report": report, "failed": bool() as failed}:
                admits = message.get("admits") is not False
                self._tell(self._membership.met(task, generation, report, failed, now, admits))
            case {"agreed": int() as fit, "terms": dict() as terms}:
                self._tell(self._membership.agreed(task, terms, fit))
            case {"ready": int() as generation}:
                self._tell(self._membership.ready(task, generation, now))
            case {"done": _}:
                del self._channels[task]
                self._tell(self._membership.done(task, now))
            case {"out": _}:
                self._tell(self._membership.wants_out(task, now))

    def _enrol(
        self,
        channel: Channel,
        address: str,
        settings: dict[str, Json],
        message: Mapping[str, Json],
        now: float,
    ) -> None:
        wanted, name = message.get("task"), _name_of(message.get("name"))
        if self._membership is None:
            limits = _limits_of(settings, self._founders, self._start_seconds)
            if limits is None:
                channel.send(refused=f"the meeting point cannot read its elastic={settings}")
                return
            self._settings, self._founders = settings, limits.founders
            self._silence = float(settings["silence_seconds"])
            self._membership = Membership(limits, now)
        if settings != self._settings:
            channel.send(refused=f"the run has elastic={self._settings}, this worker {settings}")
            return
        if isinstance(wanted, int) and self._addresses.get(wanted) == address:
            former = self._channels.get(wanted)
            if former is not None:  # the worker has noticed first that this has ended
                self._part(former, "is lost")
        again, missed = _membership_of(message.get("again")), list[Say]()
        if again is not None and isinstance(wanted, int):
            self._tell(self._membership.resume(*again, now))
            told = self._membership.returned(wanted, again[0], name)
            if told is None:
                over = self._membership.is_over
                evicted = {"evicted": "the others have gone on without it"}
                channel.send(**(self._membership.where() if over else evicted))
                return
            missed = told + self._membership.begins(wanted, *_fits_of(message["again"]))
        known = isinstance(wanted, int) and (wanted in self._addresses or again is not None)
        task: int | None = wanted if known and wanted not in self._channels else None
        task = self._membership.number() if task is None else task
        self._tasks[channel], self._channels[task], self._addresses[task] = task, channel, address
        self._names[task] = name
        self._door.let_in(channel)
        founding = self._membership.phase == "founding" and message.get("founds") is True
        channel.send(enrolled=task, founding=founding, founders=self._founders)
        self._tell(missed)
        if founding:
            # At once: whoever comes when the founders are complete has to know that it joins.
            _, said = self._membership.register(address, {}, now, task, self._names[task])
            self._tell(said)

    def _tell(self, said: list[Say]) -> None:
        for task, message in said:
            channel = self._channels.get(task)
            if channel is not None:
                channel.send(**message)
            if "form" in message and task == message["members"][0][0]:
                _log.info("tfpara: generation %s: %s.", message["form"], message["why"])


def _membership_of(told: Json) -> tuple[int, dict[int, str]] | None:
    """The generation and members that a worker tells of which it was one; None if none."""
    match told:
        case {"form": int() as generation, "members": [_, *_] as members}:
            if all(map(_is_member, members)):
                return generation, dict(members)
    return None


def _is_member(told: Json) -> bool:
    """Whether this is the task number of a worker, and its address."""
    match told:
        case [int() as task, str()]:
            return task >= 0
    return False


def _name_of(told: Json) -> str:
    """The name of a worker, for messages; a name may come from anybody, and is printed."""
    name = told if isinstance(told, str) else ""
    return "".join(filter(str.isprintable, name[:_LONGEST_NAME]))


def _limits_of(settings: Mapping[str, Json], founders: int, start_seconds: float) -> Limits | None:
    """The limits of a run by the settings of its first worker; None if they are none."""
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


def _is_known(message: Mapping[str, Json]) -> bool:
    """Whether the meeting point may say so to a worker; the empty message is a sign of life."""
    match message:
        case {"form": int(), "members": [_, *_] as members, "reports": list() as reports}:
            texts = message.get("why"), message.get("last")
            return (
                all(map(_is_member, members))
                and len(members) == len(reports)
                and all(isinstance(text, str) for text in texts)
            )
        case (
            {"wanted": bool()}
            | {"lost": int()}
            | {"enrolled": int(), "founding": bool(), "founders": int()}
            | {"welcome": int()}
            | {"spare": bool()}
            | {"fit": int(), "histories": list()}
            | {"abort": int()}
            | {"go": int()}
            | {"farewell": bool()}
            | {"evicted": str()}
            | {"refused": str()}
            | {"ended": str(), "complete": bool()}
        ):
            return True
    return not message


def _fits_of(told: Json) -> tuple[int, list[Json]]:
    """The call of `fit` that a worker of that membership is in, and the histories before it."""
    match told:
        case {"fit": int() as fit, "histories": list() as histories}:
            return fit, histories
    return 0, []


@dataclasses.dataclass(frozen=True)
class Form:
    """A generation, as a member of it is told.

    Attributes:
        number: of the generation.
        tasks: of its members, by rank.
        addresses: theirs, "host:port".
        reports: where they were in the one before; None of who is new.
        why: what changed, in words.
        last: why its members are to write a checkpoint and to end; "" if they are to train on.
    """

    number: int
    tasks: tuple[int, ...]
    addresses: tuple[str, ...]
    reports: tuple[Json, ...]
    why: str
    last: str = ""


class Line:
    """A worker's connection to the meeting point, with a thread that keeps it alive.

    Args:
        address: "host:port" of the meeting point.
        secret: of the run; may be empty.
        port: on which the others will reach this worker.
        settings: of the run: ``min_workers``, ``max_workers``, ``grace_seconds`` and
            ``silence_seconds``, and what else has to be the same for all workers.
        timeout_seconds: longest wait for the meeting point, also where it is gone later.
        task: the number that this process has had before; None: it is new.
        name: by which messages call this worker; "worker" and its number if empty.

    Attributes:
        task: this worker's number.
        founding: whether this worker is one of those with whom the run begins; `formed` waits for
            the others. Else it joins: see `register`.
        founders: workers with which the run begins.
        wanted: whether members shall meet after their next sync.
        lost: members of the present generation that are, so far.

    Raises:
        MeetingError: nobody answers, or with another secret.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        port: int,
        settings: Mapping[str, Json],
        timeout_seconds: float,
        task: int | None = None,
        name: str = "",
    ) -> None:
        self.address = address
        self.wanted = False
        self.lost: frozenset[int] = frozenset()
        self.generation = 0
        self._on_abort: Callable[[int, str], None] = lambda generation, why: None
        self._on_silence: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._heard: queue.SimpleQueue[dict[str, Json]] = queue.SimpleQueue()
        self._secret, self._timeout = secret, timeout_seconds
        self._enrolment = {"settings": dict(settings), "name": name}
        self._port = port
        # What another meeting point, at this address, would have to hear.
        self._form: dict[str, Json] | None = None  # the latest generation that was formed
        self._terms: dict[str, Json] | None = None  # those that this worker has told
        self._asked: dict[str, Json] | None = None  # what has no answer yet
        # The call of `fit` that this worker, a member, is in, and what those before it returned.
        self._fits: dict[str, Json] = {"fit": 0, "histories": []}
        self._leaves = self._over = False
        self._channel = self._connect(secret, timeout_seconds)
        own = [self._channel.own_host, port]
        self._channel.send(enrol=own, task=task, founds=True, **self._enrolment)
        answer = self._channel.wait(time.monotonic() + _ANSWER_SECONDS)
        if self._channel.differs:
            raise MeetingError(messages.other_secret(f"the meeting point at {address}"))
        if answer and "refused" in answer:
            raise MeetingError(f"this worker cannot take part: {answer['refused']}.")
        if answer is None or "enrolled" not in answer or not _is_known(answer):
            raise MeetingError(f"the meeting point at {address} did not answer.")
        self.task, self.founding = int(answer["enrolled"]), bool(answer["founding"])
        self.founders = int(answer["founders"])
        self._silence = float(settings["silence_seconds"])
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="tfpara-line", daemon=True)
        self._thread.start()

    def on_abort(self, act: Callable[[int, str], None]) -> None:
        """Has `act(generation, why)` called, on the line's thread, where a member is lost."""
        self._on_abort = act

    def on_silence(self, act: Callable[[], None]) -> None:
        """Has `act()` called, on the line's thread, again and again while nobody answers."""
        self._on_silence = act

    @property
    def _awaits_founding(self) -> bool:
        return self.founding and self._form is None

    def where(self) -> tuple[int, list[Json]]:
        """Returns the call of `fit` that the run is in, from 0, and what those before returned.

        Raises:
            Evicted, Left, Ended, MeetingError: it is in none.
        """
        self._ask(where=True)
        while True:
            match self._next():
                case {"fit": fit, "histories": histories}:
                    self._asked = None
                    return int(fit), list(histories)

    def begins(self, fit: int, histories: list[Json]) -> None:
        """Says that this worker begins a call of `fit`, with what those before it returned."""
        self._fits = {"fit": fit, "histories": histories}
        self._terms = None
        self._send(begins=fit, histories=histories)

    def register(self, terms: Mapping[str, Json], fit: int) -> None:
        """Asks to be let in, in a call of `fit`; `formed` waits for the answer."""
        self._ask(register=True, terms=dict(terms), fit=fit)

    def agreed(self, terms: Mapping[str, Json]) -> None:
        """Says what the members have alike, for those who want to join."""
        self._terms = dict(terms)
        self._send(agreed=self._fits["fit"], terms=self._terms)

    def met(self, generation: int, report: Json, failed: bool, admits: bool = True) -> Form:
        """Comes to the meeting that ends a generation; returns the next.

        Args:
            generation: that this worker is in.
            report: where it is, for the others.
            failed: whether an exchange has failed; else all have agreed to meet.
            admits: whether others may come in now.

        Raises:
            Evicted, Left, Ended: this worker is not in it.
        """
        self._ask(met=generation, report=report, failed=failed, admits=admits)
        return self.formed()

    def formed(self) -> Form:
        """Waits for the generation that this worker becomes a member of.

        Raises:
            Passed: the members have begun a later call of `fit` than that of `register`.
            Evicted, Left, Ended, MeetingError: it does not.
        """
        while True:
            match self._next():
                case {"fit": fit, "histories": histories}:
                    self._asked = None
                    raise Passed(int(fit), list(histories))
                case {
                    "form": number,
                    "members": members,
                    "reports": reports,
                    "why": why,
                    "last": last,
                }:
                    self._asked = None
                    # The meeting point says so again if somebody could not come in.
                    self.generation, self.wanted = int(number), False
                    tasks, addresses = zip(*members, strict=True)
                    own = tuple(tasks), tuple(addresses), tuple(reports)
                    return Form(int(number), *own, why, last)

    def ready(self, generation: int) -> bool:
        """Says that this worker is connected, and waits for the others.

        Returns:
            Whether all are; else one was lost, and all meet again.
        """
        self._ask(ready=generation)
        while True:
            match self._next():
                case {"go": number} if number == generation:
                    self._asked = None
                    return True
                case {"abort": number} if number == generation:
                    self._asked = None
                    return False

    def leave(self) -> None:
        """Asks to leave after the next sync; the meeting after it raises `Left`."""
        self._leaves = True
        self._send(out=True)

    def give_up(self) -> None:
        """Ends a wait for the meeting point with `Left`; may be called by a signal's handler."""
        self._heard.put({"farewell": True})

    def done(self) -> None:
        """Says that this worker's program ends, and ends the connection."""
        self._send(done=True)
        self.close()

    def close(self) -> None:
        """Ends the connection: to the others this worker is lost, unless it has left."""
        self._open = False
        self._thread.join()
        with self._lock:
            self._channel.close(_ANSWER_SECONDS)

    def _next(self) -> dict[str, Json]:
        """The next message of a meeting.

        Raises:
            Evicted, Left, Ended, MeetingError: what ends this worker's part.
        """
        message = self._heard.get()
        match message:
            case {"evicted": why}:
                raise Evicted(f"the run goes on without this worker: {why}.")
            case {"ended": why, "complete": complete}:
                raise Ended(f"{why}.", bool(complete))
            case {"farewell": _}:
                raise Left("asked to end: this worker has left the run, which goes on without it.")
            case {"refused": why}:
                raise MeetingError(f"this worker cannot take part: {why}.")
            case {"closed": _}:
                raise MeetingError(
                    f"the meeting point at {self.address} is gone, and was not there again within "
                    f"{self._timeout:g} s. Start it again, and the workers."
                )
        return message

    def _send(self, **message: Json) -> None:
        with self._lock:
            if not self._channel.closed:
                self._channel.send(**message)

    def _ask(self, **message: Json) -> None:
        """Sends what will be answered."""
        self._asked = message
        self._send(**message)

    def _listen(self) -> None:
        beat_at = 0.0
        while self._open:
            # Not under the lock, which who wants to send waits for.
            self._channel.wait_for(_TICK_SECONDS)
            with self._lock:
                said = self._channel.receive()
                now = time.monotonic()
                if now >= beat_at:
                    beat_at = now + self._silence / 5.0
                    self._channel.send()
                # It tells of itself as often as this worker does; but before it has answered, it
                # may be stopped, and more connections would wait there in vain.
                answers = self._channel.known
                patience = self._silence if answers else max(self._silence, self._timeout)
                if now - self._channel.heard > patience:
                    self._channel.close()
                closed = self._channel.closed
            if not answers:
                self._on_silence()
            for message in said:
                if _is_known(message):
                    self._hear(message)
                else:
                    what = "the meeting point has another version of tfpara, and says"
                    self._heard.put({"refused": f"{what} {reprlib.repr(message)}"})
            if closed and (self._over or not self._found_again()):
                self._heard.put({"closed": True})
                break
        while self._open and not self._over:
            self._on_silence()
            time.sleep(_RETRY_SECONDS)

    def _found_again(self) -> bool:
        """Waits for a meeting point to be there again, and tells it where the run is."""
        deadline = time.monotonic() + self._timeout
        while self._open and time.monotonic() < deadline:
            self._on_silence()
            try:
                channel = messages.connect(self.address, self._secret, _PURPOSE, _ANSWER_SECONDS)
            except (OSError, UnicodeError, ValueError):
                time.sleep(_RETRY_SECONDS)
                continue
            channel.send(
                enrol=[channel.own_host, self._port],
                task=self.task,
                founds=self._awaits_founding,
                again=self._form and {**self._form, **self._fits},
                **self._enrolment,
            )
            with self._lock:
                self._channel = channel
                asked = self._asked
                if self._terms is not None:
                    channel.send(agreed=self._fits["fit"], terms=self._terms)
                if self._leaves:
                    channel.send(out=True)
                if asked is not None:
                    channel.send(**asked)
            return True
        return False

    def _hear(self, message: dict[str, Json]) -> None:
        if "wanted" in message:
            self.wanted = bool(message["wanted"])
        elif "lost" in message:
            self.lost |= {int(message["lost"])}
        elif "enrolled" in message:
            self.task = int(message["enrolled"])  # another only while the run begins
            if self._awaits_founding and not message["founding"]:
                self._heard.put({"evicted": BEGUN})
        elif message:
            self._over = "evicted" in message or "ended" in message or "farewell" in message
            if "form" in message:
                self._form = {"form": message["form"], "members": message["members"]}
                self.lost = frozenset()
            # Before anybody acts on it: who waits in a collective would never look.
            if "abort" in message:
                self._on_abort(int(message["abort"]), "a worker is lost")
            elif "evicted" in message:
                self._on_abort(self.generation, "this worker was given up")
            self._heard.put(message)

    def _connect(self, secret: bytes, timeout_seconds: float) -> Channel:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return messages.connect(self.address, secret, _PURPOSE, _ANSWER_SECONDS)
            except (OSError, UnicodeError, ValueError) as error:
                if time.monotonic() >= deadline:
                    raise MeetingError(
                        f"nobody answers at the meeting point {self.address} (last answer: "
                        f"{error}), tried for {timeout_seconds:g} s. Start tfpara-meet there, or "
                        "tfpara-launch --elastic."
                    ) from None
            time.sleep(_RETRY_SECONDS)
