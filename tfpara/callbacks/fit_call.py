"""The call of `fit` that callbacks work in, and its end.

Keras tells callbacks of the end of a `fit` that goes well, and of nothing where it raises.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras


class FitCall:
    """The call that is under way; made in `on_train_begin`.

    Its list of callbacks is a local variable of `fit`, and goes with it.

    Args:
        at_end: called once where the call has ended in any way, `close` excepted.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        found = None
        for values in _locals(sys._getframe()):
            if isinstance(values.get("self"), keras.callbacks.CallbackList):
                found = values["self"]
                break
        self._list = self._finalizer = None
        if found is not None:
            self._list = weakref.ref(found)
            self._finalizer = weakref.finalize(found, at_end)
            self._finalizer.atexit = False

    def close(self) -> None:
        """The call ends, and those who are at its end have done what there is to do."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def is_over(self, frame: FrameType | None) -> bool:
        """Whether the call has ended; also where its error is still held, and it with that.

        Args:
            frame: the present one of the thread in which the call was.
        """
        if self._list is None:
            return False  # A loop of the user's own calls the callbacks, one by one.
        callbacks = self._list()
        return callbacks is None or not any(
            value is callbacks for values in _locals(frame) for value in values.values()
        )


def _locals(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The local variables of a frame, and of those that have called it."""
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
