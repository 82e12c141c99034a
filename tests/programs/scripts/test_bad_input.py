"""One clear line and a non-zero exit, on every worker, for what the user can put right."""

import json
import shutil

import pytest

from input import index
from scripts import common

SMALL = ("--layers=1", "--width=16", "--context=1", "--minibatch=64", "--epochs=1")


def assert_one_line(err, *words):
    lines = [line for line in err.splitlines() if "absl::InitializeLog" not in line]
    lines = [line for line in lines if not line.startswith(("I0000", "E0000", "W0000"))]
    # The strategy says what it is when it is made.
    lines = [line for line in lines if not line.startswith("tfpara: ")]
    assert len(lines) == 1, err
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--sync_period=0",), ("sync_period", "0")),
        (("--rule=adam",), ("rule", "adam", "easgd")),
        (("--no_such_flag=1",), ("no_such_flag",)),
        (("epochs=3",), ("epochs=3", "--name=value")),
        (("--corpus=/nowhere",), ("/nowhere", "scripts.prepare_speech")),
        (("--nonesterov=1",), ("--nonesterov=1 does not take an argument",)),
        (("--block_momentum=1.0",), ("block_momentum=1.0", "[0, 1)")),
        (("--rule=none", "--simulate_replicas=2"), ("--rule=none", "--simulate_replicas")),
        (("--timeout_seconds=nan",), ("--timeout_seconds=nan must be a finite number",)),
        ((f"--shuffle_frames={10**20}",), (f"{10**20} must be at most 9007199254740992",)),
        (("--init=/nowhere.weights.h5",), ("/nowhere.weights.h5", "does not exist")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_train(run, corpus_directory, tmp_path, flags, words):
    run_dir = tmp_path / "run"
    ended = run("train", f"--corpus={corpus_directory}", f"--run_dir={run_dir}", *SMALL, *flags)
    assert ended.returncode != 0
    assert_one_line(ended.err, "train: ", *words)
    assert not run_dir.exists()


@pytest.mark.parametrize("between", ["=", " "])
def test_a_flags_file_that_is_no_text_is_named(tmp_path, capsys, between):
    path = tmp_path / "run.flags"
    path.write_bytes(b"--epochs=1\n\xff\n")
    with pytest.raises(SystemExit, match="2"):
        common._parse(["train", *f"--flagfile{between}{path}".split(), "--corpus=x"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    assert f": --flagfile{between}{path}, or a file that it names, is no text in UTF-8" in said


@pytest.mark.parametrize(("program", "flag"), [("study", "out"), ("train", "run_dir")])
def test_a_url_where_a_path_is_needed(run, tmp_path, program, flag):
    more = [f"--corpus={tmp_path}"] if program == "train" else []
    ended = run(program, f"--{flag}=s3://bucket/x", *more)
    assert ended.returncode == 2
    assert_one_line(ended.err, f"{program}: ", f"--{flag}=s3://bucket/x", "path of this machine")


def test_evaluate_of_no_run(run, tmp_path):
    ended = run("evaluate", f"--run_dir={tmp_path}")
    assert ended.returncode != 0
    assert_one_line(ended.err, "evaluate: ", str(tmp_path), "model.json")


def worker_lines(ended, prefix):
    found = [line.removeprefix(prefix) for line in ended.err.splitlines() if prefix in line]
    return "\n".join(line.strip() for line in found)


@pytest.mark.nightly
def test_every_worker_says_what_is_wrong(run, corpus_directory, tmp_path):
    flags = (f"--corpus={corpus_directory}", f"--run_dir={tmp_path / 'run'}", *SMALL)
    ended = run("train", *flags, "--rule=easgd", "--elasticity=0.7", workers=2)
    assert ended.returncode == 1
    for prefix in ("[chief]", "[worker 1]"):
        assert_one_line(worker_lines(ended, prefix), "train: ", "elasticity=0.7", "unstable")
    assert not (tmp_path / "run").exists()


# Daily: on Horovod, in test_on_horovod.py.
@pytest.mark.nightly
def test_divergence_names_the_replica_and_the_weight(run, corpus_directory, tmp_path):
    flags = (f"--corpus={corpus_directory}", f"--run_dir={tmp_path}", *SMALL)
    ended = run("train", *flags, "--learning_rate=1e30", "--sync_period=3", workers=2)
    assert ended.returncode == 1
    for prefix in ("[chief]", "[worker 1]"):
        line = worker_lines(ended, prefix)
        assert_one_line(line, "train: ", "replica 0 (worker 0) has NaN or Inf in weight", "kernel")
    assert not (tmp_path / "model.weights.h5").exists()


def test_a_damaged_run(run, tmp_path):
    (tmp_path / "model.json").write_text(
        json.dumps({"kind": "dnn", "arguments": {"input_dim": -1}})
    )
    (tmp_path / "model.weights.h5").write_bytes(b"")
    ended = run("export", f"--run_dir={tmp_path}")
    assert ended.returncode != 0
    assert_one_line(ended.err, "export: ", "model.json")


def test_damage_found_on_the_way_names_file_and_offset(run, corpus_directory, tmp_path):
    damaged = tmp_path / "corpus"
    shutil.copytree(corpus_directory, damaged)
    split = index.read(damaged).split("train")
    place = split.place(len(split) - 1)  # only the first one is read in advance
    with open(place.path, "r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    run_dir = tmp_path / "run"
    ended = run("train", f"--corpus={damaged}", f"--run_dir={run_dir}", "--rule=none", *SMALL)
    assert ended.returncode == 1
    assert_one_line(ended.err, "train: ", place.path, f"at byte {place.offset}")
    assert not (run_dir / "model.weights.h5").exists()
