"""Arrays given to `fit` in an elastic run, as minibatches that can be dealt out anew."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.cluster.place import FIT_BEGIN
from tfpara.sync.exchange import everyones
from tfpara.sync.reading import shuffled

PARTS = ("x", "y", "sample_weight")  # arguments of `fit`
_BATCH_SIZE = 32  # Keras' own


def leaves_of(given: Mapping[str, Any]) -> list[Any]:
    """Returns all data among the arguments of `fit`."""
    parts = [given.get(name) for name in PARTS]
    return [leaf for part in parts for leaf in tf.nest.flatten(part) if leaf is not None]


def are_arrays(given: Mapping[str, Any]) -> bool:
    """Returns whether the data among the arguments of `fit` are NumPy's arrays, or tensors."""
    leaves = leaves_of(given)
    return bool(leaves) and all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves)


def deal_out_arrays(strategy: Any, replicas: int, given: dict[str, Any]) -> None:
    """Replaces arrays among the arguments of `fit` by `strategy.datasets_by_epoch`.

    A replica's minibatch has `batch_size` / N rows, rounded up, for the N replicas with which the
    run begins, as without `elastic=`; where replicas are lost or come it stays as large. Each row
    of an epoch is trained once. With `shuffle` (as by default) each epoch has an order of its own.
    With `steps_per_epoch` an epoch has as many minibatches as N replicas train in so many steps,
    and goes on in the arrays where the one before has ended.

    Args:
        strategy: of the run.
        replicas: N.
        given: the arguments of `fit`, changed in place; left alone if they are no arrays.

    Raises:
        ValueError: arrays of different lengths.
    """
    parts = [given.get(name) for name in PARTS]
    leaves = leaves_of(given)
    if not are_arrays(given):
        return
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

    in_a_pass = -(-rows // size)  # minibatches
    steps = given.get("steps_per_epoch")
    in_an_epoch = steps * replicas if steps else in_a_pass

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        begin = epoch * in_an_epoch
        passes = range(begin // in_a_pass, (begin + in_an_epoch - 1) // in_a_pass + 1)
        orders = [
            shuffled(rows, extended.order.seed, each) if shuffle else range(rows) for each in passes
        ]
        starts = range(first, in_an_epoch, strategy.num_replicas)
        numbers = [start + own for start in starts for own in strategy.local_replica_ids]
        places = [divmod(begin + n, in_a_pass) for n in numbers if n < in_an_epoch]
        order = tf.constant(np.array(orders), tf.int64)
        places = [[each - passes.start, number] for each, number in places]
        dataset = tf.data.Dataset.from_tensor_slices(np.array(places, np.int64).reshape(-1, 2))

        def taken(place: tf.Tensor) -> Any:
            own = order[place[0], place[1] * size : (place[1] + 1) * size]
            gathered = tf.nest.map_structure(lambda array: tf.gather(array, own), arrays)
            return gathered if len(gathered) > 1 else gathered[0]

        return dataset.map(taken, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    given["x"] = strategy.datasets_by_epoch(minibatches)
    for name in ("y", "sample_weight", "batch_size", "steps_per_epoch"):
        given[name] = None
