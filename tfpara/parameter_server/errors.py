"""The errors of asynchronous training, with a cause and a fix in place of TensorFlow's messages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfpara.parameter_server.shard import NOT_FINITE

# If a process is lost, an error of TensorFlow may come before the chief notices the loss. So after
# such an error the chief waits, at most this long, to see whether a process is lost.
_SETTLE_SECONDS = 3.0


class DivergedError(RuntimeError):
    """A push was not applied: a weight of the global model would be infinite or NaN."""


class ChunkError(RuntimeError):
    """A chunk of the data could not be trained on. The message names the chunk and the cause."""


def check_read(weights: Sequence[keras.Variable], read: Sequence[tf.Variable]) -> None:
    """Raises ValueError for a weight of the chief's model that a worker's step reads.

    A step reads what the worker has pulled. But a method with the decorator `tf.function` keeps a
    graph from an earlier call, which reads the variable itself. So the weight would not be trained.
    """
    for weight in weights:
        if any(variable is weight.value for variable in read):
            raise ValueError(
                f"a layer reads the weight {weight.path!r} in a tf.function of its own, so workers "
                "could not train this weight. Remove the decorator @tf.function from the layer: "
                "workers run graphs in any case."
            )


def explained(error: tf.errors.OpError, check: Callable[[], None]) -> Exception:
    """Returns the error to raise in place of `error`, which a graph on a worker has raised.

    `check` raises a RuntimeError if the run cannot continue.
    """
    found = re.search(re.escape(NOT_FINITE) + r" '([^']*)'", error.message)
    if found:
        return DivergedError(
            f"{NOT_FINITE} {found[1]!r}. The push was not applied, and checkpoints before it are "
            "finite. Lower the learning rate, the sync_period or the number of workers."
        )
    failure = lost(error, check)
    if failure is not None:
        return failure
    chunk = getattr(error, "chunk", None)
    where = "a chunk" if chunk is None else f"chunk {chunk[1]} of epoch {chunk[0]}"
    return ChunkError(f"{where} could not be trained: {_cause(error.message)}")


def lost(error: BaseException, check: Callable[[], None]) -> Exception | None:
    """Returns the error that ends the run, if a lost process has caused TensorFlow's `error`.

    Returns None for other errors, and if the run can continue. Waits up to 3 seconds for `check` to
    raise a RuntimeError, as it does if the run cannot continue.
    """
    if isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            try:
                check()
            except RuntimeError as failure:
                return failure
            time.sleep(0.05)
    return None


def _cause(message: str) -> str:
    """Returns the cause in an error's message: its last line, without names of graph nodes."""
    remote = re.search(r'"?grpc_message"?:"((?:[^"\\]|\\.)*)"', message)
    if remote:
        message = remote[1].replace("\\n", "\n").replace("\\t", "\t")
    message = re.sub(r"\{\{function_node [^}]*\}\}|\[\[\{\{node.*|\[Op:.*", "", message)
    # If several operations failed, TensorFlow numbers their errors, and the message's last line is
    # only a count.
    numbered = re.search(r"^\s*\(\d+\) (?!CANCELLED)[A-Z_]+: *(\S.*)", message, re.MULTILINE)
    message = numbered[1] if numbered else message
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else message


def check_sums(metrics: Sequence[keras.Variable]) -> None:
    """Raises ValueError for a metric whose state cannot be summed over workers."""
    for variable in metrics:
        if variable.dtype == "bool":
            raise ValueError(
                f"the metric's variable {variable.path!r} is of bool, and parameter servers add up "
                'what workers push. Count in numbers: add_variable(..., dtype="int32").'
            )
        if variable.aggregation != "sum":
            raise ValueError(
                f"the metric's variable {variable.path!r} has aggregation="
                f"{variable.aggregation!r}, but parameter servers add up what workers push, from 0 "
                "in each push. Leave the metric out of compile(), and compute it on the chief, in "
                "a callback; or write it with sums."
            )
