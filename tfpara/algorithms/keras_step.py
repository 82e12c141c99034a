"""A step of a Keras optimizer as a pure function of tensors.

Keras optimizers keep their state in variables and assign to them. Here a private copy of one works
on `_Value` objects instead, which stand in for variables and hold a tensor each. This is the only
file of the rules that knows Keras' inside; the names used of it are commented where they are.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class _Value(keras.Variable):
    """What a Keras optimizer takes for a variable: holds a tensor, of any shape, and no storage."""

    # What the constructor of keras.Variable calls, on every backend, to make storage.
    def _initialize(self, value: Any) -> None:
        self._value = tf.convert_to_tensor(value() if callable(value) else value, self._dtype)

    # The same, with an initializer.
    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._initialize(initializer(self._shape, dtype=self._dtype))

    def hold(self, tensor: Any) -> None:
        # What `dtype` and `value` of keras.Variable read.
        self._dtype = tensor.dtype.name
        self._value = tensor

    def release(self) -> None:
        """Lets go of the tensor: one of a graph must not outlive it."""
        self._value = None

    def assign(self, value: Any) -> Any:
        self._value = tf.cast(tf.convert_to_tensor(value), self._dtype)
        return self._value

    @property
    def shape(self) -> Any:
        return self._value.shape


class _Functional(keras.optimizers.Optimizer):
    """Put behind an optimizer's class: what Keras does for TensorFlow variables, on `_Value`s.

    Each method below is one that Keras' TensorFlow optimizer overrides to reach `tf.Variable` and
    `tf.distribute`; here they do what Keras' base optimizer does.
    """

    def add_variable(self, shape: Any, initializer: Any = "zeros", **kwargs: Any) -> _Value:
        make = keras.initializers.get(initializer)
        return _Value(make, shape=shape, dtype="float32", autocast=False, name=kwargs.get("name"))

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> _Value:
        return self.add_variable(reference_variable.shape, initializer, name=name or "slot")

    def assign(self, variable: Any, value: Any) -> None:
        variable.assign(value)

    def assign_add(self, variable: Any, value: Any) -> None:
        variable.assign_add(value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        variable.assign_sub(value)

    # By which slots are found.
    def _var_key(self, variable: Any) -> int:
        return id(variable)

    # What `apply` calls before the step, for every optimizer's weight_decay: W ← W − lr·decay·W.
    def _apply_weight_decay(self, variables: Any) -> None:
        if self.weight_decay is not None:
            for variable in variables:
                rate = tf.cast(self.learning_rate, variable.dtype)
                variable.assign_sub(variable * tf.cast(self.weight_decay, variable.dtype) * rate)

    # What `apply` calls for the step; Nadam extends it.
    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, variable, learning_rate)


class KerasStep:
    """The step of a Keras optimizer, as a pure function.

    Args:
        optimizer: gives the kind and its settings; it is left alone. Its step must treat every
            weight by itself.

    Attributes:
        State: a NamedTuple class with the fields `global_model`, the optimizer's slots by their
            Keras names, and `iterations` (steps so far, a float).
        initial: what each slot starts with, by name: one element, or a scalar.

    Example:
        >>> step = KerasStep(keras.optimizers.SGD(0.5))
        >>> float(step(step.State(tf.constant(3.0), 0.0), gradient=tf.constant(2.0)).global_model)
        2.0
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        kind = type(optimizer)
        functional: Any = type(kind.__name__, (kind, _Functional), {})
        copy = functional.from_config(optimizer.get_config())
        self._optimizer = copy
        self._lock = threading.Lock()
        # NaN: a slot that is made from the weights shows.
        self._weights = _Value(np.full([1], np.nan, np.float32), autocast=False, name="weights")
        copy.build([self._weights])
        # Keras makes the iterations and a constant rate as variables; schedules read `_iterations`.
        self._iterations = copy._iterations = _Value(0, dtype="int64", name="iterations")
        if isinstance(copy._learning_rate, keras.Variable):
            copy._learning_rate = shortest(copy._learning_rate.numpy())
        self._slots = self._find_slots()
        self.initial = {name: slot.numpy() for name, slot in self._slots.items()}
        # The list of what the optimizer would save: nothing here is saved by Keras.
        copy._variables.clear()
        fields = ("global_model", *self._slots, "iterations")
        self.State: Any = collections.namedtuple("OuterState", fields)  # type: ignore[misc]

    def _find_slots(self) -> dict[str, _Value]:
        """The slots by name; those that Keras made as variables itself (Nadam's) are replaced."""
        optimizer = self._optimizer
        slots: dict[str, _Value] = {}
        for attribute, value in vars(optimizer).items():
            if isinstance(value, keras.Variable) and value is not self._iterations:
                slot = _Value(value.numpy(), dtype="float32", autocast=False, name=attribute)
                slots[attribute.strip("_")] = slot
                setattr(optimizer, attribute, slot)
            elif isinstance(value, list) and attribute not in (
                "_variables",
                "_trainable_variables",
            ):
                for slot in value:
                    if isinstance(slot, _Value):
                        slots[slot.name] = slot
        return slots

    def __call__(self, state: Any, gradient: Any) -> Any:
        """One step from `state`; the gradient is a tensor, whose type is that of all fields."""
        held = [self._weights, *self._slots.values()]
        with self._lock:
            try:
                for variable, value in zip(held, state[:-1], strict=True):
                    variable.hold(tf.cast(value, gradient.dtype))
                self._iterations.hold(tf.cast(tf.round(state.iterations), tf.int64))
                self._optimizer.apply([gradient], [self._weights])
                values = [variable.value for variable in held]
            finally:
                for variable in (*held, self._iterations):
                    variable.release()
        return self.State(*values, state.iterations + 1.0)


def shortest(value: Any) -> float:
    """The shortest number with this float32 value: 0.7, where Keras gives 0.699999988."""
    return float(str(np.float32(value)))
