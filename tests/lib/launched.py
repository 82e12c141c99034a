"""A running `tfpara-launch`, for tests."""

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

DEADLINE = 120.0  # seconds; reached only by a hang
LAUNCH = (sys.executable, "-m", "tfpara.launch")
FOREVER = "import signal\nwhile True: signal.pause()\n"


def default_signals():
    """Restores signals that a background shell ignores; the launcher would go on ignoring them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def signals_kept():
    """A context after which this process handles signals as before."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        yield former
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class Launched:
    """A running launcher whose stdout is read as it comes."""

    def __init__(self, *arguments, **options):
        self.process = subprocess.Popen(
            [*LAUNCH, *map(str, arguments)],
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "preexec_fn": default_signals,
                **options,
            },
        )
        self.seen = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.terminate()
        self.process.communicate(timeout=DEADLINE)

    def read_until(self, *words):
        """Reads stdout until it holds all words."""
        while not all(word.encode() in self.seen for word in words):
            self.read_more(words)

    def read_more(self, wanted="more"):
        """Reads the next output on stdout."""
        if not select.select([self.process.stdout], [], [], DEADLINE)[0]:
            pytest.fail(f"no {wanted} in {self.seen!r}")
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        if not chunk:
            errors = self.process.stderr.read() if self.process.stderr else b""
            pytest.fail(f"no {wanted} in {self.seen!r}: {errors!r}")
        self.seen += chunk

    def finish(self, seconds=DEADLINE):
        """Returns (exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, (self.seen + out).decode(), (err or b"").decode()


def launch(*arguments, seconds=DEADLINE, **options):
    with Launched(*arguments, **options) as launched:
        return launched.finish(seconds)
