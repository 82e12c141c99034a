"""The study at its smallest: a run with averages, scored and tabulated."""

import json


def test_the_table_has_a_row_for_each_model(run_well, tmp_path):
    out = tmp_path / "study"
    flags = (
        f"--out={out}",
        "--train_minutes=0.5",
        "--held_out_minutes=0.4",
        "--epochs=1",
        "--replicas=2",
        "--scale=0.01",
        "--only=lstm-n",
    )
    ended = run_well("study", *flags)
    content = json.loads((out / "results.json").read_text())
    rows = content["rows"]
    assert [(row["model"], row["weights"], row["replicas"]) for row in rows] == [
        ("LSTM", "global", 2),
        ("LSTM", "ma", 2),
        ("LSTM", "ema-0.8", 2),
    ]
    table = (out / "table.md").read_text()
    assert table in ended.out
    for row, line in zip(rows, table.splitlines()[2:], strict=True):
        assert 0 < row["frame_error_rate"] <= 100
        assert f"| {row['frame_error_rate']:.2f} | {row['phone_error_rate']:.2f} |" in line
        assert row["seconds"] > 0
        assert line.endswith(f"| {row['seconds'] / 60:.1f} |")
    assert "| LSTM | SGD, Nesterov BMUF | 2 | 1 | EMA 0.8 |" in table
    assert content["setting"]["replicas"] == 2


def test_unknown_runs_are_refused(run, tmp_path):
    ended = run("study", f"--out={tmp_path / 'study'}", "--only=gmm")
    assert ended.returncode == 1
    assert "there is no run 'gmm'. There are: dnn-sgd-rbm-1," in ended.err
