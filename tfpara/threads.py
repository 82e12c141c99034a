"""The number of TensorFlow's threads, of which a process with many devices needs two."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

_log = logging.getLogger(__name__)
# If a function spans more devices than this, TensorFlow prepares it in its threads for operations,
# and not in the thread that calls the function.
_MANY_DEVICES = 8


def check_threads(devices: int) -> None:
    """Sets two threads for operations if a process has more than 8 devices and only one thread.

    The training step calls the sync, a function that spans all devices. The step runs in one of
    TensorFlow's threads for operations, and waits there while TensorFlow prepares the sync in
    threads of the same pool. With one thread the step would wait for itself for ever.

    Raises:
        RuntimeError: TensorFlow has already started with one thread.
    """
    if devices <= _MANY_DEVICES or _threads() > 1:
        return
    try:
        tf.config.threading.set_inter_op_parallelism_threads(2)
    except RuntimeError as error:
        raise RuntimeError(
            f"{devices} devices in one process need two threads for operations, and TensorFlow has "
            "started with one, with which the first sync would never end. Make the strategy before "
            "any tensor, or set TF_NUM_INTEROP_THREADS=2."
        ) from error
    _log.warning(
        "tfpara: TensorFlow gets two threads for operations: with one, a sync of %d devices in one "
        "process would never end.",
        devices,
    )


def _threads() -> int:
    """Returns how many threads for operations TensorFlow has, or will have."""
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        wanted = int(os.environ.get("TF_NUM_INTEROP_THREADS", "0"))
    except ValueError:
        wanted = 0
    return configured or wanted or len(os.sched_getaffinity(0))
