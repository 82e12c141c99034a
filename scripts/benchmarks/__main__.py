"""Measures costs: `python -m scripts.benchmarks --suite=SUITE --out=FILE.json`.

Suite `scaling`: the DNN of 12.5 million parameters (1320-6x1024-5723) on data in memory, one thread
per worker. Each round measures, one after the other: plain Keras in one process, plain Keras in two
processes that are independent of each other, tfpara on one worker, tfpara on two workers at several
sync periods, and a bare all-reduce of the model's bytes. `ratio_to_independent` is the speed over
that of the two independent processes of the same round.

Suite `averages`: a sync of the same DNN under BMUF on two workers, without averages and with three
(EMA of two decays, MA), with replicated and sharded global state. `ratio_to_none` is the time of a
sync over its time without averages in the same round.

Suite `memory`: bytes of global state (model, momentum, EMA and MA) that each of N replicas keeps,
for the same DNN; N replicas are simulated on devices of one process.

Suite `input`: frames/s that the input pipeline reads from a corpus (--corpus) on one core, and
frames/s that training of the demo's model (4x512) takes on one core. `ratio_to_training` is the
first over the second in the same round.

Suite `async`: samples/s of two workers with one parameter server under asynchronous rules, for
networks of 0.1, 1.6 and 12.5 million weights, beside one process of plain Keras (`ratio_to_plain`)
and two that are independent of each other (`ratio_to_independent`); minibatches of --batch. Then
pushes/s of one and two workers with one parameter server, by tfpara.AsyncStrategy and by
TensorFlow's stock loop, for the same DNN, a tiny one and an embedding table. `ratio_to_stock` is
the speed over that of the stock loop in the same round. --only=speeds or --only=pushes measures one
half of the suite.

Suite `faults`: the share of the time that is progress while a worker is killed every --kill_every
seconds: with elastic=, with a spare worker, and with a restart of all workers from a checkpoint.
`goodput` is the time of an epoch without faults over that with faults.

Suite `gpu`: milliseconds of a step of six networks on one card: by plain Keras with its defaults
(XLA compiles it on GPUs), by tfpara with one worker at sync periods 5, 20 and 80 and without syncs,
and by PyTorch if it is installed. `of_plain` is the time of plain Keras' step over that of tfpara's
step, syncs included; `sync_ms` is the time that a sync adds. Without a card the networks are tiny,
and only show that the program runs.

Suite `step`: a training step of one worker, and of plain Keras in the same process: milliseconds of
wall time and of processor time, and the operations of the step's graph. Also the milliseconds of
that worker's sync. The suite has networks of 0.1, 1.6 and 12.5 million weights, calls of one and 20
minibatches, and one and two devices.

Suite `start`: milliseconds of processor time that a process uses from its start until the end of
its first training step, which has the sync's graph in it, and until events before; and of wall
time. `/plain` is the processor time over that of plain Keras in the same round.

Suite `cluster`: the time that a sync adds, for 2 to 16 replicas (--replicas), each on a worker with
a link of its own (--link_mbit; needs root); `two levels` has two replicas on each worker. A step is
a pause of --step_seconds. `over_floor` is the time of a sync over the least that a ring's transfers
take, `predicted` the planner's speed-up. With --torch_python also the averagers of PyTorch and
torchft.

Suite `balance`: two and four workers, of which the last may be slowed to half the speed; their
steps take --step_seconds at least. `of_all_speeds` is the throughput over the sum of the workers'
speeds, which are measured without their syncs; `ratio_to_off` is the throughput over that with
equal blocks in the same round; `loss` is of the global model after equally many samples, with
another seed in each round.

Suite `peers`: tfpara beside MultiWorkerMirroredStrategy, Horovod, PyTorch and torchft, on loopback
and on limited links; see scripts.benchmarks.beside_peers. `predictions` are those of the cost
model. scripts.benchmarks.page puts the results into the documentation.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import flags

import tfpara
from scripts import common
from scripts.benchmarks import (
    asynchronous,
    beside_peers,
    goodput,
    gpu_worker,
    many_workers,
    step_worker,
)
from scripts.benchmarks.headlines import headlines
from scripts.benchmarks.prediction import costs_of, predictions
from scripts.benchmarks.processes import measure, medians
from scripts.benchmarks.systems import elements_of
from tfpara.launch import cards
from tfpara.planner import Link

_SUITE = flags.DEFINE_enum(
    "suite",
    "scaling",
    [
        *("scaling", "averages", "memory", "input", "peers"),
        *("async", "faults", "gpu", "step", "start", "balance", "cluster"),
    ],
    "what to measure",
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "times that everything is measured", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 256, "minibatch of each replica, in samples", lower_bound=1)
_PERIODS = flags.DEFINE_list(
    "sync_periods", ["1", "5", "20", "80"], "sync periods, in minibatches of each replica"
)
_STEPS = flags.DEFINE_integer(
    "steps", 160, "timed minibatches at the longest period; shorter ones take fewer", lower_bound=1
)
_CORPUS = flags.DEFINE_string("corpus", None, "directory of a prepared corpus, for suite input")
_REPLICAS = flags.DEFINE_list(
    "replicas", ["1", "2", "4", "8"], "numbers of replicas of the suites memory and cluster"
)
_QUICK = flags.DEFINE_bool(
    "quick", False, "suite peers: one round, two sync periods, loopback only"
)
_WORKERS = flags.DEFINE_integer(
    "workers", 4, "suite faults: number of workers that train", lower_bound=2
)
_EPOCHS = flags.DEFINE_integer("epochs", 30, "suite faults: epochs of each run", lower_bound=2)
_EPOCH_STEPS = flags.DEFINE_integer(
    "epoch_steps", 200, "suite faults: minibatches of a worker in an epoch", lower_bound=1
)
_STEP_SECONDS = flags.DEFINE_float(
    "step_seconds",
    0.05,
    "suites faults and balance: shortest time of a step; cluster: time of a step; in seconds",
    lower_bound=0.001,
)
_KILL_EVERY = flags.DEFINE_float(
    "kill_every", 30.0, "suite faults: seconds from one kill to the next", lower_bound=0.1
)
_SEED = flags.DEFINE_integer(
    "seed", 1, "suites faults and balance: seed of the model and the data, of the first round"
)
_SIZES = {
    "inputs": flags.DEFINE_integer("inputs", 1320, "width of an input frame", lower_bound=1),
    "layers": flags.DEFINE_integer("layers", 6, "hidden layers", lower_bound=0),
    "width": flags.DEFINE_integer("width", 1024, "units of a hidden layer", lower_bound=1),
    "classes": flags.DEFINE_integer("classes", 5723, "output classes", lower_bound=2),
}


_PLAIN = "plain Keras"


def main() -> None:
    """Measures, prints the table and writes the JSON file."""
    # After this call, a SIGTERM also ends the processes that this program has started, and removes
    # the network namespaces that it has made for limited links.
    common.exit_on_signals()
    out = Path(_OUT.value)
    if not out.parent.is_dir():
        raise common.Failure(f"--out={out}: there is no folder {out.parent}. Make it first.")
    if out.is_dir():
        raise common.Failure(f"--out={_OUT.value} is a folder. Give the path of a file.")
    own = {"peers": _peers, "async": _async, "faults": _faults, "cluster": _cluster}
    if _SUITE.value in own:
        own[_SUITE.value](out)
        return
    systems = {
        "scaling": _scaling_systems,
        "averages": _averages_systems,
        "memory": _memory_systems,
        "input": _input_systems,
        "gpu": _gpu_systems,
        "step": _step_systems,
        "start": _start_systems,
        "balance": _balance_systems,
    }[_SUITE.value]()
    systems = {name: systems[name] for name in beside_peers.chosen(list(systems))}
    alone = _SUITE.value in ("gpu", "step", "start", "balance")
    module = f"{_SUITE.value}_worker" if alone else "worker"
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(1 if _SUITE.value == "memory" else _ROUNDS.value):
        measured = {}
        for name, (workers, options) in systems.items():
            seeded = {**options, "seed": _SEED.value + number}
            measured[name] = measure(workers, seeded, module=f"scripts.benchmarks.{module}")
            print(f"round {number + 1}  {name}: {_short(measured[name])}", flush=True)
        rounds.append(measured)
    rows = [_row(name, *systems[name], rounds) for name in systems]
    common.write_json(out, {**_conditions(), "rows": rows})
    _print_table(rows)


def _peers(out: Path) -> None:
    sizes = {"batch": _BATCH.value, **_sizes()}
    periods, rounds, steps = _periods(), _ROUNDS.value, _STEPS.value
    if _QUICK.value:
        periods, rounds, steps = [min(periods), max(periods) // 4 or 1], 1, max(2, steps // 4)
    links = [] if _QUICK.value else beside_peers.limited_mbit()
    conditions = _conditions()
    conditions["versions"] |= beside_peers.versions()
    model_bytes = 4 * elements_of(sizes)
    # The file is written again after each link. Measuring a slow link takes long, and an
    # interruption must not lose the results of earlier links.
    for found in beside_peers.measured(sizes, periods, steps, rounds, links):
        rows = found["rows"]
        costs = costs_of(rows, sizes["batch"], model_bytes, beside_peers.LOOPBACK)
        limited = {name: Link.of_mbit(mbit, delay) for name, mbit, delay in found["links"]}
        predicted = predictions(rows, costs, sizes["batch"], limited) if costs else []
        results = {"rows": rows, "notes": found["notes"], "predictions": predicted}
        common.write_json(out, {**conditions, "sizes": sizes, "rounds": rounds, **results})
    _print_table(rows)
    print("\n".join(headlines(rows)))
    for row in predicted:
        print(
            f"{row['link']:12} {row['system']:34} predicted "
            f"{row['predicted_samples_per_second']:.0f} samples/s, measured / predicted "
            f"{row['measured_over_predicted']:.2f}"
        )


def _async(out: Path) -> None:
    sizes = {"batch": _BATCH.value, **_sizes()}
    steps = max(4, _STEPS.value // 4)
    results: dict[str, Any] = {"sizes": sizes, "rounds": _ROUNDS.value, "steps": steps}
    parts = beside_peers.chosen(["speeds", "pushes"])
    if "speeds" in parts:
        results["speeds"] = asynchronous.speeds(_BATCH.value, steps, _ROUNDS.value, seconds=600.0)
        common.write_json(out, {**_conditions(), **results})
    if "pushes" in parts:
        results |= asynchronous.measured(sizes, steps, _ROUNDS.value, seconds=600.0)
        common.write_json(out, {**_conditions(), **results})


def _faults(out: Path) -> None:
    options = {
        "step_seconds": _STEP_SECONDS.value,
        "epoch_steps": _EPOCH_STEPS.value,
        "width": 256,
        "sync_period": max(1, round(1.0 / _STEP_SECONDS.value)),  # a block of about a second
        "seed": _SEED.value,
    }
    ways = beside_peers.chosen(list(goodput.WAYS))
    how_often = {"epochs": _EPOCHS.value, "kill_every": _KILL_EVERY.value}
    rows = goodput.measured(ways, _WORKERS.value, **how_often, options=options)
    common.write_json(out, {**_conditions(), "options": {**options, **how_often}, "rows": rows})
    _print_table(rows)


def _cluster(out: Path) -> None:
    speeds = beside_peers.limited_mbit()
    ways = beside_peers.chosen(list(many_workers.WAYS))
    workers = [count for count in common.whole_numbers(_REPLICAS) if count > 1]
    for rows in many_workers.measured(
        ways,
        workers,
        speeds,
        beside_peers.DELAY.value,
        _periods(),
        _STEP_SECONDS.value,
        _sizes(),
        _ROUNDS.value,
    ):
        common.write_json(out, {**_conditions(), "sizes": _sizes(), "rows": rows})
    _print_table(rows)


def _conditions() -> dict[str, Any]:
    return {
        "suite": _SUITE.value,
        "machine": _machine(),
        "versions": {
            "tfpara": tfpara.__version__,
            **{p: metadata.version(p) for p in ("tensorflow", "keras", "numpy")},
        },
    }


def _sizes() -> dict[str, int]:
    return {name: flag.value for name, flag in _SIZES.items()}


def _periods() -> list[int]:
    return common.whole_numbers(_PERIODS)


def _scaling_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns the systems: name → (number of processes, options of each)."""
    periods = _periods()
    longest = max(periods)
    steps = max(8, _STEPS.value // 4)
    plain = {"system": "plain", "sync_period": None, "batch": _BATCH.value, "steps": steps}
    plain |= _sizes()
    systems: dict[str, tuple[int, dict[str, Any]]] = {
        _PLAIN: (1, plain),
        "plain Keras, independent": (2, plain),
        "tfpara, one worker": (
            1,
            {**plain, "system": "tfpara", "sync_period": steps, "first": 1},
        ),
        "bare all-reduce": (
            2,
            {
                "system": "all_reduce",
                "elements": elements_of(_sizes()),
                "bucket_bytes": 8 << 20,
                "steps": 21,
            },
        ),
    }
    for period in periods:
        blocks = max(1, round(_STEPS.value * (period / longest) ** 0.5 / period))
        options = {"system": "tfpara", "sync_period": period, "steps": blocks * period}
        systems[f"tfpara, period {period}"] = (2, {**plain, **options})
    return systems


def _gpu_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    small = not cards.of_machine(os.environ)
    if small:
        print("No GPU is to be seen: the networks are tiny, and the figures say nothing.")
    with_torch = importlib.util.find_spec("torch") is not None
    # The number of steps in a turn is a multiple of 80, and 80 is a multiple of all periods and of
    # `execution`. So a turn has only whole blocks, and only whole calls of the train function,
    # which takes 20 steps in a call.
    steps = 80 * max(1, round(_STEPS.value / 80))
    systems: dict[str, tuple[int, dict[str, Any]]] = {}
    for network in gpu_worker.NETWORKS:
        options = {"network": network, "small": small, "steps": steps, "turns": 3}
        options |= {"execution": 20, "periods": (5, 20, 80)}
        systems[network] = (1, {**options, "system": "keras"})
        if with_torch and network in gpu_worker.TORCH:
            systems[f"{network}: PyTorch"] = (1, {**options, "system": "torch"})
    return systems


def _step_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    systems: dict[str, tuple[int, dict[str, Any]]] = {}
    for network, (sizes, steps) in step_worker.NETWORKS.items():
        for execution, devices in ((1, 1), (20, 1), (20, 2)):
            count = f"{devices} device{'s' * (devices > 1)}"
            systems[f"{network} M, {execution} a call, {count}"] = (
                1,
                {
                    "system": "step",
                    "sizes": sizes,
                    "batch": 32,
                    "execution": execution,
                    "devices": devices,
                    "steps": min(steps, _STEPS.value),
                    "turns": 12,
                },
            )
    return systems


def _balance_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    small, seconds = (64, 64, 10), _STEP_SECONDS.value
    systems: dict[str, tuple[int, dict[str, Any]]] = {}
    for workers, what, sizes, slowed, ways in (
        (2, "alike", small, 1.0, (False, True)),
        (2, "one at half", small, 2.0, (False, True)),
        (2, "the slow one changes", small, 2.0, (True,)),
        (2, "one at half, 1.6 M weights", step_worker.NETWORKS["1.6"][0], 2.0, (False, True)),
        (4, "alike", small, 1.0, (False, True)),
        (4, "one at half", small, 2.0, (False, True)),
        (4, "the slow one changes", small, 2.0, (True,)),
    ):
        changes = what == "the slow one changes"
        for balance in ways:
            systems[f"{workers}, {what}, balance {'on' if balance else 'off'}"] = (
                workers,
                {
                    "system": "balance",
                    "sizes": sizes,
                    "batch": 32,
                    "sync_period": 20,
                    "blocks": max(4, _STEPS.value // (2 if changes else 10)),
                    "step_seconds": [*[seconds] * (workers - 1), slowed * seconds],
                    "changes": changes,
                    "balance": balance,
                },
            )
    return systems


def _start_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    plain, ours = {"system": "plain"}, {"system": "tfpara"}
    return {
        _PLAIN: (1, plain),
        "two of plain Keras": (2, plain),
        "tfpara, one worker": (1, ours),
        "tfpara, two workers": (2, ours),
    }


def _averages_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    common_options = {"system": "syncs", "syncs": max(3, _STEPS.value // 4), **_sizes()}
    return {
        f"{aggregation}, {averages} averages": (
            2,
            {**common_options, "strategy": {"aggregation": aggregation}, "averages": averages},
        )
        for aggregation in ("replicated", "sharded")
        for averages in ("no", "three")
    }


def _memory_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    return {
        f"{aggregation}, {replicas} replica{'s' * (replicas > 1)}": (
            1,
            {
                "system": "memory",
                "replicas": replicas,
                "aggregation": aggregation,
                **_sizes(),
            },
        )
        for aggregation in ("replicated", "sharded")
        for replicas in common.whole_numbers(_REPLICAS)
    }


def _input_systems() -> dict[str, tuple[int, dict[str, Any]]]:
    if _CORPUS.value is None:
        raise common.Failure(
            "--suite=input reads a corpus. Give --corpus=DIR; python -m scripts.prepare_speech "
            "makes one."
        )
    options = {"system": "input", "corpus": _CORPUS.value, "batch": _BATCH.value}
    training = {**options, "system": "training", "steps": _STEPS.value}
    return {"input pipeline": (1, options), "training, data in memory": (1, training)}


def _row(
    name: str, workers: int, options: dict[str, Any], rounds: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Returns the medians over the rounds, with the smallest and largest value of each."""
    row: dict[str, Any] = {
        "system": name,
        "workers": workers,
        "sync_period": options.get("sync_period"),
    }
    values = {key: [r[name][key] for r in rounds] for key in rounds[0][name]}
    bases = {
        "ratio_to_independent": ("samples_per_second", "plain Keras, independent"),
        "ratio_to_plain": ("samples_per_second", _PLAIN),
        "ratio_to_training": ("frames_per_second", "training, data in memory"),
    }
    if "stepped_ms" in values:
        bases["ratio_to_plain"] = ("stepped_ms", _PLAIN)
    if options["system"] == "balance":
        bases["ratio_to_off"] = ("samples_per_second", name.replace("balance on", "balance off"))
    if options["system"] == "syncs":
        none = f"{options['strategy']['aggregation']}, no averages"
        bases["ratio_to_none"] = ("sync_ms", none)
    for ratio, (key, base) in bases.items():
        if key in values and base in rounds[0]:  # with --only, the base may be missing
            measured = [r[base][key] for r in rounds]
            values[ratio] = [a / b for a, b in zip(values[key], measured, strict=True)]
    words = {key: series[0] for key, series in values.items() if isinstance(series[0], str)}
    numbers = {key: series for key, series in values.items() if key not in words}
    return row | words | medians(numbers)


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}


def _short(figures: dict[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else f"{v:.4g}" for k, v in figures.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())


_COLUMNS = {  # name of a figure: (title, width, format)
    "samples_per_second": ("samples/s", 10, ".0f"),
    "imported_ms": ("import ms", 9, ".0f"),
    "made_ms": ("strategy", 8, ".0f"),
    "begun_ms": ("fit", 8, ".0f"),
    "stepped_ms": ("stepped", 8, ".0f"),
    "stepped_wall_ms": ("wall ms", 8, ".0f"),
    "operations": ("operations", 10, ".0f"),
    "plain_operations": ("plain's", 7, ".0f"),
    "step_ms": ("step ms", 8, ".3f"),
    "plain_step_ms": ("plain ms", 8, ".3f"),
    "processor_ms": ("CPU ms", 8, ".3f"),
    "plain_processor_ms": ("plain's", 8, ".3f"),
    "torch_step_ms": ("PyTorch", 8, ".3f"),
    "never_step_ms": ("no syncs", 8, ".3f"),
    **{f"period_{n}_of_plain": (f"of plain, {n}", 12, ".3f") for n in (5, 20, 80)},
    **{f"period_{n}_sync_ms": (f"sync ms, {n}", 11, ".2f") for n in (5, 20, 80)},
    "ratio_to_independent": ("/independent", 12, ".3f"),
    "ratio_to_plain": ("/plain", 7, ".3f"),
    "sync_ms": ("sync ms", 8, ".0f"),
    "wait_ms": ("wait ms", 8, ".0f"),
    "adds_ms": ("adds ms", 8, ".1f"),
    "floor_ms": ("floor ms", 8, ".1f"),
    "over_floor": ("/floor", 7, ".2f"),
    "speedup": ("speed-up", 8, ".2f"),
    "predicted_speedup": ("predicted", 9, ".2f"),
    "of_all_speeds": ("/all speeds", 11, ".3f"),
    "ratio_to_off": ("/off", 6, ".2f"),
    "wait_fraction": ("waiting", 7, ".3f"),
    "ratio_to_none": ("/no averages", 12, ".3f"),
    "frames_per_second": ("frames/s", 10, ".0f"),
    "ratio_to_training": ("/training", 9, ".1f"),
    "state_bytes": ("bytes per replica", 17, ",.0f"),
    "scaling": ("scaling", 7, ".2f"),
    "bytes_per_sample": ("sent/sample", 11, ",.0f"),
    "peak_memory_bytes": ("peak bytes", 13, ",.0f"),
    "goodput": ("goodput", 8, ".3f"),
    "epoch_seconds": ("s/epoch", 8, ".2f"),
    "kills": ("kills", 5, ".0f"),
    "loss": ("loss", 7, ".4f"),
    "more_bytes": ("more bytes", 12, ",.0f"),
    "more_threads": ("more threads", 12, ".0f"),
    "more_descriptors": ("more files", 10, ".0f"),
}


def _print_table(rows: list[dict[str, Any]]) -> None:
    columns = {key: c for key, c in _COLUMNS.items() if any(key in row for row in rows)}
    titles = " ".join(f"{title:>{width}}" for title, width, _ in columns.values())
    several_links = len({row.get("link") for row in rows}) > 1
    print(f"\n{'system':34} {'workers':>7} {titles}")
    for row in rows:
        cells = [(row.get(key), width, form) for key, (_, width, form) in columns.items()]
        text = " ".join(f"{'-' if v is None else format(v, f):>{w}}" for v, w, f in cells)
        absent = row.get("missing") or row.get("failed")
        link = f"  {row['link']}" if several_links else ""
        print(f"{row['system']:34} {row['workers']:>7} {absent or text}{link}")


if __name__ == "__main__":
    common.run(main)
