"""What a failed synchronisation means, in one sentence that names the worker."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

from tfpara.cluster import Cluster
from tfpara.cluster.reach import unreachable

_PROBE_SECONDS = 3.0
_HEAR_SECONDS = 1.0  # for the last words of a worker that is gone
# The cluster with its addresses, where the environment does not tell them.
_known: Cluster | None = None
_timeout: float | None = None  # of the strategy that was made last
# Who was silent, if this process has ended a sync in which another worker was; "" if it is not
# known who.
_silence: str | None = None
_who_is_mute: Callable[[], str] = str  # asks those who answer; "" if it is not known
_advice: Callable[[], str] = str  # on the exchange that has failed here; "" if there is none
_apart = ""  # who is where, if this process has ended an exchange in which not all were
_ended: dict[int, str] = {}  # why, of each worker that has said that it ends; "" if in good order
# Why this one ends, to be told to the others; None if they know as well as this one.
_last_words: str | None = ""
_APART = re.compile(r"apart: (.*?) \(apart\)")
_WHO_WAS_SILENT = re.compile(r"; (.*?) was silent \(timeout_seconds\)")
# Where a function spans several devices and calls another, TensorFlow may say no more than this of
# the failure of the other one.
_CANCELLED = "RecvAsync is cancelled"


def explain(
    error: BaseException, cluster: Cluster, timeout_seconds: float | None = None
) -> str | None:
    """One sentence on an error that a collective raised; None if it is about something else.

    Args:
        error: what `fit` or another call raised.
        cluster: the workers; those that no longer accept a connection are named.
        timeout_seconds: the strategy's; that of the last one if None.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return None
    timeout_seconds = _timeout if timeout_seconds is None else timeout_seconds
    text = str(error.message)
    if not cluster.addresses and _known is not None:
        cluster = _known
    asserted = re.search(
        r"assertion failed: \[((?:replica|workers?) .*?)\](\n| \[Op:|$)", text, re.DOTALL
    )
    if asserted:
        return re.sub(r"\\(.)", r"\1", asserted[1])
    words = f"ollective|RecvBuf|Horovod has|{_CANCELLED}"
    if cluster.num_workers == 1 or not re.search(words, text):
        return None
    apart = _APART.search(text)  # as another worker has found
    if _apart or apart:
        return f"{_apart or (apart[1] if apart else '')}."
    gone = _gone(cluster)
    if gone:
        return f"a sync failed because {gone}."
    # Horovod does not say why it has ended; but a worker that ends closes its port before.
    silent = "Horovod has" in text and bool(cluster.addresses)
    told = _WHO_WAS_SILENT.search(text)  # by the worker that ended the sync
    heard_nothing = "heartbeat timeout" in text  # so says TensorFlow's coordination service
    ended_here = _silence is not None or isinstance(error, tf.errors.DeadlineExceededError)
    if silent or told or ended_here or heard_nothing:
        who = _silence or (told[1] if told else _who_is_mute() or "a worker")
        if heard_nothing and not (told or ended_here):
            return (
                f"a sync failed because {who} was silent for so long that TensorFlow gave it up, "
                "about 10 s, though all still accept connections; start all workers again."
            )
        value = "" if timeout_seconds is None else f"={timeout_seconds:g}"
        return (
            f"a sync failed because {who} was silent for longer than timeout_seconds{value}, "
            "though all still accept connections. If it is only slow (first step, uneven "
            "machines), give a longer timeout_seconds."
        )
    if _CANCELLED in text:
        return None
    return "a sync failed because another worker stopped; its own output says why."


def is_loss(sentence: str | None) -> bool:
    """Whether what `explain` says is that another worker was lost."""
    return sentence is not None and "a sync failed because " in sentence


def note_silence(who: str) -> str:
    """This process is about to end a sync in which another worker was silent for too long.

    Args:
        who: was silent; "" if it is not known.

    Returns:
        What to give TensorFlow as the reason, from which the others know who it was.
    """
    global _silence
    _silence = who
    return f"a sync lasted too long; {who or 'a worker'} was silent (timeout_seconds)"


def note_apart(sentence: str) -> str:
    """As `note_silence`, where all wait in different exchanges: who is where."""
    global _apart
    _apart = sentence
    return f"workers are apart: {sentence} (apart)"


def note_end(rank: int, why: str) -> None:
    """A worker has said that it ends, and why; "" if in good order."""
    _ended.setdefault(rank, why)


def say_last(error: BaseException) -> None:
    """An error ends this process: what the others are told, unless it is theirs, too."""
    global _last_words
    words = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    _last_words = ": ".join(words)[:300]
    behind: BaseException | None = error
    while behind is not None:
        if is_of_tensorflow(behind) or type(behind).__module__.startswith("tfpara."):
            _last_words = None
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)


def last_words() -> str | None:
    """Why this process ends, for the others; "" if in good order, None if they know."""
    return _last_words


def _gone(cluster: Cluster) -> str:
    """Which workers are gone, why as far as it is known, and what to do; "" if none is."""
    names = {rank: cluster.describe(rank) for rank in range(cluster.num_workers)}
    closed = unreachable(cluster, _PROBE_SECONDS)
    if closed and not _ended:
        time.sleep(_HEAR_SECONDS)
    failed = [f"{names[rank]} has failed ({why})" for rank, why in _ended.items() if why]
    gone = [f"{n} is gone" for rank, n in names.items() if n in closed and rank not in _ended]
    again = "start all workers again"
    # Others end because of one that has failed or died, and in good order where they expect it.
    if failed or gone:
        return f"{' and '.join(failed or gone)}; {again}"
    ended = [f"{names[rank]} has ended its program while others went on" for rank in _ended]
    # It went well elsewhere; what this worker alone has come to is what to put right.
    return f"{' and '.join(ended)}; {_advice() or again}" if ended else ""


def know(cluster: Cluster, timeout_seconds: float) -> None:
    """Takes note of what the environment does not tell, for `explain`.

    Args:
        cluster: the workers, with their addresses where these are known.
        timeout_seconds: of the strategy that was made last.
    """
    global _known, _timeout
    _known, _timeout = cluster, timeout_seconds


def ask(who_is_mute: Callable[[], str], advice: Callable[[], str]) -> None:
    """Takes note of whom to ask.

    Args:
        who_is_mute: finds out which workers do not answer; gives their names, or "".
        advice: gives what to do where an exchange of this process has failed, or "".
    """
    global _who_is_mute, _advice
    _who_is_mute, _advice = who_is_mute, advice


def is_of_tensorflow(error: BaseException) -> bool:
    """Whether an operation of TensorFlow has raised the error; TensorFlow is not imported."""
    errors = sys.modules.get("tensorflow.python.framework.errors_impl")
    return errors is not None and isinstance(error, errors.OpError)
