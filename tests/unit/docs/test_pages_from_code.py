"""The reference has every public name with every argument, and what else it has is of the code."""

import ast
import doctest
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import keras
import pytest

import tfpara
from scripts.docs import equations, reference
from tfpara.__main__ import VARIABLES

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "reference"
NAMES = reference.public_names()


def test_every_public_name_is_on_one_page():
    shown = [
        name
        for page in PAGES.glob("*.md")
        for name in re.findall(r"^::: (tfpara\.[\w.]+)$", page.read_text(), re.M)
        if name != "tfpara.planner"  # its docstring, before its names
    ]
    assert len(shown) == len(set(shown))
    objects = {name: resolved(name) for name in shown}
    # A name of two modules is shown as one of them; modules are the pages themselves.
    modules = set(NAMES)
    for module, names in NAMES.items():
        for name in names:
            full = f"{module}.{name}"
            known = full in shown or full in modules
            assert known or any(each is resolved(full) for each in objects.values()), full


def resolved(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


FUNCTIONS = {
    f"{module}.{name}": resolved(f"{module}.{name}")
    for module, names in NAMES.items()
    for name in names
    if callable(resolved(f"{module}.{name}"))
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_text(name):
    function = FUNCTIONS[name]
    if isinstance(function, type) and issubclass(function, BaseException):
        return
    arguments = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if not parameter.name.startswith("_")  # not for users
    ]
    text = inspect.getdoc(function) or ""
    said = re.findall(r"^    \*{0,2}(\w+): ", text, re.M)
    assert set(arguments) <= set(said), text


@pytest.mark.parametrize(
    "module",
    [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "tfpara").rglob("*.py"))
        if ">>>" in path.read_text()
    ],
)
def test_examples_in_docstrings(module):
    names = {"tfpara": tfpara, "keras": keras}
    done = doctest.testmod(importlib.import_module(module), extraglobs=names)
    assert done.failed == 0
    assert done.attempted > 0


def test_every_variable_that_the_library_reads_is_in_the_list():
    used = set()
    for path in (ROOT / "tfpara").rglob("*.py"):
        texts = (n.value for n in ast.walk(ast.parse(path.read_text())) if type(n) is ast.Constant)
        if path.name != "__main__.py":
            used |= {t for t in texts if isinstance(t, str) and re.fullmatch("TFPARA_[A-Z_]+", t)}
    assert used == set(VARIABLES)
    assert all(f"| `{name}` |" in reference.environment() for name in used)


def test_exit_codes_are_those_of_the_code():
    assert "| 130 | Ctrl-C |" in reference.codes()
    assert "| 75, or TFPARA_RESTART_EXIT_CODE |" in reference.codes()


def test_messages_are_found_with_the_error_that_they_are_of():
    found = {each.text: each for each in reference.messages()}
    text = "block_momentum=… is outside [0, 1): at 1 or more the model update grows without bound."
    (message,) = (each for words, each in found.items() if words.startswith(text))
    assert message.module == "tfpara.algorithms.bmuf" and message.kind == "ValueError"
    assert len(found) > 500
    page = reference.made("messages")
    assert page.count("\n- ") == len(list(reference.messages()))
    notes = [each for each in found.values() if each.kind == "note"]
    assert any("replicas without a row in this epoch" in each.text for each in notes)
    assert not any("Returns the state after a sync" in each for each in found)  # of a docstring


def test_what_a_page_asks_for_must_be_known():
    with pytest.raises(ValueError, match="made: nothing: there are help, docstring"):
        reference.made("nothing")


def test_every_command_that_is_installed_is_on_the_page_of_commands():
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    page = (PAGES / "command-lines.md").read_text()
    for name, function in commands.items():
        module = function.removesuffix(":main").replace(".", "/")
        assert f"\n## {name}\n\n<!-- made: help {module} -->\n" in page


@pytest.mark.quick
def test_help_is_that_of_the_program():
    assert "--link_delay_ms" in reference.made("help tfpara/plan")
    with pytest.raises(RuntimeError, match=r"tfpara\.nothing --help fails"):
        reference.made("help tfpara/nothing")


def test_equations_are_set():
    assert equations.typeset("W_i ← w̄ + ηΔ") == "<i>W</i><sub><i>i</i></sub> ← <i>w̄</i> + <i>ηΔ</i>"
    assert equations.typeset("Δ' = β^{t−1}") == "<i>Δ</i>′ = <i>β</i><sup><i>t</i>−1</sup>"
    assert equations.typeset("a < max(0, b)") == "<i>a</i> &lt; max(0, <i>b</i>)"
    assert equations.typeset("a step of `x_y`") == "a step of <code>x_y</code>"


def test_blocks_of_docstrings_are_equations_only_where_they_look_so():
    text = (
        "One.\n\n    W ← w̄\n\n* a point:\n\n      G = w̄ − W\n\n  goes on\n\n"
        "    for w in model:\n        print(w)\n\nArgs:\n    rate: a\n\n        b ← c\n"
    )
    assert equations.docstring(text) == (
        "One.\n\n```equation\nW ← w̄\n```\n\n* a point:\n\n    ```equation\n    G = w̄ − W\n    ```\n"
        "\n    goes on\n\n      for w in model:\n          print(w)\n\nArgs:\n    rate: a\n\n"
        "        b ← c\n"
    )
