"""Starts the chief, workers and parameter servers of a cluster as real processes, for tests."""

from __future__ import annotations

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from tests.lib import warm
from tests.lib.cluster_of_processes import DEAD_PROXY, free_ports
from tests.lib.launched import default_signals
from tfpara.cluster.asynchronous import AsyncCluster

PROGRAMS = pathlib.Path(__file__).parent / "programs"
DEADLINE = 150.0  # seconds; reached only by a hang, or on a machine with far too much to do


def views(workers: int, ps: int) -> dict[str, AsyncCluster]:
    """Returns each process's view of one cluster, by its name: "chief", "worker 0", "ps 0", ..."""
    chief, *others = (f"127.0.0.1:{port}" for port in free_ports(1 + workers + ps))
    jobs = {"chief": (chief,), "worker": tuple(others[:workers]), "ps": tuple(others[workers:])}
    first = AsyncCluster(jobs, "chief", 0)
    return {"chief": first} | {
        f"{job} {index}": first._replace(task_type=job, task_index=index)
        for job, index in first.members
    }


class Process:
    """A running process whose lines, of both its outputs, are read as they come."""

    def __init__(self, program: str, arguments: list[str], tf_config: str, **environ: str) -> None:
        threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        env = os.environ | dict.fromkeys(threads, "1") | {"TF_CONFIG": tf_config} | environ
        env["https_proxy"] = DEAD_PROXY
        words = [str(PROGRAMS / program), *arguments]
        streams = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        if program == "lobby_process.py":  # without TensorFlow
            command = [sys.executable, *words]
            self.popen = subprocess.Popen(command, env=env, preexec_fn=default_signals, **streams)
        else:
            self.popen = warm.Popen(words, env=env, **streams)
        self.output = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """Reads until a line that begins with `text`, which it returns."""
        until = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {text!r} in {self.output!r}") from None
            if line is None:
                raise AssertionError(f"no {text!r} in {self.output!r}, which is all")
            self.output += line
            if line.startswith(text):
                return line.strip()

    def command(self, text: str) -> None:
        """Writes a line to the process's stdin."""
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.popen.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Waits for the end of the process; returns the exit code and all that it printed."""
        code = self.popen.wait(DEADLINE)
        self._reader.join(DEADLINE)
        while not self._lines.empty():
            self.output += self._lines.get() or ""
        return code, self.output


class Processes:
    """Processes by name; a context manager that ends them all."""

    def __init__(
        self,
        workers: int,
        ps: int,
        startup_seconds: float = 60.0,
        timeout_seconds: float = 60.0,
        program: str = "lobby_process.py",
        arguments: Sequence[str] = (),
    ) -> None:
        self.views = views(workers, ps)
        self._program = program
        self._arguments = [str(startup_seconds), str(timeout_seconds), *arguments]
        self._running: dict[str, Process] = {}
        self._all: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            if process.popen.poll() is None:
                process.signal(signal.SIGKILL)
            process.end()
            process.popen.stdin.close()

    def __getitem__(self, name: str) -> Process:
        return self._running[name]

    def start(self, *names: str, view: AsyncCluster | None = None) -> None:
        """Starts processes: all, if none are named; `view` replaces what they see."""
        for name in names or self.views:
            tf_config = (view or self.views[name]).tf_config()
            self._running[name] = Process(self._program, self._arguments, tf_config)
            self._all.append(self._running[name])

    def start_all(self) -> None:
        """Starts all processes, and waits until they have met."""
        self.start()
        self["chief"].wait_for("gathered")

    def ends(self, *but: str) -> dict[str, tuple[int, str]]:
        """Waits for all processes but some; returns their exit codes and outputs."""
        return {name: p.end() for name, p in self._running.items() if name not in but}

    def address(self, name: str) -> str:
        """Returns the address of a process."""
        return self.views[name].address
