"""Stochastic gradient descent with Kaldi's online natural gradient, as a Keras optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpara.optimizers.layer_plan import MATRIX, PLAIN, ROWS, plan
from tfpara.optimizers.online_natural_gradient import OnlineNaturalGradient, sensible_rank
from tfpara.optimizers.preconditioner import Preconditioner, Side, hook, precondition_matrix
from tfpara.typing import Array, Json
from tfpara.whole_number import checked_whole

# Settings for convolutions. The online estimate of the gradients' scatter remembers four
# minibatches, as in Kaldi. `epsilon`, the floor of the scatter's eigenvalues, is multiplied by
# `_MATRIX_EPSILON`, because in Kaldi a gradient is the sum over a minibatch, and in Keras it is the
# mean. With a thousand frames in a minibatch, the squares of the mean are a million times smaller
# than those of the sum.
_MATRIX_HISTORY = 4.0
_MATRIX_EPSILON = 1e-6

# The gradient of a weight: a dense tensor, or the slices for some of the weight's rows.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


@keras.saving.register_keras_serializable("tfpara")
class NGSGD(keras.optimizers.SGD):
    """SGD whose gradients are those of Kaldi's online natural gradient (NG-SGD).

    In a Dense layer y = W x + b, the ordinary gradient of [W b] over a minibatch of N rows is eᵀx̄,
    where x̄ are the layer's inputs with a 1 appended, and e the derivatives of its outputs. NG-SGD
    preconditions both matrices first: each is multiplied by the smoothed inverse of its own mean
    scatter, which is estimated online, and rescaled to its former norm (see
    `OnlineNaturalGradient`). So a step is about as long as a step of SGD, and SGD's learning rates
    stay suitable. Convolutions are preconditioned as in Kaldi, on the rows and columns of the
    summed gradient. All other layers get plain SGD, and so do Dense layers inside wrappers and
    recurrent layers, or with LoRA.

    The method needs the rows of the minibatch, which an optimizer never sees. So the optimizer must
    be attached to the model, once the model is built:

        model.compile(tfpara.optimizers.NGSGD(0.1).attach(model), loss)

    `attach` changes neither the model's weights nor its outputs nor its saved form. Training calls
    of its Dense layers use a custom gradient as long as the model is compiled with this optimizer,
    or is not compiled.

    The state (for each side of a layer R, d, ρ and a counter) is among `optimizer.variables`, so it
    is saved with them. After `keras.models.load_model`, `model.optimizer.attach(model)` continues
    with the saved state. (In mixed_float16 call `model.optimizer.inner_optimizer.attach(model)`.)
    Under a strategy every replica estimates the scatter of its own data. A sync neither averages
    nor resets this state, for any `local_state`: a mean of orthonormal bases, whose signs and order
    are free, is not an orthonormal basis. Weights and momentum are treated as with SGD.

    Args:
        learning_rate: as of `keras.optimizers.SGD`.
        momentum: momentum in [0, 1).
        nesterov: whether the momentum is Nesterov's.
        input_rank: rank for the rows of inputs; at most half their width, rounded up, is used.
        output_rank: the same for the rows of output derivatives.
        update_period: minibatches between two updates of the scatters, after the first ten.
        history: number of rows after which a scatter is largely forgotten.
        alpha: α ≥ 0, smoothing by the unit matrix.
        epsilon: absolute floor of the scatters' eigenvalues.
        delta: floor of the scatters' eigenvalues relative to the largest one.
        max_change: limit of the norm of learning rate × gradient of a layer, kernel and bias
            together; larger steps are scaled down. None: no limit. Momentum m can add up such steps
            to max_change / (1 − m).
        layers: the kind of gradient of each layer, which `attach` finds out. Keras gives this
            argument when it loads a saved optimizer.
        name: name of the optimizer.
        **options: options of any Keras optimizer, such as `clipnorm`; they apply to the natural
            gradients.

    Raises:
        ValueError: a value outside its range.

    Source: Povey, Zhang and Khudanpur (2014); Su and Chen (2015), section 4; defaults of Kaldi's
    NaturalGradientAffineComponent.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        input_rank: int = 20,
        output_rank: int = 80,
        update_period: int = 4,
        history: float = 2000.0,
        alpha: float = 4.0,
        epsilon: float = 1e-10,
        delta: float = 5e-4,
        max_change: float | None = 2.0,
        layers: Sequence[dict[str, Json]] | None = None,
        name: str = "NGSGD",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, nesterov, name=name, **options)
        for key, count in {
            "input_rank": input_rank,
            "output_rank": output_rank,
            "update_period": update_period,
        }.items():
            checked_whole(key, count)
        for key, value in {"history": history, "epsilon": epsilon, "delta": delta}.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{key} must be positive and finite. Received: {value!r}")
        if not 0 <= alpha < float("inf"):
            raise ValueError(f"alpha must be 0 or more, and finite. Received: {alpha!r}")
        if max_change is not None and not max_change > 0:
            raise ValueError(f"max_change must be positive, or None. Received: {max_change!r}")
        self.input_rank = input_rank
        self.output_rank = output_rank
        self.update_period = update_period
        self.history = history
        self.alpha = alpha
        self.epsilon = epsilon
        self.delta = delta
        self.max_change = max_change
        self._layers_plan = [dict(entry) for entry in layers] if layers else []
        # For each entry of the plan: a function that preconditions the rows of the layer's inputs,
        # and another that preconditions the rows of its output derivatives.
        self._sides: list[tuple[Side, Side]] = []
        self._attached = False

    def attach(self, model: keras.Model) -> NGSGD:
        """Prepares a model's layers for this optimizer; returns the optimizer.

        Args:
            model: the model, built. Freeze layers before: all weights trainable now count.

        Raises:
            TypeError: `model` is not a Keras model.
            ValueError: the model has no weights yet, or the optimizer has another model.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(f"attach needs a Keras model. Received: {type(model).__name__}")
        if not model.built or not model.trainable_variables:
            raise ValueError(
                f"model {model.name!r} has no trainable weights yet. Give it a keras.Input, or "
                "call it on a minibatch, before NGSGD(...).attach(model)."
            )
        layers = plan(model)
        entries = [entry for _, entry in layers]
        if self._layers_plan and entries != self._layers_plan:
            raise ValueError(
                f"this optimizer belongs to a model with other trainable layers than {model.name!r}"
                " has. Make a new NGSGD for each model, and again after freezing layers."
            )
        self._layers_plan = entries
        with model.distribute_strategy.scope():
            self.build(model.trainable_variables)
            if list(map(id, self._trainable_variables)) != list(map(id, model.trainable_variables)):
                raise ValueError(
                    "this optimizer has another model, or other trainable weights of this one. "
                    "Make a new NGSGD for each model, and again after freezing layers."
                )
            # A strategy, or the caller, may have called `build` before the layers were known. That
            # call could not make the sides, and the call of `build` above has done nothing, because
            # the optimizer was built already. So the sides are made here.
            if not self._sides:
                self._make_sides(model.trainable_variables)
        owner, mine = weakref.ref(model), weakref.ref(self)

        def active() -> bool:
            compiled = getattr(owner(), "optimizer", None)
            return compiled is None or getattr(compiled, "inner_optimizer", compiled) is mine()

        for number, (layer, entry) in enumerate(layers):
            if entry["kind"] == ROWS:
                hook(layer, *self._sides[number], active)
        # A call of `fit` before `attach` fails, but Keras keeps the train function of that call. In
        # this function TensorFlow would not let metrics create their variables. So it is dropped
        # here, and Keras makes a new train function.
        model.train_function = None
        self._attached = True
        return self

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the slots and, once the layers are known, the scatters' variables."""
        if self.built:
            return
        super().build(variables)
        self._make_sides(variables)

    def _make_sides(self, variables: Sequence[keras.Variable]) -> None:
        for number, entry in enumerate(self._layers_plan):
            if entry["kind"] == PLAIN:
                self._sides.append((tf.identity, tf.identity))
                continue
            outputs = variables[entry["variables"][0]].shape[-1]
            by_rows = entry["kind"] == ROWS
            # Keras numbers layers' names by how many layers the process has made before. So the
            # layer's own name may differ between workers, and is not used.
            name = f"layer{number}"
            input_side = self._make_side(self.input_rank, entry["width"], by_rows, f"{name}_input")
            output_side = self._make_side(self.output_rank, outputs, by_rows, f"{name}_output")
            self._sides.append((input_side, output_side))

    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Takes a step with the tape's gradients, which are already natural for Dense layers."""
        if not self._attached:
            raise ValueError(
                "NGSGD has not been shown the model. Compile with NGSGD(...).attach(model), or "
                "after load_model call model.optimizer.attach(model). In mixed_float16, call "
                "model.optimizer.inner_optimizer.attach(model) after load_model."
            )
        variables = trainable_variables or self._trainable_variables
        index = {self._get_variable_index(v): i for i, v in enumerate(variables)}
        changed = list(grads)
        for number, entry in enumerate(self._layers_plan):
            places = [index[v] for v in entry["variables"] if v in index]
            places = [p for p in places if changed[p] is not None]
            found = [changed[p] for p in places]
            if not found:
                continue
            if entry["kind"] == MATRIX and len(found) == len(entry["variables"]):
                bias = found[1] if len(found) > 1 else None
                found = precondition_matrix(found[0], bias, *self._sides[number])
            for place, gradient in zip(places, self._limited(found), strict=True):
                changed[place] = gradient
        super().apply(changed, trainable_variables)

    def get_config(self) -> dict[str, Json]:
        names = (
            *("input_rank", "output_rank", "update_period", "history"),
            *("alpha", "epsilon", "delta", "max_change"),
        )
        own = {name: getattr(self, name) for name in names}
        layers = [dict(entry) for entry in self._layers_plan]
        return {**super().get_config(), **own, "layers": layers}

    def _make_side(self, rank: int, width: int, by_rows: bool, name: str) -> Side:
        rank = sensible_rank(rank, width)
        if not rank:
            return tf.identity
        method = OnlineNaturalGradient(
            rank,
            self.history,
            self.alpha,
            self.epsilon if by_rows else self.epsilon * _MATRIX_EPSILON,
            self.delta,
            None if by_rows else _MATRIX_HISTORY,
        )

        def variable(start: Array, what: str, dtype: str = "float32") -> keras.Variable:
            made = self.add_variable(
                start.shape,
                # The initial value is given as a function, since a strategy may call it once for
                # each device.
                lambda shape, dtype: tf.cast(start, dtype),
                dtype,
                name=f"{name}_{what}_of_scatter",
            )
            made.of_one_replica = True  # tells the strategy that syncs must not change the value
            return made

        first = method.arbitrary(width)
        return Preconditioner(
            method,
            self.update_period,
            basis=variable(first.basis, "basis"),
            diagonal=variable(first.diagonal, "diagonal"),
            rho=variable(first.rho, "rho"),
            minibatches=variable(tf.constant(0), "minibatches", "int32"),
        )

    def _limited(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns a layer's gradients, scaled down together if their step exceeds `max_change`."""
        if self.max_change is None:
            return list(gradients)
        norm = tf.sqrt(tf.add_n([_square(g) for g in gradients]))
        step = norm * tf.cast(self.learning_rate, tf.float32) / (self.loss_scale_factor or 1.0)
        scale = tf.minimum(1.0, self.max_change / tf.maximum(step, 1e-30))
        return [_scaled(g, scale) for g in gradients]


def _square(gradient: Gradient) -> tf.Tensor:
    """Returns the squared norm of a gradient, dense or sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, place = tf.unique(gradient.indices)
        gradient = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    return tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))


def _scaled(gradient: Gradient, scale: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(scale, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(scale, gradient.dtype)
