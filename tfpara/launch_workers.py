"""The launcher's work: start processes, pass on output and signals, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tfpara import cluster
from tfpara import launch_output as output

# After a failure the others have this long to end by themselves, so that their own error messages
# come out, before they get SIGTERM.
SETTLE_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Reads the number of each worker's process group, once at its start and again at its end, and at
# the launcher's end, however that came, kills those that had none.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class _Exit(NamedTuple):
    rank: int
    code: int  # as a shell reports it
    how: str


class Launcher:
    """Runs sets of workers, one after the other.

    Args:
        console: where their output goes.
        log_dir: an existing folder for one file of output per worker; None for no files.
        grace: seconds between asking workers to end and SIGKILL.
        max_restarts: how often all workers are started again after one has failed.
    """

    def __init__(
        self,
        console: output.Console,
        log_dir: Path | None,
        grace: float,
        max_restarts: int = 0,
    ) -> None:
        self._console, self._log_dir, self._grace = console, log_dir, grace
        self._max_restarts = max_restarts
        self._events: queue.SimpleQueue[_Exit | int] = queue.SimpleQueue()
        self._restarts = 0
        self._workers: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []

    def run(
        self, command: Sequence[str], environments: Callable[[], Sequence[dict[str, str]]]
    ) -> int:
        """Starts workers, again where one has failed, and waits; returns the exit code.

        Args:
            command: program and arguments of each worker.
            environments: called for each start; gives the environment of each worker.
        """
        with _signals_to(self._events), _guardian() as tell_guardian:
            while True:
                start = time.monotonic()
                failure, received = self._run_once(command, environments(), tell_guardian)
                text = _summary(failure, received, len(self._workers), time.monotonic() - start)
                last = failure is None or received or self._restarts == self._max_restarts
                if last:
                    break
                self._restarts += 1
                _say(f"restart {self._restarts} of {self._max_restarts}: {text}")
        _say(text)
        if received == signal.SIGPIPE:  # else Python complains at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure.code if failure else 0

    def _run_once(
        self,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        tell_guardian: Callable[[int], None],
    ) -> tuple[_Exit | None, int | None]:
        """Starts one worker per environment and waits for all.

        Returns:
            The first failure, and the first signal received.
        """
        self._workers, self._readers = [], []
        with contextlib.ExitStack() as end:
            for rank, environment in enumerate(environments):
                self._start(rank, command, environment, end)
                tell_guardian(self._workers[-1].pid)
            waiters = [
                threading.Thread(target=self._await, args=(rank,), daemon=True)
                for rank in range(len(self._workers))
            ]
            for thread in (*self._readers, *waiters):  # not before: no fork beside threads
                thread.start()
            ended = self._supervise(tell_guardian)
            for reader in self._readers:
                reader.join(SETTLE_SECONDS)  # a process that left its group may hold the pipe
        failure, received = ended
        while not self._events.empty():  # signals that came too late to be passed on
            event = self._events.get()
            received = received or (None if isinstance(event, _Exit) else event)
        return failure, received

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        environment: dict[str, str],
        end: contextlib.ExitStack,
    ) -> None:
        name = cluster.label(rank)
        log: BinaryIO | None = None
        if self._log_dir is not None:
            path = self._log_dir / f"{name.replace(' ', '-')}.log"
            log = end.enter_context(path.open("ab" if self._restarts else "wb", buffering=0))
        terminal = rank == 0 and sys.stdout.isatty()  # so that Keras draws its progress bar
        out, out_end = output.open_terminal(len(name) + 3) if terminal else os.pipe()
        err, err_end = os.pipe()
        try:
            worker = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                start_new_session=True,
            )
        finally:
            os.close(out_end)
            os.close(err_end)
        end.callback(_signal_group, worker, signal.SIGKILL)
        self._workers.append(worker)
        for arguments in ((out, False, terminal), (err, True, False)):
            reader = threading.Thread(
                target=self._pass_on, args=(rank, name, log, *arguments), daemon=True
            )
            self._readers.append(reader)

    def _pass_on(
        self, rank: int, name: str, log: BinaryIO | None, source: int, to_stderr: bool, raw: bool
    ) -> None:
        """Reads one output of a worker until its end."""
        try:
            if raw:
                for chunk in output.read_chunks(source, log):
                    self._console.progress(rank, name, chunk)
            else:
                for line in output.read_lines(source, log):
                    self._console.line(rank, name, line, to_stderr)
        except OSError as error:  # nobody reads our output any more, or a disk is full
            if not isinstance(error, BrokenPipeError):
                _say(f"cannot write the output of {name} ({error})")
            self._events.put(signal.SIGPIPE)
            for _ in output.read_chunks(source, None):
                pass  # a full pipe would keep the worker from ending
        os.close(source)

    def _await(self, rank: int) -> None:
        worker = self._workers[rank]
        if hasattr(os, "waitid"):  # until the worker is reaped, its group cannot be another's
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            _signal_group(worker, signal.SIGKILL)
        status = worker.wait()
        code, how = status, f"exit code {status}"
        if status < 0:
            code, how = 128 - status, f"killed by {_signal_name(-status)}"
        self._events.put(_Exit(rank, code, how))

    def _supervise(self, tell_guardian: Callable[[int], None]) -> tuple[_Exit | None, int | None]:
        """Waits for all workers; returns the first failure and the first signal received."""
        failure: _Exit | None = None
        received: int | None = None
        deadline, at_deadline = float("inf"), signal.SIGTERM
        running = len(self._workers)
        while running:
            event = self._next_event(deadline - time.monotonic())
            now = time.monotonic()
            if event is None:
                self._signal_all(at_deadline)
                killed = at_deadline == signal.SIGKILL
                deadline = float("inf") if killed else now + self._grace
                at_deadline = signal.SIGKILL
            elif isinstance(event, _Exit):
                running -= 1
                tell_guardian(self._workers[event.rank].pid)
                if event.code and failure is None:
                    failure = event
                    if received is None:  # else they have been asked to end, and have --grace
                        deadline = min(deadline, now + SETTLE_SECONDS)
            elif event != signal.SIGPIPE or received is None:
                passed_on = signal.SIGTERM if event == signal.SIGPIPE else event
                self._signal_all(passed_on if received is None else signal.SIGKILL)
                received = received or event
                deadline, at_deadline = now + self._grace, signal.SIGKILL
        return failure, received

    def _next_event(self, timeout_seconds: float) -> _Exit | int | None:
        if timeout_seconds == float("inf"):
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            _signal_group(worker, number)


def _signal_group(worker: subprocess.Popen[bytes], number: int) -> None:
    """Signals a worker and its children, unless the worker has been reaped."""
    if worker.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)


def _summary(failure: _Exit | None, received: int | None, count: int, seconds: float) -> str:
    text = f"all {count} workers done" if count > 1 else "worker done"
    if failure:
        text = f"{cluster.label(failure.rank)} failed first: {failure.how};"
        text += " all workers ended" if count > 1 else " ended"
    if received:
        text = f"got {_signal_name(received)}; {text}"
    return f"{text} after {seconds:.1f} s"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tfpara-launch: {text}", file=sys.stderr, flush=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[_Exit | int]) -> Iterator[None]:
    """Turns signals into events. Those ignored, as under nohup, stay ignored, by workers too."""
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    former = {
        number: signal.signal(number, lambda received, _: events.put(received))
        for number in handled
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _guardian() -> Iterator[Callable[[int], None]]:
    """Starts the process that ends the workers if the launcher is killed."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    ) as process:

        def tell(group: int) -> None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.write(b"%d\n" % group)

        yield tell
