"""Runs whose workers are killed, for the suite `faults`: how much of the time is progress."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import common

_WORKER = "scripts.benchmarks.goodput_worker"
_POLL_SECONDS = 0.1


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
    "elastic, one spare, graphs not optimised": Way(
        ("--elastic", "--spares=1"), {**_ELASTIC, "grappler": False}
    ),
    "all start again": Way(("--max_restarts=1000",), {"elastic": False}),
}


def measured(
    ways: Sequence[str],
    workers: int,
    epochs: int,
    kill_every: float,
    options: dict[str, Any],
    seconds: float = 3600.0,
) -> list[dict[str, Any]]:
    """Trains in each way, while one of the workers that train is killed again and again.

    Progress is counted in whole epochs, from the end of the first one on. `goodput` is the time of
    an epoch without faults over that with faults.

    Args:
        ways: keys of `WAYS`, in their order.
        workers: number of workers that train.
        epochs: number of epochs of each run.
        kill_every: seconds between two kills (SIGKILL).
        options: `step_seconds`, `epoch_steps`, `width`, `sync_period` of the workers.
        seconds: time after which a run is ended.

    Returns:
        One row for each way.

    Raises:
        Failure: a run failed.
    """
    rows: list[dict[str, Any]] = []
    for name in ways:
        row = {"system": name, "workers": workers}
        row |= _run(WAYS[name], workers, epochs, kill_every, options, seconds)
        quiet = next((each for each in rows if each["system"] == QUIET), None)
        if quiet or name == QUIET:
            row["goodput"] = (quiet or row)["epoch_seconds"] / row["epoch_seconds"]
        rows.append(row)
        print(f"{name}: {row}", flush=True)
    return rows


def _run(
    way: Way, workers: int, epochs: int, kill_every: float, options: dict[str, Any], seconds: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfpara-goodput-") as folder:
        out = Path(folder)
        told = {**options, **way.options, "workers": workers, "epochs": epochs, "out": folder}
        command = [sys.executable, "-m", "tfpara.launch", "-n", str(workers), "--threads", "1"]
        command += [*way.launcher, "--", "python", "-m", _WORKER, json.dumps(told)]
        with (out / "output").open("wb") as output:
            launcher = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        try:
            kills = _kill_workers(launcher, out, kill_every if way.kills else None, seconds)
        finally:
            launcher.terminate()  # it ends its workers
            launcher.wait()
        if launcher.returncode:
            raise common.Failure(
                f"{' '.join(command)} ended with {launcher.returncode}.\n"
                + (out / "output").read_text(errors="replace")[-3000:]
            )
        ends = [json.loads(line) for line in (out / "epochs.jsonl").read_text().splitlines()]
        return {
            "epoch_seconds": (ends[-1]["time"] - ends[0]["time"]) / (epochs - 1),
            "kills": kills,
            "loss": ends[-1]["loss"],
            **_growth(out),
        }


def _kill_workers(
    launcher: subprocess.Popen, out: Path, every: float | None, seconds: float
) -> int:
    """Kills a worker at equal intervals from the end of the first epoch; returns how often.

    The only worker that trains is spared.
    """
    begun, kills, choose = time.monotonic(), 0, random.Random(0)
    due = None
    while launcher.poll() is None:
        now = time.monotonic()
        if now - begun > seconds:
            raise common.Failure(f"a run took longer than {seconds:g} s, after {kills} kills.")
        if due is None and every is not None and (out / "epochs.jsonl").exists():
            due = now + every
        if due is not None and now >= due:
            due += every or 0.0
            training = _training(out)
            if len(training) > 1:  # where no other trains, nobody is left to go on
                kills += 1
                # It may end by itself in between.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(choose.choice(training), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return kills


def _training(out: Path) -> list[int]:
    """Returns the ids of the workers that train."""
    found = []
    for path in sorted(out.glob("*.training")):
        with contextlib.suppress(OSError):
            if _WORKER.encode() in Path(f"/proc/{path.stem}/cmdline").read_bytes():
                found.append(int(path.stem))
    return found


def _growth(out: Path) -> dict[str, Any]:
    """Returns what the worker with the most changes of members has more at its end.

    The first two epochs of a worker do not count: there it still makes what it needs once.
    """
    lives = []
    for path in [*out.glob("*.training"), *out.glob("*.ended")]:
        lines = [json.loads(line) for line in path.read_text().splitlines()][2:]
        if lines:
            lives.append(lines)
    if not lives:
        return {}
    longest = max(lives, key=lambda lines: (lines[-1]["changes"] - lines[0]["changes"], len(lines)))
    first, last = longest[0], longest[-1]
    return {
        "changes": last["changes"] - first["changes"],
        "more_bytes": last["bytes"] - first["bytes"],
        "more_threads": last["threads"] - first["threads"],
        "more_descriptors": last["descriptors"] - first["descriptors"],
    }
