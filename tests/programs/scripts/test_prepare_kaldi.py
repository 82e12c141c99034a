"""prepare_kaldi and prepare_librispeech as a user runs them."""

import json
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import soundfile

from input import index


@pytest.fixture(scope="module")
def kaldi(tmp_path_factory):
    """A directory with `data` (feats.scp), `audio` (wav.scp), alignments and LibriSpeech."""
    root = tmp_path_factory.mktemp("kaldi")
    generator = np.random.default_rng(0)
    keys = [f"s{speaker}-u{number}" for speaker in range(3) for number in range(2)]
    for name in ("data", "audio"):
        (root / name).mkdir()
        (root / name / "utt2spk").write_text("".join(f"{key} {key[:2]}\n" for key in keys))
    frames = {key: generator.standard_normal((48, 13)).astype(np.float32) for key in keys}
    kaldiio.save_ark(str(root / "data" / "feats.ark"), frames, scp=str(root / "data" / "feats.scp"))
    pdfs = {key: generator.integers(0, 9, 48).astype(np.int32) for key in keys}
    kaldiio.save_ark(str(root / "pdf.1"), pdfs)
    kaldiio.save_ark(str(root / "few.1"), dict(list(pdfs.items())[:-1]))
    chapter = root / "train-clean" / "19" / "7"
    for number, key in enumerate(keys):
        samples = generator.normal(0, 1000, 8000).astype(np.int16)
        soundfile.write(root / "audio" / f"{key}.wav", samples, 16000)
        chapter = root / "train-clean" / key[1] / "7"
        chapter.mkdir(parents=True, exist_ok=True)
        soundfile.write(chapter / f"{key[1]}-7-{number}.flac", samples[::2], 8000)
        with open(chapter / f"{key[1]}-7.trans.txt", "a") as file:
            file.write(f"{key[1]}-7-{number} WORDS\n")
        with open(root / "phones.ctm", "a") as file:
            file.write(f"{key[1]}-7-{number} 1 0 0.2 SIL\n{key[1]}-7-{number} 1 0.2 0.28 AH\n")
    lines = [f"{key} {root}/audio/{key}.wav\n" for key in keys]
    (root / "audio" / "wav.scp").write_text("".join(lines))
    return root


@pytest.mark.nightly
def test_kaldi_features_to_a_model(run_well, kaldi, tmp_path):
    out = tmp_path / "corpus"
    flags = (f"--data={kaldi}/data", f"--ali={kaldi}/pdf.*", f"--out={out}", "--deltas=1")
    ended = run_well("prepare_kaldi", *flags)
    (line,) = ended.out.splitlines()
    assert line.startswith(
        f"made {out}: 0.0 minutes, 6 utterances, 3 speakers, 9 classes, 3 shards"
    )
    corpus = index.read(out)
    index.verify(corpus)
    assert (corpus.feature_dim, corpus.num_classes) == (26, 9)
    assert corpus.options["features"] == "given"
    small = ("--layers=1", "--width=8", "--context=1", "--minibatch=32", "--epochs=1")
    run_well("train", f"--corpus={out}", f"--run_dir={tmp_path / 'run'}", "--rule=none", *small)


@pytest.mark.nightly
def test_one_speaker_trains_without_held_out_scores(run, run_well, kaldi, tmp_path):
    data, out = tmp_path / "data", tmp_path / "corpus"
    data.mkdir()
    (data / "feats.scp").write_text((kaldi / "data" / "feats.scp").read_text())
    keys = [line.split()[0] for line in (data / "feats.scp").read_text().splitlines()]
    (data / "utt2spk").write_text("".join(f"{key} one\n" for key in keys))
    flags = (f"--data={data}", f"--ali={kaldi}/pdf.1", f"--out={out}", "--test_share=0")
    ended = run("prepare_kaldi", *flags)
    assert "speakers of the training data (1) are too few to hold some out" in ended.err
    assert "--validation_share=0 to go without validation" in ended.err
    run_well("prepare_kaldi", *flags, "--validation_share=0")
    small = ("--layers=1", "--width=8", "--context=1", "--minibatch=32", "--epochs=1")
    run_dir = tmp_path / "run"
    training = ("train", f"--corpus={out}", f"--run_dir={run_dir}", "--rule=none", *small)
    refused = run(*training, "--schedule=newbob")
    assert f"{out} has no validation data, which --schedule=newbob needs" in refused.err
    assert f"{out} has no validation data, so no epoch is scored" in run_well(*training).out
    (epoch,) = json.loads((run_dir / "history.json").read_text())["epochs"]
    assert epoch["loss"] > 0
    assert not any("validation" in name for name in epoch)


@pytest.mark.nightly
def test_kaldi_audio_with_utterances_skipped_is_reused(run_well, kaldi, tmp_path):
    flags = (
        f"--data={kaldi}/audio",
        f"--ali={kaldi}/few.1",
        f"--out={tmp_path / 'corpus'}",
        "--features=plp",
        "--cmvn=speaker",
        "--skip=labels",
        "--num_classes=12",
    )
    ended = run_well("prepare_kaldi", *flags)
    assert "5 utterances, 3 speakers, 12 classes" in ended.out
    assert ended.out.endswith("; skipped 1 with features without labels\n")
    corpus = index.read(tmp_path / "corpus")
    assert corpus.feature_dim == 39
    assert (corpus.options["features"], corpus.options["num_ceps"]) == ("plp", 13)
    assert run_well("prepare_kaldi", *flags).out.startswith("reused ")


def test_librispeech_with_resampling(run_well, kaldi, tmp_path):
    out = tmp_path / "corpus"
    flags = (f"--data={kaldi}/train-clean", f"--phones={kaldi}/phones.ctm", f"--out={out}")
    ended = run_well("prepare_librispeech", *flags, "--resample", "--num_mel=28")
    assert "6 utterances, 3 speakers, 6 classes" in ended.out
    corpus = index.read(out)
    assert corpus.feature_dim == 3 * 28
    assert corpus.class_names == ("AH.0", "AH.1", "AH.2", "SIL.0", "SIL.1", "SIL.2")


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        ("kaldi", ("--data=data",), ("one of --ali and --phones",)),
        ("kaldi", ("--data=data", "--ali=few.1"), ("s2-u1", "--skip=labels")),
        (
            "kaldi",
            ("--data=data", "--ali=pdf.1", "--pitch"),
            ("--pitch=True is for features computed from audio",),
        ),
        (
            "kaldi",
            ("--data=data", "--validation_data=audio", "--ali=pdf.1"),
            ("validation would get features from audio", "--from_audio"),
        ),
        (
            "librispeech",
            ("--data=train-clean", "--phones=phones.ctm"),
            (".flac", "8000 Hz", "16000 Hz", "--resample"),
        ),
    ],
)
def test_bad_input_is_one_line(run, kaldi, tmp_path, program, flags, words):
    paths = [flag.replace("=", f"={kaldi}/") for flag in flags]
    ended = run(f"prepare_{program}", *paths, f"--out={tmp_path / 'corpus'}")
    assert ended.returncode == 1
    assert ended.out == ""
    assert "Traceback" not in ended.err
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith(f"prepare_{program}: ")
    for word in words:
        assert word in last
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--norm_vars",), "--norm_vars=True is for --cmvn."),
        (("--silence=sp",), "--silence=sp is for --phones."),
        (("--channel=0",), "--channel=0 is for features computed from audio"),
        (
            ("--frame_shift=1",),
            "frame_subsampling must be at least 1, and frame_shift less than it",
        ),
        (("--num_ceps=20",), "--num_ceps=20 is for --features=mfcc and plp."),
        (("--num_mel=23", "--features=plp"), "--num_mel=23 is for --features=fbank."),
        (("--sample_rate=8000",), "--sample_rate=8000 is for features computed from audio"),
        (("--resample",), "--resample=True is for features computed from audio"),
        (("--decoder=tensorflow-io",), "--decoder=tensorflow-io is for features computed"),
        (
            ("--validation_data=data", "--validation_share=0.2"),
            "--validation_share=0.2 is for a corpus without --validation_data.",
        ),
        (
            ("--test_data=data", "--test_share=0"),
            "--test_share=0.0 is for a corpus without --test_data.",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_flags_that_would_do_nothing(run, kaldi, tmp_path, flags, message):
    paths = [flag.replace("=data", f"={kaldi}/data") for flag in ("--data=data", *flags)]
    ended = run("prepare_kaldi", *paths, f"--ali={kaldi}/pdf.1", f"--out={tmp_path / 'corpus'}")
    assert ended.returncode == 1
    assert f"prepare_kaldi: {message}" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_pipes_are_not_run(run, kaldi, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "utt2spk").write_text("s0-u0 s0\n")
    (data / "wav.scp").write_text(f"s0-u0 touch {tmp_path}/ran |\n")
    flags = (f"--data={data}", f"--ali={kaldi}/pdf.1", f"--out={tmp_path / 'corpus'}")
    ended = run("prepare_kaldi", *flags)
    assert ended.returncode == 1
    assert "wav.scp, line 1, s0-u0" in ended.err
    assert "--allow_pipes" in ended.err
    assert not (tmp_path / "ran").exists()


def test_nothing_stays_of_a_program_that_is_asked_to_end(run, kaldi, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "utt2spk").write_text("s0-u0 s0\n")
    (data / "feats.scp").write_text("s0-u0 kill -TERM $PPID; exec sleep 9 |\n")
    flags = (f"--data={data}", f"--ali={kaldi}/pdf.1", f"--out={tmp_path / 'corpus'}")
    shares = ("--validation_share=0", "--test_share=0", "--skip=features")
    ended = run("prepare_kaldi", *flags, *shares, "--allow_pipes")
    assert ended.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
