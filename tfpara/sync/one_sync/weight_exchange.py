"""The second phase of a sync: workers exchange weights and apply the rule and the averages.

Nothing is written before everything has arrived: first an `exchange`, then its `commit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpara.collectives import TensorFlowCollectives, sum_on_first_device
from tfpara.sync.one_sync.global_state import GlobalState, Update
from tfpara.sync.one_sync.placement import Aggregation, Replicated, cut
from tfpara.sync.one_sync.replicas import Buckets, Replicas
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.typing import Scalar

# The weights of a small model are sent together with the reports, so they need no all-reduce. A
# model is small if the weights of all workers together have at most WITH_REPORTS_BYTES, and if a
# worker then sends at most MORE_BYTES more than in an all-reduce. MORE_BYTES take 5 ms at 100
# Mbit/s, about as long as the all-reduce that is saved.
WITH_REPORTS_BYTES = 2 << 20
MORE_BYTES = 1 << 16
# TensorFlow takes a part of a float32 or int32 vector without a copy if the indices at which the
# part begins and ends are multiples of this number. So vectors that are sent together are followed
# by zeros, up to such a multiple.
ALIGNED = 16
# The writes of a wire (a transport of weights): each variable of the wire, with the value that
# `Averaging.commit` writes to the variable.
Writes = list[tuple[tf.Variable, tf.Tensor]]


class Shares(NamedTuple):
    """The shares of the local replicas in a mean over the replicas of all workers.

    portions: n_i / Σ_j n_j for n_i samples, shape [local replicas].
    divisor: N if all replicas have equal shares, so that the plain sum is divided once; else 1.
    of_block: length of this block as a fraction of a whole one, 0 < f ≤ 1.
    """

    portions: tf.Tensor
    divisor: tf.Tensor
    of_block: tf.Tensor


class Arrival(NamedTuple):
    """The result of an exchange, not written yet.

    received: for each device the buckets that the rule broadcast.
    means: for each holder its parts of the mean.
    writes: the wire's variables and their new values.
    """

    update: Update
    received: list[list[tf.Tensor]]
    means: list[list[tf.Tensor]]
    writes: Writes


class Averaging:
    """The exchanges of one model. `anchors`: the replicas' state as the last sync wrote it."""

    def __init__(self, replicas: Replicas, wire: PlainWire, global_state: GlobalState) -> None:
        self._replicas = replicas
        self.wire = wire
        self._aggregation = global_state.aggregation
        self._collectives = replicas.site.collectives
        self._global = global_state
        self._name, make = replicas.site.name, replicas.site.make
        anchors = replicas.state_layout.pack([v[0] for v in replicas.variables.state])
        self.anchors = [make(a, f"anchor_{k}") for k, a in enumerate(anchors)]

    def slots(self) -> Iterator[Slot]:
        for k, anchor in enumerate(self.anchors):
            yield Slot(f"counter/anchor/{k}", Kind.SHARED, anchor)

    def exchange(
        self,
        fragment: int,
        local: Sequence[Buckets],
        shares: Shares,
        means: list[list[tf.Tensor]] | None = None,
    ) -> Arrival:
        """Averages a fragment of the `local` replicas' weights and takes the global step.

        `means` are each holder's parts of the mean; None: they are still to be exchanged.
        """
        buckets = self._replicas.layout.buckets[fragment]
        writes: Writes = []
        if means is None:
            with phase("reduce"):
                means, writes = self.wire.gather(local, shares, fragment)
        with phase("rule"):
            update = self._global.update(means, buckets, shares.of_block)
        with phase("reduce"):
            received, more = self.wire.spread(update.broadcasts, fragment)
        return Arrival(update, received, means, writes + more)

    def commit(self, arrival: Arrival) -> None:
        """Writes the global state and the wire's variables, but not the replicas' weights."""
        self._global.commit(arrival.update)
        for variable, value in arrival.writes:
            variable.assign(value)

    def exchange_others(self, shares: Shares) -> list[tf.Tensor]:
        """Returns buckets of the mean state minus `anchors`, and of the mean slots."""
        devices = self._replicas.devices
        with phase("pack"):
            own = [self._replicas.others(replica, self.anchors) for replica in range(len(devices))]
            terms = weighted(shares.portions, own, devices)
        with phase("reduce"):
            sums = sum_on_first_device(terms, devices)
            return self._collectives.all_reduce(sums, f"{self._name}/others")

    def commit_others(self, means: Sequence[tf.Tensor]) -> None:
        moved, slots = means[: len(self.anchors)], means[len(self.anchors) :]
        with tf.device(self._replicas.devices[0]):
            state = [a + s for a, s in zip(self.anchors, moved, strict=True)]
            for anchor, value in zip(self.anchors, state, strict=True):
                anchor.assign(value)
        self._replicas.write_others(state, slots)

    def exchange_moments(
        self, update: Update, shares: Shares, steps: tf.Tensor, iterations: tf.Tensor
    ) -> dict[str, list[list[tf.Tensor]]]:
        """Adds the local optimizers' moments for the next block to an `update`.

        Returns each device's buckets of them by field, "momentum" or "velocity". `steps` must be at
        least 1: an empty block has no mean gradient.
        """
        means = self.mean_moments(shares.portions)
        of_block = {"steps": steps, "iterations": iterations, "share": shares.of_block}
        kept = self._global.update_moments(*means, **of_block)
        update.states["moments"] = kept
        return {
            field: self._aggregation.spread(
                [[getattr(m, field) for m in parts] for parts in kept], f"{self._name}/{field}"
            )
            for field in ("momentum", "velocity")
        }

    def mean_moments(self, portions: tf.Tensor) -> list[list[list[tf.Tensor]]]:
        """Returns for each of the two moments, for each holder, its parts of the replicas' mean."""
        devices = self._replicas.devices
        own = [self._replicas.moments(replica) for replica in range(len(devices))]
        return [
            self._aggregation.gather(weighted(portions, kind, devices), f"{self._name}/moments/{k}")
            for k, kind in enumerate(zip(*own, strict=True))
        ]

    def start_moments(self) -> None:
        """Sets filtered moments of all replicas to those with which the open block began."""
        if self._replicas.variables.moments:
            for field in ("momentum", "velocity"):
                buckets = self._global.whole(f"moments/{field}")
                self._replicas.write_moments(field, [buckets] * len(self._replicas.devices))

    def restart_moments(self) -> None:
        """Sets the moments of all replicas to their mean, since a new block needs equal ones."""
        site = self._replicas.site
        means = self.mean_moments(tf.fill([len(site.devices)], 1.0 / site.num_replicas))
        for field, parts in zip(("momentum", "velocity"), means, strict=True):
            spread = self._aggregation.spread(parts, f"{self._name}/{field}")
            self._global.set_field(f"moments/{field}", spread[0])
            self._replicas.write_moments(field, spread)
        self._global.set_field("moments/equivalent_steps", tf.constant(0.0))

    def distance(self, fragment: int, local: Sequence[Buckets], arrival: Arrival) -> tf.Tensor:
        """Returns `SyncStatistics.distance`.

        If the global state is sharded, a replica's distance is that of the part which it holds, so
        that nothing more has to be sent.
        """
        buckets = self._replicas.layout.buckets[fragment]
        squares, norms = [], []
        for replica, own in enumerate(local):
            holder = min(replica, len(arrival.means) - 1)
            parts = self._aggregation.parts(holder)[buckets]
            with tf.device(self._replicas.devices[replica]):
                for bucket, mean, part in zip(own, arrival.means[holder], parts, strict=True):
                    squares.append(2.0 * tf.nn.l2_loss(cut(bucket, part) - mean))
                    norms.append(2.0 * tf.nn.l2_loss(mean))
        return tf.sqrt(tf.add_n(squares) / tf.maximum(tf.add_n(norms), 1e-30))

    @property
    def bytes_sent_of_others(self) -> Scalar:
        """The number of bytes that this worker sends to others for state and slots."""
        replicas = self._replicas
        elements = replicas.state_layout.num_elements + replicas.slot_layout.num_elements
        return _all_reduce_bytes(elements, replicas.site.workers_now()[0])


class PlainWire:
    """The transport of a fragment's weights between devices and holders, in float32."""

    def __init__(self, aggregation: Aggregation, replicas: Replicas) -> None:
        self._aggregation = aggregation
        self._replicas = replicas
        self._collectives = replicas.site.collectives
        self._name = replicas.site.name

    def gather(
        self, local: Sequence[Buckets], shares: Shares, fragment: int
    ) -> tuple[list[list[tf.Tensor]], Writes]:
        """Returns for each holder its parts of the mean Σ_i share_i w_i over all replicas."""
        if self._replicas.site.has_one_replica:
            return [list(local[0])], []
        terms = []
        for replica, device in enumerate(self._replicas.devices):
            with tf.device(device):
                terms.append(_terms(local[replica], shares, replica))
        sums = self._aggregation.gather(terms, f"{self._name}/weights/{fragment}")
        means = []
        for device, parts in zip(self._aggregation.holders, sums, strict=True):
            with tf.device(device):
                means.append([part / shares.divisor for part in parts])
        return means, []

    def spread(
        self, broadcasts: Sequence[Buckets], fragment: int
    ) -> tuple[list[list[tf.Tensor]], Writes]:
        """Returns for each device the whole buckets that the holders broadcast in parts."""
        buckets = self._replicas.layout.buckets[fragment]
        name = f"{self._name}/broadcast/{fragment}"
        return self._aggregation.spread(broadcasts, name, buckets), []

    def bytes_sent(self, fragment: int) -> Scalar:
        """Returns the number of bytes that this worker sends in `gather` and `spread` together."""
        # A reduce-scatter and an all-gather together send as many bytes as an all-reduce. So the
        # number is the same for a sharded and a replicated model.
        elements = sum(self._replicas.layout.sizes[self._replicas.layout.variables[fragment]])
        return _all_reduce_bytes(elements, self._replicas.site.workers_now()[0])


class WithReports:
    """The transport of a small model's weights, in float32, together with the reports.

    Every worker gets the weights of all workers. The mean is the same as with `PlainWire`, except
    that all-reduces of three workers and more may add in another order. `sizes` are the lengths of
    the buckets, and of the zeros that are sent after them.
    """

    def __init__(self, replicas: Replicas) -> None:
        sizes, self._workers = replicas.layout.bucket_sizes, replicas.site.collectives.size
        self.sizes = [*sizes, -sum(sizes) % ALIGNED]
        self.elements = sum(self.sizes)

    @classmethod
    def of(cls, aggregation: Aggregation, replicas: Replicas, whole: bool) -> WithReports | None:
        """Returns the transport if the model's weights may travel with the reports, else None.

        See docs/design.md, "The weights of a small model travel with the reports". Each of N
        workers sends its weights N − 1 times.
        """
        site = replicas.site
        fits = (
            whole
            and isinstance(aggregation, Replicated)
            and isinstance(site.collectives, TensorFlowCollectives)
            and len(replicas.devices) == 1
            and "CPU" in replicas.devices[0].upper()
            and not (site.company.unlike_devices or len(site.company.kinds) > 1)
            and not site.company.changes
        )
        made = cls(replicas)
        workers = site.collectives.size
        more = made.bytes_sent - _all_reduce_bytes(made.elements, workers)
        few = 0 < 4 * made.elements * workers <= WITH_REPORTS_BYTES and more <= MORE_BYTES
        return made if fits and few else None

    def sent(self, buckets: Buckets) -> list[tf.Tensor]:
        return [*buckets, tf.zeros(self.sizes[-1:])]

    def mean(
        self, arrived: Sequence[tf.Tensor], of_all: tf.Tensor, shares: Shares
    ) -> list[list[tf.Tensor]]:
        """Returns the buckets of the mean of all workers' weights, for the only holder."""
        equal = shares.divisor > 1.0
        terms = [
            tf.where(equal, 1.0, portion) * weights
            for portion, weights in zip(tf.unstack(of_all, num=self._workers), arrived, strict=True)
        ]
        # A sum over an axis adds in the same order on all workers. `add_n` may begin with any term,
        # and its results could differ between workers.
        summed = tf.reduce_sum(tf.stack(terms), 0)
        return [tf.split(summed / shares.divisor, self.sizes)[:-1]]

    @property
    def bytes_sent(self) -> int:
        return 4 * self.elements * (self._workers - 1)


def _all_reduce_bytes(elements: int, workers: Scalar) -> Scalar:
    """Returns the bytes that a worker sends in an all-reduce: 2 (N − 1)/N · 4 · elements."""
    return 8 * elements * (workers - 1) / workers


def weighted(
    portions: tf.Tensor, per_device: Sequence[Buckets], devices: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Returns the replicas' buckets times their portions, each replica's on its device."""
    terms = []
    for replica, device in enumerate(devices):
        with tf.device(device):
            terms.append([portions[replica] * bucket for bucket in per_device[replica]])
    return terms


def _terms(buckets: Buckets, shares: Shares, replica: int) -> Buckets:
    """Returns a replica's terms of the mean; the buckets as they are if all shares are equal."""
    # With equal shares, each holder divides its part of the sum by N, which is cheaper than a pass
    # over all weights.
    return tf.cond(
        shares.divisor > 1.0,
        lambda: list(buckets),
        lambda: [shares.portions[replica] * b for b in buckets],
    )


def phase(name: str) -> contextlib.AbstractContextManager:
    """Returns a name scope for a phase of the sync, by which profilers show its operations."""
    return tf.name_scope(f"sync/{name}")
