"""The reports of the replicas before a sync, and the decisions that all workers take from them.

The reports of all replicas form a table that is the same on every worker. Each replica has one row,
a vector of float64 with these columns:

- 1 while the replica has data left, else 0;
- the index of the first weight with a NaN or Inf, or −1;
- the signature of the weights, which shows whether workers start from different weights;
- the request of its worker (see `Request`);
- the mark of its worker (see `tfpara.cluster.call_site`), three columns: number of exchanges from
  Python so far, purpose of this exchange, epoch;
- the samples since the last sync, one column for each part of the model (see
  `tfpara.sync.one_sync.block`);
- the minibatches since the last sync, one column for each part;
- the step counts of the optimizers whose slots are the same on all replicas after the sync;
- all minibatches that the replica has taken;
- the signature of the state and of the frozen weights, computed like that of the weights;
- the seconds in which the worker has trained the block, 0 or less if that is not known;
- if minibatches with NaN or Inf are left out, two columns: the number of minibatches in the epoch,
  and how many of them were left out;
- the learning rate of each optimizer, NaN if it may differ from that of other replicas.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpara.checks import too_many_left_out
from tfpara.cluster.call_site import EPOCH_END
from tfpara.sync.settings import NEVER
from tfpara.typing import Array

# The indices of a report's first columns. The columns from SAMPLES on depend on the model, so
# `Columns` has their indices.
RUNNING, NONFINITE, SIGNATURE, REQUEST, MET, PURPOSE, EPOCH, SAMPLES = range(8)


# Learning rates count as equal if they differ by at most this fraction of the larger one, because
# different kinds of machines may round them differently.
_ROUNDING = 1e-6


class Columns(NamedTuple):
    """The columns of a report that depend on the model, in the order at the top of this file."""

    samples: slice
    steps: slice
    counts: slice
    taken: slice
    others: slice
    seconds: slice
    left_out: slice
    rates: slice

    @classmethod
    def of(cls, parts: int, counts: int, rates: int, left_out: bool = False) -> Columns:
        ends = np.cumsum([SAMPLES, parts, parts, counts, 1, 1, 1, 2 * left_out, rates]).tolist()
        return cls(*map(slice, ends[:-1], ends[1:]))

    @property
    def width(self) -> int:
        return self.rates.stop


class Request(enum.IntEnum):
    """The request of a worker to all others; at a sync they agree on the largest number."""

    NOTHING = 0
    MEET = 1  # in an elastic run: a worker wants to join or to leave
    CHECKPOINT = 2
    STOP = 3  # end the training
    LEAVE = 4  # write a checkpoint and end the program, to be started again


def report_of(
    weights: Array,
    samples: Array,
    counts: Array,
    rates: Array,
    *,
    running: bool,
    signature: float,
    others: float,
    seconds: float = 0.0,
    request: float,
    mark: Array,
    steps: Array,
    taken: int,
    any_rates: bool,
    never: bool,
    left_out: Array | Sequence[float] = (),
) -> Array:
    """Returns a replica's report, a row of the table; arguments and result are NumPy's.

    `weights` has a number for each averaged variable, NaN or Inf if one of its elements is.
    `any_rates`: the rates may differ from those of others, as after a block in which the replica
    has trained nothing. `never`: the replicas are independent, so that nothing is averaged.
    """
    bad = np.flatnonzero(~np.isfinite(weights))
    if never:
        samples = np.zeros_like(samples)
    used = np.full(len(rates), np.nan) if any_rates or never else rates
    flags = [running, bad[0] if len(bad) else -1, signature, request]
    worker = [taken, others, seconds, *left_out]
    return np.concatenate([flags, mark, samples, steps, counts, worker, used])


def signature_of(value: tf.Tensor) -> tf.Tensor:
    """Returns a whole number below 2^40, as float64, by which tensors are compared.

    The order of addition does not matter, since the elements' bits are added as integers.
    """
    bits = tf.cast(tf.bitcast(tf.reshape(tf.cast(value, tf.float32), [-1]), tf.int32), tf.int64)
    # The factors make the sum depend on the order of the elements, because tensors that differ in
    # this order alone must not count as equal.
    factors = 1 + tf.range(tf.size(bits, tf.int64)) % 251
    return tf.cast(tf.reduce_sum(bits * factors) % (1 << 40), tf.float64)


def are_apart(reports: Array, elastic: bool = False) -> bool:
    """Returns whether the workers have come to different exchanges, by the table of reports.

    Exchanges belong together if

    - all workers have had the same number of exchanges from Python;
    - all workers that do not train have come for the same purpose;
    - no worker trains in a later epoch of `fit` than a worker that waits (whose epoch is −1 if
      nobody may train while it waits);
    - no worker trains outside of `fit` (epoch 0) while another one waits inside `fit`;
    - in an elastic run, which deals out one epoch at a time, all train in the same epoch.
    """
    running = reports[:, RUNNING] > 0.0
    met, purpose, epoch = reports[:, MET], reports[:, PURPOSE], reports[:, EPOCH]
    same = running | (purpose == purpose.max())
    last = epoch[running].max(initial=-np.inf)
    awaited = epoch[~running].min(initial=np.inf)
    several = elastic and len(set(epoch[running])) > 1
    outside = (running & (epoch == 0.0)).any() and (~running & (epoch > 0.0)).any()
    return bool(not ((met == met[0]) & same).all() or last > awaited or outside or several)


def problem_of(
    reports: Array,
    columns: Columns,
    weight_names: Sequence[str],
    first_replicas: Sequence[int],
    share: float = 1.0,
) -> str:
    """Returns the sentence that says why the table of reports forbids a sync, or "".

    The sentence is the same on every worker. Workers that are apart are not checked here.
    `first_replicas` has the number of each worker's first replica; `share` is the share of an
    epoch's minibatches that may be left out for NaN or Inf.
    """

    def owner(replica: int) -> str:
        return f"replica {replica} (worker {bisect.bisect(first_replicas, replica) - 1})"

    bad = reports[:, NONFINITE]
    if not (bad < 0.0).all():
        replica = int(bad.argmax())
        name = weight_names[int(max(bad[replica], 0.0))]
        return (
            f'{owner(replica)} has NaN or Inf in weight "{name}"; nothing was averaged and the '
            "other replicas keep their weights. Lower the learning rate or clip the gradients, and "
            "look at that replica's data."
        )
    if _leaves_out_too_many(reports, columns, share):
        of_epoch, left_out = reports[:, columns.left_out].T
        return (
            f"{left_out.sum():.0f} of {of_epoch.sum():.0f} minibatches of this epoch had NaN or "
            f"Inf in the loss or a gradient and were left out, more than nonfinite_share={share:g} "
            f"allows; {left_out.max():.0f} of them were of {owner(int(left_out.argmax()))}. Lower "
            "the learning rate or clip the gradients, and look at that replica's data."
        )
    signatures = reports[:, SIGNATURE]
    if not ((signatures == signatures[0]) | np.isnan(signatures)).all():
        other = int(np.abs(signatures - signatures[0]).argmax())
        return (
            f"{owner(other)} starts from other weights than replica 0. Load the same weights on "
            "every worker before training."
        )
    samples = reports[:, columns.samples]
    counted = (np.isfinite(samples) & (samples >= 0.0)).all(1)
    if not counted.all():
        return (
            f"{owner(int(counted.argmin()))} counts minibatches by a negative number, NaN or Inf "
            "in the mean of the replicas. Look at the sample weights, or at the function given to "
            "strategy.weigh_minibatches."
        )
    differing = _differing(reports, columns, columns.others)
    if len(differing):
        one, other, _ = map(int, differing[0])
        return (
            f"{owner(other)} has other frozen weights or statistics, such as those of batch "
            f"normalisation or of adapt, than replica {one}. Load and set them on every worker "
            "alike, and adapt layers to the same data."
        )
    differing = _differing(reports, columns, columns.rates, _ROUNDING)
    if len(differing):
        *pair, optimizer = map(int, differing[0])
        rates = reports[:, columns.rates]
        first, second = (f"{owner(replica)} {rates[replica, optimizer]:.6g}" for replica in pair)
        return (
            "replicas train with different learning rates after the same minibatches: "
            f"{first}, {second}. Set the rate on every worker alike, for example by a callback "
            "that all of them have."
        )
    return ""


def _leaves_out_too_many(reports: Array, columns: Columns, share: float) -> bool:
    """Returns whether the replicas have left out more than a share of the epoch's minibatches."""
    if columns.left_out.start == columns.left_out.stop:
        return False
    of_epoch, left_out = reports[:, columns.left_out].sum(0)
    is_over = not reports[:, RUNNING].any() and (reports[:, PURPOSE] == EPOCH_END.number).all()
    return bool(too_many_left_out(left_out, of_epoch, share, is_over))


def _differing(reports: Array, columns: Columns, which: slice, rounding: float = 0.0) -> Array:
    """Returns [replica, replica, column] for values in `which` that wrongly differ.

    They must be equal only after equally many minibatches, both in the open block and in all, since
    a callback may set them before every minibatch.
    """
    values = reports[:, which]
    if (values == values[0]).all():
        # In most syncs all values are equal, so that no pairs need to be compared.
        return np.zeros([0, 3], int)
    taken = np.concatenate([reports[:, columns.steps], reports[:, columns.taken]], 1)
    alike = (taken[:, np.newaxis] == taken).all(2)[:, :, np.newaxis]
    larger = np.maximum(np.abs(values[:, np.newaxis]), np.abs(values))
    with np.errstate(invalid="ignore"):  # infinite − infinite is NaN, which needs no warning
        differ = np.abs(values[:, np.newaxis] - values) > rounding * larger
    return np.argwhere(alike & differ)


class Decision(NamedTuple):
    """The decision of all workers from the table of reports; only `portions` differ by worker.

    is_last: whether no replica has data left.
    agreed: the largest request; the number of replicas with data left; the number of replicas.
    counts: each shared step count's largest value over all replicas; with `by_speed`, the mean.
    trained: for each worker, the minibatches of its first replica since the last sync.
    committed: by part, whether it is averaged: a replica has trained it, and there is no problem.
    steps: by part, the most minibatches that a replica has trained; with `by_speed`, the mean.
    of_all: by part, n_i / Σ_j n_j for each replica i, where n_i are its samples.
    portions: such portions of the local replicas.
    divisor: by part, N if all replicas have equal shares, else 1.
    of_block: by part, the length of its block as a fraction of a whole block, 0 < f ≤ 1.
    """

    is_last: bool
    agreed: Array
    counts: Array
    trained: Array
    committed: Array
    steps: Array
    of_all: Array
    portions: Array
    divisor: Array
    of_block: Array


def decide(
    reports: Array,
    columns: Columns,
    problem: str,
    *,
    local: slice,
    first_replicas: Sequence[int],
    replicas: int,
    block: float,
    by_speed: bool = False,
) -> Decision:
    """Returns the decision that follows from the table of reports.

    Args:
        problem: the sentence that forbids the sync, "" if nothing does.
        local: the rows of this worker's replicas.
        first_replicas: the rows of the workers' first replicas.
        replicas: N. The table may have more than N rows, the later ones of idle replicas.
        block: minibatches of a whole block.
        by_speed: replicas have different numbers of them, and `block` is the mean.
    """
    running = reports[:, RUNNING]
    samples = _counted(reports, columns, replicas, block)
    totals = samples.sum(0)
    portions = (samples / np.where(totals > 0.0, totals, 1.0)).T
    steps, counts = reports[:, columns.steps], reports[:, columns.counts]
    steps = steps.mean(0) if by_speed else steps.max(0)
    alike = (samples == samples[0]).all(0)
    return Decision(
        is_last=not running.any(),
        agreed=np.array([reports[:, REQUEST].max(), running.sum(), len(reports)]),
        counts=np.rint(counts.mean(0)) if by_speed else counts.max(0),
        trained=reports[list(first_replicas), columns.steps.start],
        committed=(totals > 0.0) & (problem == ""),
        steps=steps,
        of_all=portions,
        portions=portions[:, local],
        divisor=np.where(alike, float(replicas), 1.0),
        of_block=np.minimum(steps / block, 1.0),
    )


def _counted(reports: Array, columns: Columns, replicas: int, block: float) -> Array:
    """Returns the samples of each replica by part, [replicas, parts], as the mean counts them.

    If all samples of a part have weight 0, every replica that has taken steps counts the same:
    momentum and weight decay have still moved its weights.
    """
    samples, steps = reports[:, columns.samples], reports[:, columns.steps]
    if block >= NEVER:
        return samples  # these are zeros, since nothing is averaged
    present = np.arange(len(reports)) < replicas
    stepped = (steps > 0.0) & present[:, np.newaxis]
    return np.where(samples.sum(0) > 0.0, samples, stepped.astype(samples.dtype))


def stop_if(problem: tf.Tensor) -> tf.Operation | None:
    """Returns an operation that fails with the text `problem`, unless the text is empty."""
    # It stands outside of a sync's function: docs/design.md, "A sync returns its error as a text".
    with tf.device("CPU:0"):
        return tf.raw_ops.Assert(condition=tf.equal(problem, ""), data=[problem])
