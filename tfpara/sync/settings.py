"""What a strategy is told, checked before anything starts."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import keras

from tfpara import algorithms
from tfpara.checks import versions
from tfpara.collectives.choice import COLLECTIVES

LOCAL_STATE = ("keep", "reset", "average")
AGGREGATIONS = ("auto", "replicated", "sharded")
COMPRESSIONS = ("none", "bf16", "fp16", "int8")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The checked arguments of a strategy."""

    rule: algorithms.Rule
    sync_period: int
    averages: dict[str, Any]
    local_state: str
    aggregation: str
    timeout_seconds: float
    communication: str
    collectives: str
    data_plan: dict[str, Any]
    overlap: bool | int = False
    fragments: int = 1
    device_sync_period: int | None = None
    compression: str = "none"
    asked_rule: str = ""  # before the number of replicas filled its defaults in

    def resolved(self, num_replicas: int) -> Settings:
        """With the rule for N replicas. Not before TensorFlow knows the cluster."""
        rule, asked = self.rule.resolve(num_replicas), repr(self.rule)
        if _is_of_a_user(rule):
            algorithms.check_rule(checked_rule(rule), num_replicas)
        for average in filter(_is_of_a_user, self.averages.values()):
            algorithms.check_average(average)
        return dataclasses.replace(self, rule=rule, asked_rule=asked)

    def fingerprint(self) -> dict[str, Any]:
        """What has to be equal on all workers."""
        return {
            **versions(),
            "rule": repr(self.rule),
            "sync_period": str(self.sync_period),
            "averages": repr(self.averages),
            "local_state": self.local_state,
            "aggregation": self.aggregation,
            "overlap": str(self.overlap),
            "fragments": str(self.fragments),
            "device_sync_period": str(self.device_sync_period),
            "compression": self.compression,
            "collectives": self.collectives,
            **{f"data_plan.{k}": v for k, v in self.data_plan.items()},
        }

    def of_a_run(self) -> dict[str, Any]:
        """What has to be equal when a run is resumed, maybe on another number of replicas."""
        added = {  # Checkpoints of older programs have none of these.
            "overlap": self.overlap,
            "fragments": self.fragments if self.fragments > 1 else None,
            "device_sync_period": self.device_sync_period,
            "compression": self.compression if self.compression != "none" else None,
        }
        return {
            "rule": self.asked_rule,
            "averages": repr(self.averages),
            "local_state": self.local_state,
            **{k: v for k, v in added.items() if v},
            **{f"data_plan.{k}": v for k, v in self.data_plan.items()},
        }


def warn_of_outlasting_momentum(settings: Settings, optimizer: Any) -> None:
    """Classical block momentum and kept local momentum that remembers longer than a block."""
    rule = settings.rule
    if not isinstance(rule, algorithms.BMUF) or rule.nesterov or settings.local_state != "keep":
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Not Adam's beta_1: that averages gradients, and carries no movement on.
    momentum = getattr(inner, "momentum", None) or 0.0
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


def _is_of_a_user(given: Any) -> bool:
    return type(given).__module__.partition(".")[0] != "tfpara"


def checked_rule(rule: Any) -> Any:
    """Returns the rule if it is a rule object, else raises TypeError that says what to write."""
    names = [f"tfpara.{kind.__name__}(...)" for kind in algorithms.RULES]
    names += ["tfpara.DiLoCo(...)", "tfpara.SlowMo(...)", "one of your own (tfpara.Rule)"]
    if isinstance(rule, algorithms.Rule):
        return rule
    hint = ""
    if isinstance(rule, type) and issubclass(rule, algorithms.Rule):
        arguments = "keras.optimizers.SGD(1.0)" if rule is algorithms.Outer else ""
        name = f"tfpara.{rule.__name__}" if rule in algorithms.RULES else rule.__name__
        hint = f" That is the class: write {name}({arguments}) with parentheses."
    elif isinstance(rule, keras.optimizers.Optimizer):
        hint = " Write tfpara.Outer(...) around the optimizer."
    elif isinstance(rule, str):
        match = [k.__name__ for k in algorithms.RULES[:-1] if k.__name__.lower() == rule.lower()]
        hint = f" Write tfpara.{match[0]}(), not its name." if match else ""
    raise TypeError(f"rule={rule!r} is not a rule object, one of {', '.join(names)}.{hint}")


def checked_local_state(
    local_state: str, rule: Any, overlap: bool | int = False, fragments: int = 1
) -> str:
    """Returns the choice if there is such a one and the rule takes it, else raises ValueError."""
    if isinstance(rule, algorithms.BMUFAdam) and local_state != "keep":
        raise ValueError(
            f"local_state={local_state!r}: BMUFAdam filters the optimizer's moments itself. Leave "
            "local_state out, or use tfpara.BMUF."
        )
    if local_state not in LOCAL_STATE:
        raise ValueError(f"local_state={local_state!r} is not one of {', '.join(LOCAL_STATE)}.")
    if local_state != "keep" and (overlap or fragments > 1):
        raise ValueError(
            f"local_state={local_state!r} is for syncs of the whole model at which training "
            "stops: where syncs overlap training, or are of fragments, the optimizer's slots "
            'belong to the steps under way. Give local_state="keep".'
        )
    return local_state


def checked_overlap(overlap: bool | int, rule: Any, sync_period: int) -> bool | int:
    """Returns it if the rule and the period allow it, else raises ValueError."""
    if isinstance(overlap, bool) and not overlap:
        return False
    if getattr(rule, "restart_delayed", None) is None:
        raise ValueError(
            f"overlap={overlap!r}: {type(rule).__name__} has no delayed form, which says how "
            "replicas keep what they learn while a sync is under way. Leave overlap out, or use "
            "tfpara.BMUF or another rule."
        )
    if not isinstance(overlap, int) or overlap < 1:
        raise ValueError(
            f"overlap={overlap!r} must be True, False, or a whole number of minibatches of at "
            "least 1, after which a sync is merged."
        )
    if overlap is not True:
        check_delay(overlap, sync_period)
    return overlap


def check_delay(overlap: bool | int, sync_period: int | None) -> None:
    """Raises ValueError if a sync would be merged only after the next one begins."""
    if overlap is not True and sync_period is not None and overlap > sync_period:
        raise ValueError(
            f"overlap={overlap} minibatches is longer than sync_period={sync_period}: a sync must "
            "be merged before the next one begins. Give overlap=True or a smaller number."
        )


def checked_fragments(fragments: int, rule: Any) -> int:
    """Returns the number of fragments if the rule can have so many, else raises ValueError."""
    if isinstance(fragments, bool) or not isinstance(fragments, int) or fragments < 1:
        raise ValueError(f"fragments={fragments!r} must be a whole number of at least 1.")
    if fragments > 1 and isinstance(rule, algorithms.BMUFAdam):
        raise ValueError(
            f"fragments={fragments}: BMUFAdam filters the moments of a whole block. Leave "
            "fragments out, or use tfpara.BMUF."
        )
    return fragments


def checked_compression(compression: str, rule: Any, aggregation: str) -> str:
    """Returns the format if the rule and the aggregation allow it, else raises ValueError."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression!r} is not one of {', '.join(COMPRESSIONS)}.")
    if compression == "none":
        return compression
    if isinstance(rule, algorithms.BMUFAdam):
        raise ValueError(
            f"compression={compression!r}: the moments that BMUFAdam filters are sent as they are. "
            "Leave compression out, or use tfpara.BMUF."
        )
    if aggregation == "replicated":
        raise ValueError(
            f"compression={compression!r} sums rounded numbers at the owner of each part of the "
            'model, and aggregation="replicated" has none. Give aggregation="sharded" or "auto".'
        )
    return compression


def check_sendable(compression: str, collectives: Any) -> None:
    """Raises ValueError if the backend cannot send a format."""
    if compression != "none" and not hasattr(collectives, "all_to_all"):
        raise ValueError(
            f"compression={compression!r} needs an all-to-all of integers, which "
            f'{type(collectives).__name__} does not have. Give compression="none", or '
            'collectives="tensorflow".'
        )


def checked_device_period(device_sync_period: int | None, sync_period: int) -> int | None:
    """Returns it if it is None or divides the sync period, else raises ValueError."""
    if device_sync_period is None:
        return None
    if isinstance(device_sync_period, bool) or not isinstance(device_sync_period, int):
        raise ValueError(
            f"device_sync_period={device_sync_period!r} must be a whole number of minibatches, or "
            "None."
        )
    check_device_period(device_sync_period, sync_period)
    return device_sync_period


def check_device_period(device_sync_period: int | None, sync_period: int | None) -> None:
    """Raises ValueError unless syncs come where the devices of a worker are averaged."""
    if device_sync_period is None or sync_period is None:
        return
    if device_sync_period < 1 or sync_period % device_sync_period:
        raise ValueError(
            f"device_sync_period={device_sync_period} does not divide sync_period={sync_period}: "
            "workers sync where their devices have just been averaged. Give a period of which "
            "sync_period is a multiple."
        )


def checked_aggregation(aggregation: str) -> str:
    """Returns the choice if there is such a one, else raises ValueError."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}.")
    return aggregation


def checked_communication(communication: str) -> str:
    """Returns it if TensorFlow has it, else raises ValueError."""
    known = ("AUTO", "RING", "NCCL")
    if communication not in known:
        raise ValueError(f"communication={communication!r} is not one of {', '.join(known)}.")
    return communication


def checked_collectives(collectives: str) -> str:
    """Returns the choice if there is such a one, else raises ValueError."""
    if collectives not in COLLECTIVES:
        raise ValueError(f"collectives={collectives!r} is not one of {', '.join(COLLECTIVES)}.")
    return collectives
