"""The members of a group of workers that changes while the workers' graphs stay as they are."""

from __future__ import annotations

import tensorflow as tf

# Far enough apart that the keys of one generation are not those of the next.
_BETWEEN_GROUP_KEYS = 16
_BETWEEN_INSTANCE_KEYS = 1_000_003
_LARGEST_KEY = 0x7FFFFFFF


class Members:
    """How many workers there are, which one this is, and the generation of the group.

    TensorFlow's collectives take sizes and keys as tensors, so graphs read them from a variable.
    The generation is in all keys: what a worker of an earlier one sends meets nobody.

    Args:
        device: the host's, on which the variable is kept.
        size: number of workers.
        rank: this worker's, 0 … size − 1.
        generation: the number of the generation.
    """

    def __init__(self, device: str, size: int, rank: int, generation: int) -> None:
        self.size, self.rank, self.generation = size, rank, generation
        self._device = device
        with tf.device(device), tf.init_scope():
            self._values = tf.Variable(
                [size, rank, generation], trainable=False, dtype=tf.int32, name="tfpara/members"
            )

    def change(self, size: int, rank: int, generation: int) -> None:
        """Another generation begins; no operation of the former may run."""
        self.size, self.rank, self.generation = size, rank, generation
        self._values.assign([size, rank, generation])

    def size_and_rank(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The size, and this worker's rank, as graphs read them: int32 scalars."""
        size, rank, _ = self._read()
        return size, rank

    def keys(self, group_key: int, instance_key: int) -> dict[str, tf.Tensor]:
        """What a collective of this generation is given: `group_size` and both keys."""
        with tf.device(self._device):
            size, _, generation = self._read()
            number = tf.cast(generation, tf.int64)
            instance = (instance_key + number * _BETWEEN_INSTANCE_KEYS) % (_LARGEST_KEY + 1)
            return {
                "group_size": size,
                "group_key": group_key + generation * _BETWEEN_GROUP_KEYS,
                "instance_key": tf.cast(instance, tf.int32),
            }

    def _read(self) -> list[tf.Tensor]:
        with tf.device(self._device):
            return tf.unstack(self._values.read_value())
