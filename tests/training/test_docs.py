"""The code in the documentation runs, its links lead somewhere, and it names what there is."""

import ast
import pydoc
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from scripts.docs import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def names():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 784)).astype("float32")
    return {"dataset": tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 10, 64))).batch(16)}


README = ROOT / "README.md"  # whose block has a test of its own


@pytest.mark.nightly_cases("quickstart.md")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if code_of(p) and p != README], ids=lambda p: p.name
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPOCHS", "1")  # of docs/quickstart.md
    namespace = names()
    for number, block in enumerate(code_of(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_readme_trains_and_saves_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = code_of(README)
    namespace = {}
    exec(compile(block, "README.md", "exec"), namespace)
    saved = keras.models.load_model("model.keras")
    rows, labels = namespace["x"][:5000], namespace["y"][:5000]
    assert (saved.predict(rows, verbose=0).argmax(1) == labels).mean() > 0.5


def anchors(page):
    """What a link to a section of a page may name: GitHub's forms of its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.*)", text, re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    yield from re.findall(r"^::: ([\w.]+)", text, re.M)  # of the reference, on the site


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def texts_of_the_library():
    for path in (ROOT / "tfpara").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = reference.text_of(node)
            if text:
                yield " ".join(text.split())


def test_troubleshooting_page_quotes_messages_that_there_are():
    ours = (ROOT / "docs" / "troubleshooting.md").read_text().split("## TensorFlow's own")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", ours, re.M)
    assert len(quoted) > 50
    texts = list(texts_of_the_library())
    for message in quoted:
        assert any(len(words) > 12 for words in message.split("…")), message
        pattern = re.compile(".*".join(re.escape(words) for words in message.split("…")))
        assert any(map(pattern.search, texts)), message


@pytest.mark.parametrize("name", ["PeriodicSyncStrategy", "AsyncStrategy"])
def test_help_of_a_strategy_tells_of_its_own_arguments(name):
    strategy = getattr(tfpara, name)
    shown = pydoc.plain(pydoc.render_doc(strategy.__init__))
    assert "sync_period" in shown and "above" in shown
    assert "cluster_resolver" not in shown and "communication_options" not in shown
    assert "sync_period: τ ≥ 1" in pydoc.plain(pydoc.render_doc(strategy))


def test_versions_are_the_same_everywhere():
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    number, _, between_releases = tfpara.__version__.partition(".dev")
    assert versions[0].splitlines()[0] == number + " (not released)" * bool(between_releases)
    assert len(versions[0].strip().splitlines()) <= 60
    released = versions[1 if between_releases else 0].splitlines()[0]
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text()
    metadata = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", metadata)
    assert f'requires-python = ">={pythons[0]}"' in metadata
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / page).read_text()
