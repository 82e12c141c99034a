"""`tfpara-plan`: the table by hand, and what is recommended where the link asks for too much."""

import json
import re
from pathlib import Path

import pytest

from tfpara import plan
from tfpara.planner import _ERRORS, known_error

# A sync of two takes 0.1 s and 40 MB at 100 MB/s, 0.4 s; one of four 0.1 + 0.6 s.
GIVEN = ("--step_ms=100", "--sync_ms=100", "--link_mbit=800", "--model_mb=40")


@pytest.fixture
def run(capsys, tmp_path):
    """A function that runs the program, and returns what it prints and its JSON file."""

    def call(*flags):
        out = tmp_path / "plan.json"
        assert plan.main([*flags, f"--out={out}"]) == 0
        return capsys.readouterr().out, json.loads(out.read_text())

    return call


def test_the_table_by_hand(run):
    said, content = run(*GIVEN, "--workers=1,2,4", "--sync_periods=1,20", "--loss=0.08")
    speedups = {(r["workers"], r["sync_period"]): r["speedup"] for r in content["rows"]}
    assert speedups == {
        (1, 1): pytest.approx(1.0),
        (1, 20): pytest.approx(1.0),
        (2, 1): pytest.approx(0.2 / 0.6),
        (2, 20): pytest.approx(4.0 / 2.5),
        (4, 1): pytest.approx(0.4 / 0.8),
        (4, 20): pytest.approx(8.0 / 2.7),
    }
    # 0.5 / (0.1 τ + 0.5) < 0.08 from τ > 57.5 on, 0.7 / (0.1 τ + 0.7) from τ > 80.5 on.
    assert content["smallest_period"] == {"1": 1, "2": 58, "4": 81}
    assert "2 workers: sync_period=58 is the smallest that loses less than 8%" in said
    assert "1.60" in said and "assumed, since not given: --link_delay_ms=0, --slowdown=1" in said


def test_no_period_is_recommended_whose_error_is_not_known(run):
    """0.7 / (0.1 τ + 0.7) < 0.06 from τ > 109.7 on."""
    said, content = run(*GIVEN, "--workers=4,32", "--loss=0.06")
    assert content["smallest_period"]["4"] == 110
    assert content["recommended_period"] == {"4": 80, "32": 80}
    line = next(line for line in said.splitlines() if line.startswith("4 workers"))
    assert "sync_period=80 loses 8% of the speed" in line
    assert "Error: 1.3 % above one replica's, measured with 4 replicas and a period of 80" in line
    assert "To lose less than 6% takes a period of 110, and no error is known of" in line
    # Overlap leaves 0.1 s of a sync, for which 1.57 s of training do; int8 0.25 s, and 3.92 s.
    assert "overlap=True (period 16 is enough)" in line
    assert 'compression="int8" (period 40 is enough)' in line
    assert "32 workers: sync_period=80" in said and "No error is known of so many replicas" in said


def test_half_the_bits_and_overlap_are_in_the_prediction(run):
    _, content = run(*GIVEN, "--workers=2", "--sync_periods=1", "--wire_bits=16", "--overlap")
    (row,) = content["rows"]
    assert row["speedup"] == pytest.approx(0.2 / 0.3)  # 0.2 s of travel hide 0.1 s of training


def test_the_known_errors_are_those_of_the_study():
    page = (Path(__file__).resolve().parents[2] / "docs" / "study.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `BMUF\(\)` \|(.+; .+%\).+; .+%\).+; .+%\)) \|$", page, re.M)
    found = {int(period): re.findall(r"; ([\d.]+) %\)", cells) for period, cells in rows}
    assert {p: [f"{e[p]:g}" for e in _ERRORS.values()] for p in (5, 20, 80)} == {
        p: [f"{float(x):g}" for x in cells] for p, cells in found.items()
    }
    assert known_error(2, 5) == (4, 5, 0.9) and known_error(5, 6) == (8, 20, 0.9)
    assert known_error(17, 5) is None and known_error(4, 81) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers=0",), "0 must be whole numbers above 0, with commas"),
        (("--sync_periods=5,x",), "5,x must be whole numbers above 0"),
        (("--loss=1.5",), "1.5 must be a share between 0 and 1"),
        (("--link_mbit=0",), "0 must be a number above 0"),
        (("--step_ms=nan",), "nan must be a number above 0"),
        (("--slowdown=0.5",), "0.5 must be a number of at least 1"),
        (("--out=/nowhere/plan.json",), "there is no folder /nowhere"),
        (("--step_ms=1",), "--model_mb, --link_mbit must be given"),
    ],
)
def test_bad_flags_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        plan.main(flags)
    assert message in capsys.readouterr().err.splitlines()[-1]
