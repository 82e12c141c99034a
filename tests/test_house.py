"""The house as docs/design.md has it: every place of tfpara, and what each imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfpara"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def place_of(module):
    """The row of the table in which a module is."""
    name = module.removeprefix("tfpara").strip(".").split(".")[0]
    if not name:
        return "__init__.py"
    return f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"


def imports(module):
    """The places that a module imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name.split(".")[0] == "tfpara" and name not in MODULES:
                name = name.rpartition(".")[0]
            if name in MODULES:
                found.add(place_of(name))
    return found - {place_of(module)}


def rows():
    """Place to the names of its last column, in the order of the table."""
    table = (
        (ROOT / "docs" / "design.md").read_text().split("|---|---|---|\n", 1)[1].split("\n\n")[0]
    )
    cells = [
        re.fullmatch(r"\| `([^`]+)` \| .+? \| ?(.*?) ?\|", line) for line in table.splitlines()
    ]
    assert all(cells), table
    return {cell[1]: cell[2] for cell in cells}


def test_every_place_has_a_row_and_imports_what_it_says_from_rows_above():
    found = {place: set() for place in map(place_of, MODULES)}
    for module in MODULES:
        found[place_of(module)] |= imports(module)
    said = rows()
    assert set(said) == set(found)
    above = []
    for place, names in said.items():
        if place not in ("__init__.py", "examples/"):
            stems = {each.removesuffix("/").removesuffix(".py") for each in found[place]}
            assert stems == set(re.findall(r"`([^`]+)`", names)), place
            assert found[place] <= set(above), place
        above.append(place)
    assert found["examples/"] == {"__init__.py"}


def test_every_file_of_a_synchronous_run_is_spoken_of():
    text = (ROOT / "docs" / "design.md").read_text().split("Within `sync/`", 1)[1].split("\n\n")[1]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in text.splitlines()))
    there = {path.stem for path in (PACKAGE / "sync").glob("*.py")} - {"__init__"}
    assert sorted(named) == sorted(there)
