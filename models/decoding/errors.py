"""Insertions, deletions and substitutions between two sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class PhoneErrors:
    """Errors of recognised sequences, which can be added up.

    Attributes:
        insertions: number of phones that were recognised but not said.
        deletions: number of phones that were said but not recognised.
        substitutions: number of phones that were recognised as another phone.
        reference: number of phones that were said.
    """

    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    reference: int = 0

    def __add__(self, other: PhoneErrors) -> PhoneErrors:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return PhoneErrors(*(a + b for a, b in zip(mine, others, strict=True)))

    @property
    def errors(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """Number of errors for each phone said, in %; it can exceed 100.

        Raises:
            ValueError: no phone was said, so there is no rate.
        """
        if not self.reference:
            raise ValueError("there is no phone error rate of no phones: the reference is empty.")
        return 100.0 * self.errors / self.reference


def count_errors(reference: Sequence[int], recognised: Sequence[int]) -> PhoneErrors:
    """Returns the fewest errors that turn `reference` into `recognised` (Levenshtein's distance).

    Of several ways with equally few errors, the one with the most substitutions counts. It has the
    fewest insertions and deletions, so the three numbers do not depend on how ties are broken.

    Args:
        reference: numbers of the phones that were said.
        recognised: numbers of the phones that were recognised.

    Example:
        >>> count_errors([1, 2, 3, 4], [1, 3, 5, 4, 4])
        PhoneErrors(insertions=1, deletions=0, substitutions=2, reference=4)
    """
    hypothesis = np.asarray(recognised, np.int64)
    # A cost holds two counts: it is `substitute` times the number of errors, plus the number of
    # gaps (insertions and deletions). `divmod` can separate the counts, because the number of gaps
    # is always less than `substitute`.
    substitute = len(reference) + len(hypothesis) + 1
    gap = substitute + 1
    ramp = gap * np.arange(len(hypothesis) + 1)
    row = ramp
    for phone in reference:
        deleted = row + gap
        matched = row[:-1] + substitute * (hypothesis != phone)
        best = np.concatenate([deleted[:1], np.minimum(deleted[1:], matched)])
        # An insertion moves one place along the row and costs `gap`. So the new row[j] is the
        # minimum of best[k] + gap * (j - k) over all k <= j.
        row = np.minimum.accumulate(best - ramp) + ramp
    errors, gaps = divmod(int(row[-1]), substitute)
    surplus = len(hypothesis) - len(reference)
    return PhoneErrors((gaps + surplus) // 2, (gaps - surplus) // 2, errors - gaps, len(reference))
