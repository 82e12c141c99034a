"""Who keeps the global model: every worker a whole one, or every replica its part.

A *holder* is a device that keeps a part of each bucket. `gather` sums the replicas' buckets and
hands each local holder its parts; `spread` is the way back, from the holders' parts to whole
buckets on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from tfpara.collectives import Collectives, broadcast_to_devices, sum_on_first_device

# Below this, in bytes of the model, the whole state of a worker is small beside its activations,
# and the messages of a sync too short to be worth cutting.
SHARDED_FROM_BYTES = 16 << 20
ALL = slice(None)  # buckets


class Part(NamedTuple):
    """Elements `start` … `stop` of bucket number `bucket`, of which `stop` may pass the end."""

    bucket: int
    start: int
    stop: int


def cut(bucket: tf.Tensor, part: Part) -> tf.Tensor:
    """A part of a bucket, with zeros past its end."""
    values = tf.convert_to_tensor(bucket)[part.start : part.stop]
    missing = part.stop - part.start - int(values.shape[0])
    return tf.pad(values, [[0, missing]]) if missing else values


class Aggregation(Protocol):
    """Where the parts of the global state are, and how they travel."""

    @property
    def holders(self) -> Sequence[str]:
        """The local devices that keep parts."""

    def parts(self, holder: int) -> list[Part]:
        """What a local holder keeps: one part of each bucket, in order."""

    def gather(self, per_device: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        """Sums over all replicas of each bucket: for each holder its parts."""

    def spread(
        self, per_holder: Sequence[Sequence[tf.Tensor]], name: str, buckets: slice = ALL
    ) -> list[list[tf.Tensor]]:
        """For each local device the whole buckets, of which the holders have the parts."""


class Replicated:
    """Every worker keeps a whole global model, on its lead device, and applies the rule to it.

    Args:
        bucket_sizes: lengths of the buckets, in elements.
        collectives: between the workers' lead devices.
        devices: of this worker, the lead device first.
    """

    def __init__(
        self, bucket_sizes: Sequence[int], collectives: Collectives, devices: Sequence[str]
    ) -> None:
        self.holders: Sequence[str] = [devices[0]]
        self._sizes = list(bucket_sizes)
        self._collectives = collectives
        self._devices = list(devices)

    def parts(self, holder: int) -> list[Part]:
        """The whole of each bucket."""
        del holder
        return [Part(k, 0, size) for k, size in enumerate(self._sizes)]

    def gather(self, per_device: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        """All-reduce."""
        sums = sum_on_first_device(per_device, self._devices)
        return [self._collectives.all_reduce(sums, name)]

    def spread(
        self, per_holder: Sequence[Sequence[tf.Tensor]], name: str, buckets: slice = ALL
    ) -> list[list[tf.Tensor]]:
        """Copies to the worker's other devices."""
        del name, buckets
        return broadcast_to_devices(per_holder[0], self._devices)


class Sharded:
    """Every replica keeps 1/N of each bucket, on its own device: paper 000, section 3.2.

    A sync is reduce-scatter, the rule on the own parts, all-gather. Buckets are padded with zeros
    to N equal parts.

    Args:
        bucket_sizes: lengths of the buckets, in elements.
        collectives: between the workers' lead devices.
        devices: of this worker, the lead device first; as many on every worker.
    """

    def __init__(
        self, bucket_sizes: Sequence[int], collectives: Collectives, devices: Sequence[str]
    ) -> None:
        self.holders: Sequence[str] = list(devices)
        self._sizes = list(bucket_sizes)
        self._collectives = collectives
        self._replicas = collectives.size * len(devices)
        self._lengths = [-(-size // self._replicas) for size in self._sizes]  # of one part

    def parts(self, holder: int) -> list[Part]:
        """The part of each bucket that this worker's replica `holder` keeps."""
        replica = self._collectives.rank * len(self.holders) + holder
        return [
            Part(k, replica * length, (replica + 1) * length)
            for k, length in enumerate(self._lengths)
        ]

    def padded(self, bucket: tf.Tensor) -> tf.Tensor:
        """A bucket with zeros behind it, so that it has N equal parts."""
        missing = -int(bucket.shape[0]) % self._replicas
        return tf.pad(bucket, [[0, missing]]) if missing else bucket

    def gather(self, per_device: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        """Reduce-scatter: over this worker's devices, the workers, and to the devices again."""
        sums = sum_on_first_device(per_device, self.holders)
        with tf.device(self.holders[0]):
            sums = [self.padded(s) for s in sums]
        return self.to_holders(self._collectives.reduce_scatter(sums, name))

    def to_holders(self, parts: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """This worker's parts of the buckets, cut into those of its devices."""
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
        """All-gather."""
        mine = self.of_worker(per_holder)
        with tf.device(self.holders[0]):
            whole = []
            for k, (part, size) in enumerate(zip(mine, self._sizes[buckets], strict=True)):
                gathered = self._collectives.all_gather(part, f"{name}/{k}")
                whole.append(tf.reshape(gathered, [-1])[:size])
        return broadcast_to_devices(whole, self.holders)

    def of_worker(self, per_holder: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """This worker's part of each bucket, of which its devices have the pieces."""
        with tf.device(self.holders[0]):
            return [
                tf.concat(parts, 0) if len(parts) > 1 else parts[0]
                for parts in zip(*per_holder, strict=True)
            ]


def choose(
    aggregation: str, bucket_sizes: Sequence[int], collectives: Collectives, devices: Sequence[str]
) -> Aggregation:
    """The aggregation that is asked for.

    "auto" shards where there are several replicas and the model has `SHARDED_FROM_BYTES` or more,
    unless their link would carry one direction after the other.
    """
    if aggregation == "auto":
        several = collectives.size * len(devices) > 1
        large = 4 * sum(bucket_sizes) >= SHARDED_FROM_BYTES
        by_turns = collectives.size == 2 and not collectives.full_duplex
        aggregation = "sharded" if several and large and not by_turns else "replicated"
    kind = Sharded if aggregation == "sharded" else Replicated
    return kind(bucket_sizes, collectives, devices)
