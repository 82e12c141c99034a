"""Functions that MkDocs calls while it builds the site (mkdocs.yml).

Pages are written for a code host, where links lead to files of the repository. Here such a link is
replaced by one to a page of the site, or to a copy of the file in the site. A line
`<!-- made: NAME ARGUMENTS -->` is replaced by text that `scripts.docs.reference` makes from code.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# MkDocs does not put ROOT on Python's path, so this line must come before the import of `scripts`.
sys.path.insert(0, str(ROOT))
from scripts.docs import reference

# Pages whose files are not in docs/. Maps the path of a page in the site to its file.
_OUTSIDE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are outside of docs/."""
    for place, source in _OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replaces links to files of the repository, and lines `<!-- made: … -->`."""
    place = page.file.src_uri
    source = _OUTSIDE.get(place, f"docs/{place}")

    def link(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found.groups()
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if "://" in target or target.startswith("mailto:") or not (ROOT / there).exists():
            return found[0]
        new = posixpath.relpath(_in_site(there, files, config), posixpath.dirname(place) or ".")
        return f"{opening}{new}{anchor or ''}{closing}"

    markdown = _outside_code(markdown, lambda text: _LINK.sub(link, text))
    return re.sub(r"^<!-- made: (.*?) -->$", lambda m: reference.made(m[1]), markdown, flags=re.M)


def _in_site(path: str, files: Files, config: Any) -> str:
    """Returns the place of a file in the site; for a folder, that of a list of its content."""
    for place, source in _OUTSIDE.items():
        if path == source:
            return place
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    place = f"source/{path}"
    if (ROOT / path).is_dir():
        place += "/contents.txt"
        content = "\n".join(sorted(each.name for each in (ROOT / path).iterdir())) + "\n"
        added = File.generated(config, place, content=content)
    else:
        added = File.generated(config, place, abs_src_path=str(ROOT / path))
    if place not in files.src_uris:
        files.append(added)
    return place


def _outside_code(markdown: str, change: Any) -> str:
    """Changes the text outside of blocks of code."""
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))
