"""The planner as a program: from given numbers, and measured on a tiny network."""

import json

import pytest

GIVEN = ("--step_ms=100", "--sync_ms=100", "--link_mbit=800")
TINY = ("--batch=4", "--inputs=8", "--layers=1", "--width=16", "--classes=5", "--steps=3")


def test_given_numbers_give_the_table_of_the_cost_model(run_well, tmp_path):
    out, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    # One layer of 999 inputs and 10,000 classes: 10 million weights, 40 MB, 0.4 s at 100 MB/s.
    sizes = ("--inputs=999", "--layers=0", "--classes=10000")
    ended = run_well(
        *("plan", *GIVEN, *sizes, "--workers=1,2,4", "--sync_periods=1,20"),
        *("--loss=0.08", f"--out={out}", f"--plot={plot}"),
    )
    content = json.loads(out.read_text())
    speedups = {(r["workers"], r["sync_period"]): r["speedup"] for r in content["rows"]}
    # A sync of two is 0.1 + 0.4 s, one of four 0.1 + 0.6 s.
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
    assert "2 workers: --sync_period=58 is the smallest that loses less than 8%" in ended.out
    assert "1.60" in ended.out
    assert plot.read_text().count("<svg")


def test_half_the_bits_and_overlap_are_in_the_prediction(run_well, tmp_path):
    out = tmp_path / "plan.json"
    sizes = ("--inputs=999", "--layers=0", "--classes=10000")
    run_well(
        *("plan", *GIVEN, *sizes, "--workers=2", "--sync_periods=1"),
        *("--wire_bits=16", "--overlap", f"--out={out}"),
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert row["speedup"] == pytest.approx(0.2 / 0.3)  # 0.2 s of travel hide 0.1 s of training


def test_what_is_not_given_is_measured(run_well, tmp_path):
    out = tmp_path / "plan.json"
    run_well("plan", *TINY, f"--out={out}", "--workers=2", "--sync_periods=1,1000")
    content = json.loads(out.read_text())
    assert content["step_seconds"] > 0 and content["slowdown"] >= 1
    assert content["link_bytes_per_second"] > 0
    first, last = content["rows"]
    assert 0 < first["speedup"] < last["speedup"] <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers=0",), "--workers=0 must be whole numbers of at least 1, with commas"),
        (("--sync_periods=5,x",), "--sync_periods=5,x must be whole numbers of at least 1"),
        (("--loss=1.5",), "--loss=1.5 must be a share between 0 and 1"),
        (("--link_mbit=0",), "--link_mbit=0.0 must be a number above 0"),
        (("--step_ms=nan",), "--step_ms=nan must be a number above 0"),
        (("--slowdown=0.5",), "--slowdown=0.5 must be a number of at least 1"),
        (("--link_delay_ms=5",), "is of the link of --link_mbit"),
        (("--plot=/nowhere/plan.png",), "there is no folder /nowhere"),
    ],
)
def test_bad_flags_are_one_line(run, flags, message):
    ended = run("plan", "--step_ms=1", *flags)
    assert ended.returncode == 1
    assert message in ended.err and ended.err.count("\n") == 1
