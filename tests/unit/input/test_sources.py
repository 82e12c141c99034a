"""Features from audio: Kaldi directories with and without segments, and LibriSpeech."""

import io
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import soundfile

from input import features, index, preparation, sources
from input.audio_files import Options as AudioOptions
from input.labels import PhoneTimes
from input.records import CorpusError
from input.sources import Extraction
from tests.lib.contents import content


def write_utt2spk(directory, utterances):
    lines = [f"{key} {key.split('-')[0]}\n" for key in utterances]
    Path(directory, "utt2spk").write_text("".join(lines))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "data directory .* does not exist"),
        ([], "is empty"),
        (["text"], "has no feats.scp and no wav.scp"),
        (["wav.scp"], "utt2spk does not exist"),
    ],
)
def test_directories_that_lack_something(tmp_path, files, message):
    directory = tmp_path / "data"
    if files is not None:
        directory.mkdir()
        for name in files:
            (directory / name).write_text("a a.wav\n")
    with pytest.raises(FileNotFoundError, match=message):
        sources.kaldi_directory(str(directory), Extraction())


def speech(seconds, seed=0):
    return np.random.default_rng(seed).normal(0, 2000, int(16000 * seconds)).astype(np.int16)


def read_all(source):
    return dict(source.read(list(source.speakers)))


def test_features_of_whole_recordings(tmp_path):
    soundfile.write(tmp_path / "a.wav", speech(0.5), 16000)
    soundfile.write(tmp_path / "b.flac", speech(0.6, 1), 16000)
    (tmp_path / "wav.scp").write_text(f"a {tmp_path}/a.wav\nb {tmp_path}/b.flac\n")
    write_utt2spk(tmp_path, ["a", "b"])
    found = read_all(sources.kaldi_directory(str(tmp_path), Extraction()))
    np.testing.assert_array_equal(found["a"], features.log_mel(speech(0.5)))
    np.testing.assert_array_equal(found["b"], features.log_mel(speech(0.6, 1)))
    mfcc = read_all(sources.kaldi_directory(str(tmp_path), Extraction("mfcc", num_ceps=20)))
    np.testing.assert_array_equal(mfcc["a"], features.mfcc(speech(0.5), num_ceps=20))


def test_segments_are_cut_by_seconds(tmp_path):
    samples = speech(2.0)
    soundfile.write(tmp_path / "r.flac", samples, 16000)
    soundfile.write(tmp_path / "q.flac", samples[::-1], 16000)
    (tmp_path / "wav.scp").write_text(f"q {tmp_path}/q.flac\nr {tmp_path}/r.flac\n")
    (tmp_path / "segments").write_text(
        "u1 r 0 0.5\nu2 r 0.25 1.75\nu3 q 0.1 0.3\nu4 r 1.5 2.4\n"
        "u5 r 1 -1\nu6 r 0 2.6\nu7 r 1.99 2\n"
    )
    write_utt2spk(tmp_path, [f"u{number}" for number in range(1, 8)])
    found = read_all(sources.kaldi_directory(str(tmp_path), Extraction()))
    assert list(found) == [f"u{number}" for number in range(1, 8)]
    for key, part in {
        "u1": samples[:8000],
        "u2": samples[4000:28000],
        "u3": samples[::-1][1600:4800],
        "u4": samples[24000:],  # 0.4 s beyond the end
        "u5": samples[16000:],
    }.items():
        np.testing.assert_array_equal(found[key], features.log_mel(part))
    assert found["u6"].kind == found["u7"].kind == "audio"
    assert "u6 ends at 2.6 s of recording r, which is 2 s long" in found["u6"].message
    assert "u7 is shorter than one frame" in found["u7"].message


def test_segments_of_the_channels_of_a_conversation(tmp_path):
    """The fifth column of `segments`, as extract-segments reads it, and the default beside it."""
    left, right = speech(2.0), speech(2.0, 1)
    soundfile.write(tmp_path / "r.wav", np.stack([left, right], 1), 16000)
    (tmp_path / "wav.scp").write_text(f"r {tmp_path}/r.wav\n")
    (tmp_path / "segments").write_text(
        "u1 r 0 0.5 0\nu2 r 0.25 1.75 1\nu3 r 1 -1 1\nu4 r 0 0.5\nu5 r 0 0.5 2\n"
    )
    write_utt2spk(tmp_path, [f"u{number}" for number in range(1, 6)])
    found = read_all(sources.kaldi_directory(str(tmp_path), Extraction()))
    assert list(found) == [f"u{number}" for number in range(1, 6)]
    for key, part in {
        "u1": left[:8000],
        "u2": right[4000:28000],
        "u3": right[16000:],
    }.items():
        np.testing.assert_array_equal(found[key], features.log_mel(part))
    assert found["u4"].kind == found["u5"].kind == "audio"
    assert "utterance u4" in found["u4"].message and "--channel" in found["u4"].message
    assert "numbered from 0, and none 2" in found["u5"].message
    chosen = Extraction(audio=AudioOptions(channel=1))
    found = read_all(sources.kaldi_directory(str(tmp_path), chosen))
    np.testing.assert_array_equal(found["u1"], features.log_mel(left[:8000]))
    np.testing.assert_array_equal(found["u4"], features.log_mel(right[:8000]))


def test_segment_of_an_unknown_recording(tmp_path):
    (tmp_path / "wav.scp").write_text("r x.wav\n")
    (tmp_path / "segments").write_text("u1 other 0 1\n")
    write_utt2spk(tmp_path, ["u1"])
    with pytest.raises(CorpusError, match="segments, line 1: utterance u1 is of recording other"):
        sources.kaldi_directory(str(tmp_path), Extraction())


def test_a_recording_with_a_range(tmp_path):
    (tmp_path / "wav.scp").write_text("r x.wav[0:9]\n")
    write_utt2spk(tmp_path, ["r"])
    with pytest.raises(CorpusError, match="wav.scp, line 1, r: a recording has no range of rows"):
        sources.kaldi_directory(str(tmp_path), Extraction())


def test_from_audio_though_there_are_features(tmp_path):
    kaldiio.save_ark(
        f"{tmp_path}/feats.ark", {"a": np.ones((3, 2), np.float32)}, scp=f"{tmp_path}/feats.scp"
    )
    soundfile.write(tmp_path / "a.wav", speech(0.5), 16000)
    (tmp_path / "wav.scp").write_text(f"a {tmp_path}/a.wav\n")
    write_utt2spk(tmp_path, ["a"])
    given = sources.kaldi_directory(str(tmp_path), Extraction())
    np.testing.assert_array_equal(read_all(given)["a"], np.ones((3, 2)))
    computed = sources.kaldi_directory(str(tmp_path), Extraction(), from_audio=True)
    assert read_all(computed)["a"].shape == (48, 40)


@pytest.mark.quick
def test_pipes_run_only_when_allowed(tmp_path):
    stream = io.BytesIO()
    soundfile.write(stream, speech(0.5), 16000, format="WAV")
    (tmp_path / "a.wav").write_bytes(stream.getvalue())
    line = f"touch {tmp_path}/ran && cat {tmp_path}/a.wav |"
    (tmp_path / "wav.scp").write_text(f"a {line}\n")
    write_utt2spk(tmp_path, ["a"])
    with pytest.raises(CorpusError, match="wav.scp, line 1, a: .*--allow_pipes"):
        sources.kaldi_directory(str(tmp_path), Extraction())
    assert not (tmp_path / "ran").exists()
    found = read_all(sources.kaldi_directory(str(tmp_path), Extraction(), allow_pipes=True))
    np.testing.assert_array_equal(found["a"], features.log_mel(speech(0.5)))
    assert (tmp_path / "ran").exists()


@pytest.fixture
def libri(tmp_path):
    """Three speakers in LibriSpeech's layout, and the phones of their utterances."""
    root, phones = tmp_path / "train-clean", []
    for speaker in ("19", "26", "103"):
        chapter = root / speaker / "7"
        chapter.mkdir(parents=True)
        names = [f"{speaker}-7-{number:04d}" for number in range(2)]
        for number, name in enumerate(names):
            soundfile.write(chapter / f"{name}.flac", speech(0.5, number), 16000)
            phones += [f"{name} SIL 0 0.2\n", f"{name} AH 0.2 0.3\n"]
        lines = "".join(f"{name} SOME WORDS\n" for name in names)
        (chapter / f"{speaker}-7.trans.txt").write_text(lines)
    (tmp_path / "phones").write_text("".join(phones))
    return root


def test_librispeech(libri, tmp_path):
    source = sources.librispeech(str(libri), Extraction())
    with PhoneTimes([str(libri.parent / "phones")]) as labels:
        options = preparation.Options(deltas=2)
        made = preparation.prepare(str(tmp_path / "out"), {"train": source}, labels, options, {})
    index.verify(made.corpus)
    found = content(made.corpus)
    assert len(found) == 6
    assert set(made.corpus.split("train").speaker) < {"19", "26", "103"}
    frames, classes, _ = found["26-7-0001"]
    np.testing.assert_allclose(
        frames, features.add_deltas(features.log_mel(speech(0.5, 1))), atol=1e-4
    )
    names = np.array(made.corpus.class_names)[classes]
    assert list(names[[0, 19, 20, 29, 30, 47]]) == [
        "SIL.0", "SIL.2", "AH.0", "AH.0", "AH.1", "AH.2",
    ]  # fmt: skip


def test_librispeech_with_a_bad_file(libri, tmp_path):
    flac = libri / "26" / "7" / "26-7-0001.flac"
    flac.write_bytes(flac.read_bytes()[:2000])
    source = sources.librispeech(str(libri), Extraction(audio=AudioOptions(parallel=1)))
    with PhoneTimes([str(libri.parent / "phones")]) as labels:
        arguments = ({"train": source}, labels)
        with pytest.raises(CorpusError, match=rf"26-7-0001: {flac}: .* is damaged.*--skip=audio"):
            preparation.prepare(str(tmp_path / "a"), *arguments, preparation.Options(), {})
        options = preparation.Options(skip=("audio",))
        made = preparation.prepare(str(tmp_path / "b"), *arguments, options, {})
    assert made.skipped == {"audio": 1}
    assert len(content(made.corpus)) == 5


def test_librispeech_that_is_incomplete(libri, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no SPEAKER/CHAPTER/"):
        sources.librispeech(str(tmp_path), Extraction())
    with pytest.raises(FileNotFoundError, match="does not exist"):
        sources.librispeech(str(tmp_path / "nowhere"), Extraction())
    chapter = libri / "103" / "7"
    (chapter / "103-7-0002.flac").write_bytes(b"x")
    with pytest.raises(CorpusError, match="103-7-0002.flac is not listed in 103-7.trans.txt"):
        sources.librispeech(str(libri), Extraction())
    (chapter / "103-7-0002.flac").rename(tmp_path / "elsewhere")
    (chapter / "103-7-0000.flac").unlink()
    with pytest.raises(CorpusError, match="trans.txt, line 1: there is no 103-7-0000.flac"):
        sources.librispeech(str(libri), Extraction())
