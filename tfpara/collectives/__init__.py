"""Collective operations on flat buffers between workers, and between the devices of one worker.

A backend has the operations of `Collectives`. Buffers are one-dimensional tensors. Every worker
must give an operation the same `name`, and buffers of the same shapes.
"""

from tfpara.collectives.horovod import HorovodCollectives
from tfpara.collectives.in_process import Loopback, broadcast_to_devices, sum_on_first_device
from tfpara.collectives.interface import Collectives
from tfpara.collectives.ring import TensorFlowCollectives

__all__ = [
    "Collectives",
    "HorovodCollectives",
    "Loopback",
    "TensorFlowCollectives",
    "broadcast_to_devices",
    "sum_on_first_device",
]
