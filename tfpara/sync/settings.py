"""The settings of a strategy, checked before anything starts."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Mapping, Sequence

import keras

from tfpara import algorithms
from tfpara.algorithms.rule import Average, Rule
from tfpara.checks import checked_averages, checked_nonfinite, checked_period, versions
from tfpara.collectives.choice import COLLECTIVES, COMMUNICATIONS
from tfpara.keras_model import inner, is_normalised, memory_can_change, memory_of, momentum_of
from tfpara.typing import Json
from tfpara.whole_number import checked_seconds, checked_whole

AGGREGATIONS = ("auto", "replicated", "sharded")
COMPRESSIONS = ("none", "bf16", "fp16", "int8", "int4")
_CHOICES = {
    "local_state": ("auto", "keep", "reset", "average"),
    "aggregation": AGGREGATIONS,
    "communication": COMMUNICATIONS,
    "collectives": COLLECTIVES,
    "compression": COMPRESSIONS,
}

# A sync period that no run reaches: the replicas stay independent, and nothing is averaged.
NEVER = 2**62

# Metadata of settings. "workers": the setting must be equal on all workers. "run": when a run is
# resumed, the setting must also be equal to that in the checkpoint.
_WORKERS = {"workers": True}
_RUN = {"workers": True, "run": True}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of a `PeriodicSyncStrategy`, which documents them; checked when it is made.

    Raises:
        TypeError: `rule` is not a rule object, or an average is not one.
        ValueError: a value is outside its range, or two values exclude each other.
    """

    rule: algorithms.Rule = dataclasses.field(metadata=_RUN)
    sync_period: int = dataclasses.field(metadata=_WORKERS)
    averages: Mapping[str, Average] = dataclasses.field(metadata=_RUN)
    local_state: str = dataclasses.field(metadata=_RUN)
    aggregation: str = dataclasses.field(metadata=_WORKERS)
    timeout_seconds: float
    communication: str = dataclasses.field(metadata=_WORKERS)
    collectives: str = dataclasses.field(metadata=_WORKERS)
    data_plan: Mapping[str, Json]
    overlap: bool | int = dataclasses.field(default=False, metadata=_RUN)
    fragments: int = dataclasses.field(default=1, metadata=_RUN)
    device_sync_period: int | None = dataclasses.field(default=None, metadata=_RUN)
    compression: str = dataclasses.field(default="none", metadata=_RUN)
    balance: bool | Sequence[Sequence[int]] = dataclasses.field(default=False, metadata=_WORKERS)
    nonfinite: str = dataclasses.field(default="raise", metadata=_WORKERS)
    nonfinite_share: float = dataclasses.field(default=0.01, metadata=_WORKERS)
    asked_rule: Rule | None = None  # the rule before `resolved` filled in its defaults
    replicas: int = 0  # the number of replicas that `resolved` was given
    # The next two settings are given only if the rule's hyper-parameters follow the number of
    # replicas. `following_rule` is the user's rule. `largest_rule` is the rule for the largest
    # possible number of replicas.
    following_rule: Rule | None = None
    largest_rule: Rule | None = None

    def __post_init__(self) -> None:
        """Checks each setting alone, then the settings that limit each other."""
        checked_rule(self.rule)
        object.__setattr__(self, "sync_period", checked_period(self.sync_period))
        checked_averages(self.averages)
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}.")
        checked_seconds("timeout_seconds", self.timeout_seconds)
        self._take_whole("fragments")
        self._check_moments()
        self._check_local_state()
        self._check_overlap()
        self._check_device_period()
        self._check_balance()
        checked_nonfinite(self.nonfinite, self.nonfinite_share)

    def resolved(self, num_replicas: int) -> Settings:
        """Returns these settings with the rule resolved for N replicas; tries out a user's own."""
        rule = self.rule.resolve(num_replicas)
        if _is_of_a_user(rule):
            algorithms.check_rule(checked_rule(rule), num_replicas)
        for average in filter(_is_of_a_user, self.averages.values()):
            algorithms.check_average(average)
        return dataclasses.replace(self, rule=rule, asked_rule=self.rule, replicas=num_replicas)

    def elastic(self) -> Settings:
        """Returns the settings for a run whose members change; ValueError: one needs fixed ones."""
        alone = "the part of the state that a worker holds alone is lost with it."
        partly = "what a lost worker has trained is in some fragments, and not in others."
        for name, refused, why in (
            ("aggregation", self.aggregation == "sharded", alone),
            ("fragments", self.fragments > 1, partly),
            ("collectives", self.collectives == "horovod", "Horovod's groups cannot change."),
            ("communication", self.communication == "NCCL", "a worker that joins is left out."),
            ("balance", not isinstance(self.balance, bool), "a record is of a fixed group."),
        ):
            if refused:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} and elastic= contradict each other: {why} "
                    f"Leave {name} out, or elastic."
                )
        return dataclasses.replace(self, collectives="tensorflow", aggregation="replicated")

    def fingerprint(self) -> dict[str, Json]:
        """Returns the values that have to be equal on all workers, by name."""
        names = [each.name for each in dataclasses.fields(self) if "workers" in each.metadata]
        compared = {name: str(getattr(self, name)) for name in names}
        return {**versions(), **compared, **self._data()}

    def of_syncs(self) -> dict[str, Json]:
        """Returns how syncs work, by name, without the settings that have their defaults."""
        names = ("overlap", "fragments", "device_sync_period", "compression")
        values = {name: getattr(self, name) for name in names}
        return {name: v for name, v in values.items() if v != getattr(Settings, name)}

    def of_a_run(self) -> dict[str, Json]:
        """Returns the values that have to be equal when a run is resumed, by name.

        Settings with their defaults are left out, since checkpoints of older versions lack them.
        """
        compared = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if "run" in each.metadata and value != each.default:
                compared[each.name] = value if isinstance(value, int | str) else str(value)
        return {**compared, "rule": repr(self.asked_rule), **self._data()}

    def _data(self) -> dict[str, Json]:
        return {f"data_plan.{key}": value for key, value in self.data_plan.items()}

    def _take_whole(self, name: str, of: str = "") -> int:
        """Stores a setting as a Python int; raises ValueError if it is not a whole number."""
        number = checked_whole(name, getattr(self, name), of=of)
        object.__setattr__(self, name, number)  # since the class is frozen
        return number

    def _check_moments(self) -> None:
        if not isinstance(self.rule, algorithms.BMUFAdam):
            return
        for name, refused, why in (
            ("local_state", self._writes_slots, "filters the optimizer's moments itself"),
            ("fragments", self.fragments > 1, "filters the moments of a whole block"),
            ("compression", self.compression != "none", "sends the moments as they are"),
        ):
            if refused:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: BMUFAdam {why}. Leave {name} out, or use "
                    "tfpara.BMUF."
                )

    @property
    def _writes_slots(self) -> bool:
        return self.local_state in ("reset", "average")

    def _check_local_state(self) -> None:
        if self._writes_slots and (self.overlap or self.fragments > 1):
            raise ValueError(
                f"local_state={self.local_state!r} is for syncs of the whole model at which "
                "training stops: where syncs overlap training, or are of fragments, the "
                "optimizer's slots belong to the steps under way. Leave local_state out."
            )

    def _check_overlap(self) -> None:
        overlap = self.overlap
        if overlap is False:
            return
        if getattr(self.rule, "restart_delayed", None) is None:
            raise ValueError(
                f"overlap={overlap!r}: {type(self.rule).__name__} has no delayed form, which says "
                "how replicas keep what they learn while a sync is under way. Leave overlap out, "
                "or use tfpara.BMUF or another rule."
            )
        if overlap is True:
            return
        if isinstance(overlap, bool) or not isinstance(overlap, numbers.Integral) or overlap < 1:
            raise ValueError(
                f"overlap={overlap!r} must be True, False, or a whole number of minibatches of at "
                "least 1, after which a sync is merged."
            )
        self._take_whole("overlap")
        if overlap > self.sync_period:
            raise ValueError(
                f"overlap={overlap} minibatches is longer than sync_period={self.sync_period}: a "
                "sync must be merged before the next one begins. Give overlap=True or a smaller "
                "number."
            )

    def _check_device_period(self) -> None:
        if self.device_sync_period is None:
            return
        period = self._take_whole("device_sync_period", of="minibatches")
        if self.sync_period % period:
            raise ValueError(
                f"device_sync_period={period} does not divide sync_period={self.sync_period}: "
                "workers sync where their devices have just been averaged. Give a period of which "
                "sync_period is a multiple."
            )

    def _check_balance(self) -> None:
        balance = self.balance
        if balance is False:
            return
        for name, refused, why in (
            ("rule", isinstance(self.rule, algorithms.BMUFAdam), "filters moments of equal blocks"),
            ("overlap", bool(self.overlap), "has a sync begin before workers have met"),
            ("fragments", self.fragments > 1, "gives each fragment a block of its own"),
            ("device_sync_period", self.device_sync_period, "must divide each worker's block"),
        ):
            if refused:
                raise ValueError(
                    f"balance= gives each worker a block by its speed, and {name}="
                    f"{getattr(self, name)!r} {why}. Leave {name} out, or balance."
                )
        if balance is True:
            return
        if isinstance(balance, str) or not isinstance(balance, Sequence) or not len(balance):
            raise ValueError(
                f"balance={balance!r} must be True, False, or the record of another run: a list "
                "with each block's list of minibatches of each worker (strategy.balance_record)."
            )
        for block, shares in enumerate(balance):
            if (
                not isinstance(shares, Sequence)
                or len(shares) != len(balance[0])
                or not all(isinstance(share, numbers.Integral) and share >= 1 for share in shares)
            ):
                raise ValueError(
                    f"balance=: block {block} of the record is {shares!r}, and must be a list of "
                    f"{len(balance[0])} whole numbers of 1 or more."
                )

    @property
    def has_momentum(self) -> bool:
        """Whether the rule has a momentum of its own for some number of replicas that may come."""
        return any(each.has_momentum() for each in (self.rule, self.largest_rule) if each)

    def for_optimizers(self, given: Sequence[keras.optimizers.Optimizer]) -> Settings:
        """Returns these settings for a model with these local optimizers.

        If all of these divide by the size of gradients, as Adam does, BMUF's default changes: the
        block momentum rises more slowly to its full value. That value is the one of "sqrt" if one
        of the optimizers keeps an average of gradients that is not fitted to the block.
        """
        rule = self.asked_rule
        if not (isinstance(rule, algorithms.BMUF) and given and all(map(is_normalised, given))):
            return self
        short = all(self.fits_momentum(one) or not memory_of(one) for one in given)
        asked = rule.for_normalised(short)
        if asked == rule:
            return self
        following = None if self.following_rule is None else asked
        return dataclasses.replace(
            self, rule=asked.resolve(self.replicas), following_rule=following
        )

    @property
    def slots_at_sync(self) -> str:
        """The effect of a sync on the optimizers' slots: "keep", "reset" or "average"."""
        return "keep" if self.local_state == "auto" else self.local_state

    def fits_momentum(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether an optimizer's momentum is fitted to the block: see `local_momentum`."""
        if self.local_state != "auto" or not self.has_momentum or not memory_can_change(optimizer):
            return False
        # A rule that filters Adam's moments needs them unfitted.
        of_adam = type(inner(optimizer)).update_step is keras.optimizers.Adam.update_step
        return not of_adam or not hasattr(self.rule, "check_optimizer")


def warn_of_outlasting_momentum(
    settings: Settings, optimizer: keras.optimizers.Optimizer, steps: float
) -> None:
    """Warns of a local momentum that outlasts a block, since the rule's momentum counts it again.

    `steps` is the number of the optimizer's steps in a block.
    """
    momentum = momentum_of(optimizer)
    memory = 1.0 / (1.0 - momentum)
    kept = settings.local_state != "reset" and not settings.fits_momentum(optimizer)
    if settings.has_momentum and kept and momentum and memory > steps:
        fix = "momentum 0" if settings.local_state == "auto" else 'local_state="auto"'
        warnings.warn(
            f"the local optimizer's momentum {momentum:g} remembers about {memory:.0f} steps, "
            f"longer than a block of {steps:g} (sync_period={settings.sync_period}); kept across "
            f"syncs under {type(settings.rule).__name__} it is counted twice, and training may "
            f"diverge. Use {fix}, or a longer sync_period.",
            stacklevel=2,
        )


def _is_of_a_user(given: object) -> bool:
    return type(given).__module__.partition(".")[0] != "tfpara"


def checked_rule(rule: object) -> Rule:
    """Returns the rule; raises TypeError, with what to write, if it is no rule object."""
    names = [f"tfpara.{kind.__name__}(...)" for kind in algorithms.RULES]
    names += ["tfpara.DiLoCo(...)", "tfpara.SlowMo(...)", "one of your own (tfpara.Rule)"]
    if isinstance(rule, algorithms.Rule):
        return rule
    hint = ""
    if isinstance(rule, type) and issubclass(rule, algorithms.Rule):
        arguments = "keras.optimizers.SGD(1.0)" if rule is algorithms.Outer else ""
        name = f"tfpara.{rule.__name__}" if rule in algorithms.RULES else rule.__name__
        hint = f" That is the class: write {name}({arguments}) with parentheses."
    elif issubclass(rule if isinstance(rule, type) else type(rule), algorithms.ASYNC_RULES):
        hint = " This one is asynchronous: give it to tfpara.AsyncStrategy."
    elif isinstance(rule, keras.optimizers.Optimizer):
        hint = " Write tfpara.Outer(...) around the optimizer."
    elif isinstance(rule, str):
        match = [k.__name__ for k in algorithms.RULES[:-1] if k.__name__.lower() == rule.lower()]
        hint = f" Write tfpara.{match[0]}(), not its name." if match else ""
    raise TypeError(f"rule={rule!r} is not a rule object, one of {', '.join(names)}.{hint}")
