"""`tfpara-plan`: the plan by hand, and what is said where nothing is good enough."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tfpara import plan
from tfpara.cluster import exit_codes
from tfpara.planner import _ERRORS, _INT4_ADDS, _OVERLAP_ADDS, Costs, Link, choose, known_error
from tfpara.sync.one_sync import placement

# A sync of two takes 0.1 s and 40 MB at 100 MB/s, 0.4 s; one of four 0.1 + 0.6 s.
GIVEN = ("--step_ms=100", "--sync_ms=100", "--link_mbit=836", "--model_mb=40")
COSTS = Costs(0.1, 40e6, Link(100e6), local_seconds=0.1)
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def run(capsys, tmp_path):
    """A function that runs the program, and returns what it prints and its JSON file."""

    def call(*flags):
        out = tmp_path / "plan.json"
        assert plan.main([*flags, f"--out={out}"]) == 0
        return capsys.readouterr().out, json.loads(out.read_text())

    return call


def row(said, workers):
    (line,) = [line for line in said.splitlines() if re.match(rf"{workers}\s", line)]
    return re.split(r"\s{2,}", line)


def test_the_plan_by_hand(run):
    """0.5 / (0.1 τ + 0.5) < 0.08 from τ > 57.5 on; the next longer period of the study is 80."""
    said, content = run(*GIVEN, "--workers=1,2", "--loss=0.08")
    assert row(said, 1)[1:] == ["1", "False", "none", "replicated", "1.00", "100%", "0"]
    speedup = 11.6 / 6.3  # 2 · 58 minibatches of 0.1 s in 5.8 s and a sync
    assert row(said, 2)[1:] == [
        *("58", "False", "none", "sharded", "1.84", "92%"),
        "at most 1.3 (4 replicas, period 80)",
    ]
    assert content["plans"][1]["speedup"] == pytest.approx(speedup)
    assert content["plans"][1]["error"] == {"replicas": 4, "period": 80, "percent": 1.3}
    assert "A minibatch takes 100 ms on one worker, and 1.00 times that" in said
    assert "Assumed, since not given: --link_delay_ms=0, --slowdown=1." in said
    assert "workers:" not in said  # all is good enough


def test_the_table_of_the_page_shows_no_share_that_is_rounded_up_to_the_limit(run):
    """Eight workers lose 5.3 % of the speed, and a note says so. So 95% would be wrong."""
    said, content = run("--step_ms=110", "--model_mb=50", "--link_mbit=1000")
    assert 0.945 < content["plans"][2]["speedup"] / 8 < 0.95
    assert row(said, 8)[6] == "94%"
    rows = [line for line in said.splitlines() if re.match(r"\d+  ", line)]
    assert "\n    ".join(rows) in (DOCS / "choosing.md").read_text()


def test_samples_per_second_are_those_of_one_worker_times_the_speedup(run):
    """One worker trains 256 samples in 0.1 s."""
    said, content = run(*GIVEN, "--workers=1,2", "--loss=0.08", "--batch=256")
    assert re.split(r"\s{2,}", said.split("workers  ")[1].splitlines()[0])[6] == "samples/s"
    assert row(said, 1)[7] == "2560" and row(said, 2)[7] == f"{2560 * 11.6 / 6.3:.0f}"
    assert content["batch"] == 256


def test_an_error_that_was_measured_is_not_a_bound(run):
    said, _ = run("--step_ms=100", "--model_mb=4", "--link_mbit=1e6", "--workers=4", "--error=0.5")
    assert row(said, 4)[1] == "20" and row(said, 4)[-1] == "0.2 (4 replicas, period 20)"


def test_options_come_in_where_the_link_asks_for_more_than_is_known():
    """Four workers: 0.7 s of a sync, 0.28 s with int8. 0.28 / (0.1 τ + 0.28) < 0.06 from 44 on."""
    found = choose(COSTS, 4, loss=0.06)
    assert (found.sync_period, found.overlap, found.compression) == (44, False, "int8")
    assert found.aggregation == "sharded" and found.is_enough
    # Overlap leaves 0.1 s of a sync: 0.1 / (0.1 τ + 0.1) < 0.06 from τ = 16 on.
    found = choose(COSTS, 4, loss=0.06, compressions=["none"])
    assert (found.sync_period, found.overlap, found.error) == (16, True, (4, 20, 3.4))
    # At 80 a sync without either takes 0.7 of 8.7 s.
    found = choose(COSTS, 4, loss=0.06, compressions=["none"], overlaps=[False])
    assert (found.sync_period, found.is_enough) == (80, False)
    assert found.loss == pytest.approx(0.7 / 8.7)


def test_an_option_that_brings_next_to_nothing_is_left_out():
    """Eight workers, 26 kB: a sync is all local work, so int8 is faster by 0.01 % alone."""
    costs = Costs(0.01, 26e3, Link(367e6), local_seconds=0.04)
    found, best = choose(costs, 8), choose(costs, 8, compressions=["int8"])
    assert (found.compression, found.is_enough) == ("none", False)
    assert found.speedup < best.speedup < 1.01 * found.speedup
    assert choose(Costs(0.01, 26e6, Link(367e6), local_seconds=0.04), 8).compression == "int4"


def test_a_longer_period_is_taken_where_its_error_is_smaller():
    """Four replicas: 0.9 % at a period of 5, and 0.2 % at one of 20, as the study has it."""
    fast = Costs(0.1, 4e6, Link(1e10))
    assert choose(fast, 4).sync_period == 1
    assert choose(fast, 4, error_percent=0.5).sync_period == 20


def test_no_period_is_recommended_whose_error_is_too_large_or_not_known(run):
    said, content = run(*GIVEN, "--workers=8,16,32")
    eight, sixteen, many = content["plans"]
    # With int4 a sync of eight sends 1.75 · 5.625 MB in 1.2 times the time of an all-reduce.
    assert (eight["sync_period"], eight["compression"]) == (20, "int4")
    assert eight["loss"] == pytest.approx(0.218125 / 2.218125)
    # Of sixteen the error with int4 is not known. With int8 a sync takes 0.1 + 1.2 · 0.1875 s.
    assert (sixteen["sync_period"], sixteen["compression"]) == (5, "int8")
    assert sixteen["loss"] == pytest.approx(0.325 / 0.825)
    assert sixteen["error"]["percent"] == 4.0
    assert (many["sync_period"], many["error"]) == (5, None)
    assert (many["overlap"], many["compression"]) == (False, "none")
    assert "8, 16 workers: no period with an error of at most 5 % loses less than 5% of" in said
    assert "32 workers: no error is known of so many replicas with these options." in said
    said, _ = run(*GIVEN, "--workers=16", "--error=1")
    assert "16 workers: no error of at most 1 % is known with these options" in said


def test_the_error_is_said_to_be_without_compression_only_where_it_is_planned(run):
    clause = "eight epochs, without compression. In brackets"
    assert clause in run(*GIVEN, "--workers=1,16")[0]
    assert "without compression; to those with int4 is added what" in run(*GIVEN, "--workers=8")[0]
    assert clause in run(*GIVEN, "--workers=2", "--compression=bf16")[0]
    assert "without compression" not in run(*GIVEN, "--workers=2", "--loss=0.08")[0]
    assert "without compression" not in run(*GIVEN, "--workers=1", "--compression=int8")[0]


def test_workers_that_are_slower_than_one_are_named(run):
    said, content = run("--step_ms=1", "--model_mb=400", "--link_mbit=10", "--workers=2,4")
    assert all(each["speedup"] < 1 for each in content["plans"])
    assert "2, 4 workers: no faster than one." in said


def test_one_worker_has_no_note(run):
    said, _ = run(*GIVEN, "--workers=1", "--overlap=yes", "--compression=int4")
    assert row(said, 1)[-1] == "0" and "workers:" not in said


def test_what_is_asked_for_is_what_is_planned(run):
    flags = ("--overlap=yes", "--compression=bf16", "--workers=2", "--loss=0.06")
    said, content = run(*GIVEN, *flags)
    (found,) = content["plans"]
    assert (found["overlap"], found["compression"]) == (True, "bf16")
    # 0.2 s travel while 16 minibatches train, and 0.1 s do not: 2 · 1.6 / 1.7.
    assert found["sync_period"] == 16 and found["speedup"] == pytest.approx(3.2 / 1.7)
    assert row(said, 2)[2:4] == ["True", "bf16"]


def test_the_known_errors_are_those_of_the_study():
    page = (DOCS / "study.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `BMUF\(\)` \|(.+; .+%\).+; .+%\).+; .+%\)) \|$", page, re.M)
    found = {int(period): re.findall(r"; ([\d.]+) %\)", cells) for period, cells in rows}
    assert {p: [f"{e[p]:g}" for e in _ERRORS.values()] for p in (5, 20, 80)} == {
        p: [f"{float(x):g}" for x in cells] for p, cells in found.items()
    }
    # Other N have the error of the next larger one, other periods the worse of their neighbours'.
    assert known_error(2, 5) == known_error(3, 5) == (4, 5, 0.9)
    assert known_error(6, 20) == (8, 20, 0.9) and known_error(12, 20) == (16, 20, 5.6)
    assert known_error(4, 6) == (4, 5, 0.9) and known_error(4, 21) == (4, 80, 1.3)
    assert known_error(5, 6) == (8, 5, 1.9) and known_error(4, 1) == (4, 5, 0.9)
    assert known_error(17, 5) is None and known_error(4, 81) is None


def test_what_int4_adds_is_in_the_study():
    rows = re.findall(r"^\| (\d+) \| int4 \|(.+)\|$", (DOCS / "study.md").read_text(), re.M)
    found = {int(period): re.findall(r"\(([+−][\d.]+) %\)", cells) for period, cells in rows}
    assert set(found) == {5, 20}
    for period, cells in found.items():
        for replicas, cell in zip((4, 8), cells, strict=True):
            added = max(0.0, float(cell.replace("−", "-")))
            assert _INT4_ADDS[replicas][period] == added
            known = known_error(replicas, period, compression="int4")
            percent = _ERRORS[replicas][period] + added
            assert known == (replicas, period, pytest.approx(percent))
    # More replicas, longer periods, and overlap with it, were not measured.
    assert known_error(9, 5, compression="int4") is known_error(4, 21, compression="int4") is None
    assert known_error(4, 5, True, "int4") is None


def test_what_overlap_adds_is_in_the_page_on_syncs():
    page = (DOCS / "syncs.md").read_text()
    alone = float(re.search(r"one replica has ([\d.]+) %\.\)", page)[1])
    stops, overlaps = (
        [float(cell) for cell in re.search(rf"^\| {what} \|(.+)\|$", page, re.M)[1].split("|")]
        for what in ("training stops for a sync", "`overlap=True`")
    )
    assert "| N = 4, period 5 | 20 | 80 | N = 8, 20 |" in page
    places = [(4, 5), (4, 20), (4, 80), (8, 20)]
    for (n, p), without, with_it in zip(places, stops, overlaps, strict=True):
        percent = max(0.0, 100 * (with_it - without) / alone)
        assert _OVERLAP_ADDS[n][p] == pytest.approx(percent, abs=0.05)
    assert known_error(3, 6, overlap=True) == (4, 20, 3.4)
    assert known_error(16, 5, overlap=True) is None


def test_models_are_sharded_from_the_same_size_on():
    always = placement.ALWAYS_SHARDED_FROM_BYTES
    for workers, least in ((2, placement.SHARDED_FROM_BYTES), (3, always)):
        for nbytes, expected in ((least, "sharded"), (least - 1, "replicated")):
            plan = choose(Costs(0.1, nbytes, Link(1e9)), workers, compressions=["none"])
            assert plan.aggregation == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers=0",), "0 must be whole numbers above 0, with commas: somebody must train"),
        (("--workers=2,x",), "2,x must be whole numbers above 0"),
        (("--loss=1.5",), "1.5 must be a share between 0 and 1"),
        (("--error=-1",), "-1 must be a number of at least 0"),
        (("--link_mbit=0",), "0 must be a number above 0"),
        (("--model_mb=-50",), "-50 must be a number above 0"),
        (("--model_mb=1e305",), "1e305 must be from 1e-12 to 1e+12"),
        (("--loss=1e-320",), "1e-320 must be from 1e-12 to 1e+12"),
        (("--step_ms=nan",), "nan must be a number above 0"),
        (("--batch=0",), "0 must be a number of at least 1"),
        (("--batch=8", "--measure", __file__), "--batch is for a plan without --measure"),
        (("--slowdown=0.5",), "0.5 must be a number of at least 1"),
        (("--link_delay_ms=-1",), "-1 must be a number of at least 0"),
        (("--out=/nowhere/plan.json",), "there is no folder /nowhere"),
        (("--out=/",), "/ exists and is no file"),
        (("--step_ms=1",), "--model_mb, --link_mbit must be given, or --measure SCRIPT.py"),
        ((*GIVEN, "--hosts=a,b"), "--hosts is for --measure SCRIPT.py"),
        (("--hosts=a", "--measure", __file__), "--hosts=a has one machine, and a link needs two"),
        (("--hosts=a,,b", "--measure", __file__), "--hosts=a,,b: '' is no machine. Give names"),
        (("--hosts=a,-oX", "--measure", __file__), "--hosts=a,-oX: '-oX' is no machine"),
        (("--measure", "x" * 300), "there is no file xxx"),
        (("--measure",), "--measure needs a script"),
        (("--measure", "nowhere.py", "--epochs=3"), "there is no file nowhere.py"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        plan.main(flags)
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said and said.startswith("tfpara-plan: ")


def test_a_file_that_cannot_be_written_is_one_sentence(monkeypatch, capsys, tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan.files, "whole", full)
    assert plan.main([*GIVEN, f"--out={tmp_path}/plan.json"]) == 1
    said = f"--out={tmp_path}/plan.json cannot be written: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == f"tfpara-plan: {said}"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("place", "code", "said"),
    [("closed", 141, ""), ("/dev/full", 1, "stdout cannot be written to: No space left on device")],
)
def test_a_stdout_that_takes_no_more(place, code, said):
    reader, closed = os.pipe()
    os.close(reader)
    with os.fdopen(closed, "w") if place == "closed" else open(place, "w") as stdout:
        command = [sys.executable, "-m", "tfpara.plan", *GIVEN]
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == code
    assert ended.stderr == (f"tfpara-plan: {said}\n" if said else "")


def test_an_error_of_a_file_is_not_taken_for_one_of_stdout(tmp_path):
    with pytest.raises(FileNotFoundError):
        exit_codes.with_output("a program", lambda: len((tmp_path / "x").read_text()))


def test_sigterm_ends_what_measures(monkeypatch):
    def asked_to_end(*_, **__):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(plan, "measure", asked_to_end)
    with pytest.raises(SystemExit, match="143"):
        plan.main(["--measure", __file__])


def test_hosts_on_a_machine_without_ssh_are_one_sentence(monkeypatch, capsys):
    def started(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "ssh")

    monkeypatch.setattr(plan, "measure", started)
    assert plan.main(["--hosts=a,b", "--measure", __file__]) == 1
    said = "tfpara-plan: [Errno 2] No such file or directory: 'ssh'\n"
    assert capsys.readouterr().err == said


def test_ctrl_c_while_a_script_is_measured_is_one_sentence(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "measure", interrupted)
    assert plan.main(["--measure", __file__]) == 130
    assert capsys.readouterr().err == "tfpara-plan: interrupted\n"
