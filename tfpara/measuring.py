"""Measures the minibatch, the syncs and the link of a script by running it for a few syncs.

The script runs unchanged, on one worker and on several. If TFPARA_MEASURE is set, the first `fit`
of a strategy trains some blocks without its callbacks, prints their times, and ends the program. No
TensorFlow here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from tfpara.cluster.ports import bind, joined
from tfpara.cluster.secret import for_start
from tfpara.planner import calibrated_link

VARIABLE = "TFPARA_MEASURE"
MARK = "tfpara measured: "
_SHOWN_LINES = 15  # number of last lines that are shown if a script fails
_WORKERS = 2  # number of workers, all on this machine, if no hosts are given
_LOOK_SECONDS = 1.0  # time between two checks whether a process has failed
_QUIET_SECONDS = 300.0  # longest time that the script may print no progress


def is_asked() -> bool:
    """Returns whether the environment asks a strategy to measure its first `fit`."""
    return os.environ.get(VARIABLE) == "1"


class MeasuringError(Exception):
    """A script could not be measured, with the reason in one sentence."""


def measure(
    command: Sequence[str],
    hosts: Sequence[str] = (),
    *,
    apart: bool = False,
) -> dict[str, float]:
    """Runs a script on one worker and on several, and returns the numbers that a plan needs.

    They have the names of `tfpara-plan`'s flags; `batch` is the samples in a worker's minibatch.

    Args:
        command: the script and its arguments.
        hosts: the machines of the workers. ssh must reach them, and the script, its data and
            Python must be at the same paths there. Empty: two processes on this machine.
        apart: whether each worker of the planned run will have a machine of its own. Then the
            single worker is measured with all cores, and workers are taken not to slow each other.
    """
    count = len(hosts) or _WORKERS
    apart = apart or len(set(hosts)) > 1
    share = max(1, len(os.sched_getaffinity(0)) // count)
    if hosts:
        single, several = _remote(command, hosts[:1]), _remote(command, hosts)
        places = f"{count} workers on {', '.join(hosts)}"
    else:
        single = _local(command, 1, 0 if apart else share)
        several = _local(command, count, share)
        places = f"{count} workers on this machine"
    (alone,) = _run(single, "1 worker", 1)
    return found(alone, _run(several, places, count), apart)


def found(
    alone: dict[str, float], together: Sequence[dict[str, float]], apart: bool
) -> dict[str, float]:
    """Returns the values of `measure` from the numbers that the workers printed.

    The times that are compared are those of a sample, not of a minibatch: if the script divides its
    batch by the number of workers, a single worker has larger minibatches.
    """
    count = len(together)
    mean = {name: sum(each[name] for each in together) / count for name in together[0]}
    sample = alone["step_ms"] / alone["batch"]
    together_sample = mean["step_ms"] / mean["batch"]
    slowdown = 1.0 if apart else max(1.0, together_sample / sample)
    # The time that one worker alone would need for a minibatch of mean["batch"] samples.
    step_ms = sample * mean["batch"] if apart else mean["step_ms"] / slowdown
    nbytes = mean["bytes"]
    seconds = {name: mean[f"{name}_ms"] / 1e3 for name in ("reduce", "empty")}
    link = calibrated_link(seconds["reduce"], mean["reduce_bytes"], count, seconds["empty"])
    reduce_ms = 1e3 * link.reduce_seconds(nbytes, count)
    return {
        "step_ms": step_ms,
        "slowdown": slowdown,
        "model_mb": nbytes / 1e6,
        "link_mbit": link.mbit,
        "link_delay_ms": 1e3 * link.delay_seconds,
        "sync_ms": max(0.0, mean["sync_ms"] - reduce_ms),
        "batch": mean["batch"],
    }


def _local(command: Sequence[str], workers: int, threads: int) -> list[tuple[list[str], str]]:
    limit = ["--threads", str(threads)] if threads else []
    launch = [sys.executable, "-m", "tfpara.launch", "-n", str(workers), *limit]
    return [([*launch, "--", sys.executable, *command], "")]


def _remote(command: Sequence[str], hosts: Sequence[str]) -> list[tuple[list[str], str]]:
    """Returns for each host a command, and its standard input: the run's secret."""
    # The port is for hosts[0]. A port that is free on this machine is probably free there, too.
    with bind("", 0) as listener:
        port = listener.getsockname()[1]
    secret = for_start({})
    started = []
    for rank, host in enumerate(hosts):
        variables = {
            VARIABLE: "1",
            "TFPARA_RANK": str(rank),
            "TFPARA_SIZE": str(len(hosts)),
            "TFPARA_COORDINATOR": joined(hosts[0].rpartition("@")[2], port),  # without ssh's USER@
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        # Other users of the host can see the command, so it does not contain the secret: the
        # command reads it from its standard input.
        reads = " ".join(f"read -r {name}; export {name};" for name in secret)
        program = shlex.join([sys.executable, *command])
        text = f"{reads} cd {shlex.quote(os.getcwd())} && {given} exec {program}"
        words = ["ssh", "-o", "BatchMode=yes", host, text]
        started.append((words, "".join(f"{value}\n" for value in secret.values())))
    return started


def _run(
    started: Sequence[tuple[list[str], str]], places: str, count: int
) -> list[dict[str, float]]:
    """Starts processes, prints their progress, and returns the numbers of their workers."""
    _tell(f"{places}: starting")
    results: list[dict[str, float]] = []
    printed: deque[str] = deque(maxlen=_SHOWN_LINES)
    with _Processes(started) as processes:
        for line in processes.lines():
            # Two processes may write into the same line. So a line may contain several marks, and
            # the text after a mark may be incomplete.
            _, *texts = line.split(MARK)
            told = [said for text in texts if (said := _told(text))]
            if not told:
                printed.append(line)
                continue
            processes.is_alive()
            for said in told:
                if "error" in said:
                    raise MeasuringError(said["error"])
                if "block" in said:
                    _tell(f"{places}: block {said['block']} of {said['of']}", over=True)
                else:
                    results.append(said)
            if len(results) == count:
                break
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if len(results) < count:
        raise MeasuringError(_why(printed, places, processes.was_quiet))
    return results


def _told(text: str) -> dict[str, Any]:
    """Returns what a process has told after a mark; nothing if it cannot be read."""
    try:
        said, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class _Processes:
    """Processes, given by their commands and standard inputs, with one common output.

    All of them end when the context ends.
    """

    def __init__(self, started: Sequence[tuple[list[str], str]]) -> None:
        self._started = started
        self.was_quiet = False

    def __enter__(self) -> _Processes:
        self._output, write = os.pipe()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": write, "stderr": write}
        environment = {**os.environ, VARIABLE: "1"}
        self._popens = [
            subprocess.Popen(words, env=environment, text=True, **pipes)
            for words, _ in self._started
        ]
        os.close(write)
        for popen, (_, given) in zip(self._popens, self._started, strict=True):
            assert popen.stdin is not None
            # If the process has ended already, this block can raise BrokenPipeError: either in
            # `write`, or at its end, where the pipe is flushed. The error is ignored here, because
            # `lines` notices the end of the process.
            with contextlib.suppress(BrokenPipeError), popen.stdin:
                popen.stdin.write(given)
        self.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._output)
        for popen in self._popens:
            popen.terminate()  # If the process is a launcher, it ends its workers, too.
        for popen in self._popens:
            popen.wait()

    def is_alive(self) -> None:
        """Notes progress; `lines` ends if this is not called for `_QUIET_SECONDS`."""
        self._deadline = time.monotonic() + _QUIET_SECONDS

    def lines(self) -> Iterator[str]:
        """Yields the lines that the processes print, until all end or are quiet for too long.

        It also ends if one of them has failed, since the others would wait for it.
        """
        begun = b""
        while (left := self._deadline - time.monotonic()) > 0:
            if not select.select([self._output], [], [], min(left, _LOOK_SECONDS))[0]:
                if any(popen.poll() for popen in self._popens):
                    return
                continue
            read = os.read(self._output, 1 << 16)
            if not read:
                return
            *lines, begun = (begun + read).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        self.was_quiet = True


def _why(printed: Sequence[str], places: str, was_quiet: bool) -> str:
    by_hand = "Measure by hand, and give --step_ms, --model_mb and --link_mbit."
    said = "\n".join(f"  {line}" for line in printed) or "  (nothing)"
    why = (
        f"{places}: the script ended before it was measured. It must call `fit` of a model of a "
        "PeriodicSyncStrategy, for some dozen minibatches."
    )
    if was_quiet:
        why = (
            f"{places} measured nothing in {_QUIET_SECONDS:.0f} s. The script must call `fit` of a "
            "model of a PeriodicSyncStrategy; loops of one's own are not measured."
        )
    return f"{why} {by_hand} Its last lines were:\n{said}"


def _tell(text: str, over: bool = False) -> None:
    """Prints progress; on a terminal, `over` makes it replace the last line."""
    terminal = sys.stderr.isatty()
    start = "\r" if over and terminal else ""
    print(f"{start}measuring: {text}", end="" if terminal and over else "\n", file=sys.stderr)
    sys.stderr.flush()
