"""Schedules: learning rate, minibatch size, sync period, and when to stop.

Schedules are pure: callables of the position in the run (in epochs, from 0), and frozen dataclasses
with ``init() -> state`` and ``update(state, scores) -> state`` whose states are NamedTuples of
plain numbers. Workers with the same numbers take the same decisions, which the Keras callbacks of
`tfpara.callbacks` execute. Only `Adapt` is an optimizer.
"""

from tfpara.schedules.adapt import Adapt
from tfpara.schedules.newbob import NewbobRule, NewbobState
from tfpara.schedules.overfitting import OverfittingRule, OverfittingState
from tfpara.schedules.period import AdaComm, AdaCommState, Quadratic
from tfpara.schedules.position import (
    Exponential,
    Hand,
    Piecewise,
    Segment,
    linear_scaling,
    minibatch_sizes,
)
from tfpara.schedules.search import best_rate, candidate_rates

__all__ = [
    "AdaComm",
    "AdaCommState",
    "Adapt",
    "Exponential",
    "Hand",
    "NewbobRule",
    "NewbobState",
    "OverfittingRule",
    "OverfittingState",
    "Piecewise",
    "Quadratic",
    "Segment",
    "best_rate",
    "candidate_rates",
    "linear_scaling",
    "minibatch_sizes",
]
