"""Arrays given to `fit` in an elastic run, as minibatches that can be dealt out anew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.cluster.place import FIT_BEGIN
from tfpara.sync.exchange import everyones
from tfpara.sync.reading import shuffled

_BATCH_SIZE = 32  # Keras' own


def deal_out_arrays(strategy: Any, replicas: int, given: dict[str, Any]) -> None:
    """Replaces arrays among the arguments of `fit` by `strategy.datasets_by_epoch`.

    A replica's minibatch has `batch_size` / N rows, rounded up, for the N replicas with which the
    run begins, as without `elastic=`; where replicas are lost or come it stays as large. Each row
    of an epoch is trained once. With `shuffle` (as by default) each epoch has an order of its own.

    Args:
        strategy: of the run.
        replicas: N.
        given: the arguments of `fit`, changed in place; left alone if they are no arrays.

    Raises:
        ValueError: an argument that goes with arrays alone and cannot be taken here; or arrays of
            different lengths.
    """
    parts = [given.get(name) for name in ("x", "y", "sample_weight")]
    leaves = [leaf for part in parts for leaf in tf.nest.flatten(part) if leaf is not None]
    if not leaves or not all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves):
        return
    for name in ("validation_split", "class_weight"):
        if given.get(name):
            raise ValueError(
                f"{name}={given[name]!r} and elastic= contradict each other: divide, or weight, "
                "the arrays before fit (validation_data=, sample_weight=)."
            )
    rows = len(leaves[0])
    if any(len(leaf) != rows for leaf in leaves):
        raise ValueError(
            f"the arrays have {', '.join(str(len(leaf)) for leaf in leaves)} rows. Give as many."
        )
    extended, size = strategy.extended, -(-(given.get("batch_size") or _BATCH_SIZE) // replicas)
    shuffle = given.get("shuffle", True)
    if extended.order.seed is None:
        drawn = random.getrandbits(48)
        joins = extended.elastic is None or extended.elastic.joining
        extended.order.seed = drawn if joins else everyones(drawn, extended.control, FIT_BEGIN)[0]
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    with tf.device("CPU:0"):
        arrays = tf.nest.map_structure(tf.convert_to_tensor, tuple(parts))

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        order = shuffled(rows, extended.order.seed, epoch) if shuffle else range(rows)
        starts = range(first, -(-rows // size), strategy.num_replicas)
        numbers = [start + own for start in starts for own in strategy.local_replica_ids]
        numbers = [number for number in numbers if number * size < rows]
        order = tf.constant(order, tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices(np.array(numbers, np.int64))

        def taken(number: tf.Tensor) -> Any:
            own = order[number * size : (number + 1) * size]
            gathered = tf.nest.map_structure(lambda array: tf.gather(array, own), arrays)
            return gathered if len(gathered) > 1 else gathered[0]

        return dataset.map(taken, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    given["x"] = strategy.datasets_by_epoch(minibatches)
    for name in ("y", "sample_weight", "batch_size"):
        given[name] = None
