"""An average that a user has written: the same as MA."""

import dataclasses
from typing import Any, NamedTuple

import tfpara


class Moments(NamedTuple):
    mean: Any  # a field of `RunningThenMean`'s state has this name, too
    count: Any


@dataclasses.dataclass(frozen=True)
class Mean(tfpara.Average):
    def init(self, weights):
        return Moments(weights, 0.0)

    def update(self, state, global_model, share=1.0):
        count = state.count + share
        return Moments(state.mean + share * (global_model - state.mean) / count, count)

    def value(self, state):
        return state.mean
