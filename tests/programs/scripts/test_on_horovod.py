"""The programs on Horovod, started by the launcher."""

import json

import pytest

from tests.lib.horovod_here import needs_horovod

pytestmark = needs_horovod

SMALL = (
    *("--layers=1", "--width=16", "--context=1", "--minibatch=64", "--epochs=1"),
    *("--sync_period=3", "--timeout_seconds=60"),
)
ON_HOROVOD = {"workers": 2, "launcher": ["--collectives=horovod"]}


def lines(ended, prefix):
    return [line.removeprefix(prefix).strip() for line in ended.err.splitlines() if prefix in line]


@pytest.mark.nightly
def test_training(run_well, corpus_directory, tmp_path):
    flags = (f"--corpus={corpus_directory}", f"--run_dir={tmp_path / 'run'}", *SMALL)
    ended = run_well("train", *flags, **ON_HOROVOD)
    assert json.loads((tmp_path / "run" / "history.json").read_text())["summary"]["workers"] == 2
    choice, started, fitted = lines(ended, "[chief]")
    assert "tfpara: collectives=horovod: HOROVOD_RANK is set" in choice
    assert started.startswith("tfpara: 2 workers, 2 replicas")
    assert "a block of 3 steps into the next, and count twice. So momentum is 0 " in fitted
    # Horovod has nothing to say about workers that leave one after the other.
    assert not lines(ended, "[worker 1]")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning_rate=1e30"], "replica 0 (worker 0) has NaN or Inf in weight"),
        (["--collectives=tensorflow"], "collectives='tensorflow' needs TF_CONFIG"),
    ],
)
def test_errors_are_one_line_on_every_worker(run, corpus_directory, tmp_path, flags, words):
    where = (f"--corpus={corpus_directory}", f"--run_dir={tmp_path / 'run'}")
    ended = run("train", *where, *SMALL, *flags, **ON_HOROVOD)
    assert ended.returncode == 1
    for prefix in ("[chief]", "[worker 1]"):
        said = [line for line in lines(ended, prefix) if "tfpara: " not in line]
        assert len(said) == 1 and said[0].startswith("train: ") and words in said[0], ended.err
