"""The findings of the suite `peers`, in a few sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.benchmarks.systems import HOROVOD_REDUCE, HOROVOD_SYNC, ONE_WORKER, REDUCE, SYNC

_SPEED = "samples_per_second"


def headlines(rows: Iterable[dict[str, Any]], syncs: bool = True) -> list[str]:
    """Returns sentences on scaling, `syncs` and limited links, as far as they were measured."""
    by_link: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_link.setdefault(row["link"], {})[row["system"]] = row
    loopback = by_link.get("loopback", {})
    said = [*_scaling(loopback), *(_syncs("", loopback) if syncs else [])]
    for link, found in by_link.items():
        if link != "loopback":
            said += _syncs(f" at {link}", found) if syncs else []
            said += _limited(link, found, loopback)
    return said


def _scaling(found: dict[str, dict[str, Any]]) -> list[str]:
    ours = _longest(found, {})
    if ours is None or "ratio_to_independent" not in ours:
        return []
    said = [
        f"Two workers of *{ours['system']}* are {ours['ratio_to_independent']:.2f} times as fast "
        f"as two independent processes of plain Keras, and {ours['scaling']:.2f} times as fast as "
        "one worker of tfpara."
    ]
    peers = [r for r in found.values() if r["family"] == "peer" and "scaling" in r]
    if peers:
        best = max(peers, key=lambda r: r["scaling"])
        said.append(
            f"Of the systems of other libraries, *{best['system']}* has the largest speed-up: two "
            f"workers are {best['scaling']:.2f} times as fast as one worker."
        )
    return said


def _syncs(where: str, found: dict[str, dict[str, Any]]) -> list[str]:
    said = []
    for sync, bare in ((HOROVOD_SYNC, HOROVOD_REDUCE), (SYNC, REDUCE)):
        times = [found.get(name, {}).get("sync_ms") for name in (sync, bare)]
        if all(times):
            said.append(
                f"The *{sync}* takes {times[0]:.0f} ms{where}. That is {times[0] / times[1]:.2f} "
                f"times as long as the *{bare}* of as many bytes ({times[1]:.0f} ms)."
            )
    return said


def _limited(
    link: str, found: dict[str, dict[str, Any]], loopback: dict[str, dict[str, Any]]
) -> list[str]:
    said = []
    per_step = [r for r in found.values() if r["per_step"] and _SPEED in r]
    for strategy in ({}, {"overlap": True}):
        ours, free = _longest(found, strategy), _longest(loopback, strategy)
        if ours is None:
            continue
        text = f"At {link}, two workers of *{ours['system']}* train on {ours[_SPEED]:.0f} samples/s"
        ratios = []
        if free is not None:
            ratios.append(f"{ours[_SPEED] / free[_SPEED]:.2f} times as fast as on loopback")
        if per_step:
            best = max(per_step, key=lambda r: r[_SPEED])
            ratios.append(
                f"{ours[_SPEED] / best[_SPEED]:.1f} times as fast as {best['system']} "
                f"({best[_SPEED]:.0f} samples/s), the fastest system that averages gradients at "
                "every step"
            )
        text += f": {', and '.join(ratios)}." if ratios else "."
        said.append(text)
    return said


def _longest(found: dict[str, dict[str, Any]], strategy: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the row of tfpara on two workers at its longest period with exactly these options."""
    rows = [
        row
        for row in found.values()
        if row["family"] == "tfpara"
        and row["system"] != ONE_WORKER
        and row.get("sync_period")
        and _SPEED in row
        and row.get("strategy", {}) == strategy
    ]
    return max(rows, key=lambda r: r["sync_period"], default=None)
