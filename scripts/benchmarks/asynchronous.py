"""Pushes per second to a parameter server: tfpara beside TensorFlow's stock loop, interleaved."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from scripts import common

SYSTEMS = ("stock", "tfpara")
WORKERS = (1, 2)
# A table of 1 M × 64, of which a minibatch uses some 2,000 rows.
TABLE = {"ids": 1_000_000, "inputs": 8, "width": 64, "classes": 16, "batch": 256}
TINY = {"inputs": 40, "layers": 1, "width": 64, "classes": 48, "batch": 32}
_MARK = "FIGURES "


def measured(sizes: dict[str, int], steps: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures a model of `sizes`, a tiny one and a table, with one parameter server.

    Args:
        sizes: sizes of the large model, with "batch".
        steps: timed minibatches of each worker for the large model, and for whole tables; the tiny
            one, and a table by rows, take 20 times as many.
        rounds: how often everything is measured.
        seconds: time after which a run is killed.

    Returns:
        "rows": the median figures for each model, number of workers and system; `ratio_to_stock` is
        the median of the ratios within a round.

    Raises:
        Failure: a run did not give its figures.
    """
    rows = []
    for model, options, systems in (
        ("tiny", {**TINY, "steps": 20 * steps}, SYSTEMS),
        ("large", {**sizes, "steps": steps}, SYSTEMS),
        ("table", {**TABLE, "steps": steps}, (*SYSTEMS, "whole")),
    ):
        for workers in WORKERS:
            found: dict[str, list[float]] = {system: [] for system in systems}
            for _ in range(rounds):
                for system, figures in found.items():
                    given = {**options, "system": system}
                    if (model, system) == ("table", "tfpara"):
                        given["steps"] *= 20
                    figures.append(_measure(workers, given, seconds))
            for system, figures in found.items():
                ratios = [a / b for a, b in zip(figures, found["stock"], strict=True)]
                rows.append(
                    {
                        "model": model,
                        "workers": workers,
                        "system": system,
                        "pushes_per_second": statistics.median(figures),
                        "ratio_to_stock": statistics.median(ratios),
                    }
                )
                speed, ratio = rows[-1]["pushes_per_second"], rows[-1]["ratio_to_stock"]
                print(
                    f"{model:6} {workers} worker(s) {system:7} {speed:8.1f} pushes/s, "
                    f"{ratio:.2f} × stock",
                    flush=True,
                )
    return {"rows": rows, "tiny": TINY, "table": TABLE}


def _measure(workers: int, options: dict[str, Any], seconds: float) -> float:
    """Measures pushes/s of a run: a chief, a parameter server and workers.

    Each process runs operations on one thread.
    """
    command = [sys.executable, "-m", "tfpara.launch", "--ps", "1", "-n", str(workers), "--"]
    command += ["python", "-m", "scripts.benchmarks.asynchronous_worker", json.dumps(options)]
    environment = os.environ | {
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise common.Failure(f"{options}: no figures after {seconds:g} seconds.") from error
    for line in run.stdout.splitlines():
        if _MARK in line:
            return json.loads(line.split(_MARK, 1)[1])["pushes_per_second"]
    raise common.Failure(f"{options}: no figures.\n{run.stdout[-500:]}\n{run.stderr[-2000:]}")
