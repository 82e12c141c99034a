"""Archives for Kaldi's decoders."""

import struct

import kaldiio
import numpy as np
import pytest

from input import kaldi, kaldi_tables
from input.kaldi_write import write_matrices
from input.records import CorpusError


def scores(count=3, frames=20, width=5):
    generator = np.random.default_rng(0)
    return {
        f"u{number}": generator.standard_normal((frames + number, width)).astype(np.float32)
        for number in range(count)
    }


def test_bytes_are_those_of_kaldis_format(tmp_path):
    matrix = np.array([[1.5, -2], [3, 4]], np.float32)
    archive, table = write_matrices(tmp_path / "loglikes", [("utt", matrix)])
    header = struct.pack("<bibi", 4, 2, 4, 2)
    assert archive.read_bytes() == b"utt \0BFM " + header + matrix.astype("<f4").tobytes()
    assert table.read_text() == f"utt {tmp_path}/loglikes.ark:4\n"


def test_kaldiio_and_we_read_what_was_written(tmp_path):
    archive, table = write_matrices(tmp_path / "deep" / "loglikes.1", scores().items())
    assert (archive.name, table.name) == ("loglikes.1.ark", "loglikes.1.scp")
    by_table, ours = kaldiio.load_scp(str(table)), kaldi_tables.read(table)
    in_order = dict(kaldiio.load_ark(str(archive)))
    for key, matrix in scores().items():
        np.testing.assert_array_equal(by_table[key], matrix)
        np.testing.assert_array_equal(in_order[key], matrix)
        place = kaldi_tables.locate(ours[key], key, False)
        np.testing.assert_array_equal(kaldi.read_matrix(place), matrix)


def test_compressed_is_a_quarter_of_the_size_and_close(tmp_path):
    big = scores(2, 500, 40)
    plain, _ = write_matrices(tmp_path / "plain", big.items())
    small, table = write_matrices(tmp_path / "small", big.items(), compress=True)
    assert small.stat().st_size < 0.3 * plain.stat().st_size
    for key, matrix in kaldiio.load_scp(str(table)).items():
        np.testing.assert_allclose(matrix, big[key], atol=0.1)


def test_the_table_is_sorted_and_doubles_are_rounded(tmp_path):
    mixed = [("b", np.ones((2, 3))), ("a", np.zeros((1, 3)))]
    _, table = write_matrices(str(tmp_path / "x"), iter(mixed))
    assert list(kaldi_tables.read(table)) == ["a", "b"]
    assert kaldiio.load_scp(str(table))["b"].dtype == np.float32


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([("u 1", np.ones((2, 3)))], "must be one word. Received: 'u 1'"),
        ([("", np.ones((2, 3)))], "must be one word"),
        ([("u1", np.ones((2, 3)))] * 2, "utterance u1 is there twice"),
        ([("u1", np.ones(3))], r"u1 must be \[num_frames, dim\], not empty. Received: \[3\]"),
        ([("u1", np.ones((0, 3)))], r"not empty. Received: \[0, 3\]"),
        ([("u1", np.ones((2, 3))), ("u2", np.ones((2, 4)))], r"u2 must be \[num_frames, 3\]"),
        ([("u1", np.array([[0, 1], [-np.inf, 2]]))], "u1 has -inf in frame 1, column 0"),
        ([("u1", np.array([[0, 1e300]]))], r"u1 has 1e\+300 in frame 0, column 1"),
        ([("u\x011", np.ones((2, 3)))], "must be one word"),
        ([("u1", np.array([[0, np.nan]]))], "u1 has nan in frame 0, column 1"),
        ([], "there is no matrix to write"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, bad, message):
    with pytest.raises(CorpusError, match=message):
        write_matrices(tmp_path / "loglikes", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["u\u200c1", "u\u00a01", "日本"])
def test_a_key_that_python_takes_for_two_words_or_none(tmp_path, key):
    archive, table = write_matrices(tmp_path / "x", [(key, np.ones((2, 3)))])
    (place,) = kaldi_tables.read(table).values()
    np.testing.assert_array_equal(
        kaldi.read_matrix(kaldi_tables.locate(place, key, False)), np.ones((2, 3))
    )
    with open(archive, "rb") as file:
        assert [item.key for item in kaldi.read_archive(file, "x")] == [key]


def test_a_failure_keeps_the_older_files(tmp_path):
    def failing():
        yield "u0", np.zeros((2, 2))
        raise OSError("disk full")

    archive, table = write_matrices(tmp_path / "x", scores().items())
    before = archive.read_bytes(), table.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        write_matrices(tmp_path / "x", failing())
    assert (archive.read_bytes(), table.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.ark", "x.scp"]


def test_a_path_that_a_table_cannot_name(tmp_path):
    with pytest.raises(ValueError, match="white space"):
        write_matrices(tmp_path / "two words", scores().items())
    with pytest.raises(ValueError, match=r"no name before .ark and .scp. Received: .*/x/.ark"):
        write_matrices(f"{tmp_path}/x/", scores().items())
