"""Whole studies at their smallest: runs with averages, scored and tabulated."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from scripts import study_grid

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()

GRID = ("--suite=replicas", "--tasks=speech", "--seeds=0", "--counts=2", "--periods=3")


def test_a_grid_goes_on_and_its_page_has_what_was_measured(run_well, tmp_path):
    out = tmp_path / "grid"
    small = ("--train_minutes=0.5", "--held_out_minutes=0.4", "--passes=0.3", f"--out={out}")
    run_well("study", *GRID, *small, "--rules=bmuf,all-reduce")
    page = (out / "page.md").read_text()
    results = {path.stem: json.loads(path.read_text()) for path in (out / "runs").glob("*.json")}
    assert len(results) == 3 + 3 + 1
    single = [r for name, r in results.items() if "speech-1-rate" in name]
    best = min(single, key=lambda r: r["errors"]["global"])
    (trained,) = (r for name, r in results.items() if name.startswith("speech-bmuf-2-3-"))
    assert trained["rate"] == best["rate"] and trained["replicas"] == 2 and trained["exchanges"] > 1
    assert len(trained["curves"]["global"]) == len(trained["curves"]["ema-0.8"])
    assert f"one replica: {best['errors']['global']:.4g} " in page
    errors = trained["errors"]
    assert f"| 3 | BMUF | {errors['global']:.4g} ({errors['ema-0.8']:.4g}) |" in page
    assert 0 < errors["global"] < 100
    reduced = [r for name, r in results.items() if name.startswith("speech-all-reduce-2-1-")]
    rates = sorted(r["rate"] / best["rate"] for r in reduced)
    assert rates == pytest.approx([1.0, 2.0**0.5, 2.0], rel=0.01)
    least = min(reduced, key=lambda r: r["errors"]["global"])["errors"]["global"]
    assert f"| 1 | all-reduce | {least:.4g} |" in page
    # The mean of two replicas' weights after each step is that of a step with their mean gradient.
    cell = study_grid.Cell("speech", "bsp", 2, 1, 0, best["rate"])
    with flagsaver.flagsaver(passes=0.3):
        command = cell.command(out)
    run_well(command[0].partition(".")[2], *command[1:])
    averaged = json.loads(cell.file(out).read_text())
    (same,) = (r for r in reduced if r["rate"] == best["rate"])
    assert averaged["exchanges"] > 10
    assert averaged["curves"]["global"] == pytest.approx(same["curves"]["global"], abs=0.2)
    for name in ("speech-error.svg", "speech-curves.svg"):
        assert "<svg" in (out / name).read_text()

    with flagsaver.flagsaver(passes=0.3):
        shared = {"train_minutes": 0.5, "held_out_minutes": 0.4}
        study_grid.check_setting(out, shared)
        with pytest.raises(ValueError, match="were made with --train_minutes=0.5 --held_out_min"):
            study_grid.check_setting(out, shared | {"train_minutes": 1.0})

    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}
    ended = run_well("study", *GRID, *small, "--rules=bmuf,all-reduce")
    assert "runs of" not in ended.out and page in ended.out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_how_much_sooner_an_error_is_reached(run_well, tmp_path):
    out = tmp_path / "time"
    suite = ("--suite=time", "--tasks=speech", "--seeds=0", "--counts=2", "--periods=3")
    small = ("--train_minutes=0.5", "--held_out_minutes=0.4", "--passes=0.3", "--lengths=1,2")
    ended = run_well("study", *suite, *small, f"--out={out}")
    page = (out / "page.md").read_text()
    assert page in ended.out
    content = json.loads((out / "time.json").read_text())
    assert [row["link_mbit"] for row in content["rows"]] == [10000.0, 1000.0, 100.0]
    runs = {path.stem: json.loads(path.read_text()) for path in (out / "runs").glob("*.json")}
    alone = [r for name, r in runs.items() if name.startswith("speech-1-")]
    least = min(r["errors"]["global"] for r in alone)
    assert content["targets"]["speech"] == pytest.approx(1.01 * least)
    for name, found in runs.items():  # 0.3 of five epochs are two; and twice that are three
        epochs = 3 if name.endswith("-length-2") else 2
        assert len(found["curves"]["global"]) == epochs
        assert found["samples"] % (epochs * 128 * found["replicas"]) == 0 < found["samples"]

    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}
    again = run_well("study", *suite, *small, f"--out={out}")
    assert "runs of" not in again.out and page in again.out
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("rule", ["bsp", "downpour-mean", "bmuf-async"])
def test_a_transformer_learns_characters(rule, run_well, tmp_path):
    cell = study_grid.Cell("characters", rule, 2, 200, 0, 0.003)
    with flagsaver.flagsaver(passes=0.05):
        command = cell.command(tmp_path)
    run_well(command[0].partition(".")[2], *command[1:])
    found = json.loads(cell.file(tmp_path).read_text())
    assert 1.0 < found["errors"]["global"] < 5.0  # the bits of a uniform guess: log2(97) = 6.6
    # An epoch is shorter than the period: one block of each replica, or one push.
    assert found["exchanges"] == (1 if rule == "bsp" else 2)
    if rule == "downpour-mean":
        assert "block_learning_rate=0.5" in found["rule"]


def test_a_table_of_a_paper_is_made(run_well, tmp_path):
    """The table scores an average; its runs start from one model that they have in common."""
    out = tmp_path / "study"
    small = ("--train_minutes=0.5", "--held_out_minutes=0.4", "--scale=0.01", "--replicas=2")
    only = "--only=aasgd-search"
    ended = run_well("study", f"--out={out}", "--paper=002", "--table=2", only, *small)
    page = (out / "page.md").read_text()
    assert page in ended.out
    content = json.loads((out / "results.json").read_text())
    (row,) = content["rows"]
    assert (row["name"], row["weights"], row["replicas"]) == ("aasgd-search", "average", 2)
    assert content["setting"]["replicas"] == 2
    assert 0 < row["frame_error_rate"] <= 100 and row["seconds"] > 0
    rates = f"{row['frame_error_rate']:.2f} | {row['phone_error_rate']:.2f}"
    minutes = f"{row['seconds'] / 60:.1f}"
    assert f"| averaged, one pass | 7.89 | 20.01 | 1 | {rates} | {minutes} | 1 |" in page
    first = out / "first-epoch-seed-0" / "model.weights.h5"
    trained_at = first.stat().st_mtime_ns

    # The suite has the same run: it is not trained again, and both of its models are scored.
    again = run_well("study", f"--out={out}", "--suite=async", only, *small)
    assert first.stat().st_mtime_ns == trained_at
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(each["weights"], each["replicas"]) for each in rows] == [("global", 2), ("average", 2)]
    assert rows[1] == row
    table = (out / "table.md").read_text()
    assert table in again.out
    for each, line in zip(rows, table.splitlines()[2:], strict=True):
        assert 0 < each["frame_error_rate"] <= 100
        assert f"| {each['frame_error_rate']:.2f} | {each['phone_error_rate']:.2f} |" in line
        assert each["seconds"] == row["seconds"]
        assert line.endswith(f"| {minutes} |")
