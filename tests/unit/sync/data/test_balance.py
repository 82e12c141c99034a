"""Blocks by speed: the shares of workers, the order of dealing, and bad arguments."""

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfpara
from tests.lib.random_examples import random_examples
from tfpara.sync.data.balance import Balance, dealing_order, shares_of
from tfpara.sync.momentum_fit import MomentumFit
from tfpara.sync.workers import settings_check

NONE = np.zeros(2, int)


@pytest.mark.parametrize("seconds", [[1.0, 2.0], [3.0, 1.0], [1.0, 1.0, 4.0], [0.1, 0.7, 0.3]])
@pytest.mark.parametrize("period", [1, 5, 11])
def test_no_other_shares_make_a_shorter_block(seconds, period):
    workers = len(seconds)
    shares = shares_of(np.array(seconds), period, np.zeros(workers, int))
    assert shares.sum() == workers * period
    assert shares.min() >= 1 and shares.max() <= 4 * period
    all_of_them = itertools.product(range(1, 4 * period + 1), repeat=workers)
    best = min(
        max(t * s for t, s in zip(each, seconds, strict=True))
        for each in all_of_them
        if sum(each) == workers * period
    )
    assert max(shares * seconds) == pytest.approx(best)


def test_the_shares_by_hand():
    assert shares_of(np.array([1.0, 2.0]), 15, NONE).tolist() == [20, 10]
    assert shares_of(np.array([1.0, 0.0]), 15, NONE).tolist() == [15, 15]  # one is not known
    # The floor of 1: the slow one would take 0.2 minibatches; the ceiling: 4τ = 20 of 25.
    assert shares_of(np.array([1.0, 1000.0]), 3, NONE).tolist() == [5, 1]
    five = np.array([1.0, 99.0, 99.0, 99.0, 99.0])
    assert shares_of(five, 5, np.zeros(5, int)).tolist() == [20, 2, 1, 1, 1]


def test_noise_changes_no_shares():
    former = np.array([20, 20])
    assert shares_of(np.array([0.98, 1.02]), 20, former).tolist() == [20, 20]
    assert shares_of(np.array([0.9, 1.1]), 20, former).tolist() == [22, 18]


def test_the_order_of_dealing():
    assert dealing_order(np.array([3, 3])).tolist() == [0, 1, 0, 1, 0, 1]
    # Places: 0, 1/4, 2/4, 3/4 of the first, 0, 1/2 of the second.
    assert dealing_order(np.array([4, 2])).tolist() == [0, 1, 0, 0, 1, 0]
    assert dealing_order(np.array([0, 2])).tolist() == [1, 1]


def balance_of(workers, rank=0, period=20, record=True):
    return Balance(
        types.SimpleNamespace(balance=record, sync_period=period),
        types.SimpleNamespace(num_workers=workers, replicas=workers, rank=rank),
        types.SimpleNamespace(sync_period=period, set_shares=lambda shares: None),
        lambda value, name: tf.Variable(value),
    )


def blocks_of(seconds_of_blocks, workers=2):
    """Returns the shares in each block of workers with these seconds of a minibatch there.

    Each block may have its steps as well, as `(seconds, steps)`, if they are not those shares.
    """
    balance = balance_of(workers)
    balance.begin_epoch(0, 0, warm=True)
    found = []
    for each in seconds_of_blocks:
        seconds, rest = each if isinstance(each, tuple) else (each, None)
        found.append(balance.get_state()["shares"])
        steps = np.array(found[-1]) if rest is None else np.array(rest)
        balance.reported = steps, steps * seconds
        balance.close()
    return found


def test_speeds_that_change_are_followed_within_two_blocks_without_swinging():
    shares = blocks_of([[1.0, 2.0]] * 3 + [[2.0, 1.0]] * 6)
    assert shares[:4] == [[20, 20], [27, 13], [27, 13], [27, 13]]
    of_first = [first for first, _ in shares[4:]]
    assert of_first == sorted(of_first, reverse=True) and of_first[-1] in (13, 14)
    # A block of speeds 1 and 2 takes 40 / 1.5 at least.
    times = [max(2.0 * first, second) / (40 / 1.5) for first, second in shares[3:]]
    assert times[2] < 1.1 and max(times[3:]) < 1.06


def test_one_long_pause_is_forgotten_within_two_blocks():
    paused = [[1.0, 1.0]] * 3 + [[1.0, 8.0]] + [[1.0, 1.0]] * 3
    shares = blocks_of(paused)
    assert shares[3] == [20, 20] and shares[4][0] > 20
    assert max(abs(first - 20) for first, _ in shares[6:]) <= 2


def test_the_rest_of_an_epoch_counts_if_no_whole_block_came_before():
    rest = ([1.0, 3.0], [1, 1])
    assert blocks_of([[1.0, 1.0], rest, [1.0, 1.0]])[2] == [20, 20]
    assert blocks_of([rest, [1.0, 3.0]])[1] == [30, 10]


def test_noise_of_workers_of_equal_speed_costs_little():
    """Beside equal blocks; times of blocks differ by 5 %."""
    noise = np.exp(0.05 * np.random.default_rng(0).normal(size=(200, 4)))
    shares = np.array(blocks_of(noise.tolist(), workers=4))
    assert (shares * noise).max(1).sum() < 1.008 * (20 * noise).max(1).sum()


def test_a_worker_that_is_new_counts_as_the_slowest():
    assert shares_of(np.array([1.0, 0.0, 3.0]), 7, np.zeros(3, int)).tolist() == [13, 4, 4]


class Run:
    """Workers that train by one table; each has the numbers that its queue gives it."""

    def __init__(self, draw, workers, end):
        self.draw, self.end, self.model = draw, end, []
        self.workers = [balance_of(workers, rank, period=3) for rank in range(workers)]
        for each in self.workers:
            each.begin_epoch(0, 0, warm=True)
        self.open = [[] for _ in self.workers]

    def train(self):
        """Each worker trains some of its block; returns the numbers of steps."""
        for each, own in zip(self.workers, self.open, strict=True):
            for _ in range(self.draw(st.integers(0, int(each.due)))):
                if int(each.due) > len(own) and int(each._queue.size()) > 0:
                    own.append(int(each._queue.dequeue()))
        return np.array([len(own) for own in self.open])

    def sync(self):
        steps = self.train()
        seconds = steps * self.draw(st.sampled_from([1.0, 2.0])) * (1.0 + np.arange(len(steps)))
        self.model += [unit for own in self.open for unit in own]
        for each in self.workers:
            each.reported = steps, seconds
            each.due.assign(each.close())
        self.open = [[] for _ in self.workers]

    def change(self):
        """Some are lost, others come; the first of those that stay tells all where the run is."""
        steps = self.train()
        plan, size = self.workers[0].plan, len(self.workers)
        stay = self.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        stay[self.draw(st.integers(0, size - 1))] = True
        kept = [rank for rank in range(size) if stay[rank]]
        tasks = [plan.tasks[rank] for rank in kept]
        tasks += [max(plan.tasks) + 1] * self.draw(st.booleans())
        new = plan.after([0] * size, [int(n) * s for n, s in zip(steps, stay, strict=True)], tasks)
        state = self.workers[kept[0]].get_state()
        workers = [self.workers[rank] for rank in kept]
        workers += [balance_of(len(tasks), period=3) for _ in range(len(tasks) - len(kept))]
        for rank, each in enumerate(workers):
            each.end()
            each.regroup(state, plan.tasks, new)
            each.begin(new, rank, warm=True)
        self.open = [self.open[rank] for rank in kept] + [[]] * (len(tasks) - len(kept))
        assert [tuple(own) for own in self.open] == list(new.carried)
        self.open = [list(own) for own in self.open]
        self.workers = workers
        if any(new.carried):
            self.sync()


@random_examples(30)
@given(st.data())
def test_every_minibatch_counts_once_where_members_change(data):
    run = Run(data.draw, data.draw(st.integers(1, 3), "workers"), 60)
    for _ in range(data.draw(st.integers(1, 10), "events")):
        run.change() if data.draw(st.booleans(), "change") else run.sync()
        plans = [each.plan for each in run.workers]
        assert all(plan == plans[0] for plan in plans)
        # All that is below the first number that is not dealt out is trained, or assigned.
        known = [*run.model, *plans[0].owed, *itertools.chain(*plans[0].carried)]
        assert sorted(known) == list(range(plans[0].first))
        assert plans[0].in_the_model([0] * plans[0].size) == len(run.model)
        position = run.workers[0].position()
        done = set(range(position["minibatches"])) - set(position["owed"])
        assert done == set(run.model)


def test_what_is_owed_is_trained_first_after_a_resume():
    """As after strategy.synchronize() within a block, which leaves the slow one's minibatches."""
    balance = balance_of(2, period=3)
    balance.begin_epoch(0, 0, warm=True)
    balance.reported = np.array([3, 1]), np.array([3.0, 3.0])
    balance.close()
    position = balance.position()
    assert position == {"minibatches": 5, "owed": [3], "devices": 1}
    resumed = balance_of(2, period=3)
    resumed.resume(4, position)
    resumed.begin_epoch(4, 5, warm=True)
    assert resumed.plan.carried == ((3, 6, 8), (5, 7, 9))
    resumed.begin_epoch(5, 0, warm=True)
    assert resumed.plan.carried == ((0, 2, 4), (1, 3, 5))
    with pytest.raises(ValueError, match="of workers with 2 devices, .* and owes steps of them"):
        resumed.resume(4, {**position, "devices": 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": True}, "overlap=True"),
        ({"fragments": 2}, "fragments=2"),
        (
            {"elastic": tfpara.Elastic(), "balance": [[3]]},
            r"balance=\[\[3\]\] and elastic= contradict each other: a record is of a fixed group",
        ),
        ({"balance": "table"}, "'table' must be True, False, or the record"),
        ({"balance": [[3, 3], [4]]}, r"block 1 of the record is \[4\]"),
        ({"devices": ["CPU:0", "CPU:1"]}, "this run has 2 devices on 1 worker. Start a worker for"),
        ({"rule": tfpara.BMUFAdam()}, "BMUFAdam.* filters moments of equal blocks"),
        ({"balance": [[3, 3], [6, 0]]}, r"block 1 .* \[6, 0\], .* 2 whole numbers of 1 or more"),
        ({"balance": [[3, 3]]}, "the shares of 2 workers in each block, and the run has 1"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        tfpara.PeriodicSyncStrategy(
            **{"rule": tfpara.BMUF(), "sync_period": 3, "balance": True, **options}
        )


def test_unlike_numbers_of_devices(monkeypatch):
    everyone = [{"devices per worker": 1}, {"devices per worker": 3}]
    monkeypatch.setattr(settings_check, "everyones", lambda *_: everyone)
    words = "worker 0 has 1, worker 1 has 3. Where numbers .* start a worker for each device"
    with pytest.raises(tfpara.FingerprintError, match=words):
        settings_check.agree(everyone[0], None, None)


def test_a_simulation_needs_a_record():
    with pytest.raises(ValueError, match="balance=True goes by the speed .* Give the record"):
        tfpara.simulate(2, tfpara.BMUF(), sync_period=3, balance=True)


@pytest.mark.parametrize("kind", ["generator", "steps"])
def test_data_without_numbers(kind, model_of_balance):
    x, y = np.zeros((8, 2), "float32"), np.zeros(8)
    if kind == "generator":
        with pytest.raises(ValueError, match="those of x, a generator, have none"):
            model_of_balance.fit((each for each in [(x, y)]), verbose=0)
    else:
        data = model_of_balance.distribute_strategy.minibatches_by_epoch(
            lambda epoch: batches(x, y)
        )
        with pytest.raises(ValueError, match="steps_per_epoch=3 and balance= contradict"):
            model_of_balance.fit(data, steps_per_epoch=3, verbose=0)


def batches(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


@pytest.fixture
def model_of_balance():
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=3, balance=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def test_in_an_elastic_run_the_period_stays():
    fit = MomentumFit.__new__(MomentumFit)
    fit.settings, fit.sync_period = types.SimpleNamespace(balance=True), 5
    fit._worker = types.SimpleNamespace(changes=True)
    message = "sync_period=7 in place of 5: with elastic= and balance= the period cannot change"
    with pytest.raises(ValueError, match=message):
        fit.set_period(7)
