"""What each replica says before a sync, and the decisions that all take from it.

The reports of all replicas form a table, the same on every worker, one row per replica:
1 while the replica has data left, else 0; index of the first weight with a NaN or Inf, or −1;
signature of the weights that were set from outside; what its worker asks for (see `Request`); then,
for each part of the model that is averaged at times of its own, the samples and, after these, the
minibatches since its last sync; then the steps that each optimizer has counted whose slots all
share after the sync.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

import tensorflow as tf

RUNNING, NONFINITE, SIGNATURE, REQUEST, SAMPLES = range(5)  # and what follows: samples


# Before a worker fails: by then the others have the table that says why. Its failure ends what they
# have not received yet.
_GRACE_SECONDS = 1.0


class Request(enum.IntEnum):
    """What a worker asks all others for; the largest number asked for is agreed on at a sync."""

    NOTHING = 0
    CHECKPOINT = 1
    STOP = 2  # end the training
    LEAVE = 3  # write a checkpoint and end the program, to be started again


def first_nonfinite(weights: Sequence[tf.Variable], device: str) -> tf.Tensor:
    """Index of the first weight with a NaN or Inf, or −1."""
    with tf.device(device):
        # A sum is finite only if every term is: one pass, no temporary of the weight's size.
        sums = [tf.reduce_sum(tf.cast(w, tf.float32)) for w in weights]
        finite = tf.math.is_finite(tf.stack(sums))
        first = tf.argmin(tf.cast(finite, tf.int32), output_type=tf.int32)
        return tf.where(tf.reduce_all(finite), -1, first)


def signature_of(value: tf.Tensor) -> tf.Tensor:
    """A number that equal tensors share and others almost surely do not, float64 below 2^40.

    The sum of the elements' bits: the same in whatever order a machine adds them.
    """
    bits = tf.cast(tf.bitcast(tf.reshape(tf.cast(value, tf.float32), [-1]), tf.int32), tf.int64)
    places = 1 + tf.range(tf.size(bits, tf.int64)) % 251  # so that the order counts
    return tf.cast(tf.reduce_sum(bits * places) % (1 << 40), tf.float64)


def is_bad(reports: tf.Tensor) -> tf.Tensor:
    """Whether the reports forbid a sync; `checks` say why."""
    signatures = reports[:, SIGNATURE]
    equal = (signatures == signatures[0]) | tf.math.is_nan(signatures)
    return ~tf.reduce_all((reports[:, NONFINITE] < 0.0) & equal)


def problem_of(
    reports: tf.Tensor, weight_names: Sequence[str], replicas_per_worker: int
) -> tf.Tensor:
    """The sentence that says why the reports forbid a sync, the same on every worker; or ""."""
    bad = reports[:, NONFINITE]
    replica = tf.argmax(bad, output_type=tf.int32)
    index = tf.cast(tf.maximum(bad[replica], 0.0), tf.int32)
    nonfinite = tf.strings.format(
        "replica {} (worker {}) has NaN or Inf in weight {}; nothing was averaged and the other "
        "replicas keep their weights. Lower the learning rate or clip the gradients, and look at "
        "that replica's data.",
        (replica, replica // replicas_per_worker, tf.gather(tf.constant(weight_names), index)),
    )
    signatures = reports[:, SIGNATURE]
    other = tf.argmax(tf.abs(signatures - signatures[0]), output_type=tf.int32)
    unequal = tf.strings.format(
        "replica {} (worker {}) starts from other weights than replica 0. Load the same weights "
        "on every worker before training.",
        (other, other // replicas_per_worker),
    )
    equal = (signatures == signatures[0]) | tf.math.is_nan(signatures)
    several = reports.shape[0] > replicas_per_worker
    with tf.control_dependencies([_wait_if(is_bad(reports))] if several else []):
        problem = tf.where(tf.reduce_all(equal), "", unequal)
        return tf.where(tf.reduce_all(bad < 0.0), problem, nonfinite)


def stop_if(problem: tf.Tensor) -> tf.Operation | None:
    """An operation that fails with the problem, if there is one: an empty text is none.

    It belongs into the graph that calls a sync, not into the sync's own function. Where a function
    spans several devices and calls another one, TensorFlow tells it of the other's failure only
    after cancelling what it waits for, and it reports that it was cancelled.
    """
    with tf.device("CPU:0"):
        return tf.raw_ops.Assert(condition=tf.equal(problem, ""), data=[problem])


def _wait_if(condition: tf.Tensor) -> tf.Tensor:
    def wait() -> bool:
        time.sleep(_GRACE_SECONDS)
        return True

    return tf.cond(
        condition, lambda: tf.numpy_function(wait, [], tf.bool), lambda: tf.constant(True)
    )
