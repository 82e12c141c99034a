"""The online natural gradient with its state in variables, and its use in layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpara.optimizers.online_natural_gradient import OnlineNaturalGradient, Scatter
from tfpara.typing import Nest

# As in Kaldi, each of the first ten minibatches updates F, the estimate of the scatter, whatever
# `update_period` is.
FIRST_UPDATES = 10
# F starts at an arbitrary value. So, as in Kaldi, the very first minibatch makes this number of
# updates in addition to its own.
START_UPDATES = 3

# A function that preconditions float32 rows [N, D]: those of a layer's inputs, or those of the
# derivatives of its outputs.
Side: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(eq=False)
class Preconditioner:
    """Estimates the scatter of one side of a layer and preconditions its rows.

    Args:
        method: the equations.
        update_period: minibatches between two updates of F.
        basis, diagonal, rho: variables of a `Scatter`, initially `method.arbitrary(width)`.
        minibatches: int32 variable, the number of minibatches seen, initially 0.
    """

    method: OnlineNaturalGradient
    update_period: int
    basis: keras.Variable
    diagonal: keras.Variable
    rho: keras.Variable
    minibatches: keras.Variable

    def __call__(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the preconditioned rows, float32 [N, D] of the same norm; updates F if it is due.

        If any row is not finite, or all are zero, the rows are returned unchanged and F does not
        change. (Loss scaling makes rows that are not finite on purpose.)
        """
        variables = (self.basis, self.diagonal, self.rho)
        # `tf.identity` keeps the values that the variables have before the assignments below.
        before = Scatter(*(tf.identity(v.value) for v in variables))
        seen = tf.identity(self.minibatches.value)
        total = tf.reduce_sum(tf.square(rows))
        usable = tf.math.is_finite(total) & (total > 0)
        due = (seen < FIRST_UPDATES) | ((seen - FIRST_UPDATES) % self.update_period == 0)
        # F is the estimate of the scatter. Each minibatch is preconditioned with F as it is before
        # the minibatch's own update. But F begins at an arbitrary value. So the first minibatch
        # makes `START_UPDATES` additional updates before it is preconditioned.
        start = tf.where(seen == 0, START_UPDATES, 0)
        number = tf.where(usable, start + tf.cast(due, tf.int32), 0)

        def update(count: tf.Tensor, used: Scatter, now: Scatter) -> tuple[Nest, ...]:
            new = Scatter(*_update(self.method, rows.shape[1])(now, rows))
            used = Scatter(*(tf.where(count < start, n, u) for n, u in zip(new, used, strict=True)))
            return count + 1, used, new

        # The loop makes no update, one update, or the several updates of the first minibatch.
        # Separate branches for these cases would trace `update` several times.
        _, used, after = tf.while_loop(
            lambda count, *_: count < number, update, (0, before, before), parallel_iterations=1
        )
        self.minibatches.assign(seen + tf.cast(usable, tf.int32))
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
        return tf.where(usable, self.method.precondition(used, rows), rows)


@functools.cache
def _update(method: OnlineNaturalGradient, width: int) -> Callable[..., Scatter]:
    """Returns `method.update` as a graph that layers of the same size share."""
    scatter = Scatter(*(tf.TensorSpec(t.shape) for t in method.arbitrary(width)))
    rows = tf.TensorSpec([None, width])
    return tf.function(method.update, input_signature=[scatter, rows], autograph=False)


def affine(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    bias: tf.Tensor | None,
    input_side: Side,
    output_side: Side,
) -> tf.Tensor:
    """Returns inputs · kernel + bias, with the natural gradient for kernel and bias.

    The gradient of kernel and bias together is X̄ᵀ Ē / N, where X̄ are the preconditioned rows of
    the inputs, with a 1 appended for the bias, and Ē the preconditioned rows of the outputs'
    derivatives. The derivative for the inputs is the ordinary one.

    Shapes: inputs [..., in], kernel [in, out], bias [out] or None; the sides get float32 rows
    [N, in + 1] and [N, out].
    """

    @tf.custom_gradient
    def call(*arguments: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        inputs, kernel = arguments[:2]
        outputs = keras.ops.matmul(inputs, kernel)
        if bias is not None:
            outputs = keras.ops.add(outputs, arguments[2])

        def gradient(derivative: tf.Tensor) -> tuple[tf.Tensor, ...]:
            below = tf.tensordot(derivative, kernel, [[-1], [1]])
            x = tf.cast(_rows(inputs), tf.float32)
            e = tf.cast(_rows(derivative), tf.float32)
            number = tf.cast(tf.shape(x)[0], tf.float32)
            if bias is not None:
                x = tf.concat([x, tf.ones_like(x[:, :1])], 1)
            # The loss is a mean over N rows. But the method and its epsilon are made for the
            # derivatives of the losses of single rows, which are N times as large. So `e` is
            # multiplied by N before the call, and the result is divided by N.
            e = output_side(e * number) / number
            both = tf.cast(tf.matmul(input_side(x), e, transpose_a=True), kernel.dtype)
            if bias is None:
                return below, both
            return below, both[:-1], both[-1]

        return outputs, gradient

    return call(inputs, kernel) if bias is None else call(inputs, kernel, bias)


def hook(
    layer: keras.layers.Dense, input_side: Side, output_side: Side, active: Callable[[], bool]
) -> None:
    """Makes training calls of a Dense layer use `affine` while `active()` is true.

    Other calls, as in evaluation and export, do not change.
    """
    ordinary = type(layer).call

    def call(inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training or not active():
            return ordinary(layer, inputs, training=training)
        kernel = tf.convert_to_tensor(layer.kernel)
        bias = None if layer.bias is None else tf.convert_to_tensor(layer.bias)
        outputs = affine(inputs, kernel, bias, input_side, output_side)
        return outputs if layer.activation is None else layer.activation(outputs)

    layer.call = call
    # This prevents Keras from choosing XLA. The custom gradient was not tested with XLA.
    layer.supports_jit = False


def precondition_matrix(
    kernel: tf.Tensor, bias: tf.Tensor | None, input_side: Side, output_side: Side
) -> list[tf.Tensor]:
    """Returns the natural gradient of a convolution, from its summed gradient.

    As in Kaldi's convolutions, the gradient itself is the matrix whose rows are preconditioned:
    first the rows of the output channels, float32 [out, in + 1] with the bias, then those of the
    inputs, [in + 1, out]. `kernel` is the kernel's gradient [..., out], and `in` the size of all
    axes but the last; `bias` is the gradient of the bias, [out], or None.
    """
    matrix = tf.cast(tf.reshape(kernel, [-1, kernel.shape[-1]]), tf.float32)
    if bias is not None:
        matrix = tf.concat([matrix, tf.cast(bias, tf.float32)[None]], 0)
    matrix = output_side(tf.transpose(input_side(tf.transpose(matrix))))
    rows = matrix if bias is None else matrix[:-1]
    found = [tf.cast(tf.reshape(rows, tf.shape(kernel)), kernel.dtype)]
    return found if bias is None else [*found, tf.cast(matrix[-1], bias.dtype)]


def _rows(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, [-1, tensor.shape[-1]])
