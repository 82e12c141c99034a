"""Starts, reads and ends the processes of a run, as `supervisor.py` decides."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tfpara.cluster import parent, quiet
from tfpara.elastic.meeting import NAME
from tfpara.launch import output, signals
from tfpara.launch.supervisor import (
    SETTLE_SECONDS,
    Action,
    Exit,
    Note,
    Policy,
    Process,
    Send,
    Start,
    Supervisor,
)
from tfpara.status.run import RunStatus

_LONGEST_WAIT = 0.5  # the longest time, in seconds, between two looks at the processes' reports


class _Child(NamedTuple):
    """A started process, its reports, and the threads that read its output."""

    popen: subprocess.Popen[bytes]
    reports: parent.Reports
    readers: list[threading.Thread]


class Launcher:
    """Runs processes to their end, and restarts all after a failure, at most `max_restarts` times.

    `log_dir` is an existing folder for one file of output per process; None for no files.
    """

    def __init__(
        self,
        console: output.Console,
        policy: Policy,
        log_dir: Path | None = None,
        max_restarts: int = 0,
    ) -> None:
        self._console, self._log_dir = console, log_dir
        self._policy, self._max_restarts = policy, max_restarts
        self._restarts = 0
        self._run_id = secrets.token_hex(8)
        # The live page of the run and the summary at its end show this status.
        self.status = RunStatus("the processes that this launcher has started")
        # An event is (rank, status) at the end of a process, or the number of a received signal.
        self._events: queue.SimpleQueue[tuple[int, int] | int] = queue.SimpleQueue()
        self._children: dict[int, _Child] = {}  # by rank: the process that was started last
        self._command: Sequence[str] = ()
        self._tell_guardian: Callable[[int], None] = lambda group: None

    def run(self, command: Sequence[str], processes: Callable[[], Sequence[Process]]) -> int:
        """Runs the processes, with restarts after failures, until their end.

        `command` has the program and arguments of each process. `processes` is called for each
        start, and returns the processes, the chief first. Returns the exit code.
        """
        self._command = command
        with signals.signals_to(self._events), signals.guardian() as self._tell_guardian:
            while True:
                begin = time.monotonic()
                supervisor = Supervisor(processes(), self._policy)
                self._run_once(supervisor)
                outcome = supervisor.outcome(time.monotonic() - begin)
                if not outcome.code or outcome.signal or self._restarts == self._max_restarts:
                    break
                self._restarts += 1
                self._tell(f"restart {self._restarts} of {self._max_restarts}: {outcome.text}")
        for line in self.status.summary():
            _say(line)
        _say(outcome.text)
        # SIGPIPE means that stdout may be closed. Python would then report an error when it flushes
        # stdout at exit. So stdout is replaced by /dev/null.
        if outcome.signal == signal.SIGPIPE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return outcome.code

    def _run_once(self, supervisor: Supervisor) -> None:
        self._children = {}
        with contextlib.ExitStack() as end:
            threads: list[threading.Thread] = []
            for rank, process in enumerate(supervisor.processes):
                threads += self._start(rank, process, end)
                supervisor.started(rank, time.monotonic())
            # The threads are started only after all processes have been started. Otherwise output
            # of the first processes would delay the start of the others.
            for thread in threads:
                thread.start()
            while not supervisor.is_over:
                for action in self._next_actions(supervisor):
                    self._act(action, supervisor, end)
            for child in self._children.values():
                # The wait is limited, since a process that has left the worker's process group may
                # still run and keep the pipe open.
                for reader in child.readers:
                    reader.join(SETTLE_SECONDS)
                child.reports.close()
        # Signals that came when no process was left still count for the outcome.
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, int):
                supervisor.signalled(event, time.monotonic())

    def _next_actions(self, supervisor: Supervisor) -> list[Action]:
        """Waits for an event; returns the actions that follow."""
        event: tuple[int, int] | int | None = None
        due = supervisor.due
        with contextlib.suppress(queue.Empty):
            # If a signal comes just before the wait begins, Python calls the signal's handler only
            # when the wait is over. So no wait is longer than _LONGEST_WAIT.
            wait = min(max(0.0, due - time.monotonic()), _LONGEST_WAIT)
            event = self._events.get(timeout=wait)
        now = time.monotonic()
        for rank, child in self._children.items():
            said = child.reports.read()
            supervisor.said(rank, said)
            self.status.told(supervisor.processes[rank].name, said.get("progress"))
        if event is None:
            return supervisor.tick(now)
        if isinstance(event, int):
            return supervisor.signalled(event, now)
        rank, status = event
        self._tell_guardian(self._children[rank].popen.pid)
        end = Exit.of(rank, status)
        is_fault = end.code != 0 and not supervisor.is_forced(end)
        self.status.ended(supervisor.processes[rank].name, end.how, is_fault)
        return supervisor.ended(rank, status, now)

    def _act(self, action: Action, supervisor: Supervisor, end: contextlib.ExitStack) -> None:
        match action:
            case Note(text):
                self._tell(text)
            case Send(rank, number):
                _signal_group(self._children[rank].popen, number)
            case Start(rank):
                try:
                    threads = self._start(rank, supervisor.processes[rank], end)
                # The machine may have too many processes or open files, perhaps only for a while.
                except OSError as error:
                    for note in supervisor.not_started(rank, str(error), time.monotonic()):
                        self._act(note, supervisor, end)
                    return
                supervisor.started(rank, time.monotonic())
                for thread in threads:
                    thread.start()

    def _tell(self, text: str) -> None:
        self.status.note(text)
        _say(text)

    def _start(
        self, rank: int, process: Process, end: contextlib.ExitStack
    ) -> list[threading.Thread]:
        """Starts a process; returns threads, not started yet, that read it and await its end."""
        name, former = process.name, self._children.get(rank)
        log: BinaryIO | None = None
        if self._log_dir is not None:
            path = self._log_dir / f"{name.replace(' ', '-')}.log"
            log = end.enter_context(path.open("ab", buffering=0))
        # Keras draws its progress bar only on a terminal, so the chief gets one.
        terminal = rank == 0 and sys.stdout.isatty()
        out, out_end = output.open_terminal(len(name) + 3) if terminal else os.pipe()
        err, err_end = os.pipe()
        reports = parent.Reports()
        try:
            popen = subprocess.Popen(
                self._command,
                env={
                    **process.environment,
                    NAME: name,
                    parent.RUN_ID: self._run_id,
                    **parent.variables(reports.writer),
                },
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                start_new_session=True,
                pass_fds=(reports.writer,),
            )
        except OSError:
            os.close(out)
            os.close(err)
            reports.close()
            raise
        finally:
            for descriptor in (out_end, err_end, reports.writer):
                os.close(descriptor)
        self.status.started(name, popen.pid)
        end.callback(_signal_group, popen, signal.SIGKILL)
        self._tell_guardian(popen.pid)
        readers = [
            threading.Thread(target=self._pass_on, args=(rank, name, log, *arguments), daemon=True)
            for arguments in ((out, False, terminal), (err, True, False))
        ]
        if former:
            readers += former.readers
            former.reports.close()
        self._children[rank] = _Child(popen, reports, readers)
        awaiting = threading.Thread(target=self._await, args=(rank, popen), daemon=True)
        return [*readers[:2], awaiting]

    def _pass_on(
        self, rank: int, name: str, log: BinaryIO | None, source: int, to_stderr: bool, raw: bool
    ) -> None:
        """Reads one output of a process until its end."""
        try:
            if raw:
                for chunk in output.read_chunks(source, log):
                    self._console.progress(rank, name, chunk)
            else:
                notes = quiet.Filter()
                for line in output.read_lines(source, log):
                    if to_stderr and notes.is_chatter(line):
                        # The line comes from the import of TensorFlow. It was printed before the
                        # program could filter such lines by itself.
                        continue
                    self._console.line(rank, name, line, to_stderr)
        except OSError as error:  # the launcher's own output is closed, or a disk is full
            if not isinstance(error, BrokenPipeError):
                _say(f"cannot write the output of {name} ({error})")
            self._events.put(signal.SIGPIPE)
            for _ in output.read_chunks(source, None):
                pass  # Reading goes on: if the pipe were full, the process could not end.
        os.close(source)

    def _await(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        # `waitid` waits for the worker's end, but does not reap the worker. So the rest of its
        # process group is killed before `wait` reaps the worker. After `wait`, the group's number
        # might belong to other processes.
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(popen, signal.SIGKILL)
        self._events.put((rank, popen.wait()))


def _signal_group(popen: subprocess.Popen[bytes], number: int) -> None:
    """Signals a process and its children, unless the process has been reaped."""
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tfpara-launch: {text}", file=sys.stderr, flush=True)
