"""The suite `peers` of scripts.benchmarks: tfpara beside its alternatives.

All train the same network (1320-6x1024-5723) on one minibatch in memory, by SGD with momentum, with
one thread for each worker. `scaling` is the speed of two workers over that of one process of the
same system. `ratio_to_independent` is their speed over that of two independent processes of plain
Keras in the same round. Systems that are not installed, or that fail, are listed, too.

The limited links are cables between two network namespaces (scripts.benchmarks.links).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

import tfpara
from scripts import common
from scripts.benchmarks import links
from scripts.benchmarks.links import Loopback, Namespaces
from scripts.benchmarks.processes import measure, medians
from scripts.benchmarks.systems import INDEPENDENT, TORCH_LOOPS, System, elements_of, systems_of

_LINKS = flags.DEFINE_list(
    "link_mbit",
    ["1000", "100"],
    "suite peers: limited links to measure too, in Mbit/s (needs root); empty for none",
)
DELAY = flags.DEFINE_float(
    "link_delay_ms", 10.0, "delay of a limited link, where the kernel has netem", lower_bound=0.0
)
_LINK_ROUNDS = flags.DEFINE_integer(
    "link_rounds", 1, "times that everything is measured on each limited link", lower_bound=1
)
TORCH = flags.DEFINE_string(
    "torch_python", None, "python that has torch and torchft; without it they are left out"
)
# The flag is not a list, because absl cuts lists at commas, and names of systems have commas.
_ONLY = flags.DEFINE_string(
    "only", "", "only systems whose names begin with one of these, ; between them"
)

LOOPBACK = "loopback"
# A system that averages at every step must end with equal weights on all workers. The norms of the
# workers' weights may differ by at most this fraction.
_EQUAL = 1e-6
_SECONDS = 300.0


def limited_mbit() -> list[float]:
    """Returns the speeds of the limited links that the flags ask for, in Mbit/s.

    Raises:
        Failure: a value is no speed, or this process may not make limited links.
    """
    with common.bad_input():
        speeds = [float(mbit) for mbit in _LINKS.value]
    for speed in speeds:
        if not 0.1 <= speed <= 1e6:
            raise common.Failure(f"--link_mbit={speed:g} must lie between 0.1 and 1000000 Mbit/s.")
    problem = links.problem() if speeds else None
    if problem:
        raise common.Failure(f"{problem}. --link_mbit= (empty) measures without limited links.")
    return speeds


def measured(
    sizes: dict[str, int], periods: list[int], steps: int, rounds: int, limits: list[float]
) -> Iterator[dict[str, Any]]:
    """Measures all systems on all links.

    Args:
        sizes: `batch`, `inputs`, `layers`, `width`, `classes`.
        periods: sync periods of tfpara.
        steps: timed minibatches at the longest period.
        rounds: number of rounds on loopback.
        limits: speeds of the limited links, in Mbit/s.

    Yields:
        After each link: all rows so far, (name, Mbit/s, ms) of the limited links, and notes.
    """
    systems = systems_of(sizes, periods, steps)
    names = chosen([s.name for s in systems])
    systems = [s for s in systems if s.name in names]
    rows = _measure_at(LOOPBACK, Loopback(), systems, rounds)
    speeds = {r["system"]: r["samples_per_second"] for r in rows if "samples_per_second" in r}
    made: list[tuple[str, float, float]] = []
    notes: list[str] = []
    yield {"rows": rows, "links": made, "notes": notes}
    for mbit in limits:
        label = f"{mbit:g} Mbit/s"
        limited = [_shortened(s, mbit) for s in systems if s.workers > 1 and s.name != INDEPENDENT]
        with links.limited(mbit, DELAY.value) as place:
            made.append((label, mbit, place.delay_ms))
            if place.delay_ms != DELAY.value:
                notes.append(
                    f"The {label} link has no added delay, because the kernel lacks the module "
                    "netem"
                )
            rows += _measure_at(label, place, limited, _LINK_ROUNDS.value, speeds)
        yield {"rows": rows, "links": made, "notes": notes}


def chosen(names: list[str]) -> list[str]:
    """Returns the systems that --only asks for.

    Raises:
        Failure: --only asks for none of them.
    """
    if not _ONLY.value:
        return names
    beginnings = tuple(part.strip() for part in _ONLY.value.split(";") if part.strip())
    found = [name for name in names if name.startswith(beginnings)]
    if not found:
        known = "; ".join(names)
        raise common.Failure(f"--only={_ONLY.value} names no system. There are: {known}.")
    return found


def _shortened(system: System, mbit: float) -> System:
    """Returns the system with fewer exchanges on a slow link, for about 15 seconds."""
    options = dict(system.options)
    elements = options.get("elements") or elements_of(options)
    seconds = 4 * elements * 8 / (mbit * 1e6)
    if options["system"] == "syncs":
        options["syncs"] = min(options["syncs"], max(2, int(15 / (3 * seconds))))
        return dataclasses.replace(system, options=options)
    period = options["sync_period"] if options.get("sync_period") else 1
    exchanges = max(2, int(15 / seconds))
    if options["steps"] > exchanges * period:
        options["steps"] = exchanges * period
    if "warm_up" in options:
        options["warm_up"] = 1
    return dataclasses.replace(system, options=options)


def _measure_at(
    label: str,
    place: Loopback | Namespaces,
    systems: list[System],
    rounds: int,
    speeds: dict[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Returns the rows of one link; `speeds` are those on loopback, of other systems."""
    results: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        found = {}
        for system in systems:
            found[system.name] = _measure(system, place)
            shown = ", ".join(
                f"{k} {v if isinstance(v, str) else format(v, '.4g')}"
                for k, v in found[system.name].items()
            )
            print(f"{label}, round {number + 1}  {system.name}: {shown}", flush=True)
        results.append(found)
    return [_row(label, system, results, speeds or {}) for system in systems]


def _measure(system: System, place: Loopback | Namespaces) -> dict[str, Any]:
    """Returns the figures of a system, or the reason why there are none."""
    why = _missing(system)
    if why:
        return {"missing": why}
    options = {**system.options, "interface": place.interface}
    try:
        figures = measure(
            system.workers,
            options,
            module=system.module,
            python=_python(system),
            place=place,
            seconds=_SECONDS,
        )
    except common.Failure as failure:
        return {"failed": " ".join(str(failure).split())[-500:]}
    if system.per_step and figures["weights_differ"] > _EQUAL:
        return {"failed": "its workers ended with different weights, so it did not average"}
    figures.pop("weights_differ", None)
    return figures


def _missing(system: System) -> str | None:
    python = _python(system)
    if python is None:
        return "not installed: --torch_python names no python that has it"
    if system.package and version_of(system.package, python) is None:
        return f"not installed: {python} cannot import {system.package}"
    known = inspect.signature(tfpara.PeriodicSyncStrategy).parameters
    unknown = [name for name in system.options.get("strategy", {}) if name not in known]
    return f"tfpara {tfpara.__version__} has no {' or '.join(unknown)}=" if unknown else None


def _python(system: System) -> str | None:
    """Returns the system's Python interpreter; None if it needs PyTorch and no flag names one."""
    return TORCH.value if system.module == TORCH_LOOPS else sys.executable


@functools.cache
def version_of(package: str, python: str) -> str | None:
    """Returns the version of an interpreter's package; None if it cannot be imported."""
    name = package.split(".")[0]
    code = f"import {package}; from importlib import metadata; print(metadata.version({name!r}))"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return ended.stdout.split()[-1] if ended.returncode == 0 and ended.stdout.split() else None


def versions() -> dict[str, str]:
    """Returns the versions of the peers that are installed."""
    pythons = {"horovod.tensorflow": sys.executable}
    if TORCH.value:
        pythons |= {"torch": TORCH.value, "torchft": TORCH.value}
    found = {p.split(".")[0]: version_of(p, python) for p, python in pythons.items()}
    return {package: version for package, version in found.items() if version}


def _row(
    link: str,
    system: System,
    rounds: list[dict[str, dict[str, Any]]],
    speeds: dict[str, float],
) -> dict[str, Any]:
    """Returns the medians over the rounds that gave figures, with the extremes of each."""
    row: dict[str, Any] = {
        "link": link,
        "system": system.name,
        "family": system.family,
        "workers": system.workers,
        "sync_period": 1 if system.per_step else system.options.get("sync_period"),
        "per_step": system.per_step,
        "strategy": system.options.get("strategy", {}),
    }
    good = [r for r in rounds if not {"missing", "failed"} & set(r[system.name])]
    if not good:
        return row | rounds[-1][system.name]
    values = {key: [r[system.name][key] for r in good] for key in good[0][system.name]}
    for key, other in (("scaling", system.alone), ("ratio_to_independent", INDEPENDENT)):
        bases = [r.get(other, {}).get("samples_per_second", speeds.get(other)) for r in good]
        if "samples_per_second" in values and all(bases):
            own = values["samples_per_second"]
            values[key] = [a / b for a, b in zip(own, bases, strict=True)]
    return row | medians(values)
