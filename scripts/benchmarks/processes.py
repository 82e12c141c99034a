"""Starts the processes of a benchmark and puts their figures together."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from scripts import common
from scripts.benchmarks.links import Loopback, Namespaces
from tfpara.cluster import Cluster

_SECONDS = 600


class _Process(NamedTuple):
    """A running process, and the file with its standard error."""

    popen: subprocess.Popen
    errors: IO[str]


def measure(
    workers: int,
    options: dict[str, Any],
    *,
    module: str = "scripts.benchmarks.worker",
    python: str = sys.executable,
    place: Loopback | Namespaces | None = None,
    seconds: float = _SECONDS,
) -> dict[str, Any]:
    """Starts the processes, lets them begin together, and puts their figures together.

    Args:
        workers: number of processes.
        options: options of `module`. Processes of the system "plain" are independent.
        module: module that each process runs.
        python: interpreter that runs it.
        place: place where the processes run; by default loopback.
        seconds: time after which the processes are killed.

    Raises:
        Failure: a process ended before it gave its figures, or was killed.
    """
    place = place or Loopback()
    clusters = None
    if workers > 1 and options["system"] != "plain":
        clusters = place.clusters(workers)
    commands = [
        [*place.prefix(rank), python, "-m", module, json.dumps(options)] for rank in range(workers)
    ]
    environments = [_environment(place, clusters and clusters[r]) for r in range(workers)]
    with _running(commands, environments, seconds) as processes:
        for process in processes:
            _expect(process, lambda line: line == "READY")
        for process in processes:
            process.popen.stdin.write("go\n")
            process.popen.stdin.flush()
        parts = [json.loads(_expect(p, lambda line: line.startswith("{"))) for p in processes]
        for process in processes:
            process.popen.wait(seconds)
    return _together(parts, place.shared)


def medians(series: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the median of each series, and as `NAME_range` its smallest and largest value."""
    row: dict[str, Any] = {}
    for name, values in series.items():
        row |= {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}
    return row


@contextlib.contextmanager
def _running(
    commands: Sequence[list[str]], environments: Sequence[dict[str, str]], seconds: float
) -> Iterator[list[_Process]]:
    """Starts the processes, and ends all of them when the context ends."""
    processes: list[_Process] = []
    late = threading.Event()

    def kill() -> None:
        for process in processes:
            process.popen.kill()

    def kill_late() -> None:
        late.set()
        kill()

    timer = threading.Timer(seconds, kill_late)
    timer.daemon = True
    timer.start()
    with contextlib.ExitStack() as stack:
        try:
            for command, environment in zip(commands, environments, strict=True):
                # Errors go to a file because they are read only at the end. A pipe could fill up
                # before the end, and block the process.
                errors = stack.enter_context(tempfile.TemporaryFile("w+"))
                popen = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                processes.append(_Process(popen, errors))
            yield processes
        except (common.Failure, BrokenPipeError) as failure:
            if late.is_set():
                raise common.Failure(
                    f"a benchmark process was killed after {seconds:g} s, the longest time of a "
                    "measurement. Measure less: lower --steps or the sizes of the network."
                ) from failure
            raise
        finally:
            timer.cancel()
            kill()
            for process in processes:
                process.popen.wait()
                for pipe in (process.popen.stdin, process.popen.stdout):
                    pipe.close()


def _environment(place: Loopback | Namespaces, cluster: Cluster | None) -> dict[str, str]:
    """Returns a process's environment: one thread; in a cluster, TF_CONFIG and the interface."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if cluster is None:
        return environment
    # These variables make Gloo use the interface that is measured. Without them, Gloo would look up
    # the address of this machine's name, and use the interface with that address.
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"), place.interface)
    return environment | interfaces | {"TF_CONFIG": cluster.tf_config()}


def _together(parts: Sequence[dict[str, Any]], shared_interface: bool) -> dict[str, Any]:
    """Combines the figures of the processes: means of some, and sums of others."""
    figures = {
        k: statistics.mean(p[k] for p in parts)
        for k in parts[0]
        if k.endswith(
            (
                *("_ms", "_memory_bytes", "state_bytes", "_per_second", "operations", "_of_plain"),
                *("wait_fraction", "loss"),
            )
        )
    }
    if "sync_fraction" in parts[0]:
        figures["sync_fraction"] = statistics.mean(p["sync_fraction"] for p in parts)
    if "device" in parts[0]:
        figures["device"] = parts[0]["device"]
    if "weights_norm" in parts[0]:
        norms = [p["weights_norm"] for p in parts]
        figures["weights_differ"] = max(norms) / min(norms) - 1.0
    if "samples" in parts[0]:
        samples = sum(p["samples"] for p in parts)
        seconds = max(p["ended"] for p in parts) - min(p["began"] for p in parts)
        figures["samples_per_second"] = samples / seconds
        if "own_seconds" in parts[0]:
            speeds = [p["samples"] / p["own_seconds"] for p in parts]
            figures["of_all_speeds"] = samples / seconds / sum(speeds)
        if "sent_bytes" in parts[0]:
            sent = [p["sent_bytes"] for p in parts]
            figures["bytes_per_sample"] = (max(sent) if shared_interface else sum(sent)) / samples
    return figures


def _expect(process: _Process, wanted: Callable[[str], bool]) -> str:
    for line in process.popen.stdout:
        if wanted(line.strip()):
            return line.strip()
    code = process.popen.wait()
    process.errors.seek(0)
    raise common.Failure(
        f"a benchmark process ended with {code}: {process.errors.read()[-2000:].strip()}"
    )
