"""Training data in chunks, which are handed to workers one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.steps import without_tuner

# Below what protocol buffers carry in one message, 2 GB.
_LARGEST_BYTES = 1 << 30


class Chunks:
    """Training data that every epoch divides into the same number of chunks.

    A chunk is what one worker trains on before it asks for more; when the worker dies, another
    goes on with it. Reading happens on the workers, as TensorFlow operations: no Python.

    Args:
        count: chunks of an epoch, at least 1.
        dataset: called, while a graph is made, as `dataset(epoch, chunk, *arguments)` with int64
            tensors; returns the chunk's minibatches, (x, y) or (x, y, sample_weight). The same
            minibatches in the same order whenever it is called alike: a chunk that is taken up
            again skips those that are done.
        arguments: called on the chief as `arguments(epoch, chunk)` with numbers; returns a tuple of
            arrays that go to the worker with the chunk. Of the same types and ranks for all chunks.
        num_minibatches: of an epoch, if known, for the progress bar.

    Raises:
        ValueError: `count` is not a whole number of at least 1.
    """

    def __init__(
        self,
        count: int,
        dataset: Callable[..., tf.data.Dataset],
        arguments: Callable[[int, int], tuple[Any, ...]] | None = None,
        num_minibatches: int | None = None,
    ) -> None:
        self.count = _positive("count", count, 1)
        self.num_minibatches = num_minibatches
        self._dataset = dataset
        self._arguments = arguments

    def dataset(self, epoch: Any, chunk: Any, *arguments: Any) -> tf.data.Dataset:
        """The minibatches of a chunk."""
        return without_tuner(self._dataset(epoch, chunk, *arguments))

    @property
    def element_spec(self) -> Any:
        """What a minibatch looks like."""
        zero = tf.zeros([], tf.int64)
        arguments = tf.nest.map_structure(tf.convert_to_tensor, self.arguments(0, 0))
        return self.dataset(zero, zero, *arguments).element_spec

    def arguments(self, epoch: int, chunk: int) -> tuple[Any, ...]:
        """The arrays that go with a chunk."""
        return () if self._arguments is None else tuple(self._arguments(epoch, chunk))


def as_chunks(
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> Chunks:
    """What `fit` is given, as chunks.

    Args:
        x, y, sample_weight: arrays (or structures of arrays); or x alone, a `tf.data.Dataset` of
            minibatches or `Chunks`.
        batch_size: samples of a minibatch, for arrays; 32 if None.
        shuffle: whether arrays are permuted anew in every epoch.
        class_weight: weights by class, of integer labels.
        count: chunks of an epoch.
        seed: of the permutations.

    Raises:
        TypeError: data of another kind.
        ValueError: arrays of different lengths, arguments that do not belong to such data, or a
            dataset with a Python function in it.
    """
    if isinstance(x, Chunks | tf.data.Dataset):
        _refuse(type(x).__name__, y=y, sample_weight=sample_weight, batch_size=batch_size)
        if isinstance(x, Chunks):
            _refuse("Chunks", chunks=count)
        chunks = x if isinstance(x, Chunks) else _of_dataset(x, _positive("chunks", count, 1))
    elif x is None or isinstance(x, str | bytes | int | float) or hasattr(x, "__next__"):
        raise TypeError(
            f"x is a {type(x).__name__}. The workers read the data without Python, so give arrays, "
            "a tf.data.Dataset of minibatches, or tfpara.Chunks."
        )
    elif y is None:
        raise ValueError("y is None: give the targets that belong to the arrays x.")
    else:
        data = (x, y) if sample_weight is None else (x, y, sample_weight)
        size = _positive("batch_size", batch_size, 32)
        chunks = _of_arrays(data, size, shuffle, _positive("chunks", count, 1), seed)
    return chunks if class_weight is None else _weighted(chunks, class_weight)


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
    return int(value)


def _refuse(kind: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} does not go with x of the type {kind}, which has it inside.")


def _of_dataset(dataset: tf.data.Dataset, count: int) -> Chunks:
    """Chunk k of n has minibatches k, k + n, k + 2n, …"""
    size = int(dataset.cardinality())
    if size == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the dataset is infinite, and an epoch must end. Give dataset.take(minibatches)."
        )
    # As a program that any process can run; the dataset itself belongs to this one.
    program = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=0,
        strip_device_assignment=True,
    ).numpy()
    if len(program) > _LARGEST_BYTES:
        raise ValueError(
            f"the dataset carries {len(program) / 2**30:.1f} GB of data inside, more than can be "
            "sent to workers. Write them to files and read those in the dataset."
        )
    if b"PyFunc" in program:
        raise ValueError(
            "the dataset has a Python function in it (py_function, numpy_function or "
            "from_generator), which exists in this process only. Write it with TensorFlow "
            "operations, or the data to TFRecord files."
        )
    spec = dataset.element_spec

    def part(epoch: Any, chunk: Any) -> tf.data.Dataset:
        del epoch
        # 0, but not to TensorFlow, which would make the dataset a constant and fail to.
        zero = tf.minimum(chunk, tf.zeros([], tf.int64))
        variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.gather([program], zero))
        return tf.data.experimental.from_variant(variant, spec).shard(count, chunk)

    return Chunks(count, part, num_minibatches=size if size >= 0 else None)


def _of_arrays(data: Any, batch_size: int, shuffle: bool, count: int, seed: int) -> Chunks:
    data = tf.nest.map_structure(np.asarray, data)
    arrays = tf.nest.flatten(data)
    lengths = sorted({len(array) if array.ndim else 0 for array in arrays})
    if len(lengths) != 1 or lengths[0] == 0:
        raise ValueError(f"the arrays have {lengths} samples; they must be equally many, not 0.")
    if sum(array.nbytes for array in arrays) > _LARGEST_BYTES:
        raise ValueError(
            "the arrays have more than 1 GB, which every worker would be sent. Write them to files "
            "and give a tf.data.Dataset that reads them, or tfpara.Chunks."
        )
    minibatches = -(-lengths[0] // batch_size)
    if count > minibatches:
        raise ValueError(
            f"chunks={count} is more than the {minibatches} minibatches of an epoch. Give fewer."
        )

    def order(epoch: int, chunk: int) -> tuple[np.ndarray]:
        """The samples of a chunk: its minibatches, one after the other."""
        rows = np.arange(lengths[0])
        if shuffle:
            rows = np.random.default_rng([seed, epoch]).permutation(rows)
        bounds = np.arange(count + 1) * minibatches // count * batch_size
        return (rows[bounds[chunk] : bounds[chunk + 1]],)

    def part(epoch: Any, chunk: Any, rows: Any) -> tf.data.Dataset:
        del epoch, chunk
        return (
            tf.data.Dataset.from_tensor_slices(rows)
            .batch(batch_size)
            .map(lambda r: tf.nest.map_structure(lambda a: tf.gather(a, r), data))
            .prefetch(2)
        )

    return Chunks(count, part, order, minibatches)


def _weighted(chunks: Chunks, class_weight: Mapping[int, float]) -> Chunks:
    """The chunks with the sample weights of their classes."""
    classes = range(max(class_weight) + 1)
    table = np.asarray([class_weight.get(c, 1.0) for c in classes], np.float32)

    def weigh(*data: Any) -> tuple[Any, ...]:
        if len(data) != 2 or isinstance(data[1], dict | tuple | list):
            raise ValueError("class_weight needs minibatches (x, y) with one array of labels.")
        x, y = data
        one_hot = y.shape.rank == 2 and y.shape[-1] != 1
        labels = tf.argmax(y, -1) if one_hot else tf.cast(tf.reshape(y, [-1]), tf.int64)
        known = tf.minimum(labels, len(table) - 1)
        return x, y, tf.where(labels < len(table), tf.gather(table, known), 1.0)

    def part(*arguments: Any) -> tf.data.Dataset:
        return chunks.dataset(*arguments).map(weigh)

    return Chunks(chunks.count, part, chunks.arguments, chunks.num_minibatches)
