"""How many workers, and how long a sync period: `python -m scripts.plan`.

Measures, in short runs of one and of two processes on this machine, the time of a minibatch, how
much two workers slow each other down, and the time of a sync; or takes what is given by flags.
Prints the speed-up over one worker that the cost model of paper 003 (tfpara.planner) predicts for
every number of workers and sync period, and for each number the smallest period that loses less
than --loss of the speed without syncs.

    python -m scripts.plan                                       # this machine, its loopback
    python -m scripts.plan --link_mbit=1000 --link_delay_ms=1    # the same machines, that link
    python -m scripts.plan --step_ms=110 --sync_ms=20 --link_mbit=100    # nothing is measured
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from absl import flags

from scripts import common
from scripts.benchmarks.processes import measure
from scripts.benchmarks.systems import elements_of
from tfpara.planner import Costs, Link, calibrated_link

_WORKERS = flags.DEFINE_list("workers", ["1", "2", "4", "8", "16"], "numbers of workers")
_PERIODS = flags.DEFINE_list("sync_periods", ["1", "5", "20", "80", "320"], "sync periods")
_LOSS = flags.DEFINE_float("loss", 0.05, "share of the speed that the syncs may cost")
_OVERLAP = flags.DEFINE_bool("overlap", False, "syncs travel while the next block trains")
_WIRE_BITS = flags.DEFINE_enum(
    "wire_bits", "32", ["32", "16", "8"], "bits of a weight on the wire: float32, bf16, int8"
)
_STEP_MS = flags.DEFINE_float("step_ms", None, "a minibatch on one worker; measured if not given")
_SYNC_MS = flags.DEFINE_float(
    "sync_ms",
    None,
    "the part of a sync that is not travel: packing, rule, unpacking; measured if not given",
)
_SLOWDOWN = flags.DEFINE_float(
    "slowdown", None, "how much slower a minibatch is where all work; measured with --step_ms, or 1"
)
_LINK = flags.DEFINE_float(
    "link_mbit", None, "speed of the link, in Mbit/s; loopback is measured if not given"
)
_DELAY = flags.DEFINE_float("link_delay_ms", 0.0, "delay of the link of --link_mbit")
_STEPS = flags.DEFINE_integer("steps", 20, "minibatches and syncs to measure", lower_bound=3)
_SIZES = {
    "batch": flags.DEFINE_integer("batch", 256, "minibatch of each worker", lower_bound=1),
    "inputs": flags.DEFINE_integer("inputs", 1320, "width of an input frame", lower_bound=1),
    "layers": flags.DEFINE_integer("layers", 6, "hidden layers", lower_bound=0),
    "width": flags.DEFINE_integer("width", 1024, "units of a hidden layer", lower_bound=1),
    "classes": flags.DEFINE_integer("classes", 5723, "output classes", lower_bound=2),
}
_OUT = flags.DEFINE_string("out", None, "JSON file to write the table into")
_PLOT = flags.DEFINE_string("plot", None, "picture of the table to write (.png, .svg, .pdf)")


def main() -> None:
    """Measures the costs that no flag gives, prints the tables, and writes the requested files."""
    for flag in (_OUT, _PLOT):
        if flag.value and not Path(flag.value).absolute().parent.is_dir():
            raise common.Failure(
                f"--{flag.name}={flag.value}: there is no folder {Path(flag.value).parent}. "
                "Make it first."
            )
    with common.bad_input():
        _check_flags()
        workers, periods = (sorted({int(n) for n in f.value}) for f in (_WORKERS, _PERIODS))
        given_link = None if _LINK.value is None else Link.of_mbit(_LINK.value, _DELAY.value)
        if given_link is None and _DELAY.value:
            raise ValueError(
                f"--link_delay_ms={_DELAY.value} is of the link of --link_mbit. Give that too."
            )
    found = _measured(given_link)
    costs = _costs(given_link or found.pop("link"), found)
    table = {n: {p: costs.speedup(n, p) for p in periods} for n in workers}
    best = {n: costs.smallest_period(n, _LOSS.value) for n in workers}
    _print(costs, table, best)
    if _OUT.value:
        common.write_json(Path(_OUT.value), _content(costs, table, best))
    if _PLOT.value:
        _draw(table, Path(_PLOT.value))


def _check_flags() -> None:
    for each in (_WORKERS, _PERIODS):
        if not each.value or not all(n.isdecimal() and int(n) > 0 for n in each.value):
            raise ValueError(
                f"--{each.name}={','.join(each.value)} must be whole numbers of at least 1, with "
                "commas."
            )
    for flag in (_STEP_MS, _LINK):
        if flag.value is not None and not 0.0 < flag.value < math.inf:
            raise ValueError(f"--{flag.name}={flag.value} must be a number above 0.")
    for flag, least in ((_SYNC_MS, 0.0), (_DELAY, 0.0), (_SLOWDOWN, 1.0)):
        if flag.value is not None and not least <= flag.value < math.inf:
            raise ValueError(f"--{flag.name}={flag.value} must be a number of at least {least:g}.")
    if not 0.0 < _LOSS.value < 1.0:
        raise ValueError(f"--{_LOSS.name}={_LOSS.value} must be a share between 0 and 1.")


def _costs(link: Link, found: dict[str, Any]) -> Costs:
    """Returns the costs, each from its flag if given, else from the measurement."""
    numbers = {"step_ms": 0.0, "sync_ms": 0.0, "slowdown": 1.0} | found
    given = {"step_ms": _STEP_MS.value, "sync_ms": _SYNC_MS.value, "slowdown": _SLOWDOWN.value}
    numbers |= {name: value for name, value in given.items() if value is not None}
    return Costs(
        step_seconds=numbers["step_ms"] / 1e3,
        model_bytes=_model_bytes() * int(_WIRE_BITS.value) / 32,
        link=link,
        local_seconds=numbers["sync_ms"] / 1e3,
        slowdown=numbers["slowdown"],
        overlap=_OVERLAP.value,
    )


def _measured(link: Link | None) -> dict[str, Any]:
    """Measures the costs that the flags do not give."""
    sizes = {name: flag.value for name, flag in _SIZES.items()}
    plain = {**sizes, "system": "plain", "sync_period": None, "steps": _STEPS.value}
    found: dict[str, Any] = {}
    if _STEP_MS.value is None:
        alone = measure(1, plain)["samples_per_second"]
        found["step_ms"] = 1e3 * sizes["batch"] / alone
        if _SLOWDOWN.value is None:
            together = measure(2, plain)["samples_per_second"]
            found["slowdown"] = max(1.0, 2 * alone / together)
    if link is None or _SYNC_MS.value is None:
        strategy = {"strategy": {"collectives": "tensorflow"}}
        bare = {"system": "all_reduce", "bucket_bytes": 8 << 20, "steps": _STEPS.value, **strategy}
        reduce_ms = measure(2, {**bare, "elements": elements_of(sizes)})["sync_ms"]
        if link is None:
            found["link"] = calibrated_link(reduce_ms / 1e3, _model_bytes(), 2)
        if _SYNC_MS.value is None:
            syncs = {**sizes, "system": "syncs", "syncs": _STEPS.value, "averages": "one"}
            found["sync_ms"] = max(0.0, measure(2, {**syncs, **strategy})["sync_ms"] - reduce_ms)
    return found


def _model_bytes() -> float:
    return 4.0 * elements_of({name: flag.value for name, flag in _SIZES.items()})


def _print(costs: Costs, table: dict[int, dict[int, float]], best: dict[int, int | None]) -> None:
    print(
        f"a minibatch {1e3 * costs.step_seconds:.1f} ms, {costs.slowdown:.2f} times that where "
        f"all work; {costs.model_bytes / 1e6:.1f} MB to send over "
        f"{costs.link.bytes_per_second * 8 / 1e6:.0f} Mbit/s with "
        f"{1e3 * costs.link.delay_seconds:g} ms of delay; "
        f"{1e3 * costs.local_seconds:.1f} ms of a sync for packing, rule and unpacking"
    )
    periods = list(next(iter(table.values())))
    print("\nspeed-up over one worker, by sync period")
    print(f"{'workers':>8}" + "".join(f"{p:>9}" for p in periods) + f"{'sync ms':>10}")
    for workers, speedups in table.items():
        cells = "".join(f"{speedups[p]:>9.2f}" for p in periods)
        print(f"{workers:>8}{cells}{1e3 * costs.sync_seconds(workers):>10.0f}")
    print()
    for workers, period in best.items():
        if workers == 1:
            if len(best) == 1:
                print("One worker has no sync. Give more: --workers=2,4.")
            continue
        if period is None:
            print(f"{workers} workers: no sync period loses less than {_LOSS.value:.0%}.")
            continue
        print(
            f"{workers} workers: --sync_period={period} is the smallest that loses less than "
            f"{_LOSS.value:.0%}; it makes them {costs.speedup(workers, period):.2f} times as fast "
            "as one."
        )


def _content(
    costs: Costs, table: dict[int, dict[int, float]], best: dict[int, int | None]
) -> dict[str, Any]:
    return {
        "step_seconds": costs.step_seconds,
        "slowdown": costs.slowdown,
        "model_bytes": costs.model_bytes,
        "link_bytes_per_second": costs.link.bytes_per_second,
        "link_delay_seconds": costs.link.delay_seconds,
        "local_seconds": costs.local_seconds,
        "overlap": costs.overlap,
        "loss": _LOSS.value,
        "rows": [
            {"workers": n, "sync_period": p, "speedup": s, "loss": costs.loss(n, p)}
            for n, speedups in table.items()
            for p, s in speedups.items()
        ],
        "smallest_period": {str(n): period for n, period in best.items()},
    }


def _draw(table: dict[int, dict[int, float]], path: Path) -> None:
    pyplot = common.pyplot("agg", "--plot")
    figure, panel = pyplot.subplots()
    for period in next(iter(table.values())):
        speedups = [row[period] for row in table.values()]
        panel.plot(list(table), speedups, marker="o", label=f"sync period {period}")
    panel.plot(list(table), list(table), color="grey", linestyle=":", label="as many as workers")
    panel.set_xlabel("workers")
    panel.set_ylabel("speed-up over one worker")
    panel.legend()
    with common.bad_input():
        figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    common.run(main)
