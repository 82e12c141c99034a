"""More files than a process may have open."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from input import index, shards
from input.labels import PhoneTimes
from input.open_files import Archives
from input.records import CorpusError

MANY = 150


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def write_times(folder, number, length):
    """Writes the phones of an utterance, of `length` frames; every third file is gzipped."""
    text = f"u{number:03d} A 0 {length / 100}\n".encode()
    path = folder / f"{number:03d}.ctm"
    path.write_bytes(text if number % 3 else gzip.compress(text))


def test_a_file_of_labels_for_each_utterance(tmp_path):
    lengths = [3 + number % 4 for number in range(MANY)]
    for number, length in enumerate(lengths):
        write_times(tmp_path, number, length)
    before = descriptors()
    with PhoneTimes([f"{tmp_path}/*.ctm"]) as labels:
        assert [len(labels.read(key, 0)) for key in labels.ids()] == lengths
        assert descriptors() - before < 70
    assert descriptors() == before


@pytest.mark.parametrize("touched", [False, True], ids=["longer", "of equal length"])
def test_labels_that_are_changed_meanwhile(tmp_path, touched):
    for number in range(MANY):
        write_times(tmp_path, number, 3)
    with PhoneTimes([f"{tmp_path}/*.ctm"]) as labels:
        if touched:
            os.utime(tmp_path / "001.ctm", ns=(0, 0))
        else:
            write_times(tmp_path, 1, 3.5)
        with pytest.raises(CorpusError, match=r"001\.ctm was changed while it was in use"):
            labels.read("u001", 3)


def test_gzipped_files_do_not_run_into_each_other(tmp_path):
    contents = [b"", b"ab\ncd", bytes(2 << 20), b"\n\nlast"]
    paths = [str(tmp_path / f"{number}.gz") for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(gzip.compress(content))
    with Archives(paths) as files:
        for _ in range(2):
            for number, content in enumerate(contents):
                file = files[number]
                assert file.seek(0, os.SEEK_END) == len(content)
                assert file.read() == b""
                file.seek(1)
                assert list(file) == content[1:].splitlines(keepends=True)
                assert file.tell() == max(1, len(content))


def test_a_corpus_of_many_shards(tmp_path):
    with shards.CorpusWriter(tmp_path / "corpus", {}, ["a"]) as writer:
        for split in index.SPLITS:
            writer.start_stream(split, 1)
            for number in range(MANY if split == "train" else 0):
                writer.add(np.full((2, 3), number, "f4"), np.zeros(2, "i4"), f"u{number}", "s")
    before = descriptors()
    corpus = index.read(tmp_path / "corpus")
    split = corpus.split("train")
    assert len(split.shards) == MANY
    with index.open_shards(split) as files:
        for number in [*range(MANY), 0, MANY - 1]:
            frames, _ = index.read_utterance(corpus, split, files, number)
            assert frames[0, 0] == number
            assert descriptors() - before <= 64
    os.remove(split.shards[-1])
    with pytest.raises(FileNotFoundError, match="train-00149"):
        index.verify(corpus)
    assert descriptors() == before
