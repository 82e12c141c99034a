"""A worker's part in meetings: its step counter, and syncs that are repeated."""

import types

import pytest
import tensorflow as tf

from tfpara.sync.elastic.fit_again import FitAgain
from tfpara.sync.elastic.rejoin import Progress, Rejoin
from tfpara.sync.one_sync.synchronizer import Synchronizer

pytestmark = pytest.mark.latest


class Block:
    """An open block: `steps` counts towards the sync, and `trained` are in the weights."""

    def __init__(self, steps, trained, due=1, period=3):
        self.steps = tf.Variable(steps)
        self.trained, self.period = trained, period
        self._due = due

    def due(self):
        return self._due


def extended(block, balance=True, **others):
    synchronizer = Synchronizer.__new__(Synchronizer)
    synchronizer.graph = types.SimpleNamespace(block=block, **others)
    synchronizer._overlap = synchronizer._device_period = None
    models = types.SimpleNamespace(synchronizers=[synchronizer], steps_seen=0)
    return types.SimpleNamespace(models=models, balance=object() if balance else None)


def test_a_block_that_was_shortened_is_whole_again_where_nobody_has_trained_any_more():
    """One was lost with 2 steps in the block, then those are that had trained the rest of it."""
    rejoin = Rejoin.__new__(Rejoin)
    rejoin.connection = types.SimpleNamespace(rank=0)
    for opened, steps in (([0, 2], 2), ([0], 0)):
        reports = [{"syncs": 4, "open": own, "counted": own} for own in opened]
        if steps == 2:
            block = Block(0, trained=0)
            rejoin.extended = extended(block)
        rejoin._shorten_block(reports, [False] * len(reports), 4)
        assert int(block.steps) == steps


def test_who_comes_into_a_block_closes_it_with_the_slowest():
    """Rank 1 has come earlier in the block: 9 of its 12 steps were of the others."""
    reports = [
        {"syncs": 4, "open": 14, "counted": 14},
        {"syncs": 4, "open": 3, "counted": 12},
        None,
        {"syncs": 3, "open": 1, "counted": 1},
    ]
    rejoin = Rejoin.__new__(Rejoin)
    for rank, steps in enumerate((14, 12, 12, 12)):
        rejoin.connection = types.SimpleNamespace(rank=rank)
        own = reports[rank] or {"open": 0, "counted": 0}
        block = Block(own["counted"], own["open"], period=20)
        rejoin.extended = extended(block, balance=False)
        missed = rejoin._shorten_block(reports, [False, False, True, True], 4)
        assert missed == [0, 9, 12, 12] and int(block.steps) == steps


@pytest.mark.parametrize("lost,balance,meets", [({2}, False, 1), ({2}, True, 0), ((), False, 0)])
def test_the_loss_of_a_worker_is_met_at_the_next_step(lost, balance, meets):
    calls = []
    fit = FitAgain.__new__(FitAgain)
    fit._extended = extended(Block(1, trained=1), balance, agreed=lambda: (0, True))
    fit._extended.models.synchronizers[0].graph.request = calls.append
    line = types.SimpleNamespace(lost=frozenset(lost), wanted=False)
    fit._connection = types.SimpleNamespace(line=line, say_leaving=lambda: None)
    fit._rejoin = types.SimpleNamespace(last="", meet=lambda failed: calls.append(failed))
    fit._meet_if_needed()
    assert calls == [True] * meets


class Lost(tf.errors.UnavailableError):
    def __init__(self):
        super().__init__(None, None, "a worker is lost")


@pytest.mark.parametrize("logs", [None, {"loss": 1.0}])
@pytest.mark.parametrize("fails", ["", "step", "sync", "none"])
def test_a_step_is_over_with_a_sync_that_is_repeated(logs, fails):
    """Also the first one of a worker, whose log is not known: the others go on to callbacks."""
    calls, block = [], Block(0 if fails == "none" else 1, trained=1)

    def sync(condition):
        calls.append("sync")
        if fails == "sync" and calls.count("sync") == 1:
            raise Lost
        block.steps.assign(0)

    fit = FitAgain.__new__(FitAgain)
    fit._extended = extended(block, sync=sync)
    fit._progress = Progress(sync_may_be_due=fails in ("", "sync"))
    fit._connection = types.SimpleNamespace(form=types.SimpleNamespace(number=1))
    fit._step_began_in = 1
    fit._data = types.SimpleNamespace(reader=lambda iterator: iterator)
    fit._logs = logs

    def meet(failed):
        fit._progress.sync_may_be_due = True

    fit._rejoin = types.SimpleNamespace(meet=meet)

    def step(iterator):
        calls.append("step")
        fit._extended.models.steps_seen += 1
        block.steps.assign(1)
        if fails == "none":
            return logs
        raise Lost

    assert fit._step_until_trained(step, iter(())) == (logs or {})
    assert (
        calls
        == {
            "": ["sync"],
            "step": ["step", "sync"],
            "sync": ["sync", "sync"],
            "none": ["step", "sync"],
        }[fails]
    )


def test_a_step_that_fails_before_it_has_trained_is_taken_again():
    fit = FitAgain.__new__(FitAgain)
    fit._extended = extended(Block(0, trained=0))
    fit._progress = Progress()
    fit._connection = types.SimpleNamespace(form=types.SimpleNamespace(number=1))
    fit._step_began_in = 1
    fit._data = types.SimpleNamespace(reader=lambda iterator: iterator)
    fit._logs, calls = None, []
    fit._rejoin = types.SimpleNamespace(meet=lambda failed: calls.append("meet"))

    def step(iterator):
        calls.append("step")
        if len(calls) == 1:
            raise Lost
        return {"loss": 1.0}

    assert fit._step_until_trained(step, iter(())) == {"loss": 1.0}
    assert calls == ["step", "meet", "step"]


def test_the_next_sync_is_prepared_once_in_each_generation_that_has_taken_a_step():
    """But not if it comes right after that step, which leaves no time."""
    block, prepared = Block(0, trained=1, due=3), []
    fit = FitAgain.__new__(FitAgain)
    fit._extended = extended(
        block,
        prepare=lambda: prepared.append((fit._connection.form.number, int(block.steps))),
        sync=lambda running: block.steps.assign(0),
    )
    fit._progress, fit._logs, fit._step_began_in = Progress(), None, 1
    fit._connection = types.SimpleNamespace(form=types.SimpleNamespace(number=1))
    fit._data = types.SimpleNamespace(reader=lambda iterator: iterator)

    def step(iterator):
        block.steps.assign_add(1)

    for generation in (1, 1, 2, 3, 3, 3, 4, 4):
        fit._connection.form.number = generation
        fit._step_until_trained(step, iter(()))
    assert prepared == [(3, 1), (4, 1)]
