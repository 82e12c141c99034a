"""What a drill says of a run, by hand; and what it refuses before it begins."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from tfpara.chaos import faults, report
from tfpara.chaos.command import main
from tfpara.chaos.drill import Drill
from tfpara.chaos.processes import Size, Worker


def run_of(steps, made, lines=(), told=None, code=0):
    steps = [report.Step(*step) for step in steps]
    samples = [report.Sample(t, "worker 0", 7, Size(100 + t, 5, 2)) for t in range(9)]
    return report.Run(60.0, code, 1, lines, made, [], steps, samples, told or {})


def made(kind, time, over):
    return report.Made(kind, time, over, "seen")


def test_costs_are_the_time_less_what_the_progress_takes_in_a_quiet_run():
    """Ten minibatches a second when quiet. 20 s bring 120 and 25 s 220: 8 s and 3 s are lost."""
    steps = [(10.0, 0), (15.0, 50), (35.0, 170), (60.0, 390)]
    run = run_of(steps, [made("kill", 15.0, 15.2), made("stop", 35.0, 43.0)])
    assert report.costs(run, 10.0) == pytest.approx([8.0, 3.0])
    lines = [
        report.Line(14.0, "worker 9 is lost"),
        report.Line(15.5, "worker 1 is lost: 2 train on"),
        report.Line(22.0, "worker 1 has come: 3 workers train on"),
    ]
    found = report.summary(run._replace(lines=lines), 10.0, None)
    assert found["rate"] == pytest.approx(7.8) and found["goodput"] == pytest.approx(0.78)
    first, second = found["faults"]
    assert first["noticed_after"] == 0.5 and first["whole_after"] == 7.0
    assert first["said"].startswith("worker 1") and second["said"] is None
    (process,) = found["processes"]
    assert (process["third"]["bytes"], process["end"]["bytes"]) == (103, 108)
    shown = report.text(found)
    assert "kill      1 made, cost 8.0 s each" in shown and "goodput 0.780" in shown


def test_without_progress_goodput_is_of_the_whole_time():
    found = report.summary(run_of([], [made("kill", 15.0, 15.2)]), None, 45.0)
    assert found["goodput"] == 0.75 and found["faults"][0]["cost"] is None
    assert report.summary(run_of([], []), None, None)["goodput"] is None


def test_a_run_that_ends_before_the_first_fault_has_a_report():
    found = report.summary(run_of([(10.0, 0), (15.0, 50)], []), 10.0, None)
    assert found["faults"] == [] and found["goodput"] == 1.0
    assert "0 faults" in report.text(found)


def test_the_seed_chooses_the_victim():
    workers = [Worker(pid, f"worker {pid}") for pid in range(9, 0, -1)]

    def chosen(seed, of):
        scene = faults.Scene(1, of, random.Random(seed), 1.0)
        return [scene.victim().pid for _ in range(20)]

    assert chosen(1, workers) == chosen(1, workers[::-1]) != chosen(2, workers)
    with pytest.raises(faults.Missed, match="no worker trains"):
        chosen(1, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--faults=kill,flood -- true", "'flood' is none of kill, stop"),
        ("--faults= -- true", "'' is none of"),
        ("--every=0s -- true", "'0s' is no time such as 90s"),
        ("--for=soon -- true", "'soon' is no time such as 90s"),
        ("--faults=kill", "no command. Write it last: tfpara-chaos --"),
        ("-- no-such-program", "program 'no-such-program' was not found in PATH"),
        ("--faults=disk_full -- true", "'disk_full' cannot be made here: it needs the folder"),
        ("--faults=corrupt -- true", "'corrupt' cannot be made here: it needs the folder"),
        (
            "--faults=disk_full --checkpoints=/not/there -- true",
            "'disk_full' cannot be made here: it needs --checkpoints=/not/there on a small file",
        ),
        ("--at=noon -- true", "'noon' is none of begin, join"),
        ("--report=/ -- true", "--report=/ is a folder"),
    ],
)
def test_what_cannot_begin_is_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_cut_that_is_not_allowed_is_refused_with_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(
        faults.FAULTS, "partition", faults.Fault(faults.partition, lambda _: "pidfd_getfd(2)")
    )
    with pytest.raises(SystemExit):
        main(["--faults=partition", "--", "true"])
    assert "the fault 'partition' cannot be made here: it needs pidfd" in capsys.readouterr().err


def test_ctrl_c_is_one_sentence(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Drill, "run", interrupted)
    assert main(["--", "true"]) == 130
    assert capsys.readouterr().out == "tfpara-chaos: interrupted, so there is no report\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_drill_in_order(monkeypatch, capsys, number):
    """As after Ctrl-C, the present fault is taken back, and the run ends."""

    def asked_to_end(_):
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)

    monkeypatch.setattr(Drill, "run", asked_to_end)
    cleaned, former = [], signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["--", "true"])
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, former)
    assert ended.value.code == 128 + number and cleaned
    assert capsys.readouterr().out == f"tfpara-chaos: got {number.name}, so there is no report\n"


@pytest.mark.quick
def test_a_report_that_cannot_be_written_is_shown_all_the_same(tmp_path, capsys):
    (tmp_path / "link").symlink_to("/dev/full")
    assert main(["--faults=kill", f"--report={tmp_path}/link", "--", "true"]) == 1
    said = capsys.readouterr()
    assert said.err == (
        "tfpara-chaos: --report cannot be written: [Errno 22] it is a FIFO or a device, and no "
        "regular file: '/dev/full'\n"
    )
    assert "0 faults, 1 starts" in said.out


@pytest.mark.quick
def test_a_report_replaces_the_former_one_in_one_step(tmp_path):
    """The former file keeps its content, so nothing was written into it."""
    report, former = tmp_path / "report.json", tmp_path / "former.json"
    former.write_text("former")
    report.hardlink_to(former)
    main([f"--report={report}", "--", "true"])
    assert former.read_text() == "former" and json.loads(report.read_text())["faults"] == []


@pytest.mark.quick
def test_a_command_that_a_signal_has_ended_gives_the_code_of_a_shell():
    assert main(["--quiet_run", "--", "sh", "-c", "kill -KILL $$"]) == 137


@pytest.mark.quick
@pytest.mark.parametrize("shown", [True, False])
def test_a_command_ends_though_its_output_cannot_be_shown(shown):
    """If nobody read it, the command would wait to write more than a pipe holds."""
    talk = "import sys; sys.stdout.buffer.write('é\\n'.encode() * 60_000)"
    command = [sys.executable, "-m", "tfpara.chaos", "--", sys.executable, "-c", talk]
    options = {"preexec_fn": lambda: os.closerange(0, 3)}
    if shown:
        options = {"stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONIOENCODING": "ascii"}}
    ended = subprocess.run(command, timeout=120, **options)
    assert ended.returncode == 1  # no fault was made
    assert not shown or ended.stdout.count(b"\\xe9\n") == 60_000
