"""The members of an elastic run, as a state machine without sockets, threads or clocks.

The members change in *generations*. A generation is a number and the list of its members, the same
for all. Rank r is the r-th member, and members are ordered by their task numbers, so rank 0, the
chief, is the member that came first. Between two generations there are two rounds. In the *meeting*
all remaining members of the old one report their positions. In the *enabling* all members of the
new one report that they are connected to it. Without the second round the first message of a fast
member could reach a member that is still in the old generation.

| phase | event | next phase |
|---|---|---|
| `founding` | all founders have come, or `min_workers` of them by `start_seconds` | `enabling` |
| | fewer have come by `start_seconds` | `ended` |
| `training` | a member is lost, or comes to a meeting | `meeting` |
| `meeting` | all members have come, and with newcomers they are `min_workers` | `enabling` |
| | all members have come, and after `grace_seconds` are too few: the last generation | `enabling` |
| `enabling` | all members are ready | `training` |
| | a member is lost, or comes to another meeting | `meeting` |
| any | the last member's program has ended, or no member is left after `grace_seconds` | `ended` |

Members come to a meeting because one was lost, which aborts the others' collectives; because a
collective has failed by itself; or because a worker joins or leaves, and the members have agreed in
a sync to meet after it.

A member is *absent* if it cannot be heard but is probably alive: after a pause of the meeting point
itself, and if no member at all can be heard. The others wait for absent members at most
`grace_seconds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Phase = Literal["founding", "training", "meeting", "enabling", "ended"]
Say = tuple[int, dict[str, Any]]
_OVER = "the run has come to its end"
_NOBODY = (
    "the run has ended, since no member of it is left. Start all its workers, and its meeting "
    "point, again: they go on from a checkpoint"
)
BEGUN = "others have begun the run without it"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of numbers of workers, and of waits."""

    founders: int  # number of workers in the first generation, ≥ 1
    min_workers: int  # fewest workers with which training continues, ≥ 1
    max_workers: int | None  # most workers; further ones wait as spares. None: any number
    # Longest wait for the founders. If at least `min_workers` have come by then, they begin without
    # the missing ones.
    start_seconds: float
    # Longest wait for further workers if fewer than `min_workers` are left. Absent members are
    # awaited for as long.
    grace_seconds: float
    # Longest wait for a member that does not come to a meeting. The wait counts from the arrival of
    # the first member. After the meeting, a member has as long to connect to the new generation.
    meeting_seconds: float


@dataclasses.dataclass
class _Worker:
    """A worker that is connected."""

    address: str  # "host:port" at which the other workers reach this one
    terms: Mapping[str, Any]  # the terms that it gave to `register`
    name: str  # the worker's name in messages
    fit: int = 0  # number of the call of `fit` that the worker is in, or wants to join
    report: Any = None  # the worker's report to the meeting
    came: bool = False  # whether the worker has come to the meeting
    admits: bool = True  # whether this worker lets others join at this meeting
    leaves: bool = False  # whether the worker wants to leave
    ready: bool = False  # whether the worker is connected to the new generation


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation: its number, from 1; its members, by rank; and their change, in words."""

    number: int
    members: tuple[int, ...]
    why: str


class Membership:
    """The state. The events are methods that return the messages to send, with their receivers.

    Messages to a worker:

    * ``refused``: a sentence; the worker cannot take part.
    * ``wanted``: whether members are to meet after their next sync.
    * ``fit``: the number of the members' call of `fit`, from 0, with the ``histories`` of earlier
      calls; sent to a worker that waits to join in an earlier call.
    * ``abort``: a generation's number; its members are to end their collectives, and meet.
    * ``form``: the new generation's number, with ``members`` ([task, address] by rank),
      ``reports`` (by rank; None for new members), ``why``, and ``last``: the reason why this is the
      last one, whose members write a checkpoint and end; else "".
    * ``go``: a generation's number; all members are connected.
    * ``farewell``: the worker wanted to leave, and has left.
    * ``lost``: the task number of a member that is lost, and not absent.
    * ``evicted``: a sentence; the worker counted as lost, and must join again.
    * ``ended``: a sentence; no member is left. ``complete``: whether nothing is left to do.

    `now` is the time in seconds of a monotonic clock, as in all methods.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.phase: Phase = "founding"  # see the table above
        self.history: list[Generation] = []
        self._workers: dict[int, _Worker] = {}
        self._members: tuple[int, ...] = ()
        self._next_task = 0
        self.terms: Mapping[str, Any] = {}  # the terms on which all members have `agreed`
        self.fit = 0  # number of the members' present or latest call of `fit`
        self.histories: list[Any] = []  # the result of each earlier call of `fit`, as JSON
        # Time when the phase began; in a meeting, the time when the first member came.
        self._since = now
        self._short_since: float | None = None  # time since which there are too few workers
        self._wanted = False  # whether members were told to meet because a worker joins or leaves
        self._why: list[str] = []  # the reasons for the next generation, as texts
        self._lost: dict[int, _Worker] = {}  # members lost since the last generation was formed
        self.absent: set[int] = set()  # the task numbers of absent members
        self._awaited_until = now  # end of the wait for absent members
        # Until this time a member whose connection ends counts as absent, and not as lost.
        self._doubts_until = now
        self._aborted = False  # whether members were told to abort the generation's collectives
        self._formed: dict[str, Any] = {}  # the message `form` of the latest generation
        # Whether this meeting point is new, and has learned the generation from a member.
        self._resumed = False
        # Whether the members are to write a checkpoint and end before the training is complete.
        self._last = False
        self._finishing = False  # whether a worker has completed its program, or all must end
        self._ended = ""  # the reason for the end of the run
        self.is_complete = False  # whether the run has ended, and nothing is left to do

    @property
    def generation(self) -> int:
        """The number of the latest generation; 0 before the first."""
        return self.history[-1].number if self.history else 0

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the latest generation that are not lost, in rank order."""
        return tuple(task for task in self._members if task in self._workers)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The connected workers that are no members, in their order of arrival."""
        return tuple(task for task in self._workers if task not in self._members)

    # -- events -------------------------------------------------------------------------------

    def number(self) -> int:
        """Returns a new task number, under which a worker may register."""
        self._next_task += 1
        return self._next_task - 1

    def resume(self, generation: int, members: Mapping[int, str], now: float) -> list[Say]:
        """Event: a run's member connects to a new meeting point; all members are absent.

        `generation` is the latest that this member knows; `members` are the addresses of that
        generation's members by task number, in rank order.
        """
        if self.phase != "founding" and not (self._resumed and generation > self.generation):
            return []
        said: list[Say] = []
        for task in list(self._workers) if self.phase == "founding" else ():
            del self._workers[task]
            said.append((task, {"evicted": BEGUN}))
        # This meeting point may have resumed an earlier generation before, and members of the
        # earlier generation may have connected again. The run has formed the later generation
        # without them, so they are evicted.
        evicted = {"evicted": f"generation {generation} has begun without it"}
        said += [(task, evicted) for task in self.members if task not in self.absent]
        for task in self._members:
            self._workers.pop(task, None)
        self.phase, self._since, self._resumed = "training", now, True
        self.history = [Generation(generation, tuple(members), "the meeting point is new")]
        self._members, self.absent, self._aborted = tuple(members), set(), False
        self._lost.clear()
        told = {task: _Worker(own, {}, f"worker {task}") for task, own in members.items()}
        self._await(told, now + self.limits.grace_seconds)
        self._next_task = max(self._next_task, max(members) + 1)
        return said

    def stood_still(self, now: float) -> None:
        """Event: the meeting point has paused, so silent workers may well be alive.

        A member whose connection ends within the next `grace_seconds` is not lost, but absent until
        these seconds are over. All waits restart, since no worker could come during the pause.
        """
        self._doubts_until = self._awaited_until = now + self.limits.grace_seconds
        self._since = now
        self._short_since = None if self._short_since is None else now

    def returned(self, task: int, generation: int, name: str) -> list[Say] | None:
        """Event: a member of a generation has connected again.

        Returns the messages that it may have missed; None if it was not absent, and must join
        again.
        """
        if generation != self.generation or task not in self.absent:
            return None
        self.absent.discard(task)
        self._workers[task].name = name or self._workers[task].name
        said: list[Say] = [(task, {"wanted": True})] if self._wanted else []
        return said + ([(task, {"abort": generation})] if self._aborted else [])

    def register(
        self,
        task: int,
        address: str,
        terms: Mapping[str, Any],
        now: float,
        name: str = "",
        fit: int = 0,
    ) -> list[Say]:
        """Event: a worker has come, and takes part in a call of `fit` if it has the agreed `terms`.

        It may have been a member with the number `task` before. `terms` are empty while the run
        begins, and `name` is empty for "worker" and its number.
        """
        if self.is_over or fit < self.fit:
            return [(task, self.where())]
        differing = _differences(self.terms, terms) if self.terms and terms else ""
        if differing:
            return [(task, {"refused": differing})]
        name = name or f"worker {task}"
        said = self._forget(task, name, now) if task in self._members else []
        self._workers[task] = _Worker(address, dict(terms), name, fit)
        return said + self._go_on(now)

    def _forget(self, task: int, name: str, now: float) -> list[Say]:
        """Takes a worker that wants to join again off the members, who may not have met yet."""
        awaited = self._workers.pop(task, None)
        self._members = tuple(other for other in self._members if other != task)
        self.absent.discard(task)
        self._lost.pop(task, None)
        if awaited is None:
            return []
        self._why.append(f"{name} is lost")
        return self._to_members(lost=task) + self._begin_meeting(now)

    def agreed(self, task: int, terms: Mapping[str, Any], fit: int = 0) -> list[Say]:
        """Event: the members of a call of `fit` agree on `terms`, which joiners must have."""
        said: list[Say] = []
        if task in self.members and fit == self.fit:
            self.terms = dict(terms)
            for other in self.waiting:
                differing = _differences(self.terms, self._workers[other].terms)
                if differing:
                    del self._workers[other]
                    said.append((other, {"refused": differing}))
        return said

    def where(self) -> dict[str, Any]:
        """Returns the message that reports the members' call of `fit`, or the end."""
        if self.phase == "ended":
            return {"ended": self._ended, "complete": self.is_complete}
        if self._finishing:
            return {"ended": _OVER, "complete": not self._last}
        return {"fit": self.fit, "histories": self.histories}

    def begins(self, task: int, fit: int, histories: list[Any]) -> list[Say]:
        """Event: a member begins a call of `fit`; from now on no worker can join an earlier one."""
        if task not in self._members or fit <= self.fit:
            return []
        # The terms may differ between calls of `fit`, so those of the former call are dropped.
        self.fit, self.histories, self.terms = fit, histories, {}
        said: list[Say] = []
        for other in self.waiting:
            if self._workers[other].fit < fit:
                del self._workers[other]
                said.append((other, self.where()))
        if self._wanted and not any(self._workers[member].leaves for member in self.members):
            self._wanted = False
            said += self._to_members(wanted=False)
        return said

    @property
    def has_begun(self) -> bool:
        """Whether the members have trained."""
        return bool(self.terms) or self.fit > 0

    @property
    def is_deserted(self) -> bool:
        """Whether the run has ended because all members were lost while they trained."""
        return self.has_begun and self._ended == _NOBODY

    @property
    def is_over(self) -> bool:
        """Whether the run is ending or has ended."""
        return self.phase == "ended" or self._finishing

    @property
    def _admits(self) -> bool:
        """Whether a worker may join now: the members' terms are known."""
        return bool(self.terms) and not self.is_over

    def gone(self, task: int, why: str, now: float) -> list[Say]:
        """Event: a worker is lost, since its connection has ended or it was silent for too long."""
        worker = self._workers.get(task)
        if worker is None:
            return []
        is_member = task in self._members and self.phase != "ended"
        if is_member and now < self._doubts_until:
            self._await({task: worker}, self._doubts_until)
            return []
        del self._workers[task]
        said: list[Say] = []
        if is_member:
            # If all members are lost, the run waits until the members in `_lost` come back. A
            # member that was absent is not added, since the run has waited for it already.
            if task not in self.absent:
                self._lost[task] = worker
            self.absent.discard(task)
            if not worker.leaves:  # if the worker leaves, `_why` already says that it has left
                self._why.append(f"{worker.name} {why}")
            said = self._to_members(lost=task)
            # The collectives are aborted even if the members have agreed to meet, because some
            # members may still wait in a collective for the lost member.
            said += self._begin_meeting(now)
        return said + self._go_on(now)

    def wants_out(self, task: int, now: float) -> list[Say]:
        """Event: a member wants to leave after its next sync."""
        if task in self.members and not self._workers[task].leaves:
            self._workers[task].leaves = True
            self._why.append(f"{self._workers[task].name} has left")
        return self._go_on(now)

    def done(self, task: int, now: float) -> list[Say]:
        """Event: a worker has completed its program, as all others will.

        From now on no worker can join, and members do not meet because this one is gone.
        """
        self._finishing = True
        self._workers.pop(task, None)
        self.absent.discard(task)
        if self.phase != "ended" and not self.members:
            return self._end(_OVER, complete=not self._last)
        return self._go_on(now)

    def met(
        self,
        task: int,
        generation: int,
        report: Any,
        failed: bool,
        now: float,
        admits: bool = True,
    ) -> list[Say]:
        """Event: a member has come to the meeting that ends a generation.

        `report` is its position, for all members of the next generation. `failed`: whether one of
        its collectives has failed; otherwise all have agreed to meet. `admits`: whether others may
        join now; they may not while members are in an exchange that they could not complete.
        """
        if task not in self.members or generation != self.generation:
            former = task in self.members and generation == self.generation - 1
            if former and self.phase == "enabling" and not self._workers[task].ready:
                # This member has connected again: its former connection ended before the answer
                # `form` arrived.
                return [(task, self._formed)]
            return [(task, {"evicted": f"generation {generation} is over"})]
        first = self.phase != "meeting"
        worker = self._workers[task]
        worker.came, worker.report, worker.admits = True, report, admits
        # If a collective has failed on this member, other members may still wait in the collective,
        # so they are told to abort it. If all members have agreed to meet, they come without being
        # told.
        said = self._begin_meeting(now) if failed and first else []
        self._phase("meeting", now)
        return said + self._go_on(now)

    def ready(self, task: int, generation: int, now: float) -> list[Say]:
        """Event: a member of the new generation is connected to it."""
        if generation == self.generation and task in self.members:
            if self.phase == "training":
                # This member has connected again: its former connection ended before the answer
                # `go` arrived, for example because the former meeting point ended.
                return [(task, {"go": generation})]
            self._workers[task].ready = self.phase == "enabling"
        return self._go_on(now)

    def tick(self, now: float) -> list[Say]:
        """Event: time has passed."""
        said: list[Say] = []
        if now >= self._awaited_until:
            for task in tuple(self.absent):
                said += self.gone(task, "has not come back", now)
        # All members may be in a long validation. So nobody is late until a first member has come.
        if self.phase == "meeting" and not any(self._workers[t].came for t in self.members):
            self._since = now
        late = now - self._since >= self.limits.meeting_seconds
        if self.phase in ("meeting", "enabling") and late:
            for task in self.members:
                worker = self._workers[task]
                if not (worker.came if self.phase == "meeting" else worker.ready):
                    text = f"did not come to the meeting for {self.limits.meeting_seconds:g} s"
                    said.append((task, {"evicted": f"this worker {text}"}))
                    said += self.gone(task, text, now)
                    # `gone` may have changed the phase. Other late members follow at the next tick.
                    break
        return said + self._go_on(now)

    # -- consequences -------------------------------------------------------------------------

    def _go_on(self, now: float) -> list[Say]:
        match self.phase:
            case "founding":
                there = len(self._workers)
                late = now - self._since >= self.limits.start_seconds
                if there >= self.limits.founders or (late and there >= self.limits.min_workers):
                    self._why = [f"{there} workers have begun"]
                    return self._form(now)
                if late:
                    wanted = f"{self.limits.founders} workers were to begin"
                    return self._end(
                        f"{wanted}, and {there} have come within {self.limits.start_seconds:g} s"
                    )
            case "training":
                wish = any(self._workers[task].leaves for task in self.members)
                if (wish or self._fitting) and not self._wanted and self._admits:
                    self._wanted = True
                    return self._to_members(wanted=True)
            case "meeting":
                if all(self._workers[task].came for task in self.members):
                    return self._conclude(now)
            case "enabling":
                if all(self._workers[task].ready for task in self.members):
                    self._phase("training", now)
                    return self._to_members(go=self.generation) + self._go_on(now)
        return []

    def _conclude(self, now: float) -> list[Say]:
        """Continues after all have met: forms a generation, maybe the last, or waits for others."""
        leaving = [task for task in self.members if self._workers[task].leaves]
        if leaving and len(leaving) == len(self.members) and not self._finishing:
            # Before the members end, they must write a checkpoint, in a last generation.
            return self._form(now, "all workers were asked to end")
        said: list[Say] = []
        for task in leaving if not self._finishing else ():
            del self._workers[task]
            said.append((task, {"farewell": True}))
        if not self.members and self._finishing:
            return said + self._end(_OVER, complete=not self._last)
        if not self.members and not self._lost:
            # No member is left, so the run ends. Workers that wait to join may remain, but they
            # have no state from which to continue.
            return said + self._end(_NOBODY)
        if not self.members:
            # No member can be heard at the moment, but probably some of them are alive. So the run
            # waits for all lost members.
            lost, self._lost = self._lost, {}
            self._why.append("all were awaited")
            self._await(lost, now + self.limits.grace_seconds)
            return said
        if len(self.members) + len(self.waiting) >= self.limits.min_workers or self._finishing:
            return said + self._form(now)
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since < self.limits.grace_seconds:
            return said
        left, fewest = len(self.members), self.limits.min_workers
        return said + self._form(now, f"{left} of at least {fewest} workers are left")

    def _form(self, now: float, last: str = "") -> list[Say]:
        """Forms a generation of the members and, unless it is the last, of waiting workers."""
        self._last |= bool(last)
        self._finishing |= self._last
        former = self.members
        admits = self._admits and all(self._workers[task].admits for task in former)
        new = self._fitting if admits or not former else ()
        members = tuple(sorted((*former, *new)))
        come = [f"{self._workers[task].name} has come" for task in new if former]
        # `otherwise` is the reason if no worker was lost, has left or has come. If no collectives
        # were aborted, the members have met for a worker that wanted to join. This worker could not
        # join, because it is gone again or because the members were in an exchange.
        otherwise = "an exchange has failed" if self._aborted else "a worker wanted to join"
        why = "; ".join([*self._why, *come]) or otherwise
        reports = [self._workers[task].report if task in former else None for task in members]
        self.history.append(Generation(self.generation + 1, members, why))
        self._members, self._why, self._wanted, self._short_since = members, [], False, None
        self._phase("enabling", now)
        self._lost.clear()
        self._aborted = False
        for worker in self._workers.values():
            worker.came, worker.ready, worker.admits = False, False, True
            worker.report = None
        self._formed = {
            "form": self.generation,
            "members": [[task, self._workers[task].address] for task in members],
            "reports": reports,
            "why": why,
            "last": last,
        }
        return [(task, self._formed) for task in members]

    def _begin_meeting(self, now: float) -> list[Say]:
        self._phase("meeting", now)
        self._aborted = True
        late = [task for task in self.members if not self._workers[task].came]
        return [(task, {"abort": self.generation}) for task in late]

    def _await(self, workers: Mapping[int, _Worker], until: float) -> None:
        """Makes members absent; they repeat their messages when they reconnect."""
        for task, worker in workers.items():
            worker.came, worker.ready, worker.report = False, False, None
            self._workers[task] = worker
        self.absent |= workers.keys()
        self._awaited_until = until

    def _end(self, why: str, complete: bool = False) -> list[Say]:
        self.phase, self._ended, self.is_complete = "ended", why, complete
        return [(task, self.where()) for task in self._workers]

    def _to_members(self, **message: Any) -> list[Say]:
        return [(task, message) for task in self.members]

    def _phase(self, phase: Phase, now: float) -> None:
        if phase != self.phase:
            self.phase, self._since = phase, now

    @property
    def _fitting(self) -> tuple[int, ...]:
        """The waiting workers for which there is room."""
        most, stay = self.limits.max_workers, [not self._workers[t].leaves for t in self.members]
        return self.waiting if most is None else self.waiting[: max(0, most - sum(stay))]


def _differences(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Returns the values in which a worker differs from the run; "" if there are none."""
    return "; ".join(
        f"{key}: the run has {wanted.get(key)!r}, this worker has {given.get(key)!r}"
        for key in sorted({*wanted, *given})
        if wanted.get(key) != given.get(key)
    )
