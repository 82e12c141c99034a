"""The plan by which a changing group of workers trains the data of an epoch.

The data of an epoch are *units*, numbered from 0; a unit is a minibatch for each replica of a
worker. Every unit goes into the model exactly once, even if workers are lost: the units that a lost
worker trained after its last sync are assigned again. All workers compute the same plan from the
same reports, by pure arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Limits of the search in `_packed` for a list U of units that is repeated.
_WIDEST = 64  # longest list U that is tried, in units
_ENOUGH = 64  # if a list U is repeated at least this many times, longer lists are not tried


@dataclasses.dataclass(frozen=True)
class Plan:
    """The division of an epoch's units among n workers.

    The worker of rank r has the units `carried[r]` in its open block when the plan begins. Then it
    trains `owed[r::n]`, and then `first + r`, `first + r + n`, and so on to the end of the epoch.
    These are its *steps*, counted from 0 with the carried ones.
    """

    epoch: int  # number of the epoch, from 0
    tasks: tuple[int, ...]  # the task numbers of the workers, by rank
    # For each rank: the units that its worker has trained, and that are not in the model yet.
    carried: tuple[tuple[int, ...], ...]
    owed: tuple[int, ...] = ()  # units below `first` that are not trained yet, in rising order
    first: int = 0  # when the plan begins, neither this unit nor any later one is trained
    fit: int = 0  # number of the epoch's call of `fit`, from 0

    @property
    def at(self) -> tuple[int, int]:
        """The call of `fit` and the epoch, in the order in which they follow each other."""
        return self.fit, self.epoch

    @staticmethod
    def place(state: Mapping[str, Any]) -> tuple[int, int]:
        """Returns (fit, epoch) of a plan given as its `state()`."""
        return state.get("fit", 0), state["epoch"]

    @property
    def size(self) -> int:
        return len(self.tasks)

    def owed_to(self, rank: int) -> tuple[int, ...]:
        """Returns the owed units of a rank."""
        return self.owed[rank :: self.size]

    def ranges(self, rank: int) -> list[range]:
        """Returns the owed units of a rank as few progressions, in their order."""
        found: list[range] = []
        for unit in self.owed_to(rank):
            last = found[-1] if found else range(0)
            step = unit - last.start if len(last) == 1 else last.step
            if last and unit == last[-1] + step:
                found[-1] = range(last.start, unit + 1, step)
            else:
                found.append(range(unit, unit + 1))
        return found

    def after(self, dealt: Sequence[int], open_steps: Sequence[int], tasks: Sequence[int]) -> Plan:
        """Returns the plan of the next generation, whose workers are `tasks`.

        `dealt` has for each rank the number of its steps that are in the model, and `open_steps`
        how many further steps are in its open block; 0 if it is lost.
        """
        trained = [sum(pair) for pair in zip(dealt, open_steps, strict=True)]
        listed = [self.carried[rank] + self.owed_to(rank) for rank in range(self.size)]
        # From `first` on, the units are taken in rows with one unit for each rank. `row` is the
        # first row of which no unit is trained; untrained units of earlier rows become owed.
        row = max(0, *(done - len(known) for done, known in zip(trained, listed, strict=True)))
        first = self.first + row * self.size
        owed, carried = [], {}
        for rank, task in enumerate(self.tasks):
            units = [*listed[rank], *range(self.first + rank, first, self.size)]
            owed += units[trained[rank] :]
            carried[task] = tuple(units[dealt[rank] : trained[rank]])
        return Plan(
            self.epoch,
            tuple(tasks),
            tuple(carried.get(task, ()) for task in tasks),
            tuple(sorted(owed)),
            first,
            self.fit,
        )

    def in_the_model(self, dealt: Sequence[int]) -> int:
        """Returns the number of units in the model; `dealt` as for `after`."""
        return self.first - len(self.owed) - sum(map(len, self.carried)) + sum(dealt)

    def state(self) -> dict[str, Any]:
        """Returns the plan for JSON, in a short form: workers exchange it at meetings."""
        lists = {"carried": [_packed(own) for own in self.carried], "owed": _packed(self.owed)}
        return {**vars(self), **lists}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Plan:
        """Returns the plan of a `state()`."""
        carried = tuple(map(_unpacked, state["carried"]))
        tasks, owed = tuple(state["tasks"]), _unpacked(state["owed"])
        return cls(state["epoch"], tasks, carried, owed, state["first"], state.get("fit", 0))


def _packed(units: Sequence[int]) -> list[Any]:
    """Returns units as a short list for JSON.

    An entry is a unit, or [U, d, n]: the list U of units, n times, each time with d more added.
    """
    found: list[Any] = []
    at = 0
    while at < len(units):
        longest, width = 1, 1  # the number of units in the best entry so far, and in its list U
        for wide in range(1, min(_WIDEST, (len(units) - at) // 2) + 1):
            distance, end = units[at + wide] - units[at], at + wide
            while end < len(units) and units[end] - units[end - wide] == distance:
                end += 1
            times = (end - at) // wide
            if times > 1 and times * wide - wide > longest - width:
                longest, width = times * wide, wide
            if longest >= _ENOUGH * width:
                break
        block, times = list(units[at : at + width]), longest // width
        found.append([block, units[at + width] - units[at], times] if times > 1 else block[0])
        at += longest
    return found


def _unpacked(entries: Sequence[Any]) -> tuple[int, ...]:
    """Returns the units in a list of `_packed`."""
    found: list[int] = []
    for entry in entries:
        block, distance, times = ([entry], 0, 1) if isinstance(entry, int) else entry
        found += [unit + turn * distance for turn in range(times) for unit in block]
    return tuple(found)


def begin(
    epoch: int, tasks: Sequence[int], fit: int = 0, first: int = 0, owed: Sequence[int] = ()
) -> Plan:
    """Returns the plan of an epoch that begins: the units `owed`, then those from `first` on."""
    return Plan(epoch, tuple(tasks), ((),) * len(tasks), tuple(owed), first, fit)
