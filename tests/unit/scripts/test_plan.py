"""`tfpara-plan` with costs that are measured on a tiny network."""

import json

import pytest

from scripts import plan

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


def test_what_is_given_is_not_measured(capsys):
    # One layer of 999 inputs and 10,000 classes: 10 million weights, 40 MB.
    sizes = ("--inputs=999", "--layers=0", "--classes=10000")
    assert plan.main(["--step_ms=100", "--sync_ms=100", "--link_mbit=800", *sizes]) == 0
    assert "40.0 MB to send over 800 Mbit/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--link_delay_ms=5",), "is of the link of --link_mbit"),
        (("--model_mb=50",), "--model_mb is of a network of yours. Give its --step_ms"),
        (("--plot=/nowhere/plan.png",), "there is no folder /nowhere"),
        (("--steps=2",), "--steps must be at least 3"),
    ],
)
def test_bad_flags_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        plan.main(flags)
    assert message in capsys.readouterr().err.splitlines()[-1]
