"""What each replica says before a sync, and the decisions that all take from it.

The reports of all replicas form a table, the same on every worker, one row per replica:
1 while the replica has data left, else 0; index of the first weight with a NaN or Inf, or −1;
signature of the weights that were set from outside; what its worker asks for (see `Request`); its
worker's mark (see `tfpara.cluster.place`): exchanges from Python so far, purpose of this one,
epoch; then, for each part of the model that is averaged at times of its own, the samples and, after
these, the minibatches since its last sync; then the steps that each optimizer has counted whose
slots all share after the sync; then all minibatches that the replica has taken, and the learning
rate of each optimizer, NaN where nothing was trained with it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# And what follows: samples.
RUNNING, NONFINITE, SIGNATURE, REQUEST, MET, PURPOSE, EPOCH, SAMPLES = range(8)


# Learning rates that differ by less, relatively, are the same, computed on two kinds of machines.
_ROUNDING = 1e-6
# Before a worker fails: by then the others have the table that says why. Its failure ends what they
# have not received yet.
_GRACE_SECONDS = 1.0


class Columns(NamedTuple):
    """Of a report, what depends on the model: `samples`, `steps`, `taken` (one), `rates`."""

    samples: slice
    steps: slice
    taken: slice
    rates: slice


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


def are_apart(reports: tf.Tensor) -> tf.Tensor:
    """Whether the workers have come to different exchanges, which only their order has paired.

    All must have had as many exchanges from Python. Those that do not train must have come for the
    same purpose; and where others train, it must be one for which these are waited for, in the same
    epoch of `fit` or before it. An epoch of 0 is outside of `fit`.
    """
    running = reports[:, RUNNING] > 0.0
    met, purpose, epoch = reports[:, MET], reports[:, PURPOSE], reports[:, EPOCH]
    same = running | (purpose == tf.reduce_max(purpose))
    infinity = tf.fill(tf.shape(epoch), tf.constant(np.inf, tf.float64))
    last = tf.reduce_max(tf.where(running, epoch, -infinity))
    awaited = tf.reduce_min(tf.where(running, infinity, epoch))
    outside = tf.reduce_any(running & (epoch == 0.0)) & tf.reduce_any(~running & (epoch > 0.0))
    return ~tf.reduce_all((met == met[0]) & same) | (last > awaited) | outside


def is_bad(reports: tf.Tensor, columns: Columns) -> tf.Tensor:
    """Whether the reports forbid a sync; `problem_of` says why."""
    good = (
        tf.reduce_all(reports[:, NONFINITE] < 0.0)
        & tf.reduce_all(_have_equal_signatures(reports))
        & tf.reduce_all(_can_be_counted(reports[:, columns.samples]))
        & ~tf.reduce_any(_differing_rates(reports, columns))
        & ~are_apart(reports)
    )
    return ~good


def _have_equal_signatures(reports: tf.Tensor) -> tf.Tensor:
    signatures = reports[:, SIGNATURE]
    return (signatures == signatures[0]) | tf.math.is_nan(signatures)


def _can_be_counted(samples: tf.Tensor) -> tf.Tensor:
    """Of each replica, [N]."""
    return tf.reduce_all(tf.math.is_finite(samples) & (samples >= 0.0), 1)


def _differing_rates(reports: tf.Tensor, columns: Columns) -> tf.Tensor:
    """Of two replicas and an optimizer whether the rates should be the same and are not, [N, N, K].

    A callback may set the rate before every minibatch, so they should where both replicas have
    taken as many, in the open block and before it.
    """
    taken = tf.concat([reports[:, columns.steps], reports[:, columns.taken]], 1)
    alike = tf.reduce_all(taken[:, tf.newaxis] == taken, 2, keepdims=True)
    rates = reports[:, columns.rates]
    larger = tf.maximum(tf.abs(rates[:, tf.newaxis]), tf.abs(rates))
    return alike & (tf.abs(rates[:, tf.newaxis] - rates) > _ROUNDING * larger)


def problem_of(
    reports: tf.Tensor,
    columns: Columns,
    weight_names: Sequence[str],
    replicas_per_worker: int,
    apart: tf.Tensor,
) -> tf.Tensor:
    """The sentence that says why the reports forbid a sync, the same on every worker; or "".

    Args:
        reports: of all replicas.
        columns: what is where in them.
        weight_names: by the index that reports give.
        replicas_per_worker: devices of a worker.
        apart: the sentence that says who is where, if the workers are apart, else "".
    """

    def owner(replica: tf.Tensor) -> tf.Tensor:
        worker = replica // replicas_per_worker
        return tf.strings.format("replica {} (worker {})", (replica, worker))

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
    unequal = tf.strings.join(
        [
            owner(other),
            " starts from other weights than replica 0. Load the same weights on every worker "
            "before training.",
        ]
    )
    counted = _can_be_counted(reports[:, columns.samples])
    uncounted = tf.strings.join(
        [
            owner(tf.argmin(tf.cast(counted, tf.int32), output_type=tf.int32)),
            " counts minibatches by a negative number, NaN or Inf in the mean of the replicas. "
            "Look at the sample weights, or at the function given to strategy.weigh_minibatches.",
        ]
    )
    several = reports.shape[0] > replicas_per_worker
    with tf.control_dependencies([_wait_if(is_bad(reports, columns))] if several else []):
        problem = _rates_problem(reports, columns, owner)
        problem = tf.where(tf.reduce_all(counted), problem, uncounted)
        problem = tf.where(tf.reduce_all(_have_equal_signatures(reports)), problem, unequal)
        problem = tf.where(tf.reduce_all(bad < 0.0), problem, nonfinite)
        return tf.where(apart == "", problem, apart)


def _rates_problem(
    reports: tf.Tensor, columns: Columns, owner: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    differing = _differing_rates(reports, columns)
    count, _, optimizers = differing.shape
    if not optimizers:
        return tf.constant("")
    # The first in the table: by replica, then the other one, then the optimizer.
    where = tf.argmax(tf.reshape(tf.cast(differing, tf.int32), [-1]), output_type=tf.int32)
    pair, optimizer = where // optimizers, where % optimizers
    parts: list[tf.Tensor | str] = []
    for replica in (pair // count, pair % count):
        rate = reports[replica, columns.rates.start + optimizer]
        parts += [owner(replica), " ", tf.strings.as_string(rate, precision=6, shortest=True)]
    text = [
        "the replicas train with different learning rates after the same minibatches: ",
        *parts[:3],
        ", ",
        *parts[3:],
        ". Set the rate on every worker alike, as a callback does that all of them are given.",
    ]
    return tf.where(tf.reduce_any(differing), tf.strings.join(text), "")


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
