"""Flags of the local optimizer and of all schedules, and the objects that they make.

Import this module before TensorFlow, and after `scripts.common`.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from absl import flags

from scripts import async_flags, common, model_flags, rule_flags
from tfpara import callbacks, schedules
from tfpara.optimizers import NGSGD
from tfpara.whole_number import LARGEST_COUNT

_OPTIMIZERS = ("sgd", "ngsgd", "adam", "adamw", "adapt")
_MOMENTUM_DEFAULT = 0.9

_OPTIMIZER = flags.DEFINE_enum(
    "optimizer",
    "sgd",
    _OPTIMIZERS,
    "the local one, or that of the parameter servers; ngsgd: Kaldi's natural-gradient SGD; adapt: "
    "Adagrad with a memory of one gradient",
)
_RATE = flags.DEFINE_float(
    "learning_rate",
    None,
    "at the start, per minibatch; if not set 0.1, for Adam 0.001, for adapt 0.008",
    lower_bound=0,
)
_SCALE_RATE = flags.DEFINE_boolean(
    "scale_learning_rate",
    False,
    "BSP: multiply learning rates by the number of replicas, after --warm_start_epochs",
)
_MOMENTUM = flags.DEFINE_float(
    "momentum", _MOMENTUM_DEFAULT, "local momentum of sgd and ngsgd, in [0, 1)", 0.0, 1.0
)
_DECAY = flags.DEFINE_float("weight_decay", None, "of adamw, per step; 0.004 if not set", 0.0)
_CLIP = flags.DEFINE_float(
    "clip_norm", None, "norm of a minibatch's gradient beyond which it is scaled down, positive"
)

_SCHEDULE = flags.DEFINE_enum(
    "schedule",
    None,
    ["constant", "exponential", "newbob", "hand"],
    "of the learning rate: exponential decay over --epochs, halved by held-out scores, or "
    "multiplied by --decay_per_minibatch; constant if not set, exponential with "
    "--final_learning_rate",
)
_HAND = flags.DEFINE_float(
    "decay_per_minibatch", 0.999, "hand: factor after each minibatch, in (0, 1]"
)
_FINAL_RATE = flags.DEFINE_float(
    "final_learning_rate",
    None,
    "exponential: of the last epoch; 0.01 of the first if not set",
    lower_bound=0,
)
_NEWBOB_BY = flags.DEFINE_enum(
    "newbob_by",
    "cross_entropy",
    ["cross_entropy", "accuracy"],
    "newbob: the held-out score. Halves from a fall of less than 1 % on and stops below 0.1 % "
    "(cross_entropy), or from a rise of less than 0.5 % of the frames and below 0.1 % (accuracy)",
)
_NEWBOB_REJECT = flags.DEFINE_boolean(
    "newbob_reject_worse",
    False,
    "newbob: give up an epoch after which the score is not better, as Kaldi does: training goes on "
    "from where the epoch began",
)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "passes over the training data", lower_bound=1)
_PERIOD = flags.DEFINE_string(
    "sync_period",
    "20",
    "minibatches of each replica between two syncs; or by epoch, such as 1,2:20,4:80: 20 from the "
    "third epoch on",
)
_MINIBATCH = flags.DEFINE_string(
    "minibatch",
    "256",
    "frames of a minibatch of one replica; or by position in epochs, such as 64,0.25:256,2.25:1024",
)
_WARM = flags.DEFINE_integer(
    "warm_start_epochs", 0, "epochs of one replica alone, at the start", lower_bound=0
)
_GUARD = flags.DEFINE_float(
    "overfitting_guard",
    None,
    "stop when the gap between validation and training error, as shares of the frames, is so much "
    "above its smallest (0.05 is usual)",
)

_ADAM = ("adam", "adamw")


def check() -> None:
    """Refuses wrong values and combinations of flags, before anything starts.

    Raises:
        ValueError: the message has the flag, its value and the reason.
    """
    name, schedule = _OPTIMIZER.value, _schedule()
    common.only_for(name in ("sgd", "ngsgd"), (_MOMENTUM,), "--optimizer=sgd and ngsgd")
    _check_async(name, schedule)
    if not 0.0 < _HAND.value <= 1.0:
        raise ValueError(f"--decay_per_minibatch={_HAND.value} is outside (0, 1].")
    common.only_for(name == "adamw", (_DECAY,), "--optimizer=adamw")
    common.only_for(schedule == "exponential", (_FINAL_RATE,), "--schedule=exponential")
    of_newbob = (_NEWBOB_BY, _NEWBOB_REJECT)
    common.only_for(schedule == "newbob", of_newbob, "--schedule=newbob")
    common.only_for(schedule == "hand", (_HAND,), "--schedule=hand")
    common.only_for(rule_flags.rule_name() == "bsp", (_SCALE_RATE,), "--rule=bsp")
    if _SCALE_RATE.value and _WARM.value and schedule in ("newbob", "hand"):
        raise ValueError(
            f"--scale_learning_rate, --warm_start_epochs={_WARM.value}, --schedule={schedule}: the "
            "rate would have to rise after the epochs of one replica, and this schedule never "
            "raises it. Train these epochs by --rule=none, and give the weights by --init."
        )
    recurrent = model_flags.recurrent()
    common.only_for(not recurrent, (_MINIBATCH,), "--model=dnn; streams have --streams")
    if rule_flags.rule_name() == "bmuf_adam" and name not in _ADAM:
        raise ValueError(
            f"--rule=bmuf_adam filters Adam's moments, and --optimizer={name} has none. Give "
            "--optimizer=adam or adamw, or --rule=bmuf."
        )
    if not 0.0 < _first_rate() < math.inf:
        raise ValueError(f"--learning_rate={_RATE.value} must be a positive number.")
    if not 0.0 <= _MOMENTUM.value < 1.0:
        raise ValueError(f"--momentum={_MOMENTUM.value} is outside [0, 1).")
    if _CLIP.value is not None and not _CLIP.value > 0:
        raise ValueError(f"--clip_norm={_CLIP.value} must be positive. Leave it out for no limit.")
    if schedule == "exponential" and not 0.0 < _last_rate() < math.inf:
        raise ValueError(f"--final_learning_rate={_last_rate()} must be a positive number.")
    if _GUARD.value is not None and not 0.0 < _GUARD.value < math.inf:
        raise ValueError(f"--overfitting_guard={_GUARD.value} must be a positive number.")
    sync_periods()
    minibatches()


def _check_async(name: str, schedule: str) -> None:
    """Refuses flags that do not work with parameter servers."""
    if name == "adapt" and len(minibatches()) > 1:
        raise ValueError("--optimizer=adapt needs one --minibatch: it works on sums of gradients.")
    if not rule_flags.is_async():
        return
    common.only_for(False, (_WARM,), "synchronous rules such as --rule=bmuf")
    if name == "ngsgd":
        raise ValueError(
            "--optimizer=ngsgd reads each minibatch's activations, which parameter servers do not "
            "see. Give --optimizer=sgd, or a synchronous rule."
        )
    if len(sync_periods()) > 1:
        raise ValueError(
            f"--sync_period={_PERIOD.value}: with parameter servers the period is one number."
        )
    by_pushes = async_flags.counts_pushes(rule_flags.rule_name())
    if async_flags.by_staleness() and by_pushes and schedule == "hand":
        raise ValueError(
            "--rate_by_staleness divides a rate that --schedule=hand computes from the pushes. "
            "Leave out one of them."
        )
    if async_flags.rate_search() is not None and schedule != "constant":
        raise ValueError(
            f"--search_rate chooses the learning rate, and so does --schedule={schedule}. Leave "
            "out one of them."
        )


def epochs() -> int:
    """Returns the value of --epochs."""
    return _EPOCHS.value


def epochs_matter() -> bool:
    """Returns whether the number of epochs has an effect on a run from its start on."""
    return _schedule() == "exponential"


def sync_periods() -> dict[int, int]:
    """Returns the sync periods, each by the epoch from which it holds."""
    return {int(k): v for k, v in _by_position(_PERIOD, whole=True).items()}


def minibatches() -> dict[float, int]:
    """Returns the frames of a minibatch, each by the position, in epochs, from which it holds."""
    return _by_position(_MINIBATCH, whole=False)


def warm_start() -> callbacks.WarmStart:
    """Returns the callback for --warm_start_epochs, also if that is 0."""
    return callbacks.WarmStart(_WARM.value)


def optimizer(
    model: keras.Model, num_replicas: int, minibatch: int | None = None
) -> keras.optimizers.Optimizer:
    """Returns the local optimizer, for a built model; call it in the strategy's scope.

    Args:
        model: the built model.
        num_replicas: number of replicas of all workers.
        minibatch: frames of which a replica's loss is the mean; None for the first --minibatch.
    """
    rate: Any = _scaled(_first_rate(), num_replicas)
    if _schedule() == "hand":
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 1, _HAND.value ** _step())
    clip: dict[str, Any] = {"global_clipnorm": _CLIP.value}
    if _OPTIMIZER.value == "ngsgd":
        return NGSGD(rate, _MOMENTUM.value, **clip).attach(model)
    if _OPTIMIZER.value == "adapt":
        scale = minibatch or next(iter(minibatches().values()))
        return schedules.Adapt(rate, gradient_scale=scale, **clip)
    if _OPTIMIZER.value == "adam":
        return keras.optimizers.Adam(rate, **clip)
    if _OPTIMIZER.value == "adamw":
        decay = {} if _DECAY.value is None else {"weight_decay": _DECAY.value}
        return keras.optimizers.AdamW(rate, **decay, **clip)
    return keras.optimizers.SGD(rate, momentum=_MOMENTUM.value, **clip)


def before_scores(num_replicas: int, warm: callbacks.WarmStart) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that come before those that score the model."""
    chosen: list[keras.callbacks.Callback] = []
    if len(sync_periods()) > 1:
        chosen.append(callbacks.SyncPeriod(sync_periods()))
    if _WARM.value:
        chosen.append(warm)
    if _schedule() == "hand":
        chosen.append(_HandsRate(_scaled(_first_rate(), num_replicas)))
    if _schedule() in ("newbob", "hand") or async_flags.rate_search() is not None:
        return chosen
    last = _last_rate() if _schedule() == "exponential" else _first_rate()
    decay = schedules.Exponential(_first_rate(), _EPOCHS.value, last)

    def rate(position: float) -> float:
        # In the epochs of --warm_start_epochs all replicas train on the same data, as a single
        # replica would. So the rate of these epochs is not scaled.
        return decay(position) if position < _WARM.value else _scaled(decay(position), num_replicas)

    return [*chosen, callbacks.LearningRate(rate)]


def of_scores() -> list[str]:
    """Returns those of the given flags that need held-out scores, such as "--schedule=newbob"."""
    guard = [] if _GUARD.value is None else [f"--{_GUARD.name}={_GUARD.value}"]
    return (["--schedule=newbob"] if _schedule() == "newbob" else []) + guard


def after_scores(entropy: str, validation: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that come after those that score the model.

    Args:
        entropy: name of the cross-entropy in the model's logs, "loss" or a metric's name.
        validation: held-out data, for the score of the initial model.
    """
    chosen: list[keras.callbacks.Callback] = []
    if _schedule() == "newbob":
        reject = _NEWBOB_REJECT.value
        if _NEWBOB_BY.value == "accuracy":
            metric, rule = "frame_accuracy", schedules.NewbobRule.accuracy(reject)
        else:
            metric, rule = entropy, schedules.NewbobRule.cross_entropy(reject)
        scored = f"validation_{metric}"
        chosen.append(callbacks.Newbob(scored, metric, rule=rule, initial=validation))
    if _GUARD.value is not None:
        chosen.append(
            callbacks.OverfittingGuard(
                "frame_accuracy",
                "validation_frame_accuracy",
                schedules.OverfittingRule(_GUARD.value),
            )
        )
    return chosen


class _HandsRate(keras.callbacks.Callback):
    """Logs the learning rate of --schedule=hand at the end of each epoch.

    It logs none if workers have their own optimizers, whose counts differ.

    Args:
        first: the rate at the start.
    """

    def __init__(self, first: float) -> None:
        super().__init__()
        self._first = first

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or async_flags.local_steps(rule_flags.rule_name()):
            return
        if async_flags.counts_pushes(rule_flags.rule_name()):
            steps = self.model.distribute_strategy.statistics(self.model).pushes
        else:
            steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        logs["learning_rate"] = self._first * _HAND.value ** (_step() * steps)


def _step() -> int:
    """Returns the number of minibatches in an iteration of the optimizer.

    An iteration of the servers' optimizer is a push, of a sync period's minibatches. An iteration
    of a worker's or replica's optimizer is one minibatch.
    """
    by_pushes = async_flags.counts_pushes(rule_flags.rule_name())
    return next(iter(sync_periods().values())) if by_pushes else 1


def _schedule() -> str:
    if _SCHEDULE.value is None:
        return "constant" if _FINAL_RATE.value is None else "exponential"
    return _SCHEDULE.value


def _first_rate() -> float:
    if _RATE.value is not None:
        return _RATE.value
    return {"adam": 0.001, "adamw": 0.001, "adapt": 0.008}.get(_OPTIMIZER.value, 0.1)


def _last_rate() -> float:
    return 0.01 * _first_rate() if _FINAL_RATE.value is None else _FINAL_RATE.value


def _scaled(rate: float, num_replicas: int) -> float:
    return schedules.linear_scaling(rate, num_replicas) if _SCALE_RATE.value else rate


def _by_position(flag: flags.FlagHolder, whole: bool) -> dict[float, int]:
    """Parses `VALUE[,POSITION:VALUE...]`: returns {0: VALUE, POSITION: VALUE, ...}, ascending."""
    values: dict[float, int] = {}
    last = -math.inf
    try:
        for number, item in enumerate(flag.value.split(",")):
            position, _, value = item.rpartition(":") if number else ("0", ":", item)
            key = int(position) if whole else float(position)
            if not last < key < math.inf or not 1 <= int(value) <= LARGEST_COUNT:
                raise ValueError
            last = key
            values[key] = int(value)
    except ValueError:
        unit = "whole epochs" if whole else "epochs"
        raise ValueError(
            f"--{flag.name}={flag.value} must be a whole number of at least 1, or one with others "
            f"from later positions on, ascending in {unit}, such as 64,2:256."
        ) from None
    return values
