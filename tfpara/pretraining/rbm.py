"""A restricted Boltzmann machine (RBM), and its learning by contrastive divergence.

Visible units are Gaussian, of unit variance, or Bernoulli; hidden units are Bernoulli:

    E(v, h) = ½ ‖v − a‖² − bᵀh − vᵀW h (Gaussian)      E(v, h) = −aᵀv − bᵀh − vᵀW h (Bernoulli)

Sources: Hinton, Osindero and Teh (2006); Hinton's practical guide to training RBMs (2010).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

GAUSSIAN = "gaussian"
BERNOULLI = "bernoulli"

# The momentum of the first minibatch, as in Kaldi.
FIRST_MOMENTUM = 0.5
# The largest absolute value of the initial bias of a Bernoulli visible unit. Without this limit, a
# unit that is always on or always off would begin with a far larger bias.
LARGEST_BIAS = 8.0


class Statistics(NamedTuple):
    """The estimate by CD-1 of the gradient of the log-likelihood, as means over a minibatch.

    Attributes:
        kernel: [visible, hidden].
        visible_bias: [visible].
        hidden_bias: [hidden].
        error: mean squared reconstruction error of a visible unit.
    """

    kernel: tf.Tensor
    visible_bias: tf.Tensor
    hidden_bias: tf.Tensor
    error: tf.Tensor


class RBM:
    """A restricted Boltzmann machine that learns by CD-1.

    Args:
        visible: the number of visible units.
        hidden: the number of hidden units, which are Bernoulli.
        visible_kind: "gaussian" (of unit variance) or "bernoulli".
        seed: two numbers, which determine all random numbers.
        learning_rate: as in `pretrain`, like the following arguments.
        momentum: the highest momentum.
        momentum_minibatches: number of minibatches after which the momentum is the highest.
        weight_decay: decay of the kernel.
        initial_stddev: standard deviation of the kernel's initial values.
    """

    def __init__(
        self,
        visible: int,
        hidden: int,
        visible_kind: str,
        *,
        learning_rate: float,
        momentum: float,
        momentum_minibatches: int,
        weight_decay: float,
        initial_stddev: float,
        seed: tuple[int, int],
    ) -> None:
        self.visible_kind = visible_kind
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._momentum_minibatches = momentum_minibatches
        self._weight_decay = weight_decay
        # The kernel's initial values are drawn with `seed` itself. The minibatches' seeds are made
        # from `_seed`, so that their random numbers are independent of the initial values.
        self._seed = tf.random.experimental.stateless_fold_in(list(seed), 1)
        first = tf.random.stateless_normal([visible, hidden], list(seed), 0.0, initial_stddev)
        self.kernel = tf.Variable(first)
        self.visible_bias = tf.Variable(tf.zeros([visible]))
        self.hidden_bias = tf.Variable(tf.zeros([hidden]))
        self._variables = (self.kernel, self.visible_bias, self.hidden_bias)
        self._velocities = [tf.Variable(tf.zeros_like(v)) for v in self._variables]
        self._minibatches = tf.Variable(0, dtype=tf.int64)
        self._step = tf.function(
            self._learn, input_signature=[tf.TensorSpec([None, visible])], autograph=False
        )

    def start_bias(self, data: Iterable[tf.Tensor]) -> None:
        """Sets the visible units' bias from their mean over minibatches [b, visible]."""
        total, count = tf.zeros_like(self.visible_bias), 0
        for rows in data:
            total += tf.reduce_sum(rows, 0)
            count += int(rows.shape[0])
        if not count:
            raise ValueError("the dataset has no minibatches. Give one that is not empty.")
        mean = total / count
        if self.visible_kind == BERNOULLI:
            odds = tf.math.log(tf.maximum(mean, 1e-30)) - tf.math.log(tf.maximum(1 - mean, 1e-30))
            mean = tf.clip_by_value(odds, -LARGEST_BIAS, LARGEST_BIAS)
        self.visible_bias.assign(mean)

    def learn(self, rows: tf.Tensor) -> tf.Tensor:
        """Learns from one minibatch, float32 [b, visible]; returns its reconstruction error."""
        return self._step(rows)

    def is_finite(self) -> bool:
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in self._variables)

    def _learn(self, rows: tf.Tensor) -> tf.Tensor:
        number = self._minibatches.assign_add(1, read_value=True) - 1
        seed = tf.random.experimental.stateless_fold_in(self._seed, number)
        shape = [tf.shape(rows)[0], self.hidden_bias.shape[0]]
        uniform = tf.random.stateless_uniform(shape, seed)
        found = cd1(
            rows, self.kernel, self.visible_bias, self.hidden_bias, uniform, self.visible_kind
        )
        decayed = found.kernel - self._weight_decay * self.kernel
        done = tf.cast(number, tf.float32) / self._momentum_minibatches
        first = min(FIRST_MOMENTUM, self._momentum)
        momentum = first + (self._momentum - first) * tf.minimum(done, 1.0)
        gradients = (decayed, found.visible_bias, found.hidden_bias)
        for variable, velocity, gradient in zip(
            self._variables, self._velocities, gradients, strict=True
        ):
            step = (1.0 - momentum) * self._learning_rate * gradient
            velocity.assign(momentum * velocity + step)
            variable.assign_add(velocity)
        return found.error


def cd1(
    visible: tf.Tensor,
    kernel: tf.Tensor,
    visible_bias: tf.Tensor,
    hidden_bias: tf.Tensor,
    uniform: tf.Tensor,
    visible_kind: str,
) -> Statistics:
    """Takes one step of contrastive divergence from the data.

        p = σ(v W + b),   h = [uniform < p]
        v' = h Wᵀ + a (Gaussian) or σ(h Wᵀ + a) (Bernoulli),   p' = σ(v' W + b)
        kernel: (vᵀp − v'ᵀp') / B,   visible: mean(v − v'),   hidden: mean(p − p')

    Only the hidden units are sampled, and only for the reconstruction. Elsewhere probabilities are
    used in place of samples, which lowers the noise (Hinton 2010, section 3).

    Args:
        visible: v, the data, [B, visible]; in [0, 1] for Bernoulli units.
        kernel: W, [visible, hidden].
        visible_bias: a, [visible].
        hidden_bias: b, [hidden].
        uniform: numbers drawn from [0, 1), [B, hidden].
        visible_kind: "gaussian" or "bernoulli".
    """
    positive = tf.sigmoid(tf.matmul(visible, kernel) + hidden_bias)
    sample = tf.cast(uniform < positive, visible.dtype)
    means = tf.matmul(sample, kernel, transpose_b=True) + visible_bias
    rebuilt = means if visible_kind == GAUSSIAN else tf.sigmoid(means)
    negative = tf.sigmoid(tf.matmul(rebuilt, kernel) + hidden_bias)
    number = tf.cast(tf.shape(visible)[0], visible.dtype)
    with_data = tf.matmul(visible, positive, transpose_a=True)
    with_model = tf.matmul(rebuilt, negative, transpose_a=True)
    return Statistics(
        (with_data - with_model) / number,
        tf.reduce_mean(visible - rebuilt, 0),
        tf.reduce_mean(positive - negative, 0),
        tf.reduce_mean(tf.square(visible - rebuilt)),
    )
