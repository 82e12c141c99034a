"""The GPUs (cards) of this machine, as CUDA's driver lists them; needs no TensorFlow."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def count() -> int:
    """Returns the number of cards that this process may use; 0 without a driver."""
    found = ctypes.c_int()
    told = _told(lambda driver: driver.cuDeviceGetCount(ctypes.byref(found)))
    return found.value if told else 0


def identifier(card: int) -> str | None:
    """Returns an identifier of CUDA's card, unique among all machines; None if there is none."""
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    told = _told(
        lambda driver: (
            driver.cuDeviceGet(ctypes.byref(device), card)
            or driver.cuDeviceGetUuid(ctypes.byref(uuid), device)
        )
    )
    return bytes(uuid).hex() if told else None


def _told(ask: Callable[[ctypes.CDLL], int]) -> bool:
    """Calls `ask` with CUDA's driver; returns whether there is a driver and all calls succeeded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return not (driver.cuInit(0) or ask(driver))
    except (OSError, AttributeError):
        return False
