"""Steps of replicas that change nothing if the loss or a gradient has NaN or Inf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.keras_model import is_seed, training_variables
from tfpara.sync.one_sync.graph_ops import compiles_on, where
from tfpara.sync.tensorflow.compiled_step import CompiledStep
from tfpara.sync.tensorflow.variables import local_replica, plain_variable
from tfpara.typing import Nest


class Guard:
    """Looks at the loss and the gradients of each step, and takes back a step that has NaN or Inf.

    To take a step back, it gives all variables that a step may write their former values: those of
    the model, its optimizers and its metrics, such as weights, slots, counts, and statistics of
    batch normalisation. Only states of seed generators keep their new values.
    """

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]) -> None:
        self._local_results = strategy.experimental_local_results
        self._devices = devices
        self._found = []  # for each replica: 1 if its step has met NaN or Inf, else 0
        for replica, device in enumerate(devices):
            with tf.device(device), tf.init_scope():
                self._found.append(plain_variable(tf.zeros([]), f"nonfinite_{replica}"))

    def look(self, values: Sequence[Any]) -> None:
        """Notes in a replica's step whether any of these losses or gradients has NaN or Inf."""
        tensors = [getattr(value, "values", value) for value in values if value is not None]
        finite = [tf.reduce_all(tf.math.is_finite(t)) for t in map(tf.convert_to_tensor, tensors)]
        if finite:
            found = self._found[local_replica()]
            found.assign(tf.where(tf.reduce_all(finite), found.read_value(), 1.0))

    def around(self, fn: Callable[..., Nest], model: keras.Model) -> Callable[..., Nest]:
        """Returns `fn`, a replica's step of a model; if it meets NaN or Inf, it is taken back."""
        if isinstance(fn, CompiledStep):
            return fn.around(lambda step: self.around(step, model))

        def guarded(*args: Nest, **kwargs: Nest) -> Nest:
            before = self._values(model)
            outputs = fn(*args, **kwargs)
            of_keras = getattr(fn, "__self__", None) is model
            return self._taken_back(model, before, outputs, of_keras)

        return guarded

    def taken(self) -> list[tf.Tensor]:
        """Returns for each replica whether its last step was taken back, and resets these notes."""
        nonfinite = []
        for found in self._found:
            with tf.device(found.device):
                nonfinite.append(found.read_value() > 0.0)
                found.assign(0.0)
        return nonfinite

    @tf.autograph.experimental.do_not_convert
    def _values(self, model: keras.Model) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns this replica's components of variables that a step writes, with their values."""
        return [(component, component.read_value()) for component in self._own(model)]

    def _own(self, model: keras.Model) -> list[tf.Variable]:
        replica, local_results = local_replica(), self._local_results
        variables = [v for _, v in training_variables(model) if not is_seed(v.path)]
        return [local_results(v.value)[replica] for v in variables]

    @tf.autograph.experimental.do_not_convert
    def _taken_back(
        self,
        model: keras.Model,
        before: list[tuple[tf.Variable, tf.Tensor]],
        outputs: Nest,
        of_keras: bool,
    ) -> Nest:
        """Restores variables if the step has met NaN or Inf; returns the step's outputs.

        If `fit` runs a step that is taken back, metrics in its outputs are those without the
        minibatch. ValueError: the step has made variables, whose former values are not known.
        """
        made = len(self._own(model)) - len(before)
        if made:
            raise ValueError(
                f'nonfinite="skip" takes steps back, and the first step of model {model.name!r} '
                f"makes {made} variables of optimizers or metrics. Make them before it, in "
                "strategy.scope(): optimizer.build(weights) for each optimizer."
            )
        replica = local_replica()
        bad = self._found[replica].read_value() > 0.0

        def restore() -> None:
            for variable, value in before:
                variable.assign(value)

        if compiles_on(self._devices[replica]):
            # A branch would make the host wait for the GPU in each step, so `tf.where` selects the
            # values.
            for variable, value in before:
                variable.assign(tf.where(bad, value, variable.read_value()))
        else:
            where(bad, restore)
        if not of_keras or not isinstance(outputs, dict):
            return outputs
        kept = model.get_metrics_result()
        return {
            name: tf.where(bad, tf.cast(kept[name], value.dtype), value)
            if name in kept and tf.is_tensor(value)
            else value
            for name, value in outputs.items()
        }
