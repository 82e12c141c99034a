"""The command line of the meeting point, as in `tfpara-meet --workers=4 --port=4000`."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from tfpara.cluster import exit_codes, ports, secret
from tfpara.elastic.meeting import ADDRESS
from tfpara.elastic.meeting_point import Meeting
from tfpara.launch.command import in_range

_EPILOG = f"""
The workers of an elastic run (tfpara.PeriodicSyncStrategy with elastic=...) connect to this
program. It notices when a worker is lost or joins, and tells the others. Give each worker
{ADDRESS}=HOST:PORT. tfpara-launch --elastic serves a meeting point itself.

Give this program and all workers the same secret, in {secret.VARIABLE} or
{secret.FILE_VARIABLE}. Without a secret, everybody who reaches the port can take part in the run
and end it. So without a secret --host must be a loopback address, unless you give --without_secret.

The program ends when the run is over, or on SIGINT or SIGTERM. Exit code: 0 if the run is
complete; 75 if the run continues from a checkpoint once you start this program and the workers
again; 1 if the run has not begun; 2 if this program cannot listen.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves a meeting point until the run is over; returns the exit code."""
    options = _options(argv)
    options.host = options.host.strip("[]")
    try:
        shared = secret.read()
        if not shared:
            here = ports.is_loopback(options.host)
            print(f"tfpara-meet: {_no_secret(options.host, here)}", file=sys.stderr, flush=True)
            if not here and not options.without_secret:
                return 2
        meeting = Meeting(
            options.host, options.port, options.workers, options.start_seconds, shared
        )
    except (OSError, UnicodeError, secret.SecretError) as error:
        print(
            f"tfpara-meet: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr
        )
        return 2
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # If a signal was ignored when this program started, it stays ignored. For example, a shell
        # script starts a program in the background (`&`) with SIGINT ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: over.set())
    reached = socket.gethostname() if ports.is_every_interface(options.host) else options.host
    _say(f"{ADDRESS}={ports.joined(reached, meeting.port)}")
    told = 0
    while not over.wait(0.5):
        history = list(meeting.state.history)
        for generation in history[told:]:
            members = ", ".join(map(str, generation.members))
            _say(f"generation {generation.number}: workers {members}: {generation.why}")
        told = len(history)
        if meeting.state.phase == "ended":
            _say(str(meeting.state.where()["ended"]))
            break
        if meeting.is_deaf:  # the meeting's thread has ended with an error, and printed it
            return 2
    meeting.close()
    if meeting.state.is_complete:
        return 0
    return exit_codes.restart() if meeting.state.has_begun else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tfpara-meet",
        description="Serve the meeting point of an elastic run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    whole = functools.partial(in_range, int, unit="a whole number")
    add("--workers", "-n", type=whole(1, 10000), required=True,
        help="number of workers that begin the run")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=whole(0, 65535), default=0,
        help="port to listen on (default: 0, any free one)")  # fmt: skip
    add(
        "--start_seconds",
        type=in_range(float, 0.001, 1e9, "a number of seconds"),
        default=300.0,
        help="longest wait for all --workers in seconds, from the first of them on (default: 300)",
    )
    add(
        "--without_secret",
        action="store_true",
        help="listen without a secret, also on a network; only where you trust everybody",
    )
    return parser.parse_args(argv)


def _say(text: str) -> None:
    """Prints a line; the run continues if nobody reads stdout any more."""
    try:
        print(f"tfpara-meet: {text}", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_secret(host: str, here: bool) -> str:
    """Returns the warning that a run has no secret, and the fix."""
    who = "every user of this machine" if here else f"whoever reaches --host={host}"
    return (
        f"there is no secret, so {who} can take part in the run and end it. Set "
        f"{secret.FILE_VARIABLE} or {secret.VARIABLE} to the same here and for all workers: make a "
        f"file by {secret.MAKE_ONE}" + ("." if here else "; or say --without_secret.")
    )


if __name__ == "__main__":
    sys.exit(main())
