"""The two placements of the global model: whole on every worker, or one part on every replica.

A *holder* is a device that keeps a part of each bucket. `gather` sums the replicas' buckets and
gives each local holder its parts. `spread` makes whole buckets on every device from the holders'
parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfpara.collectives import Collectives, broadcast_to_devices, sum_on_first_device
from tfpara.planner import ALWAYS_SHARDED_FROM_BYTES, SHARDED_FROM_BYTES

ALL = slice(None)  # all buckets


class Part(NamedTuple):
    """Elements `start` … `stop` of bucket number `bucket`; `stop` may exceed the bucket's end."""

    bucket: int
    start: int
    stop: int


def cut(bucket: tf.Tensor, part: Part) -> tf.Tensor:
    """Returns a part of a bucket, with zeros past the bucket's end."""
    values = tf.convert_to_tensor(bucket)[part.start : part.stop]
    missing = part.stop - part.start - int(values.shape[0])
    return tf.pad(values, [[0, missing]]) if missing else values


class Replicated:
    """Every worker keeps a whole global model, on its lead device, and applies the rule to it."""

    def __init__(
        self, bucket_sizes: Sequence[int], collectives: Collectives, devices: Sequence[str]
    ) -> None:
        self.holders: Sequence[str] = [devices[0]]
        self._sizes = list(bucket_sizes)
        self._collectives = collectives
        self._devices = list(devices)

    def parts(self, holder: int) -> list[Part]:
        """Returns the parts that a local holder keeps, one of each bucket, in order."""
        del holder
        return [Part(k, 0, size) for k, size in enumerate(self._sizes)]

    def gather(self, per_device: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        """Sums each bucket over all replicas; returns each local holder's parts of the sums."""
        sums = sum_on_first_device(per_device, self._devices)
        return [self._collectives.all_reduce(sums, name)]

    def spread(
        self, per_holder: Sequence[Sequence[tf.Tensor]], name: str, buckets: slice = ALL
    ) -> list[list[tf.Tensor]]:
        """Returns for each local device the whole buckets, from the holders' parts."""
        del name, buckets
        return broadcast_to_devices(per_holder[0], self._devices)


class Sharded:
    """Every replica keeps 1/N of each bucket, on its own device: paper 000, section 3.2.

    Buckets are padded with zeros to N equal parts. If the workers' numbers of devices differ (they
    are then `unlike`), all workers have equal parts, and each divides its part equally among its
    devices.
    """

    def __init__(
        self,
        bucket_sizes: Sequence[int],
        collectives: Collectives,
        devices: Sequence[str],
        unlike: Sequence[int] = (),
    ) -> None:
        self.holders: Sequence[str] = list(devices)
        self._sizes = list(bucket_sizes)
        self._collectives = collectives
        of_worker = math.lcm(len(devices), *unlike)
        # A bucket is cut into this many equal pieces. Each device's part consists of `each` pieces.
        self._units = collectives.size * of_worker
        each = of_worker // len(devices)
        # For each bucket: the length of one device's part.
        self._lengths = [-(-size // self._units) * each for size in self._sizes]

    def parts(self, holder: int) -> list[Part]:
        number = self._collectives.rank * len(self.holders) + holder
        return [
            Part(k, number * length, (number + 1) * length)
            for k, length in enumerate(self._lengths)
        ]

    def padded(self, bucket: tf.Tensor) -> tf.Tensor:
        """Returns a bucket with zeros appended, so that it can be cut into the parts."""
        missing = -int(bucket.shape[0]) % self._units
        return tf.pad(bucket, [[0, missing]]) if missing else bucket

    def gather(self, per_device: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        sums = sum_on_first_device(per_device, self.holders)
        with tf.device(self.holders[0]):
            sums = [self.padded(s) for s in sums]
        return self.to_holders(self._collectives.reduce_scatter(sums, name))

    def to_holders(self, parts: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Divides this worker's parts of the buckets among its devices."""
        if len(self.holders) == 1:
            return [list(parts)]
        with tf.device(self.holders[0]):
            pieces = [tf.split(part, len(self.holders)) for part in parts]
        result = []
        for holder, device in enumerate(self.holders):
            with tf.device(device):
                result.append([tf.identity(of_part[holder]) for of_part in pieces])
        return result

    def spread(
        self, per_holder: Sequence[Sequence[tf.Tensor]], name: str, buckets: slice = ALL
    ) -> list[list[tf.Tensor]]:
        mine = self.of_worker(per_holder)
        with tf.device(self.holders[0]):
            whole = []
            for k, (part, size) in enumerate(zip(mine, self._sizes[buckets], strict=True)):
                gathered = self._collectives.all_gather(part, f"{name}/{k}")
                whole.append(tf.reshape(gathered, [-1])[:size])
        return broadcast_to_devices(whole, self.holders)

    def of_worker(self, per_holder: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns this worker's part of each bucket, joined from those of its devices."""
        with tf.device(self.holders[0]):
            return [
                tf.concat(parts, 0) if len(parts) > 1 else parts[0]
                for parts in zip(*per_holder, strict=True)
            ]


Aggregation: TypeAlias = Replicated | Sharded


def choose(
    aggregation: str,
    bucket_sizes: Sequence[int],
    collectives: Collectives,
    devices: Sequence[str],
    unlike: Sequence[int] = (),
) -> Aggregation:
    """Returns the aggregation "replicated", "sharded" or "auto"; for `unlike` see `Sharded`.

    "auto" shards if there are several replicas and the model has `SHARDED_FROM_BYTES` or more, or
    `ALWAYS_SHARDED_FROM_BYTES` where a sharded sync takes longer on slow links.
    """
    if aggregation == "auto":
        several = collectives.size * len(devices) > 1
        least = SHARDED_FROM_BYTES if collectives.scatters_well else ALWAYS_SHARDED_FROM_BYTES
        is_large = 4 * sum(bucket_sizes) >= least
        aggregation = "sharded" if several and is_large else "replicated"
    if aggregation == "sharded":
        return Sharded(bucket_sizes, collectives, devices, unlike)
    return Replicated(bucket_sizes, collectives, devices)
