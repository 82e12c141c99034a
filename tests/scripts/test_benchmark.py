"""The scaling benchmark at its smallest: every system runs, and the file has the promised form."""

import json


def test_scaling_writes_rows_and_prints_them(run_well, tmp_path):
    out = tmp_path / "scaling.json"
    ended = run_well(
        "benchmark",
        "--suite=scaling",
        f"--out={out}",
        "--rounds=1",
        "--sync_periods=1,2",
        "--steps=2",
        "--batch=8",
    )
    content = json.loads(out.read_text())
    assert content["suite"] == "scaling"
    assert {"machine", "versions", "rows"} <= set(content)
    rows = {row["system"]: row for row in content["rows"]}
    assert rows["plain Keras, independent"]["ratio_to_independent"] == 1.0
    assert rows["bare all-reduce"]["sync_ms"] > 0
    for period in (1, 2):
        row = rows[f"tfpara, period {period}"]
        assert (row["workers"], row["sync_period"]) == (2, period)
        assert row["samples_per_second"] > 0
        assert 0 < row["sync_fraction"] < 1
        low, high = row["sync_ms_range"]
        assert 0 < low <= row["sync_ms"] <= high
        assert f"tfpara, period {period}" in ended.out


def test_a_missing_folder_is_one_line(run, tmp_path):
    ended = run("benchmark", f"--out={tmp_path / 'nowhere' / 'x.json'}")
    assert ended.returncode == 1
    assert "there is no folder" in ended.err
