"""The scaling benchmark at its smallest: every system runs, and the file has the promised form."""

import json


def test_networks_on_a_card_are_compared_with_plain_keras(run_well, tmp_path):
    """There is no card here: what is tested is that all runs, with tiny networks."""
    out = tmp_path / "gpu.json"
    only = "lstm: plain;lstm: tfpara, period 5"
    ended = run_well(
        *("benchmarks", "--suite=gpu", f"--out={out}", "--rounds=1", "--steps=20"),
        f"--only={only}",
    )
    assert "No GPU is to be seen" in ended.out
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["lstm: plain Keras"]["ratio_to_plain"] == 1.0
    row = rows["lstm: tfpara, period 5"]
    assert row["ratio_to_plain"] > 0
    assert row["sync_ms"] > 0
    assert row["device"] == "CPU"


def test_a_missing_folder_is_one_line(run, tmp_path):
    ended = run("benchmarks", f"--out={tmp_path / 'nowhere' / 'x.json'}")
    assert ended.returncode == 1
    (line,) = ended.err.splitlines()
    assert line.startswith("benchmarks: ") and "there is no folder" in line


def test_the_former_name_starts_the_same_program_with_a_warning(run, tmp_path):
    ended = run("benchmark", f"--out={tmp_path / 'nowhere' / 'x.json'}")
    assert ended.returncode == 1
    warning, error = ended.err.splitlines()
    assert warning.startswith("scripts.benchmark is scripts.benchmarks now")
    assert error.startswith("benchmarks: ") and "there is no folder" in error
