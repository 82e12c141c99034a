"""Labels, the class of every frame: from Kaldi's alignments, or from times of phones.

Files of both kinds are read once when they are opened, to find their utterances and classes. After
that the labels of one utterance are read at a time. Memory holds an entry for each utterance.
"""

import abc
import glob
import hashlib
import math
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from input import alignment, kaldi
from input.features import FRAME_LENGTH, FRAME_SHIFT
from input.open_files import Archives
from input.records import CorpusError

# Data with more classes than this count as damaged if they have fewer frames than classes.
_FEW_CLASSES = 1000
_LONGEST = 1e7  # seconds; later times are refused, so the number of frames is below 2^31

# A function that is called after each utterance. Its arguments are the stage, and the total number
# of utterances (None if that is not known).
Progress = Callable[[str, int | None], None]


class Labels(Protocol):
    """The classes of the frames of some utterances."""

    class_names: list[str]
    digest: str  # SHA-256 of the files that hold the labels
    subsampling: int  # number of frames per label; see `of_frames`
    silence: str | None  # the phone that fills gaps between other phones; None if not known

    def ids(self) -> list[str]:
        """Returns the utterances that have at least one label."""

    def count(self, utterance: str, num_frames: int) -> int:
        """Returns the number of labels of an utterance.

        If the labels fit the frames, it is ceil(num_frames / subsampling).
        """

    def read(self, utterance: str, num_frames: int) -> np.ndarray:
        """Returns the label of each frame, int32 [count(utterance, num_frames) * subsampling].

        Check the count first: a damaged time may make the count as large as any number.
        """


class _Place(NamedTuple):
    archive: int
    offset: int  # bytes from the start of the archive
    # length of the utterance: the number of its labels (in an alignment), or its seconds (if the
    # labels are made from times of phones)
    length: float


_Opened = TypeVar("_Opened", bound="_OfFiles")


class _OfFiles(abc.ABC):
    """Labels that are read from files. A context manager.

    Args:
      patterns: files or shell patterns.
    """

    class_names: list[str]
    subsampling = 1
    silence: str | None = None

    def __init__(self, patterns: list[str]) -> None:
        self._files = _Files(patterns)
        self._places: dict[str, _Place] = {}
        self.digest = self._files.digest
        try:
            self.class_names = self._scan()
        except BaseException:
            self._files.close()
            raise

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def ids(self) -> list[str]:
        return list(self._places)

    def _check_empty(self, empty: bool) -> None:
        if empty:
            raise CorpusError(f"{', '.join(self._files.paths)[:200]}: empty, without any utterance")

    @abc.abstractmethod
    def _scan(self) -> list[str]:
        """Reads all files, fills in the places, and returns the names of the classes."""


class KaldiAlignments(_OfFiles):
    """Labels from vectors of pdf-ids, as Kaldi's `ali-to-pdf` writes them. A context manager.

    An utterance whose vector is empty has no labels.

    Without `num_classes` the ids themselves must show that they are pdf-ids: transition-ids, which
    Kaldi's alignments hold before `ali-to-pdf`, begin at 1, and a damaged id may be any number.

    Args:
      patterns: files or shell patterns; gzipped or not, binary or text.
      num_classes: number of classes; None for the highest id + 1.
      progress: called with ("alignments", None) for each utterance.
      subsampling: F, frames to a label (`--frame-subsampling-factor` of a chain model, which is 3).
        `of_frames` tells to which frames label i belongs.
      frame_shift: frames by which the aligned features had been moved (`shift-feats --shift`).

    Raises:
      ValueError: `subsampling` is below 1, or `abs(frame_shift)` is not below `subsampling`.
      FileNotFoundError: there is no such file.
      CorpusError: there are no labels, a file is damaged, an utterance is there twice, or an id is
        negative or not below `num_classes`; the message names file, utterance and byte. Without
        `num_classes` also if no frame has the id 0, or there are more ids than frames, and more
        than 1000.
    """

    def __init__(
        self,
        patterns: list[str],
        num_classes: int | None = None,
        progress: Progress = lambda stage, total: None,
        subsampling: int = 1,
        frame_shift: int = 0,
    ) -> None:
        if subsampling < 1 or abs(frame_shift) >= subsampling:
            raise ValueError(
                "frame_subsampling must be at least 1, and frame_shift less than it in both"
                f" directions. Received: frame_subsampling={subsampling}, frame_shift={frame_shift}"
            )
        self._num_classes = num_classes
        self._progress = progress
        self.subsampling = subsampling
        self._shift = frame_shift
        super().__init__(patterns)

    def count(self, utterance: str, num_frames: int) -> int:
        return int(self._places[utterance].length)

    def read(self, utterance: str, num_frames: int) -> np.ndarray:
        place = self._places[utterance]
        path = self._files.paths[place.archive]
        where = f"{path}, utterance {utterance} at byte {place.offset}"
        labels = kaldi.read_vector(self._files[place.archive], place.offset, where)
        return of_frames(labels, self.subsampling, self._shift)

    def _scan(self) -> list[str]:
        lowest, highest, where = 0, -1, ""
        for number, (low, high, place) in enumerate(self._ranges()):
            lowest = low if number == 0 else min(low, lowest)
            if high > highest:
                highest, where = high, place
        if self._num_classes is None:
            frames = sum(place.length for place in self._places.values()) * self.subsampling
            self._check_ids(lowest, highest, where, int(frames))
        return [f"pdf-{number}" for number in range(self._num_classes or highest + 1)]

    def _check_ids(self, lowest: int, highest: int, where: str, frames: int) -> None:
        fix = (
            "give their number with --num_classes (Kaldi: tree-info), or make them with ali-to-pdf"
        )
        if lowest > 0:
            raise CorpusError(
                f"{', '.join(self._files.paths)[:200]}: no frame has the id 0, and the lowest is"
                f" {lowest}. Transition-ids begin at 1; labels must be pdf-ids, from 0 on: {fix}"
            )
        if highest >= max(frames, _FEW_CLASSES):
            raise CorpusError(
                f"{where}: the highest label, {highest}, would make {highest + 1} classes of"
                f" {frames} frames. The file is damaged, or does not hold pdf-ids: {fix}"
            )

    def _ranges(self) -> Iterator[tuple[int, int, str]]:
        """Yields the lowest and highest id of each utterance, and its place for messages."""
        empty = True
        for number, path in enumerate(self._files.paths):
            for key, offset, value in kaldi.read_archive(self._files[number], path):
                empty = False
                if value.size == 0:
                    continue
                where = f"{path}, utterance {key} at byte {offset}"
                labels = kaldi.as_labels(value, where)
                place = _Place(number, offset, len(labels))
                _add(self._places, key, place, where, self._files.paths)
                _check_classes(labels, self._num_classes, where)
                self._progress("alignments", None)
                yield int(labels.min()), int(labels.max()), where
        self._check_empty(empty)


def of_frames(labels: np.ndarray, subsampling: int, shift: int = 0) -> np.ndarray:
    """Returns the label of each frame, [F * n], from labels [n] of F frames each.

    A chain model's output i is centred on frame F i. Features that `shift-feats --shift=s` has
    moved have frame F i - s there. Kaldi trains on all F shifts, from -floor(F/2) on, in turn, so
    output i is trained on the frames

        F i - (F - 1 - floor(F/2)), ..., F i + floor(F/2)

    each minus s; with F = 3 and s = 0 these are 3i - 1, 3i and 3i + 1. Frames before the first of
    these have the first label, and frames after the last have the last one, as `shift-feats`
    repeats the first and last frame.

    Args:
      labels: int32 [n].
      subsampling: F.
      shift: s, of the features that were aligned.
    """
    first = subsampling - 1 - subsampling // 2
    chosen = (np.arange(subsampling * len(labels)) + shift + first) // subsampling
    return labels[np.clip(chosen, 0, len(labels) - 1)]


class PhoneTimes(_OfFiles):
    """Labels from times of phones, with three states for each phone. A context manager.

    Lines are `UTTERANCE PHONE START DURATION`, or NIST's CTM `UTTERANCE CHANNEL START DURATION
    PHONE [CONFIDENCE]`, times in seconds. An utterance's lines follow each other in order of time.
    Gaps between phones are silence. Classes are the states of all phones, sorted by name. Frame t
    is at (t + 1/2) * 10 ms, as in the CTM files of Kaldi and of aligners that are built on it.

    Args:
      patterns: files or shell patterns; gzipped or not.
      silence: name of the phone in the gaps.
      progress: called with ("alignments", None) for each utterance.

    Raises:
      FileNotFoundError: there is no such file.
      CorpusError: there are no labels, a line is not of these forms, phones overlap, or an
        utterance is there twice; the message names file and line.
    """

    def __init__(
        self,
        patterns: list[str],
        silence: str = "SIL",
        progress: Progress = lambda stage, total: None,
    ) -> None:
        self.silence = silence
        self._progress = progress
        super().__init__(patterns)

    def count(self, utterance: str, num_frames: int) -> int:
        # The last phone may end with the shift of the last frame (as in Kaldi), with the window of
        # that frame, or with the signal. Which of these holds depends on the aligner. In all three
        # cases there is one label for each frame. In any other case, the number of labels
        # follows from the end of the last phone.
        frames = self._places[utterance].length / FRAME_SHIFT
        tail = FRAME_LENGTH / FRAME_SHIFT
        if num_frames - 0.5 <= frames <= num_frames + tail:
            return num_frames
        return max(1, round(frames))

    def read(self, utterance: str, num_frames: int) -> np.ndarray:
        count = self.count(utterance, num_frames)
        phones, end = self._phones(utterance, self._places[utterance])
        return alignment.frame_labels(phones, end, count, self._inventory, FRAME_SHIFT / 2)

    def _phones(self, utterance: str, place: _Place) -> tuple[list[tuple[float, str]], float]:
        """Returns (start, phone) of an utterance's phones and silences, and its end in seconds."""
        path, file = self._files.paths[place.archive], self._files[place.archive]
        file.seek(place.offset)
        phones: list[tuple[float, str]] = []
        end = 0.0
        for line in file:
            key, phone, start, duration = _parse(line, path)
            if key != utterance:
                break
            if start - end > FRAME_SHIFT / 2:
                phones.append((end, self.silence))
                end = start
            if start + duration > end:
                phones.append((end, phone))
                end = start + duration
        return phones, end

    def _scan(self) -> list[str]:
        phones = sorted(self._names())
        self._inventory = {phone: number for number, phone in enumerate(phones)}
        return alignment.class_names(phones)

    def _names(self) -> set[str]:
        """Returns the phones that occur, with silence if there are gaps; fills in the places."""
        phones = set()
        for archive, path in enumerate(self._files.paths):
            last, end, offset = None, 0.0, 0
            for number, line in enumerate(self._files[archive], 1):
                where = f"{path}, line {number}"
                key, phone, start, duration = _parse(line, where)
                if key != last:
                    _add(self._places, key, _Place(archive, offset, 0.0), where, self._files.paths)
                    self._progress("alignments", None)
                    last, end = key, 0.0
                if end - start > FRAME_SHIFT / 2:
                    raise CorpusError(
                        f"{where}: utterance {key}: phone {phone} starts at {start:g} s, before the"
                        f" one before it ends ({end:g} s)"
                    )
                if start - end > FRAME_SHIFT / 2:
                    phones.add(self.silence)
                phones.add(phone)
                end = max(end, start + duration)
                self._places[key] = self._places[key]._replace(length=end)
                offset += len(line)
        self._check_empty(not self._places)
        return phones


class _Files(Archives):
    """The files that patterns name, and their digest."""

    def __init__(self, patterns: list[str]) -> None:
        paths = [path for pattern in patterns for path in _expand(pattern)]
        if len(set(paths)) < len(paths):
            raise CorpusError(f"a file is named twice in {', '.join(patterns)}")
        super().__init__(paths)
        digest = hashlib.sha256()
        try:
            for path in paths:
                with open(path, "rb") as file:
                    while part := file.read(1 << 20):
                        digest.update(part)
        except BaseException:
            self.close()
            raise
        self.digest = digest.hexdigest()


def _expand(pattern: str) -> list[str]:
    if os.path.isfile(pattern) or not glob.has_magic(pattern):
        return [pattern]
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern}")
    return paths


def _add(places: dict[str, _Place], key: str, place: _Place, where: str, paths: list[str]) -> None:
    if key in places:
        first = paths[places[key].archive]
        raise CorpusError(f"{where}: utterance {key} is already in {first}. Remove one of the two")
    places[key] = place


def _check_classes(labels: np.ndarray, num_classes: int | None, where: str) -> None:
    top = num_classes if num_classes is not None else 2**31
    wrong = np.flatnonzero((labels < 0) | (labels >= top))
    if len(wrong):
        rule = f"not one of the {num_classes} classes" if num_classes else "negative"
        raise CorpusError(
            f"{where}: label {labels[wrong[0]]} of frame {wrong[0]} is {rule}. The archive must"
            " hold pdf-ids (ali-to-pdf), not transition-ids"
        )


def _parse(line: bytes, where: str) -> tuple[str, str, float, float]:
    """Returns (utterance, phone, start, duration) of a line; times in seconds."""
    try:
        parts = [word.decode() for word in line.removeprefix(BOM_UTF8).split()]
        if len(parts) == 4:
            key, phone, *times = parts
        else:
            (key, _, *times, phone), confidence = parts[:5], parts[5:]
            if len(confidence) > 1:
                raise ValueError("too many columns")
        start, duration = map(float, times)
    except ValueError:
        start = duration = math.nan
    if not (start >= 0 and duration > 0 and start + duration < _LONGEST):
        raise CorpusError(
            f"{where}: a line must be UTTERANCE PHONE START DURATION, or UTTERANCE CHANNEL START"
            f" DURATION PHONE, times in seconds below {_LONGEST:g}. Received: {line.strip()[:80]!r}"
        )
    return key, phone, start, duration
