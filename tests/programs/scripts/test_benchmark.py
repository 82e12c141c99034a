"""The scaling benchmark at its smallest: every system runs, and the file has the promised form."""

import json

import pytest

from scripts import common
from scripts.benchmarks import processes


@pytest.mark.nightly
def test_networks_on_a_card_are_compared_with_plain_keras(run_well, tmp_path):
    """There is no card here: what is tested is that all runs, with tiny networks."""
    out = tmp_path / "gpu.json"
    ended = run_well(
        *("benchmarks", "--suite=gpu", f"--out={out}", "--rounds=1", "--steps=80", "--only=lstm")
    )
    assert "No GPU is to be seen" in ended.out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["system"] == "lstm"
    assert row["device"] == "CPU"
    ratio = row["plain_step_ms"] / row["period_20_step_ms"]
    assert row["period_20_of_plain"] == pytest.approx(ratio)
    assert row["period_5_host_ms"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--out=nowhere/x.json",), "there is no folder"),
        (("--out=/tmp",), "--out=/tmp is a folder"),
        (("--out=/tmp/x.json", "--suite=memory", "--replicas=2,x"), "--replicas=2,x must be whole"),
        (("--out=/tmp/x.json", "--sync_periods=0"), "--sync_periods=0 must be whole numbers of"),
    ],
)
def test_what_cannot_be_measured_or_written_is_one_line(run, flags, said):
    ended = run("benchmarks", *flags)
    assert ended.returncode == 1
    (line,) = ended.err.splitlines()
    assert line.startswith("benchmarks: ") and said in line


def test_a_measurement_that_takes_too_long_says_so():
    with pytest.raises(common.Failure, match="was killed after 0.1 s, the longest time.*--steps"):
        # The program waits for its standard input.
        processes.measure(1, {"system": "plain"}, module="asyncio", seconds=0.1)
