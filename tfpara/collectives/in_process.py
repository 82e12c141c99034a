"""Collectives within one process: several devices of one worker, and a group of one worker."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Loopback:
    """The group of one worker: every operation is the identity."""

    size = 1
    rank = 0
    scatters_well = True

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        del name
        return list(buffers)

    reduce_scatter = all_reduce

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        del name
        return rows

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        del name
        return buffer[tf.newaxis]

    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        del name
        return buffer

    def barrier(self, name: str) -> None:
        del name


def sum_on_first_device(
    per_device: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Sums the devices' lists of buffers on the first device, so that a worker sends one copy."""
    if len(per_device) == 1:
        return list(per_device[0])
    with tf.device(devices[0]):
        return [tf.add_n(list(parts)) for parts in zip(*per_device, strict=True)]


def broadcast_to_devices(
    buffers: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Copies buffers to every device; returns a list of buffers for each device."""
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append([tf.identity(buffer) for buffer in buffers])
    return copies
