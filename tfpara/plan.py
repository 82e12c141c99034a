"""The program `tfpara-plan`: which sync period and options a link needs, for how many workers.

    tfpara-plan --step_ms=110 --model_mb=50 --link_mbit=1000
    tfpara-plan --measure script.py --epochs=3

The program predicts the speed-up from the time of a minibatch, the size of the model and the link
(see `tfpara.planner`), and recommends options that cost little speed and have a known error. No
TensorFlow here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfpara import files
from tfpara.cluster import exit_codes
from tfpara.measuring import MeasuringError, measure
from tfpara.planner import BITS, COMPRESSIONS, Costs, Link, Plan, choose

_PROGRAM = "tfpara-plan"
_USAGE = f"""{_PROGRAM} --step_ms=MS --model_mb=MB --link_mbit=MBIT [more flags]
       {_PROGRAM} [flags] --measure SCRIPT.py [its arguments]"""
_ASSUMED = {"link_delay_ms": 0.0, "sync_ms": 0.0, "slowdown": 1.0}
_NEEDED = ("step_ms", "model_mb", "link_mbit")
# All numbers except 0 must be from 1 / _LARGEST to _LARGEST. Otherwise the costs could exceed what
# a float can hold.
_LARGEST = 1e12


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the predictions and recommendations; returns the exit code."""
    try:
        # Within this context, SIGTERM ends the processes that measure, too.
        with exit_codes.ended_by(signal.SIGTERM):
            return exit_codes.with_output(_PROGRAM, lambda: _run(argv))
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    values = {name: getattr(options, name) for name in (*_NEEDED, "batch", *_ASSUMED)}
    values = {name: value for name, value in values.items() if value is not None}
    if options.measure is None:
        missing = [f"--{name}" for name in _NEEDED if name not in values]
        if missing:
            parser.error(
                f"{', '.join(missing)} must be given, or --measure SCRIPT.py, which measures "
                "them: a minibatch on one worker, the weights (4 bytes each), and the link"
            )
        if options.hosts:
            parser.error("--hosts is for --measure SCRIPT.py, which is not given")
    else:
        if not options.measure:
            parser.error("--measure needs a script: --measure SCRIPT.py, as the last flag")
        if options.measure[0] != "-m" and not os.path.isfile(options.measure[0]):
            parser.error(f"--measure: there is no file {options.measure[0]}")
        if options.batch is not None:
            parser.error("--batch is for a plan without --measure, which finds it in the script")
        wrong = [host for host in options.hosts if not host or host.startswith("-")]
        if wrong:
            parser.error(
                f"--hosts={','.join(options.hosts)}: {wrong[0]!r} is no machine. Give names with "
                "commas between them"
            )
        if len(options.hosts) == 1:
            parser.error(
                f"--hosts={options.hosts[0]} has one machine, and a link needs two workers: give "
                "at least two, or leave --hosts out for two processes on this machine"
            )
        # If the user gives the link's speed, the link is taken to be between machines with one
        # worker each. Such workers do not slow each other down; workers on one machine do.
        apart = options.link_mbit is not None
        try:
            found = measure(options.measure, options.hosts, apart=apart)
        except (MeasuringError, OSError) as error:  # OSError: for example, there is no ssh
            print(f"{_PROGRAM}: {error}", file=sys.stderr)
            return 1
        if apart:
            del found["link_delay_ms"]  # it was measured on another link than the user's
        print(f"Measured with {found['batch']:.0f} samples in a minibatch of a worker.")
        values = found | values
    content = _report(options, values)
    if options.out:
        try:
            with files.whole(options.out) as place:
                place.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"{_PROGRAM}: --out={options.out} cannot be written: {error}", file=sys.stderr)
            return 1
    return 0


def _report(options: argparse.Namespace, values: dict[str, float]) -> dict[str, Any]:
    """Prints the plan; returns the content of the file of --out."""
    assumed = {name: value for name, value in _ASSUMED.items() if name not in values}
    values = assumed | values
    costs = Costs(
        step_seconds=values["step_ms"] / 1e3,
        model_bytes=values["model_mb"] * 1e6,
        link=Link.of_mbit(values["link_mbit"], values["link_delay_ms"]),
        local_seconds=values["sync_ms"] / 1e3,
        slowdown=values["slowdown"],
    )
    plans = [
        choose(
            costs,
            workers,
            loss=options.loss,
            error_percent=options.error,
            overlaps={"auto": (False, True), "no": (False,), "yes": (True,)}[options.overlap],
            compressions=COMPRESSIONS if options.compression == "auto" else (options.compression,),
        )
        for workers in options.workers
    ]
    print(
        f"A minibatch takes {values['step_ms']:.4g} ms on one worker, and {costs.slowdown:.2f} "
        f"times that where all work.\nA sync sends {values['model_mb']:.4g} MB over "
        f"{values['link_mbit']:.4g} Mbit/s with {values['link_delay_ms']:.2g} ms of delay, and "
        f"takes {values['sync_ms']:.3g} ms beside that."
    )
    if assumed:
        flags = ", ".join(f"--{name}={value:g}" for name, value in assumed.items())
        print(f"Assumed, since not given: {flags}.")
    speed = values["batch"] / costs.step_seconds if "batch" in values else None
    print("\n".join(["", *_table(plans, speed), "", *_notes(plans, options), _errors(plans)]))
    return {
        **values,
        "assumed": assumed,
        "loss": options.loss,
        "error": options.error,
        "plans": [
            {**each._asdict(), "error": each.error and each.error._asdict()} for each in plans
        ],
    }


def _table(plans: Sequence[Plan], speed: float | None) -> list[str]:
    """Returns the lines of the table; `speed` is one worker's samples/s, if known."""
    columns = {
        "workers": [str(each.workers) for each in plans],
        "sync_period": [str(each.sync_period) for each in plans],
        "overlap": [str(each.overlap) for each in plans],
        "compression": [each.compression for each in plans],
        "aggregation": [each.aggregation for each in plans],
        "speed-up": [f"{each.speedup:.2f}" for each in plans],
        # The shares are rounded down. Otherwise a note could say that a row with "95%" loses more
        # than 5 %.
        "of N": [f"{int(100 * each.speedup / each.workers)}%" for each in plans],
    }
    if speed is not None:
        columns["samples/s"] = [f"{each.speedup * speed:.0f}" for each in plans]
    columns["error, % above one"] = [_error(each) for each in plans]
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _error(plan: Plan) -> str:
    if plan.workers == 1:
        return "0"
    if plan.error is None:
        return "not known"
    replicas, period, percent = plan.error
    is_measured = (replicas, period) == (plan.workers, plan.sync_period)
    bound = "" if is_measured else "at most "
    return f"{bound}{percent:g} ({replicas} replicas, period {period})"


def _notes(plans: Sequence[Plan], options: argparse.Namespace) -> list[str]:
    """Returns notes on numbers of workers for which no options are within the limits."""
    slower = "no faster than one. A longer minibatch (more samples) or a faster link helps"
    unknown = "no error is known of so many replicas with these options"
    wrong = f"no error of at most {options.error:g} % is known with these options. Give --error"
    slow = (
        f"no period with an error of at most {options.error:g} % loses less than "
        f"{options.loss:.0%} of the speed; this one is the fastest. A longer minibatch, a faster "
        "link or fewer workers lose less"
    )
    told: dict[str, list[str]] = {slower: [], unknown: [], wrong: [], slow: []}
    for each in plans:
        if each.workers == 1 or (each.is_enough and each.speedup > 1):
            continue
        if each.speedup <= 1:
            note = slower
        elif each.error is None:
            note = unknown
        else:
            note = wrong if each.error.percent > options.error else slow
        told[note].append(str(each.workers))
    return [f"{', '.join(numbers)} workers: {text}." for text, numbers in told.items() if numbers]


def _errors(plans: Sequence[Plan]) -> str:
    """Returns the note that explains the column of errors."""
    formats = {each.compression for each in plans if each.workers > 1}
    compressed = bool(formats - {"none"})
    added = "; to those with int4 is added what it added in a shorter run" * ("int4" in formats)
    return (
        "Errors: by how much `BMUF()` got more wrong than one replica, by SGD on 40 minutes of "
        f"speech in eight epochs{', without compression' * compressed}{added}. In brackets is the "
        "measured case: of the next larger N, and of the next shorter or longer period, whichever "
        "was worse. A run with more syncs loses less, and one with fewer syncs more."
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Recommend a sync period and options for N workers: their speed and error.",
        usage=_USAGE,
        allow_abbrev=False,
    )
    add = parser.add_argument
    above_0 = _number(lambda x: x > 0, "a number above 0")
    at_least_0 = _number(lambda x: x >= 0, "a number of at least 0")
    at_least_1 = _number(lambda x: x >= 1, "a number of at least 1")
    add("--step_ms", type=above_0, help="time of a minibatch on one worker, in milliseconds")
    add(
        "--model_mb",
        type=above_0,
        help="size of the weights in float32, in megabytes (10^6 bytes)",
    )
    add("--link_mbit", type=above_0, help="speed of each worker's link, in Mbit/s")
    add(
        "--batch",
        type=at_least_1,
        help="samples in a minibatch of one worker; then the plan shows samples/s of all workers",
    )
    told = "delay in one direction in ms, about half of what ping shows (default: 0)"
    add("--link_delay_ms", type=at_least_0, help=told)
    add(
        "--sync_ms",
        type=at_least_0,
        help="time of a sync without the transfer: packing, rule, unpacking (default: 0)",
    )
    add(
        "--slowdown",
        type=at_least_1,
        help="how many times as long a minibatch takes when all workers train (default: 1)",
    )
    add(
        "--workers",
        type=_workers,
        default=[2, 4, 8, 16],
        help="numbers of workers, with commas (default: 2,4,8,16)",
    )
    add(
        "--loss",
        type=_number(lambda x: 0 < x < 1, "a share between 0 and 1"),
        default=0.05,
        help="share of the speed that the syncs may cost (default: 0.05)",
    )
    add(
        "--error",
        type=at_least_0,
        default=5.0,
        help="by how many %% the error may be above one replica's (default: 5)",
    )
    add("--overlap", choices=("auto", "no", "yes"), default="auto", help="syncs during training")
    add(
        "--compression",
        choices=("auto", *BITS),
        default="auto",
        help="format of the bytes between workers (default: auto, none, int8 or int4)",
    )
    add("--out", type=_writable, help="JSON file to write the plan into")
    add(
        "--hosts",
        type=lambda text: text.split(","),
        default=[],
        help="machines for --measure, with commas. ssh must reach them, and the script must be at "
        "the same path on each (default: two processes on this machine)",
    )
    add(
        "--measure",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the last flag: measure all numbers that you do not give. The script runs for some "
        "syncs, with the arguments that follow, on one worker and then on two, or on --hosts. Its "
        "callbacks are left out, and the code after its first `fit` does not run. With --link_mbit "
        "each worker is assumed to have a machine of its own",
    )
    return parser


def _number(valid: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and valid(value)):
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        if value and not 1 / _LARGEST <= value <= _LARGEST:
            raise argparse.ArgumentTypeError(
                f"{text} must be from {1 / _LARGEST:g} to {_LARGEST:g}: see the flag's unit"
            )
        return value

    return parse


def _workers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= 10**6 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text} must be whole numbers above 0, with commas: somebody must train"
        )
    return sorted({int(part) for part in parts})


def _writable(text: str) -> Path:
    """Checks that a file can be at a path, and returns the path; a `type` for argparse."""
    place = Path(text).absolute()
    if not os.path.isdir(place.parent):
        raise argparse.ArgumentTypeError(
            f"{text}: there is no folder {place.parent}. Make it first"
        )
    if not os.access(place.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {place.parent} cannot be written to")
    if os.path.exists(place) and not os.path.isfile(place):
        raise argparse.ArgumentTypeError(f"{place} exists and is no file. Give another path")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
