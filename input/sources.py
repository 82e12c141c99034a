"""Sources of utterances and their features: Kaldi data directories and LibriSpeech.

A source lists its utterances with their speakers. It reads the features of the requested utterances
one after another, so that memory holds few recordings at a time.
"""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from input import audio_files, features, kaldi, kaldi_tables, pitch, plp
from input.kaldi_tables import Location
from input.records import CorpusError

# A segment may end this many seconds after its recording, as in Kaldi's extract-segments.
OVERSHOOT = 0.5
KINDS = ("fbank", "mfcc", "plp")
_BLOCK = 4096  # bytes of a block
_BLOCKS = 8  # the digest of a large file covers this many of its blocks


class Problem(NamedTuple):
    """The reason why an utterance has no usable features; `kind` is its name in `--skip`."""

    kind: str
    message: str


Features = np.ndarray | Problem


class Source(Protocol):
    """A set of utterances with features."""

    speakers: Mapping[str, str]  # speaker of each utterance, in the order of utterances
    # SHA-256 of the tables and of all files that they list. It covers the name, size and content of
    # each file, but only some blocks of a large file's content.
    digest: str

    def read(self, utterances: Collection[str]) -> Iterator[tuple[str, Features]]:
        """Yields the static features of these utterances, float32 [num_frames, dim], in order."""


@dataclass(frozen=True)
class Extraction:
    """Options for computing features from audio; call it to compute them.

    Raises:
      ValueError: a value is out of range.
    """

    kind: str = "fbank"
    num_mel: int = features.NUM_MEL  # number of mel filters of "fbank"
    num_ceps: int = features.NUM_CEPS  # number of coefficients of "mfcc" and "plp"
    pitch: bool = False  # whether Kaldi's three pitch features are appended
    audio: audio_files.Options = audio_files.Options()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"features must be one of {', '.join(KINDS)}. Received: {self.kind!r}")
        for name, size in (("num_mel", self.num_mel), ("num_ceps", self.num_ceps)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1. Received: {size}")

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        frames = self._spectral(samples)
        if not self.pitch or not len(frames):
            return frames
        return pitch.append(frames, pitch.pitch(samples, self.audio.sample_rate))

    def _spectral(self, samples: np.ndarray) -> np.ndarray:
        if self.kind == "fbank":
            return features.log_mel(samples, self.audio.sample_rate, self.num_mel)
        cepstra = {"mfcc": features.mfcc, "plp": plp.plp}[self.kind]
        return cepstra(samples, self.audio.sample_rate, self.num_ceps)


class KaldiFeatures:
    """Features from the matrices that a data directory's `feats.scp` names, unchanged.

    Args:
      directory: has `feats.scp` and `utt2spk`.
      allow_pipes: whether commands in `feats.scp` are run.

    Raises:
      FileNotFoundError, CorpusError: a table is missing or wrong; the message names its line.
    """

    def __init__(self, directory: str, allow_pipes: bool = False) -> None:
        path = Path(directory) / "feats.scp"
        table = kaldi_tables.read(path)
        self.speakers: Mapping[str, str] = _speakers(directory, list(table), path)
        self._locations = _locations(table, path, allow_pipes)
        self.digest = _digest([Path(directory) / "utt2spk"], self._locations)

    def read(self, utterances: Collection[str]) -> Iterator[tuple[str, Features]]:
        for utterance in utterances:
            location = self._locations[utterance]
            frames = kaldi.read_matrix(location)
            finite = np.isfinite(frames)
            if finite.all():
                yield utterance, frames
            else:
                row, column = np.argwhere(~finite)[0]
                message = f"{location}: NaN or Inf in frame {row}, dimension {column}"
                yield utterance, Problem("nonfinite", message)


class Audio:
    """Features computed from recordings, or from segments of them.

    Args:
      recordings: file of each recording.
      utterances: segment of each utterance, in order.
      speakers: speaker of each utterance.
      extraction: options of the features.
      digest: see `Source`.
    """

    def __init__(
        self,
        recordings: dict[str, Location],
        utterances: dict[str, kaldi_tables.Segment],
        speakers: Mapping[str, str],
        extraction: Extraction,
        digest: str,
    ) -> None:
        self.speakers = speakers
        self.digest = digest
        self._recordings = recordings
        self._segments = utterances
        self._extraction = extraction

    def read(self, utterances: Collection[str]) -> Iterator[tuple[str, Features]]:
        # Successive utterances of the same channel of a recording form a run. The recording is
        # decoded once for the whole run.
        runs: list[tuple[Location, list[str]]] = []
        for utterance in utterances:
            segment = self._segments[utterance]
            place = self._recordings[segment.recording]._replace(channel=segment.channel)
            if not runs or runs[-1][0] != place:
                runs.append((place, []))
            runs[-1][1].append(utterance)
        locations = [place for place, _ in runs]
        for number, samples in audio_files.decoded(locations, self._extraction.audio):
            for utterance in runs[number][1]:
                yield utterance, self._features(utterance, samples)

    def _features(self, utterance: str, samples: np.ndarray | audio_files.AudioError) -> Features:
        if isinstance(samples, audio_files.AudioError):
            return Problem("audio", f"utterance {utterance}: {samples}")
        rate = self._extraction.audio.sample_rate
        recording, start, end, _ = self._segments[utterance]
        seconds = len(samples) / rate
        for what, time, latest in (("starts", start, seconds), ("ends", end, seconds + OVERSHOOT)):
            if time is not None and time > latest:
                return Problem(
                    "audio",
                    f"utterance {utterance} {what} at {time:g} s of recording {recording}, which is"
                    f" {seconds:g} s long",
                )
        stop = len(samples) if end is None else int(end * rate)
        frames = self._extraction(samples[int(start * rate) : stop])
        if not len(frames):
            return Problem("audio", f"utterance {utterance} is shorter than one frame of 25 ms")
        return frames


def kaldi_directory(
    directory: str, extraction: Extraction, allow_pipes: bool = False, from_audio: bool = False
) -> Source:
    """Opens a Kaldi data directory: its `feats.scp`, or features of its `wav.scp` if it has none.

    Args:
      directory: has `utt2spk` and `feats.scp`, or `wav.scp` with or without `segments`.
      extraction: options of features that are computed from audio.
      allow_pipes: whether commands in tables are run.
      from_audio: whether features are computed even if there is a `feats.scp`.

    Raises:
      FileNotFoundError: the directory does not exist, is empty, or lacks a table.
      CorpusError: a table is wrong; the message names its line.
    """
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"data directory {directory} does not exist")
    has_audio = os.path.exists(os.path.join(directory, "wav.scp"))
    if os.path.exists(os.path.join(directory, "feats.scp")) and not from_audio:
        return KaldiFeatures(directory, allow_pipes)
    if not has_audio:
        what = "is empty" if not os.listdir(directory) else "has no feats.scp and no wav.scp"
        raise FileNotFoundError(f"data directory {directory} {what}")
    wav, cut = Path(directory) / "wav.scp", Path(directory) / "segments"
    recordings = _locations(kaldi_tables.read(wav), wav, allow_pipes)
    for place in recordings.values():
        if (place.rows, place.columns) != (slice(None), slice(None)):
            raise CorpusError(
                f"{place.where}: a recording has no range of rows. Cut it in {directory}/segments"
            )
    tables = [Path(directory) / "utt2spk"]
    if cut.exists():
        tables.append(cut)
        segments = kaldi_tables.segments(cut)
        for number, (key, segment) in enumerate(segments.items(), 1):
            if segment.recording not in recordings:
                raise CorpusError(
                    f"{cut}, line {number}: utterance {key} is of recording {segment.recording},"
                    f" which {wav} does not list"
                )
    else:
        segments = {key: kaldi_tables.Segment(key, 0.0, None) for key in recordings}
    speakers = _speakers(directory, list(segments), cut if cut.exists() else wav)
    digest = _digest(tables, recordings)
    return Audio(recordings, segments, speakers, extraction, digest)


def librispeech(directory: str, extraction: Extraction) -> Source:
    """Opens LibriSpeech as downloaded: SPEAKER/CHAPTER/*.flac with a SPEAKER-CHAPTER.trans.txt.

    Args:
      directory: a part such as `LibriSpeech/train-clean-100`.
      extraction: options of the features.

    Raises:
      FileNotFoundError: the directory does not exist, or has no such files.
      CorpusError: the utterances in a transcript are not those of the files beside it.
    """
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"directory {directory} does not exist")
    transcripts = sorted(Path(directory).glob("*/*/*.trans.txt"))
    if not transcripts:
        raise FileNotFoundError(
            f"directory {directory} has no SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt. Name a part"
            " of the corpus, such as LibriSpeech/train-clean-100"
        )
    recordings: dict[str, Location] = {}
    speakers: dict[str, str] = {}
    for transcript in transcripts:
        listed = kaldi_tables.read(transcript)
        there = {path.stem for path in transcript.parent.glob("*.flac")}
        for number, name in enumerate(listed, 1):
            if name not in there:
                raise CorpusError(f"{transcript}, line {number}: there is no {name}.flac beside it")
            path = str(transcript.parent / f"{name}.flac")
            recordings[name] = Location(path, 0, slice(None), slice(None), False, path)
            speakers[name] = transcript.parent.parent.name
        if there - listed.keys():
            raise CorpusError(
                f"{transcript.parent / min(there - listed.keys())}.flac is not listed in"
                f" {transcript.name}"
            )
    segments = {key: kaldi_tables.Segment(key, 0.0, None) for key in recordings}
    digest = _digest(transcripts, recordings)
    return Audio(recordings, segments, speakers, extraction, digest)


class SpeakerStats:
    """Statistics that a data directory's `cmvn.scp` names, by speaker or by utterance.

    Args:
      directory: has `cmvn.scp`.
      allow_pipes: whether commands in it are run.

    Raises:
      FileNotFoundError, CorpusError: as `kaldi_directory`.
    """

    def __init__(self, directory: str, allow_pipes: bool = False) -> None:
        self._path = Path(directory) / "cmvn.scp"
        self._locations = _locations(kaldi_tables.read(self._path), self._path, allow_pipes)
        self.digest = _digest([], self._locations)

    def __call__(self, utterance: str, speaker: str) -> np.ndarray:
        """Reads the statistics of the speaker, or else of the utterance.

        Returns:
          float64 [2, dim + 1], in the form of `features.cmvn_stats`.

        Raises:
          CorpusError: there are none, or they are not of this form.
        """
        key = speaker if speaker in self._locations else utterance
        if key not in self._locations:
            raise CorpusError(f"{self._path} has no statistics of speaker {speaker} ({utterance})")
        found = kaldi.read_matrix(self._locations[key], np.float64)
        finite = np.isfinite(found).all()
        if found.shape[0] != 2 or found.shape[1] < 2 or not finite or found[0, -1] <= 0:
            raise CorpusError(
                f"{self._locations[key]}: statistics must be 2 rows of finite numbers with a count"
                f" of frames at the end of the first. Received: {list(found.shape)}"
            )
        return found


def _locations(table: dict[str, str], path: Path, allow_pipes: bool) -> dict[str, Location]:
    return {
        key: kaldi_tables.locate(text, f"{path}, line {number}, {key}", allow_pipes)
        for number, (key, text) in enumerate(table.items(), 1)
    }


def _speakers(directory: str, utterances: list[str], listing: Path) -> dict[str, str]:
    """Returns the speaker of each utterance, from `utt2spk`.

    Args:
      directory: directory of `utt2spk`.
      utterances: the utterances, one from each line of `listing`.
      listing: the table that lists the utterances, for messages.

    Raises:
      CorpusError: an utterance is not in `utt2spk`.
    """
    path = Path(directory) / "utt2spk"
    table = kaldi_tables.read(path)
    for number, utterance in enumerate(utterances, 1):
        if utterance not in table:
            raise CorpusError(f"{listing}, line {number}: utterance {utterance} is not in {path}")
    return {utterance: table[utterance] for utterance in utterances}


def _digest(tables: list[Path], locations: Mapping[str, Location]) -> str:
    """Returns the SHA-256 of tables, and of name, size and content of the files at `locations`.

    The files' directories do not count, so the digest stays the same if the data are moved. If a
    location is a command, its text counts, and not its output.
    """
    digest = hashlib.sha256()
    for table in tables:
        digest.update(table.read_bytes())
    contents: dict[str, str] = {}
    for key, (path, *parts, _, _) in locations.items():
        if path not in contents:
            contents[path] = _content(path) if os.path.isfile(path) else ""
        digest.update(f"{key} {os.path.basename(path)} {contents[path]} {parts}\n".encode())
    return digest.hexdigest()


def _content(path: str) -> str:
    """Returns the size of a file, and the SHA-256 of all of it, or of blocks of a larger file.

    The blocks are at equal distances, from the first to the last one.
    """
    digest = hashlib.sha256()
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return f"{size} {digest.hexdigest()}"
