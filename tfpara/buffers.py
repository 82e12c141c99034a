"""Many variables as a few flat float32 buffers of about equal size, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements `start` … `stop` of variable number `variable`, flattened."""

    variable: int
    start: int
    stop: int


class Layout:
    """How a list of variables is laid out in buckets.

    The variables, flattened and one after the other, are one vector; buckets cut it into pieces of
    at most `bucket_bytes`.

    Args:
        shapes: static shapes of the variables.
        bucket_bytes: largest bucket, in bytes of float32.
    """

    def __init__(self, shapes: Sequence[tf.TensorShape], bucket_bytes: int) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self._shapes]
        self._buckets = _fill(self.sizes, max(1, bucket_bytes // 4))

    @property
    def num_elements(self) -> int:
        """Length of the whole vector."""
        return sum(self.sizes)

    @property
    def bucket_sizes(self) -> list[int]:
        """Length of each bucket, in elements."""
        return [sum(p.stop - p.start for p in bucket) for bucket in self._buckets]

    def places(self, variable: int) -> list[tuple[int, int, Piece]]:
        """Where a variable's pieces lie: (bucket, first element in it, piece)."""
        found = []
        for number, bucket in enumerate(self._buckets):
            at = 0
            for piece in bucket:
                if piece.variable == variable:
                    found.append((number, at, piece))
                at += piece.stop - piece.start
        return found

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Flat float32 buckets of the tensors (each of its variable's shape, any float type)."""
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        buckets = []
        for pieces in self._buckets:
            parts = [
                flat[p.variable]
                if p.stop - p.start == self.sizes[p.variable]
                else flat[p.variable][p.start : p.stop]
                for p in pieces
            ]
            buckets.append(tf.concat(parts, 0) if len(parts) > 1 else parts[0])
        return buckets

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inverse of `pack`: float32 tensors of the variables' shapes."""
        parts: list[list[tf.Tensor]] = [[] for _ in self.sizes]
        for pieces, bucket in zip(self._buckets, buckets, strict=True):
            lengths = [p.stop - p.start for p in pieces]
            for piece, part in zip(pieces, tf.split(bucket, lengths), strict=True):
                parts[piece.variable].append(part)
        whole = [tf.concat(p, 0) if len(p) > 1 else p[0] if p else tf.zeros([0]) for p in parts]
        return [tf.reshape(w, shape) for w, shape in zip(whole, self._shapes, strict=True)]


def _fill(sizes: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Cuts the vector into buckets of nearly equal size, none above `capacity` elements."""
    total = sum(sizes)
    target = math.ceil(total / math.ceil(total / capacity)) if total else capacity
    buckets: list[list[Piece]] = []
    room = 0
    for variable, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = target
            stop = min(size, start + room)
            buckets[-1].append(Piece(variable, start, stop))
            room -= stop - start
            start = stop
    return buckets
