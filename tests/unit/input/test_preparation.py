"""Kaldi directories to a corpus: values, splits, and everything that can be wrong."""

import os
import shutil
from collections import Counter
from pathlib import Path

import kaldiio
import numpy as np
import pytest

from input import features, index, preparation, sources
from input.labels import KaldiAlignments, PhoneTimes
from input.records import CorpusError
from input.sources import Extraction
from tests.lib.contents import content

DIM, CLASSES = 5, 7


def write_feats(directory, frames):
    """`feats.scp`, its archive, and `utt2spk` with speakers named as utterances begin."""
    Path(directory).mkdir(exist_ok=True)
    with open(f"{directory}/feats.ark", "wb") as ark, open(f"{directory}/feats.scp", "w") as scp:
        for key, matrix in frames.items():
            scp.write(f"{key} {directory}/feats.ark:{ark.tell() + len(key) + 1}\n")
            kaldiio.save_ark(ark, {key: matrix})
    write_utt2spk(directory, frames)


def write_utt2spk(directory, utterances):
    lines = [f"{key} {key.split('-')[0]}\n" for key in utterances]
    Path(directory, "utt2spk").write_text("".join(lines))


def write_pdfs(path, labels):
    kaldiio.save_ark(str(path), {key: value.astype(np.int32) for key, value in labels.items()})


def random_frames(speakers=4, utterances=3, dim=DIM):
    generator = np.random.default_rng(0)
    return {
        f"s{speaker}-u{number}": generator.normal(5, 2, (20 + number, dim)).astype(np.float32)
        for speaker in range(speakers)
        for number in range(utterances)
    }


def random_labels(frames):
    generator = np.random.default_rng(1)
    return {key: generator.integers(0, CLASSES, len(value)) for key, value in frames.items()}


@pytest.fixture
def data(tmp_path):
    """Frames, labels, and a function that makes the corpus `out` of what is written."""

    class Data:
        directory = str(tmp_path / "data")
        frames = random_frames()
        labels = random_labels(frames)
        out = str(tmp_path / "corpus")
        pdfs = str(tmp_path / "pdf.1")

        def write(self):
            write_feats(self.directory, self.frames)
            write_pdfs(self.pdfs, self.labels)

        def make(self, stats=None, made_with=None, others=None, subsampling=1, **options):
            options = {"deltas": 0, **options}
            opened = {"train": sources.kaldi_directory(self.directory, Extraction())}
            with KaldiAlignments([self.pdfs], CLASSES, subsampling=subsampling) as labels:
                return preparation.prepare(
                    self.out,
                    opened | (others or {}),
                    labels,
                    preparation.Options(**options),
                    made_with or {},
                    stats,
                )

    found = Data()
    found.write()
    return found


def test_a_corpus_has_what_the_archives_had(data):
    made = data.make(shard_megabytes=0.001)
    assert (made.reused, made.skipped) == (False, Counter())
    index.verify(made.corpus)
    found = content(made.corpus)
    assert found.keys() == data.frames.keys()
    for key, (frames, labels, _) in found.items():
        np.testing.assert_array_equal(frames, data.frames[key])
        np.testing.assert_array_equal(labels, data.labels[key])
    train = np.concatenate([data.frames[key] for key in made.corpus.split("train").id])
    np.testing.assert_allclose(made.corpus.mean, train.mean(0), rtol=1e-5)
    np.testing.assert_allclose(made.corpus.stddev, train.std(0), rtol=1e-5)
    assert made.corpus.class_names == tuple(f"pdf-{number}" for number in range(CLASSES))
    names = [os.path.basename(path) for path in made.corpus.split("train").shards]
    assert len(names) > 1
    count = len(names)
    assert names == [f"train-{number:05d}-of-{count:05d}.tfrecord" for number in range(count)]


@pytest.mark.parametrize("dim", [16, 43])
def test_features_with_pitch_pass_unharmed(data, dim):
    """13 cepstra or 40 filters, and what paste-feats joins to them, whatever it is."""
    data.frames = random_frames(dim=dim)
    data.write()
    made = data.make(deltas=2)
    assert made.corpus.feature_dim == 3 * dim
    for key, (frames, *_) in content(made.corpus).items():
        np.testing.assert_array_equal(frames[:, :dim], data.frames[key])
        np.testing.assert_allclose(frames, features.add_deltas(data.frames[key]), atol=1e-5)


def test_what_cmvn_makes_infinite_is_told_before_it_is_written(data):
    data.frames["s1-u1"][:] = -3e38
    data.frames["s1-u1"][7] = 3e38
    data.write()
    with pytest.raises(CorpusError, match=r"utterance s1-u1: NaN or Inf in frame 7, dimension 0"):
        data.make(cmvn="utterance")
    made = data.make(cmvn="utterance", skip=("nonfinite",))
    assert made.skipped == Counter(nonfinite=1)
    index.verify(made.corpus)


def test_speakers_are_held_out_whole_and_drawn_from_the_seed(data):
    made = data.make(validation_share=0.25, test_share=0.5)
    speakers = {name: set(split.speaker) for name, split in made.corpus.splits.items()}
    assert [len(speakers[name]) for name in ("train", "validation", "test")] == [1, 1, 2]
    assert set.union(*speakers.values()) == {"s0", "s1", "s2", "s3"}

    def held_out(seed):
        parts = preparation.divide(
            {"train": sources.kaldi_directory(data.directory, Extraction())}, {}, 0.25, 0.5, seed
        )
        return tuple(parts["test"].utterances)

    assert held_out(0) == held_out(0)
    assert len({held_out(seed) for seed in range(8)}) > 1


def test_no_share_leaves_a_split_empty(data):
    made = data.make(validation_share=0.25, test_share=0.0)
    assert len(made.corpus.split("test")) == 0
    assert len(made.corpus.split("validation")) == 3


def test_too_few_speakers_to_hold_out(data):
    with pytest.raises(CorpusError, match=r"data \(4\) are too few .*--test_share=0"):
        data.make(validation_share=0.7, test_share=0.29)


def test_other_directories_for_validation_and_test(data, tmp_path):
    others = {}
    for split in ("validation", "test"):
        frames = {f"{split}-{key}": value for key, value in random_frames(1).items()}
        write_feats(str(tmp_path / split), frames)
        data.labels |= random_labels(frames)
        others[split] = sources.kaldi_directory(str(tmp_path / split), Extraction())
    data.labels = dict(sorted(data.labels.items()))
    write_pdfs(data.pdfs, data.labels)
    made = data.make(others=others)
    assert [len(made.corpus.split(name)) for name in index.SPLITS] == [12, 3, 3]
    same = sources.kaldi_directory(data.directory, Extraction())
    with pytest.raises(CorpusError, match="utterance s0-u0 is in the data of train and of test"):
        preparation.divide({"train": same, "test": same}, {}, 0.1, 0.1, 0)


def test_a_corpus_is_found_again_unless_something_changed(data):
    first = data.make(made_with={"program": "x"})
    again = data.make(made_with={"program": "x"})
    assert again.reused
    assert again.corpus.fingerprint == first.corpus.fingerprint
    with pytest.raises(CorpusError, match=r"other options: deltas \(0 there, 1 now\)"):
        data.make(made_with={"program": "x"}, deltas=1)
    Path(data.directory).rename(f"{data.directory}-moved")
    data.directory += "-moved"
    scp = Path(data.directory, "feats.scp")
    scp.write_text(scp.read_text().replace("/data/", "/data-moved/"))
    assert data.make(made_with={"program": "x"}).reused
    data.labels["s0-u0"][0] ^= 1
    write_pdfs(data.pdfs, data.labels)
    with pytest.raises(CorpusError, match="other options: labels_sha256"):
        data.make(made_with={"program": "x"})


@pytest.mark.parametrize("frames", [20, 40_000])
def test_features_that_were_extracted_again_are_not_those_of_before(data, frames):
    """Of the same shapes, in archives of the same names, small and large."""
    generator = np.random.default_rng(3)
    for key in data.frames:
        data.frames[key] = generator.normal(0, 1, (20, DIM)).astype(np.float32)
    data.frames["s1-u0"] = generator.normal(0, 1, (frames, DIM)).astype(np.float32)
    data.labels = random_labels(data.frames)
    data.write()
    data.make()
    assert data.make().reused
    data.frames = {key: 3 * value + 1 for key, value in data.frames.items()}
    data.write()
    with pytest.raises(CorpusError, match="other options: data_sha256"):
        data.make()


def test_statistics_that_were_summed_again_are_not_those_of_before(data):
    def make(mean):
        stats = {f"s{n}": np.array([[mean] * DIM + [1], [9.0] * DIM + [0]]) for n in range(4)}
        kaldiio.save_ark(f"{data.directory}/cmvn.ark", stats, scp=f"{data.directory}/cmvn.scp")
        return data.make(cmvn="given", stats={"train": sources.SpeakerStats(data.directory)})

    make(1.0)
    assert make(1.0).reused
    with pytest.raises(CorpusError, match="other options: stats_sha256"):
        make(2.0)


def test_labels_with_another_silence_are_others(data, tmp_path):
    lines = [f"{key} a 0.05 {0.01 * len(value) - 0.05}\n" for key, value in data.frames.items()]
    (tmp_path / "phones").write_text("".join(lines))

    def make(silence):
        source = sources.kaldi_directory(data.directory, Extraction())
        with PhoneTimes([str(tmp_path / "phones")], silence) as labels:
            return preparation.prepare(
                data.out, {"train": source}, labels, preparation.Options(), {}
            )

    assert make("SIL").corpus.options["silence"] == "SIL"
    assert make("SIL").reused
    with pytest.raises(CorpusError, match=r"other options: silence \('SIL' there, 'sp' now\)"):
        make("sp")


# Normalisation and deltas


def test_deltas_are_kaldis(data):
    found = content(data.make(deltas=2).corpus)
    for key, (frames, _, _) in found.items():
        assert frames.shape[1] == 3 * DIM
        np.testing.assert_allclose(frames, features.add_deltas(data.frames[key]), atol=1e-6)


def test_cmvn_of_the_utterance(data):
    found = content(data.make(cmvn="utterance", norm_vars=True).corpus)
    for key, (frames, _, _) in found.items():
        raw = data.frames[key].astype(np.float64)
        np.testing.assert_allclose(frames, (raw - raw.mean(0)) / raw.std(0), atol=1e-5)


def test_cmvn_of_the_speaker(data):
    found = content(data.make(cmvn="speaker").corpus)
    for key, (frames, _, _) in found.items():
        speaker = key.split("-")[0]
        mine = [value for other, value in data.frames.items() if other.startswith(speaker)]
        mean = np.concatenate(mine).astype(np.float64).mean(0)
        np.testing.assert_allclose(frames, data.frames[key] - mean, atol=1e-5)


def test_cmvn_of_the_speaker_is_of_utterances_without_labels_too(data):
    """As Kaldi's compute-cmvn-stats, which has no alignments. One without labels has a NaN."""
    data.frames["s2-u1"][0, 0] = np.nan
    for key in ("s1-u1", "s2-u1"):
        del data.labels[key]
    data.labels["s1-u2"] = np.append(data.labels["s1-u2"], [1, 2])
    data.write()
    made = data.make(cmvn="speaker", skip=("labels", "length"))
    found = content(made.corpus)
    assert found.keys() == data.frames.keys() - {"s1-u1", "s1-u2", "s2-u1"}
    for key, (frames, _, _) in found.items():
        speaker = key.split("-")[0]
        mine = [value for other, value in data.frames.items() if other.startswith(speaker)]
        finite = [value for value in mine if np.isfinite(value).all()]
        mean = np.concatenate(finite).astype(np.float64).mean(0)
        np.testing.assert_allclose(frames, data.frames[key] - mean, atol=1e-5)


def test_cmvn_that_is_given(data):
    stats = {
        f"s{number}": np.array([[10.0 * number] * DIM + [10], [100.0 * number**2 + 40] * DIM + [0]])
        for number in range(4)
    }  # mean `number`, variance 4 for number 0
    kaldiio.save_ark(f"{data.directory}/cmvn.ark", stats, scp=f"{data.directory}/cmvn.scp")
    given = {"train": sources.SpeakerStats(data.directory)}
    found = content(data.make(cmvn="given", stats=given).corpus)
    for key, (frames, _, _) in found.items():
        np.testing.assert_allclose(frames, data.frames[key] - int(key[1]), atol=1e-5)


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"s0": np.ones((2, DIM + 1))}, "cmvn.scp has no statistics of speaker s[123]"),
        ({f"s{n}": np.ones((2, DIM)) for n in range(4)}, "frames are 5 wide, its statistics .* 4"),
        ({f"s{n}": np.ones((1, DIM + 1)) for n in range(4)}, "must be 2 rows"),
        ({f"s{n}": np.zeros((2, DIM + 1)) for n in range(4)}, "count of frames"),
    ],
)
def test_given_statistics_that_do_not_fit(data, stats, message):
    kaldiio.save_ark(f"{data.directory}/cmvn.ark", stats, scp=f"{data.directory}/cmvn.scp")
    given = {"train": sources.SpeakerStats(data.directory)}
    with pytest.raises(CorpusError, match=message):
        data.make(cmvn="given", stats=given)
    assert not os.path.exists(data.out)


# What does not fit together


def test_utterances_without_labels(data):
    del data.labels["s1-u1"]
    data.write()
    with pytest.raises(
        CorpusError, match="1 of 12 utterances have no labels, first s1-u1.*--skip=labels"
    ):
        data.make()
    made = data.make(skip=("labels",))
    assert made.skipped == {"labels": 1}
    assert content(made.corpus).keys() == data.labels.keys()


def test_labels_without_features(data):
    del data.frames["s1-u1"], data.frames["s2-u0"]
    data.write()
    with pytest.raises(CorpusError, match="2 of 12 labelled .* first s1-u1.*--skip=features"):
        data.make()
    made = data.make(skip=("features",))
    assert made.skipped == {"features": 2}
    assert content(made.corpus).keys() == data.frames.keys()


def test_no_labels_at_all(data):
    data.labels = {"x": np.zeros(3)}
    data.write()
    with pytest.raises(CorpusError, match="none of the .* utterances has labels"):
        data.make(skip=("labels", "features"))


def test_no_labels_of_a_whole_directory(data, tmp_path):
    write_feats(str(tmp_path / "test"), {"x-u0": data.frames["s1-u1"]})
    others = {"test": sources.kaldi_directory(str(tmp_path / "test"), Extraction())}
    with pytest.raises(CorpusError, match="none of the 1 test utterances has labels: --ali or"):
        data.make(others=others)


def test_lengths_that_differ(data):
    data.labels["s1-u1"] = np.append(data.labels["s1-u1"], [1, 2])
    data.write()
    with pytest.raises(
        CorpusError, match="s1-u1 has 23 labels for 21 frames, 2 too many .*is 0.*--skip=length"
    ):
        data.make()
    data.labels["s2-u2"] = data.labels["s2-u2"][:-1]
    data.write()
    with pytest.raises(CorpusError, match="s1-u1 has .* 2 too many .*is 1"):
        data.make(max_length_mismatch=1)
    assert data.make(max_length_mismatch=1, skip=("length",)).skipped == {"length": 1}


def test_lengths_that_differ_a_little_are_cut(data):
    data.labels["s1-u1"] = np.append(data.labels["s1-u1"], [1, 2])
    data.labels["s2-u2"] = data.labels["s2-u2"][:-1]
    data.write()
    found = content(data.make(max_length_mismatch=2, deltas=1).corpus)
    np.testing.assert_array_equal(found["s1-u1"][1], data.labels["s1-u1"][:-2])
    whole = features.add_deltas(data.frames["s2-u2"], 1)  # from all frames, then cut
    np.testing.assert_allclose(found["s2-u2"][0], whole[:-1], atol=1e-6)


def test_labels_of_a_chain_model(data):
    """Labels of 3 frames each; one too many or too few is cut, and named with the factor."""
    every = {key: np.asarray(labels) for key, labels in data.labels.items()}
    data.labels = {key: labels[::3] for key, labels in every.items()}
    data.write()
    found = content(data.make(subsampling=3).corpus)
    for key, (frames, labels, _) in found.items():
        np.testing.assert_array_equal(frames, data.frames[key])
        np.testing.assert_array_equal(labels[::3], data.labels[key])  # frame 3i is label i's
        np.testing.assert_array_equal(labels[1:-1:3], data.labels[key][: len(labels[1:-1:3])])
    shutil.rmtree(data.out)
    with pytest.raises(CorpusError, match=r"has 7 labels for 20 frames, 13 too few .*would fit wi"):
        data.make()
    data.labels["s1-u1"] = np.append(data.labels["s1-u1"], 1)
    data.write()
    with pytest.raises(
        CorpusError, match="s1-u1 has 8 labels for 21 frames with --frame_subsampling=3, 1 too many"
    ):
        data.make(subsampling=3)
    data.labels["s2-u2"] = data.labels["s2-u2"][:-1]
    data.write()
    cut = content(data.make(subsampling=3, max_length_mismatch=1).corpus)
    np.testing.assert_array_equal(cut["s1-u1"][0], data.frames["s1-u1"])
    # The last frame is nearest to the label that is one too many.
    np.testing.assert_array_equal(cut["s1-u1"][1][:-1], found["s1-u1"][1][:-1])
    kept = 3 * len(data.labels["s2-u2"])
    np.testing.assert_array_equal(cut["s2-u2"][0], data.frames["s2-u2"][:kept])


@pytest.mark.parametrize("empty", ["s0-u0", "s1-u1"])
@pytest.mark.parametrize("cmvn", ["none", "speaker"])
def test_an_utterance_without_frames(data, empty, cmvn):
    data.frames[empty] = np.zeros((0, 0), np.float32)
    data.write()
    with pytest.raises(CorpusError, match=rf"{empty} has no frames, and \d+ labels.*--skip=length"):
        data.make(max_length_mismatch=100, cmvn=cmvn)
    made = data.make(skip=("length",), cmvn=cmvn)
    assert made.skipped == {"length": 1}
    assert content(made.corpus).keys() == data.frames.keys() - {empty}


def test_an_utterance_with_an_empty_alignment(data):
    data.labels["s1-u1"] = np.zeros(0)
    data.write()
    with pytest.raises(CorpusError, match="1 of 12 .* no labels, first s1-u1.*--skip=labels"):
        data.make()
    assert data.make(skip=("labels",)).skipped == {"labels": 1}


def test_features_that_are_not_finite(data):
    data.frames["s1-u1"][3, 2] = np.nan
    data.write()
    with pytest.raises(
        CorpusError,
        match=r"feats.scp, line 5, s1-u1 \(.*feats.ark, byte \d+\): NaN or Inf in frame 3, dim"
        r"ension 2. .*--skip=nonfinite",
    ):
        data.make()
    assert data.make(skip=("nonfinite",)).skipped == {"nonfinite": 1}


def test_features_of_another_width(data):
    data.frames["s2-u0"] = data.frames["s2-u0"][:, :4]
    data.write()
    with pytest.raises(CorpusError, match="frames are [45] wide, those before it [45]"):
        data.make()


def test_an_archive_cut_short_ends_everything(data):
    size = os.path.getsize(f"{data.directory}/feats.ark")
    os.truncate(f"{data.directory}/feats.ark", size - 8)
    with pytest.raises(CorpusError, match=r"line 12, s3-u2 \(.*feats.ark, byte .*cut short"):
        data.make(skip=tuple(preparation.SKIP))
    assert not os.path.exists(data.out)
    assert os.listdir(Path(data.out).parent) == sorted(["data", "pdf.1"])


def test_everything_skipped_is_an_error(data):
    for frames in data.frames.values():
        frames[0, 0] = np.inf
    data.write()
    with pytest.raises(CorpusError, match="all .* train utterances failed"):
        data.make(skip=("nonfinite",))


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("feats.scp", lambda lines: lines[::-1], "feats.scp, line 2: key s3-u1 comes after s3-u2"),
        ("feats.scp", lambda lines: [lines[0], *lines], "line 2: key s0-u0 is there twice"),
        ("utt2spk", lambda lines: lines[1:], "feats.scp, line 1: utterance s0-u0 is not in .*utt2"),
        ("feats.scp", lambda lines: ["s0-u0 cat x |\n"], "line 1, s0-u0: 'cat x |' is a command"),
    ],
)
def test_tables_that_are_wrong(data, table, change, message):
    path = Path(data.directory, table)
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(CorpusError, match=message.replace("|", r"\|")):
        data.make()


@pytest.mark.parametrize(
    "change",
    [
        {"cmvn": "x"},
        {"deltas": -1},
        {"skip": ("labels", "x")},
        {"validation_share": 1.0},
        {"validation_share": 0.6, "test_share": 0.4},
        {"shard_megabytes": 0.0},
        {"max_length_mismatch": -1},
        {"seed": -1},
    ],
)
def test_options_out_of_range(change):
    with pytest.raises(ValueError, match=rf"{list(change)[-1]} must be .* Received"):
        preparation.Options(**change)
