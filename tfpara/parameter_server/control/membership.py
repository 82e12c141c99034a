"""The workers and parameter servers of an asynchronous run, as a state machine.

The machine has no sockets, no threads and no clock. `lobby.py` passes events with the time, and
executes the returned actions. A *task* is a worker or a parameter server (ps), identified by its
job and index in TF_CONFIG. In the tables an empty cell means no action, or the same state. A
"problem" is the cause why the tasks cannot connect; the chief's program then ends the run.

| task | event | actions | next |
|---|---|---|---|
| absent | hello that fits | Admit, `welcome` | starting |
| any | hello that does not fit | `end`; in gathering a problem | |
| starting, serving | hello, heard lately: there are two | `end`; in gathering a problem | |
| starting, serving | hello, silent for three beats | Drop, Admit, `welcome` | starting |
| starting | serves, in gathering or at the end | | serving |
| starting | serves, in training | Note | serving |
| starting, serving | fails to serve | in training Note; in gathering a problem | |
| starting, serving | leaves: a worker | `leave` with the restart code, if set | |
| starting, serving | leaves: a ps | `asked_to_end` is set | |
| starting | gone | `end`, Drop | absent |
| serving | gone, in gathering or at the end | `end`, Drop | absent |
| serving | gone, in training: a worker | `end`, Drop, Note; it is in `lost` | absent |
| serving | gone, in training: a ps | `end`, Drop; the run fails | absent |
| serving | silent for `timeout_seconds` | as gone | absent |

| run | event | actions | next |
|---|---|---|---|
| gathering | all serve, and were reached | | training |
| gathering | all serve, and one was not reached | a problem | |
| gathering | not all serve in `startup_seconds` | a problem | |
| training | fails: a ps is gone | `end` to all | ended |
| training, ended | fails: no worker serves for `timeout_seconds` | `end` to all, once | ended |
| gathering, training | end, by the chief's program | `end` or `finishing` to all | ended |
| ended | hello | the same `end` | |
| ended | 60 s after it failed | Exit | |

While the run is about to end with a checkpoint (a ps or the chief was asked to end, and a restart
code is set), a lost worker is neither logged nor a failure: the checkpoint needs no worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from tfpara import version
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.typing import Json

_LOG_SECONDS = 30.0
# After the run has failed, the chief's program has this many seconds to end by itself. Then the
# action `Exit` ends its process, because a TensorFlow call may block the program.
_LAST_SECONDS = 60.0

Task: TypeAlias = tuple[str, int]


def beat_seconds(timeout_seconds: float) -> float:
    """Returns the seconds between signs of life; `timeout_seconds` is the longest silence."""
    return min(2.0, timeout_seconds / 5.0)


class Send(NamedTuple):
    """Send a message to a task; if the task is None, to the connection that said hello."""

    task: Task | None
    message: dict[str, Json]


class Admit(NamedTuple):
    """Assign the connection that said hello to a task."""

    task: Task


class Drop(NamedTuple):
    """Close the connection of a task."""

    task: Task


class Note(NamedTuple):
    """Log a sentence."""

    sentence: str


class Exit(NamedTuple):
    """End this process at once, with a sentence."""

    sentence: str


Action: TypeAlias = Send | Admit | Drop | Note | Exit


@dataclasses.dataclass
class _Present:
    """A task with a connection."""

    heard: float  # time of the task's last sign of life
    serving: bool = False  # whether TensorFlow's server listens in the task
    signal: str = ""  # name of the signal that asked the task to end


class Membership:
    """The state of the tasks and the run; the events are methods that return actions.

    Args:
        cluster: the chief's view of the cluster.
        tensorflow_address: "host:port" of TensorFlow's server in the chief.
        startup_seconds, timeout_seconds: as in the tables.
        now: the time in seconds, of any clock. All methods take the time of the same clock.

    Attributes:
        phase: the phase of the run.
        problem: the cause why the tasks cannot connect, or None.
        failure: the cause why training cannot continue, or None.
        lost: indices of workers that were lost while training continues; `Lobby.lost` removes them.
        asked_to_end: a sentence that names the process that got a signal and waits for the end of
            the run, or None. If it is the chief, the chief's program sets it.
        restart_code: the exit code that asks for a restart, while the chief's program writes
            checkpoints; else None.
    """

    def __init__(
        self,
        cluster: AsyncCluster,
        tensorflow_address: str,
        startup_seconds: float,
        timeout_seconds: float,
        now: float,
    ) -> None:
        self.phase: Literal["gathering", "training", "ended"] = "gathering"
        self.problem: str | None = None
        self.failure: str | None = None
        self.lost: list[int] = []
        self.asked_to_end: str | None = None
        self.restart_code: int | None = None
        self._cluster = cluster
        self._welcome: dict[str, Json] = {
            "welcome": cluster.spec(tensorflow_address),
            "timeout_seconds": timeout_seconds,
        }
        self._startup, self._timeout = startup_seconds, timeout_seconds
        self._beat = beat_seconds(timeout_seconds)
        self._present: dict[Task, _Present] = {}
        # The message that ends the tasks. It is kept for tasks that connect after the end.
        self._end: dict[str, Json] = {}
        self._deadline = now + startup_seconds
        self._note_at = now + _LOG_SECONDS
        self._beat_at = self._looked_at = now
        self._no_worker_since: float | None = None
        self._exit_at = float("inf")

    @property
    def serving(self) -> list[Task]:
        """The tasks in which TensorFlow's server listens."""
        return [task for task, its in list(self._present.items()) if its.serving]

    @property
    def missing(self) -> str:
        """The names of the tasks that do not serve yet; empty if there are none."""
        serving = self.serving
        names = [self._cluster.describe(*t) for t in self._cluster.members if t not in serving]
        return ", ".join(names)

    # -- events of a task -------------------------------------------------------------------------

    def hello(self, task: Task, view: object, number: object, now: float) -> list[Action]:
        """Event: a connection says which task, cluster view and version its process has."""
        former = self._present.get(task)
        problem = self._objection(task, view, number)
        if former and now - former.heard < 3 * self._beat:
            problem = problem or (
                "two processes have the same task in TF_CONFIG: both are "
                f"{self._cluster.describe(*task)}. Give each process an index of its own."
            )
        if self.phase == "ended" or problem:
            self._have(problem)
            return [Send(None, {"end": self._end or {"code": 1, "sentence": problem}})]
        self._present[task] = _Present(now)
        # The former process may have died with its machine, without closing its connection. So the
        # connection is dropped here.
        drop: list[Action] = [Drop(task)] if former else []
        return [*drop, Admit(task), Send(task, self._welcome)]

    def serves(self, task: Task) -> list[Action]:
        """Event: TensorFlow's server listens in a task."""
        its = self._present[task]
        came, its.serving = not its.serving, True
        if not came or self.phase != "training" or task[0] != "worker":
            return []
        return [Note(f"{self._cluster.describe(*task)} is back.")]

    def fails_to_serve(self, sentence: str) -> list[Action]:
        """Event: TensorFlow's server cannot start in a task."""
        self._have(sentence)
        return [Note(sentence)] if self.phase == "training" else []

    def leaves(self, task: Task, signal: str) -> list[Action]:
        """Event: a signal has asked a task to end."""
        if task[0] == "ps":
            self.asked_to_end = f"{self._cluster.describe(*task)} was asked to end ({signal})."
            return []
        self._present[task].signal = signal
        return [Send(task, {"leave": self.restart_code})]

    def gone(self, task: Task, how: str, now: float) -> list[Action]:
        """Event: a task is lost, since its connection has ended or it was silent for too long."""
        its, name = self._present.pop(task), self._cluster.describe(*task)
        if its.signal:
            how = f"it was asked to end ({its.signal})"
        # If the process is only suspended, it reads this message when it resumes, and then ends.
        end = {"code": 1, "sentence": f"the chief has given {name} up: {how}."}
        actions: list[Action] = [Send(task, {"end": end}), Drop(task)]
        if not its.serving or self.phase != "training":
            return actions
        if task[0] == "ps":
            return actions + self._fail(
                f"{name} is lost with its part of the model: {how}. Start all processes again, "
                "from the last checkpoint.",
                now,
            )
        self.lost.append(task[1])
        if not self._saves:
            actions.append(Note(f"{name} is lost: {how}. Training goes on without it."))
        return actions

    # -- events of the run ------------------------------------------------------------------------

    def tick(self, now: float, heard: Mapping[Task, float], turned_away: str = "") -> list[Action]:
        """Event: time has passed. Called several times a second.

        `heard` has the time of each present task's last message. `turned_away` is a sentence that
        names the refused processes; empty if there are none.
        """
        suspended = now - self._looked_at > self._timeout / 2  # whether the chief was suspended
        self._looked_at = now
        for task, its in self._present.items():
            its.heard = now if suspended else max(its.heard, heard.get(task, its.heard))
        actions: list[Action] = []
        for task in self.serving:
            if now - self._present[task].heard > self._timeout:
                how = f"it was silent for longer than timeout_seconds={self._timeout:g}"
                actions += self.gone(task, how, now)
        if now >= self._beat_at:
            self._beat_at = now + self._beat
            actions += [Send(task, {}) for task in self._present]
        if self.phase == "gathering":
            return actions + self._wait(now, turned_away)
        if any(job == "worker" for job, _ in self.serving):
            self._no_worker_since = None
        elif self._no_worker_since is None:
            self._no_worker_since = now
        elif now - self._no_worker_since > self._timeout and not self._saves:
            actions += self._fail(
                f"all workers are gone, and none has come back for timeout_seconds="
                f"{self._timeout:g}; start all processes again.",
                now,
            )
        return [*actions, Exit(f"tfpara: {self.failure}")] if now > self._exit_at else actions

    def reached(self, problem: str | None) -> None:
        """Event: all addresses were tried; `problem` names those that do not answer."""
        # If a task is missing, either there is already a problem, or the task has died while the
        # addresses were tried. In both cases the result is ignored. If the task comes back, the
        # lobby tries the addresses again.
        if not self.missing:
            self._have(problem)
            if self.phase == "gathering" and not self.problem:
                self.phase = "training"

    def end(self, code: int, sentence: str, how: str = "end") -> list[Action]:
        """Event: the chief's program is over; all tasks end with an exit code and a sentence.

        The sentence is the cause; empty if the code is 0. `how`: "end": at once; "finishing": as
        soon as the chief is gone.
        """
        if self.phase == "ended":
            return []
        self.phase, self._end = "ended", {"code": code, "sentence": sentence}
        return [Send(task, {how: self._end}) for task in self._present]

    # -- helpers of the events --------------------------------------------------------------------

    def _objection(self, task: Task, view: object, number: object) -> str | None:
        chief, own = self._cluster, version.__version__
        if view != chief.spec() or task not in chief.members:
            return (
                f"TF_CONFIG differs between processes: {chief.name} has the cluster "
                f"{chief.spec()}, {task[0]} {task[1]} has {view}. Give all processes the same "
                "cluster; only the task differs."
            )
        if number != own:
            return (
                f"tfpara differs between processes: {chief.name} has version {own}, "
                f"{chief.describe(*task)} has {number}. Install the same version everywhere."
            )
        return None

    def _have(self, problem: str | None) -> None:
        if self.phase == "gathering":
            self.problem = self.problem or problem

    def _wait(self, now: float, turned_away: str) -> list[Action]:
        missing = self.missing
        if missing and now >= self._deadline:
            self._have(
                f"after {self._startup:g} s these processes have not started: {missing}. Start one "
                "process for each address of TF_CONFIG within startup_timeout_seconds, and see to "
                f"it that they reach the chief at {self._cluster.address}.{turned_away}"
            )
        if not missing or now < self._note_at:
            return []
        self._note_at = now + _LOG_SECONDS
        return [Note(f"Waiting for {missing}.")]

    @property
    def _saves(self) -> bool:
        """Whether the run is about to end with a checkpoint."""
        return self.asked_to_end is not None and self.restart_code is not None

    def _fail(self, sentence: str, now: float) -> list[Action]:
        if self.failure is not None:
            return []
        self.failure, self._exit_at = sentence, now + _LAST_SECONDS
        return self.end(1, sentence)
