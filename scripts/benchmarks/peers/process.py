"""The messages of a benchmark's process to the program that started it, and its measurements.

Only the standard library is imported, since the peers' environments lack our packages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# All peers train the same network by SGD with this rate and momentum. The network has `inputs`
# inputs, `layers` hidden layers of `width` ReLUs, and `classes` outputs.
LEARNING_RATE, MOMENTUM = 0.01, 0.9


def run(figures: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Calls `figures` with the options from the command line and prints what it returns."""
    print(json.dumps(figures(json.loads(sys.argv[1]))), flush=True)
    # `os._exit` ends the process at once. At a regular end, some peers would wait for each other,
    # print something, or crash.
    sys.stdout.flush()
    os._exit(0)


def wait_for_the_others() -> None:
    """Tells the program that started this process that it is ready; waits until all are."""
    print("READY", flush=True)
    sys.stdin.readline()


def place() -> tuple[int, list[str]]:
    """Returns this process's rank, and the host:port of every process, from TF_CONFIG."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return 0, ["127.0.0.1:0"]
    config = json.loads(text)
    jobs, task = config["cluster"], config["task"]
    rank = 0 if task["type"] == "chief" else 1 + task["index"]
    return rank, [*jobs["chief"], *jobs.get("worker", [])]


def timed_training(
    options: dict[str, Any], step: Callable[[], Any], norm: Callable[[], float]
) -> dict[str, Any]:
    """Times `steps` calls of `step`, after `warm_up` calls that do not count.

    Args:
        options: `batch`, `steps`, `warm_up`, `interface`.
        step: trains one minibatch, with its share of averaging; returns when it is done.
        norm: returns the norm of the weights, which is equal on all workers if their weights are.
    """
    for _ in range(options["warm_up"]):
        step()
    norm()
    wait_for_the_others()
    sent, began = sent_bytes(options), time.time()
    for _ in range(options["steps"]):
        step()
    ended = time.time()
    return {
        "weights_norm": norm(),
        "began": began,
        "ended": ended,
        "samples": options["steps"] * options["batch"],
        "sent_bytes": sent_bytes(options) - sent,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def timed_sync(options: dict[str, Any], exchange: Callable[[], Any]) -> dict[str, Any]:
    """Measures the median time of `exchange`; its first call does not count."""
    exchange()
    wait_for_the_others()
    times = []
    for _ in range(options["steps"]):
        began = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - began)
    return {"sync_ms": 1000 * sorted(times)[len(times) // 2]}


def peak_memory_bytes() -> int:
    """Returns the peak resident memory of this process so far; 0 if the system does not tell it."""
    return 1024 * _field("/proc/self/status", "VmHWM:", 0)


def sent_bytes(options: dict[str, Any]) -> int:
    """Returns the bytes that all processes have sent so far on the measured network interface."""
    return _field("/proc/net/dev", f"{options.get('interface', 'lo')}:", 8)


def _field(path: str, label: str, number: int) -> int:
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            found, _, rest = line.partition(label)
            if rest and not found.strip():
                return int(rest.split()[number])
    return 0
