"""Parts of the reference that are made from the code: help texts, variables, codes, messages.

A page has such a part where it has the line `<!-- made: NAME ARGUMENTS -->`; see `made`. TensorFlow
is not imported.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tfpara.__main__ import VARIABLES
from tfpara.cluster import exit_codes

ROOT = Path(__file__).resolve().parents[2]
_WORDS = 3  # a text with fewer words in lower case does not count as a message
# Functions that give the user a message, and the kind of that message.
_PRINTS = {
    "print": "printed", "say": "printed", "tell": "note", "note": "note", "warn": "warning",
    "warning": "log", "error": "log", "info": "log", "add_note": "added to an error",
}  # fmt: skip
_RAISES = ("Error", "Exception", "Preempted", "Exit")  # an exception's name ends with one of these
# The texts of these arguments are left out, because they are shown in a program's help.
_HELP = {"help", "description", "epilog", "usage"}


class Message(NamedTuple):
    """A text that a user may see, its module, and the kind of the call ("" if not known)."""

    module: str
    kind: str
    text: str


def made(words: str) -> str:
    """Returns the Markdown for `<!-- made: words -->`: a name in `makers`, and its arguments."""
    name, *arguments = words.split()
    makers = {
        "help": help_of, "docstring": docstring_of, "environment": environment,
        "exit-codes": codes, "messages": messages_by_module,
    }  # fmt: skip
    if name not in makers:
        raise ValueError(f"made: {words}: there are {', '.join(makers)}.")
    return makers[name](*arguments)


def help_of(path: str) -> str:
    """Returns what a program prints for --help; `path` is its module, with `/` in place of dots."""
    environ = {**os.environ, "COLUMNS": "88", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    command = [sys.executable, "-m", path.replace("/", "."), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} fails:\n{done.stderr}")
    return f"```text\n{done.stdout.strip()}\n```"


def docstring_of(path: str) -> str:
    """Returns the docstring of a file, unchanged."""
    return f"```text\n{ast.get_docstring(ast.parse((ROOT / path).read_text()))}\n```"


def environment() -> str:
    """Returns the table of the variables that the library reads."""
    rows = [f"| `{name}` | {text} |" for name, text in VARIABLES.items()]
    return "\n".join(["| variable | what it says |", "|---|---|", *rows])


def codes() -> str:
    """Returns the table of the exit codes of a program that trains."""
    rows = [f"| {code} | {when} |" for code, when in exit_codes.MEANINGS.items()]
    return "\n".join(["| code | when |", "|---|---|", *rows])


def messages_by_module() -> str:
    """Returns all messages by module."""
    lines: list[str] = []
    former = ""
    for module, kind, text in messages():
        if module != former:
            lines += ["", f"## {module}", ""]
            former = module
        fence = "``" if "`" in text else "`"
        lines.append(f"- {kind or 'part of a message'}: {fence}{text}{fence}")
    return "\n".join(lines)


def messages() -> Iterator[Message]:
    """Yields every text of some words that users may see, with "…" for values."""
    for path in sorted((ROOT / "tfpara").rglob("*.py")):
        if path.name == "__main__.py":
            continue  # left out, because the program's help shows all texts of this file
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        seen: set[str] = set()
        for kind, text in _texts(ast.parse(path.read_text()), ""):
            text = " ".join(text.split())
            if text not in seen and len(re.findall(r"(?:^| )[a-z]+(?= |$)", text)) >= _WORDS:
                seen.add(text)
                yield Message(module.removesuffix(".__init__"), kind, text)


def _texts(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Yields (kind of the enclosing call, text) for each text in a node, without docstrings."""
    text = text_of(node)
    if text is not None:
        yield kind, text
        return
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        kind = name if name.endswith(_RAISES) else _PRINTS.get(name, kind)
    for child in ast.iter_child_nodes(node):
        docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        helps = isinstance(child, ast.keyword) and child.arg in _HELP
        if not docstring and not helps:
            yield from _texts(child, kind)


def text_of(node: ast.AST) -> str | None:
    """Returns the text of a string in the code, with "…" for values; None if it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "…" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = text_of(node.left), text_of(node.right)
        return "".join(part or "…" for part in parts) if any(parts) else None
    return None


def public_names() -> dict[str, list[str]]:
    """Returns the names in `__all__` of each public module; imports TensorFlow."""
    rows = (ROOT / "docs" / "design.md").read_text().split("## What is public")[1]
    (public,) = re.findall(r"^\| public \| (.*) \|$", rows, re.M)
    modules = ["tfpara", *(f"tfpara.{name}" for name in re.findall(r"`(\w+)`", public))]
    return {module: list(importlib.import_module(module).__all__) for module in modules}
