"""scripts.forward: log-likelihoods of Kaldi data that has no labels."""

import json

import kaldiio
import keras
import numpy as np
import pytest
import soundfile

from scripts import runs

TRAIN = ("a", "b", "c")
SMALL = ("--rule=none", "--layers=1", "--width=16", "--context=2", "--minibatch=32", "--epochs=1")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Kaldi data: `train`, and `test`, of which the last two utterances have no alignment."""
    root = tmp_path_factory.mktemp("kaldi")
    generator = np.random.default_rng(0)
    pdfs = {}
    for name, speakers in (("train", TRAIN), ("test", ("x", "y"))):
        (root / name).mkdir()
        keys = [f"{speaker}-{number}" for speaker in speakers for number in range(3)]
        (root / name / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in keys))
        frames = {
            key: generator.normal(ord(key[0]) % 7, 2.0, (40 + 3 * n, 5)).astype(np.float32)
            for n, key in enumerate(keys)
        }
        prefix = root / name / "feats"
        kaldiio.save_ark(f"{prefix}.ark", frames, scp=f"{prefix}.scp")
        for key in keys:
            samples = generator.normal(0, 1000, 8000).astype(np.int16)
            soundfile.write(root / name / f"{key}.wav", samples, 16000)
        wavs = "".join(f"{key} {root}/{name}/{key}.wav\n" for key in keys)
        (root / name / "wav.scp").write_text(wavs)
        pdfs |= {key: generator.integers(0, 6, len(frames[key])).astype(np.int32) for key in keys}
    aligned = {key: pdf for key, pdf in pdfs.items() if key not in ("y-1", "y-2")}
    kaldiio.save_ark(str(root / "pdf.1"), aligned)
    of_audio = {key: np.resize(pdf, 48) for key, pdf in aligned.items()}
    kaldiio.save_ark(str(root / "audio.1"), of_audio)
    return root


def trained(run_well, root, out, *training, ali="pdf.1", made=()):
    data = (f"--data={root}/train", f"--test_data={root}/test", f"--ali={root}/{ali}")
    corpus = ("--num_classes=7", "--skip=labels", f"--out={out}/corpus")
    run_well("prepare_kaldi", *data, *corpus, "--validation_share=0", *made)
    run_well("train", f"--corpus={out}/corpus", f"--run_dir={out}/run", *training)
    run_well("evaluate", f"--run_dir={out}/run", f"--write_loglikes={out}/aligned")
    return out / "run", dict(kaldiio.load_scp(f"{out}/aligned.scp"))


@pytest.fixture(scope="module")
def run_dir(run_well, root, tmp_path_factory):
    made = ("--cmvn=speaker", "--norm_vars", "--deltas=1")
    return trained(run_well, root, tmp_path_factory.mktemp("forward"), *SMALL, made=made)


def by_hand(run_dir, frames):
    """Log-likelihoods of the frames of one speaker's utterances, from the definitions."""
    every = np.concatenate(list(frames.values())).astype(np.float64)
    description = json.loads((run_dir / "model.json").read_text())
    mean, stddev = (np.array(description["frames"][name]) for name in ("mean", "stddev"))
    counts = np.array(json.loads((run_dir / "decoding.json").read_text())["frames"])
    model, _ = runs.load(run_dir)
    found = {}
    for key, x in frames.items():
        x = (x - every.mean(0)) / every.std(0)
        edges = np.pad(x, ((2, 2), (0, 0)), "edge")
        # Kaldi's deltas over two frames on each side.
        slope = sum(n * edges[2 + n : len(edges) - 2 + n] for n in (-2, -1, 1, 2)) / 10.0
        x = (np.concatenate([x, slope], 1) - mean) / stddev
        edges = np.pad(x, ((2, 2), (0, 0)), "edge")
        spliced = np.concatenate([edges[n : len(x) + n] for n in range(5)], 1)
        posteriors = keras.ops.log_softmax(model.predict(spliced, verbose=0)).numpy()
        with np.errstate(divide="ignore"):
            prior = np.log(counts / counts.sum())
        found[key] = posteriors - prior
    return found


@pytest.mark.nightly
def test_utterances_without_labels_have_log_likelihoods(run_well, root, run_dir, tmp_path):
    run, aligned = run_dir
    out = tmp_path / "new" / "loglikes"
    ended = run_well("forward", f"--run_dir={run}", f"--data={root}/test", f"--out={out}")
    assert f"wrote {out}.ark and {out}.scp: 6 utterances" in ended.out
    found = dict(kaldiio.load_scp(f"{out}.scp"))
    assert list(found) == [f"{speaker}-{number}" for speaker in "xy" for number in range(3)]
    assert set(found) - set(aligned) == {"y-1", "y-2"}
    for key, matrix in aligned.items():
        np.testing.assert_allclose(found[key], matrix, rtol=1e-5, atol=1e-5)
    frames = dict(kaldiio.load_scp(str(root / "test" / "feats.scp")))
    for speaker in "xy":
        mine = {key: value for key, value in frames.items() if key[0] == speaker}
        for key, matrix in by_hand(run, mine).items():
            seen = np.isfinite(matrix[0])  # classes without a training frame have -100000
            assert 5 <= seen.sum() < 7 and found[key][0, ~seen].max() < -9e4
            np.testing.assert_allclose(found[key][:, seen], matrix[:, seen], atol=0.02)


@pytest.mark.nightly
def test_labels_of_three_frames_give_rows_of_three_frames(run_well, root, tmp_path):
    """A chain model's alignments: log-likelihoods have the rows that Kaldi's decoders expect."""
    third = {key: pdf[::3] for key, pdf in kaldiio.load_ark(str(root / "pdf.1"))}
    kaldiio.save_ark(str(root / "third.1"), third)
    made = ("--cmvn=speaker", "--norm_vars", "--deltas=1", "--frame_subsampling=3")
    run, aligned = trained(run_well, root, tmp_path, *SMALL, ali="third.1", made=made)
    out = tmp_path / "loglikes"
    run_well("forward", f"--run_dir={run}", f"--data={root}/test", f"--out={out}")
    found = dict(kaldiio.load_scp(f"{out}.scp"))
    frames = dict(kaldiio.load_scp(str(root / "test" / "feats.scp")))
    for key, matrix in found.items():
        assert len(matrix) == -(-len(frames[key]) // 3)
        if key in aligned:
            np.testing.assert_allclose(matrix, aligned[key], rtol=1e-5, atol=1e-5)
    mine = {key: value for key, value in frames.items() if key[0] == "x"}
    for key, matrix in by_hand(run, mine).items():
        seen = np.isfinite(matrix[0])
        np.testing.assert_allclose(found[key][:, seen], matrix[::3, seen], atol=0.02)
    counts = json.loads((run / "decoding.json").read_text())["frames"]
    assert sum(counts) == sum(40 + 3 * n for n in range(9))  # every frame has a label


@pytest.mark.nightly
def test_audio_through_a_recurrent_model(run, run_well, root, tmp_path):
    recurrent = ("--model=lstm-000", "--scale=0.01", "--streams=2", "--truncation=10")
    made = ("--features=plp", "--from_audio", "--deltas=0")
    flags = (*recurrent, "--rule=none", "--epochs=1")
    run_dir, aligned = trained(run_well, root, tmp_path, *flags, ali="audio.1", made=made)
    out = tmp_path / "loglikes"
    # There is a feats.scp, too, of other features.
    run_well("forward", f"--run_dir={run_dir}", f"--data={root}/test", f"--out={out}")
    found = dict(kaldiio.load_scp(f"{out}.scp"))
    assert len(found) == 6 and len(aligned) == 4
    (tmp_path / "data").mkdir()
    ended = run("forward", f"--run_dir={run_dir}", f"--data={tmp_path}/data", f"--out={out}")
    assert "trained on plp computed from audio, and" in ended.err and "has no wav.scp." in ended.err
    assert {matrix.shape for matrix in found.values()} == {(16, 7)}  # stacks of three frames
    for key, matrix in aligned.items():
        np.testing.assert_allclose(found[key], matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_data_that_does_not_fit_is_refused(run, run_well, root, run_dir, tmp_path):
    run_of, _ = run_dir
    data = tmp_path / "data"
    data.mkdir()
    (data / "utt2spk").write_text("x-0 x\nx-1 x\n")
    frames = {key: np.ones((9, 5), np.float32) for key in ("x-0", "x-1")}
    frames["x-1"][3, 2] = np.nan
    kaldiio.save_ark(f"{data}/feats.ark", frames, scp=f"{data}/feats.scp")
    flags = (f"--run_dir={run_of}", f"--data={data}", f"--out={tmp_path}/loglikes")
    for more, said in (
        (
            (),
            "NaN or Inf in frame 3, dimension 2. To leave out and count features with NaN or Inf,",
        ),
        (("--skip=labels",), "--skip=labels: here it is some of length, nonfinite, audio."),
        (("--resample",), "--resample=True is for runs on features computed from audio"),
        ((f"--out={tmp_path}/a b",), "Kaldi's tables cannot name a path with white space"),
        (("--weights=ema-0.5",), "This run has the weights: global."),
    ):
        ended = run("forward", *flags, *more)
        assert ended.returncode == 1 and "Traceback" not in ended.err
        assert said in ended.err
        assert not list(tmp_path.glob("loglikes*"))
    ended = run_well("forward", *flags, "--skip=nonfinite")
    assert ended.out.endswith(": 1 utterances; skipped 1 with features with NaN or Inf\n")

    wide = {key: np.ones((9, 6), np.float32) for key in frames}
    kaldiio.save_ark(f"{data}/feats.ark", wide, scp=f"{data}/feats.scp")
    ended = run("forward", *flags)
    assert "utterance x-0: its frames are 6 wide, those of the training 5" in ended.err
    (data / "feats.scp").unlink()
    ended = run("forward", *flags)
    assert "trained on the features of a feats.scp, and" in ended.err
    assert f"--data={data} has no feats.scp." in ended.err
