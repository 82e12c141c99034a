"""Compares ways to train on one corpus: a table by one command.

python -m scripts.study --out=runs/study                   models, optimizers, starts, averages
python -m scripts.study --out=runs/async --suite=async     asynchronous rules, by sync period
python -m scripts.study --out=runs/grid --suite=replicas   numbers of replicas, rules and periods

The last one is described in `scripts/study_grid.py`; it leaves page.md and pictures in --out.

The others:

Trains what the suite lists on synthetic speech, --jobs runs at a time with a thread each, then
scores each of their models on the test split: frame error rate, and phone error rate of the decoded
phones. N replicas, or asynchronous workers, are simulated in one process. Leaves results.json,
table.md, the runs and their logs in --out. A run that has ended is not trained again, and one that
was interrupted goes on. The table's minutes are those of training, start included.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from scripts import common  # isort: skip  # before TensorFlow

from absl import flags

from scripts import study_grid

flags.adopt_module_key_flags(study_grid)
_SUITE = flags.DEFINE_enum("suite", "models", ["models", "async", "replicas"], "what is compared")
_OUT = flags.DEFINE_string("out", "runs/study", "directory for corpus, runs and results")
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
_SEED = flags.DEFINE_integer("seed", 0, "of initial weights and data order", lower_bound=0)
_ONLY = flags.DEFINE_list("only", [], "names of the runs to make; all if not set")

_RBM = "rbm"  # the pretraining that the DNNs start from
_FIRST = "first-epoch"  # the run that the suite "async" starts from


class _Run(NamedTuple):
    """A training run.

    `options` are flags of scripts.train, `models` names its rows in the table, and `start` is the
    run whose weights it starts from.
    """

    name: str
    model: str
    training: str
    parallel: bool
    options: tuple[str, ...]
    models: tuple[str, ...] = ("global",)
    start: str = ""


_DNN = ("--flagfile=scripts/recipes/001.flags", "--minibatch=128")
# The recipes of the recurrent models are for thousands of hours; these flags fit a small corpus.
_STREAMS = (
    "--streams=8",
    "--truncation=20",
    "--clip_norm=5",
    "--schedule=exponential",
)
_LSTM = ("--model=lstm-000", "--learning_rate=0.2", "--final_learning_rate=0.01", *_STREAMS)
_CLDNN = (
    "--model=cldnn-003",
    "--coefficients=80",
    "--learning_rate=0.04",
    "--final_learning_rate=0.002",
    *_STREAMS,
)
# With some ten syncs in an epoch, the average spans half an epoch.
_BMUF = ("--rule=bmuf", "--ema_decay=0.8", "--ma")
_AVERAGED = ("global", "ma", "ema-0.8")


def _of_dnn(optimizer: str, pretrained: bool, parallel: bool) -> _Run:
    start = "RBM" if pretrained else "random"
    title = {"sgd": "SGD", "ngsgd": "NG-SGD"}[optimizer]
    name = f"dnn-{optimizer}-{start.lower()}-{'n' if parallel else '1'}"
    averaging = ", model averaging" if parallel else ""
    training = f"{title}{averaging}, {start} start"
    options = (*_DNN, f"--optimizer={optimizer}")
    return _Run(name, "DNN", training, parallel, options, start=_RBM if pretrained else "")


_MODELS = (
    *(
        _of_dnn(optimizer, pretrained, parallel)
        for optimizer, pretrained in (("sgd", True), ("ngsgd", True), ("ngsgd", False))
        for parallel in (False, True)
    ),
    _Run("lstm-1", "LSTM", "SGD", False, (*_LSTM, "--rule=none")),
    _Run(
        "lstm-n",
        "LSTM",
        "SGD, Nesterov BMUF",
        True,
        (*_LSTM, *_BMUF, "--sync_period=10"),
        _AVERAGED,
    ),
    _Run("cldnn-1", "CLDNN", "SGD", False, (*_CLDNN, "--rule=none")),
    _Run(
        "cldnn-n",
        "CLDNN",
        "SGD, Nesterov BMUF",
        True,
        (*_CLDNN, *_BMUF, "--sync_period=20"),
        _AVERAGED,
    ),
)


# Small minibatches give several syncs in an epoch even with a period of 80.
_PLAIN = ("--model=dnn-003", "--minibatch=64", "--learning_rate=0.02", "--momentum=0")
_FALLING = ("--schedule=exponential", "--final_learning_rate=0.002")
_SERVERS = ("--chunk_minutes=1",)
_QUARTER = ("--rule=downpour", "--block_learning_rate=0.25", *_SERVERS)


def _by_period(name: str, training: str, period: int, *options: str) -> _Run:
    options = (*_PLAIN, *_FALLING, f"--sync_period={period}", *options)
    return _Run(
        f"{name}-{period}", "DNN", f"{training}, period {period}", True, options, start=_FIRST
    )


def _one_pass(name: str, training: str, *options: str) -> _Run:
    options = (*_PLAIN, "--rule=aasgd", "--sync_period=1", "--epochs=1", *_SERVERS, *options)
    return _Run(name, "DNN", training, True, options, ("global", "average"), start=_FIRST)


_ASYNC = (
    *(_by_period("asgd", "ASGD", period, "--rule=asgd", *_SERVERS) for period in (1, 5, 20, 80)),
    *(
        _by_period("downpour", "Downpour", period, "--rule=downpour", *_SERVERS)
        for period in (1, 5, 20, 80)
    ),
    *(
        _by_period("downpour-quarter", "Downpour, ζ = 1/4", period, *_QUARTER)
        for period in (5, 20, 80)
    ),
    *(_by_period("bmuf", "Nesterov BMUF", period, "--rule=bmuf") for period in (5, 20, 80)),
    _by_period("easgd", "asynchronous EASGD", 20, "--rule=easgd_async", *_SERVERS),
    _Run(
        "asgd-passes",
        "DNN",
        "ASGD, several passes, Newbob",
        True,
        (
            *_PLAIN,
            "--rule=asgd",
            "--sync_period=1",
            "--schedule=newbob",
            "--newbob_by=accuracy",
            "--epochs=20",
            *_SERVERS,
        ),
        start=_FIRST,
    ),
    # The chunks are so long that 20 % of one show whether a learning rate is too high.
    _one_pass(
        "aasgd-search",
        "averaged ASGD, one pass, rates searched",
        "--search_rate",
        "--search_part=0.2",
        "--chunk_minutes=5",
    ),
    _one_pass("aasgd-hand", "averaged ASGD, one pass, rates by hand", "--schedule=hand"),
)
_RUNS = {"models": _MODELS, "async": _ASYNC}


def main() -> None:
    started = time.monotonic()
    out = Path(_OUT.value)
    if _SUITE.value == "replicas":
        _grid(out)
        return
    with common.bad_input():
        chosen = _chosen()
        out.mkdir(parents=True, exist_ok=True)
    _prepare(out)
    if any(run.start == _RBM for run in chosen):
        _pretrain(out)
    if any(run.start == _FIRST for run in chosen):
        _first_epoch(out)
    print(f"{len(chosen)} runs, {_jobs()} at a time ...", flush=True)
    rows = _all(out, chosen)
    content = {"setting": _setting(out), "seconds": time.monotonic() - started, "rows": rows}
    common.write_json(out / "results.json", content)
    table = _table(rows)
    common.write_text(out / "table.md", table)
    print(f"\n{table}\n{out}/results.json, {out}/table.md; {content['seconds']:.0f} s in all")


def _grid(out: Path) -> None:
    with common.bad_input():
        tasks = study_grid.tasks()
        out.mkdir(parents=True, exist_ok=True)
        shared = {each.name: each.value for each in (_TRAIN, _HELD_OUT)}
        study_grid.check_setting(out, shared)
    if "speech" in tasks:
        _prepare(out)
    results = study_grid.train(out, _side_by_side)
    page = study_grid.page(results)
    common.write_text(out / "page.md", page)
    study_grid.draw(results, out)
    print(f"\n{page}\n{out}/page.md and the pictures beside it")


def _all(out: Path, chosen: list[_Run]) -> list[dict[str, Any]]:
    """Carries out the runs, and returns their rows in the same order."""
    # The longest runs come first, so that none of them runs alone at the end.
    order = sorted(chosen, key=lambda run: run.model == "DNN")
    found = _side_by_side([functools.partial(_train_and_score, out, run) for run in order])
    rows = dict(zip((run.name for run in order), found, strict=True))
    return [row for run in chosen for row in rows[run.name]]


def _side_by_side(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Calls functions, --jobs at a time; returns their results in order."""
    # With this, running trainings end with the study; they can be resumed.
    common.exit_on_sigterm()
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


def _chosen() -> list[_Run]:
    runs = _RUNS[_SUITE.value]
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
    weights = _weights(out, _RBM)
    if not weights.is_file():
        print("RBMs ...", flush=True)
        recipe = "--flagfile=scripts/recipes/001-pretrain.flags"
        shape = [f"--scale={_SCALE.value}", f"--seed={_SEED.value}"]
        where = [f"--corpus={out / 'corpus'}", f"--out={weights}"]
        common.call(out, _RBM, ["scripts.pretrain", recipe, *shape, *where])


def _first_epoch(out: Path) -> None:
    """Trains the model that the asynchronous runs start from, on one replica."""
    if not _weights(out, _FIRST).is_file():
        print("the common first epoch ...", flush=True)
        where = [f"--corpus={out / 'corpus'}", f"--run_dir={out / _FIRST}"]
        shape = [f"--scale={_SCALE.value}", f"--seed={_SEED.value}", "--epochs=1", "--rule=none"]
        common.call(out, _FIRST, ["scripts.train", *_PLAIN, *where, *shape])


def _weights(out: Path, name: str) -> Path:
    return out / name / "model.weights.h5"


def _train_and_score(out: Path, run: _Run) -> list[dict[str, Any]]:
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
        *([f"--simulate_replicas={_REPLICAS.value}"] if run.parallel else []),
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


def _seconds(run_dir: Path, now: float) -> float:
    """Returns the seconds of the call that ended the run: `now`, unless it had ended before."""
    file = run_dir / "seconds.json"
    if not file.exists():
        common.write_json(file, now)
    return json.loads(file.read_text())


def _diverged(out: Path, run: _Run, weights: str) -> dict[str, Any]:
    """Returns the row of a run that has ended because its weights diverged."""
    del out
    unknown = ("epochs", "frame_error_rate", "cross_entropy", "phone_error_rate", "staleness")
    return {
        "name": run.name,
        "model": run.model,
        "training": run.training,
        "weights": weights,
        "replicas": _REPLICAS.value if run.parallel else 1,
        **dict.fromkeys(unknown),
    }


def _scored(out: Path, run: _Run, weights: str) -> dict[str, Any]:
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


def _table(rows: list[dict[str, Any]]) -> str:
    names = {"global": "global", "ma": "MA"}
    lines = [
        "| model | training | replicas | epochs | weights | test frame error % | "
        "test phone error % | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        weights = names.get(row["weights"], row["weights"].replace("ema-", "EMA "))
        rates = [row["frame_error_rate"], row["phone_error_rate"]]
        shown = ["diverged" if rate is None else f"{rate:.2f}" for rate in rates]
        epochs = "" if row["epochs"] is None else row["epochs"]
        lines.append(
            f"| {row['model']} | {row['training']} | {row['replicas']} | {epochs} | {weights} | "
            f"{shown[0]} | {shown[1]} | {row['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    common.run(main)
