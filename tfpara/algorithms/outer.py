"""Outer optimizers: any element-by-element Keras optimizer as the global step; DiLoCo, SlowMo."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfpara.algorithms.arithmetic import check_number
from tfpara.algorithms.keras_step import KerasStep, shortest
from tfpara.algorithms.rule import Rule, mixes_weights
from tfpara.typing import Array, Scalar, State

_FIX = "Use an optimizer that treats every weight by itself: SGD, Adam, AdamW, Adagrad, RMSprop, …"
_REFUSED = {
    "Adafactor": "scales its step by the norm of whole weight matrices",
    "Lamb": "scales its step by the norm of whole weight matrices",
    "Muon": "works on whole weight matrices",
    "ScheduleFreeAdamW": "keeps a second copy of the weights, which its slots must start from",
    "Ftrl": "computes the weights from its slots, which begin at 0, so that they begin at 0 too",
    "LossScaleOptimizer": "scales losses, and a pseudo-gradient has none",
    "MultiOptimizer": "treats variables differently, and the rule sees one flat vector",
}
_OPTIONS = {
    "clipnorm": "the norm of a whole variable; use clipvalue",
    "global_clipnorm": "the norm of the whole gradient; use clipvalue",
    "use_ema": "averages beside the model; use averages={'ema': tfpara.EMA(...)} of the strategy",
    "gradient_accumulation_steps": "several updates; use a longer sync_period",
    "loss_scale_factor": "a scaled loss, and a pseudo-gradient comes from none; leave it out",
}


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Outer(Rule):
    """A Keras optimizer as the global step, on the pseudo-gradient.

        G = W − w̄;  W ← optimizer step with the gradient G;  every replica continues from W

    w̄ is the (sample-weighted) mean of the local models. Many rules have this form: SGD(1.0) is
    model averaging, and SGD(ζ, momentum=η) is classical block momentum. SGD(ζ, momentum=η,
    nesterov=True) is Nesterov block momentum, where W is the point that is broadcast. For a
    constant rate, Keras' SGD with Nesterov momentum, m ← ηm − ζG, W ← W + ηm − ζG, equals torch's
    b ← ηb + G, W ← W − ζ(G + ηb), with m = −ζb.

    If a block ends after a share f of its minibatches, the optimizer computes a step with the
    gradient G/f. Weights, slots and count then change by the share f of this step. So SGD equals
    BMUF in shorter blocks, too.

    A LearningRateSchedule gets the number of blocks so far, rounded to a whole number (a shorter
    block counts f). `weight_decay` moves all weights, including biases, towards 0 at each sync.

    Args:
        keras_optimizer: a new Keras optimizer whose step treats every weight by itself; the rule
            copies its settings. Or a function that makes one, such as `lambda:
            keras.optimizers.Adam(0.1, epsilon=1e-3)`. Several workers need a function, since making
            an optimizer starts TensorFlow, which must know the cluster first. The strategy's
            constructor calls the function, and checks the optimizer. With Keras' `epsilon` of 1e-7,
            Adam would turn rounding errors of a mean into steps.

    Raises:
        TypeError: `keras_optimizer` is not a Keras optimizer.
        ValueError: the optimizer's step is not element by element (Adafactor, Lamb, Muon, clipping
            by norm), or does not begin at the weights (Ftrl); or the optimizer does more than a
            step (use_ema, gradient_accumulation_steps, loss scaling).

    Source: Reddi et al., "Adaptive federated optimization" (2021), algorithm 1 (there FedOpt).

    Example:
        >>> rule = Outer(keras.optimizers.SGD(0.5))
        >>> float(rule.update(rule.init(0.0), average=2.0, num_replicas=2).global_model)
        1.0
    """

    keras_optimizer: keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer]

    def __post_init__(self) -> None:
        if not self._is_function:
            self._check_element_by_element()

    @property
    def _is_function(self) -> bool:
        given = self.keras_optimizer
        return callable(given) and not isinstance(given, keras.optimizers.Optimizer | type)

    @functools.cached_property
    def _optimizer(self) -> keras.optimizers.Optimizer:
        given: Any = self.keras_optimizer
        optimizer = given() if self._is_function else given
        _check_kind(optimizer)
        _check_options(optimizer)
        return optimizer

    @functools.cached_property
    def _step(self) -> KerasStep:
        return KerasStep(self._optimizer)

    def __repr__(self) -> str:
        if self._is_function and "_optimizer" not in vars(self):
            # A call of the function could start TensorFlow. This must not happen before TensorFlow
            # has been told of the cluster.
            return "Outer(a function, called when the strategy is made)"
        return f"Outer({_settings(self._optimizer)})"

    def resolve(self, num_replicas: int) -> Outer:
        """Checks this rule, which does not depend on the number of replicas, and returns it."""
        self._check_element_by_element()
        return self

    def has_momentum(self) -> bool:
        """Returns whether the outer optimizer is SGD with momentum; see `Rule`."""
        outer = self._optimizer
        return isinstance(outer, keras.optimizers.SGD) and outer.momentum > 0.0

    def init(self, weights: Array) -> State:
        """Returns the state of a run that starts at the flat vector `weights`, a NamedTuple.

        Its fields are `global_model`, the optimizer's slots by their Keras names (momentum,
        velocity, …) and `iterations` (blocks so far, a float: a share f of a block counts f).
        """
        step = self._step
        slots = [
            weights * 0.0 + float(value[0]) if value.ndim else float(value)
            for value in step.initial.values()
        ]
        return step.State(weights, *slots, 0.0)

    def update(self, state: State, average: Array, num_replicas: int, share: Scalar = 1.0) -> State:
        """Returns the state after a sync; `average` is w̄, and `share` is f, 0 < f ≤ 1."""
        step = self._step
        in_numpy = not (tf.is_tensor(average) or tf.is_tensor(state.global_model))
        gradient = (np.asarray(state.global_model) if in_numpy else state.global_model) - average
        whole = isinstance(share, float) and share == 1.0
        after = step(state, tf.convert_to_tensor(gradient if whole else gradient / share))
        if not whole:
            pairs = zip(state, after, strict=True)
            after = step.State(*(old + share * (new - old) for old, new in pairs))
        return step.State(*(np.asarray(v)[()] for v in after)) if in_numpy else after

    def _check_element_by_element(self) -> None:
        """Raises ValueError unless steps on three weights together equal steps on each alone."""
        weights = np.array([0.5, -1.0, 2.0], np.float32)
        averages = weights + np.array([[1e-3, 0.2, -30.0], [-0.7, 0.1, 4.0]], np.float32)

        def run(part: slice) -> list[Any]:
            state = self.init(weights[part])
            for average in averages:
                state = self.update(state, average[part], 2)
            return [np.broadcast_to(value, weights[part].shape) for value in state]

        if mixes_weights(run):
            name = type(self._optimizer).__name__
            raise ValueError(
                f"{name} cannot be an outer optimizer: its step or its start mixes weights, and "
                f"every replica owns only a part of them. {_FIX}"
            )
        if not self._optimizer.weight_decay:
            self._check_stays(weights)

    def _check_stays(self, weights: NDArray[np.float32]) -> None:
        """Raises ValueError if a first step moves the weights although no replica has moved."""
        moved = self.update(self.init(weights), weights, 2).global_model
        if not np.allclose(moved, weights, rtol=1e-5, atol=1e-9):
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot be an outer optimizer: its first step "
                f"with the gradient 0 takes the weights {weights} to {moved}, away from where the "
                f"run begins. {_FIX}"
            )


def DiLoCo(learning_rate: float = 0.7, momentum: float = 0.9) -> Outer:
    """DiLoCo's outer step: SGD with Nesterov momentum on the pseudo-gradient.

        G = W − w̄;  b ← μb + G;  W ← W − lr (G + μb);  every replica continues from W

    This equals Nesterov BMUF with η = μ and ζ = lr. The authors' local optimizer is AdamW, whose
    state is kept across syncs (`local_state="keep"`), with a period of about 500 steps.

    Args:
        learning_rate: lr > 0.
        momentum: μ, 0 ≤ μ < 1.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models"
    (2023), algorithm 1.

    Example:
        >>> rule = DiLoCo(learning_rate=0.5, momentum=0.5)
        >>> float(rule.update(rule.init(0.0), average=2.0, num_replicas=2).global_model)
        1.5
    """
    _check_rate("learning_rate", learning_rate)
    _check_momentum("momentum", momentum)
    return Outer(lambda: keras.optimizers.SGD(float(learning_rate), float(momentum), nesterov=True))


def SlowMo(slow_learning_rate: float = 1.0, slow_momentum: float = 0.7) -> Outer:
    """Slow momentum over blocks of local steps.

        u ← βu + (W − w̄)/γ;  W ← W − αγu;  every replica continues from W

    with γ the local learning rate. So that this rule need not know γ, its state is v = γu, in units
    of weights: v ← βv + (W − w̄), W ← W − αv. For a constant γ both forms are the same. If a
    schedule changes γ between two syncs, the paper multiplies the older v by the ratio of the new
    rate to the old rate, and this rule does not. All replicas are averaged, as in the paper's Local
    SGD form. With α = ζ and β = η it is classical block momentum, `BMUF(η, ζ, nesterov=False)`.

    Args:
        slow_learning_rate: α > 0.
        slow_momentum: β, 0 ≤ β < 1. The paper uses 0.4 to 0.8.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: Wang, Tantia, Ballas & Rabbat, "SlowMo: Improving communication-efficient distributed
    SGD with slow momentum" (ICLR 2020), algorithm 1.

    Example:
        >>> rule = SlowMo(slow_momentum=0.5)
        >>> state = rule.update(rule.init(0.0), average=2.0, num_replicas=2)
        >>> float(rule.update(state, average=2.0, num_replicas=2).global_model)
        3.0
    """
    _check_rate("slow_learning_rate", slow_learning_rate)
    _check_momentum("slow_momentum", slow_momentum)
    return Outer(lambda: keras.optimizers.SGD(float(slow_learning_rate), float(slow_momentum)))


def _check_rate(name: str, value: float) -> None:
    check_number(name, value, "0.7")
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a positive number. 0.7 to 1 is usual.")


def _check_momentum(name: str, value: float) -> None:
    check_number(name, value, "0.9")
    if not 0.0 <= value < 1.0:
        raise ValueError(
            f"{name}={value!r} is outside [0, 1): at 1 or more the model update grows without "
            "bound. 0.5 to 0.9 is usual."
        )


def _check_kind(optimizer: keras.optimizers.Optimizer) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"Outer({optimizer!r}): give a Keras optimizer object, for example "
            "tfpara.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))."
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            raise ValueError(
                f"{kind.__name__} cannot be an outer optimizer: it {_REFUSED[kind.__name__]}. "
                f"{_FIX}"
            )


def _check_options(optimizer: keras.optimizers.Optimizer) -> None:
    name = type(optimizer).__name__
    for option, reason in _OPTIONS.items():
        if getattr(optimizer, option, None):
            raise ValueError(
                f"{name}({option}={getattr(optimizer, option)!r}) cannot be an outer optimizer: "
                f"the option needs {reason}."
            )
    # The method `exclude_from_weight_decay` of Keras' optimizers sets these two attributes.
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded or getattr(optimizer, "_exclude_from_weight_decay_pattern", None):
        raise ValueError(
            f"{name} excludes variables from weight decay, but an outer optimizer sees one flat "
            "vector without names. Leave weight_decay to the local optimizer."
        )
    # The public property `learning_rate` would give a schedule's value, and not the schedule.
    rate = getattr(optimizer, "_learning_rate", None)
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if not isinstance(rate, keras.Variable | schedule):
        raise ValueError(
            f"{name}(learning_rate={rate!r}) cannot be an outer optimizer: a function's result may "
            "differ between workers. Give a number or a keras LearningRateSchedule."
        )


def _settings(optimizer: keras.optimizers.Optimizer) -> str:
    """Returns the settings as a text that is the same on every worker, for comparisons."""
    config = optimizer.get_config()
    shown = []
    for key, value in config.items():
        if key == "name" or key.startswith("ema_") or value is None or value is False:
            continue
        if isinstance(value, float):
            value = shortest(value)
        text = json.dumps(value, sort_keys=True, default=repr) if value is not True else "True"
        shown.append(f"{key}={text}")
    return f"{type(optimizer).__name__}({', '.join(shown)})"
