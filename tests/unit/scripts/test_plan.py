"""`tfpara-plan` with costs that are measured on a tiny network."""

import pytest

from scripts import plan


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
