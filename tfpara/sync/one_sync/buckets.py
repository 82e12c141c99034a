"""The layout of many variables in a few flat float32 buffers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

# A variable has buckets of its own if it has at least 1/`_OWN_BUCKET` of the elements that fit into
# a bucket.
_OWN_BUCKET = 4
# Large variables are cut into buckets at multiples of this number of elements. Replicas hold parts
# of the buckets. These parts are then aligned in memory too, so they need no copy.
_ALIGNED = 4096


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements `start` … `stop` of the flattened variable number `variable`."""

    variable: int
    start: int
    stop: int


class Layout:
    """The layout of a list of variables in buckets of at most `bucket_bytes` bytes of float32.

    A large variable, flattened, has buckets of its own, and small ones share buckets: see
    docs/design.md, "A large variable shares no bucket". A fragment is a run of consecutive
    variables, at least one of them not empty; all fragments have about equal size. No bucket
    belongs to two fragments.

    Attributes:
        sizes: number of elements of each variable.
        variables: for each fragment its slice of the list of variables.
        buckets: for each fragment its slice of the list of buckets.
    """

    def __init__(
        self, shapes: Sequence[tf.TensorShape], bucket_bytes: int, fragments: int = 1
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self._shapes]
        self.variables = _divide(self.sizes, fragments)
        self.buckets: list[slice] = []
        self._buckets: list[list[Piece]] = []
        for part in self.variables:
            filled = _fill(self.sizes, part, max(1, bucket_bytes // 4))
            self.buckets.append(slice(len(self._buckets), len(self._buckets) + len(filled)))
            self._buckets += filled

    @property
    def num_elements(self) -> int:
        """The number of elements of all variables together."""
        return sum(self.sizes)

    @property
    def bucket_sizes(self) -> list[int]:
        """The length of each bucket, in elements."""
        return [sum(p.stop - p.start for p in bucket) for bucket in self._buckets]

    def places(self, variable: int) -> list[tuple[int, int, Piece]]:
        """Returns for each piece of a variable: its bucket's number, its start there, the piece."""
        found = []
        for number, bucket in enumerate(self._buckets):
            at = 0
            for piece in bucket:
                if piece.variable == variable:
                    found.append((number, at, piece))
                at += piece.stop - piece.start
        return found

    def pack(self, tensors: Sequence[tf.Tensor], fragment: int | None = None) -> list[tf.Tensor]:
        """Packs tensors of any float type, one for each variable, into flat float32 buckets.

        If `fragment` is given, the tensors and the buckets are those of this fragment alone.
        """
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        first = self.variables[fragment].start if fragment is not None else 0
        buckets = []
        for pieces in self._of(fragment):
            parts = [
                flat[p.variable - first]
                if p.stop - p.start == self.sizes[p.variable]
                else flat[p.variable - first][p.start : p.stop]
                for p in pieces
            ]
            buckets.append(tf.concat(parts, 0) if len(parts) > 1 else parts[0])
        return buckets

    def unpack(self, buckets: Sequence[tf.Tensor], fragment: int | None = None) -> list[tf.Tensor]:
        """The inverse of `pack`: float32 tensors of the variables' shapes."""
        whole_list = slice(0, len(self.sizes))
        variables = self.variables[fragment] if fragment is not None else whole_list
        parts: list[list[tf.Tensor]] = [[] for _ in self.sizes[variables]]
        for pieces, bucket in zip(self._of(fragment), buckets, strict=True):
            lengths = [p.stop - p.start for p in pieces]
            for piece, part in zip(pieces, tf.split(bucket, lengths), strict=True):
                parts[piece.variable - variables.start].append(part)
        whole = [tf.concat(p, 0) if len(p) > 1 else p[0] if p else tf.zeros([0]) for p in parts]
        shapes = self._shapes[variables]
        return [tf.reshape(w, shape) for w, shape in zip(whole, shapes, strict=True)]

    def _of(self, fragment: int | None) -> list[list[Piece]]:
        return self._buckets if fragment is None else self._buckets[self.buckets[fragment]]


def _divide(sizes: Sequence[int], count: int) -> list[slice]:
    """Returns `count` slices of the variables, each with elements, of about equal size in them."""
    filled = [number for number, size in enumerate(sizes) if size]
    if count > max(1, len(filled)):
        raise ValueError(
            f"fragments={count}: the model has {len(filled)} trainable variables, and a fragment "
            f"is one of them at least. Give fragments of {max(1, len(filled))} or fewer."
        )
    total, before, start = sum(sizes), 0, 0
    runs = []
    for number in range(1, count + 1):
        stop = start
        later = count - number
        # Each later fragment must get a variable that is not empty, so this fragment ends before
        # variable number `last`.
        last = filled[-later] if later else len(sizes)
        while stop < last and (
            number == count
            or not any(sizes[start:stop])
            or before + sizes[stop] / 2 < total * number / count
        ):
            before += sizes[stop]
            stop += 1
        runs.append(slice(start, stop))
        start = stop
    return runs


def _fill(sizes: Sequence[int], part: slice, capacity: int) -> list[list[Piece]]:
    """Divides the variables in the slice `part` into buckets of at most `capacity` elements."""
    numbers = list(range(len(sizes)))[part]
    threshold = max(1, capacity // _OWN_BUCKET)
    large = [[number] for number in numbers if sizes[number] >= threshold]
    small = [number for number in numbers if 0 < sizes[number] < threshold]
    buckets = []
    for group in (*large, small):
        buckets += _cut_evenly([Piece(number, 0, sizes[number]) for number in group], capacity)
    return buckets


def _cut_evenly(pieces: Sequence[Piece], capacity: int) -> list[list[Piece]]:
    """Puts pieces, in order, into as few buckets as possible, of nearly equal size."""
    total = sum(piece.stop - piece.start for piece in pieces)
    target = math.ceil(total / math.ceil(total / capacity)) if total else capacity
    if target > 16 * _ALIGNED:
        target = min(capacity, math.ceil(target / _ALIGNED) * _ALIGNED)
    buckets: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            if room == 0:
                buckets.append([])
                room = target
            stop = min(piece.stop, start + room)
            buckets[-1].append(Piece(piece.variable, start, stop))
            room -= stop - start
            start = stop
    return buckets
