"""Speed, measured: `python -m scripts.benchmark --suite=scaling --out=FILE.json`.

Suite `scaling`: the 12.5-million-parameter DNN (1320-6x1024-5723) on data in memory, one thread per
worker. In one run and interleaved: plain Keras in one process, plain Keras in two processes that
know nothing of each other, this strategy on one worker, and on two workers at several sync periods;
and a bare all-reduce of the model's bytes. `ratio_to_independent` compares with the two independent
processes of the same round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import flags

import tfpara
from scripts import common
from tfpara.launch import local_clusters

_SUITE = flags.DEFINE_enum("suite", "scaling", ["scaling"], "what to measure")
_OUT = flags.DEFINE_string("out", None, "JSON file to write", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "times that everything is measured", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 256, "minibatch of each replica, in samples", lower_bound=1)
_PERIODS = flags.DEFINE_list(
    "sync_periods", ["1", "5", "20", "80"], "sync periods, in minibatches of each replica"
)
_STEPS = flags.DEFINE_integer(
    "steps", 160, "timed minibatches at the longest period; shorter ones take fewer", lower_bound=1
)
_ELEMENTS = 12_473_435  # weights and biases of 1320-6x1024-5723
_SECONDS = 600


def main() -> None:
    """Measures, prints the table and writes the JSON file."""
    out = Path(_OUT.value)
    if not out.parent.is_dir():
        raise common.Failure(f"--out={out}: there is no folder {out.parent}. Make it first.")
    systems = _scaling_systems()
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(_ROUNDS.value):
        measured = {}
        for name, (workers, options) in systems.items():
            measured[name] = _measure(workers, options)
            print(
                f"round {number + 1}/{_ROUNDS.value}  {name}: {_short(measured[name])}", flush=True
            )
        rounds.append(measured)
    rows = [_row(name, *systems[name], rounds) for name in systems]
    content = {
        "suite": _SUITE.value,
        "machine": _machine(),
        "versions": {
            "tfpara": tfpara.__version__,
            **{p: metadata.version(p) for p in ("tensorflow", "keras", "numpy")},
        },
        "rows": rows,
    }
    common.write_json(out, content)
    _print_table(rows)


def _scaling_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    """Name → (processes, options of each)."""
    periods = [int(period) for period in _PERIODS.value]
    longest = max(periods)
    steps = max(8, _STEPS.value // 4)
    plain = {"system": "plain", "sync_period": None, "batch": _BATCH.value, "steps": steps}
    systems: dict[str, tuple[int, dict[str, Any]]] = {
        "plain Keras": (1, plain),
        "plain Keras, independent": (2, plain),
        "tfpara, one worker": (1, {**plain, "system": "tfpara", "sync_period": longest}),
        "bare all-reduce": (
            2,
            {"system": "all_reduce", "elements": _ELEMENTS, "bucket_bytes": 8 << 20, "steps": 21},
        ),
    }
    for period in periods:
        blocks = max(1, round(_STEPS.value * (period / longest) ** 0.5 / period))
        options = {"system": "tfpara", "sync_period": period, "steps": blocks * period}
        systems[f"tfpara, period {period}"] = (2, {**plain, **options})
    return systems


def _measure(workers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Starts the processes, lets them begin together, and puts their figures together."""
    together = workers > 1 and options["system"] != "plain"
    configs = [""] * workers
    if together:
        configs = [each.tf_config() for each in local_clusters(workers)]
    processes = []
    try:
        for config in configs:
            env = os.environ | {
                "TF_CONFIG": config,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "scripts.benchmark_worker", json.dumps(options)]
            processes.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            _expect(process, lambda line: line == "READY")
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        parts = [json.loads(_expect(p, lambda line: line.startswith("{"))) for p in processes]
        for process in processes:
            process.wait(_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    figures = {k: statistics.mean(p[k] for p in parts) for k in parts[0] if k.endswith("_ms")}
    if "sync_fraction" in parts[0]:
        figures["sync_fraction"] = statistics.mean(p["sync_fraction"] for p in parts)
    if "samples" in parts[0]:
        seconds = max(p["ended"] for p in parts) - min(p["began"] for p in parts)
        figures["samples_per_second"] = sum(p["samples"] for p in parts) / seconds
    return figures


def _expect(process: subprocess.Popen, wanted: Any) -> str:
    for line in process.stdout:
        if wanted(line.strip()):
            return line.strip()
    raise common.Failure(
        f"a benchmark process ended with {process.wait(_SECONDS)}: {process.stderr.read()[-2000:]}"
    )


def _row(
    name: str, workers: int, options: dict[str, Any], rounds: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Medians over the rounds, with the smallest and largest value of each."""
    row: dict[str, Any] = {
        "system": name,
        "workers": workers,
        "sync_period": options.get("sync_period"),
    }
    values = {key: [r[name][key] for r in rounds] for key in rounds[0][name]}
    if "samples_per_second" in values:
        independent = [r["plain Keras, independent"]["samples_per_second"] for r in rounds]
        alone = [r["plain Keras"]["samples_per_second"] for r in rounds]
        speed = values["samples_per_second"]
        values["ratio_to_independent"] = [a / b for a, b in zip(speed, independent, strict=True)]
        values["ratio_to_plain"] = [a / b for a, b in zip(speed, alone, strict=True)]
    for key, series in values.items():
        row[key] = statistics.median(series)
        row[f"{key}_range"] = [min(series), max(series)]
    return row


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}


def _short(figures: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in figures.items())


def _print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'system':28} {'workers':>7} {'samples/s':>10} {'/independent':>12} {'/plain':>7} "
        f"{'sync ms':>8} {'wait ms':>8}"
    )
    for row in rows:
        cells = [
            (row.get("samples_per_second"), 10, ".0f"),
            (row.get("ratio_to_independent"), 12, ".3f"),
            (row.get("ratio_to_plain"), 7, ".3f"),
            (row.get("sync_ms"), 8, ".0f"),
            (row.get("wait_ms"), 8, ".0f"),
        ]
        text = " ".join(f"{'-' if v is None else format(v, f):>{w}}" for v, w, f in cells)
        print(f"{row['system']:28} {row['workers']:>7} {text}")


if __name__ == "__main__":
    common.run(main)
