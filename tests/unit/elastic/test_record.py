"""What a record of generations says of what was trained, against the plans of the workers."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib import hostile, mutants, record
from tests.lib.random_examples import random_examples
from tfpara import files
from tfpara.elastic.plan import Plan, begin


def line(number=1, syncs=0, plan=None, **others):
    plan = begin(0, [0, 1]) if plan is None else plan
    told = {"generation": number, "syncs": syncs, "plan": plan.state(), "devices": 1}
    told |= {"source": 0 if number > 1 else None, "took_over": [], "late": [0] * plan.size}
    return json.dumps(told | others)


@pytest.mark.parametrize(
    "lines,sentence",
    [
        ([], "does not begin with the first generation"),
        (["[1"], "line 1.*no record of generations"),
        (['{"generation": 1}'], "line 1.*no record of generations"),
        ([line(2, 5)], "does not begin with the first generation"),
        ([line(), line(2, 5), line()], "line 3: the run was resumed here"),
    ],
)
def test_what_is_no_record_is_refused(lines, sentence, tmp_path):
    path = tmp_path / "generations.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=sentence):
        record.read(path)


def test_a_record_of_anything_is_refused_by_file_and_line_or_can_be_replayed(tmp_path):
    plan = Plan(0, (0, 2), ((0, 2, 4), ()), (1, 3, 5), 6)
    second = line(2, 0, plan, took_over=[2], late=[0, 3])
    path = tmp_path / "generations.jsonl"
    cases = [*mutants.of_bytes(f"{line()}\n{second}\n".encode(), 1, mutants.count(300))]
    for told in mutants.of_json(json.loads(second), 2, mutants.count(500)):
        cases.append(line().encode() + b"\n" + mutants.text(told))
    packed = {**begin(0, [0, 1]).state(), "owed": [[[1], 2, 10**9]], "first": 10**10}
    cases.append(f"{line()}\n{json.dumps(json.loads(line(2)) | {'plan': packed})}\n".encode())
    replayed = 0
    for case in cases:
        path.write_bytes(case)
        try:
            with hostile.watched(len(case)):
                generations = record.read(path)
        except ValueError as error:
            assert str(path) in str(error) and len(str(error)) < 1000
            continue
        rows, _ = record.rows(generations, record.Position(), 0, 3, 10)
        units = [unit for row in rows for unit in row.units if unit is not None]
        assert len(set(units)) == len(units) and set(units) <= set(range(10)), case
        replayed += 1
    assert 0 < replayed < len(cases) // 2


def test_lines_are_added_to_the_record_itself_and_not_through_a_link(tmp_path):
    path, other = tmp_path / "generations.jsonl", tmp_path / "other"
    for generation in (1, 2):
        files.append_line(path, line(generation))
    assert [each.number for each in record.read(path)] == [1, 2]
    other.write_text("precious")
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        files.append_line(path, line())
    assert other.read_text() == "precious"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError):
        files.append_line(path, line())
    with pytest.raises(OSError, match="FIFO"):
        record.read(path)


def test_a_loss_and_a_join_by_hand(tmp_path):
    """Two workers of period 3, ten minibatches. Worker 1 is lost in the first block; 2 comes."""
    plan = Plan(0, (0, 2), ((0, 2, 4), ()), (1, 3, 5), 6)
    path = tmp_path / "generations.jsonl"
    path.write_text("\n".join([line(), line(2, 0, plan, took_over=[2], late=[0, 3])]))
    rows, end = record.rows(record.read(path), record.Position(), 0, 3, 10)
    # Worker 2 takes worker 1's place, and its first sync is the one that is repeated.
    assert [row.units for row in rows] == [
        (0, None),
        (2, None),
        (4, None),
        (1, 3),
        (5, 7),
        (6, 9),
        (8, None),
    ]
    assert rows[0].workers == 2 and rows[0].restarted == (1,)
    # It has the optimizer of worker 0 as that is after the block, where its own first step is.
    assert [row.taken_over for row in rows[:4]] == [(), (), (), ((1, 0),)]
    assert end.syncs == 3 and dict(end.places) == {0: 0, 2: 1}


@given(data=st.data(), period=st.integers(1, 4), units=st.integers(1, 40))
@random_examples(200)
def test_every_unit_is_trained_once_whoever_is_lost_or_comes(data, period, units):
    """Random losses and joins at syncs; the workers' own account is the plan of each generation."""
    plan, syncs, task = begin(0, range(data.draw(st.integers(1, 3)))), 0, 3
    generations = [record.Generation(1, 0, plan, 1, None, (), (0,) * plan.size, plan.size)]
    dealt, room = [0] * plan.size, [period] * plan.size
    while plan.first + max(0, sum(dealt)) < units and len(generations) < 6:
        # The block that each has trained where the sync fails, or nothing where all have agreed.
        left = [
            sum(
                record.unit_of(plan, rank, dealt[rank] + step) < units for step in range(room[rank])
            )
            for rank in range(plan.size)
        ]
        # Somebody is let in after a sync; or where a loss makes the others meet.
        closed = sum(dealt) or (not any(plan.carried) and room == [period] * plan.size)
        event = data.draw(st.sampled_from(["sync", "lose", *(["join"] if closed else [])]))
        if event == "sync":
            dealt = [done + more for done, more in zip(dealt, left, strict=True)]
            syncs, room = syncs + any(left), [period] * plan.size
            continue
        lost = data.draw(st.integers(0, plan.size - 1)) if event == "lose" else None
        if lost is not None and plan.size == 1:
            continue
        opened = [0 if rank == lost or event == "join" else left[rank] for rank in range(plan.size)]
        rooms = dict(zip(plan.tasks, room, strict=True))
        stay = [each for rank, each in enumerate(plan.tasks) if rank != lost]
        new = [task] if event == "join" or data.draw(st.booleans()) else []
        task += 1
        plan = plan.after(dealt, opened, [*stay, *new])
        dealt = [0] * plan.size
        # Who has come closes its first block with the others, which have trained most of theirs.
        late = min(max(map(len, plan.carried)), period)
        room = [period - late if own in new else rooms[own] for own in plan.tasks]
        number = len(generations) + 1
        lates = tuple(period - steps for steps in room)
        generations.append(record.Generation(number, syncs, plan, 1, stay[0], tuple(new), lates, 3))
    rows, end = record.rows(generations, record.Position(), 0, period, units)
    trained = [unit for row in rows for unit in row.units if unit is not None]
    assert sorted(trained) == list(range(units))
    assert end.following == len(generations)
    places = record.places_needed(generations)
    assert all(len(row.units) == places for row in rows)
    told = [row.workers for row in rows if row.workers is not None]
    assert [*told, end.workers][-1 if end.workers else -2] == len(generations[-1].plan.tasks)
    # A change where the epoch ends comes with the next epoch's first row.
    more, _ = record.rows(generations, end, 1, period, units)
    assert (more[0].workers, more[0].taken_over) == (end.workers, end.taken_over)
    assert sorted(u for row in more for u in row.units if u is not None) == list(range(units))
