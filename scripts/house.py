"""Figures on the code of `tfpara/`: `python -m scripts.house [ROOT]`.

The figures come from the syntax trees of a checkout: lines by folder, long functions, large classes
and files, annotations, docstrings, `Any`, private names of TensorFlow and Keras, the longest chain
of imports between folders (its length in "floors"), and circles of imports. `--comments=N` prints N
random comments and docstrings instead, for a reader who did not write them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import random
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LONG = 40  # lines; a function with more lines in its body counts as long
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_PRIVATE_MODULES = ("tensorflow.python", "tensorflow.core", "tensorflow.tsl", "keras.src")
# These names begin with an underscore, but are public: they are in Python's documentation.
_OF_PYTHON = {"_asdict", "_replace", "_fields", "_make", "_exit", "_current_frames"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A file of the package: its name with dots, its path, and what is in it."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self.text.splitlines())

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yields all functions and methods."""
        return (node for node in self.nodes if isinstance(node, _FUNCTIONS))


def modules(root: Path = HERE) -> dict[str, Module]:
    """Returns the modules of `tfpara` by name."""
    found = {}
    for path in sorted((root / "tfpara").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(name, path)
    return found


def imported(module: Module, known: Mapping[str, object]) -> set[str]:
    """Returns the known modules that a module imports, also in functions or only for types."""
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name.startswith("tfpara.") and name not in known:
                name = name.rpartition(".")[0]
            if name in known:
                found.add(name)
    return found - {module.name}


def imports(house: Mapping[str, Module]) -> dict[str, set[str]]:
    """Returns each module's imports, without `tfpara` itself, which imports its names on use."""
    names = {name: imported(module, house) - {"tfpara"} for name, module in house.items()}
    del names["tfpara"]
    return names


def place_of(name: str) -> str:
    """Returns the place of a module: its top folder in `tfpara/`; without one, the module."""
    return ".".join(name.split(".")[:2])


def room_of(name: str) -> str:
    """Returns the room of a module of `sync/`: its top folder there; without one, the module."""
    return ".".join(name.split(".")[:3])


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the groups of names that reach each other."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen, todo = set(), [name]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[name] = seen
    groups = {
        tuple(sorted(other for other in seen if name in reached.get(other, ())))
        for name, seen in reached.items()
        if name in seen
    }
    return [list(group) for group in sorted(groups)]


def floors(graph: Mapping[str, set[str]]) -> int:
    """Returns the length of the longest chain of imports; a circle counts as one floor."""
    circle = {name: tuple(group) for group in circles(graph) for name in group}
    joined: dict[object, set[object]] = {}
    for name, others in graph.items():
        own = circle.get(name, name)
        joined.setdefault(own, set()).update({circle.get(other, other) for other in others} - {own})
    height: dict[object, int] = {}

    def floor(name: object) -> int:
        if name not in height:
            height[name] = 1 + max(map(floor, joined.get(name, ())), default=0)
        return height[name]

    return max(map(floor, joined), default=0)


def grouped(graph: Mapping[str, set[str]], group: object) -> dict[str, set[str]]:
    """Returns the imports between groups of modules; `group` returns the group of a name."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        own = group(name)
        found.setdefault(own, set()).update({group(other) for other in others} - {own})
    return found


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines of a function without its head and docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def size_of(node: ast.AST) -> int:
    """Returns the number of lines of a class or function."""
    return node.end_lineno - node.lineno + 1


def private_names(house: Mapping[str, Module]) -> dict[str, set[str]]:
    """Returns the private names of other libraries in each module that has any.

    Private names are modules of `_PRIVATE_MODULES`, and attributes with an underscore that nothing
    in the package defines. (A private name that the package also defines somewhere is missed.)
    """
    own: set[str] = set()
    for module in house.values():
        for node in module.nodes:
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if _is_self(node.value) else set()
    found: dict[str, set[str]] = {}
    for name, module in house.items():
        names = set()
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        private = {n for n in names if n.startswith(_PRIVATE_MODULES)}
        for node in module.nodes:
            hidden = isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)
            if hidden and node.attr not in own | _OF_PYTHON and not _is_self(node.value):
                private.add(node.attr)
        if private:
            found[name] = private
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def prose(module: Module) -> Iterator[tuple[int, str]]:
    """Yields comments (of several lines as one) and the beginnings of docstrings, with lines."""
    last, start, joined = -2, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, own = token.start[0], not token.line[: token.start[1]].strip()
        if own and line == last + 1:
            joined += " " + token.string.lstrip("# ")
        else:
            if joined:
                yield start, joined
            start, joined = line, token.string.lstrip("# ")
        last = line if own else -2
    if joined:
        yield start, joined
    for node in module.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.split("\n\n")[0]


def code_lines(module: Module) -> int:
    """Returns the number of lines without comments, docstrings and empty ones."""
    numbers: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            numbers |= set(range(token.start[0], token.end[0] + 1))
    for node in module.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node):
            numbers -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(numbers)


def figures(root: Path = HERE) -> dict[str, str]:
    """Returns the figures of a checkout as texts, by their names."""
    house = modules(root)
    graph = imports(house)
    functions = [f for module in house.values() for f in module.functions()]
    public = [f for f in functions if not f.name.startswith("_")]
    classes = [
        (module.name, node)
        for module in house.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    ]
    lines = Counter()
    for module in house.values():
        folder = module.path.parent.relative_to(root / "tfpara")
        lines["the top" if folder == Path() else f"{folder}/"] += module.lines
    total = sum(lines.values())
    found = {
        "lines": f"{total}",
        "lines of code": f"{sum(map(code_lines, house.values()))}",
        "files": f"{len(house)}",
    }
    found |= {f"lines of {folder}": f"{count}" for folder, count in sorted(lines.items())}
    long = [f for f in functions if body_lines(f) > LONG]
    found[f"bodies over {LONG} lines"] = f"{len(long)} ({100 * len(long) / len(functions):.1f} %)"
    found["longest body"] = _largest((body_lines(f), f.name) for f in functions)
    found["largest classes"] = _largest(
        ((size_of(n), f"{n.name} ({_methods(n)} methods)") for _, n in classes), 3
    )
    found["classes over 500 lines"] = f"{sum(size_of(n) > 500 for _, n in classes)}"
    found["largest files"] = _largest(((m.lines, m.name[7:]) for m in house.values()), 3)
    found["files over 600 lines"] = f"{sum(m.lines > 600 for m in house.values())}"
    found["annotated functions"] = _share(_is_annotated(f) for f in functions)
    found["documented public functions"] = _share(bool(ast.get_docstring(f)) for f in public)
    anys = sum(isinstance(n, ast.Name) and n.id == "Any" for m in house.values() for n in m.nodes)
    found["Any in 1,000 lines"] = f"{1000 * anys / total:.1f}"
    private = private_names(house)
    found["files with private names of others"] = f"{len(private)}"
    found["private names of others"] = f"{sum(map(len, private.values()))}"
    sync = {name: others for name, others in graph.items() if name.startswith("tfpara.sync.")}
    inside = {name: {o for o in others if o in sync} for name, others in sync.items()}
    places, rooms = grouped(graph, place_of), grouped(inside, room_of)
    found["places at the top, floors"] = f"{len(places)}, {floors(places)}"
    found["rooms of sync/, floors"] = f"{len(rooms)}, {floors(rooms)}"
    for kind, each in {"files": graph, "places": places, "rooms of sync/": rooms}.items():
        groups = circles(each)
        sizes = f" (of {', '.join(str(len(g)) for g in groups)})" if groups else ""
        found[f"circles of {kind}"] = f"{len(groups)}{sizes}"
    return found


def _largest(sizes: Iterable[tuple[int, str]], count: int = 1) -> str:
    return ", ".join(f"{size} {name}" for size, name in sorted(sizes, reverse=True)[:count])


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(child, _FUNCTIONS) for child in node.body)


def _share(facts: Iterable[bool]) -> str:
    each = list(facts)
    return f"{100 * sum(each) / len(each):.0f} %"


def _is_annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    named = [a for a in arguments if a.arg not in ("self", "cls")]
    return function.returns is not None and all(a.annotation for a in named)


def main(argv: list[str] | None = None) -> None:
    """Prints the figures, private names and circles of a checkout, or some of its prose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=HERE, help="a checkout")
    parser.add_argument("--comments", type=int, metavar="N", help="print N random comments instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice")
    options = parser.parse_args(argv)
    house = modules(options.root)
    if options.comments is not None:
        texts = [(m.name, *found) for m in house.values() for found in prose(m)]
        chosen = random.Random(options.seed).sample(texts, min(options.comments, len(texts)))
        for name, line, text in sorted(chosen):
            print(f"{name}:{line}: {' '.join(text.split())}")
        return
    for name, text in figures(options.root).items():
        print(f"| {name} | {text} |")
    graph = imports(house)
    for group in circles(graph):
        print(f"circle: {', '.join(group)}")
    for name, names in private_names(house).items():
        print(f"private names in {name}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
