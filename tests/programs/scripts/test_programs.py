"""train, evaluate and export, end to end on a tiny corpus."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from input import index

SMALL = ("--layers=2", "--width=32", "--context=2", "--minibatch=64", "--epochs=2")

# Run in an isolated interpreter: the SavedModel needs nothing of the project.
RELOAD = """
import sys
import numpy as np, tensorflow as tf
signature = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
inputs = np.load(sys.argv[2])
np.savez(sys.argv[3], **{k: signature(frames=inputs[k])["log_posteriors"] for k in inputs})
"""


@pytest.fixture(scope="session")
def single(run_well, corpus_directory, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("single")
    flags = ("--rule=none", "--final_learning_rate=0.01")
    ended = run_well(
        "train", f"--corpus={corpus_directory}", f"--run_dir={run_dir}", *flags, *SMALL
    )
    return run_dir, ended


@pytest.fixture(scope="session")
def pair(run_well, corpus_directory, single, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("pair")
    init = f"--init={single[0] / 'model.weights.h5'}"
    flags = ("--rule=bmuf", "--sync_period=4", "--ema_decay=0.5,0.9", "--devices_per_worker=2")
    ended = run_well(
        "train",
        f"--corpus={corpus_directory}",
        f"--run_dir={run_dir}",
        init,
        *flags,
        *SMALL,
        workers=2,
    )
    return run_dir, ended


def history(run_dir):
    return json.loads((run_dir / "history.json").read_text())


def test_single_training_learns_and_leaves_its_results(single, corpus_directory):
    run_dir, ended = single
    content = history(run_dir)
    losses = [log["validation_loss"] for log in content["epochs"]]
    classes = index.read(corpus_directory).num_classes
    assert losses[1] < losses[0] < np.log(classes)
    assert [log["learning_rate"] for log in content["epochs"]] == pytest.approx([0.1, 0.01])
    assert content["summary"]["workers"] == 1
    assert content["summary"]["samples_per_second"] > 0
    assert list((run_dir / "tensorboard").glob("events.out.*"))
    assert "Epoch 1/2" in ended.out and "Epoch 2/2" in ended.out


@pytest.mark.nightly
def test_two_workers_train_on_from_the_given_weights(single, pair):
    before = history(single[0])["epochs"]
    content = history(pair[0])
    assert content["summary"]["workers"] == 2
    assert content["summary"]["replicas"] == 4
    assert "block_momentum=0.75" in content["summary"]["rule"]
    # One that started from other weights would begin near the single run's first epoch.
    assert content["epochs"][0]["loss"] < before[0]["loss"]
    for log in content["epochs"]:
        assert 0 < log["sync_fraction"] < 1
        assert log["sync_ms"] > 0
        assert log["distance"] > 0
    assert {p.name for p in pair[0].iterdir()} == {
        "model.weights.h5",
        "ema-0.5.weights.h5",
        "ema-0.9.weights.h5",
        "model.json",
        "history.json",
        "flags.txt",
        "files.txt",
        "tensorboard",
        "checkpoints",
        "held_out.csv",
    }


def test_the_chief_alone_shows_progress(pair):
    lines = pair[1].out.splitlines()
    assert sum("Epoch 1/2" in line for line in lines) == 1
    assert not [line for line in lines if line.startswith("[worker")]


@pytest.mark.nightly
def test_the_flags_that_were_kept_start_the_same_run(run_well, single, tmp_path):
    flags = f"--flagfile={single[0] / 'flags.txt'}"
    run_well("train", flags, f"--run_dir={tmp_path}", "--epochs=1")
    kept = (tmp_path / "flags.txt").read_text().splitlines()
    original = (single[0] / "flags.txt").read_text().splitlines()
    assert {line.split("=")[0] for line in set(kept) ^ set(original)} == {"--run_dir", "--epochs"}
    # The same seed and the same data: the first epoch of a longer run, but for its rate.
    again, first = history(tmp_path)["epochs"][0], history(single[0])["epochs"][0]
    assert again["loss"] == pytest.approx(first["loss"], rel=1e-3)


@pytest.mark.nightly
def test_evaluate_gives_the_error_of_the_exported_model(run_well, pair, corpus_directory, tmp_path):
    out = tmp_path / "scores.json"
    ended = run_well("evaluate", f"--run_dir={pair[0]}", f"--out={out}")
    scores = json.loads(out.read_text())
    (line,) = [line for line in ended.out.splitlines() if "frame error rate" in line]
    assert f"{scores['frame_error_rate']:.2f} %" in line
    assert f"{scores['cross_entropy']:.4f} nats" in line
    run_well("export", f"--run_dir={pair[0]}", f"--out={tmp_path / 'export'}")
    corpus = index.read(corpus_directory)
    split = corpus.split("test")
    with index.open_shards(split) as files:
        utterances = [index.read_utterance(corpus, split, files, i) for i in range(len(split))]
    # A frame's first 40 numbers are the log-mel energies themselves.
    np.savez(tmp_path / "in.npz", **{f"u{i}": x[:, :40] for i, (x, _) in enumerate(utterances)})
    command = [sys.executable, "-I", "-c", RELOAD, "export", "in.npz", "out.npz"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    found = np.load(tmp_path / "out.npz")
    posteriors = [found[f"u{i}"] for i in range(len(utterances))]
    labels = np.concatenate([y for _, y in utterances])
    joined = np.concatenate(posteriors)
    wrong = 100 * np.mean(joined.argmax(1) != labels)
    entropy = -np.mean(joined[np.arange(len(labels)), labels])
    assert scores["frames"] == len(labels)
    assert scores["frame_error_rate"] == pytest.approx(wrong, abs=1e-3)
    assert scores["cross_entropy"] == pytest.approx(entropy, abs=1e-4)


@pytest.mark.nightly
def test_the_place_of_an_export_may_be_a_url(run, pair):
    """The message about a URL of this machine shows that the script passes the URL on."""
    ended = run("export", f"--run_dir={pair[0]}", "--out=file:///nowhere/export")
    assert ended.returncode == 1 and "'file:///nowhere/export' is of this machine" in ended.err


@pytest.mark.nightly
def test_workers_together_score_as_one(run_well, pair, tmp_path):
    results = []
    for workers in (1, 2):
        out = tmp_path / f"{workers}.json"
        flags = (f"--run_dir={pair[0]}", f"--out={out}", "--weights=ema-0.9", "--split=validation")
        run_well("evaluate", *flags, workers=workers)
        results.append(json.loads(out.read_text()))
    for name in ("frame_error_rate", "cross_entropy"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5)
    assert results[0]["frames"] == results[1]["frames"]


@pytest.mark.nightly
def test_an_evaluator_beside_the_training(run, run_well, corpus_directory, tmp_path):
    flags = (f"--corpus={corpus_directory}", f"--run_dir={tmp_path}", "--rule=bmuf", "--epochs=2")
    more = ("--layers=1", "--width=8", "--context=1", "--minibatch=64", "--ma", "--sync_period=5")
    ended = run("train", *flags, *more, workers=2, launcher=("--evaluator",))
    assert ended.returncode == 0, ended.err
    with open(tmp_path / "evaluator" / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["weights"] for row in rows[-2:]] == ["global", "ma"]
    assert {row["epoch"] for row in rows[-2:]} == {"2"}
    with open(tmp_path / "held_out.csv", newline="") as file:
        held_out = list(csv.DictReader(file))[-2:]  # by the workers, at the end of training
    for mine, theirs in zip(rows[-2:], held_out, strict=True):
        assert mine["weights"] == theirs["weights"]
        for name in ("loss", "frame_accuracy"):
            assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-4)
    out = tmp_path / "scores.json"
    best = ("--weights=best", "--split=validation", f"--out={out}")
    run_well("evaluate", f"--run_dir={tmp_path}", *best)
    lowest = min(float(row["loss"]) for row in rows)
    assert json.loads(out.read_text())["cross_entropy"] == pytest.approx(lowest, rel=1e-4)
