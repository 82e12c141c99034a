"""The launcher, with real processes."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.lib.cluster_of_processes import free_ports
from tests.lib.launched import (
    DEADLINE,
    FOREVER,
    Launched,
    default_signals,
    launch,
    signals_kept,
)
from tfpara import cluster
from tfpara.cluster import parent
from tfpara.launch import clusters, launcher, supervisor
from tfpara.launch import output as launch_output

RANK = "from tfpara import cluster\nrank = cluster.read().rank\n"
# Whom a worker waits for has left its number under the script's first argument.
NUMBERED = (
    RANK
    + """
import os, signal, sys, time
os.symlink(str(os.getpid()), f"{sys.argv[1]}-{rank}")
def wait_for_start_of(other):
    while not os.path.lexists(f"{sys.argv[1]}-{other}"): time.sleep(0.01)
def wait_for_end_of(other):
    wait_for_start_of(other)
    while True:
        try: os.kill(int(os.readlink(f"{sys.argv[1]}-{other}")), 0)
        except ProcessLookupError: return
        time.sleep(0.01)
"""
)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


class Lifeline:
    """A named pipe that processes hold open; its end says that all of them are gone."""

    def __init__(self, path):
        os.mkfifo(path)
        self.hold = f"import os; lifeline = os.open({str(path)!r}, os.O_WRONLY)\n"
        self.hold += "os.set_inheritable(lifeline, True)\n"
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for_end(self):
        if not select.select([self._reader], [], [], DEADLINE)[0]:
            pytest.fail("a process is still alive")
        assert os.read(self._reader, 1) == b""


@pytest.fixture
def lifeline(tmp_path):
    return Lifeline(tmp_path / "lifeline")


def test_workers_read_their_cluster(script):
    path = script(RANK + "import os, sys; print(os.environ['TF_CONFIG'], *sys.argv[1:])\n")
    code, out, err = launch("-n", 3, path, "--epochs=2", "-n", "7")
    assert code == 0
    assert re.fullmatch(r"tfpara-launch: all 3 workers done after \d+\.\d s\n", err)
    clusters = []
    for name in ("chief", "worker 1", "worker 2"):
        (line,) = re.findall(rf"^\[{name}\] (.*) --epochs=2 -n 7$", out, re.MULTILINE)
        clusters.append(cluster.read({"TF_CONFIG": line}))
    assert [each.rank for each in clusters] == [0, 1, 2]
    assert [each.task_type for each in clusters] == ["chief", "worker", "worker"]
    assert len({each.addresses for each in clusters}) == 1
    assert len(set(clusters[0].addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in clusters[0].addresses)


def first_of_free_ports(count):
    while True:
        base = free_ports(1)[0]
        with contextlib.suppress(clusters.LaunchError):
            return clusters.ports("127.0.0.1", base, count)[0]


def loopback():
    """Returns this machine's loopback address as in TF_CONFIG, of IPv6 if the machine has that."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "[::1]"
    except OSError:
        return "127.0.0.1"


def test_ports_from_a_base_and_an_ipv6_host():
    show = "import os; print(os.environ['TF_CONFIG'])"
    base, shown = first_of_free_ports(2), loopback()
    host = shown.strip("[]")
    arguments = ("-n", 2, f"--host={host}", f"--port={base}", "--no-prefix", "--", "python", "-c")
    code, out, _ = launch(*arguments, show)
    assert code == 0
    spec = json.loads(out.splitlines()[0])["cluster"]
    assert spec == {"chief": [f"{shown}:{base}"], "worker": [f"{shown}:{base + 1}"]}


@pytest.mark.parametrize(
    ("arguments", "given_omp", "wanted"),
    [((), None, None), ((), "5", "5"), (("--threads=3",), "5", "3")],
)
def test_threads_are_shared_out(arguments, given_omp, wanted):
    names = ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"]
    env = {name: value for name, value in os.environ.items() if name not in names}
    if given_omp:
        env["OMP_NUM_THREADS"] = given_omp
    show = f"import os; print([os.environ[name] for name in {names}])"
    _, out, _ = launch("-n", 2, *arguments, "--", "python", "-c", show, env=env)
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    rest = "3" if arguments else share
    assert out.splitlines()[0].split("] ", 1)[1] == str([wanted or share, rest, rest])


@pytest.mark.parametrize(
    ("arguments", "given", "wanted"),
    [
        (["-n", 2], "0,1,2,3", ["0,1 None", "2,3 None"]),
        (["-n", 3], "4,5,6,7", ["4 None", "5 None", "6 None"]),
        (["-n", 4], "0,GPU-7f", ["0 true", "0 true", "GPU-7f true", "GPU-7f true"]),
        (["-n", 2, "--gpus_per_worker=1"], "3,2,1,-1,0", ["3 None", "2 None"]),
        (["-n", 2, "--gpus_per_worker=0"], "0,1", ["-1 None", "-1 None"]),
        (["-n", 2], "", [" None", " None"]),
        (["--ps=1", "-n", 2], "0,1", ["-1 None", "-1 None", "0 None", "1 None"]),
    ],
)
def test_each_worker_gets_its_gpus(arguments, given, wanted):
    """There are no GPUs here; CUDA_VISIBLE_DEVICES says which there are."""
    names = ["CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"]
    env = {name: value for name, value in os.environ.items() if name not in names}
    show = f"import os; print(*[os.environ.get(name) for name in {names}])"
    command = [*arguments, "--", "python", "-c", show]
    _, out, _ = launch(*command, env={**env, names[0]: given})
    assert sorted(line.split("] ", 1)[1] for line in out.splitlines()) == sorted(wanted)


def test_more_gpus_than_there_are_are_refused():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2"}
    command = ["-n", 2, "--gpus_per_worker=2", "--", "python", "-c", "pass"]
    code, _, err = launch(*command, env=env)
    assert code == 2
    assert "2 workers need 4 GPUs, and this machine shows 3" in err


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit('sorry')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGABRT)", 134, "killed by SIGABRT"),
    ],
)
def test_a_failure_ends_all_and_gives_its_code(script, lifeline, end, code, how):
    path = script(f"import os, signal, sys\n{RANK}{lifeline.hold}if rank == 1: {end}\n" + FOREVER)
    returned, _, err = launch("-n", 3, path)
    assert returned == code
    assert f"tfpara-launch: worker 1 failed first: {how}; all workers ended after" in err
    lifeline.wait_for_end()


def test_the_first_failure_wins_and_others_may_still_speak(script):
    """The chief fails with its own error once it sees that the failed worker has been reaped."""
    path = script(
        RANK
        + """
import os, sys, time
if rank == 1:
    open(sys.argv[1], "w").write(str(os.getpid()))
    os._exit(3)
pid = int(open(sys.argv[1]).read())
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        sys.exit("peer is gone")
    time.sleep(0.01)
"""
    )
    pid_file = path.with_name("pid")
    os.mkfifo(pid_file)
    code, _, err = launch("-n", 2, "--grace=1000", path, pid_file)
    assert code == 3
    assert "[chief] peer is gone\n" in err
    assert "worker 1 failed first: exit code 3;" in err


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (
            0,
            1,
            "worker 1 ended first, with exit code 0 while others went on; then (chief|worker 2) ",
        ),
        (3, 3, "worker 1 failed first: exit code 3;"),
    ],
)
def test_the_worker_is_named_because_of_which_others_failed(script, tmp_path, end, code, text):
    """As they say; the failed one may end after those whom it takes with it."""
    path = script(
        NUMBERED
        + f"""
if rank == 1:
    if {end}: wait_for_end_of(0); wait_for_end_of(2)
    sys.exit({end})
if {end}: wait_for_start_of(1); wait_for_start_of(2 - rank)
else: wait_for_end_of(1)
because = "chief" if rank else "worker 1"
from tfpara import program
from tfpara.cluster import failures
failures.is_of_tensorflow = lambda error: True
found = failures.Explanation("a sync failed.", True, [because])
failures.explain = lambda *_: found
program.run(lambda: 1 / 0)
"""
    )
    returned, _, err = launch("-n", 3, "--grace=1000", path, tmp_path / "number")
    assert returned == code
    assert re.search(f"tfpara-launch: {text}", err)


@pytest.mark.parametrize("late", [0, 1])
def test_of_two_that_name_each_other_the_one_is_first_whom_the_other_named_first(
    late, script, tmp_path
):
    """As where one was stopped, and finds the other gone when it goes on."""
    path = script(
        NUMBERED
        + f"""
from tfpara.cluster import parent
other = ["worker 1", "chief"][rank]
# The launcher reads nothing from what this program prints.
print(f"a sync failed because {{other}} (127.0.0.1:1) is gone", file=sys.stderr, flush=True)
parent.tell(because=[other], at=time.monotonic() + 60 * (rank == {late}))
if rank == 0: wait_for_end_of(1)
sys.exit(3 + rank)
"""
    )
    code, _, err = launch("-n", 2, "--grace=1000", path, tmp_path / "number")
    assert code == 3 + late
    assert f"{['chief', 'worker 1'][late]} failed first: exit code {3 + late};" in err


def test_one_that_does_not_answer_is_named_and_the_code_is_that_of_who_says_so(script):
    path = script(
        RANK
        + f"""
import sys, time
from tfpara.cluster import parent
if rank:
    parent.tell(because=["chief"], at=time.monotonic())
    sys.exit(3)
{FOREVER}"""
    )
    code, _, err = launch("-n", 2, path)
    assert code == 3
    assert "chief did not answer, and was ended; worker 1 failed: exit code 3;" in err


def test_a_launcher_hears_nothing_from_who_is_not_its_process(tmp_path):
    reports = parent.Reports()
    environ = parent.variables(reports.writer)
    with open(tmp_path / "file", "w") as file:
        parent.tell({"TFPARA_LAUNCHER": f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}"}, a=1)
        parent.tell({"TFPARA_LAUNCHER": environ["TFPARA_LAUNCHER"] + "0"}, a=2)
        parent.tell({}, a=3)
        assert not (tmp_path / "file").stat().st_size and reports.read() == {}
    assert parent.is_there(environ) and not parent.is_there({})
    for number in range(9999):  # more than the pipe takes: what is left over is dropped
        parent.tell(environ, a=number, text="x" * 99)
    os.write(reports.writer, b"[]\n")
    assert reports.read()["text"] == "x" * 99
    os.close(reports.writer)
    reports.close()


def test_a_killed_worker_is_the_cause_though_another_ends_before_it(script, tmp_path):
    """As where its connections close, and others notice, before the system has seen to its end."""
    path = script(
        NUMBERED
        + """
if rank == 1:
    wait_for_end_of(0)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for_start_of(1)
sys.exit("peer is gone")
"""
    )
    code, _, err = launch("-n", 2, path, tmp_path / "number")
    assert code == 137
    assert "[chief] peer is gone\n" in err
    assert "worker 1 failed first: killed by SIGKILL;" in err


def test_sigterm_is_followed_by_sigkill(script, lifeline):
    path = script(
        lifeline.hold
        + RANK
        + """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("refused"))
if rank == 1:
    open(sys.argv[1], "w").close()
    while True: signal.pause()
open(sys.argv[1]).close()
sys.exit(9)
"""
    )
    ready = path.with_name("ready")
    os.mkfifo(ready)
    code, out, _ = launch("-n", 2, "--grace=0.5", path, ready)
    assert code == 9
    assert "[worker 1] refused\n" in out
    lifeline.wait_for_end()


def test_the_number_of_workers_behind_the_program_is_pointed_out(script):
    path = script("print('trained')")
    for arguments, hint in (
        ((path, "-n", 2), "-n 2"),
        ((path, "--workers=3"), "--workers=3"),
        ((path, "-np4"), "-np4"),
        (("--", path, "-n", 2), ""),
        (("-n", 1, path, "-n", 2), ""),
        ((path, "--epochs-n", 2), ""),
    ):
        code, out, err = launch(*arguments)
        assert (code, out) == (0, "[chief] trained\n")
        assert (f"one worker is started, since {hint} stands behind" in err) == bool(hint), err


@pytest.mark.nightly
def test_who_writes_a_checkpoint_has_more_time_than_the_grace(script, tmp_path, monkeypatch):
    """It is ended by SIGKILL where it has said nothing, and where the grace was given."""
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 2.0)
    path = script(
        f"""
import os, signal, sys, time
from tfpara.cluster import parent
def end(*_):
    if sys.argv[1] == "saves": parent.tell(saves=True)
    time.sleep(5.0)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
open(os.path.join({str(tmp_path)!r}, "ready"), "w").close()
{FOREVER}"""
    )
    for says, grace, wanted in (("saves", None, 75), ("", None, 137), ("saves", 0.2, 137)):
        console = launch_output.Console(io.BytesIO(), io.BytesIO())
        runs = launcher.Launcher(console, policy=supervisor.Policy(grace))

        def ask():
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            (tmp_path / "ready").unlink()
            os.kill(os.getpid(), signal.SIGTERM)

        asking = threading.Thread(target=ask)
        asking.start()
        process = supervisor.Process("chief", dict(os.environ))
        command = [sys.executable, str(path), says]
        with signals_kept():
            assert runs.run(command, lambda process=process: [process]) == wanted
        asking.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(script, lifeline, number):
    handled = f"signal.signal({int(number)}, lambda *_: (print('saved'), sys.exit(0)))\n"
    path = script("import sys, signal\n" + handled + lifeline.hold + "print('ready')\n" + FOREVER)
    with Launched("-n", 2, "--grace=1000", path) as launched:
        launched.read_until("[chief] ready", "[worker 1] ready")
        launched.process.send_signal(number)
        code, out, err = launched.finish()
    assert code == 0
    assert "[chief] saved\n" in out and "[worker 1] saved\n" in out
    assert f"tfpara-launch: got {number.name}; all 2 workers done" in err
    lifeline.wait_for_end()


def test_a_worker_ended_by_a_signal_passed_on(script):
    path = script(f"print('ready')\n{FOREVER}")
    with Launched("-n", 2, path) as launched:
        launched.read_until("[chief] ready", "[worker 1] ready")
        launched.process.send_signal(signal.SIGTERM)
        code, _, err = launched.finish()
    assert code == 128 + signal.SIGTERM
    assert re.search(r"got SIGTERM; (chief|worker 1) failed first: killed by SIGTERM", err)


def test_a_second_signal_kills_at_once(script, lifeline):
    refuse = "import signal\nsignal.signal(signal.SIGINT, lambda *_: print('refused'))\n"
    path = script(refuse + lifeline.hold + "print('ready')\n" + FOREVER)
    with Launched("-n", 2, "--grace=1000", path) as launched:
        launched.read_until("[chief] ready", "[worker 1] ready")
        launched.process.send_signal(signal.SIGINT)
        launched.read_until("[chief] refused", "[worker 1] refused")
        launched.process.send_signal(signal.SIGINT)
        assert launched.finish()[0] == 128 + signal.SIGKILL
    lifeline.wait_for_end()


def test_an_ignored_signal_stays_ignored(script):
    def nohup():
        default_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Some supervisors ignore SIGCHLD. The launcher must still see how its workers end.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    show = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)\n"
    path = script(show + FOREVER)
    with Launched("-n", 1, path, preexec_fn=nohup) as launched:
        launched.read_until("[chief] True")
        launched.process.send_signal(signal.SIGHUP)
        launched.process.send_signal(signal.SIGTERM)
        code, _, err = launched.finish()
    assert code == 128 + signal.SIGTERM
    assert "got SIGTERM; chief failed first" in err


def test_a_launcher_may_have_no_standard_streams(script, tmp_path):
    """Some daemons start a program so. Pipes of the workers must not take their numbers."""
    path = script("print('well')\n")
    log_dir = f"--log_dir={tmp_path}"
    code, *_ = launch("-n", 1, log_dir, path, preexec_fn=lambda: os.closerange(0, 3))
    assert code == 0
    assert (tmp_path / "chief.log").read_text() == "well\n"


GRANDCHILD = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {FOREVER!r}], close_fds=False)
"""


def test_a_killed_launcher_leaves_nobody(script, lifeline):
    path = script(lifeline.hold + GRANDCHILD + "print('ready')\n" + FOREVER)
    with Launched("-n", 2, path) as launched:
        launched.read_until("[chief] ready", "[worker 1] ready")
        launched.process.kill()
        assert launched.process.wait(DEADLINE) == -signal.SIGKILL
        lifeline.wait_for_end()


def test_a_workers_children_end_with_it(script, lifeline):
    path = script(lifeline.hold + GRANDCHILD)
    assert launch("-n", 2, path)[0] == 0
    lifeline.wait_for_end()


def test_output_is_prefixed_by_line_and_by_stream(script):
    path = script(
        RANK
        + r"""
import sys
print("one\n\ntwo\r\nno end", end="")
print("trouble", file=sys.stderr)
"""
    )
    _, out, err = launch("-n", 2, path)
    for name in ("chief", "worker 1"):
        lines = [line for line in out.split("\n") if line.startswith(f"[{name}]")]
        assert lines == [f"[{name}] {text}" for text in ("one", "", "two", "no end")]
        assert f"[{name}] trouble\n" in err


def test_a_progress_bar_on_a_pipe_leaves_its_last_state(script):
    path = script(r"print('10%\r50%\r100%'); print('\ra\rb\r', end='')")
    assert launch("-n", 1, path)[1] == "[chief] 100%\n[chief] b\n"


def test_a_very_long_line_arrives_whole_without_prefix(script):
    path = script("print('x' * 200_000)")
    assert launch("-n", 1, "--no-prefix", path)[1].replace("\n", "") == "x" * 200_000


def test_log_files_hold_what_workers_wrote(script, tmp_path):
    # In one write each: the two streams are merged as they come.
    path = script(RANK + r"import sys; sys.stdout.write(f'{rank}\r\n'); sys.stderr.write('e\n')")
    log_dir = tmp_path / "new" / "logs"
    assert launch("-n", 2, f"--log_dir={log_dir}", path)[0] == 0
    assert sorted(file.name for file in log_dir.iterdir()) == ["chief.log", "worker-1.log"]
    for rank, name in enumerate(["chief.log", "worker-1.log"]):
        assert sorted((log_dir / name).read_bytes().splitlines(True)) == sorted(
            [b"%d\r\n" % rank, b"e\n"]
        )


@pytest.mark.parametrize("level", [None, "0"])
def test_notes_of_tensorflows_import_are_shown_where_all_is_asked_for(
    script, monkeypatch, level, tmp_path
):
    notes = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795.449318   14332 cudart_stub.cc:31] Could not find cuda drivers",
        "I0000 00:00:1795.198281   27252 port.cc:153] oneDNN custom operations are on.",
        "I0000 00:00:1796.117392   22104 service.cc:146] XLA service 0x7fbea40193e0 initialized "
        "for platform Host (this does not guarantee that XLA will be used). Devices:",
        "I0000 00:00:1796.117440   22104 service.cc:154]   StreamExecutor device (0): Host, "
        "Default Version",
        "I0000 00:00:1796.315145   22104 device_compiler.h:188] Compiled cluster using XLA!  This "
        "line is logged at most once for the lifetime of the process.",
        "2026-11-28 08:00:00.123456: E external/local_xla/stream_executor/cuda/cuda_fft.cc:485] "
        "Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when "
        "one has already been registered",
        "E0000 00:00:1795.449318   14332 cuda_blas.cc:1407] Unable to register cuBLAS factory: "
        "Attempting to register factory for plugin cuBLAS when one has already been registered",
        "W0000 00:00:1795.449318   14332 computation_placer.cc:177] computation placer already "
        "registered. Please check linkage and avoid linking the same target more than once.",
    ]
    kept = [
        "W0000 00:00:1795.449318   14332 cudart_stub.cc:31] a warning",
        "E0000 00:00:1795.449318   14332 cuda_blas.cc:220] failed to create cublas handle",
        "the user's",
    ]
    path = script(f"import sys; print(*{notes + kept}, sep='\\n', file=sys.stderr)")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    (tmp_path / "chief.log").write_text("of a former start\n")
    *shown, _ = launch("-n", 1, f"--log_dir={tmp_path}", path)[2].splitlines()
    assert shown == [f"[chief] {line}" for line in (notes + kept if level else kept)]
    logged = (tmp_path / "chief.log").read_text().splitlines()
    assert logged == ["of a former start", *notes, *kept]


def test_only_the_chief_has_a_terminal(script):
    path = script(RANK + r"import sys; print(rank, sys.stdout.isatty(), end='\r5%\r10%\n')")
    terminal, launchers_end = pty.openpty()
    with Launched("-n", 2, path, stdout=launchers_end, env={**os.environ, "NO_COLOR": "1"}) as run:
        os.close(launchers_end)
        seen = b""
        try:
            while chunk := os.read(terminal, 4096):
                seen += chunk
        except OSError:  # the end of a terminal
            pass
        assert run.process.wait(DEADLINE) == 0
    assert b"[chief] 0 True\r[chief] 5%\r[chief] 10%\r\n" in seen
    assert b"[worker 1] 10%\r\n" in seen


def test_a_line_is_written_above_the_progress_bar():
    out, err = io.BytesIO(), io.BytesIO()
    console = launch_output.Console(out, err)
    console.progress(0, "chief", b"start\n1/3")
    console.progress(0, "chief", b" ==")
    console.line(1, "worker 1", b"hello", to_stderr=False)
    console.progress(0, "chief", b"\b\b\r2/3\n")
    console.line(1, "worker 1", b"oh", to_stderr=True)
    assert out.getvalue() == (
        b"[chief] start\n[chief] 1/3 ==\r\x1b[K[worker 1] hello\n[chief] 1/3 ==\b\b\r[chief] 2/3\n"
    )
    assert err.getvalue() == b"[worker 1] oh\n"


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [("TERM", "xterm", b"\x1b[36m[a]\x1b[0m"), ("TERM", "dumb", b"[a]"), ("NO_COLOR", "1", b"[a]")],
)
def test_names_have_colours_on_terminals_that_show_them(monkeypatch, name, value, label):
    monkeypatch.setattr(os, "environ", {name: value})
    out = io.BytesIO()
    out.isatty = lambda: True
    launch_output.Console(out, out).line(0, "a", b"text", to_stderr=False)
    assert out.getvalue() == label + b" text\n"


def test_a_closed_stdout_ends_the_workers(script, lifeline):
    path = script(lifeline.hold + "while True: print('more')\n")
    with Launched("-n", 2, path) as launched:
        launched.read_until("[chief] more", "[worker 1] more")
        launched.process.stdout.close()
        assert launched.process.wait(DEADLINE) == 128 + signal.SIGTERM
        err = launched.process.stderr.read().decode()
        launched.process.stdout = None
    assert re.fullmatch(r"tfpara-launch: got SIGPIPE; [^\n]* killed by SIGTERM[^\n]*\n", err)
    lifeline.wait_for_end()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["no command"]),
        (("-n", 2, "--"), ["no command"]),
        (("-n", 0, "a.py"), ["'0'", "whole number", "1"]),
        (("-n", "two", "a.py"), ["'two'"]),
        (("--grace=nan", "a.py"), ["'nan'", "seconds"]),
        (("--port=70000", "a.py"), ["'70000'", "65535"]),
        (("--max_restarts=-1", "a.py"), ["'-1'", "whole number"]),
        (("-n", 2, "no/such.py"), ["'no/such.py'", "does not exist"]),
        (("-n", 2, "--", "no-such-program"), ["'no-such-program'", "PATH"]),
        (("-n", 2, "--", "/"), ["'/'", "may not be executed"]),
        (("--host=192.0.2.1", "--", "python", "-V"), ["192.0.2.1", "not an address of this"]),
        (("--host=name.invalid", "--", "python", "-V"), ["name.invalid", "not an address of"]),
        (("--host=10..0.1", "--", "python", "-V"), ["10..0.1", "not an address of"]),
        (("-n", 9, "--port=65530", "--", "python", "-V"), ["65535", "Lower --port"]),
        (("--workers-typo=3", "a.py"), ["--workers-typo=3"]),
        (("-np", 2, "a.py"), ["-np is of mpirun", "here it is -n"]),
    ],
)
def test_what_cannot_be_started_is_one_message_and_exit_code_2(arguments, words):
    code, out, err = launch(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    message = err.splitlines()[-1]
    assert message.startswith("tfpara-launch: ")
    assert [word for word in words if word not in message] == []


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = launch(f"--port={port}", "--", "python", "-V")
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use" in err


def test_a_secret_that_is_none_is_named_but_not_shown():
    environ = os.environ | {"TFPARA_SECRET": "hush"}
    code, out, err = launch("-n", 2, "--", "python", "-V", env=environ)
    assert (code, out) == (2, "")
    assert err.startswith("tfpara-launch: TFPARA_SECRET has 4 bytes, but a secret has from 16 to")
    assert "hush" not in err and len(err.splitlines()) == 1


def test_a_program_that_does_not_start_leaves_nobody(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF but not quite")
    program.chmod(0o755)
    code, _, err = launch("-n", 2, "--", program)
    assert code == 2
    assert "Exec format error" in err and len(err.splitlines()) == 1


def test_help_names_units_and_defaults():
    code, out, _ = launch("--help")
    assert code == 0
    words = ("SECONDS", "default: 127.0.0.1", "default: 10", "2 s", "Exit code")
    for word in (*words, "--max_restarts K", "75 means", "--requeue", "podFailurePolicy"):
        assert word in out


FAILING_TWICE = (
    RANK
    + """
import os, sys
path = f"{sys.argv[1]}-{rank}"
starts = len(open(path).read()) if os.path.exists(path) else 0
print("start", starts + 1, os.environ["TF_CONFIG"], flush=True)
open(path, "a").write("x")
if starts < 2 and rank == starts:
    sys.exit(75) if rank else os.kill(os.getpid(), 9)
"""
)


def test_failed_workers_are_started_again_on_other_ports(script, tmp_path):
    path = script(FAILING_TWICE)
    logs = tmp_path / "logs"
    code, out, err = launch(
        "-n", 2, "--max_restarts=5", f"--log_dir={logs}", path, tmp_path / "starts"
    )
    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("tfpara-launch: ")]
    assert len(lines) == 3
    assert lines[0].startswith(
        "tfpara-launch: restart 1 of 5: chief failed first: killed by SIGKILL; all workers ended"
    )
    assert lines[1].startswith(
        "tfpara-launch: restart 2 of 5: worker 1 failed first: exit code 75; all workers ended"
    )
    assert lines[2].startswith("tfpara-launch: all 2 workers done")
    for rank, name in enumerate(["chief", "worker-1"]):
        starts = re.findall(r"^start (\d) (.*)$", (logs / f"{name}.log").read_text(), re.MULTILINE)
        assert [number for number, _ in starts] == ["1", "2", "3"]
        clusters = [cluster.read({"TF_CONFIG": config}) for _, config in starts]
        assert [each.rank for each in clusters] == [rank] * 3
        assert len({each.addresses for each in clusters}) > 1


def test_restarts_end_with_the_last_failures_code(script, tmp_path):
    path = script(
        "import os, sys\n"
        "open(sys.argv[1], 'a').write('x')\n"
        "print(os.environ['TFPARA_RUN_ID'], flush=True)\n"
        "sys.exit(6)\n"
    )
    environment = {**os.environ, "TFPARA_RUN_ID": "of another launcher"}
    code, out, err = launch("--max_restarts=2", path, tmp_path / "starts", env=environment)
    assert code == 6
    first, *others = out.splitlines()
    assert re.fullmatch(r"\[chief\] [0-9a-f]{16}", first) and others == [first] * 2
    assert (tmp_path / "starts").read_text() == "xxx"
    assert len(re.findall(r"^tfpara-launch: restart \d of 2: chief failed", err, re.MULTILINE)) == 2
    assert "tfpara-launch: chief failed first: exit code 6; ended after" in err


def test_restarts_keep_a_port_that_was_asked_for(script, tmp_path):
    base = first_of_free_ports(1)
    listen = """
import socket, sys, os
config = cluster.read()
port = int(config.addresses[config.rank].rpartition(":")[2])
server = socket.create_server(("127.0.0.1", port))
client = socket.create_connection(("127.0.0.1", port))
server.accept()[0].close()  # this side's end of the connection stays for a while
print("port", port, flush=True)
os._exit(75)
"""
    path = script(RANK + listen)
    code, out, err = launch(f"--port={base}", "--max_restarts=2", path)
    assert code == 75
    assert out.splitlines() == [f"[chief] port {base}"] * 3, err


@pytest.mark.parametrize("code", [0, 75])
def test_a_launcher_that_got_a_signal_does_not_restart(script, lifeline, code):
    handled = f"signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit({code})))\n"
    path = script("import sys, signal\n" + handled + lifeline.hold + "print('ready')\n" + FOREVER)
    with Launched("-n", 2, "--max_restarts=9", "--grace=1000", path) as launched:
        launched.read_until("[chief] ready", "[worker 1] ready")
        launched.process.send_signal(signal.SIGTERM)
        returned, out, err = launched.finish()
    assert returned == code
    assert out.count("ready") == out.count("saved") == 2
    assert "restart" not in err and "got SIGTERM" in err
    lifeline.wait_for_end()


@pytest.mark.nightly
def test_after_a_signal_all_have_the_whole_grace_to_end(script):
    path = script(
        RANK
        + """
import signal, sys, time
def end(*_):
    if rank == 0:
        time.sleep(3.5)  # longer than the others have after a failure
        print("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(1)
"""
    )
    with Launched("-n", 2, "--grace=1000", path) as launched:
        launched.read_until("[chief] ready", "[worker 1] ready")
        launched.process.send_signal(signal.SIGTERM)
        code, out, err = launched.finish()
    assert code == 75
    assert "[chief] saved\n" in out
    assert "worker 1 failed first: exit code 75" in err


def test_all_workers_have_ended_before_they_are_started_again(script, lifeline, tmp_path):
    """Worker 1 would run for ever: it is ended, and its children, before the second start."""
    path = script(
        RANK
        + lifeline.hold
        + f"""
import os, subprocess, sys, time
if rank == 1 and not os.path.exists(sys.argv[1]):
    child = subprocess.Popen([sys.executable, "-c", {FOREVER!r}])
    open(sys.argv[1] + "-new", "w").write(f"{{os.getpid()}} {{child.pid}}")
    os.rename(sys.argv[1] + "-new", sys.argv[1])
    while True: time.sleep(1)
if not os.path.exists(sys.argv[1] + "-failed"):
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    open(sys.argv[1] + "-failed", "w").close()
    sys.exit(3)
for pid in open(sys.argv[1]).read().split():
    status = f"/proc/{{pid}}/stat"
    print("alive" if os.path.exists(status) and " Z " not in open(status).read() else "gone")
"""
    )
    code, out, err = launch("-n", 2, "--max_restarts=1", "--grace=1", path, tmp_path / "pids")
    assert code == 0, err
    assert "alive" not in out and out.count("gone") == 4
    lifeline.wait_for_end()


# A worker of an elastic run, without TensorFlow: worker 1 is killed, when it first starts, at a
# place that the command says.
_MEMBER = """
import os, pathlib, signal, sys
from tfpara.cluster import secret
from tfpara.elastic.meeting import ADDRESS, NAME, Line
place, directory = sys.argv[1], pathlib.Path(sys.argv[2])
name = os.environ[NAME]
def here(where):
    if where == place and name == "worker 1" and not (directory / place).exists():
        (directory / place).touch()
        os.kill(os.getpid(), signal.SIGKILL)
here("start")
settings = {"min_workers": 1, "max_workers": None, "grace_seconds": 9.0, "silence_seconds": 9.0}
line = Line(os.environ[ADDRESS], secret.read(), 1, settings, 9.0, name=name)
print(name, "founds" if line.founding else "joins", flush=True)
if line.founding:
    form = line.formed()
    here("formed")
    while not line.ready(form.number):
        form = line.met(form.number, None, True)
    if place == "formed":  # the others wait for the one that is started again
        while not (directory / "joins").exists():
            pass
else:
    (directory / "joins").touch()
line.done()
"""


@pytest.mark.parametrize("place", ["start", "formed"])
def test_an_elastic_worker_that_is_killed_before_training_is_started_again(place, script, tmp_path):
    """It begins with the others, or joins them."""
    code, out, err = launch("-n", 2, "--elastic", script(_MEMBER), place, tmp_path)
    assert code == 0, err
    assert "worker 1 failed: killed by SIGKILL; restart 1 of 100" in err
    last = "founds" if place == "start" else "joins"
    assert [line for line in out.splitlines() if "[worker 1]" in line][-1].endswith(last)


@pytest.mark.nightly
def test_an_elastic_run_goes_on_where_a_worker_cannot_be_started_for_a_while(script, tmp_path):
    member = _MEMBER.replace(
        "        (directory / place).touch()\n",
        """\
        (directory / place).touch()
        os.rename(sys.argv[0], sys.argv[0] + ".away")
""",
    )
    program = script(f"#!{sys.executable}\n{member}").rename(tmp_path / "program")
    program.chmod(0o755)
    with Launched(
        "-n", 2, "--elastic", "--", program, "formed", tmp_path, stderr=subprocess.STDOUT
    ) as launched:
        launched.read_until("worker 1 cannot be started: [Errno 2] No such file or directory")
        os.rename(f"{program}.away", program)
        code, output, _ = launched.finish()
    assert code == 0, output
    assert "restart 2 of 100" in output and "[worker 1] worker 1 joins" in output


# Worker 0 fails with 3 after it has trained, or while worker 1 trains on.
_FAILS = """
import os, pathlib, sys, time
from tfpara.cluster import secret
from tfpara.elastic.meeting import ADDRESS, NAME, Ended, Line
when, again = sys.argv[1], pathlib.Path(sys.argv[2]) / "again"
settings = {"min_workers": 1, "max_workers": None, "grace_seconds": 9.0, "silence_seconds": 9.0}
name = os.environ[NAME]
def runs(folder):  # whether worker 0 does, as far as the launcher knows
    pids = [each.name.partition("-")[2] for each in folder.glob("pid-*")]
    return not pids or os.path.exists(f"/proc/{pids[0]}")
line = Line(os.environ[ADDRESS], secret.read(), 1, settings, 9.0, name=name)
if line.founding:
    form = line.formed()
    assert line.ready(form.number)
    line.agreed({})
    line.begins(1, [])
    if name == "worker 0":
        (again.parent / f"pid-{os.getpid()}").touch()
        sys.exit(3)
    if when == "while others train":
        while runs(again.parent): time.sleep(0.01)
        time.sleep(1.0)  # trains on, while the launcher looks at the end of worker 0
        form = line.met(form.number, None, True)
        assert form.tasks == (line.task,) and line.ready(form.number)
    else:
        while when == "and is started again" and not again.exists(): time.sleep(0.01)
        while when == "at the end" and runs(again.parent): time.sleep(0.01)
    line.done()
else:
    again.touch()
    line.register({}, 1)
    try: line.formed()
    except Ended as ended: assert ended.complete
"""


@pytest.mark.parametrize(
    "when,wanted",
    [("at the end", 3), ("and is started again", 3), ("while others train", 0)],
)
def test_a_worker_of_an_elastic_run_that_fails_after_training_is_no_success(
    when, wanted, script, tmp_path
):
    code, out, err = launch("-n", 2, "--elastic", script(_FAILS), when, tmp_path)
    assert code == wanted, err
    assert ("worker 0 failed first: exit code 3" in err) == bool(wanted)


_REFUSES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("refused", flush=True))
from tfpara.cluster import secret
from tfpara.elastic.meeting import ADDRESS, NAME, Line
settings = {"min_workers": 1, "max_workers": None, "grace_seconds": 9.0, "silence_seconds": 9.0}
line = Line(os.environ[ADDRESS], secret.read(), 1, settings, 9.0, name=os.environ[NAME])
assert line.ready(line.formed().number)
line.agreed({})
print("trains", flush=True)
while True: signal.pause()
"""


@pytest.mark.parametrize("how", ["two signals", "the grace is over"])
def test_an_elastic_run_that_is_killed_unfinished_is_no_success(how, script):
    grace = 1000 if how == "two signals" else 0.3
    arguments = ("-n", 2, "--elastic", f"--grace={grace}", script(_REFUSES))
    with Launched(*arguments) as launched:
        launched.read_until("[worker 0] trains", "[worker 1] trains")
        launched.process.send_signal(signal.SIGTERM)
        launched.read_until("[worker 0] refused", "[worker 1] refused")
        if how == "two signals":
            launched.process.send_signal(signal.SIGTERM)
        code, _, err = launched.finish()
    assert code == 128 + signal.SIGKILL, err
    assert "failed first: killed by SIGKILL" in err


_TRAINS = """
import os, signal
from tfpara.cluster import secret
from tfpara.elastic.meeting import ADDRESS, NAME, Line
settings = {"min_workers": 1, "max_workers": None, "grace_seconds": 9.0, "silence_seconds": 9.0}
line = Line(os.environ[ADDRESS], secret.read(), 1, settings, 9.0, name=os.environ[NAME])
if line.founding:
    number = line.formed().number
    # The meeting point answers `ready` after it has read `agreed`: training has begun for it.
    line.agreed({"rule": "BSP()"})
    assert line.ready(number)
print("trains" if line.founding else "joins", flush=True)
while True: signal.pause()
"""


def test_a_worker_of_an_elastic_run_is_added_and_removed(script):
    arguments = ("-n", 2, "--elastic", f"--host={loopback()}", script(_TRAINS))
    with Launched(*arguments, stderr=subprocess.STDOUT) as launched:
        launched.read_until("[worker 0] trains", "[worker 1] trains")
        launched.process.send_signal(signal.SIGUSR1)
        launched.read_until("worker 2 is added", "[worker 2] joins")
        launched.process.send_signal(signal.SIGUSR2)
        launched.read_until("worker 2 is removed", "worker 2 has left: killed by SIGTERM")
        launched.process.send_signal(signal.SIGTERM)
        code, output, _ = launched.finish()
    assert code == 128 + signal.SIGTERM, output


def until_end(tmp_path):
    """The text of a script that makes the file `there`, and waits for the file `end`."""
    text = f"import os, time\nopen({str(tmp_path / 'there')!r}, 'a')\n"
    return text + f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.01)\n"


def test_no_worker_of_an_elastic_run_is_removed_before_training(script, tmp_path):
    """The others would wait for it."""
    with Launched(
        "-n", 2, "--elastic", script(until_end(tmp_path)), stderr=subprocess.STDOUT
    ) as launched:
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        launched.process.send_signal(signal.SIGUSR2)
        launched.read_until("no worker is removed: training has not begun, or comes to its end")
        (tmp_path / "end").touch()
        code, output, _ = launched.finish()
    assert code == 0, output


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_of_elastic_runs_does_not_end_another(number, script, tmp_path):
    with Launched("-n", 2, script(until_end(tmp_path)), stderr=subprocess.STDOUT) as launched:
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        launched.process.send_signal(number)
        launched.read_until(f"{number.name} is ignored: workers come and go in runs with --elastic")
        (tmp_path / "end").touch()
        code, output, _ = launched.finish()
    assert code == 0, output
