"""Runs whose workers are killed, for the suite `faults`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts import common
from tfpara.chaos import report
from tfpara.chaos.drill import Drill, Plan

_WORKER = "scripts.benchmarks.goodput_worker"


class Way(NamedTuple):
    """A way to go on after a fault.

    Attributes:
        launcher: flags of the launcher.
        options: options of the workers.
        kills: whether workers are killed.
    """

    launcher: tuple[str, ...]
    options: dict[str, Any]
    kills: bool = True


_ELASTIC = {"elastic": True}
QUIET = "no faults"
WAYS = {
    QUIET: Way(("--elastic",), _ELASTIC, kills=False),
    "elastic": Way(("--elastic",), _ELASTIC),
    "elastic, one spare": Way(("--elastic", "--spares=1"), _ELASTIC),
    "all start again": Way(("--max_restarts=1000",), {"elastic": False}),
}


def measured(
    ways: Sequence[str],
    workers: int,
    epochs: int,
    kill_every: float,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Trains in each way, while one of the workers that train is killed again and again.

    Progress is counted in whole epochs, from the end of the first one on. `goodput` is the time of
    an epoch without faults over that with faults.

    Args:
        ways: keys of `WAYS`, in their order.
        workers: number of workers that train.
        epochs: number of epochs of each run.
        kill_every: mean seconds between two kills (SIGKILL).
        options: `step_seconds`, `epoch_steps`, `width`, `sync_period` of the workers.

    Returns:
        One row for each way.

    Raises:
        Failure: a run failed.
    """
    rows: list[dict[str, Any]] = []
    for name in ways:
        row = {"system": name, "workers": workers}
        row |= _run(WAYS[name], workers, epochs, kill_every, options)
        quiet = next((each for each in rows if each["system"] == QUIET), None)
        if quiet or name == QUIET:
            row["goodput"] = (quiet or row)["epoch_seconds"] / row["epoch_seconds"]
        rows.append(row)
        print(f"{name}: {row}", flush=True)
    return rows


def _run(
    way: Way, workers: int, epochs: int, kill_every: float, options: dict[str, Any]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfpara-goodput-") as folder:
        told = {**options, **way.options, "workers": workers, "epochs": epochs, "out": folder}
        command = ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "tfpara.launch"]
        command += ["-n", str(workers), "--threads", "1", *way.launcher]
        command += ["--", "python", "-m", _WORKER, json.dumps(told)]
        kinds = ["kill"] if way.kills else []
        run = Drill(command, Plan(kinds, kill_every, starts=1)).run()
    if run.code:
        raise common.Failure(f"{' '.join(command)} ended with {run.code}.")
    return {
        "epoch_seconds": 1.0 / (report.rate(run.steps) or float("nan")),
        "kills": len(run.faults),
        "loss": run.told.get("loss"),
        **_growth(run),
    }


def _growth(run: report.Run) -> dict[str, Any]:
    """Returns by how much the longest-lived worker grows from a third of its life to its end."""
    lives = [life for life in report.growth(run.samples) if life["name"] != "launcher"]
    if not lives:
        return {}
    longest = max(lives, key=lambda life: life["seconds"])
    more = {name: longest["end"][name] - longest["third"][name] for name in longest["end"]}
    return {"seconds": longest["seconds"]} | {f"more_{name}": more[name] for name in more}
