"""Charts of errors, speeds and times, which are read from the tables of docs/."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.docs.drawing import CURVES, MEAN, ROOT, SMALLEST, WAIT, WIDTH
from tfpara.planner import Costs, Link


def _rows(page: str, heading: str, header: str) -> list[list[str]]:
    """Returns the cells of the first table with this header under a heading of a page."""
    text = (ROOT / "docs" / page).read_text().split(f"\n{heading}\n", 1)[1]
    table = text.split(f"\n{header}\n", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]


def errors() -> dict[int, list[tuple[int, float, float]]]:
    """Returns by N: period, error and deviation, from the first table of docs/study.md."""
    found: dict[int, list[tuple[int, float, float]]] = {4: [], 8: [], 16: []}
    header = "| period | rule | N = 4 | N = 8 | N = 16 |"
    for period, _, *cells in _rows("study.md", "## Rules compared", header):
        for replicas, cell in zip(found, cells, strict=True):
            mean, deviation = re.match(r"([\d.]+) ± ([\d.]+)", cell).groups()  # type: ignore[union-attr]
            found[replicas].append((int(period), float(mean), float(deviation)))
    return found


def error() -> Figure:
    """Error against τ for N replicas."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.7))
    alone = re.search(
        r"One replica has\s+(\d+\.\d+) ± (\d+\.\d+)", (ROOT / "docs/study.md").read_text()
    )
    assert alone is not None
    mean, deviation = map(float, alone.groups())
    axes.axhspan(mean - deviation, mean + deviation, color=WAIT, alpha=0.5, lw=0)
    axes.axhline(mean, color=MEAN, lw=1.2, ls="--")
    axes.text(
        4.1,
        mean - 0.42,
        f"one replica: {mean:.2f} ± {deviation:.2f}",
        fontsize=SMALLEST,
        va="center",
    )
    for number, (replicas, points) in enumerate(errors().items()):
        periods, means, deviations = zip(*points, strict=True)
        colour = CURVES[number]
        axes.errorbar(periods, means, deviations, color=colour, marker="o", ms=5, capsize=3, lw=1.6)
        axes.text(
            periods[-1] * 1.08, means[-1], f"N = {replicas}", color=colour, va="center", fontsize=10
        )
    axes.set_xscale("log")
    axes.set_xlim(4, 115)
    axes.set_ylim(bottom=33.4)
    axes.set_xticks([5, 20, 80], ["5", "20", "80"])
    axes.minorticks_off()
    axes.set_xlabel("sync period τ, minibatches")
    axes.set_ylabel("wrong frames, %")
    axes.set_title("BMUF() on 40 minutes of speech, eight epochs, three seeds", fontsize=10)
    figure.subplots_adjust(left=0.1, right=0.97, top=0.91, bottom=0.15)
    return figure


def speeds() -> dict[str, list[tuple[float, float]]]:
    """Returns by system Mbit/s and samples/s of two workers, from docs/benchmarks.md."""
    header = "| system | loopback | 1000 Mbit/s | 100 Mbit/s |"
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    table = (
        text.split("samples/s of two workers, on loopback and on limited links:")[1]
        .split(header)[1]
        .split("\n\n")[0]
    )
    found = {}
    for row in table.strip().splitlines()[1:]:
        name, _, *limited = (cell.strip() for cell in row.strip("|").split("|"))
        found[name] = list(zip((1000.0, 100.0), map(float, limited), strict=True))
    return found


def link() -> Figure:
    """Samples/s against the link: measured points, and between them the cost model."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.9))
    measured = speeds()
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    alone, independent = (
        float(re.search(rf"^\| plain Keras{what} \| \d \| (\d+) \(", text, re.M)[1])  # type: ignore[index]
        for what in ("", ", independent")
    )
    batch_size = 256
    links = np.geomspace(30, 20000, 200)
    shown = {
        "tfpara, period 80, overlap": (CURVES[1], 80, True),
        "tfpara, period 80": (CURVES[0], 80, False),
        "tfpara, period 5": (CURVES[2], 5, False),
        "PyTorch DDP": (CURVES[3], 1, False),
    }
    for name, (colour, period, overlaps) in shown.items():
        if name.startswith("tfpara"):
            predicted = [
                Costs(
                    step_seconds=batch_size / alone,
                    model_bytes=50e6,
                    link=Link.of_mbit(mbit),
                    slowdown=2 * alone / independent,
                    overlap=overlaps,
                ).speedup(2, period) * alone
                for mbit in links
            ]  # fmt: skip
            axes.plot(links, predicted, color=colour, lw=1.3, label=name)
        label = None if name.startswith("tfpara") else f"{name}, all-reduce in every step"
        axes.plot(*zip(*measured[name], strict=True), "o", color=colour, ms=7, label=label)
    axes.axhline(independent, color=MEAN, lw=1, ls="--")
    axes.text(31, independent + 90, "two processes that never meet", fontsize=SMALLEST)
    axes.set_xscale("log")
    axes.set_xticks([100, 1000, 10000], ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
    axes.minorticks_off()
    axes.set_ylim(0, 4900)
    axes.set_ylabel("samples/s of two workers")
    axes.set_title(
        "12.5 million weights: measured (dots), predicted by tfpara-plan (lines)", fontsize=10
    )
    axes.legend(fontsize=SMALLEST, frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.3))
    figure.subplots_adjust(left=0.1, right=0.98, top=0.91, bottom=0.1)
    return figure


LINKS = ("10 Gbit/s", "1 Gbit/s", "100 Mbit/s")


def _rows_of_times() -> list[list[str]]:
    header = f"| task | N | | {' | '.join(LINKS)} | papers |"
    return _rows("study.md", "## How much sooner", header)


def papers() -> dict[int, tuple[float, float]]:
    """Returns by N the lowest and the highest speed-up in the papers, from docs/study.md."""
    told = {int(row[1]): row[-1].split(" to ") for row in _rows_of_times() if row[-1]}
    return {count: (float(ends[0]), float(ends[-1])) for count, ends in told.items()}


def times() -> dict[str, dict[tuple[str, str], dict[int, float]]]:
    """Returns by task, and by rule and link, how many times sooner N replicas have the error.

    The table is in docs/study.md. A cell "not reached" gives no number.
    """
    found: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for task, count, rule, *cells, _ in _rows_of_times():
        curves = found.setdefault(task, {})
        for name, cell in zip(LINKS, cells, strict=True):
            points = curves.setdefault((rule.strip("`"), name), {})
            if cell != "not reached":
                points[int(count)] = float(cell.split()[0])
    return found


def time() -> Figure:
    """Times sooner that one replica's error is reached, against N, for links of three speeds."""
    tasks = times()
    figure, panels = plt.subplots(1, len(tasks), sharey=True, squeeze=False, figsize=(WIDTH, 3.9))
    for axes, (task, curves) in zip(panels[0], tasks.items(), strict=True):
        axes.plot([1, 16], [1, 16], color=MEAN, lw=1, ls=":", label="N times")
        for count, (low, high) in papers().items():
            label = "speed in the papers" if count == 4 else None
            axes.plot([count] * 2, [low, high], color=WAIT, lw=7, label=label, zorder=1)
        if not any(curves.values()):
            axes.text(4, 0.5, "not reached", ha="center", va="center", fontsize=SMALLEST)
        links = list(dict.fromkeys(name for _, name in curves))
        for (rule, name), points in curves.items():
            reduced = rule == "all-reduce"
            if not points:
                continue
            # The curve of a rule begins at one replica, where the speed-up is 1 by definition. The
            # curve of all-reduce has only the numbers of replicas that are in the table.
            if not reduced:
                points = {1: 1.0} | points
            axes.plot(
                *zip(*sorted(points.items()), strict=True),
                color=CURVES[links.index(name)],
                ls="--" if reduced else "-",
                marker="" if reduced else "o",
                ms=4,
                lw=1.4,
                label=f"{rule}, {name}",
            )
        ticks = {1 / 32: "1/32", 1 / 8: "1/8", 1 / 2: "1/2", 2: "2", 8: "8"}
        _against_replicas(axes, task, (1, 2, 4, 8, 16), ticks)
        axes.set_ylim(0.025, 20)
    panels[0][0].set_ylabel("times as soon as one replica")
    return _with_legend(figure, bottom=0.36)


def _against_replicas(
    axes: Axes, title: str, numbers: Sequence[int], ticks: Mapping[float, str]
) -> None:
    """Gives a panel a title and logarithmic axes: N, and one with these ticks."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(numbers, map(str, numbers))
    axes.set_yticks(list(ticks), ticks.values())
    axes.minorticks_off()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("replicas N")


def _with_legend(figure: Figure, bottom: float) -> Figure:
    """Adds the first panel's legend below all panels, in the share `bottom` of the height."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=SMALLEST, frameon=False, ncols=3, loc="lower center")
    figure.subplots_adjust(left=0.1, right=0.98, top=0.92, bottom=bottom, wspace=0.08)
    return figure


def syncs() -> dict[str, dict[str, dict[int, float]]]:
    """Returns by link, way and N the time of a sync over the shortest possible time.

    The table is in docs/benchmarks.md.
    """
    ways = ["replicated", "sharded", "two levels", "bf16", "int8", "int4"]
    ways += ["Horovod", "PyTorch", "torchft"]
    found: dict[str, dict[str, dict[int, float]]] = {}
    header = f"| link | N | {' | '.join(ways)} |"
    for name, count, *cells in _rows("benchmarks.md", "## Many workers", header):
        curves = found.setdefault(name, {way: {} for way in ways})
        for way, cell in zip(ways, cells, strict=True):
            if cell:
                curves[way][int(count)] = float(cell)
    return found


def many() -> Figure:
    """The time of a sync over the shortest possible time, against N, for links of two speeds."""
    measured = syncs()
    figure, panels = plt.subplots(
        1, len(measured), sharey=True, squeeze=False, figsize=(WIDTH, 3.5)
    )
    for axes, (name, curves) in zip(panels[0], measured.items(), strict=True):
        axes.axhline(1, color=MEAN, lw=1, ls=":", label="shortest possible time")
        shown = ("replicated", "two levels", "Horovod", "PyTorch")
        for colour, way in zip(CURVES, shown, strict=True):
            points = sorted(curves[way].items())
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", ms=4, lw=1.4, label=way)
        ticks = {each: f"{each:g}" for each in (1, 1.5, 2, 3, 4)}
        _against_replicas(axes, name, (2, 4, 8, 16), ticks)
    panels[0][0].set_ylabel("time of a sync / shortest time")
    return _with_legend(figure, bottom=0.31)
