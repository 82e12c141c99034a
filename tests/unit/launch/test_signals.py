"""The signals that a launcher handles."""

import queue
import signal

import pytest

from tfpara.launch import signals


@pytest.mark.parametrize("sent", [[], [signal.SIGUSR1, signal.SIGTERM]])
def test_a_signal_that_is_repeated_does_not_change_how_a_launcher_ends(sent):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    former = {number: signal.getsignal(number) for number in numbers}
    events = queue.SimpleQueue()
    try:
        with signals.signals_to(events):
            for number in sent:
                signal.raise_signal(number)
        for number in numbers:
            assert signal.getsignal(number) == (signal.SIG_IGN if sent else former[number])
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert [events.get() for _ in sent] == sent and events.empty()
