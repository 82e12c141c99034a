"""What a failed synchronisation means, in one sentence that names the worker."""

from __future__ import annotations

import re
import sys
from types import TracebackType

from tfpara.cluster import Cluster
from tfpara.reach import unreachable

_PROBE_SECONDS = 3.0
# The cluster with its addresses, where the environment does not tell them.
_known: Cluster | None = None
_timeout: float | None = None  # of the strategy that was made last
# Whether this process has ended a sync in which another worker was silent.
_silence = False
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
        timeout_seconds: the strategy's, where it is known.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error.message)
    if not cluster.addresses and _known is not None:
        cluster = _known
    asserted = re.search(r"assertion failed: \[(replica .*?)\](\n| \[Op:|$)", text, re.DOTALL)
    if asserted:
        return re.sub(r"\\(.)", r"\1", asserted[1])
    words = f"ollective|RecvBuf|Horovod has|{_CANCELLED}"
    if cluster.num_workers == 1 or not re.search(words, text):
        return None
    gone = unreachable(cluster, _PROBE_SECONDS)
    if gone:
        return f"a sync failed because {' and '.join(gone)} is gone; start all workers again."
    # Horovod does not say why it has ended; but a worker that ends closes its port before.
    silent = "Horovod has" in text and bool(cluster.addresses)
    if silent or _silence or isinstance(error, tf.errors.DeadlineExceededError):
        value = "" if timeout_seconds is None else f"={timeout_seconds:g}"
        return (
            f"a sync failed because a worker was silent for longer than timeout_seconds{value}, "
            "though all still accept connections. If one is only slow (first step, uneven "
            "machines), give a longer timeout_seconds."
        )
    if _CANCELLED in text:
        return None
    return "a sync failed because another worker stopped; its own output says why."


def note_silence() -> None:
    """This process is about to end a sync in which another worker was silent for too long."""
    global _silence
    _silence = True


def explain_uncaught(cluster: Cluster, timeout_seconds: float) -> None:
    """Adds the explanation below the traceback of an error that ends the program, once."""
    global _known, _timeout
    hooked, _known, _timeout = _known is not None, cluster, timeout_seconds
    if hooked:
        return
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        sentence = explain(error, _known or cluster, _timeout)
        if sentence:
            print(f"tfpara: {sentence}", file=sys.stderr, flush=True)

    sys.excepthook = hook
