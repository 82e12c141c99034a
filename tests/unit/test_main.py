"""What newcomers meet first: `python -m tfpara`, and the names that editors show."""

import ast
import importlib
import re
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tfpara
from tfpara.__main__ import main
from tfpara.checks import OLDEST_KERAS


def test_it_prints_the_versions_and_examples_that_there_are(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"tfpara {tfpara.__version__} (")
    assert said.isascii()  # stdout may have another encoding than UTF-8
    assert f"tensorflow {tf.__version__}" in said and f"keras {keras.__version__}" in said
    examples = re.findall(r"-m (tfpara\.examples\.\w+)", said)
    assert len(examples) == 3
    for name in examples:
        assert callable(importlib.import_module(name).main)


@pytest.mark.parametrize("name", ["classify", "drill", "elastic", "loop"])
def test_an_example_has_help_without_docstrings(name, monkeypatch):
    """`python -OO` drops them."""
    example = importlib.import_module(f"tfpara.examples.{name}")
    monkeypatch.setattr(example, "__doc__", None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 0


def test_it_says_what_to_write_in_place_of_arguments(capsys):
    assert main(["-n", "2", "script.py"]) == 2
    assert "was given '-n 2 script.py'. Write tfpara-launch" in capsys.readouterr().err


def test_editors_and_type_checkers_see_the_names_that_there_are():
    tree = ast.parse(Path(tfpara.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {name.asname: node.module for node in block.body for name in node.names}
    assert seen == tfpara._LOCATION | dict.fromkeys(tfpara._MODULES, "tfpara")


def test_a_keras_that_is_too_old_is_named(monkeypatch):
    root = Path(__file__).resolve().parents[2]
    oldest = ".".join(map(str, OLDEST_KERAS))
    assert f'"keras>={oldest}"' in (root / "pyproject.toml").read_text()
    assert f"Keras {oldest} or later" in (root / "README.md").read_text()
    monkeypatch.setattr(keras, "__version__", "3.9.2")
    for make in (
        lambda: tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2),
        lambda: tfpara.simulate_async(2, tfpara.ASGD()),
    ):
        with pytest.raises(ImportError, match=f"Keras 3.9.2 .* pip install 'keras>={oldest}'"):
            make()


def test_another_backend_of_keras_is_named(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    for make in (
        lambda: tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2),
        lambda: tfpara.simulate(1, tfpara.BSP(), sync_period=2),
        lambda: tfpara.AsyncStrategy(tfpara.ASGD()),
        lambda: tfpara.simulate_async(2, tfpara.ASGD()),
    ):
        with pytest.raises(ValueError, match="backend 'jax', .* Set KERAS_BACKEND=tensorflow"):
            make()
