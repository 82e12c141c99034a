"""The suite `time` of `scripts.study`: how much sooner N replicas reach the error of one.

The error to be reached is that of one replica at the end of its run, plus the share --tolerance of
it. The learning rate falls to its lowest value over a whole run. So the error halfway through a run
is not that of a run of half the length, and each length needs a run of its own. For each task, N
and sync period τ, runs of `BMUF()` become longer, or shorter, by the factors --lengths, until one
reaches the error and the next shorter one does not. Between these two runs, the number of samples
is interpolated. The same is done with runs of all-reduce.

The trainings are simulations in one process, so the times are computed. One replica needs S₁
samples. N replicas need S(N, τ) samples, which they process faster by the speed-up s(N, τ) of the
cost model, equation 17 of paper 003 (`tfpara.planner`). Hence they reach the error S₁ / S(N, τ) ·
s(N, τ) times sooner.

The small networks of the study stand for a large one: --model_mb, --step_ms and --sync_ms are those
of the large one. All-reduce exchanges as many bytes as a sync, but in every step. It is assumed to
be at its best: its exchange costs no time but that of travel, and runs while the device computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

# `study_grid` imports scripts.common, which sets TensorFlow's log level. So `study_grid` must be
# imported before TensorFlow.
from scripts import study_grid  # isort: skip

from absl import flags

from scripts.study_grid import ALL_REDUCE, UNITS, Cell, Each
from tfpara.planner import Costs, Link, choose

_LENGTHS = flags.DEFINE_list(
    "lengths", ["0.5", "1", "2", "4"], "time: factors of a run's epochs; 1 is one"
)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 0.01, "time: by which part the error may be above that of one replica", 0.0
)
_LINKS = flags.DEFINE_list(
    "link_speeds", ["10000", "1000", "100"], "time: Mbit/s of the link of each worker"
)
_STEP = flags.DEFINE_float("step_ms", 50.0, "time: milliseconds of a minibatch, positive", 0.0)
_SIZE = flags.DEFINE_float("model_mb", 50.0, "time: megabytes of weights in float32, positive", 0.0)
_SYNC = flags.DEFINE_float("sync_ms", 200.0, "time: the part of a sync that is not travel", 0.0)
FLAGS = (_LENGTHS, _TOLERANCE, _LINKS, _STEP, _SIZE, _SYNC)

_RULE = "bmuf"
# int4 is not among the compressions, because its error was not measured for each period.
_COMPRESSIONS = ("none", "int8")
# `soonest` counts a setting as equally fast as the fastest if its speed-up is lower by at most this
# share. Among such settings it prefers those without compression, and then the shortest period.
_ALIKE = 0.02
# Maps the number of replicas to the speed-up of an epoch in a paper: in paper 003 for 4 and 8 GPUs
# of one machine, and in paper 001 for 16 machines.
PAPERS = {4: "2.7 to 3.8", 8: "4.6 to 7.5", 16: "9.3"}

# Maps the length of a run, as a multiple of the usual epochs, to its number of samples and error.
Curve = dict[float, tuple[float, float]]


class Best(NamedTuple):
    """The setting that reaches the error first.

    Attributes:
        times: how many times sooner than one replica.
        period: τ, minibatches.
        compression: as `PeriodicSyncStrategy` takes it.
    """

    times: float
    period: int
    compression: str


class Row(NamedTuple):
    """The results for N replicas on a task, with one speed of links.

    Attributes:
        task: the task.
        replicas: N.
        link_mbit: speed of each worker's link.
        alone: samples that one replica needs to reach the error.
        samples: samples that N replicas need, by sync period; None if they do not reach the error.
        all_reduce_samples: samples that all-reduce needs; None if it does not reach the error.
        best: the best setting of `BMUF()`; None if no setting reaches the error.
        planned: the setting that `tfpara-plan` chooses; None if it does not reach the error.
        all_reduce: how many times sooner than one replica all-reduce reaches the error, or None.
    """

    task: str
    replicas: int
    link_mbit: float
    alone: float
    samples: dict[int, float | None]
    all_reduce_samples: float | None
    best: Best | None
    planned: Best | None
    all_reduce: float | None

    def content(self) -> dict[str, Any]:
        """Returns the row for a JSON file."""
        settings = {name: getattr(self, name) for name in ("best", "planned")}
        return self._asdict() | {name: it and it._asdict() for name, it in settings.items()}


def settings() -> tuple[list[float], dict[float, Costs]]:
    """Returns the lengths of runs, and the costs by the links' speed in Mbit/s.

    Raises:
        ValueError: a flag of this suite has a wrong value.
    """
    lengths = sorted(set(_positive("lengths", _LENGTHS.value)))
    if 1.0 not in lengths:
        raise ValueError(
            f"--lengths={','.join(_LENGTHS.value)} must contain 1: that run of one replica has the "
            "error to be reached."
        )
    for flag in (_STEP, _SIZE):
        if not flag.value > 0.0:
            raise ValueError(f"--{flag.name}={flag.value} must be positive.")
    costs = {
        mbit: Costs(_STEP.value / 1e3, _SIZE.value * 1e6, Link.of_mbit(mbit), _SYNC.value / 1e3)
        for mbit in _positive("link_speeds", _LINKS.value)
    }
    return lengths, costs


def _positive(flag: str, values: Sequence[str]) -> list[float]:
    try:
        found = [float(value) for value in values]
    except ValueError:
        found = []
    if not found or not all(0.0 < value < math.inf for value in found):
        raise ValueError(f"--{flag}={','.join(values)} must be positive numbers, with commas.")
    return found


def train(
    out: Path, each: Each, lengths: Sequence[float]
) -> tuple[dict[str, float], dict[Cell, Curve]]:
    """Trains the runs of the suite that have no result yet.

    Args:
        out: directory of the runs.
        each: calls functions, several at a time, and returns their results in order.
        lengths: factors of a run's epochs, rising.

    Returns:
        The error to be reached, by task; and the curve of each way to train, by its cell of length
        1.
    """
    ways = study_grid.ways(out, each, [_RULE, ALL_REDUCE])
    curves: dict[Cell, Curve] = {way: {} for way in ways}
    targets: dict[str, float] = {}
    # The runs of one replica come before all others, because the error that the others must reach
    # is computed from the error of one replica.
    more = {way: 1.0 for way in ways if not way.rule}
    while more:
        cells = [
            way._replace(seed=seed, length=length)
            for way, length in more.items()
            for seed in study_grid.seeds()
        ]
        results = study_grid.results_of(out, cells, each)
        for way, length in more.items():
            found = [
                result
                for cell, result in results.items()
                if cell._replace(seed=way.seed, length=1.0) == way
            ]
            curves[way][length] = (found[0]["samples"], mean(map(study_grid.error_of, found)))
            if not way.rule and length == 1.0:
                targets[way.task] = curves[way][1.0][1] * (1.0 + _TOLERANCE.value)
        following = {
            way: next_length(lengths, curve, targets[way.task]) for way, curve in curves.items()
        }
        more = {way: length for way, length in following.items() if length is not None}
    return targets, curves


def next_length(lengths: Sequence[float], curve: Curve, target: float) -> float | None:
    """Returns the length of the next run: first 1, and then shorter or longer ones.

    Returns None once a run reaches the error and the next shorter one does not, or once no lengths
    are left.
    """
    if not curve:
        return 1.0
    down = curve[1.0][1] <= target
    latest = min(curve) if down else max(curve)
    if (curve[latest][1] <= target) != down:
        return None
    left = [length for length in lengths if (length < latest if down else length > latest)]
    return (max if down else min)(left, default=None)


def samples_needed(curve: Curve, target: float) -> float | None:
    """Returns the samples that are needed to reach the error; None if no run reaches it.

    They are between those of the shortest run that reaches the error, and of the next shorter run.
    Between these, the error is taken as a straight line over the logarithm of the samples. Without
    a shorter run, the result is an upper limit.
    """
    within = [length for length, (_, error) in curve.items() if error <= target]
    if not within:
        return None
    samples, error = curve[min(within)]
    shorter = [length for length in curve if length < min(within)]
    if not shorter or math.isinf(curve[max(shorter)][1]):
        return samples
    fewer, worse = curve[max(shorter)]
    return samples * (fewer / samples) ** ((target - error) / (worse - error))


def soonest(
    needed: dict[int, float | None], alone: float, costs: Costs, replicas: int
) -> Best | None:
    """Returns the best period and compression; None if the error is reached with no period.

    Args:
        needed: samples by period; None for periods that do not reach the error.
        alone: samples that one replica needs.
        costs: the costs with float32 on the link.
        replicas: N.
    """
    tried = [
        Best(alone / samples * costs.compressed(name).speedup(replicas, period), period, name)
        for name in _COMPRESSIONS
        for period, samples in sorted(needed.items())
        if samples is not None
    ]
    fastest = max((each.times for each in tried), default=0.0)
    return next((each for each in tried if each.times >= (1.0 - _ALIKE) * fastest), None)


def planned(
    needed: dict[int, float | None], alone: float, costs: Costs, replicas: int
) -> Best | None:
    """Returns the setting that `tfpara-plan` chooses; None if it does not reach the error.

    Arguments as in `soonest`. The samples are those of the same period, or else of the next longer
    one that was measured.
    """
    plan = choose(costs, replicas, overlaps=(False,), compressions=_COMPRESSIONS)
    samples = needed[min((p for p in needed if p >= plan.sync_period), default=max(needed))]
    if samples is None:
        return None
    return Best(alone / samples * plan.speedup, plan.sync_period, plan.compression)


def of_all_reduce(samples: float | None, alone: float, costs: Costs, replicas: int) -> float | None:
    """Returns how many times sooner all-reduce reaches the error; None if it never does."""
    if samples is None:
        return None
    best = dataclasses.replace(costs, local_seconds=0.0, overlap=True)
    return alone / samples * best.speedup(replicas, 1)


def rows(
    targets: dict[str, float], curves: dict[Cell, Curve], costs: dict[float, Costs]
) -> list[Row]:
    """Returns a row for each task, number of replicas and link."""
    needed = {way: samples_needed(curve, targets[way.task]) for way, curve in curves.items()}
    found = []
    for task, count in dict.fromkeys((way.task, way.replicas) for way in needed if way.rule):
        alone = next(each for way, each in needed.items() if way.task == task and not way.rule)
        # The error to be reached is the error of one replica's run of length 1, plus the tolerance.
        # So one replica always reaches it, and `alone` cannot be None.
        assert alone is not None
        mine = {w: each for w, each in needed.items() if (w.task, w.replicas) == (task, count)}
        periods = {way.period: each for way, each in mine.items() if way.rule == _RULE}
        reduced = next(each for way, each in mine.items() if way.rule == ALL_REDUCE)
        for mbit, cost in costs.items():
            best, plan = (choice(periods, alone, cost, count) for choice in (soonest, planned))
            times = of_all_reduce(reduced, alone, cost, count)
            found.append(Row(task, count, mbit, alone, periods, reduced, best, plan, times))
    return found


def page(targets: dict[str, float], found: Sequence[Row]) -> str:
    """Returns the tables in Markdown: times sooner by link, and samples by period."""
    links = list(dict.fromkeys(row.link_mbit for row in found))
    periods = sorted({period for row in found for period in row.samples})
    first = [
        f"| task | N | | {' | '.join(map(_link, links))} | papers |",
        "|---" * (4 + len(links)) + "|",
    ]
    second = [
        f"| task | N | all-reduce | {' | '.join(f'τ = {period}' for period in periods)} |",
        "|---" * (3 + len(periods)) + "|",
    ]
    for task, count in dict.fromkeys((row.task, row.replicas) for row in found):
        mine = [row for row in found if (row.task, row.replicas) == (task, count)]
        ours = [_shown_best(row.best) for row in mine]
        reduced = [_shown(row.all_reduce) for row in mine]
        head = f"| {task} | {count} |"
        first.append(f"{head} `BMUF()` | {' | '.join(ours)} | {PAPERS.get(count, '')} |")
        first.append(f"{head} all-reduce | {' | '.join(reduced)} | |")
        samples = [mine[0].all_reduce_samples, *(mine[0].samples[p] for p in periods)]
        parts = [each and each / mine[0].alone for each in samples]
        second.append(f"{head} {' | '.join(map(_shown, parts))} |")
    aims = ", ".join(f"{task} {value:.4g} ({UNITS[task]})" for task, value in targets.items())
    both = [row.planned.times / row.best.times for row in found if row.best and row.planned]
    by_plan = f"With the choice of `tfpara-plan` it is reached in {len(both)} of {len(found)} cases"
    if both:
        by_plan += f", {min(both):.2f} to {max(both):.2f} times as soon as with the best setting"
    return "\n\n".join(
        [
            f"The error to be reached is {100 * _TOLERANCE.value:g} % above that of one replica: "
            f"{aims}. A step takes {_STEP.value:g} ms, the weights have {_SIZE.value:g} MB, and a "
            f"sync takes {_SYNC.value:g} ms beside travel. Seeds: {len(study_grid.seeds())}.",
            "How many times sooner it is reached than by one replica:",
            "\n".join(first),
            "Samples needed, by those of one replica:",
            "\n".join(second),
            f"{by_plan}.\n",
        ]
    )


def _link(mbit: float) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def _shown(times: float | None) -> str:
    if times is None:
        return "not reached"
    return f"{times:.1f}" if times >= 1 else f"{times:.2f}"


def _shown_best(best: Best | None) -> str:
    if best is None:
        return "not reached"
    compression = f", {best.compression}" if best.compression != "none" else ""
    return f"{_shown(best.times)} (τ = {best.period}{compression})"
