"""Compressed exchange of weights: rounded differences, with error feedback.

Differences are rounded, never the weights themselves. Let B̂ be the weights that all replicas have
received, w_i the local models, n_i their shares in the mean, and Q the rounding of a format:

    x = Σ n_i (w_i − B̂) + e;  q = Q(x);  e ← x − q        on each worker, i over its replicas

With a sharded global state (`ShardedWire`):

    w̄ = B + Σ q                                          by each owner of a part, over the workers
    B̂ ← B̂ + Q(B' − B̂)                                    everywhere, from the owner of each part

where B are the weights that the rule broadcast at the last sync, which the owner of each part has
without rounding, and B' those that it broadcasts now. docs/syncs.md tells more. EASGD does not
overwrite the replicas, and its equation needs their true mean, so for EASGD w̄ = B̂ + Σ q
(`measured_from` of the rules).

With a replicated global state (`ReplicatedWire`), every worker takes the rule's step, so all need
the same mean. Replicas receive B' without rounding: B̂ = B.

    r = Q(Σ q);  e ← e + Σ q − r                         by each owner of a part, in its own e
    w̄ = B + r                                            everywhere, from the owner of each part

Sums are computed from decoded numbers, in float32. The error e is the *error feedback* of Seide et
al., "1-bit stochastic gradient descent" (2014), and Karimireddy et al., "Error feedback fixes
SignSGD" (2019). The owner's part of it is that of Tang et al., "DoubleSqueeze" (2019).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpara.collectives import broadcast_to_devices, sum_on_first_device
from tfpara.sync.one_sync.global_state import GlobalState
from tfpara.sync.one_sync.placement import Aggregation, Replicated, Sharded, cut
from tfpara.sync.one_sync.replicas import Buckets, Replicas
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.one_sync.weight_exchange import PlainWire, Shares, Writes, weighted
from tfpara.typing import Scalar


class _Levels(NamedTuple):
    """A format of whole numbers: x is sent as round(x / s), where s = max|x| / `highest`.

    group: how many numbers x have one scale s in common, which is sent with them.
    per_byte: how many numbers a byte holds.
    """

    highest: int
    group: int
    per_byte: int


_HALVES = {"bf16": tf.bfloat16, "fp16": tf.float16}
_LEVELS = {"int8": _Levels(127, 256, 1), "int4": _Levels(7, 64, 2)}


def encode(rows: tf.Tensor, kind: str) -> tf.Tensor:
    """Encodes float32 rows [count, length] as rows of int32 words, which every backend can send."""
    count, length = _shape(rows)
    if kind in _HALVES:
        # Numbers beyond the range of float16 are clipped. The part that is cut off counts as a
        # rounding error, which the next sync sends.
        clipped = tf.clip_by_value(rows, -65504.0, 65504.0) if kind == "fp16" else rows
        halves = tf.cast(tf.pad(clipped, [[0, 0], [0, length % 2]]), _HALVES[kind])
        return tf.bitcast(tf.reshape(halves, [count, -1, 2]), tf.int32)
    highest, group, per_byte = _LEVELS[kind]
    groups = tf.reshape(tf.pad(rows, [[0, 0], [0, -length % group]]), [count, -1, group])
    scales = tf.reduce_max(tf.abs(groups), 2, keepdims=True) / highest
    levels = tf.round(tf.math.divide_no_nan(groups, scales))
    levels = tf.reshape(tf.clip_by_value(levels, -highest, highest), [count, -1])
    if per_byte == 2:
        # A byte holds one number of the row's first half, plus 16 times one number of the second
        # half. A NaN would spoil both numbers of its byte, so 0 is sent in its place. The receiver
        # gets NaN nevertheless, because the scale of the group is NaN.
        ones, sixteens = tf.split(tf.where(tf.math.is_nan(levels), 0.0, levels), 2, 1)
        levels = ones + 16.0 * sixteens
    words = tf.bitcast(tf.reshape(tf.cast(levels, tf.int8), [count, -1, 4]), tf.int32)
    return tf.concat([words, tf.bitcast(scales[:, :, 0], tf.int32)], 1)


def decode(words: tf.Tensor, length: Scalar, kind: str) -> tf.Tensor:
    """Decodes the words of `encode` to rows of float32 of this length."""
    count, _ = _shape(words)
    if kind in _HALVES:
        halves = tf.reshape(tf.bitcast(words, _HALVES[kind]), [count, -1])
        return tf.cast(halves, tf.float32)[:, :length]
    _, group, per_byte = _LEVELS[kind]
    groups = -(-length // group)
    levels = tf.reshape(tf.bitcast(words[:, :-groups], tf.int8), [count, -1])
    levels = tf.cast(levels, tf.float32)
    if per_byte == 2:
        # Each byte is a + 16 b, where a is a number of the row's first half and b a number of its
        # second half. As a is from -7 to 7, (a + 16 b) / 16 is rounded to b.
        sixteens = tf.round(levels / 16.0)
        levels = tf.concat([levels - 16.0 * sixteens, sixteens], 1)
    scales = tf.bitcast(words[:, -groups:], tf.float32)
    numbers = tf.reshape(levels, [count, groups, group]) * scales[:, :, tf.newaxis]
    return tf.reshape(numbers, [count, -1])[:, :length]


def _shape(rows: tf.Tensor) -> tuple[Scalar, Scalar]:
    """Returns the number of rows and their length, as tensors where the graph is built for any."""
    count, length = rows.shape
    if count is None or length is None:
        count, length = tf.unstack(tf.shape(rows, tf.int64))
    return count, length


def words_of(length: Scalar, kind: str) -> Scalar:
    """Returns the number of words of an encoded row of this length."""
    if kind in _HALVES:
        return -(-length // 2)
    _, group, per_byte = _LEVELS[kind]
    return -(-length // group) * (group // (4 * per_byte) + 1)


class CompressedWire(PlainWire):
    """The transport of weights as rounded differences: see the top of this file.

    Each bucket has one owner for each of its equal parts. The owners are the workers; within one
    process, where nothing is sent, they are its devices, as if each were a worker. `points` are the
    buckets of B̂.
    """

    _aggregation: Aggregation

    def __init__(
        self, kind: str, aggregation: Aggregation, replicas: Replicas, global_state: GlobalState
    ) -> None:
        super().__init__(aggregation, replicas)
        self._kind, self._global, make = kind, global_state, replicas.site.make
        self._alone = replicas.site.is_alone
        self._sources = replicas.devices if self._alone else replicas.devices[:1]
        self._rows = len(self._sources)  # how many rows of a message belong to each worker
        buckets = replicas.weights(0)
        with tf.device(replicas.devices[0]):
            self.points = [make(b, f"point_{k}") for k, b in enumerate(buckets)]
        self._errors = []
        for source, device in enumerate(self._sources):
            with tf.device(device):
                zeros = [tf.zeros(self._error_shape(b)) for b in buckets]
                self._errors.append([make(z, f"error_{source}_{k}") for k, z in enumerate(zeros)])

    def _error_shape(self, bucket: tf.Tensor) -> tf.TensorShape:
        return bucket.shape

    def _in_parts(self, bucket: tf.Tensor) -> tf.Tensor:
        """Returns the parts of a bucket, padded with zeros, as rows."""
        raise NotImplementedError

    def _summed(
        self, local: Sequence[Buckets], shares: Shares, fragment: int
    ) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
        """Sends q = Q(x). Returns for each bucket Σ q of this worker's parts, and x − q, as rows.

        The first has a row for each of `_sources`. The second is by source and bucket.
        """
        buckets = self._replicas.layout.buckets[fragment]
        sent, kept = [], []
        for device, errors, moved in zip(
            self._sources, self._errors, self._moved(local, shares, buckets), strict=True
        ):
            with tf.device(device):
                words, left = [], []
                for error, move in zip(errors[buckets], moved, strict=True):
                    x = self._in_parts(move + error[: move.shape[0]])
                    words.append(encode(x, self._kind))
                    left.append(x - decode(words[-1], _shape(x)[1], self._kind))
                sent.append(words)
                kept.append(left)
        sums = []
        with tf.device(self._replicas.devices[0]):
            for k, rows in enumerate(kept[0]):
                length = _shape(rows)[1]
                if self._alone:
                    received = [decode(words[k], length, self._kind) for words in sent]
                    sums.append(tf.add_n(received))
                    continue
                words = self._collectives.all_to_all(
                    sent[0][k], f"{self._name}/words/{fragment}/{k}"
                )
                sums.append(tf.reduce_sum(decode(words, length, self._kind), 0, keepdims=True))
        return sums, kept

    def _moved(
        self, local: Sequence[Buckets], shares: Shares, buckets: slice
    ) -> list[list[tf.Tensor]]:
        """Returns for each device in `_sources` the sum of n_i (w_i − B̂) over its replicas."""
        devices = self._replicas.devices
        terms = weighted(shares.portions, local, devices)
        portions = tf.unstack(shares.portions, num=len(devices))
        if self._rows == 1:
            terms, portions = [sum_on_first_device(terms, devices)], [tf.add_n(portions)]
        moved = []
        for device, own, portion in zip(self._sources, terms, portions, strict=True):
            with tf.device(device):
                points = [v.read_value() for v in self.points[buckets]]
                moved.append([b - portion * p for b, p in zip(own, points, strict=True)])
        return moved

    def set_part(self, bucket: int, at: int, values: tf.Tensor) -> None:
        """Sets elements `at` … of a bucket of B̂ to weights that Python code set on all workers."""
        stop = at + int(values.shape[0])
        self.points[bucket][at:stop].assign(values)
        for errors in self._errors:
            errors[bucket][at:stop].assign(tf.zeros_like(values))

    def adopt(
        self,
        former: CompressedWire,
        of_weights: Callable[[Buckets, Buckets], list[tf.Tensor]],
    ) -> None:
        """Takes over the points and errors of the wire that the same model had before.

        `of_weights` returns the present buckets, with the former ones' values of weights in both.
        """
        points = of_weights(former.points, self.points)
        for point, value in zip(self.points, points, strict=True):
            point.assign(value)
        sizes = [int(point.shape[0]) for point in self.points]
        old_sizes = [int(point.shape[0]) for point in former.points]
        for errors, old in zip(self._errors, former._errors, strict=True):
            kept = [e[:size] for e, size in zip(old, old_sizes, strict=True)]
            mine = [e[:size] for e, size in zip(errors, sizes, strict=True)]
            for error, value in zip(errors, of_weights(kept, mine), strict=True):
                error[: value.shape[0]].assign(value)

    def begin_anew(self) -> None:
        """Notes that this worker's replicas begin anew, at the weights that the rule broadcasts."""
        raise NotImplementedError

    def bytes_sent(self, fragment: int) -> Scalar:
        workers = self._replicas.site.workers_now()[0]
        sizes = [e.shape[0] for e in self._errors[0][self._replicas.layout.buckets[fragment]]]
        words = [words_of(-(-size // (workers * self._rows)), self._kind) for size in sizes]
        return 8 * (workers - 1) * sum(words)

    def slots(self) -> Iterator[Slot]:
        """Yields the points B̂ and the errors e."""
        for k, point in enumerate(self.points):
            yield Slot(f"counter/point/{k}", Kind.SHARED, point)
        for source, errors in enumerate(self._errors):
            for k, error in enumerate(errors):
                yield Slot(f"wire/error/{k}", Kind.REPLICA, error, source)


class ShardedWire(CompressedWire):
    """The compressed transport where each replica keeps a part of the global state."""

    _aggregation: Sharded

    def _error_shape(self, bucket: tf.Tensor) -> tf.TensorShape:
        return self._aggregation.padded(bucket).shape

    def _in_parts(self, bucket: tf.Tensor) -> tf.Tensor:
        rows = self._collectives.size * self._rows
        return tf.reshape(self._aggregation.padded(bucket), [rows, -1])

    def gather(
        self, local: Sequence[Buckets], shares: Shares, fragment: int
    ) -> tuple[list[list[tf.Tensor]], Writes]:
        buckets = self._replicas.layout.buckets[fragment]
        sums, left = self._summed(local, shares, fragment)
        kept = [
            (error, tf.reshape(rows, [-1]))
            for errors, of_source in zip(self._errors, left, strict=True)
            for error, rows in zip(errors[buckets], of_source, strict=True)
        ]
        holders, received, means = self._aggregation.holders, [], []
        for holder, device in enumerate(holders):
            # The holder's parts are cut out of B̂.
            with tf.device(device):
                parts = self._aggregation.parts(holder)[buckets]
                received.append([cut(self.points[p.bucket], p) for p in parts])
        begins = self._global.measured_from(received, buckets)
        moves = self._aggregation.to_holders([tf.reshape(rows, [-1]) for rows in sums])
        for device, points, moved in zip(holders, begins, moves, strict=True):
            with tf.device(device):
                means.append([p + m for p, m in zip(points, moved, strict=True)])
        return means, kept

    def spread(
        self, broadcasts: Sequence[Buckets], fragment: int
    ) -> tuple[list[list[tf.Tensor]], Writes]:
        buckets = self._replicas.layout.buckets[fragment]
        size, rank, kept = self._collectives.size, self._collectives.rank, []
        with tf.device(self._replicas.devices[0]):
            parts = self._aggregation.of_worker(broadcasts)
            for k, (part, point) in enumerate(zip(parts, self.points[buckets], strict=True)):
                former = tf.reshape(self._aggregation.padded(point.read_value()), [size, -1])
                rows = tf.reshape(part - former[rank], [self._rows, -1])
                words = encode(rows, self._kind)
                name = f"{self._name}/points/{fragment}/{k}"
                words = tf.concat(tf.unstack(self._collectives.all_gather(words, name)), 0)
                moved = tf.reshape(decode(words, rows.shape[1], self._kind), [-1])
                kept.append((point, point + moved[: point.shape[0]]))
        received = broadcast_to_devices([value for _, value in kept], self._replicas.devices)
        return received, kept

    def begin_anew(self) -> None:
        # Differences are measured from the points, so these must be the replicas' weights.
        for point, value in zip(self.points, self._global.broadcast_point(), strict=True):
            point.assign(value)


class ReplicatedWire(CompressedWire):
    """The compressed transport where each worker keeps the whole global state.

    All that exists on one worker alone is its error e. So in an elastic run a lost worker takes
    with it only what it has trained since the last sync, and its error. The errors have the shapes
    of the buckets, so they stay when the number of workers changes.
    """

    _aggregation: Replicated

    def _in_parts(self, bucket: tf.Tensor) -> tf.Tensor:
        owners = self._replicas.site.workers_now()[0] * self._rows
        missing = -bucket.shape[0] % owners
        return tf.reshape(tf.pad(bucket, [[0, missing]]), [owners, -1])

    def gather(
        self, local: Sequence[Buckets], shares: Shares, fragment: int
    ) -> tuple[list[list[tf.Tensor]], Writes]:
        buckets = self._replicas.layout.buckets[fragment]
        rank = self._replicas.site.workers_now()[1]
        sums, left = self._summed(local, shares, fragment)
        means, kept = [], []
        for k, (point, summed) in enumerate(zip(self.points[buckets], sums, strict=True)):
            size, length = point.shape[0], _shape(summed)[1]
            with tf.device(self._replicas.devices[0]):
                words = encode(summed, self._kind)
                own = summed - decode(words, length, self._kind)
                name = f"{self._name}/means/{fragment}/{k}"
                gathered = self._collectives.all_gather(words, name)
                words = tf.reshape(gathered, [-1, _shape(words)[1]])
                moved = tf.reshape(decode(words, length, self._kind), [-1])
                means.append(point + moved[:size])
            for source, device in enumerate(self._sources):
                with tf.device(device):
                    place = [[rank * self._rows + source]]
                    error = tf.tensor_scatter_nd_add(
                        left[source][k], place, own[source][tf.newaxis]
                    )
                    error = tf.reshape(error, [-1])[:size]
                    kept.append((self._errors[source][buckets][k], error))
        return [means], kept

    def spread(
        self, broadcasts: Sequence[Buckets], fragment: int
    ) -> tuple[list[list[tf.Tensor]], Writes]:
        points = self.points[self._replicas.layout.buckets[fragment]]
        received, _ = super().spread(broadcasts, fragment)
        return received, list(zip(points, received[0], strict=True))

    def begin_anew(self) -> None:
        # The points stay: any are right, if they are the same on all workers. The error is dropped,
        # since another worker's sync may have sent it already.
        for error in itertools.chain.from_iterable(self._errors):
            error.assign(tf.zeros_like(error))


def wire_of(
    kind: str, aggregation: Aggregation, replicas: Replicas, global_state: GlobalState
) -> CompressedWire:
    """Returns the compressed transport for an aggregation."""
    made = ShardedWire if isinstance(aggregation, Sharded) else ReplicatedWire
    return made(kind, aggregation, replicas, global_state)
