"""Labels from alignments of Kaldi and from times of phones."""

import gzip

import kaldiio
import numpy as np
import pytest

from input import features
from input.labels import KaldiAlignments, PhoneTimes, of_frames
from input.records import CorpusError


def write_alignments(path, vectors):
    arrays = {key: np.array(value, np.int32) for key, value in vectors.items()}
    kaldiio.save_ark(str(path), arrays)


def test_alignments_of_several_files(tmp_path):
    write_alignments(tmp_path / "pdf.1", {"b1": [0, 5, 2], "b2": [1]})
    (tmp_path / "pdf.2.gz").write_bytes(gzip.compress(b"a1 7 7 \na2 3 \n"))
    seen = []
    with KaldiAlignments([f"{tmp_path}/pdf.*"], None, lambda *call: seen.append(call)) as labels:
        assert labels.ids() == ["b1", "b2", "a1", "a2"]
        assert labels.class_names == [f"pdf-{number}" for number in range(8)]
        for key, expected in (("a2", [3]), ("b1", [0, 5, 2]), ("a1", [7, 7])):
            read = labels.read(key, 99)
            assert read.dtype == np.int32
            np.testing.assert_array_equal(read, expected)
    assert seen == [("alignments", None)] * 4


def test_an_empty_alignment_is_none(tmp_path):
    write_alignments(tmp_path / "pdf.1", {"a": [1, 2], "b": [], "c": [0]})
    (tmp_path / "pdf.2").write_bytes(b"b \nd \n")
    with KaldiAlignments([f"{tmp_path}/pdf.*"]) as labels:
        assert labels.ids() == ["a", "c"]
        np.testing.assert_array_equal(labels.read("c", 1), [0])
    with KaldiAlignments([f"{tmp_path}/pdf.2"]) as labels:
        assert (labels.ids(), labels.class_names) == ([], [])


def test_digest_is_that_of_the_content(tmp_path):
    for name, last in (("x", 1), ("y", 1), ("z", 2)):
        write_alignments(tmp_path / name, {"a": [0, last]})
    digests = [KaldiAlignments([str(tmp_path / name)], 3).digest for name in "xyz"]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("value", "num_classes", "message"),
    [
        ([0, 3, 1, 9], 3, "label 3 of frame 1 is not one of the 3 classes.*ali-to-pdf"),
        ([0, -1], None, "label -1 of frame 1 is negative"),
    ],
)
def test_classes_out_of_range(tmp_path, value, num_classes, message):
    write_alignments(tmp_path / "pdf.1", {"a": [0, 2], "b": value})
    where = rf"{tmp_path}/pdf.1, utterance b at byte \d+: {message}"
    with pytest.raises(CorpusError, match=where):
        KaldiAlignments([str(tmp_path / "pdf.1")], num_classes)


def test_transition_ids_are_told_from_pdf_ids(tmp_path):
    """Transition-ids begin at 1, pdf-ids at 0; a given number of classes says which they are."""
    write_alignments(tmp_path / "ali.1", {"a": [2, 1, 1, 8], "b": [25, 25]})
    rule = r"ali\.1: no frame has the id 0, and the lowest is 1\. .*--num_classes .*ali-to-pdf"
    with pytest.raises(CorpusError, match=rule):
        KaldiAlignments([str(tmp_path / "ali.1")])
    with KaldiAlignments([str(tmp_path / "ali.1")], 26) as labels:
        assert len(labels.class_names) == 26


@pytest.mark.parametrize(("highest", "fits"), [(999, True), (1000, False), (2_900_000, False)])
def test_more_classes_than_frames_are_damage(tmp_path, highest, fits):
    path = tmp_path / "pdf.1"
    write_alignments(path, {"a": [0, 1], "b": [0, highest]})
    if fits:
        with KaldiAlignments([str(path)]) as labels:
            assert len(labels.class_names) == highest + 1
        return
    where = rf"{path}, utterance b at byte \d+: the highest label, {highest}, .* of 4 frames"
    with pytest.raises(CorpusError, match=where):
        KaldiAlignments([str(path)])


def kaldis_frames(num_frames, factor, *shifts):
    """The frame that each output of a chain model is centred on; None where an edge is repeated.

    As `shift-feats --shift=s` for each s, one after the other, and then `subsample-feats --n=F`.
    """
    frames = list(range(num_frames))
    for shift in shifts:
        rows = [r - shift for r in range(num_frames)]
        frames = [frames[r] if 0 <= r < num_frames else None for r in rows]
    return frames[::factor]


@pytest.mark.parametrize(("factor", "shift"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, -1), (4, 2)])
@pytest.mark.parametrize("num_frames", [1, 7, 8, 9, 12, 13])
def test_labels_of_a_chain_model_go_to_the_frames_that_kaldi_trains_on(num_frames, factor, shift):
    expected_length = (num_frames + factor - 1) // factor  # nnet3's LengthsMatch
    labels = np.arange(10, 10 + expected_length, dtype=np.int32)
    found = of_frames(labels, factor, shift)
    assert found.dtype == np.int32 and len(found) == factor * expected_length >= num_frames
    seen = set()
    for training in range(-(factor // 2), -(factor // 2) + factor):  # shift_and_combine_feats.sh
        frames = kaldis_frames(num_frames, factor, shift, training)
        assert len(frames) == expected_length
        for frame, label in zip(frames, labels, strict=True):
            if frame is not None:
                assert found[frame] == label
                seen.add(frame)
    # Kaldi trains on the others, at the edges, where an edge is repeated, or never.
    assert len(seen) >= num_frames - 2 * factor
    assert list(found) == sorted(found)


def test_a_stack_of_as_many_frames_has_the_label_itself():
    for num_frames in range(1, 20):
        labels = np.arange((num_frames + 2) // 3)
        stacked = features.stack_labels(of_frames(labels, 3)[:num_frames], 3)
        np.testing.assert_array_equal(stacked, labels)


def test_alignments_at_a_third_of_the_frame_rate(tmp_path):
    write_alignments(tmp_path / "pdf.1", {"a": [0, 5, 2], "b": [4]})
    with KaldiAlignments([f"{tmp_path}/pdf.1"], subsampling=3) as labels:
        assert (labels.count("a", 8), labels.subsampling) == (3, 3)
        np.testing.assert_array_equal(labels.read("a", 8), [0, 0, 5, 5, 5, 2, 2, 2, 2])
    with KaldiAlignments([f"{tmp_path}/pdf.1"], subsampling=3, frame_shift=-1) as labels:
        np.testing.assert_array_equal(labels.read("a", 8), [0, 0, 0, 5, 5, 5, 2, 2, 2])
    with pytest.raises(ValueError, match="Received: frame_subsampling=3, frame_shift=-3"):
        KaldiAlignments([f"{tmp_path}/pdf.1"], subsampling=3, frame_shift=-3)


def test_an_utterance_in_two_files(tmp_path):
    for name in ("pdf.1", "pdf.2"):
        write_alignments(tmp_path / name, {"a": [1]})
    with pytest.raises(CorpusError, match=r"pdf.2, utterance a at byte 2: .*already in .*pdf.1"):
        KaldiAlignments([f"{tmp_path}/pdf.*"])
    (tmp_path / "pdf.1").write_text("a 1\nb 0\na 1\n")
    with pytest.raises(CorpusError, match=r"pdf.1, utterance a at byte 10: .*already in .*pdf.1"):
        KaldiAlignments([f"{tmp_path}/pdf.1"])


def test_a_file_may_be_empty_but_not_all(tmp_path):
    """Kaldi writes an empty archive for a part of the data in which no utterance was aligned."""
    kinds = (KaldiAlignments, "a 0 1\n"), (PhoneTimes, "a SIL 0 0.1\n")
    (tmp_path / "labels.1").touch()
    for kind, text in kinds:
        (tmp_path / "labels.2").write_text(text)
        with kind([f"{tmp_path}/labels.*"]) as labels:
            assert labels.ids() == ["a"]
        with pytest.raises(CorpusError, match="labels.1: empty, without any utterance"):
            kind([f"{tmp_path}/labels.1"])


def test_no_file_matches(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file matches .*ali\.\*\.gz"):
        KaldiAlignments([f"{tmp_path}/ali.*.gz"])
    with pytest.raises(CorpusError, match="a file is named twice"):
        (tmp_path / "pdf.1").write_text("a 1\n")
        KaldiAlignments([f"{tmp_path}/pdf.1", f"{tmp_path}/pdf.*"])


def test_features_in_place_of_labels(tmp_path):
    kaldiio.save_ark(str(tmp_path / "pdf.1"), {"a": np.ones((3, 2), np.float32)})
    with pytest.raises(CorpusError, match=r"a vector of integers is expected.*\[3, 2\]"):
        KaldiAlignments([str(tmp_path / "pdf.1")])


CTM = """u1 1 0.00 0.03 SIL
u1 1 0.03 0.06 AH 0.9
u2 1 0.03 0.03 T
"""
SHORT = "u1 SIL 0.00 0.03\nu1 AH 0.03 0.06\nu2 T 0.03 0.03\n"


@pytest.mark.parametrize("text", [CTM, SHORT, "\ufeff" + CTM.replace("\n", "\r\n")])
def test_phone_times_by_hand(tmp_path, text):
    (tmp_path / "x.ctm").write_text(text)
    with PhoneTimes([str(tmp_path / "x.ctm")]) as labels:
        assert labels.ids() == ["u1", "u2"]
        assert labels.class_names == [f"{p}.{s}" for p in ("AH", "SIL", "T") for s in range(3)]
        # Frame t is at (t + 1/2) * 10 ms: 30 ms of a phone are one frame for each state.
        for _ in range(2):
            np.testing.assert_array_equal(labels.read("u1", 9), [3, 4, 5, 0, 0, 1, 1, 2, 2])
        # 30 ms of silence that the file leaves out.
        np.testing.assert_array_equal(labels.read("u2", 6), [3, 4, 5, 6, 7, 8])


def test_only_white_space_of_ascii_divides_a_line(tmp_path):
    (tmp_path / "x.ctm").write_text("u\u00a01 a\u2003b 0 0.03\n")
    with PhoneTimes([str(tmp_path / "x.ctm")]) as labels:
        assert labels.ids() == ["u\u00a01"]
        assert labels.class_names == [f"a\u2003b.{state}" for state in range(3)]


def test_a_file_whose_name_is_a_pattern_too(tmp_path):
    (tmp_path / "pdf[1].ark").write_text("u1 0 1\n")
    with KaldiAlignments([f"{tmp_path}/pdf[1].ark"]) as labels:
        assert labels.ids() == ["u1"]


def test_phone_times_gzipped_in_several_files(tmp_path):
    (tmp_path / "1.ctm.gz").write_bytes(gzip.compress(CTM.encode()))
    (tmp_path / "2.ctm").write_text("u3 B 0 0.05\n")
    with PhoneTimes([f"{tmp_path}/*.ctm*"], silence="SIL") as labels:
        assert labels.ids() == ["u1", "u2", "u3"]
        np.testing.assert_array_equal(labels.read("u3", 5), [3, 3, 4, 5, 5])


@pytest.mark.parametrize(
    ("num_frames", "num_labels"), [(9, 9), (8, 8), (7, 7), (6, 9), (10, 9), (12, 9)]
)
def test_phone_times_end_within_the_last_window_or_tell(tmp_path, num_frames, num_labels):
    """u1 ends at 90 ms: the shift of frame 8, or the signal's end after frame 6 (60 + 25 ms)."""
    (tmp_path / "x.ctm").write_text(CTM)
    with PhoneTimes([str(tmp_path / "x.ctm")]) as labels:
        assert len(labels.read("u1", num_frames)) == num_labels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty, without any utterance"),
        ("u1 SIL 0\n", "line 1: a line must be UTTERANCE PHONE"),
        ("u1 SIL 0 0.1\nu1 1 0.1 x T\n", "line 2: a line must be .*Received"),
        ("u1 SIL 0 0\n", "line 1: a line must be"),
        ("u1 SIL -1 1\n", "line 1: a line must be"),
        ("u1 SIL nan 1\n", "line 1: a line must be"),
        ("u1 1 0 1 T 0.5 7\n", "line 1: a line must be"),
        ("\n", "line 1: a line must be"),
        (
            "u1 A 0 0.5\nu1 B 0.4 1\n",
            r"line 2: utterance u1: phone B starts at 0.4 s, before .*0.5",
        ),
        ("u1 A 0 1\nu2 A 0 1\nu1 B 1 1\n", "line 3: utterance u1 is already in"),
        (b"u1 \xff\xfe 0 1\n", "line 1: a line must be"),
    ],
)
def test_phone_times_that_are_wrong(tmp_path, text, message):
    path = tmp_path / "x.ctm"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorpusError, match=rf"{path}.*{message}"):
        PhoneTimes([str(path)])
