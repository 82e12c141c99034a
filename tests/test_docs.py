"""The code in the documentation runs, its links lead somewhere, and it names what there is."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def names():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 784)).astype("float32")
    return {"dataset": tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 10, 64))).batch(16)}


@pytest.mark.parametrize("page", [p for p in PAGES if code_of(p)], ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = names()
    for number, block in enumerate(code_of(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_readme_exports_a_model_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = names()
    exec(code_of(ROOT / "README.md")[0], namespace)
    loaded = tf.saved_model.load("export")
    assert loaded.serve(np.zeros((2, 784), "float32")).shape == (2, 10)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_design_page_names_every_module():
    text = (ROOT / "docs" / "design.md").read_text()
    for module in (ROOT / "tfpara").glob("*.py"):
        if module.stem not in ("__init__", "version") and "launch_" not in module.stem:
            assert module.stem in text, module.name
