"""A run of a command with injected faults."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfpara.chaos import faults, processes, report
from tfpara.cluster import exit_codes

PROGRESS = "TFPARA_CHAOS_PROGRESS"  # environment variable: the path of the script's progress file
# The points of a run at which a fault may be injected. Each name is mapped to words that the
# library prints when the run reaches this point.
POINTS = {
    "begin": " replica",
    "join": "joins a run that is under way",
    "loss": "is lost",
    "come": "has come: ",
    "restart": "; restart ",
}
_POLL_SECONDS = 0.2
_SAMPLE_SECONDS = 2.0
_AGAIN_SECONDS = 1.0  # pause between the end of the command and a restart


class Plan(NamedTuple):
    """The plan of a drill: kinds and times of the faults."""

    kinds: Sequence[str] = ()  # kinds of faults to draw from; empty for a quiet run
    # Mean number of seconds between two faults. Each wait is 0.5 to 1.5 times this number, drawn at
    # random.
    every: float = 30.0
    until: float = float("inf")  # after this many seconds of training, there are no more faults
    lasting: float = 8.0  # duration in seconds of faults that have an end
    # Names from `POINTS`. A fault is injected when the run first reaches such a point, and when it
    # first reaches the point after each timed fault.
    points: Sequence[str] = ()
    seed: int = 0  # seed of all random choices
    checkpoints: Path | None = None  # the folder of the run's checkpoints, if it was given
    starts: int = 20  # largest number of starts of the command


class Drill:
    """Runs a command to its end, and injects faults.

    A command that fails after a fault is restarted, as an engine would do.
    """

    def __init__(self, command: Sequence[str], plan: Plan) -> None:
        self._command, self._plan = command, plan
        self._draw = random.Random(plan.seed)
        self._lines: list[report.Line] = []
        self._made: list[report.Made] = []
        self._missed: list[report.Made] = []
        self._samples: list[report.Sample] = []
        # The points that the run has reached, as its output shows.
        self._seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A fault is injected when the run next reaches one of these points.
        self._open = set(plan.points)
        self._begin = time.monotonic()
        self._due: float | None = None  # the time of the next fault; None until training has begun
        self._until = 0.0  # after this time there are no more faults
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> report.Run:
        """Runs the command; returns what was observed."""
        with tempfile.TemporaryDirectory(prefix="tfpara-chaos-") as folder:
            progress, starts, code = Path(folder) / "progress", 0, 1
            over = threading.Event()
            watch = threading.Thread(target=self._sample, args=(over,), daemon=True)
            watch.start()
            try:
                while code and starts < self._plan.starts:
                    starts, before = starts + 1, len(self._made)
                    code = self._once(progress)
                    if code and len(self._made) == before:
                        break  # no new fault was injected, so the failure has another cause
                    if code:
                        say(f"the command has ended with {code}; it is started again")
                        time.sleep(_AGAIN_SECONDS)
            finally:
                over.set()
                watch.join()
            steps, told = self._progress(progress)
        return report.Run(
            self._now(), code, starts, self._lines, self._made, self._missed, steps, self._samples,
            told,
        )  # fmt: skip

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _once(self, progress: Path) -> int:
        process = subprocess.Popen(
            self._command,
            env={**os.environ, PROGRESS: str(progress)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._process = process
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                self._look(process.pid, progress)
            reader.join()
        finally:
            if process.poll() is None:
                # On SIGTERM the launcher ends its workers, too.
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30.0)
                process.kill()
        return exit_codes.in_shell(process.wait())

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            self._lines.append(report.Line(self._now(), text))
            with contextlib.suppress(OSError):
                sys.stdout.write(text)
                sys.stdout.flush()
            for point in self._plan.points:
                if POINTS[point] in text:
                    self._seen.put(point)

    def _look(self, launcher: int, progress: Path) -> None:
        """Injects a fault if one is due, or if a point was reached."""
        point = ""
        with contextlib.suppress(queue.Empty):
            point = self._seen.get(timeout=_POLL_SECONDS)
        now = self._now()
        if self._due is None:
            if not self._plan.kinds or not self._has_begun(progress):
                return
            self._due, self._until = now + self._wait(), now + self._plan.until
        if now > self._until:
            return
        if point in self._open:
            self._open.discard(point)
            self._make(launcher, progress, point)
        elif now >= self._due:
            self._open = set(self._plan.points)
            self._make(launcher, progress)
            self._due = max(self._due, self._now() - self._plan.every) + self._wait()

    def _has_begun(self, progress: Path) -> bool:
        return progress.exists() or any(POINTS["begin"] in line.text for line in self._lines)

    def _wait(self) -> float:
        return self._plan.every * self._draw.uniform(0.5, 1.5)

    def _make(self, launcher: int, progress: Path, point: str = "") -> None:
        kind = self._draw.choice(list(self._plan.kinds))
        workers = processes.workers(launcher)
        trains = {line.get("pid") for line in _told(progress)}
        workers = [each for each in workers if each.pid in trains] if trains else workers
        scene = faults.Scene(
            launcher, workers, self._draw, self._plan.lasting, self._plan.checkpoints
        )
        began = self._now()
        made, seen = self._made, ""
        try:
            if len(workers) < 2 and kind not in ("corrupt", "disk_full"):
                raise faults.Missed("no other worker trains, which could go on")
            seen = faults.FAULTS[kind].make(scene)
        except faults.Missed as missed:
            made, seen = self._missed, str(missed)
        at = f" at {point!r}" if point else ""
        say(f"{began:.1f} s: {kind}{at}: {'not made: ' if made is self._missed else ''}{seen}")
        made.append(report.Made(kind, began, self._now(), seen, point))

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(_SAMPLE_SECONDS):
            process = self._process
            if process is None or process.poll() is not None:
                continue
            launcher = processes.Worker(process.pid, "launcher")
            for worker in [launcher, *processes.workers(process.pid)]:
                size = processes.size(worker.pid)
                if size is not None:
                    sample = report.Sample(self._now(), worker.name, worker.pid, size)
                    self._samples.append(sample)

    def _progress(self, progress: Path) -> tuple[list[report.Step], dict[str, Any]]:
        steps, told = [], {}
        for line in _told(progress):
            match line:
                case {"time": int() | float() as at, "done": int() | float() as done}:
                    steps.append(report.Step(at - self._begin, done))
                case {"minibatches": dict() as minibatches}:
                    told = minibatches
        return sorted(steps), told


def say(text: str) -> None:
    """Prints a line with the program's name."""
    print(f"tfpara-chaos: {text}", flush=True)


def _told(progress: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError):
        for line in progress.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                found += [told] if isinstance(told, dict) else []
    return found
