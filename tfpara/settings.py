"""What a strategy is told, checked before anything starts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpara import algorithms
from tfpara.synchronizer import LOCAL_STATE
from tfpara.version import __version__


@dataclasses.dataclass(frozen=True)
class Settings:
    """The checked arguments of a strategy."""

    rule: Any
    sync_period: int
    averages: dict[str, Any]
    local_state: str
    timeout_seconds: float
    communication: str

    def fingerprint(self) -> dict[str, str]:
        """What has to be equal on all workers."""
        return {
            "tfpara version": __version__,
            "tensorflow version": tf.__version__,
            "keras version": keras.__version__,
            "rule": repr(self.rule),
            "sync_period": str(self.sync_period),
            "averages": repr(self.averages),
            "local_state": self.local_state,
        }


def warn_of_outlasting_momentum(settings: Settings, optimizer: Any) -> None:
    """Classical block momentum and kept local momentum that remembers longer than a block."""
    rule = settings.rule
    if not isinstance(rule, algorithms.BMUF) or rule.nesterov or settings.local_state != "keep":
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(inner, "momentum", None) or getattr(inner, "beta_1", None) or 0.0
    if not isinstance(momentum, int | float) or not 0.0 < momentum < 1.0:
        return
    memory = 1.0 / (1.0 - momentum)
    if rule.block_momentum and memory > settings.sync_period:
        warnings.warn(
            f"the local optimizer's momentum {momentum:g} remembers about {memory:.0f} "
            f"minibatches, longer than a block of sync_period={settings.sync_period}; kept across "
            "syncs under "
            "classical block momentum it is counted twice, and training may diverge. Use "
            'BMUF(nesterov=True), local_state="reset", or a longer sync_period.',
            stacklevel=2,
        )


def checked_rule(rule: Any) -> Any:
    names = [f"tfpara.{kind.__name__}(...)" for kind in algorithms.RULES]
    if isinstance(rule, algorithms.RULES):
        return rule
    hint = ""
    if isinstance(rule, type) and rule in algorithms.RULES:
        hint = f" That is the class: write tfpara.{rule.__name__}() with parentheses."
    elif isinstance(rule, str):
        match = [k.__name__ for k in algorithms.RULES if k.__name__.lower() == rule.lower()]
        hint = f" Write tfpara.{match[0]}(), not its name." if match else ""
    raise TypeError(f"rule={rule!r} is not a rule object, one of {', '.join(names)}.{hint}")


def checked_period(sync_period: int) -> int:
    if isinstance(sync_period, bool) or not isinstance(sync_period, int) or sync_period < 1:
        raise ValueError(
            f"sync_period={sync_period!r} must be a whole number of minibatches, at least 1."
        )
    return sync_period


def checked_averages(averages: Mapping[str, Any]) -> dict[str, Any]:
    for name, average in averages.items():
        if not isinstance(average, algorithms.AVERAGES):
            raise TypeError(
                f"averages[{name!r}]={average!r} is not an average object, tfpara.EMA(decay) or "
                "tfpara.MA()."
            )
        if name in ("global", "local"):
            raise ValueError(f"averages: the name {name!r} is taken. Choose another.")
    return dict(averages)


def checked_local_state(local_state: str) -> str:
    if local_state not in LOCAL_STATE:
        raise ValueError(f"local_state={local_state!r} is not one of {', '.join(LOCAL_STATE)}.")
    return local_state
