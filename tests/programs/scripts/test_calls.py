"""How the demo and the study run other programs."""

import os
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from scripts import common
from tests.lib.launched import default_signals

UNREAD = "nobody reads its output any more"


def test_a_call_gives_the_lines_that_were_printed(tmp_path):
    lines = common.call(tmp_path, "month", ["calendar", "2024", "2"])
    assert "February 2024" in lines[0]
    assert (tmp_path / "month.log").read_text().splitlines() == lines


def test_a_failed_call_tells_how_it_ended(tmp_path):
    with pytest.raises(common.Failure) as failed:
        common.call(tmp_path, "none", ["no_such_program"])
    text = str(failed.value)
    assert f"none ended with code 1; {tmp_path}/none.log ends:" in text
    assert "No module named no_such_program" in text.splitlines()[-1]


def test_a_call_ends_with_who_waits_for_it(tmp_path, monkeypatch):
    started = []
    popen = common.subprocess.Popen
    monkeypatch.setattr(
        common.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )

    def leave(*_):
        raise SystemExit(143)

    former = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(SystemExit):
            common.call(tmp_path, "long", ["timeit", "-n1", "-r1", "import time; time.sleep(600)"])
    finally:
        signal.signal(signal.SIGALRM, former)
    assert started[0].wait(60) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("raise KeyboardInterrupt", -signal.SIGINT, "-c: interrupted\n"),  # of an import, say
        ("common.exit_on_signals(); signal.raise_signal(signal.SIGHUP)", 129, ""),
        ("common.exit_on_signals(); signal.raise_signal(signal.SIGTERM)", 143, ""),
        ("common.run(lambda: print('x', flush=True))", 1, f"-c: {UNREAD}\n"),
        ("common.run(lambda: sys.exit(7))", 7, ""),
    ],
)
def test_a_program_ends_in_order(program, code, said):
    """Nobody reads what it prints."""
    reader, closed = os.pipe()
    os.close(reader)
    text = f"import signal, sys\nfrom scripts import common\n{program}"
    with os.fdopen(closed, "w") as stdout:
        streams = {"stdout": stdout, "stderr": subprocess.PIPE, "preexec_fn": default_signals}
        ended = subprocess.run([sys.executable, "-c", text], text=True, **streams)
    assert (ended.returncode, ended.stderr) == (code, said)


def test_a_full_disk_is_not_taken_for_too_little_memory():
    full = "train-00000.tfrecord; No space left on device"
    assert common._explain(tf.errors.ResourceExhaustedError(None, None, full)) == full
    assert "too little memory" in common._explain(
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
    )
