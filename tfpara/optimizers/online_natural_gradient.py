"""The online natural gradient of Povey, Zhang and Khudanpur (2014), on the rows of one matrix.

The rows of X [N, D] are vectors: the inputs of a layer, or the derivatives of its outputs. Their
scatter is estimated over the minibatches, as a low-rank matrix plus a multiple of the unit matrix.
Each minibatch is multiplied by the smoothed inverse of the estimate from the earlier minibatches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

# The largest η, unless `history_minibatches` sets η. With η = 1 an update would forget the former F
# completely. Then F would become zero if all rows were zero.
MAX_ETA = 0.9
# If an element of R Rᵀ differs from the unit matrix by more than this, the rows of R are made
# orthonormal again.
ORTHONORMALITY = 1e-3


class Scatter(NamedTuple):
    """The estimate F = Rᵀ diag(d) R + ρ I of the rows' mean scatter XᵀX / N.

    Attributes:
        basis: R, float32 [rank, D], orthonormal rows.
        diagonal: d, float32 [rank], positive.
        rho: ρ, float32 [], positive.
    """

    basis: tf.Tensor
    diagonal: tf.Tensor
    rho: tf.Tensor


@dataclasses.dataclass(frozen=True)
class OnlineNaturalGradient:
    """The online natural gradient for rows of one width.

    With S = XᵀX / N, T = η S + (1−η) F, Y = R T and the eigendecomposition Y Yᵀ = U C Uᵀ, an
    update is

        R ← C^{-1/2} Uᵀ Y
        ρ ← (tr T − tr C^{1/2}) / (D − rank)
        d ← C^{1/2} − ρ

    so that tr F = tr T; and with G = F + (α/D) tr(F) I the rows become

        X̂ = X G⁻¹ · β,   β = ρ + (α/D) tr F
        X̄ = X̂ · sqrt(tr XXᵀ / tr X̂X̂ᵀ)

    Args:
        rank: rank of the low-rank part, below the rows' width; see `sensible_rank`.
        history: number of rows after which F forgets: η = 1 − exp(−N / history), at most 0.9.
        alpha: α ≥ 0, the smoothing of F by the unit matrix.
        epsilon: absolute floor of ρ and d.
        delta: floor of ρ, relative to the largest eigenvalue of F.
        history_minibatches: if set, η = 1 / history_minibatches instead, whatever N is.

    Source: Povey, Zhang and Khudanpur (2014), "online" NG-SGD. The start and the floors are from
    the notes in Kaldi's nnet3/natural-gradient-online.h.
    """

    rank: int
    history: float = 2000.0
    alpha: float = 4.0
    epsilon: float = 1e-10
    delta: float = 5e-4
    history_minibatches: float | None = None

    def arbitrary(self, width: int) -> Scatter:
        """Returns a small initial F, which must be updated before its first use."""
        epsilon = tf.constant(self.epsilon, tf.float32)
        return Scatter(arbitrary_basis(self.rank, width), tf.fill([self.rank], epsilon), epsilon)

    def precondition(self, scatter: Scatter, rows: tf.Tensor) -> tf.Tensor:
        """Returns X̄: the rows [N, D] times the smoothed inverse of F, at their former norm."""
        width = rows.shape[1]
        trace = width * scatter.rho + tf.reduce_sum(scatter.diagonal)
        beta = scatter.rho + self.alpha / width * trace
        # G is the smoothed F, and R is `scatter.basis`. By Woodbury's identity β G⁻¹ = I − Rᵀ E R,
        # where E is the diagonal matrix of `e`.
        e = scatter.diagonal / (scatter.diagonal + beta)
        projected = tf.matmul(rows, scatter.basis, transpose_b=True)
        turned = rows - tf.matmul(projected * e, scatter.basis)
        before, after = _square(rows), _square(turned)
        return turned * tf.sqrt(tf.math.divide_no_nan(before, after))

    def update(self, scatter: Scatter, rows: tf.Tensor) -> Scatter:
        """Returns F after one more minibatch."""
        number, width = tf.cast(tf.shape(rows)[0], tf.float64), rows.shape[1]
        eta = tf.minimum(1.0 - tf.exp(-number / self.history), tf.constant(MAX_ETA, tf.float64))
        if self.history_minibatches is not None:
            eta = tf.constant(1.0 / self.history_minibatches, tf.float64)
        basis, diagonal, rho = (tf.cast(t, tf.float64) for t in scatter)
        projected = tf.matmul(rows, scatter.basis, transpose_b=True)
        basis_s = tf.cast(tf.matmul(projected, rows, transpose_a=True), tf.float64) / number
        # y and z are computed in double precision, since z grows with the fourth power of the data.
        y = eta * basis_s + (1 - eta) * (diagonal + rho)[:, None] * basis
        z = tf.matmul(y, y, transpose_b=True)
        c, u = tf.linalg.eigh(z)
        c, u = c[::-1], u[:, ::-1]  # sorts the eigenvalues from the largest to the smallest
        # Without rounding errors no eigenvalue would be below ((1 − η) ρ)². So smaller eigenvalues
        # are raised to this value.
        root = tf.sqrt(tf.maximum(c, tf.square((1 - eta) * rho)))
        new_basis = tf.matmul(u, y, transpose_a=True) / root[:, None]
        trace_s = tf.cast(_square(rows), tf.float64) / number
        trace_f = width * rho + tf.reduce_sum(diagonal)
        trace_t = eta * trace_s + (1 - eta) * trace_f
        new_rho = (trace_t - tf.reduce_sum(root)) / (width - self.rank)
        new_diagonal = tf.maximum(root - new_rho, self.epsilon)
        new_rho = tf.maximum(new_rho, tf.maximum(self.delta * root[0], self.epsilon))
        return Scatter(
            tf.cast(orthonormal(new_basis), tf.float32),
            tf.cast(new_diagonal, tf.float32),
            tf.cast(new_rho, tf.float32),
        )


def sensible_rank(rank: int, width: int) -> int:
    """Returns `rank`, or half of `width` if less; 0 for a width of 1, where nothing changes."""
    return min(rank, (width + 1) // 2) if width > 1 else 0


def arbitrary_basis(rank: int, width: int) -> tf.Tensor:
    """Returns orthonormal rows, float32 [rank, width].

    Row r has one value in columns r, r + rank, … and 0 in the others.
    """
    columns = tf.range(width) % rank
    member = tf.one_hot(columns, rank, axis=0)
    counts = [math.ceil((width - row) / rank) for row in range(rank)]
    return member / tf.sqrt(tf.constant(counts, tf.float32))[:, None]


def orthonormal(basis: tf.Tensor) -> tf.Tensor:
    """Returns `basis`, its rows made orthonormal again if rounding has left them far from it."""
    product = tf.matmul(basis, basis, transpose_b=True)
    error = tf.reduce_max(tf.abs(product - tf.eye(basis.shape[0], dtype=basis.dtype)))

    def again() -> tf.Tensor:
        q, r = tf.linalg.qr(tf.transpose(basis))
        sign = tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)
        return tf.transpose(q) * tf.cast(sign, basis.dtype)[:, None]

    return tf.cond(error <= ORTHONORMALITY, lambda: basis, again)


def _square(rows: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(rows))
