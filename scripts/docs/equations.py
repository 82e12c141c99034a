"""Converts equations, which docstrings have in plain characters, to HTML.

`W_i ← w̄ + ηΔ` gets letters in italics and subscripts; the browser loads nothing for it. In pages,
equations are blocks of code of the language "equation".
"""

from __future__ import annotations

import html
import re
from typing import Any

_LETTER = "[^\\W\\d_][\u0300-\u036f]*"
_TOKEN = re.compile(
    r"`(?P<quoted>[^`]+)`|(?P<name>[A-Za-z]{2,}(?:_[a-z]{2,})+)"
    r"|(?P<script>[_^])(?:\{(?P<braces>[^}]*)\}|\((?P<round>[^)]*)\)|(?P<plain>\w+))"
    rf"|(?P<word>(?:{_LETTER})+)(?P<prime>'(?![a-z]))?| (?P<gap> +)"
)
_SIGNS = re.compile('[←≤≥Σ√∂η-ωΔ≈⊙·−]|^[^"(]* = ')
_CODE = re.compile(r">>>|^ *(?:def|import|from|with|for|class) |\w\(\w+=|\.\.\.$|\"", re.M)


def typeset(line: str) -> str:
    """Returns the HTML of a line of equations."""
    at, done = 0, ""
    for found in _TOKEN.finditer(line):
        done += html.escape(line[at : found.start()], quote=False)
        at = found.end()
        rest = line[at:]
        if code := found["quoted"] or found["name"]:
            done += f"<code>{html.escape(code)}</code>"
        elif found["script"]:
            tag = "sub" if found["script"] == "_" else "sup"
            inner = found["braces"] or found["round"] or found["plain"]
            done += f"<{tag}>{typeset(inner)}</{tag}>"
        elif found["gap"]:
            done += "&emsp;"
        elif _is_symbol(found["word"], done, rest):
            done += f"<i>{found['word']}</i>{'′' if found['prime'] else ''}"
        else:
            done += found[0]
    return done + html.escape(line[at:], quote=False)


def _is_symbol(word: str, before: str, after: str) -> bool:
    letters = re.sub("[\u0300-\u036f]", "", word)
    if before.endswith("'") or (
        word == "a" and re.match(" [a-z]{2}", after)
    ):  # the s of "block's" and the article "a" are no symbols
        return False
    return (len(letters) == 1 and letters.isalpha()) or any(
        "Α" <= c <= "ω" or c == "ᵀ" for c in letters
    )


def fence(source: str, *_: Any, **__: Any) -> str:
    """Returns the HTML of a block of code of the language "equation", for pymdownx.superfences."""
    lines = [line for line in source.splitlines() if line.strip()]
    return f'<div class="equation">{"<br>".join(map(typeset, lines))}</div>'


def docstring(text: str) -> str:
    """Returns a docstring as Markdown: lists indented by four, equations in blocks of their own.

    A block that is indented by four is an equation if it has the signs of one.
    """
    prose, *sections = re.split(r"(?m)^(?=[A-Z]\w+:$)", text, maxsplit=1)
    lines: list[str] = []
    in_list = False
    for line in prose.splitlines():
        if re.match(r"[*-] \S", line):
            lines += [""] if lines and lines[-1].strip("\0 ") else []
            in_list = True
        elif line and not line.startswith("  "):
            in_list = False
        elif line and in_list:
            line = f"  {line}"
        lines.append(("\0" if in_list else "") + line)  # a \0 at its start marks a line of a list
    marked = "\n".join(lines) + "\n"
    for mark, depth in (("\0", 8), ("", 4)):
        within = rf"{mark} {{{depth}}}"
        block = rf"(?m)(?<=\n{mark}\n)(?:{within}.*\n|{mark}\n(?={within}))+"
        marked = re.sub(block, lambda found, d=depth: _block(found[0], d), marked)
    return "".join([marked.replace("\0", ""), *sections])


def _block(body: str, depth: int) -> str:
    if _CODE.search(body.replace("\0", "")) or not _SIGNS.search(body):
        return body
    at = " " * (depth - 4)
    lines = [f"{at}{line.strip()}" for line in body.replace("\0", "").splitlines() if line.strip()]
    return "\n".join([f"{at}```equation", *lines, f"{at}```", ""])
