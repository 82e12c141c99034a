"""What each replica says before a sync, and the decisions that all take from it.

The reports of all replicas form a table, the same on every worker, one row per replica:
samples since the last sync; 1 while the replica has data left, else 0; index of the first weight
with a NaN or Inf, or −1; signature of the model that was set from outside last.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

SAMPLES, RUNNING, NONFINITE, SIGNATURE = range(4)


def first_nonfinite(weights: Sequence[tf.Variable], device: str) -> tf.Tensor:
    """Index of the first weight with a NaN or Inf, or −1."""
    with tf.device(device):
        # A sum is finite only if every term is: one pass, no temporary of the weight's size.
        sums = [tf.reduce_sum(tf.cast(w, tf.float32)) for w in weights]
        finite = tf.math.is_finite(tf.stack(sums))
        first = tf.argmin(tf.cast(finite, tf.int32), output_type=tf.int32)
        return tf.where(tf.reduce_all(finite), -1, first)


def checks(
    reports: tf.Tensor, weight_names: Sequence[str], replicas_per_worker: int
) -> list[tf.Operation]:
    """Operations that fail, on every worker alike, where the reports forbid a sync."""
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
    return [
        tf.debugging.Assert(tf.reduce_all(bad < 0.0), [nonfinite]),
        tf.debugging.Assert(tf.reduce_all(equal), [unequal]),
    ]
