"""The supervisor of a run's processes, as a state machine without processes, threads or clocks.

Each method of `Supervisor` takes an event and returns the resulting actions, in order.
`launcher.py` owns the processes and executes the actions.

| phase | the processes | one fails | a signal comes | at the deadline |
|---|---|---|---|---|
| `running` | work | restart, run without it, or → `settling` | passed on, → `asked` | none |
| `settling` | report errors, end | may be the cause | as above | SIGTERM, → `stopping` |
| `stopping` | end, after a failure or SIGKILL | is a consequence | passed on | SIGKILL |
| `asked` | end, as the user wants it | the first is the cause | SIGKILL | SIGKILL, → `stopping` |

- A second signal is SIGKILL in every phase.
- SIGKILL at the deadline is delayed while a process that got a signal writes a checkpoint.
- The end of an asynchronous run's chief also begins `settling`, even if the chief has not failed.
- An *expendable* process that has failed in `running` waits for a restart. After a pause it is
  restarted, or the others continue without it, or its failure ends the run.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from tfpara.cluster import exit_codes
from tfpara.launch import signals
from tfpara.typing import Json

# After a failure the other processes have this time to print their own errors and to end. Then they
# get SIGTERM. The same time is also the shortest pause before a restart.
SETTLE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 30.0  # longest pause before a process is restarted while others run
_STEADY_SECONDS = 60.0  # if a process has run for longer than this, its next pause is short again
# Processes that are asked to end have _GRACE_SECONDS, and then get SIGKILL. After a signal to the
# launcher, they have up to SAVING_SECONDS while one of them reports that it writes a checkpoint:
# on a busy machine, that may take long. The option --grace replaces both numbers.
_GRACE_SECONDS, SAVING_SECONDS = 10.0, 300.0
_LOOK_SECONDS = 1.0  # time between two checks whether processes still write a checkpoint
_NEVER = float("inf")
_NOT_NOW = "training has not begun, or comes to its end"

Phase = Literal["running", "settling", "stopping", "asked"]


class Process(NamedTuple):
    """A process to start."""

    name: str  # for messages, the prefix of its output and its log file
    environment: dict[str, str]
    # Whether the run can continue without this process while another expendable process runs.
    expendable: bool = False
    # Whether the process, such as an evaluator, takes no part in the run. Its end does not affect
    # the run, and it may finish its work after the run's end.
    beside: bool = False


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy for failures and signals."""

    # Processes that are asked to end get SIGKILL after this number of seconds. None: after 10, or
    # after up to 300 while one of them writes a checkpoint.
    grace: float | None = None
    restart_workers: int = 0  # most restarts of each expendable process while the others run
    # Returns whether a restarted process could take part in the run now. The argument tells whether
    # the process was killed. If so, the process has made no mistake of its own.
    takes_in: Callable[[bool], bool] = lambda killed: True
    # Given a rank, returns the process that is added on SIGUSR1. None: no process is added on
    # SIGUSR1 or removed on SIGUSR2.
    another: Callable[[int], Process] | None = None
    # Called with the name of an expendable process that has failed. Returns a function that tells
    # whether the run has continued without that process. If the function still returns False when
    # the run has ended, the failure of the process is the failure of the run.
    follow: Callable[[str], Callable[[], bool]] = lambda name: lambda: True
    # Returns whether a run whose first failure was a kill is to be started again, to go on from a
    # checkpoint.
    goes_on_later: Callable[[], bool] = lambda: False


class Start(NamedTuple):
    """An action: start the process with this rank; event `started` or `not_started` follows."""

    rank: int


class Send(NamedTuple):
    """An action: send a signal to the process with this rank, and to its children."""

    rank: int
    number: int


class Note(NamedTuple):
    """An action: print a line for the user."""

    text: str


Action = Start | Send | Note


class Outcome(NamedTuple):
    """The end of a run: its exit code, the first signal, if any, and a line that describes it."""

    code: int
    signal: int | None
    text: str


class Exit(NamedTuple):
    """The end of a process: its rank, its exit code in a shell, and whether a signal ended it."""

    rank: int
    code: int
    by_signal: bool

    @classmethod
    def of(cls, rank: int, status: int) -> Exit:
        """Makes an `Exit` of `status`: an exit code, or minus a signal's number."""
        return cls(rank, exit_codes.in_shell(status), status < 0)

    @property
    def is_killed(self) -> bool:
        """True if SIGKILL ended the process. No program sends this signal to itself."""
        return self.by_signal and self.code == 128 + signal.SIGKILL

    @property
    def how(self) -> str:
        if self.by_signal:
            return f"killed by {signals.name_of(self.code - 128)}"
        return f"exit code {self.code}"


@dataclasses.dataclass
class _Worker:
    """The state of a process."""

    process: Process
    running: bool = True  # whether the process runs, or will be started at once
    starts: int = 0  # number of starts, including restarts that failed
    started_at: float = 0.0
    pause: float = 0.0  # seconds of the pause before the last restart
    again_at: float | None = None  # time to restart the process, or to go on without it
    end: Exit | None = None  # how the process has ended last; None: it has not ended yet
    ended_here: bool = False  # whether a signal from the supervisor has ended the process
    removed: bool = False  # whether the process was asked to leave the run for good
    # The latest value of each key that the process has reported since its last start (see
    # `cluster/parent.py`).
    said: Mapping[str, Json] = dataclasses.field(default_factory=dict)


class Supervisor:
    """The state of all processes. `now` is the time in seconds of a monotonic clock.

    `processes` are the first of the run, the chief first; all are about to be started. For `phase`
    see the table above.
    """

    def __init__(self, processes: Sequence[Process], policy: Policy) -> None:
        self.phase: Phase = "running"
        self._workers = [_Worker(process) for process in processes]
        self._policy = policy
        self._grace = _GRACE_SECONDS if policy.grace is None else policy.grace
        self._deadline = _NEVER
        self._failure: Exit | None = None  # the first failure that ends the run
        self._signal: int | None = None  # the first received signal
        self._saving_until = 0.0  # until this time SIGKILL may be delayed for a checkpoint
        # Failures of processes that the run can do without. With each failure is a function that
        # tells, when the run has ended, whether the run has continued without the process.
        self._spared: list[tuple[Exit, Callable[[], bool]]] = []

    @property
    def processes(self) -> list[Process]:
        return [worker.process for worker in self._workers]

    @property
    def due(self) -> float:
        """The time of the next `tick`; infinite if only other events matter."""
        return min([self._deadline, *(w.again_at for w in self._workers if w.again_at is not None)])

    @property
    def is_over(self) -> bool:
        """Whether no process runs or is to be restarted."""
        return not any(w.running or w.again_at is not None for w in self._workers)

    # -- events -------------------------------------------------------------------------------

    def started(self, rank: int, now: float) -> None:
        """Event: a process was started."""
        worker = self._workers[rank]
        worker.starts, worker.started_at, worker.said = worker.starts + 1, now, {}

    def not_started(self, rank: int, why: str, now: float) -> list[Action]:
        """Event: a process could not be started, perhaps for lack of memory or files."""
        worker = self._workers[rank]
        worker.running = False
        if worker.starts:
            worker.starts += 1
            worker.again_at = now + self._next_pause(worker, now)
        else:
            del self._workers[rank]
        return [Note(f"{worker.process.name} cannot be started: {why}")]

    def is_forced(self, end: Exit) -> bool:
        """Returns whether a process ends now because it was asked to, or others have failed."""
        return self.phase in ("stopping", "asked") or self._workers[end.rank].removed

    def said(self, rank: int, said: Mapping[str, Json]) -> None:
        """Event: a process has sent messages since its start; see `cluster/parent.py`."""
        self._workers[rank].said = said

    def ended(self, rank: int, status: int, now: float) -> list[Action]:
        """Event: a process has ended; `status` is as for `Exit.of`."""
        worker = self._workers[rank]
        end = Exit.of(rank, status)
        worker.running, worker.end = False, end
        forced = self.phase == "stopping"
        worker.ended_here |= forced and end.by_signal
        actions: list[Action] = []
        if worker.process.beside:
            if end.code and self.phase == "running":
                actions = [
                    Note(f"{worker.process.name} failed: {end.how}; the run goes on without")
                ]
        elif worker.removed:
            actions = [Note(f"{worker.process.name} has left: {end.how}")]
        elif self._is_spared(worker, end):
            # The process may have ended because the chief is ending. So its restart waits for a
            # while, and is cancelled if the chief ends in that time.
            if end.code:
                worker.again_at = now + self._next_pause(worker, now)
                self._spared.append((end, self._policy.follow(worker.process.name)))
        elif end.code and self._failure is None:
            self._fail(end, now)
        else:
            of_chief = rank == 0 and self._is_asynchronous and not worker.process.expendable
            if of_chief:  # The other processes have nothing to do without the chief.
                self._settle(now + self._grace)
            if end.code and not forced and self._failure and not self._failure.by_signal:
                # If the chief fails, the others fail, too, and mostly end before the chief. So the
                # chief's failure replaces theirs as the cause. An end by SIGKILL also replaces the
                # present cause: no process is killed because others have ended.
                killed = end.is_killed and self._signal is None
                self._failure = end if of_chief or killed else self._failure
        self._forget_restarts()
        return actions

    def signalled(self, number: int, now: float) -> list[Action]:
        """Event: the launcher got a signal; SIGPIPE means that nobody reads its output any more."""
        if number in (signals.ADD, signals.REMOVE):
            if self.is_over:
                return []
            if self._policy.another is None:
                name = signals.name_of(number)
                why = "workers come and go in runs with --elastic alone"
                return [Note(f"{name} is ignored: {why}")]
            actions = self._add() if number == signals.ADD else self._remove()
        elif number == signal.SIGPIPE and self._signal is not None:
            return []
        else:
            first = self._signal is None
            self._signal = number if self._signal is None else self._signal
            passed_on = signal.SIGTERM if number == signal.SIGPIPE else number
            actions = self._send_all(passed_on if first else signal.SIGKILL)
            self._saving_until = now + SAVING_SECONDS if first else 0.0
            self._deadline = now + self._grace
            if self.phase in ("running", "settling"):
                self.phase = "asked"
        self._forget_restarts()
        return actions

    def tick(self, now: float) -> list[Action]:
        """Event: time has passed."""
        actions: list[Action] = []
        if now >= self._deadline:
            actions = self._at_deadline(now)
        else:
            waiting = [w for w in self._workers if w.again_at is not None and w.again_at <= now]
            if waiting:
                worker = min(waiting, key=lambda each: each.again_at or 0.0)
                actions = self._start_again(worker, now)
        self._forget_restarts()
        return actions

    def outcome(self, seconds: float) -> Outcome:
        """Returns how the run has ended, after `seconds`."""
        failure = self._failure
        if failure is None:
            failure = next((end for end, went_on in self._spared if not went_on()), None)
        cause = self._cause_of(failure) if failure else None
        text = f"{self._summary(failure, cause)} after {seconds:.1f} s"
        if self._signal:
            text = f"got {signals.name_of(self._signal)}; {text}"
        if cause and cause.code and not self._workers[cause.rank].ended_here:
            failure = cause
        code = failure.code if failure else 0
        if failure and failure.is_killed and self._policy.goes_on_later():
            code = exit_codes.restart()
        return Outcome(code, self._signal, text)

    # -- consequences -------------------------------------------------------------------------

    @property
    def _is_asynchronous(self) -> bool:
        return any(worker.process.expendable for worker in self._workers[1:])

    @property
    def _members(self) -> list[_Worker]:
        """The processes that take part in the run."""
        return [worker for worker in self._workers if not worker.process.beside]

    @property
    def _has_finished(self) -> bool:
        """Whether a process has completed its program."""
        return any(worker.end is not None and not worker.end.code for worker in self._members)

    def _is_spared(self, worker: _Worker, end: Exit) -> bool:
        """Returns whether the run may continue after the end of a process."""
        return worker.process.expendable and (
            self._has_finished
            or self._policy.takes_in(end.is_killed)
            or self._policy.follow(worker.process.name)()
        )

    def _fail(self, end: Exit, now: float) -> None:
        """Makes the end of a process the failure of the run."""
        self._failure = end
        # After a signal, all processes have been asked to end already, and have the grace time.
        if self._signal is None:
            self._settle(now + SETTLE_SECONDS)

    def _settle(self, until: float) -> None:
        self._deadline = min(self._deadline, until)
        if self.phase == "running":
            self.phase = "settling"

    def _at_deadline(self, now: float) -> list[Action]:
        if self.phase == "settling":
            self.phase, self._deadline = "stopping", now + self._grace
            return self._send_all(signal.SIGTERM)
        saves = any(w.running and w.said.get("saves") is True for w in self._workers)
        if saves and self._policy.grace is None and now < self._saving_until:
            self._deadline = now + _LOOK_SECONDS
            return []
        self.phase, self._deadline = "stopping", _NEVER
        return self._send_all(signal.SIGKILL)

    def _send_all(self, number: int) -> list[Action]:
        # Processes beside the run, such as an evaluator, may finish their work, unless the run has
        # failed or got a signal.
        to_all = self._failure or self._signal
        return [
            Send(rank, number)
            for rank, worker in enumerate(self._workers)
            if worker.running and (to_all or not worker.process.beside)
        ]

    def _start_again(self, worker: _Worker, now: float) -> list[Action]:
        """Restarts a failed process, or continues without it, or ends the run."""
        assert worker.end is not None
        worker.again_at = None
        failed = f"{worker.process.name} failed: {worker.end.how}"
        most = self._policy.restart_workers
        if worker.starts <= most and self._policy.takes_in(worker.end.is_killed):
            worker.running = True
            return [
                Note(f"{failed}; restart {worker.starts} of {most}"),
                Start(self._workers.index(worker)),
            ]
        others = (
            other
            for other in self._workers
            if other.running
            or (other.again_at and other.end and self._policy.takes_in(other.end.is_killed))
        )
        if any(other.process.expendable for other in others):
            return [Note(f"{failed}; the others go on")]
        self._fail(worker.end, now)
        return []

    def _next_pause(self, worker: _Worker, now: float) -> float:
        """Returns the seconds until a restart; they double with each failure soon after a start."""
        if now - worker.started_at > _STEADY_SECONDS:
            worker.pause = 0.0
        worker.pause = min(max(2.0 * worker.pause, SETTLE_SECONDS), _LONGEST_PAUSE_SECONDS)
        return worker.pause

    def _forget_restarts(self) -> None:
        """Cancels all restarts if the run is ending."""
        chief = self._workers[0]
        over = not chief.running and not chief.process.expendable
        # If a process has completed its program and no process runs, the run is complete. So no
        # restart is needed.
        over |= self._has_finished and not any(worker.running for worker in self._members)
        if over or self._failure or self._signal:
            for worker in self._workers:
                worker.again_at = None

    @property
    def _may_change(self) -> bool:
        return not (self._signal or self._failure) and self._policy.takes_in(False)

    def _add(self) -> list[Action]:
        """Starts one more process, unless the run is ending."""
        if not self._may_change or self._policy.another is None:
            return [Note(f"no worker is added: {_NOT_NOW}")]
        rank = len(self._workers)
        self._workers.append(_Worker(self._policy.another(rank)))
        return [Note(f"{self._workers[rank].process.name} is added"), Start(rank)]

    def _remove(self) -> list[Action]:
        """Asks the process that was added last to leave, or cancels its restart if it waits."""
        if not self._may_change:
            return [Note(f"no worker is removed: {_NOT_NOW}")]
        there = [
            w for w in self._members if (w.running or w.again_at is not None) and not w.removed
        ]
        if len(there) < 2:
            return [Note("no worker is removed: there is no other. SIGTERM ends the run")]
        last = there[-1]
        last.removed, last.again_at = True, None
        actions: list[Action] = [Note(f"{last.process.name} is removed")]
        if last.running:
            actions.append(Send(self._workers.index(last), signal.SIGTERM))
        return actions

    # -- the cause of a failure ---------------------------------------------------------------

    def _blamed_by(self, rank: int) -> int | None:
        """Returns which ended process `rank` reported as the cause of its failure; else None."""
        names = self._workers[rank].said.get("because")
        for other, worker in enumerate(self._workers):
            if isinstance(names, list) and worker.process.name in names and worker.end is not None:
                return other
        return None

    def _cause_of(self, failure: Exit) -> Exit:
        """Returns the end of the process that has caused a failure, by the processes' reports.

        If processes name each other, the earliest report decides: the others have failed because
        the earliest reporter ended.
        """
        chain = [failure.rank]
        while (other := self._blamed_by(chain[-1])) is not None and other not in chain:
            chain.append(other)
        if other is None:
            found = self._workers[chain[-1]].end if len(chain) > 1 else failure
        else:
            circle = chain[chain.index(other) :]
            first = min(circle, key=lambda rank: _seconds(self._workers[rank].said.get("at")))
            found = self._workers[circle[(circle.index(first) + 1) % len(circle)]].end
        return found or failure

    def _summary(self, failure: Exit | None, cause: Exit | None) -> str:
        count, kind = len(self._members), "processes" if self._is_asynchronous else "workers"
        if failure is None or cause is None:
            return f"all {count} {kind} done" if count > 1 else "worker done"
        name = self._workers[cause.rank].process.name
        text = f"{name} failed first: {cause.how}"
        silent = cause is not failure and self._workers[cause.rank].ended_here
        if silent or not cause.code:
            then = f"{self._workers[failure.rank].process.name} failed: {failure.how}"
            text = f"{name} did not answer, and was ended; {then}"
            if not silent:
                text = f"{name} ended first, with exit code 0 while others went on; then {then}"
        return f"{text}; all {kind} ended" if count > 1 else f"{text}; ended"


def _seconds(told: Json) -> float:
    """Returns the time that a process has sent; 0 for an invalid value."""
    try:
        return float(told) if isinstance(told, int | float) else 0.0
    except OverflowError:
        return 0.0
