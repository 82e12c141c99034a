"""Plans of elastic epochs: by hand, and under random changes of workers."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.record import unit_of
from tfpara.elastic.plan import Plan, begin


def test_a_worker_is_lost_in_its_second_block():
    """Of three, with blocks of two, one has a block in the model, and is lost in the next."""
    plan = begin(4, (0, 1, 2))
    assert [unit_of(plan, 1, step) for step in range(4)] == [1, 4, 7, 10]
    new = plan.after([2, 2, 2], [2, 0, 2], (0, 2))
    assert new == Plan(4, (0, 2), ((6, 9), (8, 11)), (7, 10), 12)
    assert [[unit_of(new, rank, step) for step in range(5)] for rank in range(2)] == [
        [6, 9, 7, 12, 14],
        [8, 11, 10, 13, 15],
    ]
    assert Plan.of(json.loads(json.dumps(new.state()))) == new
    # The next is lost before its open block, two steps of the former plan and one of this, is in.
    assert new.after([0, 0], [3, 0], (0, 5)) == Plan(4, (0, 5), ((6, 9, 7), ()), (8, 10, 11), 12)


def test_owed_units_are_few_progressions():
    plan = Plan(0, (0,), ((),), (1, 4, 7, 10, 11, 20, 30), 40)
    assert plan.ranges(0) == [range(1, 11, 3), range(11, 21, 9), range(30, 31)]
    assert Plan(0, (3, 5), ((), ()), (2, 4, 6, 8), 9).ranges(1) == [range(4, 9, 4)]


class Workers:
    """Workers that train by plans, with a model that says which units it has."""

    def __init__(self, tasks, end):
        self.end, self.model = end, []
        self.plan = begin(0, tasks)
        self.dealt = [0] * len(tasks)
        self.open_units = {task: [] for task in tasks}
        self.next = itertools.count(max(tasks) + 1)

    def step(self, rank):
        open_units = self.open_units[self.plan.tasks[rank]]
        unit = unit_of(self.plan, rank, self.dealt[rank] + len(open_units))
        if unit < self.end:
            open_units.append(unit)
        return unit < self.end

    def sync(self):
        for rank, task in enumerate(self.plan.tasks):
            self.dealt[rank] += len(self.open_units[task])
            self.model += self.open_units[task]
            self.open_units[task] = []

    def change(self, stay, joiners):
        tasks = [task for task, stays in zip(self.plan.tasks, stay, strict=True) if stays]
        steps = [
            len(self.open_units[task]) * stays
            for task, stays in zip(self.plan.tasks, stay, strict=True)
        ]
        tasks += [next(self.next) for _ in range(joiners if tasks else 1)]
        self.plan = self.plan.after(self.dealt, steps, tasks)
        self.open_units = {task: self.open_units.get(task, []) for task in tasks}
        assert [self.open_units[task] for task in tasks] == list(map(list, self.plan.carried))
        self.dealt = [0] * len(tasks)


@given(st.data())
def test_every_unit_is_in_the_model_exactly_once(data):
    """Workers train, sync, are lost and come, at random, up to the end of the data."""
    workers = Workers(range(data.draw(st.integers(1, 5), "size")), data.draw(st.integers(0, 60)))
    for _ in range(data.draw(st.integers(0, 40), "events")):
        event = data.draw(st.sampled_from(["step", "step", "step", "sync", "change"]))
        size = workers.plan.size
        if event == "step":
            workers.step(data.draw(st.integers(0, size - 1)))
        elif event == "sync":
            workers.sync()
        else:
            stay = [data.draw(st.booleans()) for _ in range(size)]
            workers.change(stay, data.draw(st.integers(0, 2)))
        assert workers.plan.in_the_model(workers.dealt) == len(workers.model)
    for rank in range(workers.plan.size):
        while workers.step(rank):
            pass
    workers.sync()
    assert sorted(workers.model) == list(range(workers.end))


@given(st.lists(st.integers(0, 200), unique=True), st.integers(1, 4))
def test_progressions_have_the_same_units_in_the_same_order(units, size):
    plan = Plan(0, tuple(range(size)), ((),) * size, tuple(sorted(units)), 201)
    for rank in range(size):
        assert tuple(itertools.chain(*plan.ranges(rank))) == plan.owed_to(rank)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(1, 50))
        | st.tuples(st.lists(st.integers(0, 99), max_size=9), st.just(1)),
        max_size=4,
    ),
    st.integers(-3, 99),
)
def test_a_plan_is_the_same_after_its_way_as_json(blocks, distance):
    """Whatever repeats in its lists, and however often."""
    units = tuple(
        unit + turn * distance for block, times in blocks for turn in range(times) for unit in block
    )
    plan = Plan(3, (4, 7), (units, ()), tuple(sorted(units)), 5, 1)
    told = json.loads(json.dumps(plan.state()))
    assert Plan.of(told) == plan and Plan.place(told) == plan.at
    # As earlier versions wrote it.
    assert Plan.of({**told, "carried": [list(units), []], "owed": sorted(units)}) == plan


@pytest.mark.parametrize(
    "first,second,uneven",
    [([3], [7], 0), (range(8, 16), range(40, 48), 0), ([1, 5, 9, 11], [3, 4], 1)],
)
def test_the_plans_of_many_workers_are_short(first, second, uneven):
    """All workers tell theirs in one message, also after some were lost twice in a long block."""
    period, plan = 2000, begin(0, range(64))
    for lost, dealt, more in ((first, period, period), (second, 0, 1000)):
        ranks = range(plan.size)
        steps = [len(plan.carried[rank]) + more - uneven * (rank % 5) for rank in ranks]
        steps = [0 if rank in lost else own for rank, own in zip(ranks, steps, strict=True)]
        tasks = [task for rank, task in enumerate(plan.tasks) if rank not in lost]
        plan = plan.after([dealt] * plan.size, steps, tasks)
    assert sum(map(len, plan.carried)) > 100_000
    assert len(json.dumps([plan.state()] * plan.size)) < 1 << 19
    assert Plan.of(plan.state()) == plan
