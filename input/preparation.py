"""Makes a corpus of recorded utterances: checks their features and labels, and joins them.

Utterances go one at a time from the source into the shards, in the source's order. Memory holds a
few recordings, and an entry for each utterance.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from input import index, shards
from input.index import SPLITS, CorpusIndex
from input.labels import Labels, Progress
from input.normalisation import CMVN, Normaliser
from input.parts import Part, Stats, divide
from input.records import CorpusError
from input.sources import Problem, Source

SKIP = {
    "labels": "features without labels",
    "features": "labels without features",
    "length": "no frames, or too many or too few labels",
    "nonfinite": "features with NaN or Inf",
    "audio": "recordings that are unreadable, too short or at another sample rate",
}


@dataclass(frozen=True)
class Options:
    """Options for features, labels and splits. Shares are shares of the training speakers.

    Raises:
      ValueError: a value is out of range.
    """

    # Which mean is subtracted: "none", the mean of each "utterance" or "speaker", or a "given" one.
    cmvn: str = "none"
    norm_vars: bool = False  # whether features are also divided by their standard deviation
    deltas: int = 2  # highest order of the deltas that are appended; 0 for none
    # How many labels too many or too few an utterance may have. The right number is
    # ⌈frames / F⌉, if each label stands for F frames.
    max_length_mismatch: int = 0
    # Kinds of problems, from `SKIP`. Utterances with these problems are left out and counted.
    skip: tuple[str, ...] = ()
    validation_share: float = 0.05
    test_share: float = 0.05
    shard_megabytes: float = 64.0
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.validation_share, self.test_share)
        unknown = sorted(set(self.skip) - SKIP.keys())
        for name, value, valid, rule in (
            ("cmvn", self.cmvn, self.cmvn in CMVN, f"one of {', '.join(CMVN)}"),
            ("deltas", self.deltas, 0 <= self.deltas <= 4, "in [0, 4]"),
            (
                "max_length_mismatch",
                self.max_length_mismatch,
                self.max_length_mismatch >= 0,
                ">= 0",
            ),
            ("skip", ",".join(unknown), not unknown, f"some of {', '.join(SKIP)}"),
            ("validation_share", shares[0], 0 <= shares[0] < 1, "in [0, 1)"),
            ("test_share", shares[1], 0 <= shares[1] < 1 - shares[0], "below what validation left"),
            ("shard_megabytes", self.shard_megabytes, self.shard_megabytes > 0, "positive"),
            ("seed", self.seed, self.seed >= 0, ">= 0"),
        ):
            if not valid:
                raise ValueError(f"{name} must be {rule}. Received: {value!r}")


class Prepared(NamedTuple):
    """A corpus, whether it was there already, and the numbers of skipped utterances by problem."""

    corpus: CorpusIndex
    reused: bool
    skipped: Counter[str]


def prepare(
    directory: str,
    sources: Mapping[str, Source],
    labels: Labels,
    options: Options,
    made_with: dict[str, Any],
    stats: Mapping[str, Stats] | None = None,
    progress: Progress = lambda stage, total: None,
) -> Prepared:
    """Makes a corpus in `directory`, or finds it there already.

    Args:
      directory: directory of the corpus. It appears whole or not at all.
      sources: features of "train", and of "validation" and "test". If one of the last two is
        missing, it gets a share of the training speakers.
      labels: classes of the frames of all sources.
      options: options for features, labels and splits.
      made_with: a JSON value with further options. A corpus that is there already is taken if this
        value, `options` and the digests of the sources and the labels are the same.
      stats: statistics of the speakers of each source, for `options.cmvn` "given".
      progress: called with (stage, number of utterances) after each utterance.

    Raises:
      CorpusError: `directory` holds something else, or the sources and labels do not fit together;
        the message names utterance and place, and the option that would skip it.
    """
    made_with = made_with | _made_with(sources, labels, options, stats or {})
    if shards.exists(directory, made_with):
        return Prepared(index.read(directory), True, Counter())
    skipped: Counter[str] = Counter()
    parts = divide(sources, stats or {}, options.validation_share, options.test_share, options.seed)
    parts = _with_labels(parts, labels, options, skipped)
    with shards.CorpusWriter(directory, made_with, labels.class_names) as writer:
        joiner = _Joiner(labels, options, skipped, progress)
        for split in SPLITS:
            writer.start_stream(split, 1e6 * options.shard_megabytes)
            count = 0
            for utterance, frames, classes in joiner.read(split, parts[split]):
                writer.add(frames, classes, utterance, parts[split].source.speakers[utterance])
                count += 1
            if count == 0 and parts[split].utterances:
                raise CorpusError(f"all {len(parts[split].utterances)} {split} utterances failed")
    return Prepared(index.read(directory), False, skipped)


def unlabelled(
    part: Part,
    options: Options,
    skipped: Counter[str],
    progress: Progress = lambda stage, total: None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the ids of utterances without labels, and their features, made as for a corpus.

    Args:
      part: the utterances.
      options: options for features, and `skip`; the others are not used.
      skipped: gets the numbers of skipped utterances by problem.
      progress: called with (stage, number of utterances) after each utterance.

    Raises:
      CorpusError: an utterance has no usable features, and `options.skip` does not allow it.
    """
    normaliser = _normaliser(options, progress)
    normalised = normaliser.of(part, "the data")
    for utterance, frames in part.source.read(part.utterances):
        progress("utterances", len(part.utterances))
        if isinstance(frames, Problem):
            _skip(frames, options, skipped)
        elif not len(frames):
            _skip(Problem("length", f"utterance {utterance} has no frames"), options, skipped)
        else:
            normaliser.check_dim(utterance, frames)
            made = normalised(utterance, frames)
            problem = _not_finite(utterance, made)
            if problem:
                _skip(problem, options, skipped)
            else:
                yield utterance, made


def _not_finite(utterance: str, frames: np.ndarray) -> Problem | None:
    """Returns the problem if cmvn has made features too large for float32; else None."""
    if np.isfinite(frames).all():
        return None
    row, column = np.argwhere(~np.isfinite(frames))[0]
    return Problem(
        "nonfinite", f"utterance {utterance}: NaN or Inf in frame {row}, dimension {column}"
    )


def _normaliser(options: Options, progress: Progress) -> Normaliser:
    return Normaliser(options.cmvn, options.norm_vars, options.deltas, progress)


def _with_labels(
    parts: dict[str, Part], labels: Labels, options: Options, skipped: Counter[str]
) -> dict[str, Part]:
    """Returns the parts without the utterances that have no labels.

    Raises:
      CorpusError: there are such utterances, or labels without an utterance, and `options.skip`
        does not allow it; or a split is left without utterances.
    """
    known = set(labels.ids())
    wanted = [utterance for part in parts.values() for utterance in part.utterances]
    # This check comes before the next one, whose message advises --skip=labels. If a whole split
    # has no labels, that advice would not help, because no utterance of the split would be left.
    for split, part in parts.items():
        if (part.utterances or split == "train") and known.isdisjoint(part.utterances):
            raise CorpusError(
                f"none of the {len(part.utterances)} {split} utterances has labels: --ali or"
                " --phones must name theirs, too"
            )
    without = [utterance for utterance in wanted if utterance not in known]
    if without:
        message = f"{len(without)} of {len(wanted)} utterances have no labels, first {without[0]}"
        _skip(Problem("labels", message), options, skipped, len(without))
    extra = sorted(known.difference(wanted))
    if extra:
        message = f"{len(extra)} of {len(known)} labelled utterances are not in the data, first"
        _skip(Problem("features", f"{message} {extra[0]}"), options, skipped, len(extra))
    kept = {
        split: part._replace(utterances=[u for u in part.utterances if u in known])
        for split, part in parts.items()
    }
    return kept


def _skip(problem: Problem, options: Options, skipped: Counter[str], count: int = 1) -> None:
    if problem.kind not in options.skip:
        raise CorpusError(
            f"{problem.message}. To leave out and count {SKIP[problem.kind]}, add"
            f" --skip={','.join([*options.skip, problem.kind])}"
        )
    skipped[problem.kind] += count


class _Joiner:
    """Reads a part's utterances, normalised, with deltas and with their labels."""

    def __init__(
        self, labels: Labels, options: Options, skipped: Counter[str], progress: Progress
    ) -> None:
        self._labels = labels
        self._options = options
        self._skipped = skipped
        self._progress = progress
        self._normaliser = _normaliser(options, progress)

    def read(self, split: str, part: Part) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yields id, features and labels of each utterance that is not skipped."""
        normalised = self._normaliser.of(part, split)
        for utterance, frames in part.source.read(part.utterances):
            self._progress(f"writing {split}", len(part.utterances))
            if isinstance(frames, Problem):
                _skip(frames, self._options, self._skipped)
                continue
            if len(frames):
                self._normaliser.check_dim(utterance, frames)
            count = self._labels.count(utterance, len(frames))
            problem = self._mismatch(utterance, len(frames), count)
            if not problem:
                frames = normalised(utterance, frames)
                problem = _not_finite(utterance, frames)
            if problem:
                _skip(problem, self._options, self._skipped)
                continue
            length = min(len(frames), count * self._labels.subsampling)
            classes = self._labels.read(utterance, len(frames))
            yield utterance, frames[:length], classes[:length]

    def _mismatch(self, utterance: str, num_frames: int, num_labels: int) -> Problem | None:
        factor = self._labels.subsampling
        surplus = num_labels - -(-num_frames // factor)
        allowed = self._options.max_length_mismatch
        if not num_frames:
            return Problem(
                "length", f"utterance {utterance} has no frames, and {num_labels} labels"
            )
        if abs(surplus) <= allowed and num_labels > 0:
            return None
        return Problem(
            "length",
            f"utterance {utterance} has {num_labels} labels for {num_frames} frames"
            + (f" with --frame_subsampling={factor}" if factor > 1 else "")
            + f", {abs(surplus)} too {'many' if surplus > 0 else 'few'} (--max_length_mismatch is"
            f" {allowed})" + _about_rate(num_frames, num_labels, factor),
        )


def _about_rate(num_frames: int, num_labels: int, factor: int) -> str:
    """Returns a hint if the labels would fit with another factor; else ""."""
    fitting = [other for other in range(1, 10) if -(-num_frames // other) == num_labels]
    if not fitting or factor in fitting:
        return ""
    return f"; they would fit with --frame_subsampling={fitting[0]}"


def _made_with(
    sources: Mapping[str, Source], labels: Labels, options: Options, stats: Mapping[str, Stats]
) -> dict[str, Any]:
    return {
        **asdict(options),
        "skip": sorted(options.skip),
        "num_classes": len(labels.class_names),
        "labels_sha256": labels.digest,
        **({} if labels.silence is None else {"silence": labels.silence}),
        "data_sha256": {split: source.digest for split, source in sources.items()},
        "stats_sha256": {split: found.digest for split, found in stats.items()},
    }
