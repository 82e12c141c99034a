"""evaluate --decode and --write_loglikes on a tiny corpus, and what is behind them."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from absl import flags

from input import features, index
from models import decoding as phones
from scripts import decoding, model_flags, runs
from scripts.data import held_out
from tfpara.remote_files import RemoteFolder

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()

SMALL = ("--rule=none", "--layers=1", "--width=32", "--context=2", "--minibatch=64", "--epochs=1")


@pytest.fixture(scope="module")
def trained(run_well, corpus_directory, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("decoded")
    run_well("train", f"--corpus={corpus_directory}", f"--run_dir={run_dir}", *SMALL)
    return run_dir


@pytest.fixture(scope="module")
def evaluated(run_well, trained):
    """A run that was evaluated, with its log-likelihoods written."""
    prefix = trained / "loglikes"
    flags = ("--decode", "--acoustic_scale=0.3", f"--write_loglikes={prefix}")
    return trained, prefix, run_well("evaluate", f"--run_dir={trained}", *flags)


def frames_of(corpus, split):
    part = corpus.split(split)
    with index.open_shards(part) as files:
        return [index.read_utterance(corpus, part, files, i) for i in range(len(part))]


@pytest.mark.nightly
def test_phone_errors_are_those_of_the_models_posteriors(evaluated, corpus_directory):
    """Posteriors from Keras' predict, priors and references counted here once more."""
    run_dir, _, ended = evaluated
    scores = json.loads((run_dir / "test.json").read_text())
    corpus = index.read(corpus_directory)
    states = phones.PhoneStates.of(corpus.class_names)
    counts = phones.Counts.zero(states)
    for _, labels in frames_of(corpus, "train"):
        counts.add(labels)
    hmm = phones.estimate(counts)
    model, _ = runs.load(run_dir)
    total, wrong = phones.PhoneErrors(), []
    for x, labels in frames_of(corpus, "test"):
        spliced = features.splice(features.normalise(x, corpus.mean, corpus.stddev), 2, 2)
        posteriors = keras.ops.log_softmax(model.predict(spliced, verbose=0)).numpy()
        found = phones.decode(posteriors - hmm.prior, hmm, 0.3)
        names = [corpus.class_names[k].rsplit(".", 1) for k in labels]
        said = [
            p
            for t, (p, s) in enumerate(names)
            if p != "_" and (t == 0 or names[t - 1][0] != p or int(s) < int(names[t - 1][1]))
        ]
        heard = [states.phones[p] for p in found.phones if states.phones[p] != "_"]
        number = {name: n for n, name in enumerate(states.phones)}
        total += phones.count_errors([number[p] for p in said], [number[p] for p in heard])
        wrong.append(found.classes != labels)
    assert scores["phones"] == total.reference > 20
    assert scores["phone_error_rate"] == pytest.approx(total.rate)
    for name in ("insertions", "deletions", "substitutions"):
        assert scores[name] == getattr(total, name)
    assert scores["decoded_frame_error_rate"] == pytest.approx(100 * np.concatenate(wrong).mean())
    assert scores["acoustic_scale"] == 0.3
    assert f"phone error rate {total.rate:.2f} % ({total.insertions} insertions" in ended.out


@pytest.mark.nightly
def test_the_silence_that_a_corpus_names_is_not_counted(
    run_well, evaluated, corpus_directory, tmp_path
):
    run_dir = evaluated[0]
    corpus = index.read(corpus_directory)
    model, description = runs.load(run_dir)
    content = decoding.statistics(run_dir, description, corpus)
    scores = decoding.score(
        decoding.utterances(model, description, corpus, "test"),
        decoding.hmm(content, corpus.class_names),
        acoustic_scale=0.3,
        insertion_penalty=0.0,
        uncounted=["t"],
    )
    options = {**corpus.options, "silence": "t"}
    other = with_other_statistics(corpus_directory, tmp_path / "other", options=options)
    flags = ("--decode", "--acoustic_scale=0.3", f"--out={tmp_path / 'scores.json'}")
    run_well("evaluate", f"--run_dir={run_dir}", f"--corpus={other}", *flags)
    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["phones"] == scores["phones"]
    assert found["phones"] != json.loads((run_dir / "test.json").read_text())["phones"]


def with_other_statistics(directory, out, **changes):
    """The same corpus, byte for byte, but for the statistics of its training frames."""
    shutil.copytree(directory, out)
    path = out / index.FILE_NAME
    content = json.loads(path.read_text())
    content["mean"] = [5.0 + mean for mean in content["mean"]]
    content["stddev"] = [3.0 * stddev for stddev in content["stddev"]]
    content |= changes
    path.write_text(json.dumps(content))
    return out


@pytest.mark.nightly
def test_another_corpus_is_normalised_as_the_training_was(
    run_well, evaluated, corpus_directory, tmp_path
):
    run_dir = evaluated[0]
    other = with_other_statistics(corpus_directory, tmp_path / "other")
    flags = ("--decode", "--acoustic_scale=0.3", f"--out={tmp_path / 'scores.json'}")
    run_well("evaluate", f"--run_dir={run_dir}", f"--corpus={other}", *flags)
    there = json.loads((tmp_path / "scores.json").read_text())
    assert there == json.loads((run_dir / "test.json").read_text())


def test_frames_of_another_corpus_reach_frames_and_streams_alike(
    trained, corpus_directory, tmp_path
):
    """Of both kinds of models, against the frames normalised here."""
    _, description = runs.load(trained)
    other = with_other_statistics(corpus_directory, tmp_path / "other")
    corpus = runs.corpus_for(description, other)
    of_training = index.read(corpus_directory)
    frames = [x for x, _ in frames_of(of_training, "test")]
    normal = [(x - of_training.mean) / of_training.stddev for x in frames]
    batch, _ = next(iter(held_out(corpus, "test", None, {**description, "context": 0}, 7)))
    np.testing.assert_allclose(batch, normal[0][:7], rtol=1e-4, atol=1e-5)
    recurrent = {"kind": "lstm", "context": 0, "streams": 1, "truncation": 5}
    batch = next(iter(held_out(corpus, "test", None, {**description, **recurrent})))[0]
    seen = batch["frames"] if isinstance(batch, dict) else batch
    np.testing.assert_allclose(seen[0], normal[0][:5], rtol=1e-4, atol=1e-5)


def test_a_run_of_an_older_version_has_its_statistics_from_its_corpus(
    trained, corpus_directory, tmp_path
):
    _, description = runs.load(trained)
    kept = runs.frames(description)
    del description["frames"]
    found = runs.frames(description)
    np.testing.assert_array_equal(found.mean, kept.mean)
    assert found.options == kept.options
    other = with_other_statistics(corpus_directory, tmp_path / "other")
    with pytest.raises(ValueError, match="has changed since the run was trained on it"):
        runs.frames({**description, "corpus": str(other)})


def test_the_corpus_of_a_run_is_found_from_any_directory(
    trained, corpus_directory, tmp_path, monkeypatch
):
    _, description = runs.load(trained)
    relative = dataclasses.replace(
        index.read(corpus_directory), directory=os.path.basename(corpus_directory)
    )
    monkeypatch.chdir(os.path.dirname(corpus_directory))
    described = model_flags.description(relative)["corpus"]
    monkeypatch.chdir(tmp_path)
    assert runs.corpus_for({**description, "corpus": described}).num_classes > 0


def test_a_corpus_that_has_moved_is_asked_for(trained, corpus_directory, tmp_path):
    _, description = runs.load(trained)
    moved = {**description, "corpus": str(tmp_path / "gone")}
    message = f"is not in {tmp_path / 'gone'} now. Give evaluate its present directory: --corpus="
    with pytest.raises(FileNotFoundError, match=message):
        runs.corpus_for(moved)
    there = runs.corpus_for(moved, corpus_directory)
    other = dataclasses.replace(there, fingerprint="other")
    with pytest.raises(FileNotFoundError, match=f"{message}DIRECTORY. Do so once with --decode"):
        decoding.statistics(tmp_path, moved, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"deltas": 1}}, "deltas=1, and that of the run had 2"),
        ({"options": {"sample_rate": 8000}}, "sample_rate=8000, and that of the run had 16000"),
        ({"class_names": ["b", "a"]}, r"other classes \(2\) than those of the run"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_corpus_whose_frames_were_made_otherwise_is_refused(
    trained, corpus_directory, tmp_path, monkeypatch, changes, message
):
    _, description = runs.load(trained)
    description["frames"]["options"] = {"features": "fbank", "deltas": 2, "sample_rate": 16000}
    corpus = dataclasses.replace(
        index.read(corpus_directory),
        **{k: tuple(v) if k != "options" else v for k, v in changes.items()},
    )
    monkeypatch.setattr(index, "read", lambda _: corpus)
    with pytest.raises(ValueError, match=message):
        runs.corpus_for(description, "other")


def test_log_likelihoods_are_posteriors_over_priors(evaluated, corpus_directory):
    kaldiio = pytest.importorskip("kaldiio")
    run_dir, prefix, ended = evaluated
    assert f"wrote log-likelihoods to {prefix}.ark and {prefix}.scp" in ended.out
    written = kaldiio.load_scp(f"{prefix}.scp")
    corpus = index.read(corpus_directory)
    assert sorted(written) == sorted(corpus.split("test").id)
    frames = np.bincount(
        np.concatenate([labels for _, labels in frames_of(corpus, "train")]),
        minlength=corpus.num_classes,
    )
    prior, seen = (frames + 1) / (frames + 1).sum(), frames > 0
    for name in written:
        posteriors = np.exp(written[name][:, seen]) * prior[seen]
        np.testing.assert_allclose(posteriors.sum(1), 1, rtol=1e-2)
        np.testing.assert_allclose(written[name][:, ~seen], phones.UNSEEN, rtol=1e-3)
    assert f"{(~seen).sum()} of the {len(seen)} classes have no training frame" in ended.out
    model, description = runs.load(run_dir)
    first = next(decoding.utterances(model, description, corpus, "test"))
    np.testing.assert_allclose(
        written[first.id][:, seen],
        (first.log_posteriors - np.log(prior))[:, seen],
        rtol=1e-4,
        atol=1e-4,
    )


def test_counts_are_kept_and_made_anew_for_another_corpus(
    evaluated, corpus_directory, tmp_path, monkeypatch, capsys
):
    run_dir = evaluated[0]
    corpus = index.read(corpus_directory)
    _, description = runs.load(run_dir)
    kept = json.loads((run_dir / decoding.FILE_NAME).read_text())
    assert sum(kept["frames"]) == corpus.num_frames("train")
    assert decoding.statistics(run_dir, description, corpus) == kept
    path = tmp_path / decoding.FILE_NAME
    path.write_text(json.dumps({**kept, "corpus_fingerprint": "old", "frames": [1]}))
    assert decoding.statistics(tmp_path, description, corpus) == kept
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        decoding.statistics(tmp_path, description, corpus)
    path.unlink()
    with pytest.raises(ValueError, match="has changed since the run"):
        decoding.statistics(tmp_path, {**description, "corpus_fingerprint": "other"}, corpus)
    with pytest.raises(ValueError, match="frames must be .* Delete it"):
        decoding.hmm({**kept, "frames": [1]}, corpus.class_names)

    def refused(path, content):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(decoding.common, "write_json", refused)
    assert decoding.statistics(tmp_path, description, corpus) == kept and not path.exists()
    assert f"{path} cannot be written (Permission denied)" in capsys.readouterr().out


def test_sequence_models_see_whole_utterances_in_stacks(corpus_directory):
    """Every output of a model that copies its input is the stack that it is of, after the delay."""
    corpus = index.read(corpus_directory)
    width = 3 * corpus.feature_dim
    inputs = keras.Input((None, width))
    before = keras.layers.ZeroPadding1D((2, 0))(inputs)  # outputs that are two frames late
    model = keras.Model(inputs, keras.layers.Cropping1D((0, 2))(before))
    description = {"kind": "lstm", "context": 0, "stack": 3, "label_delay": 2}
    for got, (x, labels) in zip(
        decoding.utterances(model, description, corpus, "test"),
        frames_of(corpus, "test"),
        strict=True,
    ):
        normal = features.normalise(x, corpus.mean, corpus.stddev)
        expected = keras.ops.log_softmax(features.stack(normal, 3)).numpy()
        np.testing.assert_allclose(got.log_posteriors, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(got.labels, features.stack_labels(labels, 3))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--decode", "--acoustic_scale=0"), "--acoustic_scale=0.0 must be a positive number"),
        (("--decode", "--insertion_penalty=nan"), "--insertion_penalty=nan must be"),
        (("--decode", "--uncounted_phones=_,@@"), "the corpus has no @@"),
        (("--acoustic_scale=3",), "--acoustic_scale=3.0 is for --decode. Leave it out."),
        (("--insertion_penalty=4",), "--insertion_penalty=4.0 is for --decode"),
        (("--uncounted_phones=sil",), "--uncounted_phones=sil is for --decode"),
        (("--out=nothing://x",), "'nothing://x' is no URL that fsspec knows"),
        (("--out=s3://x.json",), "'s3://x.json' names no file or folder in 'x.json'"),
    ],
)
def test_bad_flags_are_refused(run, trained, flags, message):
    ended = run("evaluate", f"--run_dir={trained}", *flags)
    assert ended.returncode == 1
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


def test_a_path_that_kaldi_cannot_read_is_refused_before_the_work(run, tmp_path):
    """The run, which is not there, is not yet looked for."""
    ended = run("evaluate", f"--run_dir={tmp_path}", f"--write_loglikes={tmp_path}/a b/x")
    assert ended.returncode == 1
    assert f"--write_loglikes={tmp_path}/a b/x: Kaldi's tables cannot name a path" in ended.err


@pytest.mark.nightly
def test_scores_are_printed_if_their_file_cannot_be_written(run, trained, tmp_path):
    ended = run("evaluate", f"--run_dir={trained}", f"--out={tmp_path}")
    assert ended.returncode == 1 and "frame error rate" in ended.out
    assert "Is a directory" in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.nightly
def test_scores_are_written_to_a_url(run_well, trained, bucket):
    run_well("evaluate", f"--run_dir={trained}", f"--out={bucket}/scores/test.json")
    assert "frame_error_rate" in json.loads(RemoteFolder(f"{bucket}/scores").read("test.json"))
    assert not Path("s3:").exists()


def test_scores_are_there_if_log_likelihoods_cannot_be_written(run, trained, tmp_path):
    (tmp_path / "x.ark").mkdir()
    flags = (f"--out={tmp_path}/scores.json", f"--write_loglikes={tmp_path}/x")
    ended = run("evaluate", f"--run_dir={trained}", *flags)
    assert ended.returncode == 1
    assert "x.ark" in ended.err
    assert "frame error rate" in ended.out
    assert "frame_error_rate" in json.loads((tmp_path / "scores.json").read_text())


def test_log_likelihoods_of_classes_without_a_training_frame():
    posteriors = np.array([[0.98, 0.01, 0.01]], np.float32)
    spoken = decoding.Utterance("u1", np.array([0]), np.log(posteriors))
    content = {"frames": [600, 400, 0]}
    ((name, found),) = decoding.log_likelihoods([(spoken.id, spoken.log_posteriors)], content)
    assert (name, found.dtype) == ("u1", np.float32)
    np.testing.assert_allclose(found[0, :2], np.log([0.98, 0.01]) - np.log([0.6, 0.4]), rtol=1e-2)
    assert found[0, 2] == pytest.approx(phones.UNSEEN, rel=1e-3)
    assert decoding.about_unseen(content) == (
        "1 of the 3 classes have no training frame. Their log-likelihoods are about -100000, so "
        "that no decoder takes them."
    )
    assert decoding.about_unseen({"frames": [1, 2]}) is None


@pytest.mark.nightly
def test_decoding_under_the_launcher_is_refused(run, trained):
    ended = run("evaluate", f"--run_dir={trained}", "--decode", workers=2)
    assert ended.returncode != 0
    assert "run in one process" in ended.err


def test_replicas_of_one_process_decode_as_one(run_well, evaluated, tmp_path):
    out = tmp_path / "scores.json"
    flags = ("--decode", "--acoustic_scale=0.3", "--devices_per_worker=2", f"--out={out}")
    run_well("evaluate", f"--run_dir={evaluated[0]}", *flags)
    one = json.loads((evaluated[0] / "test.json").read_text())
    assert json.loads(out.read_text()) == pytest.approx(one)
