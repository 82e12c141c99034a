"""The examples of docs/examples.md, the plain Keras programs beside them, and their scores."""

import re
from pathlib import Path

import numpy as np

from tests.lib.diffs import before
from tfpara.examples import tabular, vae

ROOT = Path(__file__).resolve().parents[2]
_SECTION = re.compile(r"\]\(\.\./tfpara/examples/(\w+)\.py\).*?^```diff\n(.*?)^```", re.M | re.S)

# What each program prints last: its name, its value where nothing is learned, and where all is.
SCORES = {
    "cnn": ("val_accuracy", 1 / 4, 1.0),
    "transformer": ("val_accuracy", 1 / 12, 1.0),
    "tabular": ("val_loss", float(np.var(tabular.table(1_000, seed=2)[1])), 0.01),
    "sequences": ("val_accuracy", 1 / 2, 1.0),
    "vae": ("val_loss", float(vae.images(1_000, seed=2).var(0).sum() / 0.1), 5.0),
    "loop": ("mean squared error", 0.5, 0.0),
    "finetune": ("val_accuracy", 1 / 8, 0.75),
}


def diffs() -> dict[str, str]:
    """Each example's difference from plain Keras, as the page has it."""
    return dict(_SECTION.findall((ROOT / "docs/examples.md").read_text()))


def other(name: str, diff: str) -> str:
    """The program that becomes an example by a diff."""
    return before((ROOT / f"tfpara/examples/{name}.py").read_text(), diff)


def plain(name: str) -> str:
    """The plain program of an example."""
    return other(name, diffs()[name])


def learned(name: str, printed: str) -> float:
    """How much of its task a program has learned by what it printed: 0 is nothing, 1 is all."""
    score, nothing, everything = SCORES[name]
    last = float(re.findall(rf"{score}:? ([\d.e+-]+)", printed)[-1])
    return (last - nothing) / (everything - nothing)
