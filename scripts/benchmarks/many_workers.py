"""The suite `cluster` of scripts.benchmarks: syncs of 2 to 16 workers, each with a link of its own.

A worker's step is a pause, as long as a GPU's step; its weights and its syncs are real. So a few
cores are enough for many workers, until the syncs themselves need all of the cores. `processor_ms`
tells how long a worker's sync keeps a core busy.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from scripts import common
from scripts.benchmarks import links
from scripts.benchmarks.beside_peers import TORCH
from scripts.benchmarks.processes import measure
from scripts.benchmarks.systems import TORCH_LOOPS, elements_of
from tfpara.planner import Costs, Link

# Time limit of a run. It is long, because sixteen processes on two cores take a minute to start.
_SECONDS = 900.0
_DEVICES = 2  # number of devices of each worker, in runs that sync on two levels
_DEVICE_SYNCS = 4  # number of syncs among a worker's devices for each sync of all workers


class Way(NamedTuple):
    """A way to sync.

    Attributes:
        strategy: arguments of tfpara's strategy.
        devices: number of devices (replicas) of each worker.
        peer: system of another library that syncs in place of tfpara, if not empty.
    """

    strategy: dict[str, Any]
    devices: int = 1
    peer: str = ""


WAYS: dict[str, Way] = {
    "replicated": Way({"aggregation": "replicated"}),
    "sharded": Way({"aggregation": "sharded"}),
    "overlap": Way({"overlap": True}),
    "bf16": Way({"compression": "bf16"}),
    "int8": Way({"compression": "int8"}),
    "int4": Way({"compression": "int4"}),
    "two levels": Way({}, devices=_DEVICES),
    "Horovod": Way({"collectives": "horovod"}),
    "PyTorch PeriodicModelAverager": Way({}, peer="averager"),
    "torchft LocalSGD": Way({}, peer="torchft_local"),
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
        ways: names in `WAYS`. Those of PyTorch are left out without --torch_python.
        workers: numbers of replicas N. A replica has a worker of its own, or shares one on two
            levels, where N is a multiple of the number of devices.
        speeds: Mbit/s of the link of each worker.
        delay_ms: delay of a link in each direction, where the kernel can delay packets.
        periods: sync periods τ, in minibatches.
        pause: length of a minibatch in seconds.
        sizes: `inputs`, `layers`, `width`, `classes` of the network.
        rounds: how often everything is measured; the ways take turns.

    Yields:
        All rows so far, after each link and number of workers. The slowest of these come last. If
        all rounds of a way failed, its row has the reason as `failed`.
    """
    rows: list[dict[str, Any]] = []
    for mbit in sorted(speeds, reverse=True):
        for count in sorted(workers):
            with links.limited(mbit, delay_ms, count) as place:
                link = Link.of_mbit(mbit, place.delay_ms)
                found: dict[tuple[str, int], list[dict[str, float]]] = {}
                failed: dict[tuple[str, int], str] = {}
                for _ in range(rounds):
                    for name, period in itertools.product(ways, periods):
                        if not _is_possible(WAYS[name], count, period):
                            continue
                        series = found.setdefault((name, period), [])
                        try:
                            series.append(
                                _measured(WAYS[name], period, pause, link, count, sizes, place)
                            )
                        except common.Failure as failure:
                            failed[name, period] = " ".join(str(failure).split())[-500:]
                for (name, period), series in found.items():
                    if series:
                        row = _row(name, count, period, pause, link, sizes, series)
                    else:
                        row = {"system": name, "workers": count, "sync_period": period}
                        row["failed"] = failed[name, period]
                    rows.append({"link": f"{mbit:g} Mbit/s", **row})
            yield rows


def _is_possible(way: Way, replicas: int, period: int) -> bool:
    """Returns whether a way can be measured with so many replicas and this sync period."""
    if way.peer and not TORCH.value:
        return False
    if way.devices == 1:
        return True
    return not replicas % way.devices and replicas > way.devices and not period % _DEVICE_SYNCS


def _measured(
    way: Way,
    period: int,
    pause: float,
    link: Link,
    replicas: int,
    sizes: dict[str, int],
    place: links.Namespaces,
) -> dict[str, float]:
    workers = replicas // way.devices
    options = _options(way, period, pause, link, workers, sizes)
    options["interface"] = place.interface
    program = {"module": TORCH_LOOPS, "python": TORCH.value} if way.peer else {}
    return measure(workers, options, place=place, seconds=_SECONDS, **program)


def _costs(
    strategy: dict[str, Any],
    pause: float,
    link: Link,
    sizes: dict[str, int],
    local_seconds: float = 0.0,
) -> Costs:
    costs = Costs(
        pause,
        4.0 * elements_of(sizes),
        link,
        local_seconds,
        overlap=bool(strategy.get("overlap")),
        scattered=strategy.get("aggregation") == "sharded",
    )
    return costs.compressed(strategy.get("compression", "none"))


def _options(
    way: Way,
    period: int,
    pause: float,
    link: Link,
    workers: int,
    sizes: dict[str, int],
) -> dict[str, Any]:
    # There are as many timed blocks as fit into about ten seconds, but at least 3 and at most 20.
    block = _costs(way.strategy, pause, link, sizes).sync_seconds(workers) + period * pause
    blocks = min(20, max(3, round(10 / block)))
    levels = {"device_sync_period": period // _DEVICE_SYNCS} if way.devices > 1 else {}
    return {
        "system": way.peer or "tfpara",
        "strategy": way.strategy | levels,
        "devices": way.devices,
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
    ring's transfers take: 2 (N − 1) / N · bytes / bandwidth, with the number N of links in use.
    `over_floor` is the time of a sync over that; a peer does not tell its syncs' time, so it is
    `adds_ms` there. `speedup` is the number of steps that all replicas together have done, over the
    number that one replica does in the same time without syncs. `predicted_speedup` is the
    planner's, with the processor time of a sync as local part.
    """
    way = WAYS[name]
    values = {key: statistics.median(one[key] for one in series) for key in series[0]}
    speedups = [one["samples_per_second"] * pause for one in series]
    speedup = statistics.median(speedups)
    costs = _costs(way.strategy, pause, link, sizes, values.get("processor_ms", 0.0) / 1e3)
    links_used = workers // way.devices
    floor = 1e3 * costs.link.reduce_seconds(costs.model_bytes, links_used)
    adds = 1e3 * period * pause * (workers / speedup - 1.0)
    row = {
        "system": name,
        "workers": workers,
        "sync_period": period,
        "adds_ms": adds,
        "floor_ms": floor,
        "over_floor": values.get("sync_ms", adds) / floor,
        "speedup": speedup,
        "speedup_range": [min(speedups), max(speedups)],
    }
    if way.peer:
        return row
    return row | {
        "sync_ms": values["sync_ms"],
        "wait_ms": values["wait_ms"],
        "processor_ms": values["processor_ms"],
        "predicted_speedup": way.devices * costs.speedup(links_used, period),
    }
