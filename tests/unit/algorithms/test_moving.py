"""The tables of docs/moving/: other libraries' settings give the same models in ours."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

import tfpara

ROOT = Path(__file__).resolve().parents[3]
WORKERS, STEPS = 4, 12


def follow(rule, models):
    """Returns where all replicas go on from after each sync; `models(W)` are their models."""
    rule = rule.resolve(WORKERS)
    state = rule.init(np.zeros(3))
    points = [rule.broadcast(None, state)]
    for k in range(STEPS):
        before = state
        state = rule.update(state, models(k, points[-1]).mean(0), WORKERS)
        points.append(rule.broadcast(before, state))
    return np.array(points)


def models(k, start):
    """The workers' models after a block: each goes a part of the way to a place of its own."""
    places = np.random.default_rng(k).normal(size=(WORKERS, 3)) + 1.0
    return start + 0.2 * (places - start)


def theirs(step, **settings):
    """Follows another library's step, which changes a model and a dictionary of its own."""
    kept, model = {"smoothed": np.zeros(3)}, np.zeros(3)
    points = [model]
    for k in range(STEPS):
        model = step(model, models(k, model), kept, **settings)
        points.append(model)
    return np.array(points)


def cntk(previous, current, kept, block_size, time_constant=None, rate=1.0, nesterov=True):
    """Sums the workers' differences; both the period and the time constant are by worker."""
    if time_constant is None:
        time_constant = -block_size / math.log(1 - 1 / WORKERS)
    momentum = math.exp(-(block_size / WORKERS) / (time_constant / WORKERS))
    gradient = sum(previous - one for one in current)
    kept["smoothed"] = momentum * kept["smoothed"] + (1 - momentum) * rate * gradient
    model = previous - kept["smoothed"]
    return model - momentum * kept["smoothed"] if nesterov else model


def fairseq(previous, current, kept, momentum, rate=1.0, nesterov=False, old=False):
    """Averages the workers' differences; older versions multiply by 1 - momentum."""
    gradient = sum((previous - one) / WORKERS for one in current)
    gain = rate * (1 - momentum) if old else rate
    kept["smoothed"] = momentum * kept["smoothed"] + gain * gradient
    model = previous - kept["smoothed"]
    return model - momentum * kept["smoothed"] if nesterov else model


def torch_sgd(weights, current, kept, rate, momentum, nesterov):
    """torch.optim.SGD on the pseudo-gradient, as torchft's DiLoCo calls it."""
    gradient = sum(weights - one for one in current) / WORKERS
    if "buffer" not in kept:
        kept["buffer"] = gradient
    else:
        kept["buffer"] = momentum * kept["buffer"] + gradient
    return weights - rate * (gradient + momentum * kept["buffer"] if nesterov else kept["buffer"])


ETA = math.exp(-120_000 / 420_000)


@pytest.mark.parametrize(
    ("rule", "step", "settings"),
    [
        (
            tfpara.BMUF(ETA, block_learning_rate=0.8, compat="cntk"),
            cntk,
            {"block_size": 120_000, "time_constant": 420_000, "rate": 0.8},
        ),
        (tfpara.BMUF(compat="cntk"), cntk, {"block_size": 120_000}),
        (
            tfpara.BMUF(ETA, (1 - ETA) * WORKERS * 0.8, nesterov=False),
            cntk,
            {"block_size": 120_000, "time_constant": 420_000, "rate": 0.8, "nesterov": False},
        ),
        (
            tfpara.BMUF(0.875, nesterov=False, compat="fairseq"),
            fairseq,
            {"momentum": 0.875},
        ),
        (
            tfpara.BMUF(0.5, block_learning_rate=0.7, compat="fairseq"),
            fairseq,
            {"momentum": 0.5, "rate": 0.7, "nesterov": True},
        ),
        (
            tfpara.BMUF(0.75, block_learning_rate=0.25, compat="fairseq"),
            fairseq,
            {"momentum": 0.75, "nesterov": True, "old": True},
        ),
        (tfpara.BMUF(0.0, compat="fairseq"), lambda _, current, kept: current.mean(0), {}),
        (
            tfpara.DiLoCo(0.7, 0.9),
            torch_sgd,
            {"rate": 0.7, "momentum": 0.9, "nesterov": True},
        ),
        (tfpara.SlowMo(0.6, 0.5), torch_sgd, {"rate": 0.6, "momentum": 0.5, "nesterov": False}),
        (tfpara.BSP(), lambda _, current, kept: current.mean(0), {}),
    ],
)
def test_a_rule_goes_where_the_other_library_goes(rule, step, settings):
    np.testing.assert_allclose(follow(rule, models), theirs(step, **settings), rtol=1e-5, atol=1e-6)


def test_what_the_pages_add_runs_and_is_what_is_compared():
    """The lines with `+` of docs/moving/bmuf.md, but for those of the whole program."""
    text = (ROOT / "docs/moving/bmuf.md").read_text()
    for diff, period, rule in zip(
        re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)[1:],
        (120_000 / 4 / 256, 50),
        (tfpara.BMUF(ETA, compat="cntk"), tfpara.BMUF(0.875, nesterov=False, compat="fairseq")),
        strict=True,
    ):
        added = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == "+")
        made = {}
        exec(compile(added, "bmuf.md", "exec"), made)
        assert made["rule"] == rule
        assert made["strategy"].sync_period == int(period)


def test_the_settings_of_fairseq_are_lines_of_the_example():
    text = (ROOT / "docs/moving/bmuf.md").read_text()
    program = (ROOT / "tfpara/examples/transformer.py").read_text()
    rows = re.findall(r"^\| `--[^|]* \| `([^`]+)`", text.split("| transformer.py |")[1], re.M)
    lines = rows[: rows.index('model.save("transformer.keras")') + 1]
    assert len(lines) == 7 and all(line in program for line in lines)
