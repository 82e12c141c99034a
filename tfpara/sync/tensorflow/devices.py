"""The devices of this process, even if TensorFlow also lists those of other processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import tensorflow as tf

from tfpara.cluster import cuda

_log = logging.getLogger(__name__)
# TensorFlow usually prepares a function in the thread that calls it. If the function spans more
# devices than this, TensorFlow prepares it in its threads for operations. One such thread is then
# too few for a sync (see `check_threads`).
_MANY_DEVICES = 8


def named_devices(devices: object) -> list[str]:
    """Returns a worker's devices; TypeError: they are no list."""
    if devices is None:
        return default_devices()
    if isinstance(devices, list | tuple) and all(isinstance(name, str) for name in devices):
        return list(devices)
    raise TypeError(
        f'devices={devices!r} must be a list of names, such as ["GPU:0", "GPU:1"], or None for all '
        "GPUs of this process."
    )


def default_devices() -> list[str]:
    """Returns all logical GPUs, else the first CPU device, also before TensorFlow has started."""
    return [f"GPU:{number}" for number in range(len(cards_of_gpus()))] or ["CPU:0"]


def cards_of_gpus() -> list[int]:
    """Returns for each logical GPU of this process the number that its card has in CUDA."""
    found = []
    for card in tf.config.get_visible_devices("GPU"):
        logical = tf.config.get_logical_device_configuration(card) or [None]
        found += [int(card.name.rpartition(":")[2])] * len(logical)
    return found


def checked_devices(wanted: Sequence[str], listed: Sequence[str], worker: str) -> list[str]:
    """Returns the full names of a worker's devices; ValueError: this process lacks one of them.

    Args:
        wanted: the devices, such as "GPU:0".
        listed: all logical devices that TensorFlow lists, maybe of all processes.
        worker: this worker's device name, such as "/job:worker/task:1"; "" if it is alone.
    """
    here, specs = tf.DeviceSpec.from_string(worker), map(tf.DeviceSpec.from_string, listed)
    own = [s for s in specs if not worker or (s.job, s.task) == (here.job, here.task)]
    available = [f"{s.device_type}:{s.device_index}" for s in own]
    if not wanted or any(device.upper() not in available for device in wanted):
        raise ValueError(
            f"devices={list(wanted)!r}: this process has {available}. Logical "
            "CPU devices are made by tf.config.set_logical_device_configuration."
        )
    return [f"{worker}/device:{device.upper()}" for device in wanted]


def card_of(gpu: str) -> str | None:
    """Returns a worldwide identifier of a logical GPU's card; None if CUDA's driver tells none."""
    return cuda.identifier(cards_of_gpus()[int(gpu.rpartition(":")[2])])


def check_threads(devices: int) -> None:
    """Sets two threads for operations if a process has more than 8 devices and only one thread.

    The training step calls the sync, a function that spans all devices. The step runs in one of
    TensorFlow's threads for operations, and waits there while TensorFlow prepares the sync in
    threads of the same pool. With one thread the step would wait for itself for ever.
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
