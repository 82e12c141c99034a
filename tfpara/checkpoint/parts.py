"""Values for a run on any number of replicas, from a checkpoint of any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfpara.checkpoint.store import CheckpointError
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Array


class Parts:
    """The parts of a checkpoint, one written by each worker, with a reader for each.

    The run that wrote it had so many `replicas`; `sizes` are the lengths of its global buckets.
    """

    def __init__(self, readers: Sequence[Any], replicas: int, sizes: Sequence[int]) -> None:
        self._readers = readers
        self._replicas = replicas
        self._sizes = sizes
        maps = [reader.get_variable_to_shape_map() for reader in readers]
        self._shapes = {name: shape for shapes in maps for name, shape in shapes.items()}
        self._reader_of = {
            name: reader for reader, shapes in zip(readers, maps, strict=True) for name in shapes
        }
        there = {name.split("/")[0] for name in self._reader_of if name.startswith("replica-")}
        if len(there) != replicas:
            raise CheckpointError(
                f"the checkpoint has {len(there)} replicas, and its manifest says {replicas}."
            )

    def tensor(self, name: str) -> Any:
        """Returns a tensor of any part."""
        if name not in self._reader_of:
            raise _lacks(name)
        return self._reader_of[name].get_tensor(name)

    def value(self, slot: Slot, strategy: PeriodicSyncStrategy) -> Array | None:
        """Returns a slot's value, None if it keeps its own; raises CheckpointError without one."""
        if slot.kind is Kind.HOLDER:
            field, start = slot.name.rsplit("/", 1)
            return self.piece(field, int(start), slot.variable.shape, slot.absent)
        get: Callable[[int, str], Any]
        if slot.replica is None:
            owner, owners = strategy.worker_index, strategy.num_workers
            former, get = len(self._readers), self.of_worker
        else:
            owner, owners = strategy.local_replica_ids[slot.replica], strategy.num_replicas
            former, get = self._replicas, self._of_replica
        if slot.kind in (Kind.REPLICA, Kind.BLOCK) and strategy.num_replicas != self._replicas:
            return None
        if slot.kind is Kind.RANDOM and owner >= former:
            return None
        sources: Sequence[int] = [owner % former]
        if slot.kind is Kind.SUM:
            sources = range(owner, former, owners)
        elif slot.kind is Kind.MEAN and owners != former:
            sources = range(former)
        values = [get(source, slot.name) for source in sources]
        if slot.kind is Kind.REPLICA and np.shape(values[0]) != tuple(slot.variable.shape):
            # The workers of the former run had another number of devices, so the value in the
            # checkpoint has another shape. The slot keeps its present value.
            return None
        if any(value is None for value in values):
            if slot.absent is None:
                raise _lacks(slot.name)
            return tf.fill(slot.variable.shape, tf.cast(slot.absent, slot.variable.dtype))
        if slot.kind is Kind.SUM:
            return sum(values, start=tf.zeros(slot.variable.shape, slot.variable.dtype))
        if len(values) > 1:
            return tf.cast(np.mean(values, 0, np.float64), slot.variable.dtype)
        return values[0]

    def of_worker(self, rank: int, name: str) -> Any:
        """Returns a tensor of a worker's part; None if the part lacks it."""
        reader = self._readers[rank]
        return reader.get_tensor(name) if reader.has_tensor(name) else None

    def shapes(self, group: str) -> dict[str, list[int]]:
        """Returns the shapes of the model's variables of a group, such as "optimizer", by name."""
        begin = f"replica-0/{group}/"
        numbers = sorted(int(n.removeprefix(begin)) for n in self._shapes if n.startswith(begin))
        return {f"{group}/{k}": list(self._shapes[f"{begin}{k}"]) for k in numbers}

    def of_replicas(self, name: str) -> list[Any]:
        """Returns a tensor of each replica of the former run; None for a replica that lacks it."""
        return [self._of_replica(replica, name) for replica in range(self._replicas)]

    def _of_replica(self, replica: int, name: str) -> Any:
        key = f"replica-{replica}/{name}"
        return self._reader_of[key].get_tensor(key) if key in self._reader_of else None

    def piece(
        self, field: str, begin: int, shape: Sequence[int], absent: float | None = None
    ) -> NDArray[Any]:
        """Returns a piece of a bucket of the global state, from the pieces that workers wrote.

        `field` is "global/FIELD/BUCKET". Beyond the end of the bucket the piece has zeros. If the
        field is a scalar, this returns its value; if no part has it, `absent`.
        """
        names = [name for name in self._shapes if name.startswith(f"{field}/")]
        starts = sorted((int(name.rsplit("/", 1)[1]), name) for name in names)
        if not starts:
            if absent is None:
                raise _lacks(f"{field}/{begin}")
            return np.full(shape, absent)
        if not self._shapes[starts[0][1]]:  # a scalar, whose value is the same in all parts
            return self.tensor(starts[0][1])
        end = min(begin + shape[0], self._sizes[int(field.rsplit("/", 1)[1])])
        found = []
        for at, name in starts:
            first, last = max(at, begin), min(at + self._shapes[name][0], end)
            if first < last:
                found.append(self.tensor(name)[first - at : last - at])
        value = np.concatenate(found) if found else np.zeros(0)
        return np.pad(value, (0, shape[0] - len(value)))


def _lacks(name: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint lacks {name}, which this model has.")
