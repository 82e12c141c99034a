"""Flags of training with parameter servers, and the strategy that they make.

Import this module before TensorFlow, and after `scripts.common`.
"""

from __future__ import annotations

import math
from typing import Any

from absl import flags

from scripts import common, model_flags
from tfpara import algorithms

RULES = ("asgd", "aasgd", "downpour", "bmuf_async", "easgd_async")

# The longest chunk if --chunk_minutes is not set, in minutes of speech. Section 4.2 of paper 002 in
# docs/papers.md has chunks of this length.
_LONGEST = 60.0
# If --chunk_minutes is not set, an epoch has at least this number of chunks for each worker, unless
# the data are too short. `AsyncStrategy.fit` makes as many chunks from arrays.
_FOR_A_WORKER = 4

_CHUNK = flags.DEFINE_float(
    "chunk_minutes",
    None,
    "parameter servers: speech that a worker gets at a time, positive; if not set four chunks for "
    "each worker, of at most 60 minutes and at least --sync_period minibatches",
)
_STALENESS = flags.DEFINE_integer(
    "max_staleness",
    None,
    "ASGD, Downpour and bmuf_async: pushes that may come between a pull and its push",
    lower_bound=0,
)
_COMPENSATION = flags.DEFINE_float(
    "delay_compensation", 0.0, "ASGD: lambda of DC-ASGD, 0 for none", lower_bound=0.0
)
_BY_STALENESS = flags.DEFINE_boolean(
    "rate_by_staleness",
    False,
    "ASGD and Downpour: divide the learning rate of a push by 1 + its staleness",
)
_RUNNING = flags.DEFINE_float(
    "running_rate", 0.01, "averaged ASGD: rate of the running average, in (0, 1]"
)
_START_MEAN = flags.DEFINE_integer(
    "start_mean_chunks",
    1,
    "averaged ASGD: chunks between two comparisons of the model with its running average on the "
    "validation set; the first time that this is better it becomes the mean",
    lower_bound=1,
)
_SEARCH = flags.DEFINE_boolean(
    "search_rate",
    False,
    "ASGD, Downpour and bmuf_async: before each chunk try learning rates on a part of it",
)
_FACTORS = flags.DEFINE_list(
    "search_factors", ["0.5", "1", "2"], "search_rate: candidates, as multiples of the present rate"
)
_PART = flags.DEFINE_float("search_part", 0.03, "search_rate: part of a chunk to try on, in (0, 1]")
_SPREAD = flags.DEFINE_float(
    "speed_spread",
    0.2,
    "simulated workers: standard deviation of the logarithm of a minibatch's time",
    lower_bound=0.0,
    upper_bound=10.0,
)
_SLOW = flags.DEFINE_float(
    "slow_worker", 1.0, "simulated workers: how many times slower than the others worker 0 is"
)

# Rules in which each block begins with the servers' model.
_PULLING = ("asgd", "aasgd", "downpour", "bmuf_async")
_BY_PUSH = ("asgd", "aasgd", "downpour")  # rules whose pushes can be scaled by their staleness
_OF_GRADIENTS = ("asgd", "aasgd")  # rules in which the servers run the optimizer


def check(name: str, simulated: int) -> None:
    """Refuses flags that do not go together, or values out of range.

    Args:
        name: the value of --rule.
        simulated: the value of --simulate_replicas.

    Raises:
        ValueError: the message has the flag, its value and the reason.
    """
    common.only_for(name in RULES, (_CHUNK,), f"--rule={', '.join(RULES)}")
    common.only_for(name in _PULLING, (_STALENESS, _SEARCH), f"--rule={', '.join(_PULLING)}")
    common.only_for(name in _BY_PUSH, (_BY_STALENESS,), f"--rule={', '.join(_BY_PUSH)}")
    common.only_for(name in _OF_GRADIENTS, (_COMPENSATION,), "--rule=asgd and aasgd")
    common.only_for(name == "aasgd", (_RUNNING, _START_MEAN), "--rule=aasgd")
    common.only_for(_SEARCH.value, (_FACTORS, _PART), "--search_rate")
    alone = name in RULES and simulated > 0
    common.only_for(alone, (_SPREAD, _SLOW), "simulated workers, --simulate_replicas")
    for flag in (_CHUNK, _SLOW):
        if flag.value is not None and not flag.value > 0:
            raise ValueError(f"--{flag.name}={flag.value} must be positive.")
    rate_search()


def strategy(
    name: str,
    elasticity: float | None,
    block_momentum: float | str | None,
    warmup: bool | None,
    block_learning_rate: float,
    simulated: int,
    options: dict[str, Any],
) -> Any:
    """Makes the strategy. In a worker or parameter server, this call never returns.

    Args:
        name: the value of --rule.
        elasticity: elasticity of asynchronous EASGD.
        block_momentum, warmup: arguments of asynchronous BMUF.
        block_learning_rate: ζ of Downpour and asynchronous BMUF.
        simulated: number of workers to simulate; 0 for the workers of TF_CONFIG.
        options: further arguments of `tfpara.AsyncStrategy`.
    """
    from tfpara.parameter_server.simulation import Speed, simulate_async
    from tfpara.parameter_server.strategy import AsyncStrategy

    rule = _rule(name, elasticity, block_momentum, warmup, block_learning_rate)
    if not simulated:
        return AsyncStrategy(rule, **options)
    slow, others = Speed(_SLOW.value, _SPREAD.value), Speed(1.0, _SPREAD.value)
    return simulate_async(simulated, rule, speeds=[slow, *[others] * (simulated - 1)], **options)


def local_steps(name: str) -> bool:
    """Returns whether workers have their own optimizers, which count minibatches, not pushes."""
    return name in ("downpour", "bmuf_async", "easgd_async")


def counts_pushes(name: str) -> bool:
    """Returns whether the servers have the optimizer, whose iterations are then pushes."""
    return name in _OF_GRADIENTS


def chunk_minutes(total: float, most: int, workers: int) -> float:
    """Returns the length of a chunk, in minutes of speech.

    Args:
        total: minutes of the training data.
        most: the largest number of chunks that the data can have.
        workers: number of workers.
    """
    if _CHUNK.value is not None:
        return _CHUNK.value
    count = min(max(math.ceil(total / _LONGEST), _FOR_A_WORKER * workers), most)
    # The length of a chunk is rounded up to four decimals. If it were rounded down, an epoch could
    # have one chunk more than `count`.
    return min(_LONGEST, (math.floor(1e4 * total / count) + 1) / 1e4)


def about_idle(count: int, workers: int, most: int) -> str | None:
    """Returns a sentence on workers that get no chunk; None if there are none.

    Args:
        count: number of chunks of an epoch.
        workers: number of workers.
        most: the largest number of chunks that the utterances can be divided into.
    """
    if count >= workers:
        return None
    fix = "Lower --chunk_minutes" if _CHUNK.value is not None else "Lower --sync_period"
    if most < workers:
        fix = "Lower --streams" if model_flags.recurrent() else "Train on more utterances"
    return (
        f"An epoch has {count} chunk{'s' * (count != 1)} for {workers} workers, so that "
        f"{workers - count} of them will be idle. {fix}, or start fewer workers."
    )


def rate_search() -> Any:
    """Returns the search for a chunk's learning rate; None without --search_rate."""
    from tfpara.parameter_server.search import ChunkRateSearch

    if not _SEARCH.value:
        return None
    try:
        factors = tuple(float(factor) for factor in _FACTORS.value)
    except ValueError:
        raise ValueError(
            f"--search_factors={','.join(_FACTORS.value)} must be numbers, such as 0.5,1,2."
        ) from None
    return ChunkRateSearch(factors, _PART.value)


def by_staleness() -> bool:
    """Returns the value of --rate_by_staleness."""
    return _BY_STALENESS.value


def own_averages(name: str) -> dict[str, Any]:
    """Returns the average that a rule itself keeps, by its name; `name` is the value of --rule."""
    if name != "aasgd":
        return {}
    return {"average": algorithms.AveragedASGD(running_rate=_RUNNING.value).average}


def start_mean_chunks() -> int:
    """Returns the value of --start_mean_chunks."""
    return _START_MEAN.value


def _rule(
    name: str,
    elasticity: float | None,
    block_momentum: float | str | None,
    warmup: bool | None,
    block_learning_rate: float,
) -> Any:
    if name == "easgd_async":
        return algorithms.AsyncEASGD(elasticity)
    if name == "bmuf_async":
        return algorithms.AsyncBMUF(
            block_momentum, block_learning_rate, warmup, max_staleness=_STALENESS.value
        )
    options: dict[str, Any] = {
        "max_staleness": _STALENESS.value,
        "rate_by_staleness": _BY_STALENESS.value,
    }
    if name == "downpour":
        return algorithms.Downpour(**options, block_learning_rate=block_learning_rate)
    options["delay_compensation"] = _COMPENSATION.value
    if name == "aasgd":
        return algorithms.AveragedASGD(**options, running_rate=_RUNNING.value)
    return algorithms.ASGD(**options)
