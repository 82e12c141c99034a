"""Compares ways to train on one corpus: one command writes a table.

python -m scripts.study --out=runs/study                   models, optimizers, starts, averages
python -m scripts.study --out=runs/async --suite=async     asynchronous rules, by sync period
python -m scripts.study --out=runs/grid --suite=replicas   numbers of replicas, rules and periods
python -m scripts.study --out=runs/time --suite=time       how much sooner an error is reached
python -m scripts.study --out=runs/003 --paper=003 --table=4    a table of a paper

It trains the runs of a suite on synthetic speech, --jobs at a time with a thread each. Then it
scores each of their models on the test split: frame error rate, and phone error rate of the decoded
phones. N replicas, or asynchronous workers, are simulated in one process. The program writes
results.json, table.md, the runs and their logs to --out. A finished run is not trained again, and
an interrupted one continues. The table's minutes are those of training, including its start.

The suite `replicas` is described in `scripts/study_grid.py`; it writes page.md and pictures. The
suite `time` is described in `scripts/study_time.py`; it writes page.md and time.json. For a paper,
page.md has the paper's figures beside ours, and tells whether their order is the same;
without --table it has all tables of the paper that this program can make.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

from absl import flags

from scripts import study_grid, study_papers, study_runs, study_time
from scripts.study_runs import Run

flags.adopt_module_key_flags(study_grid)
flags.adopt_module_key_flags(study_time)
_SUITE = flags.DEFINE_enum(
    "suite", "models", ["models", "async", "replicas", "time"], "what is compared"
)
_PAPER = flags.DEFINE_enum(
    "paper",
    None,
    sorted({paper for paper, _ in study_papers.TABLES}),
    "number of a paper, as in docs/papers.md, whose tables are made in place of a suite",
)
_TABLE = flags.DEFINE_list("table", [], "numbers of its tables; all that are made here if not set")
_OUT = flags.DEFINE_string("out", "runs/study", "directory for corpus, runs and results")
common.refuse_urls(_OUT)
_TRAIN = flags.DEFINE_float("train_minutes", 20.0, "speech to train on, in minutes", 0.1)
_HELD_OUT = flags.DEFINE_float(
    "held_out_minutes", 3.0, "speech of each of validation and test, in minutes", 0.1
)
_EPOCHS = flags.DEFINE_integer("epochs", 6, "passes over the training speech", lower_bound=1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "replicas of the parallel runs", lower_bound=2)
_SCALE = flags.DEFINE_float(
    "scale", 0.125, "factor of the papers' widths, positive; twice it for LSTM and CLDNN"
)
_JOBS = flags.DEFINE_integer("jobs", 0, "runs at a time; 0: one for each core", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "of initial weights and data order", 0, 2**32 - 1)
_ONLY = flags.DEFINE_list("only", [], "names of the runs to make; all if not set")

_RUNS: dict[str, Sequence[Run]] = {"models": study_runs.MODELS, "async": study_runs.ASYNC}


def main() -> None:
    started = time.monotonic()
    out = Path(_OUT.value)
    with common.bad_input():
        common.only_for(_PAPER.value is not None, (_TABLE,), "--paper")
        common.only_for(_PAPER.value is None, (_SUITE,), "runs without --paper")
        common.only_for(
            _PAPER.value != "003", (_REPLICAS,), "other papers: the tables of 003 say how many"
        )
        grids = _SUITE.value in ("replicas", "time")
        of_runs = (_EPOCHS, _REPLICAS, _SCALE, _SEED, _ONLY)
        common.only_for(not grids, of_runs, "--suite=models, --suite=async and --paper")
        common.only_for(grids, study_grid.FLAGS, "--suite=replicas and --suite=time")
        common.only_for(_SUITE.value == "replicas", study_grid.OWN_FLAGS, "--suite=replicas")
        common.only_for(_SUITE.value == "time", study_time.FLAGS, "--suite=time")
    if grids:
        (_grid if _SUITE.value == "replicas" else _time)(out)
        return
    with common.bad_input():
        chosen = _chosen()
        out.mkdir(parents=True, exist_ok=True)
    _prepare(out)
    if any(run.start == study_runs.RBM for run in chosen):
        _pretrain(out)
    if any(run.start == study_runs.FIRST for run in chosen):
        _first_epoch(out)
    print(f"{len(chosen)} runs, {_jobs()} at a time ...", flush=True)
    rows = _all(out, chosen)
    content = {"setting": _setting(out), "seconds": time.monotonic() - started, "rows": rows}
    common.write_json(out / "results.json", content)
    name, text = "table.md", study_runs.table(rows)
    if _PAPER.value is not None:
        name, text = "page.md", study_papers.page(_PAPER.value, _tables(), rows)
    common.write_text(out / name, text)
    print(f"\n{text}\n{out}/results.json, {out}/{name}; {content['seconds']:.0f} s in all")


def _begin_grid(out: Path) -> None:
    """Checks the flags of `study_grid`, which two suites share, and prepares the speech."""
    with common.bad_input():
        tasks = study_grid.tasks()
        out.mkdir(parents=True, exist_ok=True)
        shared = {each.name: each.value for each in (_TRAIN, _HELD_OUT)}
        study_grid.check_setting(out, shared)
    if "speech" in tasks:
        _prepare(out)


def _time(out: Path) -> None:
    with common.bad_input():
        lengths, costs = study_time.settings()
    _begin_grid(out)
    targets, curves = study_time.train(out, _side_by_side, lengths)
    rows = study_time.rows(targets, curves, costs)
    page = study_time.page(targets, rows)
    common.write_json(
        out / "time.json", {"targets": targets, "rows": [row.content() for row in rows]}
    )
    common.write_text(out / "page.md", page)
    print(f"\n{page}\n{out}/time.json and {out}/page.md")


def _grid(out: Path) -> None:
    with common.bad_input():
        # If Matplotlib is missing, this call fails now, and not only after hours of training.
        common.pyplot("svg", "the page of the suite `replicas`")
    _begin_grid(out)
    results = study_grid.train(out, _side_by_side)
    page = study_grid.page(results)
    common.write_text(out / "page.md", page)
    study_grid.draw(results, out)
    print(f"\n{page}\n{out}/page.md and the pictures beside it")


def _all(out: Path, chosen: list[Run]) -> list[dict[str, Any]]:
    """Carries out the runs, and returns their rows in the same order."""
    # Recurrent models take longest. They are started before the others, so that none of them runs
    # alone at the end.
    order = sorted(chosen, key=lambda run: run.model == "DNN")
    found = _side_by_side([functools.partial(_train_and_score, out, run) for run in order])
    rows = dict(zip((run.name for run in order), found, strict=True))
    return [row for run in chosen for row in rows[run.name]]


def _side_by_side(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Calls functions, --jobs at a time; returns their results in order."""
    # If a SIGTERM ended the study alone, the trainings that it has started would go on. This call
    # makes the study end the trainings, too. They can be resumed later.
    common.exit_on_signals()
    with concurrent.futures.ThreadPoolExecutor(_jobs()) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            common.end_calls()
            raise
    return [future.result() for future in futures]


def _jobs() -> int:
    return _JOBS.value or os.cpu_count() or 1


def _tables() -> list[int]:
    return study_papers.numbers(_PAPER.value or "", _TABLE.value)


def _chosen() -> list[Run]:
    runs = _RUNS[_SUITE.value]
    if _PAPER.value is not None:
        runs = study_papers.runs(_PAPER.value, _tables())
    known = {run.name: run for run in runs}
    unknown = [name for name in _ONLY.value if name not in known]
    if unknown:
        raise ValueError(f"--only: there is no run {unknown[0]!r}. There are: {', '.join(known)}.")
    return [known[name] for name in _ONLY.value] or list(runs)


def _prepare(out: Path) -> None:
    print(f"speech: {_TRAIN.value + 2 * _HELD_OUT.value:g} minutes ...", flush=True)
    minutes = [f"--{split}_minutes={_HELD_OUT.value}" for split in ("validation", "test")]
    command = ["scripts.prepare_speech", f"--out={out / 'corpus'}"]
    common.call(out, "corpus", [*command, f"--train_minutes={_TRAIN.value}", *minutes])


def _pretrain(out: Path) -> None:
    weights = _weights(out, study_runs.RBM)
    if not weights.is_file():
        print("RBMs ...", flush=True)
        recipe = "--flagfile=scripts/recipes/001-pretrain.flags"
        shape = [f"--scale={_SCALE.value}", f"--seed={_SEED.value}"]
        where = [f"--corpus={out / 'corpus'}", f"--out={weights}"]
        common.call(out, study_runs.RBM, ["scripts.pretrain", recipe, *shape, *where])


def _first_epoch(out: Path) -> None:
    """Trains the model of `study_runs.FIRST` on one replica."""
    weights = _weights(out, study_runs.FIRST)
    if not weights.is_file():
        print("the common first epoch ...", flush=True)
        where = [f"--corpus={out / 'corpus'}", f"--run_dir={weights.parent}"]
        shape = [f"--scale={_SCALE.value}", f"--seed={_SEED.value}", "--epochs=1", "--rule=none"]
        common.call(out, study_runs.FIRST, ["scripts.train", *study_runs.PLAIN, *where, *shape])


def _weights(out: Path, name: str) -> Path:
    return out / f"{name}-seed-{_SEED.value}" / "model.weights.h5"


def _train_and_score(out: Path, run: Run) -> list[dict[str, Any]]:
    began = time.monotonic()
    run_dir = out / run.name
    command = [
        "scripts.train",
        f"--epochs={_EPOCHS.value}",
        *run.options,
        f"--corpus={out / 'corpus'}",
        f"--run_dir={run_dir}",
        f"--scale={_SCALE.value * (1 if run.model == 'DNN' else 2)}",
        f"--seed={_SEED.value}",
        *([f"--simulate_replicas={_replicas(run)}"] if run.parallel else []),
        *([f"--init={_weights(out, run.start)}"] if run.start else []),
    ]
    score = _scored
    try:
        common.call(out, run.name, command)
    except common.Failure as error:
        if not re.search("infinite or NaN|NaN or Inf", str(error)):
            raise
        print(f"  {run.name}: diverged", flush=True)
        score = _diverged
    seconds = _seconds(run_dir, time.monotonic() - began)
    rows = [{**score(out, run, weights), "seconds": seconds} for weights in run.models]
    print(f"  {run.name}: {time.monotonic() - began:.0f} s", flush=True)
    return rows


def _replicas(run: Run) -> int:
    return run.replicas or _REPLICAS.value


def _seconds(run_dir: Path, now: float) -> float:
    """Returns the seconds of the call that finished the run: `now`, if no earlier call did."""
    file = run_dir / "seconds.json"
    if not file.exists():
        common.write_json(file, now)
    return json.loads(file.read_text())


def _diverged(out: Path, run: Run, weights: str) -> dict[str, Any]:
    """Returns the row of a run that has ended because its weights diverged."""
    del out
    unknown = ("epochs", "frame_error_rate", "cross_entropy", "phone_error_rate", "staleness")
    return {
        "name": run.name,
        "model": run.model,
        "training": run.training,
        "weights": weights,
        "replicas": _replicas(run) if run.parallel else 1,
        **dict.fromkeys(unknown),
    }


def _scored(out: Path, run: Run, weights: str) -> dict[str, Any]:
    run_dir = out / run.name
    scores = run_dir / f"test-{weights}.json"
    asked = ["scripts.evaluate", f"--run_dir={run_dir}", f"--weights={weights}"]
    common.call(out, f"{run.name}-{weights}", [*asked, f"--out={scores}", "--decode"])
    history = json.loads((run_dir / "history.json").read_text())
    summary = history["summary"]
    found = json.loads(scores.read_text())
    names = ("frame_error_rate", "cross_entropy", "phone_error_rate")
    return {
        "name": run.name,
        "model": run.model,
        "training": run.training,
        "weights": weights,
        "replicas": summary["replicas"],
        "parameters": summary["parameters"],
        "epochs": len(history["epochs"]),
        "staleness": summary.get("staleness"),
        **{name: found[name] for name in names},
    }


def _setting(out: Path) -> dict[str, Any]:
    corpus = json.loads((out / "corpus" / "index.json").read_text())
    return {
        "train_minutes": _TRAIN.value,
        "classes": len(corpus["class_names"]),
        "epochs": _EPOCHS.value,
        "replicas": _REPLICAS.value,
        "scale": _SCALE.value,
        "seed": _SEED.value,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("tensorflow", "keras", "numpy")},
    }


if __name__ == "__main__":
    common.run(main)
