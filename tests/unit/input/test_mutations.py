"""Files that were damaged at random: one error that names the file, or a result of its size.

TFPARA_MUTANTS=2000 makes so many of each kind of file, in place of a few dozen.
"""

import re
import struct
import tracemalloc
import warnings

import kaldiio
import numpy as np
import pytest
import soundfile

from input import audio_files, index, kaldi, kaldi_tables, shards, sources
from input.labels import KaldiAlignments, PhoneTimes
from input.open_files import Archives
from input.records import CorpusError
from tests.lib import hostile, mutants

MUTANTS = mutants.count(25)
FRAMES, DIM, CLASSES = 12, 3, 5

WORDS = ["", "0", "-1", "1.5", "nan", "1e999", "1e305", "1e12", "2147483648", "9223372036854775807"]
WORDS += ["18446744073709551616", "9" * 5000, "x" * 5000, "a\0b", "[", "]", "{}", "null", "true"]
WORDS += [
    "é",
    "../x",
    "-",
    "/dev/null/x",
    "x:99999999999999999999",
    "[0:99999999999999999999]",
    "|",
]
INTEGERS = [0, 1, -1, 127, 2**15, 2**28, 2**31 - 1, -(2**31)]


def mutant(content, random):
    """Returns `content` with one to three changes: bits, bytes, pieces, numbers and words."""
    changed = bytearray(content)
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(len(changed) + 1))
        match random.integers(7):
            case 0 if place < len(changed):
                changed[place] ^= 1 << int(random.integers(8))
            case 1:
                changed[place : place + 4] = struct.pack("<i", int(random.choice(INTEGERS)))
            case 2:
                changed[place : place + 4] = struct.pack(">i", int(random.choice(INTEGERS)))
            case 3:
                del changed[place : place + int(random.integers(1, 20))]
            case 4:
                changed[place:place] = changed[place : place + 50]
            case 5 if random.integers(4) == 0:
                del changed[place:]
            case _:
                words = list(re.finditer(rb"[^\s,:\"\[\]{}]+", changed))
                if words:
                    found = words[int(random.integers(len(words)))]
                    changed[found.start() : found.end()] = str(random.choice(WORDS)).encode()
    return bytes(changed)


def waves(directory):
    noise = np.random.default_rng(0).integers(-9000, 9000, 2000).astype(np.int16)
    for name, subtype in (("a.wav", "PCM_16"), ("f.wav", "FLOAT"), ("a.flac", "PCM_16")):
        soundfile.write(directory / name, noise, 16000, subtype=subtype)
    kaldiio.save_ark(str(directory / "wav.ark"), {"a": (16000, noise)})


def tables(directory):
    waves(directory)
    place = directory / "wav.ark"
    (directory / "wav.scp").write_text(f"a {directory}/a.wav\nb {place}:2\nc {directory}/a.flac\n")
    (directory / "segments").write_text("u1 a 0 0.1\nu2 a 0.05 -1\nu3 b 0.01 0.12\nu4 c 0 0.1\n")
    (directory / "utt2spk").write_text("".join(f"u{n} s1\n" for n in range(1, 5)))


def matrices(directory):
    frames = np.random.default_rng(0).normal(size=(FRAMES, DIM)).astype(np.float32)
    keys = ["a", "b", "c", "d", "e", "f"]
    with open(directory / "feats.ark", "wb") as ark, open(directory / "feats.scp", "w") as scp:
        for key, method in zip(keys, (None, 2, 3, 5, "double", "text"), strict=True):
            scp.write(f"{key} {directory}/feats.ark:{ark.tell() + 2}[0:10]\n")
            if method == "text":
                rows = "\n".join(" ".join(map(str, row)) for row in frames)
                ark.write(f"{key}  [\n{rows} ]\n".encode())
            else:
                value = frames.astype(np.float64) if method == "double" else frames
                how = method if isinstance(method, int) else None
                kaldiio.save_ark(ark, {key: value}, compression_method=how)
    (directory / "utt2spk").write_text("".join(f"{key} s1\n" for key in keys))


def corpus(directory):
    random = np.random.default_rng(0)
    with shards.CorpusWriter(f"{directory}/c", {"x": 1}, list("abcde")[:CLASSES]) as writer:
        for split in index.SPLITS:
            writer.start_split(split, 1, 2)
            for number in range(2):
                frames = random.normal(size=(FRAMES, DIM)).astype(np.float32)
                labels = random.integers(0, CLASSES, FRAMES).astype(np.int32)
                writer.add(frames, labels, f"{split}-{number}", "s")


def alignments(directory):
    labels = {"a": np.arange(9, dtype=np.int32) % CLASSES, "b": np.zeros(4, np.int32)}
    kaldiio.save_ark(str(directory / "pdf.ark"), labels)
    (directory / "pdf.txt").write_text("a 0 1 2 3\nb 4 4 0\n")
    (directory / "ctm").write_text("u1 1 0.00 0.03 SIL\nu1 1 0.03 0.06 AH 0.9\nu2 1 0.03 0.03 T\n")


def read_wave(path):
    found = kaldi_tables.locate(str(path), f"{path.name}, line 1, a", False)
    return [audio_files.read(found, audio_files.Options(resample=True))]


def read_source(path):
    source = sources.kaldi_directory(str(path.parent), sources.Extraction())
    read = [found for _, found in source.read(list(source.speakers))]
    problems = [found.message for found in read if isinstance(found, sources.Problem)]
    assert all("utterance u" in text or f"{path.parent}/" in text for text in problems)
    return [found for found in read if isinstance(found, np.ndarray)]


def read_archive(path):
    with Archives([str(path)]) as files:
        return [item.value for item in kaldi.read_archive(files[0], str(path))]


def read_labels(path):
    opened = PhoneTimes if path.name == "ctm" else KaldiAlignments
    with opened([str(path)]) as labels:
        assert len(labels.class_names) <= 1000
        wanted = [key for key in labels.ids() if labels.count(key, 9) <= 12]
        return [labels.read(key, 9) for key in wanted]


def read_corpus(path):
    found = index.read(path.parent)
    index.verify(found)
    for split in found.splits.values():
        assert all(isinstance(name, str) for name in (*split.id, *split.speaker))
    return [found.mean, found.stddev]


KINDS = [
    (corpus, "c/index.json", read_corpus),
    (corpus, "c/train-00000-of-00001.tfrecord", read_corpus),
    (tables, "wav.scp", read_source),
    (tables, "segments", read_source),
    (tables, "utt2spk", read_source),
    (tables, "wav.ark", read_source),
    (waves, "a.wav", read_wave),
    (waves, "f.wav", read_wave),
    (waves, "a.flac", read_wave),
    (matrices, "feats.scp", read_source),
    (matrices, "feats.ark", read_source),
    (matrices, "feats.ark", read_archive),
    (alignments, "pdf.ark", read_labels),
    (alignments, "pdf.txt", read_labels),
    (alignments, "ctm", read_labels),
]


@pytest.fixture
def outcome(tmp_path):
    """A function that reads a file: returns what was read, or the error's message.

    It fails for an error that names no file or line, for NumPy's warnings, for numbers that are
    not finite, and where reading does more than read (`hostile`).
    """

    def read_well(path, read):
        files = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
        try:
            with warnings.catch_warnings(), hostile.watched(sum(files), str(tmp_path)):
                warnings.simplefilter("error", RuntimeWarning)
                found = read(path)
        except (CorpusError, FileNotFoundError) as error:
            found = str(error)
            # An index or a table leads to other files, and a table to a line of another one.
            assert re.search(rf"{tmp_path}/|{path.name}, line", found) and len(found) < 12000
        else:
            assert read is read_archive or all(np.isfinite(value).all() for value in found)
        return found

    tracemalloc.start()  # here, since to start it takes longer than most reads
    yield read_well
    tracemalloc.stop()


@pytest.mark.parametrize(("make", "name", "read"), KINDS)
def test_a_damaged_file_is_named_or_gives_what_it_has_room_for(tmp_path, outcome, make, name, read):
    make(tmp_path)
    path = tmp_path / name
    content, whole = path.read_bytes(), len(outcome(path, read))
    fewer = 0
    for seed in range(MUTANTS):
        path.write_bytes(mutant(content, np.random.default_rng([seed, len(name)])))
        try:
            found = outcome(path, read)
        except Exception as error:
            raise AssertionError(f"mutant {seed}: {error!r}") from error
        fewer += isinstance(found, str) or len(found) < whole
    assert fewer > MUTANTS // 8


def with_bytes(place, new):
    return lambda content: content[:place] + new + content[place + len(new) :]


LONG_WORD = b"a " + b"1 " * 50_000 + b"0" * 50_000 + b"1\n"


@pytest.mark.parametrize(
    ("make", "name", "change", "read", "message"),
    [
        (waves, "a.flac", with_bytes(21, b"\xff" * 5), read_wave, "is damaged"),
        (
            waves,
            "a.wav",
            with_bytes(24, struct.pack("<i", 1)),
            read_wave,
            "is at 1 Hz, which is no",
        ),
        (
            waves,
            "f.wav",
            with_bytes(-8, struct.pack("<f", 3e38)),
            read_wave,
            "are NaN, Inf or beyo",
        ),
        (alignments, "pdf.ark", with_bytes(5, b"\xff\xff\xff\x0f"), read_labels, "goes on for 134"),
        (
            alignments,
            "pdf.ark",
            with_bytes(10, b"\xff\xff\xff\x0f"),
            read_labels,
            "would make 2684",
        ),
        (alignments, "pdf.txt", lambda text: LONG_WORD, read_labels, "no frame has the id 0"),
        (alignments, "ctm", lambda text: text.replace(b"0.06", b"4e6 "), read_labels, None),
        (tables, "segments", lambda text: b"u1 a 1e999 -1\n", read_source, "line 1: utterance u1"),
        (tables, "segments", lambda text: text.replace(b"0.05", b"1e305"), read_source, None),
        (matrices, "feats.scp", lambda text: b"a " + b"x" * 9000 + b"\n", read_source, "line 1, a"),
        (
            corpus,
            "c/index.json",
            lambda text: re.sub(rb'"length": .(\d+)', rb'"length": [9\1\1', text),
            read_corpus,
            "utterance train-0 must be within",
        ),
        (
            corpus,
            "c/index.json",
            lambda text: text.replace(b'"shard": [0', b'"shard": [-1'),
            read_corpus,
            "utterance train-0 must be within",
        ),
    ],
)
def test_what_a_file_says_is_compared_with_its_size(
    tmp_path, outcome, make, name, change, read, message
):
    make(tmp_path)
    path = tmp_path / name
    whole = len(read(path))
    path.write_bytes(change(path.read_bytes()))
    found = outcome(path, read)
    if message:
        assert isinstance(found, str) and message in found
    else:
        assert len(found) == whole - 1
