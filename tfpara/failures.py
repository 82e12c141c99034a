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
    if "assertion failed: [replica" in text:
        start = text.index("assertion failed: [") + len("assertion failed: [")
        return re.sub(r"\\(.)", r"\1", text[start:].split("]\n")[0])
    if cluster.num_workers == 1 or not re.search("ollective|RecvBuf|Horovod has", text):
        return None
    gone = unreachable(cluster, _PROBE_SECONDS)
    if gone:
        return f"a sync failed because {' and '.join(gone)} is gone; start all workers again."
    # Horovod does not say why it has ended; but a worker that ends closes its port before.
    silent = "Horovod has" in text and bool(cluster.addresses)
    if silent or isinstance(error, tf.errors.DeadlineExceededError):
        value = "" if timeout_seconds is None else f"={timeout_seconds:g}"
        return (
            f"a sync failed because a worker was silent for longer than timeout_seconds{value}, "
            "though all still accept connections. If one is only slow (first step, uneven "
            "machines), give a longer timeout_seconds."
        )
    return "a sync failed because another worker stopped; its own output says why."


def explain_uncaught(cluster: Cluster, timeout_seconds: float) -> None:
    """Adds the explanation below the traceback of an error that ends the program."""
    global _known
    _known = cluster
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        sentence = explain(error, cluster, timeout_seconds)
        if sentence:
            print(f"tfpara: {sentence}", file=sys.stderr, flush=True)

    sys.excepthook = hook
