"""Programs of other libraries beside ours: the diffs of the pages are all that differs."""

import ast
import re
import sys

import pytest

from tests.lib import examples
from tests.lib.diffs import before
from tests.lib.horovod_here import needs_horovod
from tests.lib.launched import launch

PAGE = (examples.ROOT / "docs/moving.md").read_text()
MIRRORED, HOROVOD, HOROVOD_LOOP = re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)


def other(name, diff):
    return before((examples.ROOT / f"tfpara/examples/{name}.py").read_text(), diff)


@pytest.mark.parametrize(
    ("name", "diff"), [("cnn", MIRRORED), ("cnn", HOROVOD), ("loop", HOROVOD_LOOP)]
)
def test_the_other_program_is_whole_and_knows_nothing_of_ours(name, diff):
    tree = ast.parse(other(name, diff))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert "tfpara" not in used | imported
    modules = {"hvd", "np", "tf", "keras", "os", "tempfile", "argparse"}
    assert used & modules == imported & modules == imported


@pytest.mark.nightly
@needs_horovod
def test_the_loop_of_horovod_learns_as_ours_does(tmp_path):
    (tmp_path / "theirs.py").write_text(other("loop", HOROVOD_LOOP))
    start = ("-n", 2, "--collectives=horovod", "--threads", 1, "--", sys.executable)
    code, said, errors = launch(*start, "theirs.py", "--epochs=6", cwd=tmp_path)
    assert code == 0, errors
    theirs = examples.learned("loop", said)
    code, said, errors = launch(*start, "-m", "tfpara.examples.loop", "--epochs=6", cwd=tmp_path)
    assert code == 0, errors
    assert min(theirs, examples.learned("loop", said)) > 0.9
