"""Averages of the global model that do not influence training: never broadcast or fed back."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tfpara.algorithms.arithmetic import check_number, minimum
from tfpara.algorithms.rule import Average
from tfpara.typing import Array, Scalar


class AverageState(NamedTuple):
    """State of an average."""

    average: Array  # the average so far; before the first block it is the starting point
    # The number of blocks so far. A block with only a share f of a whole block's minibatches counts
    # f, so the field is a Scalar. But it is declared Any, because a type checker would not let a
    # Scalar replace the method `count` of tuples.
    count: Any
    bias: Scalar  # the weight that the starting point still has in `average`


@dataclasses.dataclass(frozen=True)
class EMA(Average):
    """Exponential moving average of the global model after each sync.

        Ŵ_t = β_t Ŵ_{t−1} + (1 − β_t) W_t,   Ŵ_0 = W_0

    This equals the shadow variables of `tf.train.ExponentialMovingAverage`, updated once a sync.
    After a shorter block, with a share f of the minibatches of a whole block, the model's weight is
    f(1 − β_t) instead of 1 − β_t.

    Args:
        decay: β, 0 < β < 1.
        num_updates: True: β_t = min(β, (1+t)/(10+t)) with t the number of blocks before this one (a
            share f of a block counts f), as in TensorFlow with a counter. So the average covers
            about the last tenth of the run, at most 1/(1 − β) syncs, and suits short runs too.
            False: β_t = β; after t syncs the initial weights still have the weight β^t in the
            average.
        zero_debias: True: from the first sync on, W_0 has no part in the average: Ŵ starts from 0,
            and is divided by the sum of the weights of the models in it.

    Raises:
        TypeError: a value is not a number.
        ValueError: β outside (0, 1).

    Source: "Exponential moving average model in parallel speech recognition training" (paper 000
    of the project), section 2.2.

    Example:
        >>> ema = EMA(0.75, num_updates=False)
        >>> ema.value(ema.update(ema.init(4.0), 8.0))
        5.0
    """

    decay: float
    num_updates: bool = True
    zero_debias: bool = False

    def __post_init__(self) -> None:
        check_number("decay", self.decay, "0.99")
        if not 0.0 < self.decay < 1.0:
            raise ValueError(
                f"decay={self.decay!r} is outside (0, 1). Typical values are 0.9 to 0.999 per sync."
            )

    def init(self, weights: Array) -> AverageState:
        return AverageState(average=weights, count=0.0, bias=1.0)

    def update(self, state: AverageState, global_model: Array, share: Scalar = 1.0) -> AverageState:
        """Returns the state after a sync; `share` is f, 0 < f ≤ 1."""
        decay: Scalar = self.decay
        if self.num_updates:
            decay = minimum(decay, (1.0 + state.count) / (10.0 + state.count))
        before = state.average
        if self.zero_debias:
            before = before * _has_models(state)
        return AverageState(
            average=before + share * (1.0 - decay) * (global_model - before),
            count=state.count + share,
            bias=state.bias * (decay + (1.0 - share) * (1.0 - decay)),
        )

    def value(self, state: AverageState) -> Array:
        """Returns the averaged model, flat; before the first sync it is the starting point."""
        if not self.zero_debias:
            return state.average
        return state.average / ((1.0 - state.bias) + (1.0 - _has_models(state)))


def _has_models(state: AverageState) -> Scalar:
    """Returns 1 if some model is in the average, and 0 if the average is the starting point."""
    return minimum(1.0, (1.0 - state.bias) * 1e30)


@dataclasses.dataclass(frozen=True)
class MA(Average):
    """Equal-weight moving average of the global models after each sync.

        W̄_t = (1/t) Σ_{k=1..t} W_k

    After a shorter block, with a share f of the minibatches of a whole block, W_k has the weight f
    in the sum, and t grows by f. Before the first sync the average is the initial model. Source:
    paper 000, section 2.2.

    Example:
        >>> ma = MA()
        >>> ma.value(ma.update(ma.update(ma.init(100.0), 2.0), 4.0))
        3.0
    """

    def init(self, weights: Array) -> AverageState:
        return AverageState(average=weights, count=0.0, bias=1.0)

    def update(self, state: AverageState, global_model: Array, share: Scalar = 1.0) -> AverageState:
        count = state.count + share
        return AverageState(
            average=state.average + (global_model - state.average) / (count / share),
            count=count,
            bias=state.bias * 0.0,
        )

    def value(self, state: AverageState) -> Array:
        return state.average
