"""docs/reliability.md: each row names tests that there are, and the time of day decides nothing."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
# A stamp in a record, and the day in a line of a log, decide nothing.
STAMPS = {"tfpara/sync/elastic/rejoin.py"}


def rows():
    table = PAGE.split("|---|---|---|---|---|\n", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def is_nightly(name):
    """Whether a test, which must be there, runs each night alone."""
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
    marks = [*map(ast.unparse, found.decorator_list)]
    marks += [ast.unparse(n) for n in tree.body if ast.unparse(n).startswith("pytestmark")]
    return file.startswith("nightly/") or any(re.search(r"nightly\b(?!_)", mark) for mark in marks)


def test_every_row_names_tests_that_there_are_and_when_they_run():
    assert len(rows()) >= 23
    for fault, *_, tests in rows():
        named = re.findall(r"(… )?`([\w/]+\.py::test_\w+)`", tests)
        assert named and tests.count("`") == 2 * len(named), fault
        for at_night, name in named:
            assert is_nightly(name) == bool(at_night), f"{fault}: {name}"


def test_every_file_of_hostile_input_is_there():
    table = PAGE.split("## Hostile input", 1)[1].split("\n\n")[2]
    named = re.findall(r"`([\w/]+\.py)`", table)
    assert len(named) >= 8
    for name in named:
        assert "mutants." in (ROOT / "tests" / "unit" / name).read_text(), name


def test_the_time_of_day_decides_nothing():
    """So a clock that jumps changes nothing but stamps."""
    read = re.compile(r"\btime\.time\(|\bdatetime\.|\btime\.(local|gm|c)time\(|\btime\.strftime\(")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tfpara").rglob("*.py")
        if read.search(path.read_text())
    }
    assert found <= STAMPS
