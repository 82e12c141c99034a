"""The examples beside plain Keras: the pages' differences are all there is, and both learn."""

import ast
import functools

import keras
import pytest

import tfpara
from tests.lib import examples

LEAST = 0.8  # of the task, in seconds


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Runs a program's `main`; returns how much it has learned."""
    monkeypatch.chdir(tmp_path)
    policy = keras.mixed_precision.global_policy()

    def run(name, text):
        keras.utils.set_random_seed(1)
        program = {"__name__": name}
        exec(compile(text, f"{name}.py", "exec"), program)
        capsys.readouterr()
        try:
            program["main"]()
        finally:
            keras.mixed_precision.set_global_policy(policy)
        (model,) = tmp_path.glob("*.keras")
        keras.models.load_model(model)
        model.unlink()
        return examples.learned(name, capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", examples.SCORES)
def test_the_lines_that_a_page_shows_are_what_a_plain_program_lacks(name):
    text = examples.plain(name)
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert not names & {"tfpara", "strategy"}


def test_every_example_of_the_page_is_tested():
    assert examples.diffs().keys() == examples.SCORES.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("name", examples.SCORES)
def test_two_devices_learn_what_plain_keras_learns(name, trained, monkeypatch):
    monkeypatch.setattr("sys.argv", [name])
    alone = trained(name, examples.plain(name))
    devices = ["CPU:0", "CPU:1"]
    strategy = functools.partial(tfpara.PeriodicSyncStrategy, devices=devices)
    monkeypatch.setattr(tfpara, "PeriodicSyncStrategy", strategy)
    together = trained(name, (examples.ROOT / f"tfpara/examples/{name}.py").read_text())
    print(f"FIGURE {name} {alone:.3f} {together:.3f}")
    assert alone > LEAST and together > max(LEAST, 0.9 * alone)
