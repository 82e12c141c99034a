"""The reports of the replicas before a sync, and the decisions that all workers take from them.

The reports of all replicas form a table that is the same on every worker. Each replica has one row,
a vector of float64 with these columns:

- 1 while the replica has data left, else 0;
- the index of the first weight with a NaN or Inf, or −1;
- the signature of the weights, by which workers that start from different weights are found;
- the request of its worker (see `Request`);
- the mark of its worker (see `tfpara.cluster.place`), three columns: exchanges from Python so far,
  purpose of this exchange, epoch;
- the samples since the last sync, one column for each part of the model (see `tfpara.sync.block`);
- the minibatches since the last sync, one column for each part;
- the step counts of the optimizers whose slots are the same on all replicas after the sync;
- all minibatches that the replica has taken;
- the learning rate of each optimizer, NaN where nothing was trained with it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# The first columns of a report. The samples begin at column SAMPLES; `Columns` has all that follow.
RUNNING, NONFINITE, SIGNATURE, REQUEST, MET, PURPOSE, EPOCH, SAMPLES = range(8)


# Learning rates count as equal if they differ by less than this, relatively: two kinds of machines
# may round them differently.
_ROUNDING = 1e-6
# A worker waits this long before it fails, so that the others receive the table that says why. Its
# failure would end what they have not received yet.
_GRACE_SECONDS = 1.0


class Columns(NamedTuple):
    """The columns of a report that depend on the model.

    samples, steps: since the last sync, one for each part; at first `samples`, then minibatches.
    taken: all minibatches of the replica, one column. rates: learning rates of the optimizers. The
    step counts that all share lie between `steps` and `taken`.
    """

    samples: slice
    steps: slice
    taken: slice
    rates: slice


class Request(enum.IntEnum):
    """The request of a worker to all others; at a sync they agree on the largest number."""

    NOTHING = 0
    MEET = 1  # in an elastic run: somebody wants in or out
    CHECKPOINT = 2
    STOP = 3  # end the training
    LEAVE = 4  # write a checkpoint and end the program, to be started again


def first_nonfinite(weights: Sequence[tf.Variable], device: str) -> tf.Tensor:
    """Returns the index of the first weight with a NaN or Inf, or −1."""
    with tf.device(device):
        # A sum is finite only if all its terms are. It takes one pass and no memory.
        sums = [tf.reduce_sum(tf.cast(w, tf.float32)) for w in weights]
        finite = tf.math.is_finite(tf.stack(sums))
        first = tf.argmin(tf.cast(finite, tf.int32), output_type=tf.int32)
        return tf.where(tf.reduce_all(finite), -1, first)


def signature_of(value: tf.Tensor) -> tf.Tensor:
    """Returns a number by which tensors are compared, float64 below 2^40.

    Equal tensors have the same number; different ones almost surely have different numbers. It is
    the sum of the elements' bits as integers, which no order of addition changes.
    """
    bits = tf.cast(tf.bitcast(tf.reshape(tf.cast(value, tf.float32), [-1]), tf.int32), tf.int64)
    factors = 1 + tf.range(tf.size(bits, tf.int64)) % 251  # a permutation has another sum
    return tf.cast(tf.reduce_sum(bits * factors) % (1 << 40), tf.float64)


def are_apart(reports: tf.Tensor) -> tf.Tensor:
    """Returns whether the workers have come to different exchanges.

    Collectives pair the workers' exchanges by their order alone. They belong together if

    - all workers have had the same number of exchanges from Python;
    - all workers that do not train have come for the same purpose;
    - no worker trains in a later epoch of `fit` than a worker that waits; a purpose for which no
      other worker may still train has epoch −1;
    - no worker trains outside of `fit` (epoch 0) while another one waits inside of it.
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
    """Returns whether the reports forbid a sync; `problem_of` says why."""
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
    """Returns for each replica whether its samples are finite and not negative, shape [N]."""
    return tf.reduce_all(tf.math.is_finite(samples) & (samples >= 0.0), 1)


def _differing_rates(reports: tf.Tensor, columns: Columns) -> tf.Tensor:
    """Returns which pairs of replicas wrongly differ in an optimizer's learning rate, [N, N, K].

    Two replicas must have the same rate if both have taken as many minibatches, in the open block
    and in all: a callback may set the rate before every minibatch.
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
    """Returns the sentence that says why the reports forbid a sync, or "".

    It is the same on every worker.

    Args:
        reports: the table of all replicas' reports.
        columns: the columns that depend on the model.
        weight_names: names of the weights, by the index that a report gives.
        replicas_per_worker: number of devices of a worker.
        apart: the sentence for workers that have come to different exchanges, else "".
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
    several = reports.shape[0] is None or reports.shape[0] > replicas_per_worker
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
    count, optimizers = tf.shape(differing)[0], differing.shape[2]
    if not optimizers:
        return tf.constant("")
    # The first one in row-major order.
    first = tf.argmax(tf.reshape(tf.cast(differing, tf.int32), [-1]), output_type=tf.int32)
    pair, optimizer = first // optimizers, first % optimizers
    parts: list[tf.Tensor | str] = []
    for replica in (pair // count, pair % count):
        rate = reports[replica, columns.rates.start + optimizer]
        parts += [owner(replica), " ", tf.strings.as_string(rate, precision=6, shortest=True)]
    text = [
        "the replicas train with different learning rates after the same minibatches: ",
        *parts[:3],
        ", ",
        *parts[3:],
        ". Set the rate on every worker alike, for example by a callback that all of them have.",
    ]
    return tf.where(tf.reduce_any(differing), tf.strings.join(text), "")


def stop_if(problem: tf.Tensor) -> tf.Operation | None:
    """Returns an operation that fails with the text `problem`, unless the text is empty.

    It belongs in the graph that calls a sync, not in the sync's own function. If a function fails
    that another function of several devices has called, TensorFlow cancels the caller before it
    passes the error on, and only the cancellation is reported.
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
