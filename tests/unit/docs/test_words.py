"""Pages say what they are for, and are short enough to read; what is printed needs no page."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from scripts.docs import reference

ROOT = Path(__file__).resolve().parents[3]
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SHORT = [*CONCEPTS, *sorted((ROOT / "docs" / "reference").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for(page):
    title, first = page.read_text().split("# ", 1)[1].split("\n\n", 2)[:2]
    assert title and re.match("[A-Z]", first) and len(first.split()) <= 60
    assert page not in SHORT or re.match(r"What this (page|part) is for: ", first)


def test_no_page_has_the_marks_of_a_merge():
    pages = [*PAGES, *ROOT.glob("*.md")]
    marks = re.compile(r"^(<{7}|={7}|>{7})", re.M)
    assert [page.name for page in pages if marks.search(page.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_cell_of_a_table_is_long(page):
    rows = re.findall(r"^\|(.*)\|$", page.read_text(), re.M)
    assert [cell for row in rows for cell in row.split("|") if len(cell.split()) > 25] == []


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.name)
def test_a_concept_has_a_picture_and_at_most_600_words(page):
    text = page.read_text()
    assert len(text.split()) <= 600 and "](../pictures/" in text


def test_the_glossary_is_in_order():
    text = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
    words = re.findall(r"^\| ([a-z][\w ,-]*?) \|", text.split("|---|---|\n")[1], re.M)
    assert words == sorted(words, key=lambda word: word.replace("-", " ")) and len(words) > 30


def test_messages_name_no_page_of_the_sources():
    """Pip does not install the pages."""
    assert not [each.text for each in reference.messages() if "docs/" in each.text]


@pytest.mark.parametrize("engine", ["ray", "spark"])
def test_a_script_of_an_engine_says_what_it_needs(engine, monkeypatch):
    path = str(ROOT / "docs" / "engines" / engine / "train.py")
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit, match="python train.py FOLDER"):
        runpy.run_path(path, run_name="__main__")
