"""Starts the processes of a benchmark and puts their figures together."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from scripts import common
from tfpara.launch import local_clusters

_SECONDS = 600


def measure(workers: int, options: dict[str, Any]) -> dict[str, Any]:
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
    figures = {
        k: statistics.mean(p[k] for p in parts)
        for k in parts[0]
        if k.endswith(("_ms", "_bytes", "frames_per_second"))
    }
    if "sync_fraction" in parts[0]:
        figures["sync_fraction"] = statistics.mean(p["sync_fraction"] for p in parts)
    if "samples" in parts[0]:
        seconds = max(p["ended"] for p in parts) - min(p["began"] for p in parts)
        figures["samples_per_second"] = sum(p["samples"] for p in parts) / seconds
    return figures


def _expect(process: subprocess.Popen, wanted: Callable[[str], bool]) -> str:
    for line in process.stdout:
        if wanted(line.strip()):
            return line.strip()
    raise common.Failure(
        f"a benchmark process ended with {process.wait(_SECONDS)}: {process.stderr.read()[-2000:]}"
    )
