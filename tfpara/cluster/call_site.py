"""The place of this process in its script: its current call, and the epoch and step of `fit`.

All workers must take part in the same exchanges, in the same order. So a worker sends a mark with
each exchange: the number of exchanges that its Python code has completed, the purpose of this
exchange, and the epoch. From the marks the workers see whether all have come to the same one
(`are_apart` in tfpara/sync/one_sync/reports.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tfpara.contexts import attributes, context_variable

TEXT_BYTES = 512  # length in bytes of the result of `CallSite.told`


class Purpose(NamedTuple):
    """The purpose of an exchange that all workers must reach."""

    text: str  # where a worker in this exchange is in its script, as in "worker 0 is TEXT"
    # Advice to the user, for the message if some workers do not reach the exchange.
    advice: str = "do the same on every worker, in the same order"
    awaits_data: bool = False  # whether other workers may still have data for this epoch

    @property
    def number(self) -> float:
        """A number ≥ 1 for the mark; two purposes almost surely have different numbers."""
        return 1.0 + zlib.crc32(self.text.encode())


def call(text: str) -> Purpose:
    """Returns the purpose of a function that all workers must call."""
    return Purpose(f"in {text}", f"call {text} on every worker or on none")


def of_callback(name: str) -> Purpose:
    """Returns the purpose of a callback that must be given to `fit` on all workers."""
    return Purpose(f"in {name}", f"give {name} to fit on every worker")


EVALUATE = call("evaluate")
PREDICT = Purpose("in predict")
METRIC = Purpose("reading a metric", "read metrics on every worker or on none")
VARIABLE = Purpose("making a variable", "make models and variables on every worker alike")
FIT_BEGIN = Purpose("at the beginning of fit", "call fit on every worker or on none")
EPOCH_END = Purpose("at the end of an epoch", awaits_data=True)
FIT_END = Purpose(
    "at the end of fit",
    "train as many epochs on every worker; where one alone may want to stop, add "
    "tfpara.callbacks.StopTogether()",
    awaits_data=True,
)
END = Purpose("at the end of its program")
COMPILED_ANEW = Purpose("training a model that was compiled anew")
_STEP = Purpose("", "train the same epochs of the same calls of fit on every worker")
# While `fit` runs in one thread, another thread may read data, and its code may call `predict`, for
# example. This variable has the purposes of such calls, separately for each thread.
_BESIDE_FIT = contextvars.ContextVar[tuple[Purpose, ...]]("tfpara_calls_beside_fit", default=())


class CallSite:
    """The place of this process in its script, updated by functions that Keras and scripts call."""

    def __init__(self) -> None:
        self.failed: Purpose | None = None  # purpose of the last exchange that failed here
        self.fits = 0  # number of running calls of `fit`
        self.met = 0  # number of completed exchanges that Python code, not a graph, has started
        self.in_first_epoch = False  # whether the latest epoch is the first of its call of `fit`
        # The time (`time.monotonic()`) at which this process began to wait in an exchange that
        # Python code has started; 0 if this process does not wait in such an exchange.
        self.began = 0.0
        self._calls: list[Purpose] = []
        self._thread = 0  # the thread in which `fit` runs
        self._epoch = 0  # number of the epoch of fit, from 1 as Keras prints it; 0 before the first
        self._step = 0  # number of the step in this epoch, from 1; 0 before the first step
        self._callbacks = 0
        self._purpose: Purpose | None = None

    @property
    def calls(self) -> Sequence[Purpose]:
        """Purposes of running calls that read data of their own, such as `evaluate`."""
        return _BESIDE_FIT.get() or self._calls

    @property
    def is_before_epochs(self) -> bool:
        """True from the beginning of `fit` to its first epoch; a checkpoint may be read then."""
        return self.fits > 0 and not self._epoch

    @property
    def is_in_callbacks(self) -> bool:
        """True while callbacks of `fit` run."""
        return self._callbacks > 0

    def in_fit(self) -> contextlib.AbstractContextManager[None]:
        """A context in which `fit` runs."""
        return attributes(
            self,
            fits=self.fits + 1,
            _epoch=0,
            _step=0,
            _callbacks=0,
            _thread=threading.get_ident(),
            in_first_epoch=self.in_first_epoch,
        )

    def in_call(self, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """A context in which a call for `purpose` reads data of its own, and maybe metrics."""
        if not self.fits or threading.get_ident() == self._thread:
            return attributes(self, _calls=[*self._calls, purpose])
        return context_variable(_BESIDE_FIT, (*_BESIDE_FIT.get(), purpose))

    def in_callbacks(self) -> contextlib.AbstractContextManager[None]:
        """A context in which callbacks of `fit` run; they may read metrics within an epoch."""
        return attributes(self, _callbacks=self._callbacks + 1)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this process waits in an exchange other than a model's sync."""
        return attributes(self, began=self.began or time.monotonic())

    @contextlib.contextmanager
    def meeting(self, purpose: Purpose) -> Iterator[None]:
        """A context for an exchange of all workers; counts the exchange, unless it fails."""
        with attributes(self, _purpose=purpose):
            try:
                yield
                self.met += 1
            except Exception:
                self.failed = purpose
                raise

    def epoch_begins(self, epoch: int) -> None:
        """Notes that `fit` begins epoch number `epoch`, from 0."""
        self.in_first_epoch = not self._epoch
        self._epoch, self._step = epoch + 1, 0

    def step_begins(self, step: int) -> None:
        """Notes that step number `step`, from 0, of the epoch begins."""
        self._step = step + 1

    def of_metric(self) -> Purpose:
        """Returns the purpose of reading a metric now."""
        if self.calls:
            return self.calls[-1]
        return EPOCH_END if self.fits and not self._callbacks else METRIC

    def of_data(self) -> Purpose:
        """Returns the purpose of an exchange about data that the script gives now."""
        if self.calls:
            return self.calls[-1]
        # Data that the script gives within an epoch are for validation.
        return EVALUATE if self.fits and self._epoch else FIT_BEGIN

    def mark(self) -> tuple[float, float, float]:
        """Returns the numbers that workers compare: exchanges so far, purpose, and epoch.

        The purpose is 0 in a training step. The epoch is 0 outside of `fit`, and −1 in an exchange
        that all workers must reach before any of them continues training.
        """
        purpose = self._purpose
        epoch = self._epoch if self.fits else 0
        if purpose is None:
            return float(self.met), 0.0, float(epoch)
        alone = self.fits and not purpose.awaits_data
        return float(self.met), purpose.number, -1.0 if alone else float(epoch)

    def text(self, in_exchange: bool = True) -> str:
        """Returns the place of this process in words, as in "worker 0 is TEXT".

        `in_exchange`: whether this process is known to be in an exchange with others.
        """
        purpose = self._purpose or (self._calls[-1] if self._calls else None)
        if not self.fits:
            otherwise = "in a training step" if in_exchange else "outside of fit and evaluate"
            return purpose.text if purpose else otherwise
        epoch = f"epoch {self._epoch} of fit" if self._epoch else "the beginning of fit"
        if purpose == FIT_BEGIN:
            return purpose.text
        if purpose == FIT_END:
            return f"{purpose.text}, after epoch {self._epoch}"
        if purpose == EPOCH_END:
            return f"at the end of {epoch}"
        if purpose:
            return f"{purpose.text} ({'in' if self._epoch else 'at'} {epoch})"
        if not self._epoch:
            return f"at {epoch}"
        if self._callbacks:
            return f"in callbacks of {epoch}" + (f", step {self._step}" if self._step else "")
        return f"in {epoch}" + (f" (step {self._step})" if self._step else "")

    def told(self) -> list[int]:
        """Returns this process's place and its fix as `TEXT_BYTES` bytes, for `sentence`."""
        purpose = self._purpose or _STEP
        rank = 0 if not purpose.text else 1 if purpose.awaits_data else 2
        text = "\n".join([str(rank), self.text()[:300], purpose.advice])
        return list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))


def sentence(table: Iterable[Iterable[float]]) -> str:
    """Returns a sentence with each worker's place, and the fix.

    `table`: the bytes of each worker's `CallSite.told`, by rank.
    """
    texts = [bytes(int(number) for number in row).rstrip(b"\0") for row in table]
    said = [text.decode(errors="replace").split("\n") for text in texts]
    where: dict[str, list[str]] = {}
    for rank, (_, text, _) in enumerate(said):
        where.setdefault(text, []).append(str(rank))
    parts: list[str] = []
    for text, ranks in where.items():
        who = f"worker{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        verb = "" if parts else "are " if len(ranks) > 1 else "is "
        parts.append(f"{who} {verb}{text}")
    strongest = max(int(strength) for strength, _, _ in said)
    advice = dict.fromkeys(each[2] for each in said if int(each[0]) == strongest)
    return f"{', '.join(parts)}; {', and '.join(advice)}."
