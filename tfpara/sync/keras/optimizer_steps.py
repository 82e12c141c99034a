"""Steps of Keras' optimizers in a replica, and slots that are made before the first step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfpara.contexts import attributes
from tfpara.keras_model import build_optimizer, check_optimizers_built, unbuilt_optimizers
from tfpara.sync.keras.replacing import Method
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.tensorflow.variables import in_replica, local_replica
from tfpara.typing import Nest, Variable

# This dict is filled only while `build_optimizers` traces a step. The key is the id of an optimizer
# without slots. The value is the weights that the optimizer trains, or None until its `apply` is
# called.
_unbuilt: dict[int, Sequence[Variable] | None] = {}
# This dict is filled only during the step of an optimizer. The key is the optimizer's id. The value
# is a pair: the momentum (or Adam's β₁), and a factor for SGD's learning rate. Both are fitted to
# the length of the block.
_fitted: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
# For each model: the spec of a minibatch in the model's present or last `fit`.
element_specs: weakref.WeakKeyDictionary[keras.Model, Nest] = weakref.WeakKeyDictionary()


def step_noted(apply: Method) -> Method:
    """Replaces an optimizer's `apply`, so that the strategy knows of each step in a replica."""

    @functools.wraps(apply)
    def applying(
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> object:
        if id(optimizer) in _unbuilt:
            _unbuilt[id(optimizer)] = trainable_variables
            return None
        extended = tf.distribute.get_strategy().extended
        if not isinstance(extended, PeriodicSyncExtended) or not in_replica():
            return apply(optimizer, grads, trainable_variables)
        guard, scaling = extended.steps.guard, keras.optimizers.LossScaleOptimizer
        # A LossScaleOptimizer itself handles the NaN and Inf that its scaling causes, so the guard
        # does not look at its gradients.
        if guard and not extended.steps.trace.applying and not isinstance(optimizer, scaling):
            guard.look(grads)
        fitted = extended.momentum.of_step(optimizer, local_replica())
        if fitted is not None:
            _fitted[id(optimizer)] = fitted
        try:
            with extended.steps.trace.step_of(optimizer):
                return apply(optimizer, grads, trainable_variables)
        finally:
            _fitted.pop(id(optimizer), None)

    return applying


def loss_looked_at(scale_loss: Method) -> Method:
    """Replaces an optimizer's `scale_loss`, so that the NaN guard sees the loss of each step."""

    @functools.wraps(scale_loss)
    def scaling(optimizer: keras.optimizers.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        extended = tf.distribute.get_strategy().extended
        ours = isinstance(extended, PeriodicSyncExtended) and in_replica()
        if ours and extended.steps.guard is not None:
            extended.steps.guard.look([loss])
        return scale_loss(optimizer, loss)

    return scaling


def _where_fitted(step: Callable[..., None]) -> Callable[[Method], Method]:
    """Replaces an optimizer's `update_step` by `step` if its momentum is fitted to the block.

    The call is `step(update_step, optimizer, gradient, variable, rate, momentum, factor)`. The last
    two arguments are what `local_momentum.in_a_block` returns for the block.
    """

    def replacing(update_step: Method) -> Method:
        @functools.wraps(update_step)
        def updating(
            optimizer: keras.optimizers.Optimizer,
            gradient: tf.Tensor,
            variable: Variable,
            learning_rate: tf.Tensor,
        ) -> None:
            given = optimizer, gradient, variable, learning_rate
            if id(optimizer) not in _fitted:
                update_step(*given)
                return
            fitted = (keras.ops.cast(each, variable.dtype) for each in _fitted[id(optimizer)])
            step(update_step, *given, *fitted)

        return updating

    return replacing


@_where_fitted
def with_fitted_momentum(
    update_step: Method,
    optimizer: keras.optimizers.SGD,
    gradient: tf.Tensor,
    variable: Variable,
    learning_rate: tf.Tensor,
    momentum: tf.Tensor,
    factor: tf.Tensor,
) -> None:
    """Takes a step of SGD: velocity ← m'·velocity − rate'·g, with fitted m' and rate'."""
    # Keras' own `update_step` cannot be used, because it tests in Python whether the momentum is 0,
    # and here the momentum is a tensor of a graph. The functions of `keras.ops` also accept sparse
    # gradients (tf.IndexedSlices).
    ops = keras.ops
    rate = ops.cast(learning_rate, variable.dtype) * factor
    step = ops.multiply(ops.cast(gradient, variable.dtype), rate)
    velocity = optimizer.momentums[optimizer._get_variable_index(variable)]
    optimizer.assign(velocity, ops.subtract(ops.multiply(velocity, momentum), step))
    if optimizer.nesterov:
        velocity = ops.subtract(ops.multiply(velocity, momentum), step)
    optimizer.assign_add(variable, velocity)


@_where_fitted
def with_fitted_average(
    update_step: Method,
    optimizer: keras.optimizers.Optimizer,
    gradient: tf.Tensor,
    variable: Variable,
    learning_rate: tf.Tensor,
    momentum: tf.Tensor,
    factor: tf.Tensor,
) -> None:
    """Takes a step of Adam with a fitted β₁, or of Muon with a fitted β₁ and momentum."""
    names = [name for name in ("beta_1", "adam_beta_1", "momentum") if hasattr(optimizer, name)]
    fitted = {name: keras.ops.minimum(getattr(optimizer, name), momentum) for name in names}
    with attributes(optimizer, **fitted):
        update_step(optimizer, gradient, variable, learning_rate)


def build_optimizers(model: keras.Model) -> None:
    """Makes the slots of all optimizers of a model, which its first step would make later.

    If there are several optimizers, only the model's `train_step` knows which weights each trains.
    So the step is traced for the data of the present `fit`, without being run. Raises ValueError,
    with the line that makes them, if an optimizer still has no slots.
    """
    build_optimizer(model)
    spec = element_specs.get(model)
    unbuilt = list(unbuilt_optimizers(model).values())
    if unbuilt and spec is not None and not model.run_eagerly:
        strategy = model.distribute_strategy
        # The strategy's own `run` would make a synchronizer, which needs the missing slots.
        run = tf.distribute.MultiWorkerMirroredStrategy.run
        step = tf.autograph.experimental.do_not_convert(
            lambda minibatch: run(strategy, model.train_step, args=(minibatch,))
        )
        _unbuilt.update((id(optimizer), None) for optimizer in unbuilt)
        try:
            tf.function(step).get_concrete_function(spec)
            weights = dict(_unbuilt)
        finally:
            _unbuilt.clear()
        with strategy.scope():
            for optimizer in unbuilt:
                if weights[id(optimizer)] is not None:
                    optimizer.build(weights[id(optimizer)])
    check_optimizers_built(model)
