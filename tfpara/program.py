"""Ends the programs of several workers together; one sentence explains a failure."""

from __future__ import annotations

import atexit
import contextlib
import dis
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from tfpara import cluster
from tfpara.cluster import Cluster, exit_codes, failures, parent, status_board
from tfpara.cluster import asynchronous as async_cluster
from tfpara.cluster.failures import Explanation

if TYPE_CHECKING:
    from tfpara.strategy import Strategy

# If this environment variable is set, but not to 0, the traceback of an error is printed before the
# sentence that explains the error.
FRAMES_VARIABLE = "TFPARA_TRACEBACK"
# A worker whose exit code is not 0 waits at most this long for the other workers to end, too.
_PARTING_SECONDS = 10.0
_RAISE = dis.opmap["RAISE_VARARGS"]  # the bytecode instruction of the statement `raise`

_explains = False  # whether this module has set `sys.excepthook`
_strategy: Strategy | None = None  # the synchronous strategy that was made last
_leaves: list[Callable[[bool], None]] = []
_tells: list[Callable[[int, str], None]] = []


def run(
    main: Callable[[], object],
    *,
    name: str = "tfpara",
    explain: Callable[[BaseException], str | None] | None = None,
    lost_worker_exit_code: int | None = None,
) -> NoReturn:
    """Runs a program that every worker runs, and ends the process.

    Put it at the end of a script: `tfpara.run(main)`, or `app.run(lambda _: tfpara.run(main))` with
    absl. A script works without `run`, too. With `run`

    - no worker ends before all workers have come to the end of `main`, so no worker loses a message
      from a worker that ends;
    - the process then ends at once, after it has called functions given to `atexit`; TensorFlow
      does not wait for heartbeats of workers that have ended;
    - for an error of tfpara, one sentence is printed on stderr, without a traceback, and the exit
      code is 1. TFPARA_TRACEBACK=1 in the environment adds the traceback.

    An error of the program itself is shown as Python shows it. After Ctrl-C the program prints
    "interrupted", and the exit code is 130. The argument of `sys.exit` becomes the exit code. In a
    cluster with parameter servers the other processes end when the chief ends, with the same code.

    Args:
        main: the program; called without arguments. Its result is not used.
        name: the first words of the sentence on stderr.
        explain: called with an error that tfpara cannot explain; returns the sentence, or None.
        lost_worker_exit_code: from 1 to 255: the exit code after a sync has failed because another
            worker was lost. None: TFPARA_LOST_WORKER_EXIT_CODE, or 1.

    Raises:
        ValueError: an exit code outside its range.
        RuntimeError: it is called in another thread than the main one.
        SystemExit: always if the process is the only worker, or if the cluster has parameter
            servers. Otherwise the process ends without an exception.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "tfpara.run ends the process, and is called in the thread "
            f"{threading.current_thread().name!r} of one that may have other work, as an actor of "
            "Ray has. Call it in the main thread, or call the program's main() itself."
        )
    asynchronous = async_cluster.is_meant()
    lost_code = exit_codes.lost_worker(lost_worker_exit_code)
    code, orderly, sentence = _ran(main, name, explain, lost_code)
    # The cluster's parameter servers are only in use if there is no synchronous strategy.
    if asynchronous and _strategy is None:
        if code:
            for tell in _tells:
                tell(code if isinstance(code, int) else 1, sentence)
        sys.exit(code)
    if not _has_others():
        sys.exit(code)
    _leave(code, orderly)


def _ran(
    main: Callable[[], object],
    name: str,
    explain: Callable[[BaseException], str | None] | None,
    lost_code: int,
) -> tuple[str | int | None, bool, str]:
    """Runs `main`; returns the exit code, whether all workers come to this end, and the cause.

    The cause, which other processes are told, is "" if nothing went wrong.
    """
    of_chief = "the chief has failed: "
    try:
        main()
    except SystemExit as leaving:
        code, is_number = leaving.code, isinstance(leaving.code, int)
        if isinstance(code, int) and code and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # Some schedulers send SIGTERM more than once. A later SIGTERM must not change the exit
            # code, which may ask for a restart.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        return code, is_number, "" if is_number else f"{of_chief}{leaving.code}"
    except KeyboardInterrupt:
        _say(name, Explanation("interrupted"))
        return exit_codes.INTERRUPTED, False, f"{of_chief}interrupted"
    except Exception as error:
        failures.say_last(error)
        found = _explained(error)
        sentence = found.sentence if found else ""
        if found is None and explain is not None and (own := explain(error)) is not None:
            found, sentence = Explanation(own), f"{of_chief}{own}"
        if found is None:
            # Python sets these two attributes if an error is not caught, and debuggers and loggers
            # read them. This function has caught the error, so it sets them itself.
            sys.last_value, sys.last_traceback = error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
            first = str(error).strip().splitlines()[:1]
            return 1, False, of_chief + ": ".join([type(error).__name__, *first])
        if _shows_frames(error):
            traceback.print_exception(error)
        _say(name, found)
        return lost_code if found.is_loss else 1, _is_everyones(error), sentence
    return 0, True, ""


def explain_errors() -> None:
    """Makes Python show an error that ends the program as one sentence, if tfpara has one.

    Both kinds of strategy call this before they check their arguments and the cluster.
    """
    global _explains
    if not _explains:
        sys.excepthook = _hook(sys.excepthook)
        _explains = True


def watch(strategy: Strategy, found: Cluster, timeout_seconds: float) -> None:
    """Remembers a synchronous strategy that was just made, for the end of the program."""
    global _strategy
    explain_errors()
    if _strategy is None:
        atexit.register(_part, os.getpid())
    _strategy = strategy
    failures.know(found, timeout_seconds)
    # This call raises ValueError if TFPARA_LOST_WORKER_EXIT_CODE is invalid. So the user learns it
    # before a worker is lost.
    exit_codes.lost_worker()


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """A context that explains errors of TensorFlow in all threads but the main one, by a note.

    `sys.excepthook` does not get an error that ends a thread, but engines such as Ray show it.
    """
    try:
        yield
    except Exception as error:
        if threading.current_thread() is not threading.main_thread() and not _is_ours(error):
            found = _explained(error)
            if found is not None:
                error.add_note(f"tfpara: {found.sentence}")
        raise


def on_leaving(leave: Callable[[bool], None]) -> None:
    """Registers `leave(orderly)`, which `run` calls when it ends this process at once.

    It leaves a group of processes. `orderly`: the program went well, so the others leave, too.
    """
    _leaves.append(leave)


def tell_of_failure(tell: Callable[[int, str], None]) -> None:
    """Registers `tell(exit_code, sentence)`, which `run` calls on failure with parameter servers.

    With it the chief ends the other processes together with itself. The sentence is empty if the
    program has called `sys.exit` with a number.
    """
    _tells.append(tell)


def _hook(previous: Callable[..., object]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        failures.say_last(error)
        found = _explained(error)
        if found is None and isinstance(error, KeyboardInterrupt) and _has_others():
            found = Explanation("interrupted")
        if found is None or _shows_frames(error):
            previous(kind, error, frames)
        if found is not None:
            _say("tfpara" if failures.is_of_tensorflow(error) else kind.__name__, found)
            if found.is_loss and exit_codes.lost_worker() != 1:
                # If a hook raises SystemExit, Python ends with the exit code of that exception.
                raise SystemExit(exit_codes.lost_worker())

    return hook


def _explained(error: BaseException) -> Explanation | None:
    """Returns the explanation of an error; None if only its traceback explains it.

    For a wrong argument or wrong data the explanation ends with the line of the script.
    """
    if _is_ours(error):
        return Explanation(" ".join(str(error).split()))
    if failures.is_of_tensorflow(error):
        return failures.explain(error)
    raised = _raised_here(error)
    if raised is None:
        return None
    line = status_board.line_of_error(error)
    where = f"{line}; " if line else ""
    return Explanation(f"{str(raised).strip()} [{where}{FRAMES_VARIABLE}=1 shows the traceback]")


def _is_ours(error: BaseException) -> bool:
    """Returns whether the error's class is tfpara's; then its message needs no traceback."""
    return type(error).__module__.startswith("tfpara.")


def _raised_here(error: BaseException) -> BaseException | None:
    """Returns the error if a statement `raise` in tfpara has raised it; else None.

    Such an error has a message for users. An error that Python or a library raises in tfpara's code
    is a mistake in that code. If AutoGraph has raised an error anew, the original is returned.
    """
    error = _original(error)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or not at.tb_frame.f_globals.get("__name__", "").startswith("tfpara."):
        return None
    raised = at.tb_frame.f_code.co_code[at.tb_lasti] == _RAISE
    return error if raised and not isinstance(error, AssertionError) else None


def _original(error: BaseException) -> BaseException:
    """Returns the original of an error that AutoGraph has raised anew; else `error` itself."""
    while error.__context__ is not None and "in user code:" in str(error):
        error = error.__context__
    return error


def _is_everyones(error: BaseException | None) -> bool:
    """Returns whether all workers raise the error at the same place."""
    return error is not None and (
        getattr(error, "of_all_workers", False) or _is_everyones(error.__cause__)
    )


def _shows_frames(error: BaseException) -> bool:
    """Returns whether the traceback of an error is shown beside its sentence.

    It is shown if the user asks for it. It is also shown if the script was handling another error,
    perhaps the cause, which the sentence does not mention.
    """
    if os.environ.get(FRAMES_VARIABLE, "") not in ("", "0"):
        return True
    behind = (raised := _original(error)).__context__
    if behind is None or raised.__suppress_context__:
        return False
    return status_board.line_of_error(behind) != ""


def _has_others() -> bool:
    """Returns whether this process is one of several workers, as far as it knows."""
    if _strategy is not None:
        return _strategy.company.changes or _strategy.num_workers > 1
    with contextlib.suppress(ValueError):
        return cluster.read().num_workers > 1
    return False


def _say(name: str, found: Explanation) -> None:
    """Prints why this process ends, and reports the cause to the launcher."""
    if found.lost:
        parent.tell(because=found.lost, at=time.monotonic())
    _flush()
    print(f"{name}: {found.sentence}", file=sys.stderr, flush=True)


def _part(process: int) -> None:
    """Tells the other workers of an elastic run that this program ends without `run`.

    Only `process`, which made the strategy, tells this; processes forked from it do not.
    """
    # Python sets `sys.last_value` if an error ends the program, but not if `sys.exit` ends it.
    # After an error this worker tells nothing, so the others count it as lost.
    if process == os.getpid() and _strategy is not None and not hasattr(sys, "last_value"):
        _strategy.company.program_ends()


def _leave(code: str | int | None, orderly: bool) -> NoReturn:
    """Ends this worker's process at once; `code` is as for `sys.exit`.

    `orderly`: whether the other workers come to the same end.
    """
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    code = code if isinstance(code, int) else int(code is not None)
    if orderly and _strategy is not None:
        # If this worker left at once, its connections would close, and another worker could miss
        # the rest of a message from it.
        parting = threading.Thread(target=_strategy.company.part, daemon=True)
        parting.start()
        parting.join(None if code == 0 else _PARTING_SECONDS)
    atexit.unregister(_part)
    for leave in _leaves:
        leave(code == 0)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # Python has no public function for this.
    _flush()
    os._exit(code)


def _flush() -> None:
    """Writes what the program has printed, unless its output is closed or takes no more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # without output the stream is None
            stream.flush()
