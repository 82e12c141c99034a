"""An LSTM from training to decoding and export, on a tiny corpus."""

import csv
import json

import numpy as np
import pytest
import tensorflow as tf

from input import index
from scripts import decoding, runs

FLAGS = (
    "--model=lstm-000",
    "--scale=0.02",
    "--streams=2",
    "--truncation=5",
    "--label_delay=1",
    "--simulate_replicas=2",
    "--sync_period=4",
    "--ema_decay=0.5",
    "--normalisation=utterance",
    "--epochs=1",
)


@pytest.fixture(scope="module")
def trained(run_well, corpus_directory, tmp_path_factory):
    """(a run that was scored three times in its epoch, one that was scored at its end)."""
    base = tmp_path_factory.mktemp("lstm")
    run_dirs = base / "often", base / "once"
    for run_dir, times in zip(run_dirs, (3, 1), strict=True):
        where = (f"--corpus={corpus_directory}", f"--run_dir={run_dir}")
        run_well("train", *where, *FLAGS, f"--held_out_times_per_epoch={times}")
    return run_dirs


def test_scores_within_an_epoch_leave_the_training_as_it_is(trained):
    weights = [runs.load(run_dir)[0].get_weights() for run_dir in trained]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)
    with (trained[0] / "held_out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["weights"] for row in rows] == 3 * ["global", "ema-0.5"]
    assert [float(row["epoch"]) for row in rows][::2] == pytest.approx([0.37, 0.7, 1.0], abs=0.05)


def test_evaluate_scores_whole_utterances_alike(run_well, trained, corpus_directory, tmp_path):
    """Streams with state carried over give what whole utterances at once give."""
    out = tmp_path / "scores.json"
    run_well("evaluate", f"--run_dir={trained[0]}", f"--out={out}", "--decode")
    scores = json.loads(out.read_text())
    corpus = index.read(corpus_directory)
    model, description = runs.load(trained[0])
    spoken = list(decoding.utterances(model, description, corpus, "test"))
    labels = np.concatenate([u.labels for u in spoken])
    posteriors = np.concatenate([u.log_posteriors for u in spoken])
    assert scores["frames"] == len(labels)
    wrong = 100 * np.mean(posteriors.argmax(1) != labels)
    assert scores["frame_error_rate"] == pytest.approx(wrong, abs=1e-3)
    entropy = -np.mean(posteriors[np.arange(len(labels)), labels])
    assert scores["cross_entropy"] == pytest.approx(entropy, abs=1e-4)
    errors = scores["insertions"] + scores["deletions"] + scores["substitutions"]
    assert scores["phone_error_rate"] == pytest.approx(100 * errors / scores["phones"])


def test_the_exported_model_gives_the_posteriors_of_the_run(
    run_well, trained, corpus_directory, tmp_path
):
    ended = run_well("export", f"--run_dir={trained[0]}", f"--out={tmp_path / 'export'}")
    assert "takes 40 log-mel energies" in ended.out
    signature = tf.saved_model.load(tmp_path / "export").signatures["serving_default"]
    corpus = index.read(corpus_directory)
    split = corpus.split("test")
    model, description = runs.load(trained[0])
    expected = next(decoding.utterances(model, description, corpus, "test"))
    with index.open_shards(split) as files:
        frames, _ = index.read_utterance(corpus, split, files, 0)
    found = signature(frames=tf.constant(frames[:, :40]))["log_posteriors"]
    np.testing.assert_allclose(found, expected.log_posteriors, rtol=1e-3, atol=1e-3)
