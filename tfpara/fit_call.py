"""The calls of `fit` that are under way, and what is to be done where they end.

Keras tells callbacks of the end of a `fit` that goes well, and of nothing where it raises.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Calls(threading.local):
    """Those of a thread, from the outermost to the innermost."""

    def __init__(self) -> None:
        self.ends: list[contextlib.ExitStack] = []


_calls = _Calls()


@contextlib.contextmanager
def under_way() -> Iterator[None]:
    """A call of `fit`; what `at_end` was given in it is called where it ends, however it does."""
    with contextlib.ExitStack() as end:
        _calls.ends.append(end)
        end.callback(_calls.ends.remove, end)
        yield


def at_end(function: Callable[[], None]) -> None:
    """Has a function called where the innermost `fit` of this thread ends, well or not.

    It is called after `on_train_end`, and before the caller of `fit` hears of an error; the one
    that was given last comes first. Outside of `fit`, as where a loop of the user's own calls the
    callbacks, nobody knows the end: it is not called.
    """
    if _calls.ends:
        _calls.ends[-1].callback(function)
