"""What a failed synchronisation means, in one sentence that names the worker."""

from __future__ import annotations

import re
import sys

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
        timeout_seconds: the strategy's; that of the last one if None.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return None
    timeout_seconds = _timeout if timeout_seconds is None else timeout_seconds
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


def know(cluster: Cluster, timeout_seconds: float) -> None:
    """Takes note of what the environment does not tell, for `explain`.

    Args:
        cluster: the workers, with their addresses where these are known.
        timeout_seconds: of the strategy that was made last.
    """
    global _known, _timeout
    _known, _timeout = cluster, timeout_seconds


def is_of_tensorflow(error: BaseException) -> bool:
    """Whether an operation of TensorFlow has raised the error; TensorFlow is not imported."""
    errors = sys.modules.get("tensorflow.python.framework.errors_impl")
    return errors is not None and isinstance(error, errors.OpError)
