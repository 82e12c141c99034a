"""A worker's side of the meeting point of an elastic run; `meeting_point.py` is the other side.

A `Line` is the connection of a worker, kept for the whole run, and the messages over it. If the
connection ends, or the meeting point is silent for too long, the worker connects again and repeats
what it has sent: a new meeting point may have been started at the same address, which must learn
the state of the run. Only the standard library is imported.
"""

from __future__ import annotations

import dataclasses
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Mapping

from tfpara.cluster import messages, ports
from tfpara.cluster.messages import Channel
from tfpara.cluster.waiting import RETRY_SECONDS, tried, until
from tfpara.elastic.membership import BEGUN
from tfpara.typing import Json

# Environment variables: the address of the meeting point, and the name of this worker.
ADDRESS = "TFPARA_MEETING"
NAME = "TFPARA_WORKER_NAME"
PURPOSE = "meeting"
TICK_SECONDS = 0.05
_ANSWER_SECONDS = 10.0
_RENUMBERED = "the meeting point is new, and has another number for this worker: start it again"


class MeetingError(RuntimeError):
    """The meeting point does not admit this worker. The message states the cause."""


class Evicted(MeetingError):
    """This worker counted as lost, and the others continued; it may join again."""


class Left(MeetingError):
    """This worker has left, as requested."""


class Passed(MeetingError):
    """The members have begun a later call of `fit`, in which this worker may join them.

    `fit` is the number of that call, from 0, and `histories` are the results of the earlier calls,
    as JSON.
    """

    def __init__(self, fit: int, histories: list[Json]) -> None:
        super().__init__(f"the others are in call {fit + 1} of fit.")
        self.fit, self.histories = fit, histories


class Ended(MeetingError):
    """The run is over, as all others have ended or left; `complete`: nothing is left to do."""

    def __init__(self, why: str, complete: bool) -> None:
        super().__init__(why)
        self.complete = complete


@dataclasses.dataclass(frozen=True)
class Form:
    """A new generation, in the message to its members."""

    number: int
    tasks: tuple[int, ...]  # the members' task numbers, by rank
    addresses: tuple[str, ...]  # the members' "host:port", by rank
    reports: tuple[Json, ...]  # the members' last earlier reports, by rank; None for new members
    why: str  # the change of members, in words
    last: str = ""  # why the members must write a checkpoint and end; "" if they continue


class Line:
    """A worker's connection to the meeting point, with a thread that keeps it alive.

    `settings` are those of `Elastic`. `port` is the port at which the others will reach this
    worker, and `timeout_seconds` the longest wait for the meeting point, now and whenever it is
    gone later. `task` is the earlier number of this process, None for a new one.

    Attributes:
        task: this worker's number.
        founding: whether this worker is one of the first, with which the run begins; `formed` waits
            for the others. Any other worker joins by `register`.
        founders: number of the first workers.
        wanted: whether members are to meet after their next sync.
        lost: members that were lost from the present generation.

    Raises:
        MeetingError: there is no answer, or one with another secret.
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
        self._address = address
        self.wanted = False
        self.lost: frozenset[int] = frozenset()
        self._generation = 0
        # The line's thread calls `on_abort(generation, why)` if a member is lost, and
        # `on_silence()` again and again while there is no answer.
        self.on_abort: Callable[[int, str], None] = lambda generation, why: None
        self.on_silence: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._heard: queue.SimpleQueue[dict[str, Json]] = queue.SimpleQueue()
        self._secret, self._timeout = secret, timeout_seconds
        self._enrolment = {"settings": dict(settings), "name": name}
        self._port = port
        self._silence = float(settings["silence_seconds"])
        self._beat_at = 0.0
        # If the connection ends, this worker sends the next three attributes over the new one.
        self._form: dict[str, Json] | None = None  # the latest generation that this worker knows
        self._terms: dict[str, Json] | None = None  # the terms last given to `agreed`
        self._asked: dict[str, Json] | None = None  # the last request, if it is not answered yet
        # The number of the call of `fit` that this worker is in, and the results of earlier calls.
        self._fits: dict[str, Json] = {"fit": 0, "histories": []}
        self._leaves = self._over = False
        self._channel = self._connect()
        self._enrol(self._channel, task, founds=True)
        answer = self._channel.wait(time.monotonic() + _ANSWER_SECONDS)
        if self._channel.differs:
            raise MeetingError(messages.other_secret(f"the meeting point at {address}"))
        match answer:
            case {"enrolled": int() as own, "founding": bool() as founding, "founders": int() as n}:
                self.task, self.founding, self.founders = own, founding, n
            case {"refused": why}:
                raise MeetingError(f"this worker cannot take part: {why}.")
            case _:
                raise MeetingError(f"the meeting point at {address} did not answer.")
        self._open = True
        self._thread = threading.Thread(target=self._run, name="tfpara-line", daemon=True)
        self._thread.start()

    def where(self) -> tuple[int, list[Json]]:
        """Returns the run's present call of `fit`, from 0, and the results of earlier calls."""
        self._ask(where=True)
        answer = self._answer("fit")
        self._asked = None
        return answer["fit"], answer["histories"]

    def begins(self, fit: int, histories: list[Json]) -> None:
        """Reports that this worker begins a call of `fit`, and the results of earlier calls."""
        self._fits = {"fit": fit, "histories": histories}
        self._terms = None
        self._send(begins=fit, histories=histories)

    def register(self, terms: Mapping[str, Json], fit: int) -> None:
        """Asks to join in a call of `fit`; `formed` waits for the answer."""
        self._ask(register=True, terms=dict(terms), fit=fit)

    def agreed(self, terms: Mapping[str, Json]) -> None:
        """Reports the terms on which all members agree; joining workers must have the same."""
        self._terms = dict(terms)
        self._send(agreed=self._fits["fit"], terms=self._terms)

    def met(self, generation: int, report: Json, failed: bool, admits: bool = True) -> Form:
        """Reports to the meeting that ends this worker's generation; returns the next generation.

        `report` is this worker's position, for the others. `failed`: whether an exchange has
        failed; otherwise all have agreed to meet. `admits`: whether others may join now.
        """
        self._ask(met=generation, report=report, failed=failed, admits=admits)
        return self.formed()

    def formed(self) -> Form:
        """Waits for the generation in which this worker is a member.

        Raises `Passed` if the members have begun a later call of `fit` than that of `register`.
        """
        answer = self._answer("form", "fit")
        self._asked = None
        if "fit" in answer:
            raise Passed(answer["fit"], answer["histories"])
        # `wanted` is reset. If a worker still waits to join, the meeting point sends the message
        # `wanted` again.
        self._generation, self.wanted = answer["form"], False
        tasks, addresses = map(tuple, zip(*answer["members"], strict=True))
        reports, why, last = tuple(answer["reports"]), answer["why"], answer["last"]
        return Form(self._generation, tasks, addresses, reports, why, last)

    def ready(self, generation: int) -> bool:
        """Reports that this worker is connected to the others, and waits until all are.

        Returns False if one was lost instead, so that all meet again.
        """
        self._ask(ready=generation)
        while True:
            answer = self._answer("go", "abort", "form")
            # Answers for earlier generations are skipped, and this one's `form` if it came twice.
            is_connected = answer.get("go") == generation
            is_over = answer.get("abort") == generation or answer.get("form", 0) > generation
            if is_connected or is_over:
                self._asked = None
                return is_connected

    def report(self, waits: float, place: str) -> None:
        """Reports for how many seconds this worker has waited for others, and its place."""
        self._send(waits=waits, place=place)

    def leave(self) -> None:
        """Asks to leave after the next sync; the meeting after it raises `Left`."""
        self._leaves = True
        self._send(out=True)

    def give_up(self) -> None:
        """Ends a wait for the meeting point with `Left`; a signal handler may call it."""
        self._heard.put({"farewell": True})

    def done(self) -> None:
        """Reports that this worker's program ends, and ends the connection."""
        self._send(done=True)
        self.close()

    def close(self) -> None:
        """Ends the connection: for the others this worker is lost, unless it has left."""
        self._open = False
        self._thread.join()
        with self._lock:
            self._channel.close(_ANSWER_SECONDS)

    def _answer(self, *kinds: str) -> dict[str, Json]:
        """Returns the next message of some kinds; raises an error if this worker's part is over."""
        while True:
            message = self._heard.get()
            match message:
                case {"evicted": why}:
                    raise Evicted(f"the run goes on without this worker: {why}.")
                case {"ended": why, "complete": complete}:
                    raise Ended(f"{why}.", complete)
                case {"farewell": _}:
                    raise Left(
                        "asked to end: this worker has left the run, which goes on without it."
                    )
                case {"refused": why}:
                    raise MeetingError(f"this worker cannot take part: {why}.")
                case {"closed": _}:
                    raise MeetingError(
                        f"the meeting point at {self._address} is gone, and was not there again "
                        f"within {self._timeout:g} s. Start it again, and the workers."
                    )
            if message.keys() & set(kinds):
                return message

    def _send(self, **message: Json) -> None:
        with self._lock:
            if not self._channel.closed:
                self._channel.send(**message)

    def _ask(self, **message: Json) -> None:
        """Sends a request, which is repeated over new connections until it is answered."""
        self._asked = message
        self._send(**message)

    def _run(self) -> None:
        while self._open:
            said, closed = self._listen()
            for message in said:
                self._hear(message)
            if closed and (self._over or not self._found_again()):
                self._heard.put({"closed": True})
                break
        while self._open and not self._over:
            self.on_silence()
            time.sleep(RETRY_SECONDS)

    def _listen(self) -> tuple[list[dict[str, Json]], bool]:
        """Returns the messages that have arrived, and whether the connection has ended."""
        # The wait does not hold the lock, because senders need the lock meanwhile.
        self._channel.wait_for(TICK_SECONDS)
        with self._lock:
            said = self._channel.receive()
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + self._silence / 5.0
                self._channel.send()
            # The meeting point sends signs of life, too. So a silent connection is broken, and is
            # closed. But if the meeting point has never answered on this connection, its process
            # may be stopped (SIGSTOP). A new connection would not help then, so this one is kept
            # for longer.
            answers = self._channel.known
            patience = self._silence if answers else max(self._silence, self._timeout)
            if now - self._channel.heard > patience:
                self._channel.close()
            closed = self._channel.closed
        if not answers:
            self.on_silence()
        return said, closed

    def _hear(self, message: dict[str, Json]) -> None:
        """Takes a message of the meeting point; an empty one is a sign of life."""
        match message:
            case {"wanted": bool() as wanted}:
                self.wanted = wanted
                return
            case {"lost": int() as task}:
                self.lost |= {task}
                return
            case {"enrolled": int() as task, "founding": bool() as founding}:
                former, self.task = self.task, task
                if self._awaits_founding and not founding:
                    self._heard.put({"evicted": BEGUN})
                elif not self._awaits_founding and task != former:
                    # This worker has already started TensorFlow's server, and the server cannot
                    # take another task number.
                    self._over = True
                    self._heard.put({"ended": _RENUMBERED, "complete": False})
                return
            # The main thread may be waiting in a collective, and reads the queue only when this
            # collective has been aborted. So `on_abort` is called before the message is queued.
            case {"abort": int() as generation}:
                self.on_abort(generation, "a worker is lost")
            case {"evicted": str()}:
                self._over = True
                self.on_abort(self._generation, "this worker was given up")
            case {"ended": str(), "complete": bool()} | {"farewell": bool()}:
                self._over = True
            case {
                "form": int() as number,
                "members": [_, *_] as members,
                "reports": list() as reports,
                "why": str(),
                "last": str(),
            } if len(members) == len(reports) and all(map(is_member, members)):
                self._form, self.lost = {"form": number, "members": members}, frozenset()
            case {"fit": int(), "histories": list()} | {"go": int()} | {"refused": str()}:
                pass
            case _ if message:
                what = "the meeting point has another version of tfpara, and says"
                message = {"refused": f"{what} {reprlib.repr(message)}"}
            case _:
                return
        self._heard.put(message)

    @property
    def _awaits_founding(self) -> bool:
        return self.founding and self._form is None

    def _enrol(self, channel: Channel, task: int | None, **more: Json) -> None:
        """Sends this worker's address and settings; ``founds``: whether it can be a founder."""
        own = [channel.own_host, self._port]
        channel.send(enrol=own, task=task, **more, **self._enrolment)

    def _call(self) -> Channel:
        return messages.connect(self._address, self._secret, PURPOSE, _ANSWER_SECONDS)

    def _connect(self) -> Channel:
        if not ports.split(self._address)[1].isdecimal():
            raise MeetingError(
                f"{ADDRESS}={self._address!r} must be HOST:PORT, as tfpara-meet prints it."
            )
        deadline = time.monotonic() + self._timeout
        try:
            return tried(self._call, deadline, f"the meeting point {self._address}")
        except (OSError, UnicodeError) as error:
            raise MeetingError(
                f"nobody answers at the meeting point {self._address} (last answer: {error}), "
                f"tried for {self._timeout:g} s. Start tfpara-meet there, or tfpara-launch "
                "--elastic."
            ) from None

    def _found_again(self) -> bool:
        """Waits for a meeting point, the same or a new one, and sends it this worker's state."""
        gone = f"the meeting point {self._address}, which is gone"
        for _ in until(time.monotonic() + self._timeout, lambda: gone):
            if not self._open:
                break
            self.on_silence()
            try:
                channel = self._call()
            except (OSError, UnicodeError):
                continue
            again = self._form and {**self._form, **self._fits}
            self._enrol(channel, self.task, founds=self._awaits_founding, again=again)
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


def is_member(told: Json) -> bool:
    """Returns whether `told` is the task number of a worker, and its address."""
    match told:
        case [int() as task, str()]:
            return task >= 0
    return False
