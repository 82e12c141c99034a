"""The exit codes of a program, which tell its launcher or engine whether to restart it.

`tfpara-launch` restarts a program after any code but 0. Other engines decide by the code: a TFJob
with `restartPolicy: ExitCode` restarts pods only after codes from 128 on.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from tfpara.cluster.tf_config import shown

RESTART_VARIABLE, LOST_VARIABLE = "TFPARA_RESTART_EXIT_CODE", "TFPARA_LOST_WORKER_EXIT_CODE"
# 75 is EX_TEMPFAIL of sysexits.h: another attempt may succeed.
_RESTART, _LOST = 75, 1
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
# What each code means; the reference in the documentation shows this table. Users can set other
# codes in place of _RESTART and _LOST.
MEANINGS = {
    0: "the program has finished",
    1: "an error of the program or of the library",
    2: "one of tfpara's commands, such as `tfpara-launch`, had wrong arguments, or could not start "
    "its work",
    INTERRUPTED: "Ctrl-C",
    "128 + N": "signal N ended the process: 137 is SIGKILL (by the kernel, if memory ran out), "
    "143 is SIGTERM",
    f"{_RESTART}, or {RESTART_VARIABLE}": "the program was asked to end (SIGTERM) and has written "
    "a checkpoint: start it again",
    f"{_LOST}, or {LOST_VARIABLE}": "another worker was lost, or sent nothing for too long",
}


def in_shell(status: int) -> int:
    """Returns the code that a shell gives: `status`, or 128 + N if `status` is −N for signal N."""
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def ended_by(*numbers: int, say: Callable[[str], object] = lambda name: None) -> Iterator[None]:
    """A context in which signals end the program like an error, with the exit code of a shell.

    Signals that are ignored, as under nohup, stay ignored. `say` is called with the name of the
    signal that has come.
    """

    def end(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the end
        say(signal.Signals(number).name)
        sys.exit(in_shell(-number))

    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def open_streams() -> None:
    """Opens the null device as stdin, stdout or stderr where the process was started without it.

    Otherwise a file or a pipe would get the number of the missing one. Characters that the encoding
    of stdout lacks are written as escapes, as those of stderr are.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def with_output(name: str, program: Callable[[], int]) -> int:
    """Calls a program that prints to stdout; returns its exit code, also if stdout takes no more.

    A reader that has ended, as `head` does, needs no message: the code is then that of SIGPIPE.
    """
    open_streams()
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise  # An error of stdout has no file name, so this error is about a file.
        # Python flushes stdout again when it ends. So that this cannot fail, stdout becomes the
        # null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        end = error.__context__
        if isinstance(end, KeyboardInterrupt) or (isinstance(end, SystemExit) and end.code):
            # The program was ending already. Ctrl-C, for example, ends both it and stdout's reader.
            raise end from None
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"{name}: stdout cannot be written to: {error.strerror}", file=sys.stderr)
        return 1


def restart(given: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code of a program that was asked to end and is to be started again.

    `given` is the program's own choice; None takes TFPARA_RESTART_EXIT_CODE, or 75. Raises
    ValueError if the code is no number from 1 to 255.
    """
    return _checked("restart_exit_code", given, RESTART_VARIABLE, _RESTART, environ)


def lost_worker(given: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code after the loss of another worker; see `restart` for the arguments."""
    return _checked("lost_worker_exit_code", given, LOST_VARIABLE, _LOST, environ)


def _checked(
    argument: str, given: int | None, variable: str, default: int, environ: Mapping[str, str]
) -> int:
    text = environ.get(variable, "").strip()
    if given is None and not text:
        return default
    name, value = (variable, text) if given is None else (argument, str(given))
    if not (value.isdecimal() and len(value) < 4 and 1 <= int(value) <= 255):
        raise ValueError(
            f"{name}={shown(value)} is no exit code of a failure: give a number from 1 to 255, or "
            f"leave it out for {default}."
        )
    return int(value)
