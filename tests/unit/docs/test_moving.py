"""The pages on moving to tfpara: a diff together with our example gives the other program."""

import ast

import pytest

from tests.lib.examples import other
from tests.lib.moving import CNTK, HOROVOD, HOROVOD_LOOP, MIRRORED, TORCH


@pytest.mark.parametrize(
    ("name", "diff"),
    [
        ("cnn", MIRRORED),
        ("cnn", HOROVOD),
        ("loop", HOROVOD_LOOP),
        ("loop", TORCH),
        ("classify", CNTK),
    ],
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
    known = {"hvd", "np", "tf", "keras", "os", "tempfile", "argparse", "torch", "dist", "cntk"}
    classes = {name for name in imported if name[0].isupper()}  # of torch
    assert used & (known | classes) == imported & (known | classes) == imported
