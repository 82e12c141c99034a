"""TensorFlow's own collectives: a ring over gRPC on any device, or NCCL between GPUs."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

from tfpara.collectives.members import Members, order_of

# TensorFlow's own strategies choose group keys by counting up from small numbers. This key is
# larger, so none of their groups has the same key.
_GROUP_KEY = 0x74660000

# Dtypes that TensorFlow cannot broadcast, each mapped to one that carries its values without loss.
_CARRIED_AS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}


class TensorFlowCollectives:
    """The `Collectives` between the lead devices of the workers of a TF_CONFIG cluster.

    An operation's key is derived from its name. So it may run any number of times, eagerly or in
    any graph or loop, as long as every worker runs the same operations in the same order.

    Args:
        tasks: names of the workers' tasks, such as "/job:worker/task:3", by rank.
        timeout_seconds: longest wait for the other workers inside one operation; 0 waits forever.
            Frequent operations should have none: for each operation that has a timeout, TensorFlow
            keeps a sleeping thread until the timeout is over.
        waiting: returns a context for an eager operation. If given, TensorFlow sets these
            operations no timeout; the giver of `waiting` must end a wait that lasts too long.
        communication: "RING" or "NCCL", the same on all workers.
        group: number of the group; groups on different devices need different numbers.
        members: the members of a group that changes, in place of `tasks` and `rank`.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        rank: int,
        device: str,
        timeout_seconds: float,
        communication: str = "RING",
        group: int = 0,
        members: Members | None = None,
        waiting: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._size, self._rank, self._members = len(tasks), rank, members
        order = order_of(tasks)
        # If TensorFlow already has the workers in the order of ranks, nothing has to be sorted, and
        # `_order` is None.
        self._order = None if order == list(range(len(tasks))) else order
        self._waiting = waiting
        self._device, self._timeout = device, float(timeout_seconds)
        self._communication = communication.lower()
        self._group_key = _GROUP_KEY + group
        # The names of the operations so far, by key. They show whether two names have the same key.
        self._names: dict[int, str] = {}
        # TensorFlow runs operations with the same ordering token (or without any token) one after
        # the other. NCCL needs the same order on every worker, so its operations share a token. On
        # the ring each operation has a token of its own, so that buckets are sent in parallel.
        self._by_nccl = communication == "NCCL"
        self._shared_token = None
        if self._by_nccl:
            with tf.device(device), tf.init_scope():
                self._shared_token = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])

    @property
    def size(self) -> int:
        return self._members.size if self._members else self._size

    @property
    def scatters_well(self) -> bool:
        return self._by_nccl or self.size <= 2

    @property
    def rank(self) -> int:
        return self._members.rank if self._members else self._rank

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        with self._place():
            return [
                tf.raw_ops.CollectiveReduceV2(
                    input=b,
                    merge_op="Add",
                    final_op="Id",
                    **self._attributes(f"reduce/{name}/{k}", b),
                )
                for k, b in enumerate(buffers)
            ]

    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        with self._place():
            return [
                self._reduce_scatter(buffer, f"scatter/{name}/{index}")
                for index, buffer in enumerate(buffers)
            ]

    def _reduce_scatter(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        rows = self._ordered(tf.reshape(buffer, [self.size, -1]))
        if self._by_nccl:
            part = tf.raw_ops.CollectiveReduceScatterV2(
                input=rows, merge_op="Add", final_op="Id", **self._attributes(name, rows)
            )
            return tf.reshape(part, [-1])
        # TensorFlow has a reduce-scatter for NCCL alone. An all-to-all with a local sum does the
        # same, and sends as many bytes.
        return tf.add_n(tf.unstack(self._all_to_all(rows, name), num=self.size))

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        with self._place():
            return self._by_rank(self._all_to_all(self._ordered(rows), name))

    def _all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Sends and returns rows in TensorFlow's order of the workers."""
        attributes = self._attributes(f"all to all/{name}", rows)
        return tf.raw_ops.CollectiveAllToAllV2(input=rows, **attributes)

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        with self._place():
            attributes = self._attributes(f"gather/{name}", buffer)
            gathered = tf.raw_ops.CollectiveGatherV2(input=buffer[tf.newaxis], **attributes)
            gathered.set_shape([None if self._members else self.size, *buffer.shape])
            return self._by_rank(gathered)

    def broadcast(self, buffer: tf.Tensor, name: str, source: int = 0) -> tf.Tensor:
        """Returns the buffer of rank `source`. If members change, this must be called eagerly."""
        with self._place():
            keys = self._keys(f"broadcast/{name}", buffer)
            # TensorFlow may crash where it sends a tensor without elements.
            if self.size == 1 or buffer.shape.num_elements() == 0:
                return tf.identity(buffer)
            carried = tf.cast(buffer, _CARRIED_AS.get(buffer.dtype, buffer.dtype))
            if self.rank == source:
                sent = tf.raw_ops.CollectiveBcastSendV2(input=carried, **keys)
                return tf.cast(sent, buffer.dtype)
            got = tf.raw_ops.CollectiveBcastRecvV2(T=carried.dtype, shape=tf.shape(buffer), **keys)
            return tf.cast(got, buffer.dtype)

    def barrier(self, name: str) -> None:
        self.all_gather(tf.zeros([1]), f"barrier/{name}")

    def _ordered(self, rows: tf.Tensor) -> tf.Tensor:
        """Sorts rows from rank order to TensorFlow's order of the workers."""
        order = self._members.order() if self._members else self._order
        return rows if order is None else tf.gather(rows, order)

    def _by_rank(self, rows: tf.Tensor) -> tf.Tensor:
        """Sorts rows from TensorFlow's order of the workers to rank order."""
        order = self._members.order() if self._members else self._order
        return rows if order is None else tf.gather(rows, tf.math.invert_permutation(order))

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """A context on the device and, for an eager operation, in the caller's `waiting`."""
        watched = self._waiting if tf.executing_eagerly() else None
        with tf.device(self._device), watched() if watched else contextlib.nullcontext():
            yield

    def _attributes(self, name: str, buffer: tf.Tensor) -> dict:
        token = self._shared_token
        if token is None:
            # The handle is used only as a token; its variable is never created.
            shared_name = f"tfpara/{self._group_key}/{name}"
            token = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=shared_name)
        return {"ordering_token": [token], **self._keys(name, buffer)}

    def _keys(self, name: str, buffer: tf.Tensor) -> dict:
        key = self._key(f"{name}/{buffer.dtype.name}{buffer.shape}")
        if self._members is None:
            numbers = {"group_size": self.size, "group_key": self._group_key, "instance_key": key}
            keys = {name: tf.constant(number) for name, number in numbers.items()}
        else:
            keys = self._members.keys(self._group_key, key)
        return keys | {
            "communication_hint": self._communication,
            "timeout_seconds": 0.0 if self._waiting and tf.executing_eagerly() else self._timeout,
        }

    def _key(self, name: str) -> int:
        """Returns an operation's key, by its name alone; RuntimeError: another name has it, too."""
        key = zlib.crc32(name.encode()) & 0x7FFFFFFF
        other = self._names.setdefault(key, name)
        if other != name:
            raise RuntimeError(
                f"the collectives {other!r} and {name!r} would share the key {key}, by which "
                "TensorFlow tells them apart. Such a coincidence goes with the sizes that are in "
                "the names: make a layer larger by one unit, or choose another number of fragments."
            )
        return key
