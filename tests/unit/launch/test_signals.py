"""The signals that a launcher handles."""

import queue
import signal

import pytest

from tests.lib.launched import signals_kept
from tfpara.launch import signals


@pytest.mark.parametrize("sent", [[], [signal.SIGUSR1, signal.SIGTERM]])
def test_a_signal_that_is_repeated_does_not_change_how_a_launcher_ends(sent):
    events = queue.SimpleQueue()
    with signals_kept() as former:
        with signals.signals_to(events):
            for number in sent:
                signal.raise_signal(number)
        for number, handler in former.items():
            assert signal.getsignal(number) == (signal.SIG_IGN if sent else handler)
    assert [events.get_nowait() for _ in sent] == sent and events.empty()
