"""Draws the pictures of docs/pictures, with Matplotlib:

    python -m scripts.docs.pictures [NAME...]

The pictures are checked in. So a code host shows them, and the site can be built without
TensorFlow; a test draws them again and compares. Paths of weights are computed by the rules of the
library, and times by its cost model. The charts of `scripts.docs.charts` are made from the tables
of docs/study.md and docs/benchmarks.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from scripts.docs.charts import error, link, many, time
from scripts.docs.drawing import (
    CURVES,
    GLOBAL,
    INK,
    MEAN,
    NEAR,
    REPLICAS,
    ROOT,
    SMALLEST,
    STEP,
    STYLE,
    SYNC,
    WAIT,
    WIDTH,
)  # fmt: skip
from tfpara.planner import Costs, Link

FOLDER = ROOT / "docs" / "pictures"


def draw(name: str, folder: Path) -> Path:
    """Draws a picture into a folder, and returns its file."""
    with plt.rc_context(STYLE):
        figure = PICTURES[name]()
        path = folder / f"{name}.svg"
        # The file contains no date and no version of Matplotlib, so each drawing gives the same
        # file.
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        plt.close(figure)
    # Matplotlib ends some lines with spaces. They have no meaning, so they are removed.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path


def _canvas(height: float, width: float, rows: float) -> tuple[Figure, Axes]:
    """Returns a figure without axes, `width` units wide and `rows` high, counted from the top."""
    figure = plt.figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(rows, 0)
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, x: float, y: float, w: float, h: float, colour: str, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=0.8))
    if text:
        axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=SMALLEST)


def _arrow(axes: Axes, start: Sequence[float], end: Sequence[float], colour: str = INK) -> None:
    arrow = FancyArrowPatch(
        tuple(start), tuple(end), arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.3,
        zorder=0.5,
    )  # fmt: skip
    axes.add_patch(arrow)


def _title(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, va="center", fontsize=10.5, fontweight="bold")


def _key(axes: Axes, x: float, y: float, entries: Sequence[tuple[str, str]], gap: float) -> None:
    for number, (colour, text) in enumerate(entries):
        _box(axes, x + number * gap, y - 0.17, 0.022 * axes.get_xlim()[1], 0.34, colour)
        axes.text(
            x + number * gap + 0.03 * axes.get_xlim()[1], y, text, va="center", fontsize=SMALLEST
        )


def block() -> Figure:
    """A block and its sync, beside an all-reduce in every step; times of the cost model."""
    costs = Costs(step_seconds=0.12, model_bytes=50e6, link=Link.of_mbit(1000))
    step, sync, end = costs.step_seconds, costs.sync_seconds(4), 4.2
    figure, axes = _canvas(4.3, end + 1.0, 12.0)
    left = 0.85
    for top, period, title in (
        (0.5, 1, "An all-reduce of the gradients in every step"),
        (6.0, 10, "A sync of the weights after every block of τ = 10 steps"),
    ):
        taken = 0
        _title(axes, 0.05, top, title)
        for replica in range(4):
            y, at, taken = top + 0.6 + replica * 0.85, 0.0, 0
            axes.text(0.05, y + 0.35, f"replica {replica}", va="center", fontsize=SMALLEST)
            while at + step <= end:
                _box(axes, left + at, y, step, 0.7, STEP)
                at, taken = at + step, taken + 1
                if taken % period == 0:
                    wide = min(sync, end - at)
                    _box(axes, left + at, y, wide, 0.7, SYNC)
                    at += sync
        rate = f"{taken} steps of each replica in {end:.1f} s"
        axes.text(left, top + 4.3, rate, va="center", fontsize=10)
    _key(
        axes, left, 11.5, [(STEP, "step: 0.12 s"), (SYNC, f"exchange of 50 MB: {sync:.2f} s")], 1.0
    )
    axes.text(end + 0.95, 11.5, "1 Gbit/s, to scale", va="center", ha="right", fontsize=SMALLEST)
    return figure


def batch() -> Figure:
    """A batch of 64 rows cut for four replicas."""
    figure, axes = _canvas(3.1, 66, 9.6)
    _title(axes, 1, 0.5, "batch_size=64 is the batch of all replicas together")
    for row in range(64):
        _box(axes, 1 + row, 1.1, 1, 1.0, REPLICAS[row // 16])
    axes.text(33, 2.6, "one batch: 64 rows", ha="center", va="center", fontsize=SMALLEST)
    for replica in range(4):
        middle = 9 + 16 * replica
        _arrow(axes, (middle, 3.0), (middle, 3.9), REPLICAS[replica])
        for row in range(16):
            _box(axes, middle - 7 + row * 0.875, 4.1, 0.875, 0.9, REPLICAS[replica])
        text = f"replica {replica}: 16 rows,\none step of its own"
        axes.text(middle, 5.9, text, ha="center", va="center", fontsize=SMALLEST)
    note = "To keep 64 rows for each replica, write batch_size=64 * strategy.num_replicas."
    axes.text(33, 7.6, note, ha="center", va="center", fontsize=10)
    note = "After τ such batches the replicas meet: that is a sync."
    axes.text(33, 8.7, note, ha="center", va="center", fontsize=10)
    return figure


def _loss_steps(weights: Any, best: Any, steps: int, rate: float = 0.14) -> list[Any]:
    """Returns the path of SGD on ½ (w − best)ᵀ H (w − best), with `best` for a replica's data."""
    curvature = np.array([1.0, 0.35])
    path = [weights]
    for _ in range(steps):
        path.append(path[-1] - rate * curvature * (path[-1] - best))
    return path


def lives(rule: Any, blocks: int = 3, period: int = 4) -> list[dict[str, Any]]:
    """Returns the weights of two replicas over some blocks under a rule of the library.

    Returns:
        For each block the two paths, the mean of their ends, the global model after the sync, and
        the weights from which the replicas go on.
    """
    rule = rule.resolve(2)
    best = (np.array([2.6, 0.4]), np.array([1.0, 2.4]))
    state = rule.init(np.zeros(2))
    local, out = [np.zeros(2), np.zeros(2)], []
    for _ in range(blocks):
        paths = [_loss_steps(w, b, period) for w, b in zip(local, best, strict=True)]
        mean = (paths[0][-1] + paths[1][-1]) / 2
        before, state = state, rule.update(state, mean, 2)
        sent = rule.broadcast(before, state)
        local = [np.asarray(rule.restart(path[-1], sent)) for path in paths]
        model = np.asarray(state.global_model)
        out.append({"paths": paths, "mean": mean, "global": model, "next": local})
    return out


def rules() -> Figure:
    """The paths of two weights over three syncs, by each rule."""
    # The import is here because it loads TensorFlow, which the other pictures do not need.
    from tfpara.algorithms import BMUF, BSP, EASGD, DiLoCo, SlowMo

    shown = {
        "BSP()": BSP(),
        "BMUF(0.5)": BMUF(0.5),
        "BMUF(0.5, nesterov=False)": BMUF(0.5, nesterov=False),
        "EASGD(0.3)": EASGD(0.3),
        "DiLoCo()": DiLoCo(),
        "SlowMo(1.0, 0.5)": SlowMo(1.0, 0.5),
    }
    figure, grid = plt.subplots(2, 3, figsize=(WIDTH, 5.6), sharex=True, sharey=True)
    for axes, (title, rule) in zip(grid.flat, shown.items(), strict=True):
        _life(axes, title, lives(rule))
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, fontsize=SMALLEST, frameon=False)
    figure.supxlabel("first weight", fontsize=SMALLEST, y=0.115)
    figure.supylabel("second weight", fontsize=SMALLEST, x=0.01)
    figure.subplots_adjust(left=0.08, right=0.99, top=0.94, bottom=0.21, hspace=0.2, wspace=0.08)
    return figure


def _life(axes: Axes, title: str, blocks: list[dict[str, Any]]) -> None:
    axes.set_title(title, fontsize=10, family="monospace")
    for number, found in enumerate(blocks):
        first = number == 0
        for replica, path in enumerate(found["paths"]):
            points = np.array(path)
            label = f"replica {replica}: four steps" if first else None
            axes.plot(
                *points.T, "-", color=REPLICAS[replica], lw=1.4, marker=".", ms=4, label=label
            )
            # The sync moves the replica from the end of its block to the point where its next block
            # begins.
            jump = np.array([points[-1], found["next"][replica]])
            label = "the sync moves a replica" if first and replica == 0 else None
            axes.plot(*jump.T, ":", color=SYNC, lw=1.3, label=label)
        mean, model = found["mean"], found["global"]
        axes.plot(*mean, "x", color=MEAN, ms=7, mew=1.8, label="mean w̄" if first else None)
        axes.plot(*model, "s", color=GLOBAL, ms=6, label="global model W" if first else None)
        label = "where replicas go on" if first else None
        for point in found["next"]:
            axes.plot(*point, "o", ms=8, mfc="none", mec=SYNC, mew=1.6, label=label)
            label = None
    axes.plot(0, 0, "o", color=INK, ms=4)
    axes.tick_params(labelsize=SMALLEST)


def momentum() -> Figure:
    """Momentum and rate of local SGD under a rule with momentum, by the sync period."""
    from tfpara.algorithms.local_momentum import in_a_block

    periods = np.unique(np.round(np.geomspace(1, 100, 60))).astype(int)
    values, factors = zip(*(in_a_block(0.9, float(tau)) for tau in periods), strict=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.7), sharex=True)
    left.plot(periods, values, color=CURVES[1], lw=1.8)
    left.set_title("local momentum (yours: 0.9)", fontsize=10)
    right.plot(periods, factors, color=CURVES[2], lw=1.8)
    right.set_title("learning rate, times yours", fontsize=10)
    right.set_ylim(0, None)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([1, 5, 20, 50, 100], ["1", "5", "20", "50", "100"])
        axes.minorticks_off()
        axes.set_xlabel("sync period τ", fontsize=SMALLEST)
        axes.tick_params(labelsize=SMALLEST)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.88, bottom=0.2, wspace=0.15)
    return figure


def together() -> Figure:
    """Two workers, of which only one calls `evaluate`."""
    figure, axes = _canvas(2.7, 40, 7.6)
    _title(axes, 0.4, 0.5, "evaluate on worker 0 alone: the workers do not meet")
    for worker in range(2):
        y = 1.4 + worker * 1.6
        axes.text(0.4, y + 0.5, f"worker {worker}", va="center", fontsize=SMALLEST)
        _box(axes, 6.0, y, 8.0, 1.0, STEP, "epoch 1")
        _box(axes, 14.0, y, 1.2, 1.0, SYNC)
    _box(axes, 15.2, 1.4, 6.0, 1.0, GLOBAL)
    axes.text(18.2, 1.9, "evaluate", ha="center", va="center", color="white", fontsize=SMALLEST)
    _box(axes, 21.2, 1.4, 5.0, 1.0, WAIT, "waits")
    _box(axes, 15.2, 3.0, 9.8, 1.0, STEP, "epoch 2")
    _box(axes, 25.0, 3.0, 1.2, 1.0, SYNC, "✗")
    axes.plot([26.3, 26.3], [1.1, 4.3], color=REPLICAS[2], lw=2)
    text = "both stop, and say\nwho was where"
    axes.text(26.9, 2.7, text, va="center", color=REPLICAS[2], fontsize=SMALLEST)
    note = (
        "Where the sync of worker 1 meets the evaluate of worker 0, both see that they are apart."
    )
    axes.text(0.4, 5.4, note, va="center", fontsize=SMALLEST)
    _key(axes, 0.4, 6.8, [(STEP, "local steps"), (SYNC, "sync"), (WAIT, "waiting")], 8.0)
    return figure


def overlap() -> Figure:
    """A sync that stops training, and one that travels while the next block trains."""
    figure, axes = _canvas(2.9, 40, 8.6)
    length, travel = 6.0, 3.0
    _title(axes, 0.4, 0.5, "overlap=False: training stops for each sync")
    at = 7.0
    axes.text(0.4, 1.55, "trains", va="center", fontsize=SMALLEST)
    for number in range(1, 4):
        _box(axes, at, 1.1, length, 0.9, STEP, f"block {number}")
        _box(axes, at + length, 1.1, travel, 0.9, SYNC, f"sync {number}")
        at += length + travel
    _title(axes, 0.4, 3.2, "overlap=True: the sync travels beside the next block")
    axes.text(0.4, 4.25, "trains", va="center", fontsize=SMALLEST)
    axes.text(0.4, 5.35, "link", va="center", fontsize=SMALLEST)
    for number in range(1, 6):
        at = 7.0 + (number - 1) * length
        _box(axes, at, 3.8, length, 0.9, STEP, f"block {number}")
        if number < 5:
            _box(axes, at + length, 4.9, travel, 0.9, SYNC, f"sync {number}")
            _arrow(axes, (at + length + travel, 5.35), (at + 2 * length, 4.7), SYNC)
    note = "Sync 1 is merged where block 2 ends: a replica keeps what it has learned since."
    axes.text(7.0, 6.75, note, va="center", fontsize=SMALLEST)
    _key(axes, 7.0, 7.9, [(STEP, "local steps"), (SYNC, "sync")], 8.0)
    return figure


def sharded() -> Figure:
    """The global model on every replica, and a part of it on each."""
    figure, axes = _canvas(3.3, 40, 9.6)
    titles = ('aggregation="replicated"', 'aggregation="sharded"')
    for side, title in enumerate(titles):
        left = 0.6 + side * 20.2
        _title(axes, left, 0.5, title)
        for replica in range(4):
            x = left + replica * 4.7
            axes.text(
                x + 2, 1.45, f"replica {replica}", ha="center", va="center", fontsize=SMALLEST
            )
            _box(axes, x, 2.0, 4.0, 1.1, REPLICAS[replica], "")
            axes.text(
                x + 2, 2.55, "weights", ha="center", va="center", color="white", fontsize=SMALLEST
            )
            for part in range(4):
                if side == 0 or part == replica:
                    _box(axes, x + part, 3.4, 1.0, 1.1, GLOBAL)
                else:
                    hollow = Rectangle((x + part, 3.4), 1, 1.1, fill=False, ec=WAIT, lw=0.8)
                    axes.add_patch(hollow)
    texts = (
        "Each replica keeps the whole global model,\nits momentum and averages.\n"
        "A sync is one all-reduce of the mean.",
        "Each replica keeps a quarter of them.\nA sync sends each owner its part "
        "(reduce-scatter),\nthen every part to all (all-gather).",
    )
    for side, text in enumerate(texts):
        axes.text(0.6 + side * 20.2, 6.2, text, va="center", fontsize=SMALLEST, linespacing=1.4)
    note = (
        "As many bytes travel in both; in the second the rule's work and memory are divided by N."
    )
    axes.text(0.6, 8.1, note, va="center", fontsize=SMALLEST)
    _key(axes, 0.6, 9.1, [(GLOBAL, "global model, momentum, averages")], 10.0)
    return figure


def levels() -> Figure:
    """Devices of a worker that sync often, and workers that sync seldom."""
    figure, axes = _canvas(3.4, 44, 10.0)
    _title(axes, 0.4, 0.5, "sync_period=12, device_sync_period=4")
    for worker in range(2):
        for device in range(2):
            y = 1.2 + worker * 3.4 + device * 1.3
            name = f"worker {worker}, device {device}"
            axes.text(0.4, y + 0.45, name, va="center", fontsize=SMALLEST)
            for step in range(24):
                x = 10.5 + step * 1.25 + (step // 4) * 0.35
                _box(axes, x, y, 1.25, 0.9, STEP)
        for point in range(1, 7):
            if point % 3:
                x = 10.5 + point * 5.0 + (point - 1) * 0.35
                _box(axes, x, 1.2 + worker * 3.4, 0.35, 2.2, NEAR)
    for point in (3, 6):
        x = 10.5 + point * 5.0 + (point - 1) * 0.35
        _box(axes, x, 1.2, 0.35, 5.6, SYNC)
    _key(axes, 0.4, 8.2, [(STEP, "step"), (NEAR, "a worker's devices average")], 6.0)
    axes.text(
        0.4,
        9.3,
        "All replicas sync, over the network, only at the tall bars.",
        fontsize=SMALLEST,
        va="center",
    )
    _key(axes, 24.0, 8.2, [(SYNC, "all replicas sync")], 6.0)
    return figure


def servers() -> Figure:
    """Workers that pull and push whenever they are ready."""
    figure, axes = _canvas(3.6, 40, 10.4)
    _title(axes, 0.4, 0.5, "Asynchronous: nobody waits; each pull and push takes a turn")
    axes.text(0.4, 1.75, "parameter\nservers", va="center", fontsize=SMALLEST)
    _box(axes, 6.5, 1.2, 33.0, 1.1, GLOBAL)
    axes.text(23, 1.75, "global model W", ha="center", va="center", color="white", fontsize=10)
    for worker, length in enumerate((5.0, 6.6, 9.4)):
        y, at = 4.1 + worker * 1.6, 7.0
        axes.text(0.4, y + 0.5, f"worker {worker}", va="center", fontsize=SMALLEST)
        while at + length <= 39.0:
            _box(axes, at, y, length - 0.5, 1.0, STEP, "τ steps")
            _arrow(axes, (at + 0.15, 2.3), (at + 0.15, y), MEAN)
            _arrow(axes, (at + length - 0.5, y), (at + length - 0.5, 2.3), SYNC)
            at += length
    _key(axes, 0.4, 9.5, [(STEP, "training"), (SYNC, "push"), (MEAN, "pull")], 8.0)
    return figure


def elastic() -> Figure:
    """A worker is lost, the others regroup, and it comes back."""
    figure, axes = _canvas(3.9, 46, 11.2)
    _title(axes, 0.4, 0.5, "elastic=tfpara.Elastic(): worker 2 is killed, and started again")
    regroup, join = 15.7, 36.0
    for worker in range(3):
        y = 2.0 + worker * 1.6
        axes.text(0.4, y + 0.5, f"worker {worker}", va="center", fontsize=SMALLEST)
        _box(axes, 6.0, y, 5.0, 1.0, STEP)
        _box(axes, 11.0, y, 1.0, 1.0, SYNC)
        _box(axes, 12.0, y, 2.5 if worker == 2 else 2.7, 1.0, STEP)
        if worker == 2:
            axes.text(16.2, y + 0.45, "✗ killed", va="center", color=REPLICAS[2], fontsize=10)
            _box(axes, 22.0, y, 13.0, 1.0, WAIT, "starts, builds, traces")
        else:
            _box(axes, 14.7, y, 1.0, 1.0, WAIT)
            for start, length in ((regroup, 2.3), (19.0, 7.0), (27.0, 7.0)):
                _box(axes, start, y, length, 1.0, STEP)
                _box(axes, start + length, y, 1.0, 1.0, SYNC)
        _box(axes, 35.0, y, 1.0, 1.0, WAIT)
        _box(axes, join, y, 6.0, 1.0, STEP)
        _box(axes, 42.0, y, 1.0, 1.0, SYNC)
    for x in (regroup, join):
        axes.plot([x, x], [1.2, 7.0], ls=(0, (4, 3)), color=INK, lw=1)
    for x, text in (
        (6.0, "generation 1: three workers"),
        (16.1, "generation 2: two workers"),
        (36.3, "generation 3"),
    ):
        axes.text(x, 1.45, text, va="center", fontsize=SMALLEST)
    note = (
        "The others meet at their next step. They train what worker 2 had trained since its last\n"
        "sync. Later worker 2 is started again, and takes over the state of another worker."
    )
    axes.text(0.4, 8.3, note, va="center", fontsize=SMALLEST, linespacing=1.4)
    _key(axes, 0.4, 10.5, [(STEP, "local steps"), (SYNC, "sync"), (WAIT, "meeting, start")], 9.0)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    each.__name__: each
    for each in (block, batch, rules, momentum, together, overlap, sharded, levels)
} | {each.__name__: each for each in (servers, elastic, error, link, time, many)}


def main(names: Sequence[str]) -> int:
    """Draws pictures, all unless some are named."""
    unknown = sorted(set(names) - set(PICTURES))
    if unknown:
        print(f"no picture {', '.join(unknown)}: there are {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        print(draw(name, FOLDER).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
