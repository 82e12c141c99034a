"""Limited-memory Adagrad as a Keras optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfpara.typing import Json


@keras.saving.register_keras_serializable(package="tfpara")
class Adapt(keras.optimizers.Optimizer):
    """Adagrad that remembers only the last few gradients.

    For each parameter j, with g the gradient times `gradient_scale`:

        γ_j(t) = γ(t) / √(K + Σ_{s=τ}^{t} g_j(s)²),    w_j ← w_j − γ_j(t) g_j(t).

    Source: You & Xu (2014), eq. 2, "ASGD-adapt", with K = 1, γ = 0.008 and τ = t, so that the rate
    depends on the current gradient alone. Their gradient is the *sum* over the samples of a
    minibatch, while Keras' loss is a mean: to use their numbers, give the minibatch size as
    `gradient_scale`.

    Args:
        learning_rate: γ, a number or a Keras schedule.
        constant: K > 0.
        memory: the number of gradients in the sum, t − τ + 1 ≥ 1. None: all, which is Adagrad.
        gradient_scale: the factor of the gradients, > 0.
        name: name of the optimizer.
        **kwargs: options of any Keras optimizer, such as `clipnorm` and `weight_decay`.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.008,
        constant: float = 1.0,
        memory: int | None = 1,
        gradient_scale: float = 1.0,
        name: str = "adapt",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        if not constant > 0.0:
            raise ValueError(f"constant={constant!r} must be positive. The paper's K is 1.")
        if memory is not None and not memory >= 1:
            raise ValueError(
                f"memory={memory!r} must be at least 1 gradient, or None for all of them."
            )
        if not gradient_scale > 0.0:
            raise ValueError(
                f"gradient_scale={gradient_scale!r} must be positive: 1, or the minibatch size."
            )
        self.constant = constant
        self.memory = memory
        self.gradient_scale = gradient_scale
        self._squares: list[keras.Variable] = []

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        # A memory of one gradient has only the present gradient, so no slot is needed for it.
        slots = 1 if self.memory is None else self.memory if self.memory > 1 else 0
        self._squares = [
            self.add_optimizer_variables(variables, f"square_{slot}") for slot in range(slots)
        ]

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        # The gradient of an embedding is a tf.IndexedSlices: it has only the rows that were looked
        # up. It is converted to a tensor with all rows, because the lines below need all rows.
        gradient = tf.convert_to_tensor(gradient)
        gradient = ops.cast(gradient, variable.dtype) * self.gradient_scale
        total = self.constant + self._sum_of_squares(ops.square(gradient), variable)
        self.assign_sub(variable, rate * gradient / ops.sqrt(total))

    def _sum_of_squares(self, square: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        if self.memory == 1:
            return square
        index = self._get_variable_index(variable)
        slots = [slot[index] for slot in self._squares]
        if self.memory is None:
            self.assign_add(slots[0], square)
            return slots[0]
        # The slots are a ring buffer: this gradient's square replaces the oldest one.
        place = ops.cast(self.iterations, "int32") % self.memory
        kept = [ops.where(place == k, square, slot) for k, slot in enumerate(slots)]
        for slot, value in zip(slots, kept, strict=True):
            self.assign(slot, value)
        return sum(kept)

    def get_config(self) -> dict[str, Json]:
        config = super().get_config()
        return config | {
            "constant": self.constant,
            "memory": self.memory,
            "gradient_scale": self.gradient_scale,
        }
