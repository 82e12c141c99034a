"""A step of a Keras optimizer as a pure function of tensors.

Keras optimizers keep their state in variables and assign to them. In this file, a copy of the
optimizer works on `_Value` objects, which stand in for variables and hold a tensor each. The copy
has other private methods and attributes than Keras; comments give the purpose of each.
"""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara.typing import Array, Scalar, State


class _Value(keras.Variable):
    """A stand-in for a variable of a Keras optimizer: a tensor of any shape, without storage."""

    # The constructor of keras.Variable calls this method to make the variable's storage.
    def _initialize(self, value: tf.Tensor) -> None:
        self._value = tf.convert_to_tensor(value() if callable(value) else value, self._dtype)

    # If the constructor is given an initializer, it calls this method instead.
    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._initialize(initializer(self._shape, dtype=self._dtype))

    def hold(self, tensor: tf.Tensor) -> None:
        # The properties `dtype` and `value` of keras.Variable read these two attributes.
        self._dtype = tensor.dtype.name
        self._value = tensor

    reference: _Value | None = None  # the weight to which this value belongs, if it is a slot

    def release(self) -> None:
        """Drops the tensor, since a tensor of a graph must not outlive the graph."""
        self._value = None

    def assign(self, value: tf.Tensor) -> tf.Tensor:
        self._value = tf.cast(tf.convert_to_tensor(value), self._dtype)
        return self._value

    @property
    def shape(self) -> tf.TensorShape:
        return self._value.shape


class _Functional(keras.optimizers.Optimizer):
    """The second base of an optimizer's class, which makes the class work on `_Value`s.

    Keras' TensorFlow optimizer overrides each of these methods to reach `tf.Variable` and
    `tf.distribute`. In this class they do what Keras' base optimizer does.
    """

    rate_factor = 1.0  # multiplies the learning rate of the step, but not that of weight decay

    def add_variable(
        self, shape: Sequence[int], initializer: Any = "zeros", **kwargs: Any
    ) -> _Value:
        make = keras.initializers.get(initializer)
        name, dtype = kwargs.get("name"), kwargs.get("dtype") or "float32"
        value = _Value(make, shape=shape, dtype=dtype, autocast=False, name=name)
        # `_made` is made here, because the constructor is Keras' own. `_made` is no plain list,
        # because Keras would replace an attribute that is a list by a list which also registers
        # its elements as variables of the optimizer.
        if not hasattr(self, "_made"):
            self._made = types.SimpleNamespace(slots=[])
        self._made.slots.append(value)
        return value

    def add_variable_from_reference(
        self,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> _Value:
        dtype = "float64" if reference_variable.dtype == "float64" else "float32"
        shape = reference_variable.shape
        slot = self.add_variable(shape, initializer, name=name or "slot", dtype=dtype)
        slot.reference = reference_variable
        return slot

    def assign(self, variable: _Value, value: tf.Tensor) -> None:
        variable.assign(value)

    def assign_add(self, variable: _Value, value: tf.Tensor) -> None:
        variable.assign_add(value)

    def assign_sub(self, variable: _Value, value: tf.Tensor) -> None:
        variable.assign_sub(value)

    # Keras uses this key to find the slots of a variable.
    def _var_key(self, variable: _Value) -> int:
        return id(variable)

    # Keras' method `apply` calls this method before each optimizer's step. The method computes
    # W ← W − lr·decay·W.
    def _apply_weight_decay(self, variables: Sequence[_Value]) -> None:
        if self.weight_decay is not None:
            for variable in filter(self._use_weight_decay, variables):
                rate = tf.cast(self.learning_rate, variable.dtype)
                variable.assign_sub(variable * tf.cast(self.weight_decay, variable.dtype) * rate)

    # Keras' method `apply` calls this method to take the step. Nadam's class has a method of the
    # same name, which calls this method by `super()`.
    def _backend_update_step(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[_Value],
        learning_rate: tf.Tensor,
    ) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, variable, learning_rate * self.rate_factor)


class _Step:
    """A copy of an optimizer that works on `_Value`s, and its step on given tensors.

    In its `config` the learning rate may be a function.
    """

    def __init__(
        self, kind: type[keras.optimizers.Optimizer], config: dict[str, Any], weights: list[_Value]
    ) -> None:
        functional: Any = type(kind.__name__, (kind, _Functional), {})
        self._optimizer = copy = functional.from_config(config)
        self._weights = weights
        self._lock = threading.Lock()
        copy.build(weights)
        # `_state` begins with the iterations. The learning rate follows, unless it is a schedule or
        # a function. Then come the slots.
        self._state: list[_Value] = []
        for attribute, value in list(vars(copy).items()):
            # Keras keeps the iterations, a constant learning rate and Nadam's momentum product in
            # variables. Stand-ins replace these variables, so that a step computes tensors and
            # changes no variable.
            if isinstance(value, keras.Variable) and not isinstance(value, _Value):
                stand_in = _Value(value.numpy(), dtype=value.dtype, autocast=False, name=attribute)
                setattr(copy, attribute, stand_in)
                self._state.append(stand_in)
        self._state += copy._made.slots if hasattr(copy, "_made") else []
        # When Keras saves an optimizer, it writes the variables of this list. The list is not
        # needed here, because this copy is never saved.
        copy._variables.clear()

    def _apply(
        self, held: Sequence[_Value], tensors: Sequence[tf.Tensor], gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Takes a step with `tensors` as the values of `held`; returns the values after it."""
        with self._lock:
            try:
                for value, tensor in zip(held, tensors, strict=True):
                    value.hold(tensor)
                self._optimizer.apply(gradients, self._weights)
                return [tf.convert_to_tensor(value.value) for value in held]
            finally:
                for value in held:
                    value.release()


class KerasStep(_Step):
    """The step of a Keras optimizer on one flat vector, as a pure function.

    Args:
        optimizer: an optimizer of the kind and settings to use; it is not changed. Its step must
            treat every weight by itself.

    Attributes:
        State: a NamedTuple class with the fields `global_model`, the optimizer's slots by their
            Keras names, and `iterations` (steps so far, a float).
        initial: by name, the value with which a slot starts: an array of one element, or a scalar.

    Example:
        >>> step = KerasStep(keras.optimizers.SGD(0.5))
        >>> float(step(step.State(tf.constant(3.0), 0.0), gradient=tf.constant(2.0)).global_model)
        2.0
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        # The weights are NaN here, so a slot that starts from the weights starts as NaN, too.
        # `Outer` cannot use an optimizer with such a slot, and refuses it because of the NaN.
        unknown = _Value(np.full([1], np.nan, np.float32), autocast=False, name="weights")
        super().__init__(type(optimizer), optimizer.get_config(), [unknown])
        copy = self._optimizer
        others = (copy._iterations, copy._learning_rate)
        self._slots = [v for v in self._state if not any(v is other for other in others)]
        if isinstance(copy._learning_rate, _Value):
            copy._learning_rate = shortest(copy._learning_rate.numpy())
        # A slot that exists only once (Nadam's product) is an attribute of the optimizer, and gets
        # the attribute's name. The other slots are in lists, with one slot for each weight.
        attributes = {id(value): attribute for attribute, value in vars(copy).items()}
        names = [str(attributes.get(id(slot), slot.name)).strip("_") for slot in self._slots]
        self.initial = {n: slot.numpy() for n, slot in zip(names, self._slots, strict=True)}
        fields = ("global_model", *names, "iterations")
        self.State: Any = collections.namedtuple("OuterState", fields)  # type: ignore[misc]

    def __call__(self, state: State, gradient: Array) -> State:
        """Returns the state after one step. Weights and slots take the dtype of the gradient."""
        held = [*self._weights, *self._slots, self._optimizer._iterations]
        values = [tf.cast(value, gradient.dtype) for value in state[:-1]]
        values.append(tf.cast(tf.round(state.iterations), tf.int64))
        *values, _ = self._apply(held, values, [gradient])
        return self.State(*values, state.iterations + 1.0)


class KerasSteps(_Step):
    """The step of any Keras optimizer on several weights, as a pure function.

    Args:
        optimizer: an optimizer of the kind and settings to use; it is not changed.
        weights: the variables that it trains, for their shapes, constraints and weight decay.
        clip: whether the step clips gradients as the optimizer is configured. If a step sees only
            some of a model's weights, the gradients must be clipped before.
        told_rate: whether the caller writes the rate of a schedule into the state before each step.
            This is needed if the schedule counts other steps than those of this optimizer.

    Attributes:
        initial: values of the state before the first step: iterations, the learning rate unless
            it is a schedule, then the slots.
        schedule: with `told_rate`, the optimizer's schedule. None: the rate is not a schedule.
        rate_index: the position of the learning rate in the state. None: the state has no rate.
        owners: for each element of the state the index of the weight whose slot it is, or None.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable],
        clip: bool = True,
        told_rate: bool = False,
    ) -> None:
        check_plain(optimizer)
        config = optimizer.get_config()
        # `_learning_rate` may be a schedule. The public property `learning_rate` would give only
        # the schedule's present value.
        rate = optimizer._learning_rate
        scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        self.schedule = rate if told_rate and scheduled else None
        if self.schedule is not None:
            config["learning_rate"] = 0.0
        elif callable(rate) and not scheduled:
            # The learning rate is a function, and the config has only its name. From a name, Keras
            # can restore only functions that are registered with it. So the config is given the
            # function itself.
            config["learning_rate"] = rate
        if not clip:
            config |= dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"))
        values = [_Value(v.numpy(), dtype=v.dtype, autocast=False, name=v.name) for v in weights]
        for value, variable in zip(values, weights, strict=True):
            value.constraint = variable.constraint
            # Muon reads the names of layers in a variable's path. Keras keeps the path in this
            # private attribute.
            value._path = variable.path
        super().__init__(type(optimizer), config, values)
        # The method `exclude_from_weight_decay` may have excluded weights, but the config does not
        # say so. Therefore the copy is told here which weights are excluded.
        self._optimizer._exclude_from_weight_decay = {
            id(value)
            for value, variable in zip(values, weights, strict=True)
            if not optimizer._use_weight_decay(variable)
        }
        own_rate = self._optimizer._learning_rate
        self.rate_index = next((k for k, v in enumerate(self._state) if v is own_rate), None)
        self.initial = [value.numpy() for value in self._state]
        places = {id(value): k for k, value in enumerate(values)}
        self.owners = [places.get(id(value.reference)) for value in self._state]

    def limit_memory(self, most: float, rate_factor: float) -> None:
        """Limits momentum, or β₁, to `most`, and multiplies the steps; call it before the first."""
        self._optimizer.rate_factor = rate_factor
        for name in ("momentum", "beta_1", "adam_beta_1"):
            own = getattr(self._optimizer, name, None)
            if isinstance(own, int | float):
                setattr(self._optimizer, name, min(own, most))

    def __call__(
        self,
        weights: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns weights and state after one step; the state is like `initial`."""
        held = [*self._weights, *self._state]
        values = self._apply(held, [*weights, *state], list(gradients))
        return values[: len(self._weights)], values[len(self._weights) :]


def clipped(optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients, clipped as the optimizer is configured."""
    return list(optimizer._clip_gradients(gradients))


def step_of_rows(optimizer: keras.optimizers.Optimizer, path: str) -> tuple[bool, bool]:
    """Finds out, by steps on a small matrix, how an optimizer treats the rows of a weight.

    `path` is the path of the weight; some optimizers treat embeddings unlike other matrices.

    Returns:
        First, whether the step of a row depends on no other row, and all rows of a slot begin
        equal. Second, whether a row whose gradient is zero keeps its value and its slots, as under
        SGD without momentum and under Adagrad. (Ftrl moves a row that has had no gradient yet.)
    """
    start = np.asarray([[1.0, -2.0], [0.5, 3.0], [4.0, 0.25]], np.float32)
    factors = [[1.0], [1.0], [0.0]], [[0.5], [1.0], [2.0]], [[1.0], [0.0], [2.0]]
    gradients = [start[::-1] * np.asarray(factor) for factor in factors]

    def trained(rows: slice) -> list[list[Any]]:
        """Returns the slots before the first step, and weight and slots after each step."""
        weight = keras.Variable(start[rows], name=path.split("/")[-1])
        weight._path = path  # `KerasSteps` passes the path on to the optimizer; Muon reads it.
        # With `told_rate`, the state has a learning rate even if the optimizer has a schedule.
        steps = KerasSteps(optimizer, [weight], clip=False, told_rate=True)
        if steps.rate_index is None:  # the learning rate is a function
            steps._optimizer._learning_rate = lambda: 0.5
        weights, state = [tf.constant(start[rows])], [tf.constant(v) for v in steps.initial]
        slots = [k for k, owner in enumerate(steps.owners) if owner == 0]
        found = [[np.asarray(state[k]) for k in slots]]
        for gradient in gradients:
            # The optimizer's own rate may be so near 0 that the weights would not change. So the
            # rate 0.5 replaces it.
            if steps.rate_index is not None:
                state[steps.rate_index] = tf.constant(0.5)
            weights, state = steps(weights, state, [tf.constant(gradient[rows], tf.float32)])
            found.append([v.numpy() for v in (*weights, *(state[k] for k in slots))])
        return found

    first, *whole = trained(slice(0, 3))
    alone = [trained(slice(k, k + 1))[1:] for k in range(3)]
    by_rows = all(np.all(slot == slot[:1]) for slot in first) and all(
        np.shape(value) == start.shape and np.allclose(value, np.concatenate(rows), rtol=1e-5)
        for step, *of_rows in zip(whole, *alone, strict=True)
        for value, *rows in zip(step, *of_rows, strict=True)
    )
    unmoved = by_rows and all(
        np.array_equal(before[2], after[2]) and np.array_equal(earlier[1], later[1])
        for before, after, earlier, later in zip([start, *first], *whole, strict=True)
    )
    return by_rows, unmoved


def class_names(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """Returns the names of an optimizer's class and its base classes."""
    # Names are compared, and not classes, because some versions of Keras lack some optimizers.
    return {kind.__name__ for kind in type(optimizer).__mro__}


def check_plain(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for settings that affect several steps, and optimizers that wrap others."""
    for setting, instead in (
        ("use_ema", "give the strategy averages={'ema': tfpara.EMA(...)}"),
        ("gradient_accumulation_steps", "choose a larger sync_period"),
        ("loss_scale_factor", "train in float32 or bfloat16"),
    ):
        if getattr(optimizer, setting, None):
            raise ValueError(
                f"the optimizer has {setting}={getattr(optimizer, setting)!r}, which a single step "
                f"cannot honour: leave it out and {instead}."
            )
    if "MultiOptimizer" in class_names(optimizer):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} gives weights different optimizers, and an "
            "AsyncStrategy has one for all weights. Give one optimizer, or train with "
            "tfpara.PeriodicSyncStrategy."
        )
    if hasattr(optimizer, "inner_optimizer"):
        own, inner = type(optimizer).__name__, type(optimizer.inner_optimizer).__name__
        raise ValueError(
            f"the optimizer {own} wraps another one, {inner}, to scale losses. Keras' compile adds "
            "it by itself if the model's dtype policy is mixed_float16. Make the model under "
            f"keras.config.set_dtype_policy('mixed_bfloat16') or 'float32', and give {inner}."
        )


def check_local(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizers whose step would undo what a worker has pulled from the servers."""
    name = type(optimizer).__name__
    if class_names(optimizer) & {"Ftrl", "ScheduleFreeAdamW"}:
        raise ValueError(
            f"{name} computes weights from its slots, so its step on a worker would undo what the "
            "worker has pulled from the servers. Take tfpara.ASGD(), under which the servers have "
            "the optimizer, or another optimizer."
        )


def shortest(value: Scalar) -> float:
    """Returns the shortest number with this float32 value: 0.7, where Keras gives 0.699999988."""
    return float(str(np.float32(value)))
