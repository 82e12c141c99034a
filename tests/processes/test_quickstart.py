"""The quickstart: its two changes, its processes, a kill, a restart and the averaged model."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.launched import DEADLINE, LAUNCH, Launched

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "quickstart.md").read_text()


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


def changed(script, diff):
    """The script with a diff of the page, whose hunks each have one place in it."""
    for hunk in re.split(r"^@@ .*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert script.count(old) == 1, old
        script = script.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    return script


PLAIN, WHOLE, LOADING = blocks("python")
DIFFS = blocks("diff")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "EPOCHS"}


def test_the_whole_script_is_the_plain_one_with_both_changes():
    assert changed(changed(PLAIN, DIFFS[0]), DIFFS[1]) == WHOLE
    assert "tfpara" not in PLAIN


def printed(folder, *command, **environment):
    return subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,  # the notebook trains for a minute where nothing else runs
        check=True,
    ).stdout


def last_accuracy(text):
    return float(re.findall(r" val_accuracy: (\S+)", text)[-1])


@pytest.mark.nightly
def test_two_processes_train_the_changed_script_as_well_as_one_the_plain_one(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    alone = printed(tmp_path, sys.executable, "train.py", EPOCHS="2")
    (tmp_path / "train.py").write_text(changed(PLAIN, DIFFS[0]))
    together = printed(tmp_path, *LAUNCH, "-n", "2", "train.py", EPOCHS="2")
    assert "625/625" in alone
    assert "313/313" in together
    assert last_accuracy(alone) > 0.87
    assert last_accuracy(together) == pytest.approx(last_accuracy(alone), abs=0.03)


@pytest.mark.nightly
def test_a_killed_run_goes_on_and_its_average_is_loaded(tmp_path):
    (tmp_path / "train.py").write_text(WHOLE)
    with Launched(
        "-n", "2", "train.py", cwd=tmp_path, env=ENVIRONMENT | {"EPOCHS": "4"}
    ) as launched:
        launched.read_until("Epoch 3/4")
        os.kill(newest_worker(launched.process.pid), signal.SIGKILL)
        code, _, errors = launched.finish()
    assert code == 128 + signal.SIGKILL
    assert "failed first: killed by SIGKILL" in errors
    again = printed(tmp_path, *LAUNCH, "-n", "2", "train.py", EPOCHS="4")
    assert re.search(r"Resuming from checkpoint \d+: epoch [34]\b", again)
    assert "Epoch 2/4" not in again
    assert "Epoch 4/4" in again
    points = PLAIN[PLAIN.index("def points") : PLAIN.index("def network")]
    (tmp_path / "load.py").write_text(f"import numpy as np\n{points}\n{LOADING}")
    assert float(printed(tmp_path, sys.executable, "load.py")) > 0.87


@pytest.mark.nightly
@pytest.mark.parametrize("epochs", [1, 6])
def test_the_notebook_prints_what_is_stored_in_it(epochs, tmp_path):
    """With one epoch of fewer points, in place of its six, it is only run."""
    pytest.importorskip("matplotlib")
    cells = json.loads((DOCS / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    text = "\n".join("".join(cell["source"]) for cell in code)
    assert "epochs=6" in text and "range(1, 7)" in text
    text = text.replace("epochs=6", f"epochs={epochs}").replace("(1, 7)", f"(1, {epochs + 1})")
    if epochs == 1:
        of_six = "points(20000, seed=1), points(4000, seed=2)"
        assert of_six in text
        text = text.replace(of_six, "points(4000, seed=1), points(800, seed=2)")
    (tmp_path / "cells.py").write_text(text)
    now = accuracies(printed(tmp_path, sys.executable, "cells.py", MPLBACKEND="agg"))
    outputs = [output for cell in code for output in cell["outputs"]]
    stored = accuracies("".join("".join(each.get("text", "")) for each in outputs))
    assert list(stored) == ["BSP", "BMUF", "EASGD", "DiLoCo", "one replica"]
    assert now.keys() == stored.keys()
    if epochs == 6:
        assert now == pytest.approx(stored, abs=0.015)
    assert sum("image/png" in each.get("data", {}) for each in outputs) == 2


def accuracies(text):
    return {
        name: float(value) for name, value in re.findall(r"^(\S.*?) +held-out.* (\S+)$", text, re.M)
    }


def newest_worker(launcher):
    """The last process of the script among the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return max(
        int(child)
        for child in children
        if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
