"""The thread that ends syncs in which another worker is silent."""

import contextlib
import threading
import time
import types

import pytest

from tfpara.sync.tensorflow.waits import Waits

pytestmark = pytest.mark.latest


class Syncs:
    """What a watchdog sees, and what it does."""

    def __init__(self):
        self.began = lambda: 0.0
        self.aborted, self.told = [], []
        self._looked = threading.Semaphore(0)

    def waiting_since(self):
        self._looked.release()
        return self.began()

    def looks(self, count):
        """Returns after so many more looks, of which the last may be under way."""
        while self._looked.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._looked.acquire(timeout=60)


def waits_of(syncs):
    """Waits in these syncs alone, of which nobody else hears."""
    waits = Waits(None, None, False)
    waits.since, waits._report = syncs.waiting_since, syncs.told.append
    waits._end = lambda: syncs.aborted.append(1)
    return waits


@pytest.fixture
def syncs():
    syncs = Syncs()
    waits = waits_of(syncs)
    waits.watch(1.0)
    yield syncs
    waits._stop.set()


def test_the_time_of_day_does_not_matter(syncs, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)  # as a step of NTP
    syncs.began = time.monotonic  # a sync that has begun just now, whenever it is looked at
    syncs.looks(4)
    assert syncs.aborted == []


def test_each_sync_that_lasts_too_long_is_ended_once(syncs):
    for ended in (1, 2):  # the second after the group has been made anew
        began = time.monotonic() - 100.0
        syncs.began = lambda began=began: began
        syncs.looks(4)
        assert len(syncs.aborted) == ended
        syncs.began = lambda: 0.0
        syncs.looks(2)
    assert len(syncs.aborted) == 2


def test_a_wait_is_told_of_at_growing_intervals(monkeypatch):
    monkeypatch.setattr("tfpara.sync.tensorflow.waits._TELL_SECONDS", 100.0)
    syncs = Syncs()
    waits = waits_of(syncs)
    began = 4096.0  # a whole number, so that the sums below are exact
    waited = iter([50, 101, 150, 199, 201, 399, 401, 402, 2e6, 2e6])

    class Steps(threading.Event):
        """Each wait is a look later."""

        def wait(self, timeout=None):
            self.now = next(waited, None)
            return self.now is None

    waits._stop = steps = Steps()
    waits.since = lambda: began
    clock = types.SimpleNamespace(monotonic=lambda: began + steps.now)
    monkeypatch.setattr("tfpara.sync.tensorflow.waits.time", clock)
    waits._watch(1e6)
    assert syncs.told == [101, 201, 401]
    assert len(syncs.aborted) == 1


def test_a_wait_that_began_later_does_not_hide_an_older_one():
    place, company = types.SimpleNamespace(), types.SimpleNamespace(steady=contextlib.nullcontext)
    worker = types.SimpleNamespace(call_site=place, company=company)
    for began, begun, since in (
        (9.0, (0.0, 7.0, 5.0), 5.0),
        (9.0, (0.0,), 9.0),
        (0.0, (0.0,), 0.0),
    ):
        place.began = began
        graphs = [types.SimpleNamespace(waiting_since=lambda at=at: at) for at in begun]
        syncs = [types.SimpleNamespace(graph=graph) for graph in graphs]
        assert Waits(None, worker, True, lambda syncs=syncs: syncs).since() == since
