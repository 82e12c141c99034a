"""The order of callbacks in a call of `fit`, their memories, and functions called at its end.

Keras calls `on_train_end` if `fit` goes well, and nothing if `fit` raises an error.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfpara.contexts import context_variable
from tfpara.keras_model import array_of
from tfpara.remote_files import RemoteFolder, is_url
from tfpara.strategy import HAS_WEIGHTS, Strategy
from tfpara.typing import Json

# Attributes in which Keras' callbacks remember something from epoch to epoch.
_REMEMBERED = {
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
}


class Order(enum.IntEnum):
    """The place of a callback of tfpara among the others, given by its attribute `order`.

    Callbacks run from the lowest place to the highest, since each needs the work of those before.
    """

    CLOCK = 1  # measures times and counts before other callbacks work
    PERIOD = 2  # sets the sync period
    START = 3  # lets the replicas train without syncs in the first epochs
    RATE = 4  # sets the learning rate
    SCORES = 5  # adds scores to the log
    # 6: callbacks of Keras and of the user, and those of tfpara that have no `order`.
    SAVES = 7  # saves the state, with the work of all callbacks before it
    STOPS = 8  # checks whether another callback wants to stop the training


class Callback(keras.callbacks.Callback):
    """A callback that knows its model's strategy, and acts in the thread that trains."""

    # If this were True, Keras might call the batch hooks later, in another thread.
    async_safe = False

    @property
    def _strategy(self) -> Strategy:
        """The strategy of the model; a plain `Strategy` if it is not tfpara's."""
        return Strategy.of(self.model)


def arranged(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns callbacks, stably sorted by `order`; raises ValueError if two write checkpoints."""
    callbacks = list(callbacks)
    saving = [type(each).__name__ for each in callbacks if _order(each) is Order.SAVES]
    if len(saving) > 1:
        raise ValueError(
            f"fit got {len(saving)} callbacks that write checkpoints, {' and '.join(saving)}, and "
            "a run can resume from those of one: leave the others out."
        )
    return sorted(callbacks, key=_order)


def _order(callback: keras.callbacks.Callback) -> int:
    own = getattr(callback, "order", None)
    return own if isinstance(own, Order) else Order.SCORES + 1


def keep_memories(callbacks: Iterable[keras.callbacks.Callback], strategy: Strategy) -> None:
    """Makes checkpoints keep what Keras' callbacks remember; workers that join receive it, too.

    A memory is found again by the callback's class, score and mode, by the path of a
    `ModelCheckpoint`, and by a number if several callbacks agree in these. If one of these differs,
    a callback begins anew.
    """
    same: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        attributes = next((a for kind, a in _REMEMBERED.items() if isinstance(callback, kind)), ())
        if not attributes or not getattr(callback, "save_best_only", True):
            continue
        each: Any = callback
        # In older versions of Keras, ModelCheckpoint has no attribute `mode`. In these versions its
        # function `monitor_op`, which compares two scores, tells the mode.
        name = f"{type(each).__name__}({each.monitor}, {getattr(each, 'mode', each.monitor_op)})"
        path = os.fspath(getattr(each, "filepath", ""))
        name += f" of {path}" if path else ""
        same[name] += 1
        name += f" {same[name]}" if same[name] > 1 else ""
        strategy.keep_state(name, _Memory(each, attributes, path))
        at_end(functools.partial(strategy.states.pop, name, None))


@dataclasses.dataclass
class _Memory:
    """The memory of a callback of Keras, which lasts from epoch to epoch."""

    callback: Any
    _attributes: tuple[str, ...]
    _path: str

    @property
    def weights(self) -> list[np.ndarray[Any, Any]] | None:
        """The weights that the callback keeps, to restore the model; None if there are none."""
        return getattr(self.callback, "best_weights", None)

    @weights.setter
    def weights(self, weights: list[np.ndarray[Any, Any]]) -> None:
        self.callback.best_weights = weights

    def get_state(self) -> dict[str, Json]:
        found = {name: getattr(self.callback, name, None) for name in self._attributes}
        numbers = {name: number_of(value) for name, value in found.items()}
        numbers = {name: value for name, value in numbers.items() if value is not None}
        return numbers | {HAS_WEIGHTS: self.weights is not None}

    def set_state(self, state: Mapping[str, Json]) -> None:
        if self._path and not _is_written(self._path):
            return  # The file of the best model is gone, so the next model shall count as the best.
        for name in self._attributes:
            if name in state:
                setattr(self.callback, name, state[name])


def number_of(value: Any) -> float | None:
    """Returns a score as Python's number; None if there is none yet, or it is something else."""
    with contextlib.suppress(TypeError, ValueError):  # a user's callback may store any object
        number = array_of(value).item()
        return number if isinstance(number, int | float) else None
    return None


def _is_written(path: str) -> bool:
    """Returns whether there is a file at a path or URL, with any values in its fields {…}."""
    pattern = "*".join(map(glob.escape, re.split(r"\{.*?\}", path)))
    if not is_url(path):
        return bool(glob.glob(pattern))
    folder = path.split("{")[0].rpartition("/")[0]
    try:
        names = RemoteFolder(folder).sizes()
    except (ImportError, OSError, ValueError):
        # tfpara cannot list the folder. But Keras writes to it by other means, so the file may be
        # there.
        return True
    return any(fnmatch.fnmatchcase(f"{folder}/{name}", pattern) for name in names)


# The functions to call at the end of this thread's innermost call of `fit`. None outside of `fit`.
_end: contextvars.ContextVar[contextlib.ExitStack | None] = contextvars.ContextVar(
    "end of fit", default=None
)


@contextlib.contextmanager
def under_way() -> Iterator[None]:
    """A context for a call of `fit`. It ends by calling the functions given to `at_end`."""
    with contextlib.ExitStack() as end:
        end.enter_context(context_variable(_end, end))
        yield


def at_end(function: Callable[[], object]) -> None:
    """Registers a function that is called when the innermost `fit` of this thread ends or fails.

    The call comes after `on_train_end`. The function that was registered last is called first.
    Outside of `fit`, as in a custom loop, no function is called.
    """
    if (end := _end.get()) is not None:
        end.callback(function)
