"""The house as docs/design.md has it: every place of tfpara, and what each imports."""

import ast
import re
from pathlib import Path

from scripts import house

ROOT = Path(__file__).resolve().parents[2]
MODULES = house.modules(ROOT)


def place_of(module):
    """The row of the table in which a module is."""
    name = module.removeprefix("tfpara").strip(".").split(".")[0]
    if not name:
        return "__init__.py"
    return f"{name}/" if (ROOT / "tfpara" / name).is_dir() else f"{name}.py"


def imports(module):
    """The places that a module imports."""
    return set(map(place_of, house.imported(MODULES[module], MODULES))) - {place_of(module)}


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


def rooms(place):
    """The rooms within a place, from the bottom up: name, files."""
    text = (ROOT / "docs" / "design.md").read_text().split(f"Within `{place}/`", 1)[1]
    for line in text.split("\n\n")[1].splitlines()[2:]:
        room, files, _ = line.strip("|").split("|")
        yield room.strip(" `/"), re.findall(r"`(\w+)`", files)


def test_every_file_of_the_cluster_is_in_one_group():
    text = (ROOT / "docs" / "design.md").read_text().split("Within `cluster/`", 1)[1]
    groups = [line.split("|")[2] for line in text.split("\n\n")[1].splitlines()[2:]]
    files = sorted(file for group in groups for file in re.findall(r"`(\w+)`", group))
    assert files == sorted(
        path.stem for path in (ROOT / "tfpara" / "cluster").glob("*.py") if path.stem != "__init__"
    )


def test_every_file_of_a_synchronous_run_is_in_its_room_and_imports_from_rooms_above():
    said, files_above = {}, {}
    for room, files in rooms("sync"):
        place = "tfpara.sync" if room == "sync" else f"tfpara.sync.{room}"
        for file in files:
            module = f"{place}.{file}"
            for name in house.imported(MODULES[module], MODULES):
                if name.startswith("tfpara.sync."):
                    own = name.rpartition(".")[0] == place
                    assert own or name in files_above, f"{module} imports {name}"
            said[module] = True
        files_above.update(said)
    there = {m for m in MODULES if m.startswith("tfpara.sync.")}
    assert set(said) == {m for m in there if MODULES[m].path.name != "__init__.py"}


def test_every_file_of_an_asynchronous_run_imports_from_files_above():
    """They are one room, and so is `control/`; both have an order, which the table has."""
    root, above = "tfpara.parameter_server", []
    for room, files in rooms("parameter_server"):
        for file in files:
            module = f"{root}.{file}" if room == "parameter_server" else f"{root}.{room}.{file}"
            names = {
                name
                for name in house.imported(MODULES[module], MODULES)
                if name.startswith(f"{root}.")
            }
            assert names <= set(above), f"{module} imports {names - set(above)}"
            if room == "control":
                assert all(name.startswith(f"{root}.control.") for name in names), module
            above.append(module)
    there = {m for m in MODULES if m.startswith(f"{root}.")}
    assert set(above) == {m for m in there if MODULES[m].path.name != "__init__.py"}


def test_no_file_imports_itself_by_way_of_others():
    """Also within functions, and where types alone are imported."""
    assert house.circles(house.imports(MODULES)) == []


def test_no_class_has_over_500_lines_and_no_file_over_600():
    classes = {
        node.name
        for module in MODULES.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and house.size_of(node) > 500
    }
    assert not classes
    assert not {name for name, module in MODULES.items() if module.lines > 600}


def test_the_figures_of_a_small_house(tmp_path):
    """Two files that import each other by way of a third, for types too, and one of a long body."""
    package = tmp_path / "tfpara"
    (package / "sync").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sync" / "__init__.py").write_text("")
    (package / "sync" / "a.py").write_text(
        "from typing import TYPE_CHECKING, Any\n"
        "if TYPE_CHECKING:\n    from tfpara.sync.b import B\n"
        "def long(x: Any) -> int:\n" + "    x += 1\n" * 41 + "    return x._theirs\n"
    )
    (package / "sync" / "b.py").write_text(
        "def f():\n    import tfpara.sync.c\nclass B:\n    def _own(self): self._own()\n"
    )
    (package / "sync" / "c.py").write_text("# One\n# comment.\nfrom tfpara.sync import a\n")
    found = house.figures(tmp_path)
    assert found["lines"] == "53" and found["lines of sync/"] == "53"
    assert found["bodies over 40 lines"] == "1 (33.3 %)" and found["longest body"] == "42 long"
    assert found["annotated functions"] == "33 %" and found["private names of others"] == "1"
    assert found["circles of files"] == "1 (of 3)" and found["circles of places"] == "0"
    assert [text for _, text in house.prose(house.modules(tmp_path)["tfpara.sync.c"])] == [
        "One comment."
    ]


def public_rows():
    """The kinds of modules in "What is public", each with the names in its row."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text.split("## What is public", 1)[1].split("|---|---|\n", 1)[1].split("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines()]
    return {kind.strip(): re.findall(r"`(\w+)`", names) for kind, names in cells}


def names_of(module):
    """What `__all__` of a module has."""
    tree = ast.parse(MODULES[module].text)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    if module == "tfpara":  # made of the tables of where they are
        places, modules = (ast.literal_eval(found[name]) for name in ("_NAMES", "_MODULES"))
        return ["__version__", *" ".join(places.values()).split(), *modules]
    return ast.literal_eval(found["__all__"])


def test_every_module_is_public_or_named_as_internal():
    listed = [name for names in public_rows().values() for name in names]
    there = {place_of(module).removesuffix("/").removesuffix(".py") for module in MODULES}
    assert sorted(listed) == sorted(there - {"__init__"})


def test_public_modules_say_which_of_their_names_are():
    for module in public_rows()["public"]:
        names = names_of(f"tfpara.{module}")
        assert len(set(names)) == len(names) > 0, module
        tree = ast.parse(MODULES[f"tfpara.{module}"].text)
        made = {
            getattr(node, "name", None) or getattr(node, "id", None)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Name)
        }
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert set(names) <= made | imported, module


def test_pages_speak_of_public_names_alone():
    rows = public_rows()
    public = {"tfpara": names_of("tfpara") + rows["public"] + rows["public as programs"]}
    public |= {f"tfpara.{module}": names_of(f"tfpara.{module}") for module in rows["public"]}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if page.name == "design.md":
            continue
        for name in re.findall(r"\btfpara(?:\.[A-Za-z_]\w*)+", page.read_text()):
            owner, *rest = name.split(".")
            while rest and owner in public:  # what is within a class or a function is the class's
                assert rest[0] in public[owner], f"{page.name}: {name}"
                owner, *rest = [f"{owner}.{rest[0]}", *rest[1:]]
