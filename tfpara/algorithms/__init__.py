"""Synchronisation rules and averages: pure functions over flat arrays.

Every rule derives from `Rule`, and every average from `Average` (`rule.py` describes their
methods). They are frozen dataclasses with pure methods in plain arithmetic, so the same code runs
on NumPy arrays (tests, simulation) and on TensorFlow tensors (clusters). The arithmetic is element
by element, so a rule may be applied to any part of the weights.

A block may be closed early, for example at the end of an epoch. Such a block is a share f < 1 of a
whole block. Its step is f times the step that a whole block would have taken, had the models moved
on at the same pace. With s the state and B the point from which the replicas started,

    s ← s + f (step of s with the average B + (w̄ − B)/f − s)

A whole block has f = 1. With this equation, w̄ − B of a shorter block moves the model in the end as
far as the same w̄ − B of a whole block, and momentum lasts for as many minibatches as in whole
blocks. An average counts the global model after such a block as f models.
"""

from tfpara.algorithms.asgd import (
    ASGD,
    AsyncBMUF,
    AsyncEASGD,
    AveragedASGD,
    Downpour,
    RunningThenMean,
)
from tfpara.algorithms.averages import EMA, MA
from tfpara.algorithms.bmuf import BMUF
from tfpara.algorithms.bmuf_adam import BMUFAdam
from tfpara.algorithms.bsp import BSP
from tfpara.algorithms.easgd import EASGD
from tfpara.algorithms.outer import DiLoCo, Outer, SlowMo
from tfpara.algorithms.rule import Average, Rule, check_average, check_rule

RULES = (BSP, BMUF, BMUFAdam, EASGD, Outer)
ASYNC_RULES = (ASGD, AveragedASGD, Downpour, AsyncBMUF, AsyncEASGD)
AVERAGES = (EMA, MA)

__all__ = [
    "ASGD",
    "ASYNC_RULES",
    "AVERAGES",
    "BMUF",
    "BSP",
    "EASGD",
    "EMA",
    "MA",
    "RULES",
    "AsyncBMUF",
    "AsyncEASGD",
    "Average",
    "AveragedASGD",
    "BMUFAdam",
    "DiLoCo",
    "Downpour",
    "Outer",
    "Rule",
    "RunningThenMean",
    "SlowMo",
    "check_average",
    "check_rule",
]
