"""The order of callbacks in a call of `fit`, their scores, and functions called at its end.

Keras calls `on_train_end` if `fit` goes well, and nothing if it raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfpara.strategy import Strategy
from tfpara.typing import Json


class Order(enum.IntEnum):
    """The place of a callback of tfpara among the others, given by its attribute `order`.

    Callbacks run from the lowest place to the highest: each needs what those before it do.
    """

    CLOCK = 1  # measures what others do
    PERIOD = 2  # sets the sync period
    START = 3  # prints what the replicas start from
    RATE = 4
    SCORES = 5  # adds scores to the log
    # Callbacks of Keras and of the user, and those of tfpara without an order, run here.
    SAVES = 7  # saves the work of all callbacks before it
    STOPS = 8  # checks whether another callback wants to stop


def arranged(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns the callbacks sorted by `order`; those of equal order stay as they are given."""

    def order(callback: keras.callbacks.Callback) -> int:
        own = getattr(callback, "order", None)
        return own if isinstance(own, Order) else Order.SCORES + 1

    return sorted(callbacks, key=order)


def keep_best_score(callback: keras.callbacks.Callback, strategy: Strategy) -> None:
    """Makes checkpoints keep the best score of `ModelCheckpoint(save_best_only=True)`.

    Without it the first epoch of a resumed run would overwrite a better model.
    """
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only:
        path = os.fspath(callback.filepath)
        strategy.keep_state(f"best {callback.monitor} of {path}", _BestScore(callback))


@dataclasses.dataclass
class _BestScore:
    callback: Any

    def get_state(self) -> Json:
        best = self.callback.best  # None before the first score
        return None if best is None else float(best)

    def set_state(self, state: Json) -> None:
        self.callback.best = state


class _Calls(threading.local):
    """The calls of `fit` that a thread is in, from the outermost to the innermost."""

    def __init__(self) -> None:
        self.ends: list[contextlib.ExitStack] = []


_calls = _Calls()


@contextlib.contextmanager
def under_way() -> Iterator[None]:
    """A context for a call of `fit`; its end, well or not, calls the functions of `at_end`."""
    with contextlib.ExitStack() as end:
        _calls.ends.append(end)
        end.callback(_calls.ends.remove, end)
        yield


def at_end(function: Callable[[], None]) -> None:
    """Registers a function that is called when the innermost `fit` of this thread ends.

    It is called after `on_train_end`, and before the caller of `fit` gets an error. The function
    that was registered last is called first. Outside of `fit`, as in a custom loop, the end of
    training is not known, and no function is called.
    """
    if _calls.ends:
        _calls.ends[-1].callback(function)
