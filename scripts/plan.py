"""`tfpara-plan` with measured costs: `python -m scripts.plan`.

What no flag gives is measured in short runs of one and of two processes on this machine, with a DNN
that flags describe: the time of a minibatch, how much two workers slow each other down, and a sync.

    python -m scripts.plan                                       # this machine, its loopback
    python -m scripts.plan --link_mbit=1000 --link_delay_ms=1    # the same machines, that link
    python -m scripts.plan --step_ms=110 --sync_ms=20 --link_mbit=100    # nothing is measured
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import common
from scripts.benchmarks.processes import measure
from scripts.benchmarks.systems import elements_of
from tfpara import plan
from tfpara.planner import calibrated_link

# Sizes of the measured network where no flag gives them: those of the benchmarks' network.
_SIZES = {"batch": 256, "inputs": 1320, "layers": 6, "width": 1024, "classes": 5723}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the costs that no flag gives, and tells and writes what follows from them."""
    known = plan.parser("plan")
    known.usage = "plan [--step_ms=MS --model_mb=MB --link_mbit=MBIT ...]; see --help"
    for name, default in _SIZES.items():
        known.add_argument(f"--{name}", type=int, default=default, help="of the measured network")
    known.add_argument("--steps", type=int, default=20, help="minibatches and syncs to measure")
    known.add_argument("--plot", type=plan.writable, help="picture of the table: .png, .svg, .pdf")
    options = known.parse_args(argv)
    if options.link_mbit is None and options.link_delay_ms is not None:
        known.error("--link_delay_ms is of the link of --link_mbit. Give that too")
    if options.model_mb is not None and None in (options.step_ms, options.link_mbit):
        known.error("--model_mb is of a network of yours. Give its --step_ms and --link_mbit too")
    sizes = {name: getattr(options, name) for name in _SIZES}
    if options.steps < 3 or min(size for name, size in sizes.items() if name != "layers") < 1:
        known.error("--steps must be at least 3, and the sizes of the network at least 1")
    if sizes["layers"] < 0:
        known.error(f"--layers={sizes['layers']} must be at least 0")
    try:
        content = plan.report(options, _found(options, sizes))
        if options.plot:
            _draw(content["rows"], options.plot)
    except common.Failure as failure:
        print(f"plan: {failure}", file=sys.stderr)
        return 1
    return 0


def _found(options: argparse.Namespace, sizes: dict[str, int]) -> dict[str, float]:
    """Measures the costs that the flags do not give."""
    nbytes = 4.0 * elements_of(sizes)
    found: dict[str, float] = {}
    if options.model_mb is None:
        found["model_mb"] = nbytes / 1e6
        shape = f"{sizes['inputs']}-{sizes['layers']}x{sizes['width']}-{sizes['classes']}"
        print(
            f"The model is taken to be a DNN of {shape}, {nbytes / 1e6:.1f} MB. For yours give "
            "--inputs, --layers, --width, --classes and --batch, or --model_mb, --step_ms and "
            "--link_mbit."
        )
    plain: dict[str, Any] = {**sizes, "system": "plain", "sync_period": None}
    plain["steps"] = options.steps
    if options.step_ms is None:
        alone = measure(1, plain)["samples_per_second"]
        found["step_ms"] = 1e3 * sizes["batch"] / alone
        if options.slowdown is None:
            found["slowdown"] = max(1.0, 2 * alone / measure(2, plain)["samples_per_second"])
    if options.model_mb is not None:
        return found
    if options.link_mbit is None or options.sync_ms is None:
        strategy = {"strategy": {"collectives": "tensorflow"}}
        bare = {"system": "all_reduce", "bucket_bytes": 8 << 20, "steps": options.steps, **strategy}
        reduce_ms = measure(2, {**bare, "elements": elements_of(sizes)})["sync_ms"]
        if options.link_mbit is None:
            link = calibrated_link(reduce_ms / 1e3, nbytes, 2)
            found |= {"link_mbit": link.bytes_per_second * 8 / 1e6, "link_delay_ms": 0.0}
        if options.sync_ms is None:
            syncs = {**sizes, "system": "syncs", "syncs": options.steps, "averages": "one"}
            found["sync_ms"] = max(0.0, measure(2, {**syncs, **strategy})["sync_ms"] - reduce_ms)
    return found


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    pyplot = common.pyplot("agg", "--plot")
    figure, panel = pyplot.subplots()
    workers = sorted({row["workers"] for row in rows})
    for period in sorted({row["sync_period"] for row in rows}):
        speedups = [row["speedup"] for row in rows if row["sync_period"] == period]
        panel.plot(workers, speedups, marker="o", label=f"sync period {period}")
    panel.plot(workers, workers, color="grey", linestyle=":", label="as many as workers")
    panel.set_xlabel("workers")
    panel.set_ylabel("speed-up over one worker")
    panel.legend()
    with common.bad_input():
        figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
