"""How users' own programs of two workers end, and what they print besides what the user does."""

import json
import re
import signal
import subprocess
import sys

import pytest

from tests.lib.cluster_of_processes import HERE, Workers, run
from tests.lib.launched import LAUNCH
from tfpara.cluster import quiet

pytestmark = pytest.mark.latest

DEADLINE = 180.0  # seconds; reached only by a hang
STARTED = (
    "tfpara: 2 workers, 2 replicas: each batch is divided, for example 64 rows into 32 each; "
    "BSP every 2 steps; workers on CPU:0, connected by a ring over gRPC"
)
# The second, while the connection is closed and the port is not yet.
GONE = (
    r"tfpara: a sync failed because ({} \(127\.0\.0\.1:\d+\) (is gone|has failed \(.*\))|"
    r"another worker stopped); .*"
)
QUIET = [{"TF_CPP_MIN_LOG_LEVEL": "3"}] * 2  # as under the launcher
PROGRAM = HERE / "programs/end.py"


def lines(text):
    """What is left on a screen, without the progress bar's line.

    TensorFlow's notes on its import are left out too. A program that is no fork (`warm.py`) prints
    them, and TF_CPP_MIN_LOG_LEVEL does not turn them off.
    """
    shown = re.sub(r"\x1b\[[\d;]*m|\x08", "", text).replace("\r", "\n").splitlines()
    shown = [line for line in shown if line and "━" not in line]
    notes = quiet.Filter()
    return [line for line in shown if not notes.is_chatter(line.encode())]


def test_long_notes_are_left_out_and_what_follows_them_is_not():
    note = "I0000 00:00:1795759622.758183   10157 eager_service_impl.cc:356] "
    text = note + 'SessionOptions: device_count {\n  key: "CPU"\n}\nsoft: true\n\nmine: 1\n'
    rest = 'Additional GRPC error information from remote target /job:ps:\n:{"created":"@1"}\n'
    text += "W0000 0 h.h:59] Ignoring an error encountered when deleting remote tensors\n" + rest
    lost = "This could happen if the remote target has been disconnected from the client.\n"
    for what in ("register", "remove"):
        text += f"E0000 0 h.h:867] Failed to {what} function remotely due to failed\n{rest}{lost}"
    text += "W0000 00:00:1796044334.8   21551 grpc_worker_service.cc:512] RecvTensor cancelled\n"
    text += rest
    notes = quiet.Filter()
    shown = [ln for ln in text.splitlines(True) if not notes.is_chatter(ln.encode())]
    assert "".join(shown) == "mine: 1\n" + rest
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, quiet.__file__], **pipes) as passing:
        passing.stdin.write(b"yours\n")
        passing.stdin.flush()
        assert passing.stdout.readline() == b"yours\n"
        passing.terminate()  # as a scheduler may do with all processes of a job
        assert passing.communicate(text.encode())[0].decode() == "mine: 1\n" + rest
    assert passing.returncode == 0


@pytest.mark.one_version
def test_a_run_prints_what_the_user_prints_one_progress_bar_and_a_line_of_its_own(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    command = [*LAUNCH, "-n", "2", str(PROGRAM), json.dumps({"how": "return", "run": False})]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    assert "[worker 1] \x1b" not in ended.stdout
    said = [f"[{name}] {words}" for name in ("chief", "worker 1") for words in ("trained", "end")]
    assert sorted(lines(ended.stdout)) == sorted(said)
    # The training may be too short to be seen by the launcher.
    summary = r"tfpara-launch: [\d.]+ s of training: .* processes: 2, starts: 2"
    *before, last = (x for x in ended.stderr.splitlines() if not re.fullmatch(summary, x))
    assert before == [f"[chief] {STARTED}"]
    assert re.fullmatch(r"tfpara-launch: all 2 workers done after [\d.]+ s", last)


@pytest.mark.nightly
@pytest.mark.one_version
def test_parameter_servers_of_a_synchronous_run_end_at_once(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    options = json.dumps({"how": "return", "run": True})
    command = [*LAUNCH, "-n", "1", "--ps", "2", str(PROGRAM), options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    said = [f"[{name}] {words}" for name in ("chief", "worker 0") for words in ("trained", "end")]
    assert sorted(lines(ended.stdout)) == sorted(said)
    nothing_to_do = "tfpara: this process has the job 'ps' in TF_CONFIG, and nothing to do: "
    for server in ("[ps 0]", "[ps 1]"):
        assert ended.stderr.count(f"{server} {nothing_to_do}") == 1, ended.stderr
    assert ended.stderr.count("TF_CONFIG lists 'ps', which a synchronous strategy leaves out") == 1
    assert f"[chief] {STARTED}" in ended.stderr


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("with_run", [False, True])
@pytest.mark.one_version
def test_an_error_of_one_is_a_traceback_there_and_a_sentence_elsewhere(with_run):
    chief, worker = run("end.py", [{"how": "raise", "rank": 1, "run": with_run}] * 2, environ=QUIET)
    assert (chief.returncode, worker.returncode) == (1, 1)
    started, trained, failed, end = lines(chief.output)
    assert [started, trained, end] == [STARTED, "trained", "end"]
    assert re.fullmatch(GONE.format("worker 1"), failed)
    assert worker.output.count("Traceback") == 1 and "end.py" in worker.output
    assert 'KeyError: "the user\'s"' in worker.output


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_fit_that_fails_ends_though_a_generator_is_at_work():
    """At the end of the interpreter its thread would wait for Python for ever."""
    (alone,) = run("end.py", [{"how": "reading", "run": False}], environ=QUIET[:1])
    assert alone.returncode == 1 and 'KeyError: "the user\'s"' in alone.output


@pytest.mark.nightly
def test_an_error_in_a_thread_has_the_sentence_as_a_note():
    options = [{"how": "leave", "rank": 1, "run": False, "thread": rank == 0} for rank in (0, 1)]
    chief, other = run("end.py", [o | {"verbose": 2} for o in options], environ=QUIET)
    *_, failed, end = lines(chief.output)
    assert "loss: " in chief.output and lines(other.output) == ["trained"]  # of a verbose fit
    assert chief.output.count("Traceback") == 1 and end == "end"
    assert re.fullmatch(GONE.format("worker 1"), failed)


@pytest.mark.nightly
@pytest.mark.one_version
def test_the_frames_are_shown_if_they_are_asked_for():
    options = {"how": "leave", "rank": 0, "run": True}
    _, worker = run("end.py", [options] * 2, environ=[{"TFPARA_TRACEBACK": "1"}] * 2)
    assert worker.returncode == 1
    assert "Traceback" in worker.output and "in main" in worker.output
    assert re.search(GONE.format("chief"), worker.output)


@pytest.mark.nightly
@pytest.mark.one_version
def test_an_exit_code_is_that_of_the_worker_also_where_another_does_not_exit():
    chief, worker = run("end.py", [{"how": "exit", "rank": 1, "run": True}] * 2, environ=QUIET)
    assert worker.returncode == 7
    assert lines(worker.output) == ["trained", "end"]
    assert chief.returncode == 1


@pytest.mark.nightly_cases("15-False-*", "15-True-codes1-says1")
@pytest.mark.parametrize(
    ("number", "thread", "codes", "says"),
    [
        (signal.SIGTERM, False, {-signal.SIGTERM}, ["waiting"]),
        (signal.SIGTERM, True, {-signal.SIGTERM}, ["waiting"]),
        (
            signal.SIGINT,
            False,
            {-signal.SIGINT, 130},
            ["waiting", "KeyboardInterrupt: interrupted"],
        ),
    ],
)
def test_a_signal_ends_a_worker_as_it_does_any_program(number, thread, codes, says):
    options = [
        {"how": "wait", "rank": 1, "run": False, "thread": thread and rank} for rank in (0, 1)
    ]
    with Workers("end.py", options, environ=QUIET) as workers:
        chief, worker = workers.processes
        seen = ""
        while "waiting" not in seen:
            seen = worker.stdout.readline()
            assert seen, worker.wait()
        worker.send_signal(number)
        rest = worker.communicate(timeout=DEADLINE)[0]
        assert worker.returncode in codes
        assert lines(seen + rest)[: len(says)] == says
        assert "Traceback" not in rest
        output = chief.communicate(timeout=DEADLINE)[0]
    assert re.search(GONE.format("worker 1"), output)
    assert "Traceback" not in output
