"""The record of an elastic run's generations, and what each worker trained by it, row by row.

The chief of an elastic run adds a line to `generations.jsonl` for each generation: its members,
how many syncs were done, and the plan of the data from there on. All that a run has trained follows
from these lines, so that a simulation can train the same. Pure arithmetic on what was read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfpara.elastic.plan import Plan, begin
from tfpara.files import regular

_MOST = 1 << 16  # units that a repetition in a packed list stands for on average, and more


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation, as the record has it.

    Attributes:
        number: counts from 1.
        syncs: done before it.
        plan: who trains what from there on.
        devices: of each worker.
        source: the task whose state others took over where it began; None: nobody did.
        took_over: the tasks that did: those that came, and those that had missed a sync.
        late: of each rank, steps of the open block that count there and that it has not taken.
        founders: workers with which the run was to begin; some may have been lost before.
    """

    number: int
    syncs: int
    plan: Plan
    devices: int
    source: int | None
    took_over: tuple[int, ...]
    late: tuple[int, ...]
    founders: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One step of all places; a place stands for a worker, and for another once that is lost.

    Attributes:
        units: what each place trains; None: nothing.
        workers: their number from here on; None: as before.
        restarted: places that begin, before the step, at the point that the rule has broadcast.
        taken_over: pairs of places, in order: the first takes the second's optimizer and statistics
            before the step.
        skipped: steps before this one that count in the block, and that nobody has taken.
    """

    units: tuple[int | None, ...]
    workers: int | None = None
    restarted: tuple[int, ...] = ()
    taken_over: tuple[tuple[int, int], ...] = ()
    skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a replay is, where an epoch begins.

    Attributes:
        syncs: done so far.
        following: index of the next generation.
        members: tasks by rank.
        places: the place of each task.
        workers: as in `Row`, for the next row; likewise the others.
    """

    syncs: int = 0
    following: int = 0
    members: tuple[int, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    workers: int | None = None
    restarted: tuple[int, ...] = ()
    taken_over: tuple[tuple[int, int], ...] = ()


def read(path: Path) -> list[Generation]:
    """Reads a record.

    Raises:
        ValueError: it is no record, or one of which the beginning is in another run's checkpoint.
    """
    found: list[Generation] = []
    with open(path, "rb", opener=regular) as file:
        lines = file.read().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            own = _generation(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: {repr(error)[:200]}: this is no record of generations. "
                "Give the file generations.jsonl of an elastic run's checkpoints."
            ) from None
        if found and own.number <= found[-1].number:
            raise ValueError(
                f"{path}, line {number}: the run was resumed here from a checkpoint, whose state a "
                "replay does not have. Give it a file with the lines before this one."
            )
        found.append(own)
    if not found or found[0].syncs or found[0].took_over or found[0].plan.epoch:
        raise ValueError(f"{path} does not begin with the first generation of a run.")
    return found


def _generation(told: Any) -> Generation:
    """Returns the generation that a line tells of.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: no chief has written it.
    """
    state = told["plan"]
    _check_length(state)
    plan = Plan.of(state)
    founders = told.get("founders", plan.size)  # earlier versions did not write it
    took_over, late = tuple(told["took_over"]), tuple(told["late"])
    tasks, units = plan.tasks, [*itertools.chain(*plan.carried), *plan.owed]
    numbers = [told["generation"], told["syncs"], told["devices"], founders, plan.epoch, plan.first]
    for each in (*numbers, plan.fit, *tasks, *took_over, *late, *units):
        if type(each) is not int or each < 0:
            raise ValueError(f"{each!r} in place of a whole number")
    if not tasks or len(set(tasks)) < len(tasks):
        raise ValueError("a worker is there twice, or none is")
    if len(plan.carried) != len(tasks) or len(late) != len(tasks):
        raise ValueError("its lists are not of as many workers as it has")
    if len(set(units)) < len(units) or max(units, default=-1) >= plan.first:
        raise ValueError("a unit is dealt out twice")
    if not set(took_over) <= set(tasks) or (took_over and told["source"] not in tasks):
        raise ValueError("a worker takes over, or is taken over, that is not there")
    if not told["devices"] or not founders:
        raise ValueError("it has no replicas")
    return Generation(
        told["generation"],
        told["syncs"],
        plan,
        told["devices"],
        told["source"],
        took_over,
        late,
        founders,
    )


def _check_length(state: Any) -> None:
    """Refuses a plan whose packed lists have more units than lists of their length ever have."""
    entries = [entry for own in (*state["carried"], state["owed"]) for entry in own]
    packed = [(entry[0], entry[2]) for entry in entries if not isinstance(entry, int)]
    units = sum(len(block) * times for block, times in packed)
    if units > _MOST * (1 + len(packed)):
        raise ValueError(f"it lists {units} units")


def unit_of(plan: Plan, rank: int, step: int) -> int:
    """The unit that a rank trains in one of its steps by a plan."""
    listed = plan.carried[rank] + plan.owed_to(rank)
    if step < len(listed):
        return listed[step]
    return plan.first + rank + plan.size * (step - len(listed))


def places_needed(generations: Sequence[Generation]) -> int:
    """The largest number of workers at a time."""
    return max(len(each.plan.tasks) for each in generations)


def rows(
    generations: Sequence[Generation],
    position: Position,
    epoch: int,
    sync_period: int,
    units: int,
) -> tuple[list[Row], Position]:
    """What is trained in an epoch, a step of all places at a time.

    A sync follows each `sync_period` rows, and the last one.

    Args:
        generations: of the run.
        position: where the epoch begins.
        epoch: its number.
        sync_period: τ.
        units: number of those that the epoch has.

    Returns:
        The rows, and where the next epoch begins.
    """
    found: list[Row] = []
    places, members = dict(position.places), position.members
    syncs, following = position.syncs, position.following
    count = places_needed(generations)
    plan, steps = begin(epoch, members), [0] * len(members)
    workers, restarted = position.workers, list(position.restarted)
    pending = list(position.taken_over)
    while True:
        first_rows = [0] * len(members)  # of each rank, at which it begins
        moves: list[tuple[int, tuple[int, int]]] = [(0, pair) for pair in pending]
        while following < len(generations):
            own = generations[following]
            if (own.plan.epoch, own.syncs) > (epoch, syncs):
                break
            following += 1
            members, workers = own.plan.tasks, len(own.plan.tasks)
            places = _places(places, members)
            plan = own.plan if own.plan.epoch == epoch else begin(epoch, members)
            steps = [0] * len(members)
            first_rows = list(own.late)
            for task in own.took_over:
                assert own.source is not None
                rank = members.index(own.source)
                at = own.late[rank] + len(own.plan.carried[rank])
                moves.append((at, (places[task], places[own.source])))
                restarted.append(places[task])
        number = skipped = 0
        block: list[Row] = []
        while number < sync_period:
            own_units: dict[int, int] = {}
            for rank, task in enumerate(members):
                unit = unit_of(plan, rank, steps[rank])
                if number >= first_rows[rank] and unit < units:
                    own_units[places[task]] = unit
                    steps[rank] += 1
            if own_units:
                row = Row(
                    tuple(own_units.get(place) for place in range(count)),
                    workers,
                    tuple(restarted),
                    tuple(pair for at, pair in moves if number - skipped <= at <= number),
                    skipped,
                )
                block.append(row)
                workers, restarted, skipped = None, [], 0
            elif max(first_rows) > number:
                skipped += 1  # those who trained the block's beginning are lost
            else:
                break
            number += 1
        # What is taken over after the last row is the same after the sync.
        last = number - skipped if block else 0
        pending = [pair for at, pair in moves if at >= last]
        found += block
        if block:
            syncs += 1
        elif max(first_rows) == 0:
            break
    placed = tuple(places.items())
    changes = workers, tuple(restarted), tuple(pending)
    return found, Position(syncs, following, members, placed, *changes)


def _places(places: dict[int, int], tasks: Sequence[int]) -> dict[int, int]:
    """Gives tasks that are new the lowest places that are free."""
    kept = {task: place for task, place in places.items() if task in tasks}
    for task in tasks:
        if task not in kept:
            kept[task] = min(set(range(len(tasks))) - set(kept.values()))
    return kept
