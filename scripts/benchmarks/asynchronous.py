"""Training with a parameter server, beside plain Keras and TensorFlow's stock loop, interleaved."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from scripts import common
from scripts.benchmarks import processes, step_worker

SYSTEMS = ("stock", "tfpara")
WORKERS = (1, 2)
# This model has an embedding table of 1 million rows and 64 columns. A minibatch has 256 samples of
# 8 ids each, so it uses about 2,000 rows of the table.
TABLE = {"ids": 1_000_000, "inputs": 8, "width": 64, "classes": 16, "batch": 256}
TINY = {"inputs": 40, "layers": 1, "width": 64, "classes": 48, "batch": 32}
# Each pair is a rule and its sync period. `speeds` compares the speed of each pair with that of
# plain Keras.
RULES = (("ASGD", 1), ("Downpour", 1), ("Downpour", 5), ("AsyncBMUF", 5))
_PLAIN, _INDEPENDENT = "plain Keras", "plain Keras, two independent"
_MARK = "FIGURES "


def speeds(batch: int, steps: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures two workers and a server on three networks, beside one and two plain processes.

    The networks are those of the suite `step`. The plain processes exchange nothing, so two of them
    bound what two workers can do on this machine.

    Args:
        batch: minibatch of each process, in samples.
        steps: timed minibatches of each process for the largest network; more for smaller ones.
        rounds: how often everything is measured.
        seconds: time after which a run is killed.

    Returns:
        For each network and system the medians of samples/s and of its ratios, within a round, to
        one plain process and to two; with the smallest and largest of each.

    Raises:
        Failure: a run did not give its figures.
    """
    rows = []
    for network, (widths, _) in step_worker.NETWORKS.items():
        sizes = {"inputs": widths[0], "classes": widths[-1], "layers": len(widths) - 2}
        factor = max(1, round(12.5 / float(network)) // 2)
        options = {**sizes, "width": widths[1], "batch": batch, "steps": steps * factor}
        plain = {**options, "system": "plain", "sync_period": None}
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, count in ((_PLAIN, 1), (_INDEPENDENT, 2)):
                figures = processes.measure(count, plain, seconds=seconds)
                found.setdefault(name, []).append(figures["samples_per_second"])
            for rule, period in RULES:
                given = {**options, "system": "tfpara", "rule": rule, "sync_period": period}
                figures = _measure(2, given, seconds)
                name = f"{rule}, period {period}"
                found.setdefault(name, []).append(figures["samples_per_second"])
        for name, series in found.items():
            columns = {"samples_per_second": series}
            for key, base in (("ratio_to_plain", _PLAIN), ("ratio_to_independent", _INDEPENDENT)):
                columns[key] = [a / b for a, b in zip(series, found[base], strict=True)]
            row = {"network": network, "system": name, **processes.medians(columns)}
            rows.append(row)
            low, high = row["ratio_to_plain_range"]
            print(
                f"{network:>4} M {name:28} {row['samples_per_second']:9.0f} samples/s, "
                f"{row['ratio_to_plain']:.2f} × plain ({low:.2f} to {high:.2f}), "
                f"{row['ratio_to_independent']:.2f} × independent",
                flush=True,
            )
    return rows


def measured(sizes: dict[str, int], steps: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures a model of `sizes`, a tiny one and an embedding table, with one parameter server.

    Args:
        sizes: sizes of the large model, with "batch".
        steps: timed minibatches of each worker for the large model and for the table; 20 times as
            many for the tiny model, and where tfpara exchanges only the table's rows in use.
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
                    figures.append(_measure(workers, given, seconds)["pushes_per_second"])
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


def _measure(workers: int, options: dict[str, Any], seconds: float) -> dict[str, float]:
    """Returns the figures of a run: a chief, a parameter server and workers.

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
            return json.loads(line.split(_MARK, 1)[1])
    raise common.Failure(f"{options}: no figures.\n{run.stdout[-500:]}\n{run.stderr[-2000:]}")
