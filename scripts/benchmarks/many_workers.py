"""The suite `cluster` of scripts.benchmarks: syncs of 2 to 16 workers, each with a link of its own.

A worker's step is a pause, as long as a GPU's step; its weights and its syncs are real. So a few
cores are enough for many workers, until the syncs themselves need all of the cores. `processor_ms`
tells how long a worker's sync keeps a core busy.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from scripts.benchmarks import links
from scripts.benchmarks.processes import measure
from scripts.benchmarks.systems import elements_of
from tfpara.planner import BITS, Costs, Link

_SECONDS = 900.0  # longest time of a run; on two cores sixteen processes take a minute to start


_Way = dict[str, Any]  # a way to sync, as arguments of the strategy
WAYS: dict[str, _Way] = {
    "replicated": {"aggregation": "replicated"},
    "sharded": {"aggregation": "sharded"},
    "overlap": {"overlap": True},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "Horovod": {"collectives": "horovod"},
}


def measured(
    ways: list[str],
    workers: list[int],
    speeds: list[float],
    delay_ms: float,
    periods: list[int],
    pause: float,
    sizes: dict[str, int],
    rounds: int,
) -> Iterator[list[dict[str, Any]]]:
    """Measures ways to sync, for numbers of workers, speeds of links and sync periods.

    Args:
        ways: names in `WAYS`.
        workers: numbers of workers N.
        speeds: Mbit/s of the link of each worker.
        delay_ms: delay of a link in each direction, where the kernel can delay packets.
        periods: sync periods τ, in minibatches.
        pause: length of a minibatch in seconds.
        sizes: `inputs`, `layers`, `width`, `classes` of the network.
        rounds: how often everything is measured; the ways take turns.

    Yields:
        All rows so far, after each link and number of workers. The slowest of these come last.
    """
    rows: list[dict[str, Any]] = []
    for mbit in sorted(speeds, reverse=True):
        for count in sorted(workers):
            with links.limited(mbit, delay_ms, count) as place:
                link = Link.of_mbit(mbit, place.delay_ms)
                found: dict[tuple[str, int], list[dict[str, float]]] = {}
                for _ in range(rounds):
                    for name, period in itertools.product(ways, periods):
                        options = _options(WAYS[name], period, pause, link, count, sizes)
                        options["interface"] = place.interface
                        figures = measure(count, options, place=place, seconds=_SECONDS)
                        found.setdefault((name, period), []).append(figures)
                for (name, period), series in found.items():
                    row = _row(name, count, period, pause, link, sizes, series)
                    rows.append({"link": f"{mbit:g} Mbit/s", **row})
            yield rows


def _costs(
    strategy: dict[str, Any],
    pause: float,
    link: Link,
    sizes: dict[str, int],
    local_seconds: float = 0.0,
) -> Costs:
    nbytes = elements_of(sizes) * BITS[strategy.get("compression", "none")] / 8
    overlap = bool(strategy.get("overlap"))
    return Costs(pause, nbytes, link, local_seconds, overlap=overlap)


def _options(
    strategy: dict[str, Any],
    period: int,
    pause: float,
    link: Link,
    workers: int,
    sizes: dict[str, int],
) -> dict[str, Any]:
    # The timed blocks take some ten seconds together; there are at least three.
    block = _costs(strategy, pause, link, sizes).sync_seconds(workers) + period * pause
    blocks = min(20, max(3, round(10 / block)))
    return {
        "system": "tfpara",
        "strategy": strategy,
        "sync_period": period,
        "steps": blocks * period,
        "batch": 1,
        "warm_up": 1,
        "pause_seconds": pause,
        **sizes,
    }


def _row(
    name: str,
    workers: int,
    period: int,
    pause: float,
    link: Link,
    sizes: dict[str, int],
    series: list[dict[str, float]],
) -> dict[str, Any]:
    """Returns the medians over the rounds, with the extremes of the speed-up.

    `adds_ms` is the time that a sync adds to a block's pauses. `floor_ms` is the least that a
    ring's transfers take: 2 (N − 1) / N · bytes / bandwidth. `speedup` is the number of steps that
    all workers together have done, over the number that one worker does in the same time without
    syncs. `predicted_speedup` is the planner's, with the processor time of a sync as local part.
    """
    values = {key: statistics.median(one[key] for one in series) for key in series[0]}
    speedups = [one["samples_per_second"] * pause for one in series]
    speedup = statistics.median(speedups)
    costs = _costs(WAYS[name], pause, link, sizes, values["processor_ms"] / 1e3)
    floor = costs.link.reduce_seconds(costs.model_bytes, workers)
    adds = period * pause * (workers / speedup - 1.0)
    return {
        "system": name,
        "workers": workers,
        "sync_period": period,
        "adds_ms": 1e3 * adds,
        "floor_ms": 1e3 * floor,
        "over_floor": values["sync_ms"] / (1e3 * floor),
        "sync_ms": values["sync_ms"],
        "wait_ms": values["wait_ms"],
        "processor_ms": values["processor_ms"],
        "speedup": speedup,
        "speedup_range": [min(speedups), max(speedups)],
        "predicted_speedup": costs.speedup(workers, period),
    }
