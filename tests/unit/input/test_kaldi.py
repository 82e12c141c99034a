"""Archives of Kaldi: every kind of object, damage of every kind, and no pickle."""

import gzip
import io
import os
import pickle
import struct

import kaldiio
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from input import kaldi, kaldi_tables
from input.open_files import Archives
from input.records import CorpusError
from tests.lib.random_examples import random_examples


def location(path, offset=0, ranges=""):
    return kaldi_tables.locate(f"{path}:{offset}{ranges}", "feats.scp, line 7, utt", False)


def archive(path):
    with Archives([str(path)]) as files:
        return list(kaldi.read_archive(files[0], str(path)))


def by_hand(kind: bytes, matrix: np.ndarray) -> bytes:
    """A binary matrix as Kaldi's `Matrix::Write` lays it out."""
    rows, columns = matrix.shape
    dtype = {b"FM": "<f4", b"DM": "<f8"}[kind]
    sizes = struct.pack("<bibi", 4, rows, 4, columns)
    return b"\0B" + kind + b" " + sizes + matrix.astype(dtype).tobytes()


@pytest.mark.parametrize("kind", [b"FM", b"DM"])
def test_binary_matrices(tmp_path, kind):
    matrix = np.random.default_rng(0).standard_normal((7, 3))
    (tmp_path / "a.ark").write_bytes(b"utt " + by_hand(kind, matrix))
    read = kaldi.read_matrix(location(tmp_path / "a.ark", 4))
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, matrix.astype(np.float32))


def test_compressed_matrix_of_16_bits_by_hand(tmp_path):
    codes = np.array([[0, 65535], [1, 32768], [9, 77]], "<u2")
    head = struct.pack("<ffii", -2.0, 6.0, 3, 2)
    (tmp_path / "a.ark").write_bytes(b"\0BCM2 " + head + codes.tobytes())
    expected = -2 + 6 * codes.astype(np.float64) / 65535
    np.testing.assert_allclose(kaldi.read_matrix(location(tmp_path / "a.ark")), expected, rtol=1e-6)


def test_compressed_matrix_of_8_bits_with_quantiles_by_hand(tmp_path):
    # Kaldi's "CM": each column has its values at codes 0, 64, 192 and 255; between, it is linear.
    quantiles = np.array([[0, 1000, 30000, 65535], [10, 20, 40, 50]], "<u2")
    codes = np.array([[0, 32, 64, 128, 192, 223, 255, 1], [0, 64, 192, 255, 5, 6, 7, 8]], "u1")
    head = struct.pack("<ffii", 0.0, 65535.0, 8, 2)
    (tmp_path / "a.ark").write_bytes(b"\0BCM " + head + quantiles.tobytes() + codes.tobytes())
    expected = [np.interp(c, [0, 64, 192, 255], q) for c, q in zip(codes, quantiles, strict=True)]
    read = kaldi.read_matrix(location(tmp_path / "a.ark"))
    np.testing.assert_allclose(read, np.transpose(expected), rtol=1e-5)


@pytest.mark.parametrize("method", [1, 2, 3, 5])
def test_compressed_matrices_that_kaldiio_writes(tmp_path, method):
    matrix = np.random.default_rng(1).standard_normal((60, 13)).astype(np.float32)
    kaldiio.save_ark(str(tmp_path / "a.ark"), {"utt": matrix}, compression_method=method)
    read = kaldi.read_matrix(location(tmp_path / "a.ark", 4))
    np.testing.assert_allclose(read, matrix, atol=0.1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("utt  [\n  1.5 2 \n  -3e-05 4 ]\n", [[1.5, 2], [-3e-5, 4]]),
        ("utt  [\n  0 1.5 \n  1e-5 2 ]\n", [[0, 1.5], [1e-5, 2]]),  # kaldiio takes it for integers
        ("utt  [\n  1 2 3 ]\n", [[1, 2, 3]]),
        ("utt  [ ]\n", np.zeros((0, 0))),
    ],
)
def test_text_matrices(tmp_path, text, expected):
    (tmp_path / "a.ark").write_text(text + "v2 1 2\n")
    np.testing.assert_allclose(kaldi.read_matrix(location(tmp_path / "a.ark", 4)), expected)
    first, second = archive(tmp_path / "a.ark")
    assert (first.key, first.offset, second.key) == ("utt", 4, "v2")
    np.testing.assert_allclose(first.value, expected)


def test_ranges_hold_their_last_row_and_column(tmp_path):
    matrix = np.arange(20.0).reshape(5, 4)
    (tmp_path / "a.ark").write_bytes(by_hand(b"FM", matrix))
    read = kaldi.read_matrix(location(tmp_path / "a.ark", 0, "[1:3,2:3]"))
    np.testing.assert_array_equal(read, matrix[1:4, 2:4])


@pytest.mark.parametrize(
    ("ranges", "rows", "columns"),
    [
        ("[:,1:3]", slice(None), slice(1, 4)),
        ("[2:4,:]", slice(2, 5), slice(None)),
        ("[:]", slice(None), slice(None)),
        ("[3:,:1]", slice(3, None), slice(0, 2)),
        ("[1:7]", slice(1, 5), slice(None)),  # three rows more than there are: Kaldi's tolerance
        ("[4:7,0:3]", slice(4, 5), slice(None)),
    ],
)
def test_ranges_without_an_end_or_a_little_too_long(tmp_path, ranges, rows, columns):
    matrix = np.arange(20.0).reshape(5, 4)
    (tmp_path / "a.ark").write_bytes(by_hand(b"FM", matrix))
    read = kaldi.read_matrix(location(tmp_path / "a.ark", 0, ranges))
    np.testing.assert_array_equal(read, matrix[rows, columns])


@pytest.mark.parametrize(
    ("ranges", "asked"),
    [
        ("[1:8]", "rows 1 to 8, and the matrix has 5"),
        ("[5:6]", "rows 5 to 6, and the matrix has 5"),
        ("[5:]", "rows 5 and more, and the matrix has 5"),
        ("[:,1:4]", "columns 1 to 4, and the matrix has 4"),
    ],
)
def test_ranges_outside_of_the_matrix(tmp_path, ranges, asked):
    (tmp_path / "a.ark").write_bytes(by_hand(b"FM", np.ones((5, 4))))
    with pytest.raises(CorpusError, match=f"line 7, utt .*: bad range: the line asks for {asked}"):
        kaldi.read_matrix(location(tmp_path / "a.ark", 0, ranges))


@pytest.mark.quick
def test_a_pipe_that_is_allowed(tmp_path):
    (tmp_path / "a").write_bytes(by_hand(b"FM", np.ones((2, 2))))
    place = kaldi_tables.locate(f"cat {tmp_path}/a |", "feats.scp, line 1, utt", True)
    np.testing.assert_array_equal(kaldi.read_matrix(place), np.ones((2, 2)))
    place = kaldi_tables.locate(f"cat {tmp_path}/a |[0:0]", "feats.scp, line 1, utt", True)
    np.testing.assert_array_equal(kaldi.read_matrix(place), np.ones((1, 2)))


def alignments():
    generator = np.random.default_rng(2)
    return {f"u{n}": generator.integers(0, 99, 5 + n).astype(np.int32) for n in range(4)}


def text_form(vectors):
    return "".join(f"{key} {' '.join(map(str, value))} \n" for key, value in vectors.items())


@pytest.mark.parametrize("form", ["binary", "text", "binary gzipped", "text gzipped"])
def test_integer_vectors(tmp_path, form):
    path = tmp_path / "pdf.1"
    if "text" in form:
        path.write_text(text_form(alignments()))
    else:
        kaldiio.save_ark(str(path), alignments())
    if "gzipped" in form:
        path.write_bytes(gzip.compress(path.read_bytes()))
    items = archive(path)
    assert [item.key for item in items] == list(alignments())
    with Archives([str(path)]) as files:
        for item, expected in zip(items, alignments().values(), strict=True):
            np.testing.assert_array_equal(kaldi.as_labels(item.value, "here"), expected)
            np.testing.assert_array_equal(
                kaldi.read_vector(files[0], item.offset, "here"), expected
            )


def test_every_cut_of_a_matrix_is_noticed(tmp_path):
    matrix = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    forms = {"plain": None, "compressed": 2, "16 bits": 3}
    for name, method in forms.items():
        stream = io.BytesIO()
        kaldiio.matio.write_array(stream, np.tile(matrix, (3, 1)), compression_method=method)
        whole, path = stream.getvalue(), tmp_path / name
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(CorpusError, match=rf"feats.scp, line 7, utt \({path}, byte 0\)"):
                kaldi.read_matrix(location(path))


def test_every_cut_of_an_alignment_is_noticed(tmp_path):
    stream = io.BytesIO()
    kaldiio.save_ark(stream, {"u1": np.arange(3, dtype=np.int32)})
    first = len(stream.getvalue())
    kaldiio.save_ark(stream, {"u2": np.arange(5, dtype=np.int32)})
    whole, path = stream.getvalue(), tmp_path / "pdf.1"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == first:  # nothing says that there was more
            assert len(archive(path)) == 1
        else:
            with pytest.raises(CorpusError, match=str(path)):
                archive(path)


def test_every_cut_of_a_text_is_noticed(tmp_path):
    path = tmp_path / "pdf.1"
    for whole in ("u1 12 34 \n", "u1  [\n  1 2 \n  3 4 ]\n"):
        for length in range(1, len(whole)):
            path.write_text(whole[:length])
            if not whole[:length].endswith("]"):
                with pytest.raises(CorpusError, match=str(path)):
                    archive(path)


def test_a_cut_says_how_much_is_missing(tmp_path):
    path = tmp_path / "a.ark"
    path.write_bytes(by_hand(b"FM", np.ones((10, 4)))[:-24])
    with pytest.raises(CorpusError, match="the object goes on for 24 bytes after its end"):
        kaldi.read_matrix(location(path))


def test_damaged_gzip(tmp_path):
    path = tmp_path / "pdf.1.gz"
    whole = gzip.compress(text_form(alignments()).encode())
    for damaged in (whole[:-12], whole[:30] + b"\xff" * 8 + whole[38:]):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=rf"{path}: its gzip data is damaged after \d+"):
            archive(path)


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1])
def test_sizes_that_cannot_be(tmp_path, size):
    path = tmp_path / "a.ark"
    path.write_bytes(b"u " + b"\0BFM " + struct.pack("<bibi", 4, size, 4, 40) + b"x" * 99)
    with pytest.raises(CorpusError, match="u at byte 2: the archive is (cut short|damaged)"):
        archive(path)
    path.write_bytes(b"u " + b"\0B\4" + struct.pack("<i", size) + b"x" * 99)
    with pytest.raises(CorpusError, match="u at byte 2: the archive is (cut short|damaged)"):
        archive(path)


@pytest.mark.parametrize("content", [b"\0B<Nnet3ChainEg> <NumInputs> ", b"<Nnet3Eg> <NumIo> 2 "])
def test_egs_are_refused_with_what_to_give(tmp_path, content):
    (tmp_path / "cegs.1.ark").write_bytes(b"u " + content + b"x" * 99)
    with pytest.raises(CorpusError, match=r"u at byte 2: these are examples for nnet3 \(egs\), "):
        archive(tmp_path / "cegs.1.ark")


@random_examples(300)
@given(st.binary(max_size=200))
@example(b"")
@example(b"u ")
@example(b"u\n")
@example(b"u \0BXX ")
@example(b"u [")
@example(b"u [\n 1 2\n 3 ]\n")
@example(b"u 1 x 3\n")
@example(b"\n\n")
@example(b"\xff" * 50)
@example(b"k" * 2000)
def test_garbage_is_a_corpus_error_or_numbers(content):
    try:
        for item in kaldi.read_archive(io.BytesIO(content), "garbage.ark"):
            assert isinstance(item.value, np.ndarray)
    except CorpusError as error:
        assert "garbage.ark" in str(error)


def test_keys_are_in_any_order(tmp_path):
    """`gunzip -c ali.*.gz` takes ali.10.gz before ali.2.gz."""
    path = tmp_path / "pdf.1"
    path.write_text("j1 1 2\nj10 3\nj2 4 5\na 6\n")
    assert [item.key for item in archive(path)] == ["j1", "j10", "j2", "a"]


@pytest.mark.parametrize("key", ["a\u200cb", "a\u200db", "a\u00a0b", "a\u2028b", "日本"])
def test_keys_are_any_utf8_without_ascii_white_space(tmp_path, key):
    path = tmp_path / "pdf.1"
    path.write_text(f"{key} 1 2\n")
    assert [item.key for item in archive(path)] == [key]


@pytest.mark.parametrize("key", [b"a\x01b", b"a\x7fb", b"a\x0bb", b"a\xff"])
def test_keys_that_no_archive_has(tmp_path, key):
    path = tmp_path / "pdf.1"
    path.write_bytes(key + b" 1 2\n")
    with pytest.raises(CorpusError, match="byte 0: .* is not the key of an object"):
        archive(path)


@pytest.mark.parametrize("value", [[0.5, 1], [[1, 2]], [], [np.nan], [1e12]])
def test_what_is_no_labels(value):
    with pytest.raises(CorpusError, match="here: (no labels|a vector of integers is expected)"):
        kaldi.as_labels(np.array(value), "here")


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="line 7, utt: .*a.ark is not a file"):
        kaldi.read_matrix(location(tmp_path / "a.ark"))
    with pytest.raises(FileNotFoundError, match="archive .*pdf.1 does not exist"):
        archive(tmp_path / "pdf.1")
    with pytest.raises(FileNotFoundError, match=f"archive {tmp_path} is no file"):
        archive(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match="line 7, utt: .*cannot be read .it is a FIFO"):
        kaldi.read_matrix(location(tmp_path / "pipe"))


class Attack:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", [b"PKL", b"NPY", b"AUDIO"])
def test_no_pickle_is_loaded(tmp_path, kind):
    content = pickle.dumps(Attack(tmp_path / "harm"))
    if kind == b"NPY":
        stream = io.BytesIO()
        np.save(stream, np.array([Attack(tmp_path / "harm")], object), allow_pickle=True)
        content = bytes([2]) + len(stream.getvalue()).to_bytes(2, "little") + stream.getvalue()
    path = tmp_path / "a.ark"
    path.write_bytes(b"utt " + kind + content)
    for read in (lambda: kaldi.read_matrix(location(path, 4)), lambda: archive(path)):
        with pytest.raises(CorpusError):
            read()
    assert not (tmp_path / "harm").exists()
    if kind == b"PKL":  # the attack is a real one
        kaldiio.load_mat(f"{path}:4")
        assert (tmp_path / "harm").exists()
