"""Kaldi's text tables, and that nothing in them is run unless it is allowed."""

import pytest

from input import kaldi_tables
from input.kaldi_tables import Segment
from input.records import CorpusError


@pytest.fixture
def table(tmp_path):
    """Writes a table and returns its path."""

    def write(content):
        path = tmp_path / "table"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_reads_keys_and_the_rest_of_the_line(table):
    path = table("\ufeffa-1 x.wav\na-2\tsph2pipe -f wav y.sph |\nb/é  z w  \r\n")
    assert kaldi_tables.read(path) == {
        "a-1": "x.wav",
        "a-2": "sph2pipe -f wav y.sph |",
        "b/é": "z w",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a x\nb\n", r"line 2: a line must be a key and a value. Received: 'b'"),
        ("a x\n\nb y\n", "line 2: a line must be"),
        ("a x\n b y\n", "line 2: a line must be"),
        ("a x\na y\n", "line 2: key a is there twice"),
        ("b x\na y\n", "line 2: key a comes after b, so keys are not sorted.*LC_ALL=C sort"),
        ("a x\nB y\n", "line 2: key B comes after a"),
        (b"a x\nb \xff\xfe\n", "not UTF-8"),
        (b"\x1f\x8b\x08\x00\x80\x81\n", "not UTF-8"),
    ],
)
def test_a_table_that_is_wrong(table, content, message):
    path = table(content)
    with pytest.raises(CorpusError, match=rf"{path}.*{message}"):
        kaldi_tables.read(path)


def test_order_is_that_of_bytes(table):
    keys = ["A", "Z", "a", "a-", "a0", "aé", "b", "é", "中", "\U0001f600"]
    assert sorted(keys, key=lambda key: key.encode()) == keys
    path = table("".join(f"{key} x\n" for key in keys))
    assert list(kaldi_tables.read(path)) == keys


@pytest.mark.parametrize("white", ["\u00a0", "\u2003", "\u200c", "\u0085"])
def test_only_white_space_of_ascii_ends_a_key(table, white):
    path = table(f"a{white}1 r{white}1 0 1{white}\r\n")
    assert kaldi_tables.read(path) == {f"a{white}1": f"r{white}1 0 1{white}"}
    path = table(f"a{white}1 r{white}1 0 1\n")
    assert kaldi_tables.segments(path) == {f"a{white}1": Segment(f"r{white}1", 0.0, 1.0)}


def test_a_missing_table(tmp_path):
    with pytest.raises(FileNotFoundError, match="wav.scp does not exist"):
        kaldi_tables.read(tmp_path / "wav.scp")


def test_segments(table):
    path = table("u1 rec 0.5 2\nu2 rec 2 -1\nu3 rec 2 -1 0\nu4 rec 2 3 1\n")
    assert kaldi_tables.segments(path) == {
        "u1": Segment("rec", 0.5, 2.0),
        "u2": Segment("rec", 2.0, None),
        "u3": Segment("rec", 2.0, None, 0),
        "u4": Segment("rec", 2.0, 3.0, 1),
    }


@pytest.mark.parametrize(
    "times",
    [
        *("rec 1", "rec 2 1", "rec 1 1", "rec -1 2", "rec x 2", "rec 0 nan", "rec 0 inf"),
        *("rec 0 1 A", "rec 0 1 -1", "rec 0 1 1.5", "rec 0 1 ١", "rec 0 1 2 3"),
    ],
)
def test_segments_that_are_wrong(table, times):
    path = table(f"u0 rec 0 1\nu1 {times}\n")
    with pytest.raises(CorpusError, match=rf"{path}, line 2: utterance u1 must have"):
        kaldi_tables.segments(path)


def parts(text, allow_pipes=False):
    place = kaldi_tables.locate(text, "feats.scp, line 3, u", allow_pipes)
    return place.path, place.offset, place.rows, place.columns, place.pipe


WHOLE = slice(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.ark", ("a.ark", 0, WHOLE, WHOLE, False)),
        ("/d/a.ark:123 ", ("/d/a.ark", 123, WHOLE, WHOLE, False)),
        ("c:x/a.ark", ("c:x/a.ark", 0, WHOLE, WHOLE, False)),
        ("a.ark:5[0:9]", ("a.ark", 5, slice(0, 10), WHOLE, False)),
        ("a.ark:5[3:9,1:2]", ("a.ark", 5, slice(3, 10), slice(1, 3), False)),
        ("a.ark:5[:,1:2]", ("a.ark", 5, WHOLE, slice(1, 3), False)),
        ("a.ark:5[3:9,:]", ("a.ark", 5, slice(3, 10), WHOLE, False)),
        ("odd[1].wav", ("odd[1].wav", 0, WHOLE, WHOLE, False)),
    ],
)
def test_what_a_line_names(text, expected):
    assert parts(text) == expected


def test_pipes_are_refused_with_the_reason():
    with pytest.raises(
        CorpusError, match=r"feats.scp, line 3, u: 'rm x \|' is a command.*shell.*--allow_pipes"
    ):
        parts("rm x |")
    with pytest.raises(CorpusError, match="is a command"):
        parts("| tee x")
    with pytest.raises(CorpusError, match="is a command"):
        parts("rm x |[0:3]")
    assert parts("cat 'a:1[0:3]' |", True) == ("cat 'a:1[0:3]'", 0, WHOLE, WHOLE, True)
    assert parts("cat a |[0:3]", True) == ("cat a", 0, slice(0, 4), WHOLE, True)


@pytest.mark.parametrize(
    "bad", ["[]", "[3]", "[1:2:3]", "[-1:3]", "[a:b]", "[0:1,0:1,0:1]", "[,1:3]"]
)
def test_bad_ranges(bad):
    with pytest.raises(CorpusError, match=r"line 3, u: bad range \[.* of 'a.ark:5': it must be"):
        parts(f"a.ark:5{bad}")


def test_a_range_that_goes_backwards():
    with pytest.raises(CorpusError, match=r"bad range \[:,3:2\] of 'a.ark:5': 3 comes after 2"):
        parts("a.ark:5[:,3:2]")


@pytest.mark.parametrize("text", ["| tee x", "|", "-", ":12", "[0:3]"])
def test_what_nobody_can_read_from(text):
    with pytest.raises(CorpusError, match="line 3, u: .*(is not a file|to write to)"):
        parts(text, True)


@pytest.mark.quick
def test_a_command_gives_its_output_or_its_last_words():
    def run(command):
        return kaldi_tables.run_pipe(kaldi_tables.locate(command, "wav.scp, line 1, u", True))

    assert run("printf 'a\\0b' |") == b"a\0b"
    with pytest.raises(
        CorpusError, match=r"wav.scp, line 1, u: the command .* ended with code 3: no such thing"
    ):
        run("echo partly; echo no such thing >&2; exit 3 |")
