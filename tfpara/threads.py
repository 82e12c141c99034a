"""TensorFlow's threads, where a process has many devices."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

_log = logging.getLogger(__name__)
# TensorFlow prepares a function of more devices in the threads that run its operations.
_MANY_DEVICES = 8


def check_threads(devices: int) -> None:
    """Sees to a second thread for operations where a process has more than 8 devices.

    The sync is a function of all of them that the training step calls. While it is prepared the
    step waits, in one of the threads that prepare it: one thread alone would wait for itself.

    Raises:
        RuntimeError: TensorFlow has started with one thread.
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
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return configured or wanted or cores
