"""The loops that wait for others."""

import time
import types

import pytest

from tfpara.cluster import waiting


@pytest.fixture
def clock(monkeypatch):
    """The time, which each pause moves on."""
    now = [0.0]
    monkeypatch.setattr(waiting, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def pause(seconds):
        now[0] += seconds

    return now, pause


def test_it_ends_at_the_deadline_and_tries_once_at_least(clock):
    now, pause = clock
    assert sum(1 for _ in waiting.until(0.9, str, pause)) == 13  # the first pauses are short
    assert sum(1 for _ in waiting.until(-1.0, str, pause)) == 1


def test_a_line_every_30_s_names_those_awaited(clock, caplog):
    now, pause = clock
    names = ["worker 10", "worker 2"]
    for number, _ in enumerate(waiting.until(95.0, lambda: ", ".join(names), pause)):
        if number == 350:
            del names[0]
        if number == 650:
            names.clear()
    assert [each.message for each in caplog.records] == [
        "Waiting for worker 10, worker 2.",
        "Waiting for worker 2.",
    ]


def test_it_is_tried_until_it_succeeds_or_raises_the_last_error():
    errors = [OSError("first"), UnicodeError("second")]

    def act():
        if errors:
            raise errors.pop(0)
        return "done"

    assert waiting.tried(act, time.monotonic() + 60.0, "chief") == "done"
    errors += [OSError("first"), *(OSError("last") for _ in range(100))]
    with pytest.raises(OSError, match="last"):
        waiting.tried(act, time.monotonic() + 0.05)
    errors[:] = [KeyError()]
    with pytest.raises(KeyError):  # not one after which it is tried again
        waiting.tried(act, time.monotonic() + 60.0)
