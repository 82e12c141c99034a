"""The members of a group of workers, which may change although graphs stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# The two keys of a collective operation, the group key and the instance key, grow by these amounts
# from one generation of the group to the next. The amounts are so large that operations of two
# generations never have the same keys.
_BETWEEN_GROUP_KEYS = 16
_BETWEEN_INSTANCE_KEYS = 1_000_003
_LARGEST_KEY = 0x7FFFFFFF


def order_of(tasks: Sequence[str]) -> list[int]:
    """Returns the ranks as TensorFlow's collectives order them: by their tasks' names as text."""
    # So task 10 comes before task 2.
    return sorted(range(len(tasks)), key=tasks.__getitem__)


class Members:
    """The workers of a group, this worker's rank, and the generation of the group.

    TensorFlow's collectives take sizes and keys as tensors, so graphs read them from a variable.
    All keys depend on the generation, so a message of an earlier generation finds no receiver. The
    variables are kept on `device`, a CPU.
    """

    def __init__(self, device: str, tasks: Sequence[str], rank: int, generation: int) -> None:
        self.size, self.rank, self.generation = len(tasks), rank, generation
        self._device = device
        with tf.device(device), tf.init_scope():
            values = tf.constant([len(tasks), rank, generation])
            self._values = tf.Variable(values, trainable=False, name="tfpara/members")
            order = tf.constant(order_of(tasks))
            self._order = tf.Variable(order, shape=[None], trainable=False, name="tfpara/order")

    def change(self, tasks: Sequence[str], rank: int, generation: int) -> None:
        """Begins another generation; no operation of the previous one may be running."""
        self.size, self.rank, self.generation = len(tasks), rank, generation
        self._values.assign([len(tasks), rank, generation])
        self._order.assign(order_of(tasks))

    def order(self) -> tf.Tensor:
        """Returns the ranks in TensorFlow's order (`order_of`), for graphs: int32, [size]."""
        with tf.device(self._device):
            return self._order.read_value()

    def size_and_rank(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the size and this worker's rank: int32 tensors, read when the graph runs."""
        size, rank, _ = self._read()
        return size, rank

    def keys(self, group_key: int, instance_key: int) -> dict[str, tf.Tensor]:
        """Returns the arguments of a collective by name: size and keys of this generation."""
        if tf.executing_eagerly():
            # In each generation, TensorFlow sets up each kind of eager operation again.
            size, generation, number = self.size, self.generation, self.generation
        else:
            size, _, generation = self._read()
            number = tf.cast(generation, tf.int64)
        with tf.device(self._device):
            numbers = {
                "group_size": size,
                "group_key": group_key + generation * _BETWEEN_GROUP_KEYS,
                "instance_key": (instance_key + number * _BETWEEN_INSTANCE_KEYS)
                % (_LARGEST_KEY + 1),
            }
            return {name: tf.cast(value, tf.int32) for name, value in numbers.items()}

    def _read(self) -> list[tf.Tensor]:
        with tf.device(self._device):
            return tf.unstack(self._values.read_value())
