"""The thread that ends syncs in which another worker is silent."""

import threading
import time

import pytest

from tfpara.watchdog import Watchdog


class Syncs:
    """What a watchdog sees, and what it does."""

    def __init__(self):
        self.began = lambda: 0.0
        self.aborted = []
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


@pytest.fixture
def syncs():
    syncs = Syncs()
    watchdog = Watchdog(1.0, syncs.waiting_since, syncs.aborted.append)
    yield syncs
    watchdog.stop()


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
        assert "timeout_seconds=1" in syncs.aborted[-1]
        syncs.began = lambda: 0.0
        syncs.looks(2)
    assert len(syncs.aborted) == 2
