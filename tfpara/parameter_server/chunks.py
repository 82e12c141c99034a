"""Training data in chunks, which are handed to workers one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpara.parameter_server.repeatable import (
    LARGEST_BYTES,
    RepeatableProgram,
    check_order,
    check_seeds,
)
from tfpara.steps import mapped, without_tuner
from tfpara.typing import Data, Json, Nest
from tfpara.whole_number import checked_whole

_NO_DATA = (str, bytes, int, float, keras.utils.PyDataset, tf.RaggedTensor, tf.SparseTensor)


class Chunks:
    """Training data that every epoch divides into the same number of chunks.

    A worker trains one chunk at a time. When a worker dies, another worker continues its chunk.
    The workers read the data by TensorFlow operations, without Python.

    Args:
        count: chunks of an epoch, at least 1.
        dataset: called while a graph is made, as `dataset(epoch, chunk, *arguments)` with int64
            tensors; returns the chunk's minibatches, (x, y) or (x, y, sample_weight). Equal
            arguments must give the same minibatches in the same order, because a worker that
            continues a chunk skips the minibatches that are done. So a shuffle needs a seed:
            `shuffle(n, seed=epoch)`.
        arguments: called on the chief as `arguments(epoch, chunk)` with Python numbers; returns a
            tuple of arrays that are sent to the worker with the chunk. The types and ranks of the
            arrays must be the same for all chunks.
        num_minibatches: minibatches of an epoch, if known. The progress bar needs it; so do
            `ChunkRateSearch(part=...)` and the check that no chunk is shorter than `sync_period`.

    Attributes:
        shares: whether all chunks read the same dataset, of which each chunk keeps every
            `count`-th minibatch.
        facts: the known settings, by name, that decide which samples a minibatch has.

    Raises:
        ValueError: `count` is not a whole number of at least 1.
    """

    shares = False

    def __init__(
        self,
        count: int,
        dataset: Callable[..., tf.data.Dataset],
        arguments: Callable[[int, int], tuple[Nest, ...]] | None = None,
        num_minibatches: int | None = None,
    ) -> None:
        self.count = _positive("count", count, 1)
        self.num_minibatches = num_minibatches
        self.facts: dict[str, Json] = {"minibatches": num_minibatches}
        self._dataset = dataset
        self._arguments = arguments

    def dataset(self, epoch: tf.Tensor, chunk: tf.Tensor, *arguments: Nest) -> tf.data.Dataset:
        """Returns the minibatches of a chunk.

        Raises:
            ValueError: the dataset's seed is a number of a graph, and the global seed is 0.
        """
        in_order = tf.data.Options()
        in_order.deterministic = True
        try:
            dataset = self._dataset(epoch, chunk, *arguments)
        except tf.errors.OperatorNotAllowedInGraphError as error:
            # TensorFlow compares the global seed and the operation's seed with (0, 0) in Python. If
            # the global seed is 0, the comparison needs the value of the operation's seed. If that
            # seed is a tensor of a graph, it has no value yet, so TensorFlow raises this error.
            if tf.compat.v1.get_default_graph().seed != 0:
                raise
            raise ValueError(
                "the global seed is 0, and with it TensorFlow cannot give a dataset of a worker's "
                "graph a seed such as shuffle(n, seed=epoch). Set another global seed than 0, as "
                "in keras.utils.set_random_seed(1)."
            ) from error
        return without_tuner(dataset.with_options(in_order))

    @property
    def element_spec(self) -> Nest:
        zero = tf.zeros([], tf.int64)
        return self.dataset(zero, zero, *self.arguments(0, 0)).element_spec

    def arguments(self, epoch: int, chunk: int) -> tuple[Nest, ...]:
        """Returns the tensors that are sent to the worker with a chunk."""
        found = () if self._arguments is None else tuple(self._arguments(epoch, chunk))
        with tf.device("CPU:0"):  # a chunk may be large, and the chief may have a GPU
            return mapped(tf.convert_to_tensor, found)

    def check(self, epoch: int, done: Sequence[int]) -> None:
        """Checks that an epoch had minibatches and, if `shares`, that all chunks read the same.

        `done` has the number of trained minibatches of each chunk.
        """
        total = sum(done)
        if not total:
            raise ValueError(
                f"epoch {epoch} had no minibatch: the dataset is empty. Look at what it reads, and "
                "at what filter, take and batch(drop_remainder=True) leave of it."
            )
        shares = [len(range(chunk, total, self.count)) for chunk in range(self.count)]
        if self.shares and list(done) != shares:
            raise ValueError(
                f"the dataset is not the same each time that it is read: in epoch {epoch} its "
                f"{self.count} chunks had {list(done)} minibatches, and of one dataset they would "
                f"be {shares}. Let nothing random decide which elements come, as a filter after a "
                "random map does; use tf.random.stateless_uniform with a seed from the data."
            )


def as_chunks(
    x: Data,
    y: Data = None,
    *,
    sample_weight: Data = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    count: int | None = None,
    order: Sequence[int] = (0,),
    sent: bool = True,
) -> Chunks:
    """Returns the data of a `fit` as chunks; the other arguments are those of `fit`.

    Args:
        count: chunks of an epoch; 1 if None.
        order: the numbers that, with the epoch, determine the order of the samples. They are read
            when a chunk is handed out, so changing the list changes the order of later chunks.
        sent: whether the chunks are sent to other processes, so that their size is limited.
    """
    if isinstance(x, Chunks | tf.data.Dataset):
        _refuse(type(x).__name__, y=y, sample_weight=sample_weight, batch_size=batch_size)
        if isinstance(x, Chunks):
            _refuse("Chunks", chunks=count)
            _check(x)
            chunks = x
        else:
            chunks = _of_dataset(x, _positive("chunks", count, 1), order)
    elif x is None or isinstance(x, _NO_DATA) or hasattr(x, "__next__"):
        raise TypeError(
            f"x is a {type(x).__name__}. The workers read the data without Python, so give arrays, "
            "a tf.data.Dataset of minibatches, or tfpara.Chunks."
        )
    elif not tf.nest.flatten(x):
        raise ValueError("there are no arrays in x: give the samples that belong to the targets y.")
    elif y is None:
        raise ValueError("y is None: give the targets that belong to the arrays x.")
    else:
        data = (x, y) if sample_weight is None else (x, y, sample_weight)
        size = _positive("batch_size", batch_size, 32)
        chunks = _of_arrays(data, size, shuffle, _positive("chunks", count, 1), order, sent)
    return _weighted(chunks, class_weight) if class_weight else chunks


def _check(chunks: Chunks) -> None:
    """Refuses chunks whose minibatches may differ when they are read again."""

    @tf.function(autograph=False)
    def read(*place_and_arguments: Nest) -> tf.Tensor:
        # The graph must have no global seed. With one, TensorFlow would supply the seeds that
        # shuffles lack, and `check_seeds` would not see that they are missing.
        tf.compat.v1.get_default_graph().seed = None
        return tf.data.experimental.to_variant(chunks.dataset(*place_and_arguments))

    zero = tf.zeros([], tf.int64)
    graph = read.get_concrete_function(zero, zero, *chunks.arguments(0, 0)).graph.as_graph_def()
    check_order(graph, "the dataset of a chunk")
    check_seeds(graph)


def _positive(name: str, value: int | None, default: int) -> int:
    return default if value is None else checked_whole(name, value)


def _refuse(kind: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} does not go with x of the type {kind}, which has it inside.")


def _of_dataset(dataset: tf.data.Dataset, count: int, order: Sequence[int]) -> Chunks:
    """Returns a dataset as chunks: chunk k of n has minibatches k, k + n, k + 2n, …"""
    size = int(dataset.cardinality())
    if size == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the dataset is infinite, and an epoch must end. Give dataset.take(minibatches)."
        )
    program = RepeatableProgram(dataset)

    chunks = Chunks(
        count,
        lambda epoch, chunk, seeds: program.dataset(seeds).shard(count, chunk),
        lambda epoch, chunk: (program.seeds(order, epoch),),
        size if size >= 0 else None,
    )
    chunks.shares = True
    return chunks


def _of_arrays(
    data: Data, batch_size: int, shuffle: bool, count: int, order: Sequence[int], sent: bool
) -> Chunks:
    # Lists become tuples, because tf.data would stack the elements of a list.
    data = keras.tree.lists_to_tuples(mapped(_as_array, data))
    arrays = [array for array in tf.nest.flatten(data) if array is not None]
    lengths = sorted({len(array) if array.ndim else 0 for array in arrays})
    if len(lengths) != 1 or lengths[0] == 0:
        raise ValueError(f"the arrays have {lengths} samples; they must be equally many, not 0.")
    if sent and sum(array.nbytes for array in arrays) > LARGEST_BYTES:
        raise ValueError(
            "the arrays have more than 1 GB, which the chief would send to the workers in every "
            "epoch. Write them to files and give a tf.data.Dataset that reads them, or "
            "tfpara.Chunks."
        )
    minibatches = -(-lengths[0] // batch_size)
    if count > minibatches:
        raise ValueError(
            f"chunks={count} is more than the {minibatches} minibatches of an epoch. Give fewer."
        )

    bounds = np.arange(count + 1) * minibatches // count * batch_size
    longest = int(np.diff(bounds).max())

    def samples(epoch: int, chunk: int) -> tuple[Nest, np.int64]:
        """Returns a chunk's samples, one minibatch after the other, and their number.

        Samples are repeated, so that all chunks have the same shape. For another shape TensorFlow
        would make a second graph.
        """
        # The graph does not contain the arrays, because TensorFlow often does not free the graph
        # of an earlier `fit` on a worker.
        rows = np.arange(lengths[0])
        if shuffle:
            rows = np.random.default_rng([*order, epoch]).permutation(rows)
        own = rows[bounds[chunk] : bounds[chunk + 1]]
        chosen = np.resize(own, longest)
        return mapped(lambda array: array[chosen], data), np.int64(len(own))

    def part(epoch: tf.Tensor, chunk: tf.Tensor, rows: Nest, number: tf.Tensor) -> tf.data.Dataset:
        del epoch, chunk

        @tf.autograph.experimental.do_not_convert
        def minibatch(places: tf.Tensor) -> Nest:
            return mapped(lambda array: tf.gather(array, places), rows)

        return tf.data.Dataset.range(number).batch(batch_size).map(minibatch).prefetch(2)

    chunks = Chunks(count, part, samples, minibatches)
    chunks.facts |= {"samples": lengths[0], "batch_size": batch_size, "shuffle": shuffle}
    return chunks


def _as_array(data: Data) -> np.ndarray:
    """Returns an array; floating-point numbers have Keras' usual type, as in its own `fit`."""
    array = np.asarray(data)
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


def limited(chunks: Chunks, minibatches: int) -> Chunks:
    """Returns the chunks with at most so many `minibatches` in an epoch, and at most so many each.

    Chunk k of n keeps as many as there are among the numbers k, k + n, k + 2n, … < `minibatches`.
    """

    def part(epoch: tf.Tensor, chunk: tf.Tensor, *arguments: Nest) -> tf.data.Dataset:
        kept = (minibatches - chunk + chunks.count - 1) // chunks.count
        return chunks.dataset(epoch, chunk, *arguments).take(kept)

    return _changed(chunks, part, min(chunks.num_minibatches or minibatches, minibatches))


def _changed(
    chunks: Chunks, dataset: Callable[..., tf.data.Dataset], num_minibatches: int | None
) -> Chunks:
    changed = Chunks(chunks.count, dataset, chunks.arguments, num_minibatches)
    changed.shares, changed.facts = chunks.shares, chunks.facts
    return changed


def _weighted(chunks: Chunks, class_weight: Mapping[int, float]) -> Chunks:
    """Returns the chunks with each sample weighted by the weight of its class."""
    classes = np.asarray(list(class_weight), np.int64)
    of_classes = np.asarray(list(class_weight.values()), np.float32)

    def weigh(*data: Nest) -> tuple[Nest, ...]:
        if len(data) != 2 or isinstance(data[1], dict | tuple | list):
            raise ValueError("class_weight needs minibatches (x, y) with one array of labels.")
        x, y = data
        one_hot = y.shape.rank == 2 and y.shape[-1] != 1
        labels = tf.argmax(y, -1) if one_hot else tf.cast(tf.reshape(y, [-1]), tf.int64)
        is_of = labels[:, None] == classes  # bool [samples, classes]
        weights = tf.reduce_sum(tf.where(is_of, of_classes, 0.0), -1)
        return x, y, tf.where(tf.reduce_any(is_of, -1), weights, 1.0)

    def part(*arguments: Nest) -> tf.data.Dataset:
        return chunks.dataset(*arguments).map(weigh)

    return _changed(chunks, part, chunks.num_minibatches)
