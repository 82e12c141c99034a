"""`tfpara-plan` with costs that are measured on a tiny network."""

import json

TINY = ("--batch=4", "--inputs=8", "--layers=1", "--width=16", "--classes=5", "--steps=3")


def test_what_is_not_given_is_measured(run_well, tmp_path):
    out, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    files = (f"--out={out}", f"--plot={plot}")
    ended = run_well("plan", *TINY, *files, "--workers=2", "--sync_periods=1,1000")
    assert "The model is taken to be a DNN of 8-1x16-5, 0.0 MB" in ended.out
    content = json.loads(out.read_text())
    assert content["step_seconds"] > 0 and content["slowdown"] >= 1
    assert content["link_bytes_per_second"] > 0 and content["assumed"] == {}
    first, last = content["rows"]
    assert 0 < first["speedup"] < last["speedup"] <= 2
    assert plot.read_text().count("<svg")
