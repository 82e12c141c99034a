"""Divides utterances into the splits of a corpus; a speaker is held out with all utterances."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from input.index import SPLITS
from input.records import CorpusError
from input.sources import Source


class Stats(Protocol):
    """Statistics of speakers that are given, not computed, such as `sources.SpeakerStats`."""

    digest: str  # SHA-256 of the names, sizes and parts of the files with the statistics

    def __call__(self, utterance: str, speaker: str) -> np.ndarray:
        """Returns the statistics, [2, dim + 1], in the form of `features.cmvn_stats`."""


class Part(NamedTuple):
    """The utterances of a source that make up a split."""

    source: Source
    utterances: list[str]
    stats: Stats | None  # statistics from the source's cmvn.scp; None if they are not given


def divide(
    sources: Mapping[str, Source],
    stats: Mapping[str, Stats],
    validation_share: float,
    test_share: float,
    seed: int,
) -> dict[str, Part]:
    """Returns the utterances of each split.

    A split with a source of its own has all utterances of it. A split without one has those of
    speakers that are drawn at random and held out from training; a share above 0 gives at least one
    speaker.

    Args:
      sources: the source of "train", and perhaps of "validation" and "test".
      stats: statistics of the speakers of each source, if they are given.
      validation_share: share of the training speakers for "validation" without a source.
      test_share: the same for "test".
      seed: seed of the draw.

    Raises:
      CorpusError: there are too few speakers, or an utterance is in two sources.
    """
    seen: dict[str, str] = {}
    for split, source in sources.items():
        for utterance in source.speakers:
            if utterance in seen:
                raise CorpusError(
                    f"utterance {utterance} is in the data of {seen[utterance]} and of {split}"
                )
            seen[utterance] = split
    train = sources["train"].speakers
    names = sorted(set(train.values()))
    order = list(np.random.default_rng(seed).permutation(len(names)))
    owner: dict[str, str] = {}
    for split, share in (("validation", validation_share), ("test", test_share)):
        if split not in sources and share > 0:
            for _ in range(max(1, round(share * len(names)))):
                if len(order) < 2:
                    raise CorpusError(
                        f"the speakers of the training data ({len(names)}) are too few to hold some"
                        f" out for {split}. Give its data with --{split}_data, such as other"
                        f" utterances of theirs, or set --{split}_share=0 to go without {split}"
                    )
                owner[names[order.pop()]] = split
    parts = {}
    for split in SPLITS:
        source = sources.get(split, sources["train"])
        mine = [
            utterance
            for utterance, speaker in source.speakers.items()
            if split in sources and split != "train" or owner.get(speaker, "train") == split
        ]
        parts[split] = Part(source, mine, stats.get(split if split in sources else "train"))
    return parts
