"""The program `tfpara-plan`: which sync period a link needs, for how many workers.

    tfpara-plan --step_ms=110 --model_mb=50 --link_mbit=1000

From the time of a minibatch, the size of the model and the link it predicts the speed-up (see
`tfpara.planner`), and recommends a period whose effect on the error is known. No TensorFlow here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfpara import files
from tfpara.planner import LONGEST_KNOWN, Costs, Link, known_error

_PROGRAM = "tfpara-plan"
_ERRORS = (
    "Errors are those of `BMUF()` on 40 minutes of speech, eight epochs. A run with more syncs "
    "loses less, and one with fewer more."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the cost model predicts and recommends; returns the exit code."""
    known = parser(_PROGRAM)
    options = known.parse_args(argv)
    missing = [name for name in ("step_ms", "model_mb", "link_mbit") if vars(options)[name] is None]
    if missing:
        known.error(
            f"--{', --'.join(missing)} must be given: measure a minibatch on one worker, the size "
            "of the weights (4 bytes each) and the link"
        )
    report(options)
    return 0


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the flags, to which a caller may add flags of its own."""
    known = argparse.ArgumentParser(
        prog=program,
        description="Predict the speed-up of N workers, and recommend a sync period.",
        usage=f"{program} --step_ms=MS --model_mb=MB --link_mbit=MBIT [more flags; see --help]",
        allow_abbrev=False,
    )
    add = known.add_argument
    above_0 = _number(lambda x: x > 0, "a number above 0")
    at_least_0 = _number(lambda x: x >= 0, "a number of at least 0")
    add("--step_ms", type=above_0, help="a minibatch on one worker, in milliseconds")
    add("--model_mb", type=above_0, help="the weights in float32, in megabytes (millions of bytes)")
    add("--link_mbit", type=above_0, help="speed of each worker's link, in Mbit/s")
    add("--link_delay_ms", type=at_least_0, help="delay of the link (default: 0)")
    add(
        "--sync_ms",
        type=at_least_0,
        help="the part of a sync that is not travel: packing, rule, unpacking (default: 0)",
    )
    add(
        "--slowdown",
        type=_number(lambda x: x >= 1, "a number of at least 1"),
        help="how many times as long a minibatch takes where all work (default: 1)",
    )
    add("--workers", type=_whole_numbers, default=[1, 2, 4, 8, 16], help="numbers of workers")
    add("--sync_periods", type=_whole_numbers, default=[1, 5, 20, 80], help="periods of the table")
    add(
        "--loss",
        type=_number(lambda x: 0 < x < 1, "a share between 0 and 1"),
        default=0.05,
        help="share of the speed that the syncs may cost (default: 0.05)",
    )
    add("--overlap", action="store_true", help="a sync travels while the next block trains")
    add(
        "--wire_bits",
        type=int,
        choices=(32, 16, 8),
        default=32,
        help='bits of a weight on the link: float32, compression="bf16", "int8" (default: 32)',
    )
    add("--out", type=writable, help="JSON file to write the table into")
    return known


def report(options: argparse.Namespace, found: dict[str, float] | None = None) -> dict[str, Any]:
    """Prints the table and the recommendations, and writes --out.

    Args:
        options: from `parser`.
        found: measured values in place of those that are not given, by the names of their flags.

    Returns:
        The table and the recommendations, as they are in --out.
    """
    values = {"link_delay_ms": 0.0, "sync_ms": 0.0, "slowdown": 1.0}
    given = {name: value for name, value in vars(options).items() if value is not None}
    known = {**(found or {}), **given}
    assumed = {name: value for name, value in values.items() if name not in known}
    values |= known
    costs = Costs(
        step_seconds=values["step_ms"] / 1e3,
        model_bytes=values["model_mb"] * 1e6 * options.wire_bits / 32,
        link=Link.of_mbit(values["link_mbit"], values["link_delay_ms"]),
        local_seconds=values["sync_ms"] / 1e3,
        slowdown=values["slowdown"],
        overlap=options.overlap,
    )
    table = {n: {p: costs.speedup(n, p) for p in options.sync_periods} for n in options.workers}
    _print_table(costs, table, assumed)
    chosen = {n: _recommend(costs, n, options) for n in options.workers if n > 1}
    print(_ERRORS if chosen else "One worker has no sync. Give more: --workers=2,4.")
    content = {
        **{k: v for k, v in dataclasses.asdict(costs).items() if k != "link"},
        "link_bytes_per_second": costs.link.bytes_per_second,
        "link_delay_seconds": costs.link.delay_seconds,
        "assumed": assumed,
        "loss": options.loss,
        "rows": [
            {"workers": n, "sync_period": p, "speedup": s, "loss": costs.loss(n, p)}
            for n, speedups in table.items()
            for p, s in speedups.items()
        ],
        "smallest_period": {str(n): costs.smallest_period(n, options.loss) for n in table},
        "recommended_period": {str(n): period for n, period in chosen.items()},
    }
    if options.out:
        with files.whole(options.out) as place:
            place.write_text(json.dumps(content, indent=1) + "\n")
    return content


def _print_table(
    costs: Costs, table: dict[int, dict[int, float]], assumed: dict[str, float]
) -> None:
    print(
        f"a minibatch {1e3 * costs.step_seconds:.1f} ms, {costs.slowdown:.2f} times that where "
        f"all work; {costs.model_bytes / 1e6:.1f} MB to send over "
        f"{costs.link.bytes_per_second * 8 / 1e6:.0f} Mbit/s with "
        f"{1e3 * costs.link.delay_seconds:g} ms of delay; "
        f"{1e3 * costs.local_seconds:.1f} ms of a sync for packing, rule and unpacking"
    )
    if assumed:
        flags = ", ".join(f"--{name}={value:g}" for name, value in assumed.items())
        print(f"assumed, since not given: {flags}")
    print("\nspeed-up over one worker, by sync period")
    periods = list(next(iter(table.values())))
    print(f"{'workers':>8}" + "".join(f"{p:>9}" for p in periods) + f"{'sync ms':>10}")
    for workers, speedups in table.items():
        cells = "".join(f"{speedups[p]:>9.2f}" for p in periods)
        print(f"{workers:>8}{cells}{1e3 * costs.sync_seconds(workers):>10.0f}")
    print()


def _recommend(costs: Costs, workers: int, options: argparse.Namespace) -> int:
    """Prints the recommendation for a number of workers; returns its period."""
    smallest = costs.smallest_period(workers, options.loss)
    period = min(smallest or LONGEST_KNOWN, LONGEST_KNOWN)
    times = f"{costs.speedup(workers, period):.2f} times as fast as one"
    if period == smallest:
        print(
            f"{workers} workers: sync_period={period} is the smallest that loses less than "
            f"{options.loss:.0%} of the speed. It makes them {times}.{_error(workers, period)}"
        )
        return period
    need = f"takes a period of {smallest}" if smallest else "is not possible with any period"
    print(
        f"{workers} workers: sync_period={period} loses {costs.loss(workers, period):.0%} of the "
        f"speed and makes them {times}.{_error(workers, period)} To lose less than "
        f"{options.loss:.0%} {need}, and no error is known of periods above {LONGEST_KNOWN}."
        + _other_ways(costs, workers, options)
    )
    return period


def _other_ways(costs: Costs, workers: int, options: argparse.Namespace) -> str:
    """Returns a sentence on what else would make syncs cheaper; "" if all is in use."""
    ways = {}
    if not costs.overlap:
        ways["overlap=True"] = dataclasses.replace(costs, overlap=True)
    if options.wire_bits > 8:
        nbytes = costs.model_bytes * 8 / options.wire_bits
        ways['compression="int8"'] = dataclasses.replace(costs, model_bytes=nbytes)
        if ways.keys() > {'compression="int8"'}:
            ways["both"] = dataclasses.replace(costs, model_bytes=nbytes, overlap=True)
    if not ways:
        return ""
    said = []
    for name, other in ways.items():
        enough = other.smallest_period(workers, options.loss)
        if enough is None or enough > LONGEST_KNOWN:
            said.append(f"{name} (loses {other.loss(workers, LONGEST_KNOWN):.0%} at it)")
        else:
            said.append(f"{name} (period {enough} is enough)")
    return f" What helps: {', '.join(said)}."


def _error(workers: int, period: int) -> str:
    found = known_error(workers, period)
    if found is None:
        return " No error is known of so many replicas."
    return (
        f" Error: {found.percent:g} % above one replica's, measured with {found.replicas} replicas "
        f"and a period of {found.period}."
    )


def _number(valid: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and valid(value)):
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        return value

    return parse


def _whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= 10**6 for part in parts):
        raise argparse.ArgumentTypeError(f"{text} must be whole numbers above 0, with commas")
    return sorted({int(part) for part in parts})


def writable(text: str) -> Path:
    """Returns the path of a file whose folder is there; a type of argparse."""
    folder = Path(text).absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}. Make it first")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
