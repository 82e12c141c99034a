"""Filters for log lines of TensorFlow and Keras that need no action of the user.

TF_CPP_MIN_LOG_LEVEL=0 in the environment turns the filters off.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# A pattern of the lines to suppress. Its first alternatives match a heading and notes (I0000).
# TensorFlow's server, its search for CUDA, and oneDNN write these notes through the library Abseil,
# which ignores TF_CPP_MIN_LOG_LEVEL.
_CHATTER = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called"
    r"|I0000 [\d:. ]+ "
    r"(grpc_server_lib|eager_service_impl|coordination_service\w*|cudart_stub|port)\.cc:\d+\] "
    # XLA writes these notes when it compiles its first step.
    r"|I0000 [\d:. ]+ service\.cc:\d+\] (XLA service|  StreamExecutor device) "
    r"|I0000 [\d:. ]+ device_compiler\.h:\d+\] Compiled cluster using XLA!"
    # TensorFlow logs these lines when it is imported, with or without GPUs, because it registers
    # CUDA's libraries twice.
    r"|([EW]0000 [\d:. ]+ |[\d:. -]*[EW] [\w/]+/)"
    r"(cuda_(fft|dnn|blas)|computation_placer)\.cc:\d+\] .*(Unable to|already) register"
    # TensorFlow logs these lines when an elastic run ends a sync because a worker is lost.
    r"|[\d:. -]+E [\w/]+/(base_collective_executor|ring_alg)\.cc:\d+\] .*(ABORTED|aborted): tfpara"
    # TensorFlow logs these lines when an asynchronous run cancels chunks, or connects to a process
    # that has come back.
    r"|W0000 [\d:. ]+ grpc_worker_service\.cc:\d+\] RecvTensor cancelled"
    r"|W0000 [\d:. ]+ context_distributed_manager\.cc:\d+\] Device filters can only be"
)
_IS_CHATTER = re.compile(_CHATTER.encode())
# Notes of several lines: a pattern of the first line, and a pattern of the lines after it. In the
# first note, a parameter server or a worker prints the options of its session: one option a line,
# and an empty line at the end. In the second, the chief says that it could not free a value or send
# a function, because the process is gone or the chunk that the value belongs to was cancelled.
_LONG_NOTES = {
    re.compile(rb"I0000 .*\] SessionOptions: "): re.compile(rb" *(\w+( \{|: .*)|\}|)\r?\n?$"),
    re.compile(
        rb"[EW]0000 .*\] (Ignoring an error encountered when deleting remote tensors"
        rb"|Unable to destroy remote tensor handles|Unable to close remote context"
        rb"|Failed to (register|remove) function remotely|Socket closed$)"
    ): re.compile(
        rb"Additional GRPC error information from remote target |:(\{\"|UNKNOWN:)"
        rb"|This could happen if the remote target has been disconnected"
    ),
}
# Lines about MultiWorkerMirroredStrategy: its cluster and devices, its health check (turned off on
# purpose), and its collective operations (configured when the strategy is made).
_ABOUT_TENSORFLOW = re.compile(
    "MultiWorkerMirroredStrategy with cluster_spec|Check health not enabled"
    "|Single-worker MultiWorkerMirroredStrategy|Collective ops is not configured"
    "|Enabling collective ops after|Enabled multi-worker collective ops with available devices"
    "|Using MirroredStrategy with devices"
)


def install() -> None:
    """Suppresses warnings that come in every run; a second call changes nothing."""
    if _shows_all():
        return
    # `fit` has shuffle=True by default. If the data are a dataset, Keras warns that it ignores this
    # argument.
    warnings.filterwarnings("ignore", message=r"`shuffle=True` was passed, but will be ignored")
    # With parameter servers, workers read their datasets inside a graph. For each such dataset,
    # tf.data warns about the dataset's options.
    warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data options")
    logging.getLogger("tensorflow").addFilter(_is_not_of_coordinator)
    hook = sys.unraisablehook
    if getattr(hook, "func", None) is not _report:
        sys.unraisablehook = functools.partial(_report, hook)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Suppresses TensorFlow's notes while it connects the workers."""
    if _shows_all():
        yield
        return
    # The import is here, not at the top, because this file also runs as a program (`_pass_on`). The
    # program is started with Python's options -I and -S, with which Python does not find tfpara.
    from tfpara.cluster import parent

    with regrouping(), contextlib.nullcontext() if parent.is_there() else _without_chatter():
        yield


@contextlib.contextmanager
def regrouping() -> Iterator[None]:
    """Suppresses the notes of TensorFlow's Python code when it connects or reconnects workers."""
    loggers = [] if _shows_all() else [logging.getLogger("tensorflow"), logging.getLogger("absl")]
    for logger in loggers:
        logger.addFilter(_is_news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_news)


class Filter:
    """Tells which lines of a process's stderr are to be suppressed, given in order."""

    def __init__(self) -> None:
        self._rest: re.Pattern[bytes] | None = None  # pattern of the next lines of a long note

    def is_chatter(self, line: bytes) -> bool:
        """Returns whether the next line is to be suppressed."""
        if _shows_all():
            return False
        if self._rest is not None and self._rest.match(line):
            self._rest = self._rest if line.strip() else None
            return True
        self._rest = next((rest for begin, rest in _LONG_NOTES.items() if begin.match(line)), None)
        return self._rest is not None or _IS_CHATTER.match(line) is not None


def _shows_all() -> bool:
    return os.environ.get(_LEVEL) == "0"


def _is_not_of_coordinator(record: logging.LogRecord) -> bool:
    """Tells whether a log line is not that of TensorFlow's coordinator of workers."""
    # `AsyncStrategy` tells of each lost process once, and raises an error for a failed chunk.
    return record.filename != "cluster_coordinator.py"


def _report(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Reports an error in a `__del__` by `hook`, unless TensorFlow frees threads there."""
    # TensorFlow does so for a lost worker, and meets the error of the lost connection again.
    if getattr(unraisable.object, "__qualname__", "") != "Executor.__del__":
        hook(unraisable)


def _is_news(record: logging.LogRecord) -> bool:
    return not _ABOUT_TENSORFLOW.match(record.getMessage())


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Removes TensorFlow's notes from this process's stderr, as a launcher would.

    A separate process passes on all other lines, so that no line is lost if TensorFlow ends this
    process or hangs.
    """
    try:
        real = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    sys.stderr.flush()
    try:
        passing = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=real,
            start_new_session=True,  # so that Ctrl-C does not reach the new process
        )
        os.dup2(passing.stdin.fileno(), 2)  # type: ignore[union-attr]
        passing.stdin.close()  # type: ignore[union-attr]
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            passing.wait()
    finally:
        os.close(real)


def _pass_on() -> None:
    """Copies lines from stdin to stdout, except TensorFlow's notes, until stdin ends."""
    # Some schedulers send a signal to every process of a job, whose last lines come after that.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    filtered = Filter()
    for line in sys.stdin.buffer:
        if not filtered.is_chatter(line):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _pass_on()
