"""Loops that wait for other processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

RETRY_SECONDS = 0.1
_FIRST_PAUSE_SECONDS = 0.01  # length of the first pause; pauses then double up to RETRY_SECONDS
_Result = TypeVar("_Result")
_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


def until(
    deadline: float, say: Callable[[], str], pause: Callable[[float], object] = time.sleep
) -> Iterator[None]:
    """Yields at once, and again after each pause, until the `deadline` (monotonic) has passed.

    `say` returns the names of the awaited processes, for a warning every 30 s; "" for none.
    `pause` waits the given number of seconds, or less.
    """
    log_at = time.monotonic() + _LOG_SECONDS
    seconds = _FIRST_PAUSE_SECONDS
    while True:
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        if now >= log_at and (awaited := say()):
            _log.warning("Waiting for %s.", awaited)
            log_at = now + _LOG_SECONDS
        pause(seconds)
        seconds = min(2.0 * seconds, RETRY_SECONDS)


def tried(
    act: Callable[[], _Result],
    deadline: float,
    awaited: str = "",
    errors: tuple[type[Exception], ...] = (OSError, UnicodeError),
) -> _Result:
    """Calls a function until it succeeds; returns its result, or raises its error at the deadline.

    `awaited` is the name of the awaited process, for a warning every 30 s; "" for none. The
    function is called again after the given `errors`.
    """
    failures: list[Exception] = []
    for _ in until(deadline, lambda: awaited and f"{awaited} ({failures[-1]})"):
        try:
            return act()
        except errors as error:
            failures[:] = [error]
    raise failures[-1]
