"""The launcher with parameter servers, with real processes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.lib import lobby_processes
from tests.lib.launched import FOREVER, Launched, launch
from tfpara.cluster import asynchronous as cluster

NAME = """
import os, signal, sys, time
from tfpara.cluster import asynchronous as cluster
view = cluster.read()
name = cluster.label(view.task_type, view.task_index)
"""
# What the processes of a strategy do: serve until the chief says that the run is over.
SERVING = (
    NAME
    + """
import socket
from tfpara.parameter_server.control import lobby, member
held = []
if not view.is_chief:
    port = int(view.address.rpartition(":")[2])
    print("serving", os.getpid(), flush=True)
    member.serve(view, lambda spec: held.append(socket.create_server(("", port))), 60.0)
hall = lobby.Lobby(view, 60.0, 60.0)
hall.gather()
print("gathered", *(os.environ[n] for n in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")))
"""
)
WATCHING = """
while True:
    try:
        hall.check()
    except lobby.ParameterServerError as error:
        hall.fail(str(error))
        sys.exit(f"ParameterServerError: {error}")
    time.sleep(0.01)
"""
DEADLINE = 120.0


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def pid_of(run, name, start=0):
    """The process that was started under this name, at first or again; waits for its line."""
    lines = re.compile(rf"^\[{name}\] serving (\d+)$", re.MULTILINE)
    while len(found := lines.findall(run.seen.decode())) <= start:
        run.read_more()
    return int(found[start])


def test_each_process_reads_its_place(script):
    path = script("import os; print(os.environ['TF_CONFIG'])\n")
    code, out, err = launch("-n", 2, "--ps", 3, path)
    assert code == 0
    assert re.fullmatch(r"tfpara-launch: all 6 processes done after \d+\.\d s\n", err)
    views = []
    for name in ("chief", "worker 0", "worker 1", "ps 0", "ps 1", "ps 2"):
        (line,) = re.findall(rf"^\[{name}\] (.*)$", out, re.MULTILINE)
        views.append(cluster.read({"TF_CONFIG": line}))
        assert cluster.label(views[-1].task_type, views[-1].task_index) == name
    assert len({str(view.spec()) for view in views}) == 1
    assert len({view.address for view in views}) == 6


def test_a_run_ends_with_the_chief_and_has_its_threads_shared_out(script):
    path = script(SERVING + "hall.fail('', 0)\n")
    names = ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]
    env = {name: value for name, value in os.environ.items() if name not in names}
    code, out, err = launch("-n", 2, "--ps", 1, path, env=env)
    assert code == 0, err
    share = max(1, len(os.sched_getaffinity(0)) // 4)
    assert f"[chief] gathered {share} {share}\n" in out


def test_a_worker_is_started_again_while_the_others_go_on(script, tmp_path):
    path = script(
        SERVING
        + """
while ("worker", 1) in hall.state.serving: time.sleep(0.01)
while ("worker", 1) not in hall.state.serving: time.sleep(0.01)
print("joined 1", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
hall.fail("", 0)
"""
    )
    end, logs = tmp_path / "end", tmp_path / "logs"
    with Launched("-n", 2, "--ps", 1, "--restart_workers=1", f"--log_dir={logs}", path, end) as run:
        run.read_until("[chief] gathered")
        first = pid_of(run, "worker 1")
        os.kill(first, signal.SIGKILL)
        run.read_until("[chief] joined 1")
        second = pid_of(run, "worker 1", 1)
        assert second != first
        os.kill(second, signal.SIGKILL)  # and not a second time
        time.sleep(0.1)
        end.touch()
        code, out, err = run.finish()
    assert code == 0, err
    assert "tfpara-launch: worker 1 failed: killed by SIGKILL; restart 1 of 1\n" in err
    assert err.count("restart") == 1
    assert sorted(file.name for file in logs.iterdir()) == [
        "chief.log", "ps-0.log", "worker-0.log", "worker-1.log"
    ]  # fmt: skip
    assert (logs / "worker-1.log").read_text().count("serving") == 2


def test_others_go_on_without_a_worker_that_is_not_started_again(script, tmp_path):
    path = script(
        SERVING
        + """
while len(hall.state.serving) == 3: time.sleep(0.01)
print("without", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
hall.fail("", 0)
"""
    )
    end = tmp_path / "end"
    with Launched("-n", 2, "--ps", 1, path, end, stderr=subprocess.STDOUT) as run:
        run.read_until("[chief] gathered")
        os.kill(pid_of(run, "worker 0"), signal.SIGKILL)
        run.read_until("[chief] without")
        run.read_until("tfpara-launch: worker 0 failed: killed by SIGKILL; the others go on\n")
        end.touch()
        assert run.finish()[0] == 0


def test_the_end_of_the_last_worker_ends_the_run(script):
    path = script(SERVING + WATCHING)
    with Launched("-n", 1, "--ps", 1, path) as run:
        run.read_until("[chief] gathered")
        os.kill(pid_of(run, "worker 0"), signal.SIGKILL)
        code, _, err = run.finish()
    assert code == 137
    assert "worker 0 failed first: killed by SIGKILL; all processes ended after" in err


def test_all_end_with_a_parameter_server(script):
    path = script(SERVING + WATCHING)
    with Launched("-n", 2, "--ps", 2, "--restart_workers=5", path) as run:
        run.read_until("[chief] gathered")
        os.kill(pid_of(run, "ps 1"), signal.SIGKILL)
        code, _, err = run.finish()
    assert code == 137
    assert "tfpara-launch: ps 1 failed first: killed by SIGKILL; all processes ended after" in err
    for name in ("chief", "worker 0", "worker 1", "ps 0"):
        assert re.search(rf"^\[{name}\].* ps 1 \(127.0.0.1:\d+\) is lost", err, re.MULTILINE), name
    assert "restart" not in err


@pytest.mark.parametrize(
    ("end", "code", "how", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL", "is gone: its conn"),
        ("hall.fail('for a reason.'); sys.exit(3)", 3, "exit code 3", "tfpara: for a reason."),
    ],
)
def test_all_end_with_the_chief(script, end, code, how, said):
    path = script(SERVING + end)
    returned, _, err = launch("-n", 2, "--ps", 1, "--restart_workers=5", path)
    assert returned == code
    assert f"tfpara-launch: chief failed first: {how}; all processes ended after" in err
    assert err.count(said) == 3
    assert "restart" not in err


def test_a_signal_leaves_the_parameter_servers_to_the_chief(script):
    path = script(
        SERVING
        + """
def end(*_):
    time.sleep(3)  # a checkpoint, which reads the parameter servers
    hall.fail("the chief has written a checkpoint.", 75)
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(1)
"""
    )
    with Launched("-n", 1, "--ps", 1, "--grace=1000", "--max_restarts=3", path) as run:
        run.read_until("[chief] ready")
        run.process.send_signal(signal.SIGTERM)
        code, out, err = run.finish()
    assert code == 75
    assert "[chief] saved\n" in out
    assert "[ps 0] tfpara: the chief has written a checkpoint.\n" in err
    assert "got SIGTERM; " in err and "restart" not in err


@pytest.mark.nightly
def test_a_training_under_the_launcher_is_asked_to_end_and_goes_on(tmp_path):
    """A real `fit`, with the launcher's own time for it."""
    program = lobby_processes.PROGRAMS / "train_async.py"
    arguments = ("-n", 2, "--ps", 1, program, 120, 60, tmp_path, 2, 40)
    with Launched(*arguments) as run:
        run.read_until("[chief] minibatch")
        run.process.send_signal(signal.SIGTERM)
        code, out, err = run.finish()
    assert code == 75, err
    assert "Asked to end: checkpoint written" in out
    assert "Traceback" not in err and "killed" not in err, err
    code, out, err = launch(*arguments)
    assert code == 0, err
    assert "epoch 1, within it" in out
    assert "weight 400" in out


def test_all_are_started_again_where_the_chief_has_failed(script, tmp_path):
    path = script(
        SERVING
        + """
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
hall.fail("", 0)
"""
    )
    code, out, err = launch("-n", 2, "--ps", 1, "--max_restarts=1", path, tmp_path / "failed")
    assert code == 0, err
    assert "tfpara-launch: restart 1 of 1: chief failed first: killed by SIGKILL; all proc" in err
    assert "tfpara-launch: all 4 processes done" in err
    assert out.count("serving") == 6


def test_a_chief_that_forgets_the_others_does_not_leave_them(script):
    path = script(NAME + "if name == 'chief': sys.exit(0)\n" + FOREVER)
    code, _, err = launch("-n", 1, "--ps", 1, "--grace=0.5", path)
    assert code == 128 + signal.SIGTERM
    assert "ps 0 failed first: killed by SIGTERM" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ps=-1", "a.py"), ["'-1'", "whole number"]),
        (("--restart_workers=2", "--", "python", "-V"), ["--restart_workers=2 is for --ps"]),
        (("--ps=1", "--collectives=horovod", "--", "python", "-V"), ["has no collectives"]),
        (("--ps=9", "-n", 5, "--port=65530", "--", "python", "-V"), ["65535", "Lower --port"]),
    ],
)
def test_what_cannot_be_started_is_one_message_and_exit_code_2(arguments, words):
    code, out, err = launch(*arguments)
    assert (code, out) == (2, "")
    message = err.splitlines()[-1]
    assert message.startswith("tfpara-launch: ")
    assert [word for word in words if word not in message] == []


def test_the_launcher_does_not_import_tensorflow():
    show = "import sys, tfpara.launch; print('tensorflow' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], stdout=subprocess.PIPE, timeout=DEADLINE)
    assert shown.stdout == b"False\n"
