"""A worker's or parameter server's side of the control channel (`lobby.py` is the chief's)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from tfpara import version
from tfpara.cluster import messages, quiet, secret, startup
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.cluster.messages import Channel
from tfpara.cluster.waiting import RETRY_SECONDS, tried
from tfpara.parameter_server.control.membership import beat_seconds
from tfpara.typing import Json

PURPOSE = "lobby"
_TICK_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
# After a signal has asked a worker to end, the worker goes on serving for this many seconds, unless
# the chief ends the run earlier.
_LEAVING_SECONDS = 3.0


class _Over(Exception):
    """This process has to end. Arguments: exit code, and cause (empty if the run is finished)."""


def serve(
    cluster: AsyncCluster,
    start_server: Callable[[dict[str, list[str]]], None],
    startup_timeout_seconds: float,
) -> NoReturn:
    """Takes part in a run until the chief says that it is over, then ends the process.

    The exit code is 0 if the chief finished. Otherwise this process prints the cause in one
    sentence, and the code is the one that the chief sends, or 1.

    On SIGTERM a worker tells the chief. If the chief writes checkpoints, the worker ends some
    seconds later, or with the chief, with the exit code that asks for a restart; else it ends at
    once, with 128 plus the signal's number. A parameter server passes SIGTERM and SIGINT on to the
    chief and keeps serving until the chief ends the run, so that the model can still be saved. A
    repeated SIGTERM changes nothing, since some schedulers repeat it. SIGINT after another signal
    ends a parameter server at once.

    `start_server` starts TensorFlow's server, given the addresses by job.
    """
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            os._exit(128 + number)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            noted = number == signal.SIGTERM or cluster.task_type == "ps"
            signal.signal(number, note if noted else signal.SIG_DFL)
    # TensorFlow writes notes when the chief connects. These are suppressed until the end,
    # because the chief may connect again.
    with quiet.starting():
        code, sentence = attend(cluster, start_server, startup_timeout_seconds, received)
    # Without `os._exit`, TensorFlow's threads would keep this process alive, or TensorFlow's exit
    # handlers would wait for other processes.
    with contextlib.suppress(OSError):
        if sentence:
            print(f"tfpara: {sentence}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def attend(
    cluster: AsyncCluster,
    start_server: Callable[[dict[str, list[str]]], None],
    startup_timeout_seconds: float,
    received: list[int],
) -> tuple[int, str]:
    """Takes part in a run as `serve` does, but returns the exit code and cause.

    A signal handler appends to `received` the signals that ask this process to end.
    """
    try:
        channel, welcome = _enter(cluster, startup_timeout_seconds, received)
        try:
            _start(cluster, channel, start_server, welcome["welcome"])
            _stay(cluster, channel, float(welcome["timeout_seconds"]), received)
        finally:
            channel.close()
    except _Over as over:
        code, sentence = over.args
        return code, sentence


def _enter(
    cluster: AsyncCluster, startup_timeout_seconds: float, received: list[int]
) -> tuple[Channel, dict[str, Json]]:
    """Connects to the chief, retrying as needed; returns the connection and the welcome."""
    deadline = time.monotonic() + startup_timeout_seconds
    chief, shared = cluster.describe("chief", 0), secret.read()

    def enter() -> tuple[Channel, dict[str, Json]]:
        if received:
            raise _Over(128 + received[0], "")
        wait = max(RETRY_SECONDS, min(_ANSWER_SECONDS, deadline - time.monotonic()))
        channel = messages.connect(cluster.jobs["chief"][0], shared, PURPOSE, wait)
        channel.send(
            hello=cluster.spec(),
            job=cluster.task_type,
            index=cluster.task_index,
            version=version.__version__,
        )
        answer = channel.wait(min(deadline, time.monotonic() + _ANSWER_SECONDS)) or {}
        if channel.differs:
            raise _Over(1, messages.other_secret(chief))
        _obey(answer)
        if "welcome" in answer:
            return channel, answer
        channel.close()
        raise ConnectionError("it did not answer")

    try:
        return tried(enter, deadline, chief)
    except (OSError, UnicodeError) as error:
        sentence = (
            f"after {startup_timeout_seconds:g} s this process, {cluster.name}, has not started: "
            f"{chief} is not there (last answer: {error}). Start one process for each address of "
            "TF_CONFIG within startup_timeout_seconds."
        )
        raise _Over(1, sentence) from error


def _start(
    cluster: AsyncCluster,
    channel: Channel,
    start_server: Callable[[dict[str, list[str]]], None],
    spec: dict[str, list[str]],
) -> None:
    """Starts TensorFlow's server; tells the chief that it listens, or why it cannot start."""
    try:
        startup.listen(cluster.address, cluster.name).close()
        start_server(spec)
    except Exception as error:
        sentence = str(error)
        if not isinstance(error, startup.StartupError):
            first = next(iter(sentence.splitlines()), "")
            sentence = f"{cluster.name} cannot start TensorFlow's server: {first or error!r}."
        channel.send(problem=sentence)
        raise _Over(1, sentence) from error
    channel.send(serving=True)


def _stay(
    cluster: AsyncCluster, channel: Channel, timeout_seconds: float, received: list[int]
) -> NoReturn:
    """Sends signs of life until the run is over."""
    chief = cluster.describe("chief", 0)
    beat_at, told, code, leave_at = 0.0, False, 1, float("inf")
    finishing: dict[str, Json] = {}
    looked_at = time.monotonic()
    while True:
        channel.wait_for(min(_TICK_SECONDS, beat_seconds(timeout_seconds)))
        for message in channel.receive():
            _obey(message)
            finishing = message.get("finishing", finishing)
            if "leave" in message:
                code = int(message["leave"] or 128 + received[0])
                leave_at = leave_at if message["leave"] else 0.0
        now, before = time.monotonic(), looked_at
        looked_at = now
        # If the last turn of this loop is longer ago than half of the timeout, this process itself
        # was suspended. So the chief's silence in that time does not count.
        if now - before > timeout_seconds / 2:
            channel.heard = now
        lost = ""
        if channel.closed:
            lost = f"{chief} is gone: its connection ended before the run did"
        elif now - channel.heard > timeout_seconds:
            lost = f"{chief} was silent for longer than timeout_seconds={timeout_seconds:g}"
        # If `finishing` is set, the chief has said that its program is over. When the chief's
        # interpreter ends, the thread that sends signs of life stops before the process does. So
        # neither silence nor a closed connection is an error now.
        if lost and finishing:
            raise _Over(int(finishing["code"]), str(finishing["sentence"]))
        if lost:
            raise _Over(code, f"{lost}; its output may say why. Start all processes again.")
        if received and not told:
            channel.send(leaving=signal.Signals(received[0]).name)
            told, code = True, 128 + received[0]
            leave_at = now + _LEAVING_SECONDS if cluster.task_type == "worker" else leave_at
        if now >= leave_at:
            raise _Over(code, "")
        if now >= beat_at:
            channel.send()
            beat_at = now + beat_seconds(timeout_seconds)


def _obey(message: dict[str, Json]) -> None:
    """Raises `_Over` if the message tells this process to end."""
    if "end" in message:
        raise _Over(int(message["end"]["code"]), str(message["end"]["sentence"]))
