"""The suite `replicas` of `scripts.study`: rules over numbers of replicas and sync periods.

For each task the learning rate is chosen for one replica, by its validation error. With that rate
every rule trains with every number of replicas, sync period and seed, on the same number of
samples. The validation error is that of the last model.

`all-reduce` stands for N replicas that average their gradients in each step: it is one replica with
minibatches N times as large. It has no sync period. For each N, it has the best of three rates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from scripts import common  # isort: skip  # sets TensorFlow's log level, so it comes first

from absl import flags

ALL_REDUCE = "all-reduce"
_RULES = {
    "bmuf": ("BMUF", ("--rule=bmuf",)),
    "bmuf-constant": ("BMUF, no warm-up", ("--rule=bmuf", "--noblock_momentum_warmup")),
    "bmuf-plain": ("BMUF, no local momentum", ("--rule=bmuf", "--nolocal_momentum")),
    "bmuf-dense-first": ("BMUF, period 5 in the first epoch", ("--rule=bmuf", "--first_period=5")),
    "bmuf-int8": ("BMUF, int8", ("--rule=bmuf", "--compression=int8")),
    "bmuf-int4": ("BMUF, int4", ("--rule=bmuf", "--compression=int4")),
    "bmuf-adam": ("BMUFAdam", ("--rule=bmuf_adam",)),
    "bsp": ("BSP", ("--rule=bsp",)),
    "easgd": ("EASGD", ("--rule=easgd",)),
    "diloco": ("DiLoCo", ("--rule=diloco",)),
    "slowmo": ("SlowMo", ("--rule=slowmo",)),
    "downpour": ("Downpour", ("--rule=downpour",)),
    # With ζ = 1/N, the servers add the mean of the workers' updates. With ζ = 1, they add the sum.
    "downpour-mean": ("Downpour, ζ = 1/N", ("--rule=downpour", "--block_learning_rate={share}")),
    "bmuf-async": ("asynchronous BMUF", ("--rule=bmuf_async",)),
    "easgd-async": ("asynchronous EASGD", ("--rule=easgd_async",)),
    ALL_REDUCE: ("all-reduce", ("--rule=none", "--all_reduce={count}")),
}
_RATES = {
    "speech": (0.01, 0.02, 0.05),
    "characters": (0.002, 0.004, 0.008),
    "digits": (0.01, 0.02, 0.05),
}
UNITS = {
    "speech": "frame error %",
    "characters": "bits per character",
    "digits": "error %",
}
_TASKS = flags.DEFINE_list(
    "tasks", list(UNITS), "replicas and time: what is learned; see study_task"
)
_COUNTS = flags.DEFINE_list(
    "counts", ["2", "4", "8", "16"], "replicas and time: numbers of replicas, above 1"
)
_PERIODS = flags.DEFINE_list(
    "periods", ["5", "20", "80"], "replicas and time: sync periods in minibatches"
)
_CHOSEN = flags.DEFINE_list(
    "rules",
    ["bmuf", "bsp", "easgd"],
    f"replicas: of {', '.join(_RULES)}; bmuf-adam for characters, which train with AdamW, and "
    "bmuf-plain for the others",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "replicas and time: of weights and data order")
_PASSES = flags.DEFINE_float("passes", 1.0, "replicas and time: factor of the tasks' epochs", 0.0)
FLAGS = (_TASKS, _COUNTS, _PERIODS, _SEEDS, _PASSES)  # the suite `time` uses these flags, too
OWN_FLAGS = (_CHOSEN,)

_DECAY = "0.8"
_WEIGHTS = {"global": "", f"ema-{_DECAY}": f", EMA({_DECAY})"}
# Maps a number of replicas to the study's aim for this number: the error of the default rule is
# larger than the error of one replica by at most this share of the latter.
_AIMS = {4: 0.01, 8: 0.03, 16: 0.05}


class Cell(NamedTuple):
    """A training run. If `rule` is empty, the run has one replica, and its `period` is 0.

    For `all-reduce` the period is 1. `length` is a factor of the epochs; the learning rate falls
    over all epochs of the run.
    """

    task: str
    rule: str
    replicas: int
    period: int
    seed: int
    rate: float
    length: float = 1.0

    @property
    def name(self) -> str:
        rule = f"-{self.rule}-{self.replicas}-{self.period}" if self.rule else "-1"
        length = f"-length-{self.length:g}" if self.length != 1.0 else ""
        return f"{self.task}{rule}-rate-{self.rate:g}-seed-{self.seed}{length}"

    def command(self, out: Path) -> list[str]:
        given = {"count": self.replicas, "share": 1.0 / self.replicas}
        options = _RULES[self.rule][1] if self.rule else ("--rule=none",)
        rule = [option.format(**given) for option in options]
        if self.rule not in ("", ALL_REDUCE):
            simulated = f"--simulate_replicas={self.replicas}"
            rule += [simulated, f"--sync_period={self.period}", f"--ema_decay={_DECAY}"]
        return [
            "scripts.study_task",
            f"--task={self.task}",
            *([f"--corpus={out / 'corpus'}"] if self.task == "speech" else []),
            f"--out={self.file(out)}",
            f"--rate={self.rate}",
            f"--seed={self.seed}",
            f"--epochs={_PASSES.value * self.length}",
            *rule,
        ]

    def file(self, out: Path) -> Path:
        """Returns the path of the result, which is written at the end of the training."""
        return out / "runs" / f"{self.name}.json"


Results = dict[Cell, dict[str, Any]]
Each = Callable[[Iterable[Callable[[], Any]]], list[Any]]


def tasks() -> list[str]:
    """Returns the value of --tasks.

    Raises:
        ValueError, Failure: a flag of this suite has an unknown value.
    """
    _checked("tasks", _TASKS.value, UNITS)
    _checked("rules", _CHOSEN.value, _RULES)
    common.whole_numbers(_COUNTS, 2)
    common.whole_numbers(_PERIODS)
    common.whole_numbers(_SEEDS, 0)
    for rule, of_adam in (("bmuf-adam", True), ("bmuf-plain", False)):
        if rule in _CHOSEN.value and any((t == "characters") != of_adam for t in _TASKS.value):
            known = [task for task in UNITS if (task == "characters") == of_adam]
            raise ValueError(
                f"--rules={rule} is for --tasks={','.join(known)}: characters train with AdamW, "
                "the others with SGD."
            )
    if not _PASSES.value > 0.0:
        raise ValueError(f"--passes={_PASSES.value} must be positive.")
    return list(_TASKS.value)


def check_setting(out: Path, setting: dict[str, Any]) -> None:
    """Records the settings that all runs of a directory share and that their names do not contain.

    Args:
        out: the directory.
        setting: the flags' values by name; this function adds the flag of this module.

    Raises:
        ValueError: the runs in the directory were made with other settings.
    """
    setting = {**setting, _PASSES.name: _PASSES.value}
    file = out / "setting.json"
    if not file.exists():
        common.write_json(file, setting)
    former = json.loads(file.read_text())
    if former != setting:
        shown = " ".join(f"--{name}={value}" for name, value in former.items())
        raise ValueError(f"the runs in --out={out} were made with {shown}. Give these, or another.")


def train(out: Path, each: Each) -> Results:
    """Trains the runs of the suite that have no result yet, and returns the results of all.

    Args:
        out: directory of the runs.
        each: calls functions, several at a time, and returns their results in order.
    """
    cells = ways(out, each, _CHOSEN.value)
    return results_of(out, [cell._replace(seed=seed) for seed in seeds() for cell in cells], each)


def seeds() -> list[int]:
    """Returns the value of --seeds."""
    return common.whole_numbers(_SEEDS, 0)


def ways(out: Path, each: Each, rules: Sequence[str]) -> list[Cell]:
    """Returns the runs of the first seed, with their learning rates; those of one replica first.

    Trains what is needed to choose the rates.
    """
    first = seeds()[0]
    counts, periods = common.whole_numbers(_COUNTS, 2), common.whole_numbers(_PERIODS)
    rates = [Cell(task, "", 1, 0, first, rate) for task in tasks() for rate in _RATES[task]]
    results = results_of(out, rates, each)
    chosen = {}
    for task in tasks():
        errors = {cell.rate: error_of(results[cell]) for cell in rates if cell.task == task}
        chosen[task] = min(errors, key=errors.__getitem__)
        if math.isinf(errors[chosen[task]]):
            raise common.Failure(f"{task}: one replica diverges with every learning rate.")
        print(f"  {task}: learning rate {chosen[task]:g}, the best for one replica", flush=True)
    cells = [Cell(task, "", 1, 0, first, chosen[task]) for task in tasks()]
    if ALL_REDUCE in rules:
        cells += _all_reduce(out, chosen, counts, first, each)
    return cells + [
        Cell(task, rule, count, period, first, chosen[task])
        for task in tasks()
        for count in counts
        for period in periods
        for rule in rules
        if rule != ALL_REDUCE
    ]


def _all_reduce(
    out: Path, chosen: dict[str, float], counts: list[int], seed: int, each: Each
) -> list[Cell]:
    """Returns runs of all-reduce, with the best of 1, √N and N times one replica's rate."""
    tried = {
        (task, count): [
            Cell(task, ALL_REDUCE, count, 1, seed, float(f"{rate * factor:.3g}"))
            for factor in (1.0, math.sqrt(count), count)
        ]
        for task, rate in chosen.items()
        for count in counts
    }
    results = results_of(out, [cell for cells in tried.values() for cell in cells], each)
    return [min(cells, key=lambda cell: error_of(results[cell])) for cells in tried.values()]


def results_of(out: Path, cells: list[Cell], each: Each) -> Results:
    """Returns the results of runs; trains those that have no result yet."""
    (out / "runs").mkdir(parents=True, exist_ok=True)
    left = sum(not cell.file(out).is_file() for cell in cells)
    if left:
        print(f"{left} runs of {len(cells)} ...", flush=True)

    def of(cell: Cell) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            if not cell.file(out).is_file():
                line = common.call(out / "runs", cell.name, cell.command(out))[-1]
                print(f"  {cell.name}: {line.rpartition(': ')[2]}", flush=True)
            return json.loads(cell.file(out).read_text())

        return run

    return dict(zip(cells, each(map(of, cells)), strict=True))


def error_of(result: dict[str, Any], weights: str = "global") -> float:
    """Returns the validation error at the end; infinite if the training has diverged."""
    error = result["errors"].get(weights)
    return math.inf if error is None or math.isnan(error) else error


def page(results: Results) -> str:
    """Returns the tables, and the results that miss an aim, in Markdown."""
    parts = []
    for task in dict.fromkeys(cell.task for cell in results):
        single = [error_of(found) for cell, found in results.items() if _is_single(cell, task)]
        rate = next(cell.rate for cell in results if cell.task == task)
        parts.append(
            f"## {task}\n\nValidation {UNITS[task]}, mean and deviation over {len(single)} "
            f"seed{'s' * (len(single) != 1)}; one replica: {_spread(single)} (learning rate "
            f"{rate:g}). In brackets: EMA ({_DECAY}) of the global model."
        )
        parts.append(_table(task, results))
        beyond = _beyond(task, results)
        parts.append(f"Beyond the aims ({_aims()}): {'; '.join(beyond) or 'none'}.")
    return "\n\n".join(parts) + "\n"


def _table(task: str, results: Results) -> str:
    counts = sorted({cell.replicas for cell in results if cell.rule})
    lines = [
        f"| period | rule | {' | '.join(f'N = {count}' for count in counts)} |",
        "|---" * (2 + len(counts)) + "|",
    ]
    for period, rule in dict.fromkeys((c.period, c.rule) for c in results if c.rule):
        shown = []
        for count in counts:
            key = (task, rule, count, period)
            errors, averaged = (_errors(results, key, weights) for weights in _WEIGHTS)
            of_average = f" ({_spread(averaged)})" if rule != ALL_REDUCE else ""
            shown.append(f"{_spread(errors)}{of_average}" if errors else "")
        lines.append(f"| {period} | {_RULES[rule][0]} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _beyond(task: str, results: Results) -> list[str]:
    """Returns the cases in which the default rule is worse than the aims allow."""
    single = mean(error_of(found) for cell, found in results.items() if _is_single(cell, task))
    found = []
    for key in dict.fromkeys(cell[:4] for cell in results if cell.rule == "bmuf"):
        _, _, count, period = key
        if key[0] != task or count not in _AIMS:
            continue
        more = mean(_errors(results, key, "global")) / single - 1.0
        if more > _AIMS[count]:
            shown = f"{100 * more:+.1f} %" if math.isfinite(more) else "diverged"
            found.append(f"N = {count}, period {period}: {shown}")
    return found


def _aims() -> str:
    return ", ".join(f"N = {count}: {100 * part:g} %" for count, part in _AIMS.items())


def _is_single(cell: Cell, task: str) -> bool:
    return cell.task == task and not cell.rule


def _errors(results: Results, key: tuple[str, str, int, int], weights: str) -> list[float]:
    """Returns the errors of all seeds."""
    return [error_of(found, weights) for cell, found in results.items() if cell[:4] == key]


def _spread(errors: Sequence[float]) -> str:
    if not all(map(math.isfinite, errors)):
        return "diverged"
    deviation = f" ± {stdev(errors):.2g}" if len(errors) > 1 else ""
    return f"{mean(errors):.4g}{deviation}"


def draw(results: Results, out: Path) -> None:
    """Draws error against N, and the learning curves of the largest N, for each task."""
    pyplot = common.pyplot("svg")
    for task in dict.fromkeys(cell.task for cell in results):
        mine = {cell: found for cell, found in results.items() if cell.task == task}
        periods = sorted({cell.period for cell in mine if cell.rule})
        for name, plot in (("error", _plot_errors), ("curves", _plot_curves)):
            figure, panels = pyplot.subplots(
                1, len(periods), sharey=True, squeeze=False, figsize=(4 * len(periods), 3.6)
            )
            for panel, period in zip(panels[0], periods, strict=True):
                plot(panel, period, mine)
                panel.set_title(f"sync period {period}")
                panel.grid(alpha=0.3)
            panels[0][0].set_ylabel(f"validation {UNITS[task]}")
            panels[0][0].legend(fontsize="small")
            figure.suptitle(task)
            figure.tight_layout()
            figure.savefig(out / f"{task}-{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


def _belongs(cell: Cell, rule: str, period: int) -> bool:
    """Returns whether a run belongs to the rule's curve in the panel of a sync period."""
    return cell.rule == rule and (rule in ("", ALL_REDUCE) or cell.period == period)


def _plot_errors(panel: Any, period: int, results: Results) -> None:
    single = [error_of(found) for cell, found in results.items() if not cell.rule]
    panel.axhline(mean(single), color="grey", linestyle="--", label="one replica")
    for rule in dict.fromkeys(cell.rule for cell in results if cell.rule):
        by_count: dict[int, list[float]] = {}
        for cell, found in results.items():
            if _belongs(cell, rule, period) and math.isfinite(error_of(found)):
                by_count.setdefault(cell.replicas, []).append(error_of(found))
        counts = sorted(by_count)
        panel.errorbar(
            counts,
            [mean(by_count[count]) for count in counts],
            [stdev(by_count[count]) if len(by_count[count]) > 1 else 0.0 for count in counts],
            marker="o",
            capsize=3,
            label=_RULES[rule][0],
        )
    panel.set_xscale("log", base=2)
    panel.set_xlabel("replicas")


def _plot_curves(panel: Any, period: int, results: Results) -> None:
    most = max(cell.replicas for cell in results)
    for rule in dict.fromkeys(cell.rule for cell in results):
        curves = [
            found["curves"]["global"]
            for cell, found in results.items()
            if _belongs(cell, rule, period) and (not rule or cell.replicas == most)
        ]
        shortest = min(map(len, curves), default=0)
        means = [mean(values) for values in zip(*(c[:shortest] for c in curves), strict=True)]
        label = f"{_RULES[rule][0]}, N = {most}" if rule else "one replica"
        panel.plot(range(1, shortest + 1), means, marker="o", markersize=3, label=label)
    panel.set_xlabel("epoch")


def _checked(flag: str, values: Sequence[str], known: Iterable[str]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        raise ValueError(
            f"--{flag}={','.join(values)}: there is no {''.join(unknown[:1])!r}. There are: "
            f"{', '.join(known)}."
        )
