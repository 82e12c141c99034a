"""Speakers: voices of eSpeak NG with a variant, a rate and a pitch, disjoint between splits."""

from typing import NamedTuple

import numpy as np

_RATES = (140, 210)  # words per minute
_PITCHES = (25, 76)


class Speaker(NamedTuple):
    """A synthetic speaker. Each `variant` occurs in one split only."""

    name: str
    voice: str
    variant: str
    rate: int  # words per minute
    pitch: int  # 0 to 99


def draw(
    num_speakers: dict[str, int],
    voices: list[str],
    variants: list[str],
    generator: np.random.Generator,
) -> dict[str, list[Speaker]]:
    """Draws the speakers of each split.

    The variants (which shape the vocal tract) are first divided between the splits, in proportion
    to the splits' numbers of speakers, so that no held-out speaker shares a variant with a training
    speaker. Within a split its variants are used in turn; two speakers of one variant differ in
    rate and pitch.

    Args:
      num_speakers: number of speakers of each split.
      voices: names of eSpeak NG voices to choose from.
      variants: names of eSpeak NG voice variants to divide.
      generator: source of the randomness.

    Raises:
      ValueError: there are fewer variants than splits.
    """
    if len(variants) < len(num_speakers):
        raise ValueError(
            f"need a voice variant for each split. Received {len(variants)} variants for the splits"
            f" {', '.join(num_speakers)}"
        )
    pools = _divide(list(generator.permutation(sorted(variants))), num_speakers)
    return {
        split: [
            _speaker(
                f"{split}-{index:03d}", pools[split][index % len(pools[split])], voices, generator
            )
            for index in range(count)
        ]
        for split, count in num_speakers.items()
    }


def _speaker(name: str, variant: str, voices: list[str], generator: np.random.Generator) -> Speaker:
    return Speaker(
        name,
        str(generator.choice(sorted(voices))),
        str(variant),
        int(generator.integers(*_RATES)),
        int(generator.integers(*_PITCHES)),
    )


def _divide(variants: list[str], num_speakers: dict[str, int]) -> dict[str, list[str]]:
    """Gives one variant to each split, and the rest in proportion to the numbers of speakers."""
    shares = np.array(list(num_speakers.values()), np.float64)
    spare = len(variants) - len(shares)
    ends = np.floor(np.cumsum(shares) / np.sum(shares) * spare).astype(int) + np.arange(
        1, len(shares) + 1
    )
    starts = np.concatenate([[0], ends[:-1]])
    return {
        split: variants[start:end]
        for split, start, end in zip(num_speakers, starts, ends, strict=True)
    }
