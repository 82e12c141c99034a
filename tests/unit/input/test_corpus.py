"""The synthetic corpus: its parts, and the whole of it."""

import dataclasses
import os

import numpy as np
import pytest

from input import alignment, audio, corpus, features, index, speakers, synthesis, text
from input.records import CorpusError
from tests.lib.contents import PROSE, SMALL, digest

# Text


def test_sentences_are_cleaned():
    raw = (
        'First it was "so"\n   easy to do. See x = 1 + 2 for this one.\n\nToo short.\n\n'
        "  *Then* we go (all) home!"
    )
    assert text.sentences(raw) == ["First it was so easy to do.", "Then we go all home!"]


def test_sentences_are_not_repeated_and_not_too_long():
    assert text.sentences("One two three four. One two three four.") == ["One two three four."]
    assert text.sentences("Word " + 19 * "word " + "word.") == []


def test_default_text_is_long_enough_for_an_hour():
    words = sum(len(sentence.split()) for sentence in text.sentences(text.default()))
    assert words > 60 * 175


def test_a_text_of_an_editor_on_windows(tmp_path):
    (tmp_path / "prose.txt").write_text(f"\ufeff{PROSE}".replace(". ", ".\r\n"), newline="")
    assert text.sentences(text.read(str(tmp_path / "prose.txt"))) == text.sentences(PROSE)


def test_text_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt does not exist"):
        text.read(str(tmp_path / "nowhere.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match="not UTF-8 at byte 3"):
        text.read(str(tmp_path / "latin.txt"))
    (tmp_path / "digits.txt").write_text("1 2 3 4 5.")
    with pytest.raises(ValueError, match="no sentence of 4 to 20 words"):
        text.read(str(tmp_path / "digits.txt"))


# Audio


def test_resampling_keeps_a_tone_and_its_time():
    seconds = np.arange(22050) / 22050
    tone = audio.resample(np.int16(8000 * np.sin(2 * np.pi * 1000 * seconds)), 22050, 16000)
    assert len(tone) == 16000
    expected = 8000 * np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    np.testing.assert_allclose(tone[1000:-1000], expected[1000:-1000], atol=20)


@pytest.mark.parametrize("snr", [-5.0, 0.0, 20.0])
def test_noise_has_the_snr_that_was_asked_for(snr):
    generator = np.random.default_rng(0)
    speech = np.int16(1000 * generator.standard_normal(16000))
    noise = audio.coloured_noise(16000, 1.0, generator)
    added = audio.add_noise(speech, noise, snr) - speech
    ratio = np.mean(speech.astype(float) ** 2) / np.mean(added**2)
    np.testing.assert_allclose(10 * np.log10(ratio), snr, atol=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_noise_has_the_colour_that_was_asked_for(exponent):
    noise = audio.coloured_noise(1 << 16, exponent, np.random.default_rng(1))
    power = np.abs(np.fft.rfft(noise)) ** 2
    octave = [power[low : 2 * low].mean() for low in (1000, 2000, 4000, 8000)]
    slopes = np.diff(np.log2(octave))
    np.testing.assert_allclose(slopes, -exponent, atol=0.2)


# Labels


def test_a_phone_is_three_states_of_equal_length_by_hand():
    """Frame middles lie at 12.5, 22.5, 32.5, ... ms; "a" lasts 30 to 90 ms: 20 ms a state."""
    phones = [(0.0, "_"), (0.030, "a"), (0.090, "b")]
    labels = alignment.frame_labels(phones, 0.150, 13, {"a": 0, "b": 1, "_": 2})
    # _ is [0, 30): 12.5 is in its second third, 22.5 in its last; a's states change at 50, 70 ms;
    # b's at 110, 130 ms.
    assert labels.tolist() == [7, 8, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert labels.dtype == np.int32


def test_class_names_follow_the_labels():
    assert alignment.class_names(["_", "a"]) == ["_.0", "_.1", "_.2", "a.0", "a.1", "a.2"]


# Speakers


def test_no_two_splits_share_a_variant():
    counts = {"train": 60, "validation": 10, "test": 20}
    variants = [f"v{number}" for number in range(40)]
    cast = speakers.draw(counts, ["en-us", "en-gb-x-rp"], variants, np.random.default_rng(0))
    pools = {split: {speaker.variant for speaker in cast[split]} for split in counts}
    assert {split: len(cast[split]) for split in counts} == counts
    assert sum(map(len, pools.values())) == len(set.union(*pools.values())) == 40
    assert len({speaker.name for split in cast.values() for speaker in split}) == 90
    assert {speaker.voice for speaker in cast["train"]} == {"en-us", "en-gb-x-rp"}


def test_speakers_need_a_variant_for_each_split():
    with pytest.raises(ValueError, match="Received 1 variants for the splits train, test"):
        speakers.draw({"train": 1, "test": 1}, ["en-us"], ["f1"], np.random.default_rng(0))


# The whole


def test_amounts_are_those_asked_for(tiny, tiny_options):
    for split in index.SPLITS:
        seconds = tiny.num_frames(split) * features.FRAME_SHIFT
        wanted = 60 * tiny_options.minutes(split)
        assert 0.97 * wanted < seconds < wanted + 12
        assert len(set(tiny.split(split).speaker)) == tiny_options.speakers(split)


def test_speakers_are_disjoint(tiny):
    named = [set(tiny.split(split).speaker) for split in index.SPLITS]
    assert not named[0] & named[1] and not named[0] & named[2] and not named[1] & named[2]


def test_statistics_are_those_of_the_training_frames(tiny):
    split = tiny.split("train")
    with index.open_shards(split) as files:
        frames = np.concatenate(
            [index.read_utterance(tiny, split, files, number)[0] for number in range(len(split))]
        ).astype(np.float64)
    np.testing.assert_allclose(tiny.mean, frames.mean(0), atol=1e-5)
    np.testing.assert_allclose(tiny.stddev, frames.std(0), rtol=1e-5)


def test_an_utterance_is_what_the_parts_make_of_it(tmp_path):
    """Without noise to speak of, features and labels follow from the synthesiser alone."""
    options = dataclasses.replace(SMALL, min_snr=200.0, max_snr=200.0)
    made, _ = corpus.prepare(str(tmp_path / "clean"), options, PROSE)
    split = made.split("test")
    with index.open_shards(split) as files:
        frames, labels = index.read_utterance(made, split, files, 0)
    said = corpus._plan(options, text.sentences(PROSE), lambda stage, seconds: None)["test"][0]
    speech = synthesis.synthesise(said.text, *said.speaker[1:])
    static = features.log_mel(audio.resample(speech.samples, speech.sample_rate, 16000))
    np.testing.assert_allclose(frames[:, :40], static, atol=0.02)
    np.testing.assert_allclose(frames, features.add_deltas(static), atol=0.02)
    for frame, label in enumerate(labels):
        middle = 0.0125 + 0.01 * frame
        phone = [name for start, name in speech.phones if start <= middle][-1]
        assert made.class_names[label].rpartition(".")[0] == phone


def test_another_seed_gives_another_corpus(tmp_path):
    corpus.prepare(str(tmp_path / "first"), SMALL, PROSE)
    corpus.prepare(str(tmp_path / "second"), dataclasses.replace(SMALL, seed=1), PROSE)
    assert digest(tmp_path / "first") != digest(tmp_path / "second")


def test_a_corpus_with_the_same_options_is_reused(tmp_path):
    directory = str(tmp_path / "corpus")
    _, first = corpus.prepare(directory, SMALL, PROSE)
    before = digest(directory)
    made, second = corpus.prepare(directory, SMALL, PROSE)
    assert (first, second) == (False, True)
    assert digest(directory) == before
    assert made.options["seed"] == 0


def test_a_corpus_with_other_options_is_not_overwritten(tmp_path):
    directory = str(tmp_path / "corpus")
    corpus.prepare(directory, SMALL, PROSE)
    before = digest(directory)
    with pytest.raises(CorpusError, match=r"other options: seed \(0 there, 1 now\)"):
        corpus.prepare(directory, dataclasses.replace(SMALL, seed=1), PROSE)
    with pytest.raises(CorpusError, match="sentences_sha256"):
        corpus.prepare(directory, SMALL, "Another text that is long enough.")
    assert digest(directory) == before


def test_a_directory_that_is_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CorpusError, match="is not a whole corpus; it is not overwritten"):
        corpus.prepare(str(tmp_path), SMALL, PROSE)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_an_empty_folder_or_to_none_gets_a_corpus(tmp_path, there):
    if there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "corpus").symlink_to("disk")
    made, _ = corpus.prepare(str(tmp_path / "corpus"), SMALL, PROSE)
    index.verify(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "disk"]
    assert (tmp_path / "corpus").is_symlink()


@pytest.mark.parametrize("mounted", [True, False])
def test_an_empty_folder_that_no_rename_can_replace_is_refused(tmp_path, monkeypatch, mounted):
    if mounted:
        monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match="mount point or the current folder.* Name a folder in"):
        corpus.prepare(str(tmp_path) if mounted else ".", SMALL, PROSE)


def test_nothing_half_written_is_left_by_a_failure(tmp_path):
    def fail(stage, seconds):
        if stage == "writing":
            assert len(list(tmp_path.iterdir())) == 1  # the hidden directory is there
            assert not (tmp_path / "corpus").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.prepare(str(tmp_path / "corpus"), SMALL, PROSE, fail)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_prepare_the_same_corpus(tmp_path):
    """The one that comes second finds the first one's and leaves it."""
    directory = str(tmp_path / "corpus")

    def overtake(stage, seconds):
        if stage == "writing" and not os.path.exists(directory):
            corpus.prepare(directory, SMALL, PROSE)

    made, _ = corpus.prepare(directory, SMALL, PROSE, overtake)
    index.verify(made)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_there_are_never_more_shards_than_utterances(tmp_path):
    options = dataclasses.replace(SMALL, shard_megabytes=0.001)
    made, _ = corpus.prepare(str(tmp_path / "corpus"), options, PROSE)
    for split in made.splits.values():
        assert len(split.shards) == len(split)
    index.verify(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_minutes": 0.0}, "train_minutes must be positive. Received: 0.0"),
        ({"test_speakers": 0}, "test_speakers must be >= 1. Received: 0"),
        ({"voices": ()}, "voices must be one eSpeak NG voice or more"),
        ({"min_snr": -1e300}, r"min_snr must be in \[-200, 200\] dB"),
        ({"min_snr": 30.0}, "max_snr must be >= 30.0 dB. Received: 20.0"),
        ({"max_noise_exponent": -1.0}, r"max_noise_exponent must be in \[0, 4\]"),
        ({"shard_megabytes": 0.0}, "shard_megabytes must be positive"),
        ({"seed": -1}, "seed must be >= 0. Received: -1"),
        ({"train_minutes": float("nan")}, "train_minutes must be positive. Received: nan"),
    ],
)
def test_options_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


# The script
