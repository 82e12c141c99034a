"""The supervisor of the workers, which starts them, passes on output and signals, and ends all."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tfpara.cluster import parent, quiet
from tfpara.launch import output as output
from tfpara.launch import signals as signals
from tfpara.typing import Json

# After a failure the other workers have this time to print their own errors and end, before they
# get SIGTERM.
SETTLE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 30.0  # before a worker is started again while others run
_STEADY_SECONDS = 60.0  # who has run so long does not fail again and again: its pause is the first
# Between asking workers to end and SIGKILL, unless the launcher's user says otherwise; and if a
# worker has said that it writes a checkpoint, which on a busy machine takes longer.
_GRACE_SECONDS, SAVING_SECONDS = 10.0, 300.0
_LOOK_SECONDS = 1.0  # how often it is looked whether a checkpoint is written yet


class Process(NamedTuple):
    """A process to start.

    Attributes:
        name: its name in messages, in the prefix of its output, and of its log file.
        environment: its environment.
        expendable: whether the run continues without it, as long as another expendable one runs.
    """

    name: str
    environment: dict[str, str]
    expendable: bool = False


class _Exit(NamedTuple):
    rank: int  # index of the process
    code: int  # exit code as a shell reports it
    how: str
    by_signal: bool

    @property
    def is_killed(self) -> bool:
        """Whether it was ended by SIGKILL, which no program sends to itself."""
        return self.by_signal and self.code == 128 + signal.SIGKILL


class Launcher:
    """The launcher: it runs all workers, and starts them again after a failure.

    Args:
        console: the terminal for the workers' output.
        log_dir: an existing folder for one file of output per worker; None for no files.
        grace: seconds between asking workers to end and SIGKILL. None: 10, and up to 300 for
            workers that write a checkpoint.
        max_restarts: how often all workers are started again after one has failed.
        restart_workers: how often each expendable worker is started again while the others run.
        takes_in: whether a worker that is started again now can take part in the run; its argument
            says whether the former was killed, and so had made no mistake of its own.
        another: returns one more worker, given its number, for SIGUSR1; None: there can be no more.
        follow: called with the name of an expendable worker that has failed; returns what says, at
            the end, whether the run has gone on without it. Else its failure is that of the run.
    """

    def __init__(
        self,
        console: output.Console,
        log_dir: Path | None,
        grace: float | None,
        max_restarts: int = 0,
        restart_workers: int = 0,
        takes_in: Callable[[bool], bool] = lambda killed: True,
        another: Callable[[int], Process] | None = None,
        follow: Callable[[str], Callable[[], bool]] = lambda name: lambda: True,
    ) -> None:
        self._console, self._log_dir = console, log_dir
        self._grace = _GRACE_SECONDS if grace is None else grace
        self._waits_for_checkpoints = grace is None
        self._max_restarts, self._restart_workers = max_restarts, restart_workers
        self._takes_in, self._another, self._follow = takes_in, another, follow
        self._events: queue.SimpleQueue[_Exit | int] = queue.SimpleQueue()
        self._restarts = 0
        self._command: Sequence[str] = ()
        self._processes: list[Process] = []
        self._removed: set[int] = set()  # workers that were asked to leave the run for good
        self._workers: list[subprocess.Popen[bytes]] = []  # one for each of `_processes`
        self._starts: list[int] = []
        self._started_at: dict[int, float] = {}
        self._pauses: dict[int, float] = {}  # the last of each worker, in seconds
        self._readers: list[threading.Thread] = []
        self._exits: dict[int, _Exit] = {}
        self._ended_here: set[int] = set()  # workers that were ended since another had failed
        self._ears: dict[int, parent.Ear] = {}  # to what each worker tells, since its last start

    def run(self, command: Sequence[str], processes: Callable[[], Sequence[Process]]) -> int:
        """Runs the workers, with restarts after failures, until their end; returns the exit code.

        Args:
            command: program and arguments of each worker.
            processes: called for each start; returns the processes, the chief first.
        """
        self._command = command
        with signals.signals_to(self._events), signals.guardian() as tell_guardian:
            while True:
                start = time.monotonic()
                self._processes = list(processes())
                failure, received = self._run_once(tell_guardian)
                cause = self._cause_of(failure)
                text = self._summary(failure, cause, received, time.monotonic() - start)
                if cause and cause.code and cause.rank not in self._ended_here:
                    failure = cause
                last = failure is None or received or self._restarts == self._max_restarts
                if last:
                    break
                self._restarts += 1
                _say(f"restart {self._restarts} of {self._max_restarts}: {text}")
        _say(text)
        if received == signal.SIGPIPE:  # otherwise Python reports an error at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure.code if failure else 0

    def _run_once(self, tell_guardian: Callable[[int], None]) -> tuple[_Exit | None, int | None]:
        """Starts each process and waits for all.

        Returns:
            The first failure, and the first signal received.
        """
        self._workers, self._readers = [], []
        self._exits, self._ears, self._ended_here = {}, {}, set()
        self._starts = [0] * len(self._processes)
        with contextlib.ExitStack() as end:
            threads = []
            for rank in range(len(self._processes)):
                threads += self._start(rank, end, tell_guardian)
            for thread in threads:  # after the last start, so that no output delays a start
                thread.start()
            ended = self._supervise(end, tell_guardian)
            for reader in self._readers:
                reader.join(SETTLE_SECONDS)  # a process that left its group may keep the pipe open
            for ear in self._ears.values():
                ear.close()
        failure, received = ended
        while not self._events.empty():  # signals that came too late to be passed on
            event = self._events.get()
            if not isinstance(event, _Exit) and event not in (signals.ADD, signals.REMOVE):
                received = received or event
        return failure, received

    def _start(
        self, rank: int, end: contextlib.ExitStack, tell_guardian: Callable[[int], None]
    ) -> list[threading.Thread]:
        """Starts a process; returns the threads that read its output and wait for its end.

        The threads are not started yet.
        """
        name, environment, _ = self._processes[rank]
        log: BinaryIO | None = None
        if self._log_dir is not None:
            path = self._log_dir / f"{name.replace(' ', '-')}.log"
            again = self._restarts or self._starts[rank]
            log = end.enter_context(path.open("ab" if again else "wb", buffering=0))
        terminal = rank == 0 and sys.stdout.isatty()  # Keras draws a progress bar on a terminal
        out, out_end = output.open_terminal(len(name) + 3) if terminal else os.pipe()
        err, err_end = os.pipe()
        ear = parent.Ear()
        if rank in self._ears:
            self._ears[rank].close()
        self._ears[rank] = ear
        try:
            worker = subprocess.Popen(
                self._command,
                env={**environment, **parent.variables(ear.writer)},
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                start_new_session=True,
                pass_fds=(ear.writer,),
            )
        except OSError:
            os.close(out)
            os.close(err)
            raise
        finally:
            for descriptor in (out_end, err_end, ear.writer):
                os.close(descriptor)
        end.callback(_signal_group, worker, signal.SIGKILL)
        self._workers[rank : rank + 1] = [worker]
        self._starts[rank] += 1
        self._started_at[rank] = time.monotonic()
        tell_guardian(worker.pid)
        readers = [
            threading.Thread(target=self._pass_on, args=(rank, name, log, *arguments), daemon=True)
            for arguments in ((out, False, terminal), (err, True, False))
        ]
        self._readers += readers
        return [*readers, threading.Thread(target=self._await, args=(rank, worker), daemon=True)]

    def _pass_on(
        self, rank: int, name: str, log: BinaryIO | None, source: int, to_stderr: bool, raw: bool
    ) -> None:
        """Reads one output of a worker until its end."""
        try:
            if raw:
                for chunk in output.read_chunks(source, log):
                    self._console.progress(rank, name, chunk)
            else:
                notes = quiet.Filter()
                for line in output.read_lines(source, log):
                    if to_stderr and notes.is_chatter(line):
                        continue  # from TensorFlow's import, before the program could filter it
                    self._console.line(rank, name, line, to_stderr)
        except OSError as error:  # the launcher's output is closed, or a disk is full
            if not isinstance(error, BrokenPipeError):
                _say(f"cannot write the output of {name} ({error})")
            self._events.put(signal.SIGPIPE)
            for _ in output.read_chunks(source, None):
                pass  # the pipe is read on, since a full pipe would keep the worker from ending
        os.close(source)

    def _await(self, rank: int, worker: subprocess.Popen[bytes]) -> None:
        if hasattr(os, "waitid"):  # before the worker is reaped, its group's number is not reused
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            _signal_group(worker, signal.SIGKILL)
        status = worker.wait()
        code, how = status, f"exit code {status}"
        if status < 0:
            code, how = 128 - status, f"killed by {signals.name_of(-status)}"
        self._events.put(_Exit(rank, code, how, status < 0))

    def _supervise(
        self, end: contextlib.ExitStack, tell_guardian: Callable[[int], None]
    ) -> tuple[_Exit | None, int | None]:
        """Waits for all workers; returns the first failure and the first signal received."""
        failure: _Exit | None = None
        received: int | None = None
        deadline, at_deadline, forced = float("inf"), signal.SIGTERM, False
        saved_by = 0.0  # until when a checkpoint is waited for
        running = set(range(len(self._workers)))
        # Expendable workers that have failed, each with the time when to restart or do without it.
        spared: dict[int, tuple[float, _Exit]] = {}
        # All of them, in order, each with what says whether the run has gone on without it.
        failed: list[tuple[_Exit, Callable[[], bool]]] = []
        while running or spared:
            due = min((when, rank) for rank, (when, _) in spared.items()) if spared else None
            event = self._next_event(min(deadline, due[0]) if due else deadline)
            now = time.monotonic()
            if event is None and due and now < deadline:
                _, event = spared.pop(due[1])
                if self._may_restart(event):
                    if self._starts_now(event.rank, end, tell_guardian):
                        running.add(event.rank)
                    else:
                        self._starts[event.rank] += 1
                        spared[event.rank] = now + self._pause(event.rank), event
                elif not self._can_spare(event, running, spared):
                    failure, deadline = event, now + SETTLE_SECONDS
            elif event is None and at_deadline == signal.SIGKILL and self._saves(running, saved_by):
                deadline = now + _LOOK_SECONDS
            elif event is None:
                self._signal_all(at_deadline)
                killed = at_deadline == signal.SIGKILL
                deadline = float("inf") if killed else now + self._grace
                at_deadline, forced = signal.SIGKILL, True
            elif isinstance(event, _Exit):
                running.discard(event.rank)
                self._exits[event.rank] = event
                if forced and event.by_signal:
                    self._ended_here.add(event.rank)
                tell_guardian(self._workers[event.rank].pid)
                if event.rank in self._removed:
                    _say(f"{self._processes[event.rank].name} has left: {event.how}")
                elif self._is_spared(event):
                    # It is not restarted at once: it may have ended because the chief ends.
                    if event.code:
                        spared[event.rank] = now + self._pause(event.rank), event
                        name = self._processes[event.rank].name
                        failed.append((event, self._follow(name)))
                elif event.code and failure is None:
                    failure = event
                    if received is None:  # otherwise all were asked to end already, with --grace
                        deadline = min(deadline, now + SETTLE_SECONDS)
                else:
                    of_chief = event.rank == 0 and self._asynchronous()
                    if of_chief:
                        # Without the chief the others have nothing to do.
                        deadline = min(deadline, now + self._grace)
                    if event.code and not forced and failure and not failure.by_signal:
                        # If the chief fails, the others end too, mostly before it. A worker ended
                        # by SIGKILL has not reacted to another's end, so it is the cause, even if
                        # others have ended before it.
                        killed = event.is_killed and received is None
                        failure = event if of_chief or killed else failure
            elif event in (signals.ADD, signals.REMOVE) and self._another is None:
                name = signals.name_of(event)
                _say(f"{name} is ignored: workers come and go in runs with --elastic alone")
            elif event == signals.ADD:
                running |= self._add(received or failure, end, tell_guardian)
            elif event == signals.REMOVE:
                self._remove(received or failure, running, spared)
            elif event != signal.SIGPIPE or received is None:
                passed_on = signal.SIGTERM if event == signal.SIGPIPE else event
                self._signal_all(passed_on if received is None else signal.SIGKILL)
                saved_by = now + SAVING_SECONDS if received is None else 0.0
                received = received or event
                deadline, at_deadline = now + self._grace, signal.SIGKILL
            over = 0 not in running and not self._processes[0].expendable
            # All that are left have come to their end, and the others are not needed any more.
            over |= not running and any(not each.code for each in self._exits.values())
            if failure or received or over:
                spared.clear()
        if failure is None:
            failure = next((event for event, went_on in failed if not went_on()), None)
        return failure, received

    def _add(
        self, ends: object, end: contextlib.ExitStack, tell_guardian: Callable[[int], None]
    ) -> set[int]:
        """Starts one more worker, unless the run ends; returns the new one's rank, if any."""
        if ends or not self._takes_in(False) or self._another is None:
            _say("no worker is added: training has not begun, or comes to its end")
            return set()
        rank = len(self._processes)
        self._processes.append(self._another(rank))
        self._starts.append(0)
        _say(f"{self._processes[rank].name} is added")
        if self._starts_now(rank, end, tell_guardian):
            return {rank}
        del self._processes[rank], self._starts[rank]
        return set()

    def _starts_now(
        self, rank: int, end: contextlib.ExitStack, tell_guardian: Callable[[int], None]
    ) -> bool:
        """Starts a worker while others run; returns whether there are the means to."""
        try:
            threads = self._start(rank, end, tell_guardian)
        except OSError as error:  # too many processes or open files, perhaps for a while
            _say(f"{self._processes[rank].name} cannot be started: {error}")
            return False
        for thread in threads:
            thread.start()
        return True

    def _remove(
        self, ends: object, running: set[int], spared: dict[int, tuple[float, _Exit]]
    ) -> None:
        """Has the worker that was added last leave; one that waits to be restarted is left out."""
        if ends or not self._takes_in(False):
            _say("no worker is removed: training has not begun, or comes to its end")
            return
        there = sorted((running | spared.keys()) - self._removed)
        if len(there) < 2:
            _say("no worker is removed: there is no other. SIGTERM ends the run")
            return
        last = there[-1]
        self._removed.add(last)
        _say(f"{self._processes[last].name} is removed")
        if last in running:
            _signal_group(self._workers[last], signal.SIGTERM)
        spared.pop(last, None)

    def _saves(self, running: Collection[int], saved_by: float) -> bool:
        """Returns whether a worker that runs is still given time to write a checkpoint."""
        saves = any(self._ears[rank].listen().get("saves") is True for rank in running)
        return saves and self._waits_for_checkpoints and time.monotonic() < saved_by

    def _blamed_by(self, rank: int) -> int | None:
        """Returns the worker because of which another has failed, as that says; None if none."""
        names = self._ears[rank].said.get("because") if rank in self._ears else None
        for other, process in enumerate(self._processes):
            if isinstance(names, list) and process.name in names and other in self._exits:
                return other
        return None

    def _cause_of(self, failure: _Exit | None) -> _Exit | None:
        """Returns the end of the worker because of which others failed, as they say.

        Where they name each other, it is the one whom the first of them has named: what that one
        says comes of the first one's end.
        """
        if failure is None:
            return None
        chain = [failure.rank]
        while (other := self._blamed_by(chain[-1])) is not None and other not in chain:
            chain.append(other)
        if other is None:
            return self._exits[chain[-1]] if len(chain) > 1 else failure
        circle = chain[chain.index(other) :]
        first = min(circle, key=lambda rank: _number(self._ears[rank].said.get("at")))
        return self._exits[circle[(circle.index(first) + 1) % len(circle)]]

    def _asynchronous(self) -> bool:
        return any(process.expendable for process in self._processes[1:])

    def _is_spared(self, ended: _Exit) -> bool:
        """Returns whether the end of a worker is not that of the run."""
        name, _, expendable = self._processes[ended.rank]
        over = any(not each.code for each in self._exits.values())
        return expendable and (over or self._takes_in(ended.is_killed) or self._follow(name)())

    def _pause(self, rank: int) -> float:
        """Seconds until a worker that has failed is started again: longer if it fails at once."""
        steady = time.monotonic() - self._started_at[rank] > _STEADY_SECONDS
        longer = min(2.0 * self._pauses.get(rank, 0.0), _LONGEST_PAUSE_SECONDS)
        self._pauses[rank] = SETTLE_SECONDS if steady else max(longer, SETTLE_SECONDS)
        return self._pauses[rank]

    def _may_restart(self, ended: _Exit) -> bool:
        starts = self._starts[ended.rank]
        if starts > self._restart_workers or not self._takes_in(ended.is_killed):
            return False
        name = self._processes[ended.rank].name
        _say(f"{name} failed: {ended.how}; restart {starts} of {self._restart_workers}")
        return True

    def _can_spare(self, ended: _Exit, running: set[int], spared: Collection[int]) -> bool:
        """Returns whether the run goes on without a worker, which it does if another one runs."""
        if not any(self._processes[rank].expendable for rank in running.union(spared)):
            return False
        _say(f"{self._processes[ended.rank].name} failed: {ended.how}; the others go on")
        return True

    def _next_event(self, until: float) -> _Exit | int | None:
        if until == float("inf"):
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            _signal_group(worker, number)

    def _summary(
        self, failure: _Exit | None, cause: _Exit | None, received: int | None, seconds: float
    ) -> str:
        count, kind = len(self._processes), "processes" if self._asynchronous() else "workers"
        text = f"all {count} {kind} done" if count > 1 else "worker done"
        if failure and cause:
            text = f"{self._processes[cause.rank].name} failed first: {cause.how};"
            silent = cause is not failure and cause.rank in self._ended_here
            if silent or not cause.code:
                name = self._processes[cause.rank].name
                how = (
                    "did not answer, and was ended"
                    if silent
                    else "ended first, with exit code 0 while others went on"
                )
                text = (
                    f"{name} {how}; {'' if silent else 'then '}"
                    f"{self._processes[failure.rank].name} failed: {failure.how};"
                )
            text += f" all {kind} ended" if count > 1 else " ended"
        if received:
            text = f"got {signals.name_of(received)}; {text}"
        return f"{text} after {seconds:.1f} s"


def _signal_group(worker: subprocess.Popen[bytes], number: int) -> None:
    """Signals a worker and its children, unless the worker has been reaped."""
    if worker.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)


def _number(told: Json) -> float:
    return float(told) if isinstance(told, int | float) else 0.0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tfpara-launch: {text}", file=sys.stderr, flush=True)
