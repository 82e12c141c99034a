"""Helpers for all programs: quieten TensorFlow, set threads and devices, print errors as one line.

Import this module before TensorFlow.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# TensorFlow logs nothing at this level. Its errors still reach Python, as exceptions.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.filterwarnings("ignore", category=UserWarning, module="keras")

from absl import app, flags
from absl import logging as absl_logging

import tfpara.cluster
import tfpara.cluster.asynchronous
import tfpara.cluster.failures
from tfpara import remote_files
from tfpara.cluster import exit_codes
from tfpara.cluster.startup import StartupError
from tfpara.whole_number import LARGEST_COUNT

_BAD_INPUT = (ValueError, TypeError, OSError, KeyError, ImportError, OverflowError, StartupError)
_LONGEST_LINE = 4000  # characters; longer error messages are shortened
_THREADS = flags.DEFINE_integer(
    "threads",
    0,
    "CPU threads of TensorFlow in this process; 0: what TF_NUM_INTRAOP_THREADS says, else one per "
    "core",
    lower_bound=0,
    upper_bound=10000,
)
_DEVICES = flags.DEFINE_integer(
    "devices_per_worker",
    0,
    "replicas of this process on logical CPU devices; 0: one per GPU, or one on the CPU",
    lower_bound=0,
    upper_bound=10000,
)


_calls: set[subprocess.Popen[bytes]] = set()  # running processes that `call` has started


class Failure(Exception):
    """An error that the user can correct. Only its message is printed."""


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Turns errors from checks of arguments and files into a `Failure`."""
    try:
        yield
    except _BAD_INPUT as error:
        raise Failure(_one_line(error)) from error


def run(main: Callable[[], None], evaluator: Callable[[], None] | None = None) -> NoReturn:
    """Parses the flags, runs `main`, and ends the process, on failure with one line on stderr.

    Args:
        main: the program.
        evaluator: the program of an evaluator, a process that takes no part in the training. If it
            is None, an evaluator ends at once.
    """

    def checked() -> None:
        with bad_input():
            _check_numbers()
        if evaluator is not None and tfpara.cluster.is_evaluator():
            evaluator()
            return
        # The cluster is checked before TensorFlow starts, because TensorFlow would hang if the
        # cluster were wrong.
        with bad_input():
            asynchronous = tfpara.cluster.asynchronous
            meant = asynchronous.is_meant()
            tfpara.cluster.taking_part(asynchronous.read if meant else tfpara.cluster.read)
        main()

    def ended() -> NoReturn:
        app.run(
            lambda argv: tfpara.run(checked, name=program(), explain=_explain), flags_parser=_parse
        )

    sys.exit(exit_codes.with_output(program(), ended))


def program() -> str:
    """Returns the name of the running program, such as "train"."""
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def resolved_flags(*left_out: flags.FlagHolder) -> str:
    """Returns the present values of the program's flags, in the form of --flagfile."""
    chosen = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    names = {flag.name for flag in left_out}
    lines = sorted({flag.serialize() for flag in chosen if flag.name not in names} - {""})
    return "".join(f"{line}\n" for line in lines)


def only_for(holds: bool, chosen: Iterable[flags.FlagHolder], what: str) -> None:
    """Refuses flags that would have no effect.

    Args:
        holds: whether the flags have an effect.
        chosen: the flags.
        what: the condition under which they have an effect, in words.

    Raises:
        ValueError: `holds` is false, and one of the flags has another value than its default.
    """
    for flag in chosen:
        if not holds and flag.value != flag.default:
            raise ValueError(f"--{flag.name}={_shown(flag.value)} is for {what}. Leave it out.")


def refuse_urls(*chosen: flags.FlagHolder) -> None:
    """Makes the program refuse URLs as values of flags whose files are on this machine alone."""
    for flag in chosen:
        flags.register_validator(
            flag.name,
            lambda path: "://" not in (path or ""),
            "a URL, and here it must be a path of this machine",
        )


def setup_tensorflow() -> list[str] | None:
    """Sets threads and devices by the flags; returns the strategy's `devices` (None: default)."""
    import tensorflow as tf

    tf.get_logger().setLevel(logging.ERROR)
    absl_logging.set_verbosity(absl_logging.WARNING)
    if _THREADS.value:
        tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
        tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)
    if not _DEVICES.value:
        return None
    from tfpara.sync.simulation import make_devices

    make_devices(_DEVICES.value)
    return [f"CPU:{number}" for number in range(_DEVICES.value)]


def call(
    out: Path, name: str, command: list[str], watch: Callable[[str], None] | None = None
) -> list[str]:
    """Runs `python -m COMMAND` with one thread.

    Args:
        out: directory of the log.
        name: name of the log, without .log.
        command: a module and its arguments.
        watch: called every second, and at the end, with everything that was printed so far.

    Returns:
        The lines that the command printed, or one empty line. They are also in OUT/NAME.log.

    Raises:
        Failure: the command failed; the message has its last lines.
    """
    log = out / f"{name}.log"
    threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment | dict.fromkeys(threads, "1"),
        )
    _calls.add(process)
    try:
        code = process.wait() if watch is None else _watched(process, log, watch)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        _calls.discard(process)
    lines = log.read_text(errors="replace").splitlines()
    if code:
        raise Failure("\n".join([f"{name} ended with code {code}; {log} ends:", *lines[-8:]]))
    return lines or [""]


def whole_numbers(flag: flags.FlagHolder, least: int = 1) -> list[int]:
    """Returns the values of a list flag; raises Failure if they are not whole numbers ≥ `least`."""
    if not flag.value or not all(v.isdecimal() and int(v) >= least for v in flag.value):
        raise Failure(
            f"--{flag.name}={','.join(flag.value)} must be whole numbers of at least {least}, with "
            "commas."
        )
    return [int(value) for value in flag.value]


def _watched(process: subprocess.Popen[bytes], log: Path, watch: Callable[[str], None]) -> int:
    """Waits for a process and returns its exit code."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        watch(log.read_text(errors="replace"))
        if process.returncode is not None:
            return process.returncode


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end the program like an error.

    What it has started ends, and half files are removed. Under nohup SIGHUP stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def end_calls() -> None:
    """Ends the processes of `call` that are running, whichever thread has started them."""
    for process in list(_calls):
        process.terminate()


def pyplot(backend: str, what: str = "the plot") -> Any:
    """Returns matplotlib's pyplot, which draws without a window.

    Args:
        backend: matplotlib's name of the format that it writes, such as "svg".
        what: subject of the message if matplotlib is missing.

    Raises:
        Failure: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise Failure(f"{what} needs matplotlib. pip install matplotlib installs it.") from error
    matplotlib.use(backend)
    matplotlib.rcParams["svg.hashsalt"] = "tfpara"  # fixed salt, so equal results give equal files
    from matplotlib import pyplot

    return pyplot


def write_text(path: Path | str, text: str) -> None:
    """Writes a file, perhaps at a URL, that appears whole or not at all."""
    with remote_files.whole(path) as place:
        place.write_text(text)


def write_json(path: Path | str, content: Any) -> None:
    """Writes JSON to a file, perhaps at a URL, that appears whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise flags.Error(f"unexpected arguments {rest[1:]}. Flags are written --name=value")
    except flags.Error as error:
        _complain(_one_line(error))
        sys.exit(2)
    except (ValueError, RecursionError) as error:
        # The usual cause is a flag file that absl cannot read. absl's message does not name the
        # file, so the file is looked up in the command line.
        pairs = zip(["", *argv], argv, strict=False)
        flag = ("-flagfile", "--flagfile")
        files = [w for before, w in pairs if "flagfile=" in w or before in flag or w in flag]
        text = _one_line(error)
        if files:
            what = "is no text in UTF-8" if isinstance(error, UnicodeError) else "has no flags"
            text = (
                f"{' '.join(files)}, or a file that it names, {what} ({text}). "
                "Give a file with one --name=value in a line."
            )
        _complain(text)
        sys.exit(2)
    return rest


def _check_numbers() -> None:
    """Raises ValueError for NaN, infinity and huge numbers, which pass the bounds of absl."""
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise ValueError(f"--{flag.name}={flag.value} must be a finite number.")
        if isinstance(flag.value, int) and abs(flag.value) > LARGEST_COUNT:
            raise ValueError(f"--{flag.name}={flag.value} must be at most {LARGEST_COUNT}.")


def _explain(error: BaseException) -> str | None:
    """Returns one line for a `Failure`, or an error of files or in the data; else None."""
    if isinstance(error, Failure):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return "nobody reads its output any more"
    if isinstance(error, OSError):  # for example because the disk is full
        return _one_line(error)
    if not tfpara.cluster.failures.is_of_tensorflow(error):
        return None
    text = str(error)
    for mark in ("CorpusError: ", "ValueError: "):
        if mark in text:
            return _cause(text.split(mark, 1)[1])
    if type(error).__name__ == "ResourceExhaustedError":
        cause = _cause(text)
        if os.strerror(errno.ENOSPC) in cause:  # a disk is full, not the memory
            return cause
        return f"there is too little memory for this model and data: {cause}"
    return None


def _cause(text: str) -> str:
    """Returns the first telling line of TensorFlow's message, without references to the graph."""
    text = re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\]|\[type\.googleapis.*", " ", text)
    for line in text.splitlines():
        line = " ".join(line.split())
        if line and not re.match(
            r"Graph execution error|Detected at node|<stack|\d+ root error", line
        ):
            return line
    return "TensorFlow gives no cause."


def _one_line(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    line = " ".join(str(text).split())
    # A message may quote a value or flag from a damaged file. The quoted text may have any length,
    # so a long message is shortened.
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE // 2]} …{line[-200:]}"


def _complain(message: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # stdout cannot be written, or is None
        sys.stdout.flush()
    print(f"{program()}: {message}", file=sys.stderr, flush=True)


def _show(kind: type[BaseException], *error: Any) -> None:
    """Shows an error that ends the program; Ctrl-C, also during imports, is one line."""
    if issubclass(kind, KeyboardInterrupt):
        _complain("interrupted")
    else:
        _former_hook(kind, *error)


# All programs import this module before TensorFlow, whose import takes seconds. So the hook already
# acts if the user presses Ctrl-C during that import.
_former_hook, sys.excepthook = sys.excepthook, _show
