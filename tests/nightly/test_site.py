"""The site as scripts/docs.sh builds it, its links, and its pages in a browser."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocstrings_handlers.python", reason="the extra [docs] is not installed")
from scripts.docs import check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert len(check.pages(site)) > 40
    assert list(check.wrong_links(site)) == []
    text = (site / "reference" / "rules.html").read_text()
    assert '<div class="equation">' in text and "block_momentum" in text


def damaged(site, tmp_path):
    """A copy with one fault of each kind."""
    shutil.copytree(site, tmp_path / "site")
    page = tmp_path / "site" / "loops.html"
    faults = (
        '<a href="nothing.html">a</a><a href="rules.html#nothing">b</a>'
        '<img src="https://example.org/a.png"><img src="nothing.svg">'
        "<script>nothing()</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", faults))
    return tmp_path / "site"


def test_faults_of_links_are_found(site, tmp_path):
    found = "\n".join(check.wrong_links(damaged(site, tmp_path)))
    assert found.count("\n") == 3
    assert "loops.html links to nothing.html, which there is not" in found
    assert "loops.html links to rules.html#nothing, and rules.html has no such section" in found
    assert "loops.html loads https://example.org/a.png" in found


def test_pages_load_in_a_browser_and_the_search_finds(site, browser):
    assert list(check.wrong_in_browser(site, browser)) == []


def test_faults_of_pages_are_found_in_a_browser(site, browser, tmp_path):
    found = "\n".join(check.wrong_in_browser(damaged(site, tmp_path), browser))
    assert "loops.html does not show nothing.svg" in found
    assert "nothing is not defined" in found
