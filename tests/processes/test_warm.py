"""A program in a fork of a process that has TensorFlow finds what it finds in a new interpreter."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.lib import warm

FACTS = pathlib.Path(__file__).parents[1] / "lib" / "programs" / "process_facts.py"


def ended(start, directory, end, **environ):
    """What the program printed on stdout, and on stderr, and its exit code."""
    process = start(
        [str(FACTS), json.dumps({"end": end})],
        env={**os.environ, "TF_CONFIG": "", **environ},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=120)
    return out.splitlines(), err.splitlines(), process.returncode


def fresh(program, **options):
    command = [sys.executable, *program]
    return subprocess.Popen(command, preexec_fn=warm.default_signals, **options)


@pytest.mark.nightly
def test_a_program_finds_what_it_finds_in_an_interpreter_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "_pairs", {})  # other tests may have taken all that there may be
    runs = []
    for start, threads in [(fresh, "1"), (warm.Popen, "1"), (warm.Popen, "1"), (warm.Popen, "5")]:
        (facts, last), err, code = ended(start, tmp_path, 0, TF_NUM_INTEROP_THREADS=threads)
        assert (last, code) == ("at exit", 0), err
        runs.append(json.loads(facts))
    own = [run.pop("own") for run in runs]
    for name in own[0]:
        flat = [
            x for one in own for x in (one[name] if isinstance(one[name], list) else [one[name]])
        ]
        # Two parents take turns: the third of their forks has the hashes of the first.
        assert len(set(flat)) == len(flat) - (name == "hash"), name
    more = runs.pop()
    first = runs[0]
    assert first["parent"] == os.getpid() and first["ours"] == []
    for run in runs[1:]:
        assert run == first
    more["environment"]["TF_NUM_INTEROP_THREADS"] = "1"
    assert more.pop("threads")[1] > first.pop("threads")[1]
    assert more == first


@pytest.mark.nightly
@pytest.mark.parametrize("end", [3, "some words", "error", "kill"])
def test_it_ends_as_in_an_interpreter_of_its_own(tmp_path, end):
    expected, found = (ended(start, tmp_path, end) for start in (fresh, warm.Popen))
    assert found[0][1:] == expected[0][1:] == ([] if end == "kill" else ["at exit"])
    if end in ("error", "some words"):
        assert found[1][-1] == expected[1][-1]
    assert found[2] == expected[2] == {3: 3, "kill": -signal.SIGKILL}.get(end, 1)


@pytest.mark.nightly
def test_what_tensorflow_reads_at_import_is_never_another_environments(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "_pairs", {})  # these are for this test alone
    (facts, _), _, _ = ended(warm.Popen, tmp_path, 0, KERAS_HOME=str(tmp_path))
    assert json.loads(facts)["environment"]["KERAS_HOME"] == str(tmp_path)
    for number in range(warm._MAX_PAIRS):
        environment = {**os.environ, "KERAS_HOME": str(tmp_path / str(number))}
        parents = {warm._parent_for(environment) for _ in range(4)}
        assert parents == {None} or len(parents) == 2
    assert warm._parent_for({**os.environ, "KERAS_HOME": str(tmp_path / "another")}) is None


def test_a_module_is_run_by_its_name(tmp_path):
    (tmp_path / "said.py").write_text("import sys; print(__name__, __spec__.name, sys.argv)")
    outs = []
    for start in (fresh, warm.Popen):
        process = start(
            ["-m", "said", "words"],
            env={**os.environ, "PYTHONSAFEPATH": "", "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
        )
        outs.append(process.communicate(timeout=120)[0].decode())
    assert outs[0] == outs[1] == f"__main__ said ['{tmp_path / 'said.py'}', 'words']\n"
