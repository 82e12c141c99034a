"""Flags of the rule and of syncs, and the strategy that they make.

Import this module before TensorFlow, and after `scripts.common`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import flags

from scripts import async_flags, common
from tfpara import algorithms, cluster
from tfpara.collectives.choice import COLLECTIVES
from tfpara.sync.settings import AGGREGATIONS, COMPRESSIONS
from tfpara.sync.simulation import simulate
from tfpara.sync.strategy import PeriodicSyncStrategy

RULES = ("bsp", "bmuf", "bmuf_adam", "easgd", "diloco", "slowmo", *async_flags.RULES, "none")

_RULE = flags.DEFINE_enum(
    "rule",
    "bmuf",
    RULES,
    "how replicas agree; asgd, aasgd (averaged), downpour (local steps), bmuf_async and "
    "easgd_async: asynchronous, with parameter servers (tfpara-launch --ps 1); none: one replica, "
    "which is plain Keras bit for bit",
)
_ETA = flags.DEFINE_string(
    "block_momentum",
    None,
    "BMUF: in [0, 1); linear: 1 - 1/replicas; sqrt: 1 - 1/√replicas; if not set linear, but sqrt "
    "over Adam with another --local_state than auto; at most 0.9 with the warm-up",
)
_WARMUP = flags.DEFINE_boolean(
    "block_momentum_warmup",
    None,
    "BMUF: reach the block momentum over the first syncs, 1 - 1/(t + 1) after t of them (t/5 "
    "over Adam, t/20 with sqrt); set if --block_momentum is no number and --compat is not set",
)
_ZETA = flags.DEFINE_float(
    "block_learning_rate",
    1.0,
    "BMUF, bmuf_async and Downpour: positive; 1/workers for Downpour's long periods",
)
_NESTEROV = flags.DEFINE_boolean("nesterov", True, "BMUF: Nesterov block momentum, or classical")
_COMPAT = flags.DEFINE_enum("compat", None, ["cntk", "fairseq"], "BMUF: the form of that toolkit")
_ALPHA = flags.DEFINE_float(
    "elasticity",
    None,
    "EASGD: in [0, 2/(replicas + 1)), or in [0, 1] for easgd_async; 0.9/replicas if not set",
)
_OUTER_RATE = flags.DEFINE_float(
    "outer_learning_rate", None, "DiLoCo and SlowMo: positive; 0.7 for DiLoCo, 1 for SlowMo"
)
_OUTER_MOMENTUM = flags.DEFINE_float(
    "outer_momentum", None, "DiLoCo and SlowMo: in [0, 1); 0.9 for DiLoCo, 0.7 for SlowMo"
)
_LOCAL_STATE = flags.DEFINE_enum(
    "local_state",
    "auto",
    ["auto", "keep", "reset", "average"],
    "the local momentum at a sync; auto: kept, and that of SGD and Adam fitted to the block where "
    "the rule has a momentum of its own",
)
_AGGREGATION = flags.DEFINE_enum(
    "aggregation",
    "auto",
    list(AGGREGATIONS),
    "who keeps the global model and averages: every worker all of them (replicated), or every "
    "replica its part (sharded); auto: sharded with --compression, and for models of 16 MiB and "
    "more; without NCCL, three and more workers, and two with Horovod over Gloo, shard only models "
    "of 1 GiB and more",
)
_COLLECTIVES = flags.DEFINE_enum(
    "collectives",
    "auto",
    list(COLLECTIVES),
    "what connects the workers; auto: Horovod where horovodrun, mpirun or tfpara-launch "
    "--collectives=horovod has started them, else TensorFlow",
)
_EMA = flags.DEFINE_list(
    "ema_decay", [], "decays, in (0, 1), of moving averages over the syncs' global models"
)
_COUNTED = flags.DEFINE_boolean(
    "ema_num_updates",
    True,
    "moving averages follow the model faster while they are young: decays are at most "
    "(1 + t)/(10 + t) after t syncs",
)
_MA = flags.DEFINE_boolean("ma", False, "keep the equal-weight average of the global models too")
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 60.0, "longest wait in a sync for another worker", lower_bound=1.0
)
_STARTUP = flags.DEFINE_float(
    "startup_timeout_seconds", 300.0, "longest wait for all workers to start", lower_bound=1.0
)
_SIMULATE = flags.DEFINE_integer(
    "simulate_replicas",
    0,
    "replicas, or workers of an asynchronous rule, to simulate in this process; 0: none",
    lower_bound=0,
    upper_bound=10000,
)

_OVERLAP = flags.DEFINE_boolean(
    "overlap", False, "a sync runs while the next block trains, and is merged where that block ends"
)
_COMPRESSION = flags.DEFINE_enum(
    "compression", "none", list(COMPRESSIONS), "how weights travel between workers"
)
_DEVICE_PERIOD = flags.DEFINE_integer(
    "device_sync_period",
    None,
    "minibatches between two averages of a worker's devices, a divisor of the sync period",
    lower_bound=1,
)
_NONFINITE = flags.DEFINE_enum(
    "nonfinite",
    "raise",
    ["raise", "skip"],
    "a minibatch whose loss or gradient has NaN or Inf ends the run, or is left out and counted",
)
_NONFINITE_SHARE = flags.DEFINE_float(
    "nonfinite_share",
    0.01,
    "share of an epoch's minibatches that --nonfinite=skip may leave out",
    lower_bound=0.0,
    upper_bound=1.0,
)
_FRAGMENTS = flags.DEFINE_integer(
    "fragments", 1, "parts of the model that take turns at the sync points", lower_bound=1
)

_SYNCS = (_OVERLAP, _COMPRESSION, _DEVICE_PERIOD, _FRAGMENTS)
_BMUF = ("bmuf", "bmuf_adam")
_OUTER = ("diloco", "slowmo")


def rule_name() -> str:
    """Returns the value of --rule."""
    return _RULE.value


def is_async() -> bool:
    """Returns whether the rule needs parameter servers."""
    return _RULE.value in async_flags.RULES


def simulated() -> int:
    """Returns the value of --simulate_replicas."""
    return _SIMULATE.value


def strategy(sync_period: int, data_plan: dict[str, Any]) -> Any:
    """Sets TensorFlow up as the flags say, and makes the strategy.

    Args:
        sync_period: minibatches of each replica between two syncs at the start of the training.
        data_plan: settings of the data that must be the same on all workers.

    Raises:
        ValueError: flags do not go together, or a value is out of range.
    """
    _check()
    rule, kept = _rule(), averages()
    devices = common.setup_tensorflow()
    shared: dict[str, Any] = {
        "sync_period": sync_period,
        "averages": kept,
        "timeout_seconds": _TIMEOUT.value,
        "startup_timeout_seconds": _STARTUP.value,
        "nonfinite": _NONFINITE.value,
        "nonfinite_share": _NONFINITE_SHARE.value,
    }
    if is_async():
        return async_flags.strategy(
            _RULE.value,
            _ALPHA.value,
            _block_momentum(),
            _WARMUP.value,
            _ZETA.value,
            _SIMULATE.value,
            shared,
        )
    options: dict[str, Any] = {
        **shared,
        "local_state": _LOCAL_STATE.value,
        "aggregation": _AGGREGATION.value,
        "collectives": _COLLECTIVES.value,
        "overlap": _OVERLAP.value,
        "compression": _COMPRESSION.value,
        "device_sync_period": _DEVICE_PERIOD.value,
        "fragments": _FRAGMENTS.value,
        "data_plan": data_plan,
    }
    if _SIMULATE.value:
        if devices is not None:
            raise ValueError("--simulate_replicas and --devices_per_worker: give one of them.")
        return simulate(_SIMULATE.value, rule, **options)
    if _RULE.value == "none" and len(tf.config.list_physical_devices("GPU")) > 1:
        devices = devices or ["GPU:0"]
    made = PeriodicSyncStrategy(rule, devices=devices, **options)
    if _RULE.value == "none" and made.num_replicas > 1:
        raise ValueError(_ALONE)
    return made


_ALONE = (
    "--rule=none trains one replica. Start it without the launcher, --devices_per_worker and "
    "--simulate_replicas, or choose a rule such as --rule=bmuf."
)


def _check() -> None:
    name = _RULE.value
    common.only_for(name in _BMUF, (_NESTEROV,), "--rule=bmuf and bmuf_adam")
    filtered = (*_BMUF, "bmuf_async")
    common.only_for(name in filtered, (_ETA, _WARMUP), f"--rule={', '.join(filtered)}")
    blocks = (*filtered, "downpour")
    common.only_for(name in blocks, (_ZETA,), f"--rule={', '.join(blocks)}")
    common.only_for(name == "bmuf", (_COMPAT,), "--rule=bmuf")
    common.only_for(name.startswith("easgd"), (_ALPHA,), "--rule=easgd and easgd_async")
    common.only_for(bool(_EMA.value), (_COUNTED,), "--ema_decay")
    common.only_for(name in _OUTER, (_OUTER_RATE, _OUTER_MOMENTUM), "--rule=diloco and slowmo")
    in_step = name != "none" and not is_async()
    common.only_for(in_step, (_LOCAL_STATE, *_SYNCS), "synchronous rules such as --rule=bmuf")
    synchronous = (_AGGREGATION, _COLLECTIVES)
    common.only_for(not is_async(), synchronous, "synchronous rules such as --rule=bmuf")
    async_flags.check(name, _SIMULATE.value)
    if name == "none" and (cluster.read().num_workers > 1 or _SIMULATE.value > 1):
        raise ValueError(_ALONE)


def _block_momentum() -> float | str | None:
    """Returns the value of --block_momentum: a number, or a name that BMUF checks."""
    given = _ETA.value
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


def _rule() -> Any:
    name = _RULE.value
    if name in _BMUF:
        kind = algorithms.BMUF if name == "bmuf" else algorithms.BMUFAdam
        return kind(
            _block_momentum(),
            _ZETA.value,
            nesterov=_NESTEROV.value,
            compat=_COMPAT.value,
            warmup=_WARMUP.value,
        )
    if name == "easgd":
        return algorithms.EASGD(_ALPHA.value)
    if name == "diloco":
        return algorithms.DiLoCo(**_given(learning_rate=_OUTER_RATE, momentum=_OUTER_MOMENTUM))
    if name == "slowmo":
        names = {"slow_learning_rate": _OUTER_RATE, "slow_momentum": _OUTER_MOMENTUM}
        return algorithms.SlowMo(**_given(**names))
    return algorithms.BSP()


def _given(**chosen: flags.FlagHolder) -> dict[str, Any]:
    return {name: flag.value for name, flag in chosen.items() if flag.value is not None}


def all_averages() -> dict[str, Any]:
    """Returns all averages of the run by name, also that of averaged ASGD."""
    return {**averages(), **async_flags.own_averages(_RULE.value)}


def averages() -> dict[str, Any]:
    """Returns the averages of the global model by name, as the flags choose them."""
    try:
        found: dict[str, Any] = {
            f"ema-{decay}": algorithms.EMA(float(decay), _COUNTED.value) for decay in _EMA.value
        }
    except ValueError as error:
        raise ValueError(f"--ema_decay={','.join(_EMA.value)}: {error}") from error
    return {**found, "ma": algorithms.MA()} if _MA.value else found
