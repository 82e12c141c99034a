"""Predictions of the cost model (tfpara.planner) beside the measurements of the suite `peers`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from scripts.benchmarks.systems import INDEPENDENT, ONE_WORKER, PLAIN, REDUCE
from tfpara.planner import Costs, Link, calibrated_link


def costs_of(
    rows: Iterable[dict[str, Any]], batch: int, model_bytes: float, loopback: str
) -> Costs | None:
    """Returns the costs of steps and syncs, from the rows on loopback.

    Returns None if a system that is needed for this was not measured.
    """
    found = {row["system"]: row for row in rows if row["link"] == loopback}
    speeds = [
        found.get(name, {}).get("samples_per_second") for name in (ONE_WORKER, PLAIN, INDEPENDENT)
    ]
    reduce_ms = found.get(REDUCE, {}).get("sync_ms")
    syncs = [
        row["sync_ms"]
        for row in found.values()
        if row["family"] == "tfpara"
        and row["workers"] == 2
        and _is_plain(row)
        and "sync_ms" in row
        and "samples_per_second" in row
    ]
    if not all(speeds) or not reduce_ms or not syncs:
        return None
    one, alone, together = speeds
    return Costs(
        step_seconds=batch / one,
        model_bytes=model_bytes,
        link=calibrated_link(reduce_ms / 1e3, model_bytes, 2),
        local_seconds=max(0.0, statistics.median(syncs) - reduce_ms) / 1e3,
        slowdown=max(1.0, 2 * alone / together),
    )


def predictions(
    rows: Iterable[dict[str, Any]], costs: Costs, batch: int, links: dict[str, Link]
) -> list[dict[str, Any]]:
    """Returns predicted and measured samples/s for each training of tfpara on two workers.

    Args:
        rows: rows of the suite.
        costs: result of `costs_of`.
        batch: samples of a minibatch.
        links: the limited links, by their name in the rows; others are as in `costs`.
    """
    predicted = []
    for row in rows:
        strategy = row.get("strategy", {})
        ours = row["family"] == "tfpara" and row["workers"] == 2 and row.get("sync_period")
        if not ours or "samples_per_second" not in row or "collectives" in strategy:
            continue
        here = dataclasses.replace(
            costs.compressed(strategy.get("compression", "none")),
            link=links.get(row["link"], costs.link),
            overlap=bool(strategy.get("overlap")),
        )
        speed = here.speedup(2, row["sync_period"]) * batch / costs.step_seconds
        predicted.append(
            {
                "link": row["link"],
                "system": row["system"],
                "predicted_samples_per_second": speed,
                "samples_per_second": row["samples_per_second"],
                "measured_over_predicted": row["samples_per_second"] / speed,
            }
        )
    return predicted


def _is_plain(row: dict[str, Any]) -> bool:
    return not row.get("strategy")
