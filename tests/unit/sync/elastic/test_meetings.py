"""A worker's part in meetings: its step counter, and syncs that are repeated."""

import types

import pytest
import tensorflow as tf

from tfpara.sync.elastic.fit_again import FitAgain
from tfpara.sync.elastic.rejoin import Progress, Rejoin

pytestmark = pytest.mark.latest


class Block:
    """An open block: `steps` counts towards the sync, and `trained` are in the weights."""

    def __init__(self, steps, trained, due=1, period=3):
        self.steps = tf.Variable(steps)
        self.trained, self.period = trained, period
        self._due = due

    def due(self):
        return self._due


def extended(block, **others):
    graph = types.SimpleNamespace(block=block, **others)
    models = types.SimpleNamespace(synchronizers=[types.SimpleNamespace(graph=graph)], steps_seen=0)
    return types.SimpleNamespace(models=models, balance=object())


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


class Lost(tf.errors.UnavailableError):
    def __init__(self):
        super().__init__(None, None, "a worker is lost")


@pytest.mark.parametrize("logs", [None, {"loss": 1.0}])
@pytest.mark.parametrize("fails", ["", "step", "sync"])
def test_a_step_is_over_with_a_sync_that_is_repeated(logs, fails):
    """Also the first one of a worker, whose log is not known: the others go on to callbacks."""
    calls, block = [], Block(1, trained=1)

    def sync(condition):
        calls.append("sync")
        if fails == "sync" and calls.count("sync") == 1:
            raise Lost
        block.steps.assign(0)

    fit = FitAgain.__new__(FitAgain)
    fit._extended = extended(block, sync=sync)
    fit._progress = Progress(sync_may_be_due=fails != "step")
    fit._connection = types.SimpleNamespace(form=types.SimpleNamespace(number=1))
    fit._data = types.SimpleNamespace(reader=lambda iterator: iterator)
    fit._logs = logs

    def meet(failed):
        fit._progress.sync_may_be_due = True

    fit._rejoin = types.SimpleNamespace(meet=meet)

    def step(iterator):
        calls.append("step")
        fit._extended.models.steps_seen += 1
        raise Lost

    assert fit._step_until_trained(step, iter(())) == (logs or {})
    assert calls == {"": ["sync"], "step": ["step", "sync"], "sync": ["sync", "sync"]}[fails]


def test_a_step_that_fails_before_it_has_trained_is_taken_again():
    fit = FitAgain.__new__(FitAgain)
    fit._extended = extended(Block(0, trained=0))
    fit._progress = Progress()
    fit._connection = types.SimpleNamespace(form=types.SimpleNamespace(number=1))
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
