"""An extension of Griffe, which reads docstrings for the site (mkdocs.yml)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.docs import equations


class Docstrings(griffe.Extension):
    """Changes docstrings: typesets equations, links pages, and shows examples as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of an object."""
        if obj.docstring:
            text = equations.docstring(obj.docstring.value)
            # Griffe shows the text under `Examples:` as code, but not the text under `Example:`. So
            # the singular is replaced by the plural.
            text = re.sub(r"(?m)^Example:$", "Examples:", text)
            obj.docstring.value = re.sub(r"\bdocs/([\w/]+)\.md\b", r"[\1](../\1.md)", text)
