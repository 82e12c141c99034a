"""The settings of an elastic run."""

from __future__ import annotations

import dataclasses
import os

from tfpara.elastic.meeting import ADDRESS
from tfpara.whole_number import checked_seconds, checked_whole


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Settings for training that continues while workers die, leave and join.

    Args:
        min_workers: fewest workers with which training continues.
        max_workers: largest number of workers; a further worker waits until another is lost. None:
            any number.
        grace_seconds: how long fewer than `min_workers` wait for other workers before they end.
        rule_follows: whether the hyper-parameters that a rule derives from the number of replicas
            (η of `BMUF()`, α of `EASGD()`) follow that number; if False they keep the values of the
            first workers. Values that you give never change.
        silence_seconds: silence after which a worker counts as lost. The end of a worker's process
            is noticed at once.

    Raises:
        ValueError: a number outside its range.
    """

    min_workers: int = 2
    max_workers: int | None = None
    grace_seconds: float = 30.0
    silence_seconds: float = 10.0
    rule_follows: bool = True

    def __post_init__(self) -> None:
        for name, value in (("min_workers", self.min_workers), ("max_workers", self.max_workers)):
            if value is not None:
                object.__setattr__(self, name, checked_whole(name, value))
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers={self.max_workers} is less than min_workers={self.min_workers}. Give "
                "as many, or more."
            )
        for name in ("grace_seconds", "silence_seconds"):
            checked_seconds(name, getattr(self, name))


def meeting_point() -> str:
    """Returns "host:port" of the meeting point of elastic runs; "" if it is not set."""
    return os.environ.get(ADDRESS, "")
