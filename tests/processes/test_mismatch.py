"""What one worker alone does is an error at once, on all of them, that says who is where."""

import pytest

from tests.lib.cluster_of_processes import run
from tests.lib.horovod_here import needs_horovod

pytestmark = pytest.mark.latest

# By case of programs/mismatch.py: the places of the odd worker and of the others, and the advice.
_FIT = "epoch 1 of fit"
_EVALUATE = "call evaluate on every worker or on none."
_EPOCHS = "add tfpara.callbacks.StopTogether()."
CASES = {
    "first_evaluate": ("in evaluate", "at the beginning of fit", "on every worker or on none."),
    "first_fit": ("at the beginning of fit", "in evaluate", "on every worker or on none."),
    "evaluate_after_epoch": (f"in evaluate (in {_FIT})", "in epoch 2 of fit (step ", _EVALUATE),
    "evaluate_in_epoch": (f"in evaluate (in {_FIT})", "in epoch 1 of fit (step ", _EVALUATE),
    "validation": (f"in evaluate (in {_FIT})", "in epoch 2 of fit (step ", _EVALUATE),
    "stop_after_epoch": ("at the end of fit, after epoch 1", "in epoch 2 of fit (step ", _EPOCHS),
    "stop_in_epoch": ("at the end of fit, after epoch 1", "in epoch 2 of fit (step ", _EPOCHS),
    "metric": (f"reading a metric (in {_FIT})", "in epoch 2 of fit (step ", "read metrics on ev"),
    "weights": (
        f"in strategy.weights(model, 'global') (in {_FIT})",
        "in epoch 1 of fit (step ",
        "call strategy.weights(model, 'global') on every worker or on none.",
    ),
    "epochs": ("in epoch 3 of fit (step ", "at the end of fit, after epoch 2", _EPOCHS),
    "order": ("in evaluate", "at the beginning of fit", "on every worker or on none."),
    "barrier": (f"in strategy.barrier() (in {_FIT})", "in epoch 2 of fit (step ", "call strat"),
    "variable": ("making a variable", "in evaluate", "make models and variables on every"),
    "gather": ("in strategy.gather()", "in evaluate", "call strategy.gather() on every worker"),
    "forget": ("in strategy.forget()", "in evaluate", "call strategy.forget() on every worker"),
    "other_weights": (
        "in strategy.weights(model, 'local')",
        "in strategy.weights(model, 'global')",
        "on every worker or on none.",
    ),
}
SOME = ["evaluate_in_epoch", "stop_in_epoch", "metric", "epochs", "order", "barrier"]


@pytest.mark.nightly
@pytest.mark.one_version
def test_two_models_in_another_order():
    """In exchanges of different names workers find out by another way, after a while."""
    options = {"odd": 1, "cases": ["alike", "former_model"], "timeout_seconds": 300}
    results = run("mismatch.py", [options] * 2)
    for result in results:
        assert result.returncode == 0, result.output
        line = next(x for x in result.output.splitlines() if x.startswith("former_model: "))
        assert line.startswith("former_model: worker 0 is in evaluate [mismatch.py, line "), line
        assert "worker 1 at the beginning of fit [" in line
    assert any("All workers have been in a sync for 1" in result.output for result in results)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("workers", "odd", "start", "options", "cases"),
    [
        pytest.param(2, 0, "TF_CONFIG", {}, list(CASES), id="all"),
        pytest.param(
            3,
            2,
            "TF_CONFIG",
            {"local_devices": 2},
            SOME,
            id="three-of-two-devices",
        ),
        pytest.param(2, 1, "TF_CONFIG", {"overlap": True}, SOME, id="overlapped"),
        pytest.param(2, 1, "horovod", {}, SOME, id="horovod", marks=needs_horovod),
    ],
)
def test_a_mismatch_says_who_is_where(workers, odd, start, options, cases):
    """One after the other in one run, for a mismatch leaves the workers able to go on."""
    options = {"odd": odd, "cases": ["alike", *cases, "still_alike"], **options}
    results = run("mismatch.py", [options] * workers, start=start)
    said = []
    for result in results:
        assert result.returncode == 0, result.output
        lines = dict(line.split(": ", 1) for line in result.output.splitlines() if ": " in line)
        said.append({case: lines[case] for case in options["cases"]})
    for case in options["cases"]:
        assert len({of_worker[case] for of_worker in said}) == 1, [each[case] for each in said]
    for case in ("alike", "still_alike"):
        assert said[0].pop(case).startswith("[")
    for case, text in said[0].items():
        of_odd, of_others, advice = CASES[case]
        where = text.partition("; ")[0]
        for rank in range(workers):
            place = of_odd if rank == odd else of_others
            many = workers > 2 and rank != odd
            who = "workers 0, 1" if many else f"worker {rank}"
            assert any(f"{who}{verb}{place}" in where for verb in (" ", " is ", " are ")), text
        assert advice.rstrip(".") in text.partition("; ")[2], text
