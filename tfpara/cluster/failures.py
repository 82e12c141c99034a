"""Explains a failed synchronisation in one sentence that names the worker that caused it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfpara.cluster import ALONE, Cluster, label, parent

_PROBE_SECONDS = 3.0
_HEAR_SECONDS = 1.0  # wait for the last message of a worker that is gone
_known = ALONE  # the cluster, with its addresses, of the strategy that was made last
_timeout: float | None = None  # timeout_seconds of the strategy that was made last
# The names of the workers whose silence made this process end a sync: "" if they are unknown, None
# if this process has not ended a sync because of silence.
_silence: str | None = None
_who_is_mute: Callable[[], str] = str  # returns the names of silent workers; "" if unknown
# Returns the fix for the exchange that failed in this process; "" if there is none.
_advice: Callable[[], str] = str
# If this process has ended an exchange because workers waited in different exchanges: the place of
# each worker, in words. Else "".
_apart = ""
# The error of each worker that has reported its end, by rank; "" if it ended without an error.
_ended: dict[int, str] = {}
# The error that ends this process, to be told to the other workers. It is "" if there is no error,
# and None if the other workers get the same error without being told.
_last_words: str | None = ""
_APART = re.compile(r"apart: (.*?) \(apart\)")
_WHO_WAS_SILENT = re.compile(r"; (.*?) was silent \(timeout_seconds\)")
_ASSERTED = re.compile(
    r"assertion failed: \[((?:replicas?|workers?) .*?)\](\n| \[Op:|$)", re.DOTALL
)
# If a function of a graph runs on several devices, and another function that it calls fails,
# TensorFlow may report only this text. So an error with this text may have any cause.
_CANCELLED = "RecvAsync is cancelled"
_NAMES = re.compile(r"(?:^|and )(chief|worker \d+)\b")
_OF_A_SYNC = re.compile(f"ollective|RecvBuf|Horovod has|{_CANCELLED}")


class Explanation(NamedTuple):
    """The explanation of an error."""

    sentence: str  # the cause of the error, and the fix
    is_loss: bool = False  # whether another worker was lost
    lost: Sequence[str] = ()  # the known names of lost workers, in the launcher's form ("worker 1")


def explain(error: BaseException) -> Explanation | None:
    """Returns the explanation of an error that a collective raised; None for any other error."""
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error.message)
    asserted = _ASSERTED.search(text)
    if asserted:
        return Explanation(re.sub(r"\\(.)", r"\1", asserted[1]))
    if _known.num_workers == 1 or not _OF_A_SYNC.search(text):
        return None
    told = _APART.search(text)  # not None if another worker has found the workers apart
    if apart := _apart or (told[1] if told else ""):
        return Explanation(f"{apart}.")
    gone = _gone(_known)
    if gone:
        return gone
    # Horovod's error states no cause. `_gone` has found that all workers' ports are still open, so
    # no worker has ended. Therefore a worker must be silent.
    silent = "Horovod has" in text and bool(_known.addresses)
    # `told` is not None if another worker has ended the sync and has named the silent worker.
    told = _WHO_WAS_SILENT.search(text)
    heard_nothing = "heartbeat timeout" in text  # an error of TensorFlow's coordination service
    ended_here = _silence is not None or isinstance(error, tf.errors.DeadlineExceededError)
    if silent or told or ended_here or heard_nothing:
        who = _silence or (told[1] if told else _who_is_mute() or "a worker")
        value = "" if _timeout is None else f"={_timeout:g}"
        sentence = (
            f"a sync failed because {who} was silent for longer than timeout_seconds{value}, "
            "though all still accept connections. If it is only slow (first step, uneven "
            "machines), give a longer timeout_seconds."
        )
        return Explanation(sentence, True, _NAMES.findall(who))
    if _CANCELLED in text:
        return None
    where = "tfpara-launch's last line says which one, and why"
    if not parent.is_there():
        where = "its own output says why, unless it was killed"
    sentence = f"a sync failed because another worker stopped; {where}."
    return Explanation(sentence, True)


def note_silence(who: str) -> str:
    """Notes who was silent ("": unknown); returns the reason that TensorFlow tells the others."""
    global _silence
    _silence = who
    return f"a sync lasted too long; {who or 'a worker'} was silent (timeout_seconds)"


def note_apart(sentence: str) -> str:
    """Notes where workers wait that have come apart; returns the reason, as `note_silence` does."""
    global _apart
    _apart = sentence
    return f"workers are apart: {sentence} (apart)"


def note_end(rank: int, why: str) -> None:
    """Notes that a worker has reported its end; `why` is its error, or "" if there was none."""
    _ended.setdefault(rank, why)


def say_last(error: BaseException) -> None:
    """Stores the error that ends this process, to tell the others unless they get it, too."""
    global _last_words
    words = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    _last_words = ": ".join(words)[:300]
    behind: BaseException | None = error
    while behind is not None:
        if is_of_tensorflow(behind) or type(behind).__module__.startswith("tfpara."):
            _last_words = None
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)


def last_words() -> str | None:
    """Returns the error that ends this process; "" if none, None if the others have the same."""
    return _last_words


def _gone(cluster: Cluster) -> Explanation | None:
    """Explains the error by workers that have failed, died or ended; None if there are none."""
    names = {rank: cluster.describe(rank) for rank in range(cluster.num_workers)}
    closed = cluster.unreachable(_PROBE_SECONDS)
    if closed and not _ended:
        time.sleep(_HEAR_SECONDS)
    failed = {rank: f"{names[rank]} has failed ({why})" for rank, why in _ended.items() if why}
    gone = {r: f"{name} is gone" for r, name in names.items() if name in closed and r not in _ended}
    # Workers that have failed are the cause. If none has failed, the cause is the workers that are
    # gone without a report. All other workers ended because of these, so they are not named.
    lost = failed or gone
    sentence = f"a sync failed because {' and '.join(lost.values())}; start all workers again."
    if not lost:
        lost = {
            rank: f"{names[rank]} has ended its program while others went on" for rank in _ended
        }
        # No worker has failed. The workers in `_ended` came to the end of their programs, while
        # this process waited for them in an exchange. What to change depends on that exchange.
        advice = _advice() or "start all workers again"
        sentence = f"a sync failed because {' and '.join(lost.values())}; {advice}."
    if not lost:
        return None
    return Explanation(sentence, True, [label(rank) for rank in lost])


def know(cluster: Cluster, timeout_seconds: float) -> None:
    """Stores, for `explain`, the cluster with its addresses, and the timeout of a strategy."""
    global _known, _timeout
    _known, _timeout = cluster, timeout_seconds


def ask(who_is_mute: Callable[[], str], advice: Callable[[], str]) -> None:
    """Stores functions that `explain` calls: `_who_is_mute` and `_advice`, described above."""
    global _who_is_mute, _advice
    _who_is_mute, _advice = who_is_mute, advice


def is_of_tensorflow(error: BaseException) -> bool:
    """Returns whether TensorFlow has raised the error, without importing TensorFlow."""
    errors = sys.modules.get("tensorflow.python.framework.errors_impl")
    return errors is not None and isinstance(error, errors.OpError)
