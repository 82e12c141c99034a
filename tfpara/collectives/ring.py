"""TensorFlow's own collectives: ring over gRPC on CPU, NCCL on GPU."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import tensorflow as tf

# Group and instance keys share one name space with TensorFlow's own strategies, which count up
# from small numbers; ours are far above.
_GROUP_KEY = 0x74660000


class TensorFlowCollectives:
    """Collectives between the lead devices of the workers of a TF_CONFIG cluster.

    Keys are static (derived from the operation's name), so one operation may run any number of
    times, in any graph, loop or eagerly, as long as every worker runs the same ones in the same
    order.

    Args:
        size: number of workers.
        rank: this worker, 0 … size − 1.
        device: full name of this worker's lead device.
        timeout_seconds: longest wait for the other workers inside one operation; 0 waits for ever.
            TensorFlow keeps a sleeping thread for each operation with a timeout, until the timeout
            is over: not for what runs often.
        communication: "AUTO", "RING" or "NCCL".
        group: number of the group; groups on different devices need different ones.
    """

    summed = frozenset({tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
    full_duplex = True

    def __init__(
        self,
        size: int,
        rank: int,
        device: str,
        timeout_seconds: float,
        communication: str = "AUTO",
        group: int = 0,
    ) -> None:
        self.size = size
        self.rank = rank
        self._device = device
        self._timeout = float(timeout_seconds)
        self._communication = communication.lower()
        self._group_key = _GROUP_KEY + group
        self._names: dict[int, str] = {}  # of the operations so far, by their keys
        # TensorFlow runs operations with the same token one after the other, and so those that have
        # none. NCCL needs the same order on every worker, by a token that all share. On the ring
        # each has its own, so that buckets travel in parallel.
        self._shared_token = None
        if "GPU" in device.upper():
            with tf.device(device), tf.init_scope():
                self._shared_token = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Element-wise sums over the workers of each float buffer; buffers travel in parallel."""
        with tf.device(self._device):
            return [
                tf.raw_ops.CollectiveReduceV2(
                    input=buffer,
                    merge_op="Add",
                    final_op="Id",
                    **self._attributes(f"reduce/{name}/{index}", buffer),
                )
                for index, buffer in enumerate(buffers)
            ]

    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Of each float buffer, this rank's part of the sums over the workers.

        Lengths are multiples of `size`; rank r gets the r-th of `size` equal parts.
        """
        with tf.device(self._device):
            return [
                self._reduce_scatter(buffer, f"scatter/{name}/{index}")
                for index, buffer in enumerate(buffers)
            ]

    def _reduce_scatter(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        rows = tf.reshape(buffer, [self.size, -1])
        if self._shared_token is not None:
            part = tf.raw_ops.CollectiveReduceScatterV2(
                input=rows,
                merge_op="Add",
                final_op="Id",
                **self._attributes(name, rows),
            )
            return tf.reshape(part, [-1])
        # TensorFlow has no reduce-scatter on CPUs. The same bytes travel; the sum is taken here.
        return tf.add_n(tf.unstack(self.all_to_all(rows, name), num=self.size))

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Row r of each worker's rows goes to rank r; returns the rows received, by sender."""
        with tf.device(self._device):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=rows,
                **self._attributes(f"all to all/{name}", rows),
            )

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The workers' buffers (of equal shape) stacked by rank, shape [size, ...]."""
        with tf.device(self._device):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=buffer[tf.newaxis],
                **self._attributes(f"gather/{name}", buffer),
            )
            gathered.set_shape([self.size, *buffer.shape])
            return gathered

    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The buffer of rank 0."""
        with tf.device(self._device):
            keys = self._keys(f"broadcast/{name}", buffer)
            if self.rank == 0:
                sent = tf.raw_ops.CollectiveBcastSendV2(input=buffer, **keys)
                return tf.identity(sent)
            return tf.raw_ops.CollectiveBcastRecvV2(T=buffer.dtype, shape=tf.shape(buffer), **keys)

    def barrier(self, name: str) -> None:
        """Returns once every worker has called it."""
        self.all_gather(tf.zeros([1]), f"barrier/{name}")

    def _attributes(self, name: str, buffer: tf.Tensor) -> dict:
        token = self._shared_token
        if token is None:
            # Names the order and nothing else: there is no such variable.
            shared_name = f"tfpara/{self._group_key}/{name}"
            token = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=shared_name)
        return {"ordering_token": [token], **self._keys(name, buffer)}

    def _keys(self, name: str, buffer: tf.Tensor) -> dict:
        return {
            "group_size": tf.constant(self.size),
            "group_key": tf.constant(self._group_key),
            "instance_key": tf.constant(self._key(f"{name}/{buffer.dtype.name}{buffer.shape}")),
            "communication_hint": self._communication,
            "timeout_seconds": self._timeout,
        }

    def _key(self, name: str) -> int:
        """The number that all workers have for an operation, in whatever order they make them.

        Raises:
            RuntimeError: another operation has it, and TensorFlow might mix up their data.
        """
        key = zlib.crc32(name.encode()) & 0x7FFFFFFF
        other = self._names.setdefault(key, name)
        if other != name:
            raise RuntimeError(
                f"the collectives {other!r} and {name!r} would share the key {key}, by which "
                "TensorFlow tells them apart. Such a coincidence goes with the sizes that are in "
                "the names: make a layer larger by one unit, or choose another number of fragments."
            )
        return key
