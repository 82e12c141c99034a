"""The main job from end to end: makes speech, trains DNNs under rules, exports the best one.

scripts/demo.sh        (or python -m scripts.demo)

All runs start from one model, which one process has trained for an epoch by SGD. Then one process
continues with SGD, and --workers processes, with a thread each, train under each rule. All of these
have the same number of epochs and the same schedule. Asynchronous SGD has a parameter server and a
chief, too. The demo takes about three minutes on two free cores. With --thorough, which has three
more rules and more epochs, it takes about six.

The run with Nesterov block momentum also keeps averages of its global models. The averages have
rows of their own in the table, and do not change the training. The demo prints the table, and
writes results.json, learning_curves.png, the runs and a SavedModel of the model that is best on the
validation set to --out. samples/s is the speed of training without each epoch's first step.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

from absl import flags
from tqdm import tqdm

from scripts import runs
from scripts.data import held_out

_OUT = flags.DEFINE_string("out", "runs/demo", "directory for corpus, runs and results")
common.refuse_urls(_OUT)
_TRAIN = flags.DEFINE_float("train_minutes", 14.0, "speech to train on, in minutes", 0.1)
_HELD_OUT = flags.DEFINE_float(
    "held_out_minutes", 3.0, "speech of each of validation and test, in minutes", 0.1
)
_WORKERS = flags.DEFINE_integer("workers", 2, "processes of each run with a rule", lower_bound=1)
_PERIOD = flags.DEFINE_integer(
    "sync_period", 10, "minibatches of each replica between two syncs", lower_bound=1
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", None, "after the common first one; 3 if not set, 5 with --thorough", lower_bound=1
)
_THOROUGH = flags.DEFINE_bool(
    "thorough", False, "also classical BMUF, syncs in int8 and EASGD, and more epochs"
)
_RATE = flags.DEFINE_float("learning_rate", 0.05, "at the start, per minibatch of 256 frames")
_FINAL_RATE = flags.DEFINE_float("final_learning_rate", 0.002, "of the last epoch")
_LAYERS = flags.DEFINE_integer("layers", 4, "hidden layers", lower_bound=0)
_WIDTH = flags.DEFINE_integer("width", 512, "units of a hidden layer", lower_bound=1)


# With this decay, the average spans about 10 syncs. By default, an epoch has about 16 syncs, so the
# average spans more than half an epoch.
_EMA_DECAY = 0.9


class _Run(NamedTuple):
    """A training run. `options` are flags of scripts.train."""

    name: str
    title: str
    options: tuple[str, ...]


class _Row(NamedTuple):
    """A row of the table: a run, and the name of one of its models."""

    run: _Run
    weights: str
    model: str


_ALONE = ("--rule=none", "--sync_period=1000")  # no syncs; the period affects only checkpoints
_INITIAL = _Run("initial", "common first epoch, single SGD", _ALONE)
_SINGLE = _Run("single", "single SGD", _ALONE)
_RUNS = (
    _SINGLE,
    _Run("bsp", "BSP", ("--rule=bsp",)),
    _Run("bmuf-nesterov", "Nesterov BMUF", ("--rule=bmuf", "--ma", f"--ema_decay={_EMA_DECAY}")),
    # This run has a parameter server, to which each worker sends the gradient of every minibatch.
    _Run("asgd", "asynchronous SGD", ("--rule=asgd", "--sync_period=1", "--chunk_minutes=2")),
)
_THOROUGH_RUNS = (
    _Run("bmuf-classical", "classical BMUF", ("--rule=bmuf", "--nonesterov")),
    _Run("bmuf-int8", "Nesterov BMUF, syncs in int8", ("--rule=bmuf", "--compression=int8")),
    _Run("easgd", "EASGD", ("--rule=easgd",)),
)
_AVERAGES = {"ma": "MA", f"ema-{_EMA_DECAY}": f"EMA({_EMA_DECAY})"}


def main() -> None:
    started = time.monotonic()
    # Without this, a SIGTERM would end the demo, and the training that it has started would go on.
    common.exit_on_signals()
    out = Path(_OUT.value)
    with common.bad_input():
        # If Matplotlib is missing, this fails now and not after minutes of training.
        common.pyplot("agg")
        out.mkdir(parents=True, exist_ok=True)
    corpus = out / "corpus"
    print(_plan(), flush=True)
    _prepare(corpus)
    with _Progress() as progress:
        _train_all(out, corpus, progress)
    results = _results(out, corpus)
    # The validation set decides which model is the best. The test set has no part in this choice.
    best = min(results, key=lambda result: result["validation_frame_error_rate"])
    export = out / "export"
    chosen = [f"--run_dir={out / best['name']}", f"--weights={best['weights']}"]
    common.call(out, "export", ["scripts.export", *chosen, f"--out={export}"])
    common.write_json(out / "results.json", {"runs": results, "export": str(export)})
    _plot(out)
    _print_table(results)
    print(
        f"Best on the validation set: {best['title']}, {best['model']} model, exported to {export}"
    )
    print(
        f"{out}/results.json, {out}/learning_curves.png; {time.monotonic() - started:.0f} s in all"
    )


def _plan() -> str:
    """Returns a sentence on what the demo will do, and how long that takes."""
    titles = ", ".join(run.title for run in _runs()[1:])
    # An estimate of the time that the demo takes on two free cores, with the default network.
    speech = _TRAIN.value + 2 * _HELD_OUT.value
    seconds = 20 + 1.0 * speech
    for run in (_INITIAL, *_runs()):
        seconds += 10 + 0.7 * _epochs(run) * _TRAIN.value / _workers(run)
    return (
        f"The demo makes {speech:g} minutes of speech. It trains a network on them in one process, "
        f"and in {_WORKERS.value} by {titles}. Then it compares the errors, and exports the best "
        f"model. That takes about {max(1, round(seconds / 60))} min on two free cores."
    )


def _train_all(out: Path, corpus: Path, progress: _Progress) -> None:
    """Trains the common first epoch, and the runs that start from its model."""
    first = [f"--learning_rate={_RATE.value}", "--epochs=1", "--seed=0"]
    _train(_INITIAL, out, corpus, first, progress)
    rest = [
        f"--init={out / 'initial' / 'model.weights.h5'}",
        f"--epochs={_epochs(_SINGLE)}",
        f"--learning_rate={_RATE.value}",
        f"--final_learning_rate={_FINAL_RATE.value}",
        "--seed=1",
    ]
    for run in _runs():
        _train(run, out, corpus, rest, progress)


def _prepare(corpus: Path) -> None:
    minutes = _HELD_OUT.value
    print(f"speech: {_TRAIN.value + 2 * minutes:g} minutes in {corpus} ...", flush=True)
    lines = common.call(
        corpus.parent,
        "corpus",
        [
            "scripts.prepare_speech",
            f"--out={corpus}",
            f"--train_minutes={_TRAIN.value}",
            f"--validation_minutes={minutes}",
            f"--test_minutes={minutes}",
        ],
    )
    print(f"  {lines[-1]}", flush=True)


class _Progress:
    """The progress bar over all training; its unit is an epoch of a run on one process."""

    def __enter__(self) -> _Progress:
        total = _epochs(_INITIAL) / _workers(_INITIAL)
        total += sum(_epochs(run) / _workers(run) for run in _runs())
        shape = "{desc} {bar} {percentage:3.0f} %, {elapsed} gone, {remaining} left"
        self._bar = tqdm(total=total, bar_format=shape, disable=not sys.stderr.isatty())
        self._done = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        tqdm.write(line)
        sys.stdout.flush()

    def follow(self, run: _Run, printed: str) -> None:
        """Moves the bar to the progress of a run, which is read from all that it has printed."""
        begun = [int(epoch) for epoch in re.findall(r"Epoch (\d+)/\d+", printed)]
        self._bar.n = self._done + max(max(begun, default=1) - 1, 0) / _workers(run)
        self._bar.set_description_str(run.title, refresh=False)
        self._bar.refresh()

    def ended(self, run: _Run) -> None:
        """Moves the bar to the end of a run."""
        self._done += _epochs(run) / _workers(run)
        self._bar.n = self._done
        self._bar.refresh()


def _train(run: _Run, out: Path, corpus: Path, schedule: list[str], progress: _Progress) -> None:
    """Trains one run in separate processes, with one thread each."""
    workers = _workers(run)
    progress.say(f"{run.title}, {workers} worker{'s' * (workers > 1)} ...")
    began = time.monotonic()
    command = [
        "scripts.train",
        f"--corpus={corpus}",
        f"--run_dir={out / run.name}",
        f"--layers={_LAYERS.value}",
        f"--width={_WIDTH.value}",
        f"--sync_period={_PERIOD.value}",
        "--start_over",
        *run.options,
        *schedule,
    ]
    if workers > 1 or _is_async(run):
        servers = ["--ps", "1"] if _is_async(run) else []
        launcher = ["tfpara.launch", *servers, "-n", str(workers), "--threads", "1", "--"]
        command = [*launcher, sys.executable, "-m", *command]
    common.call(out, run.name, command, lambda printed: progress.follow(run, printed))
    progress.ended(run)
    history = _history(out, run.name)
    progress.say(
        f"  validation frame error {_errors(history)[-1]:.2f} %, "
        f"{_speed(history):.0f} samples/s, "
        f"{time.monotonic() - began:.0f} s"
    )


def _runs() -> tuple[_Run, ...]:
    return _RUNS + (_THOROUGH_RUNS if _THOROUGH.value else ())


def _epochs(run: _Run) -> int:
    return 1 if run is _INITIAL else _EPOCHS.value or (5 if _THOROUGH.value else 3)


def _is_async(run: _Run) -> bool:
    return "--rule=asgd" in run.options


def _workers(run: _Run) -> int:
    return 1 if "--rule=none" in run.options else _WORKERS.value


def _history(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / name / "history.json").read_text())


def _speed(history: dict[str, Any]) -> float:
    """Returns the samples/s of a run; NaN if its epochs had one step, which is not measured."""
    return history["summary"].get("samples_per_second", math.nan)


def _errors(history: dict[str, Any], weights: str = "global") -> list[float]:
    """Returns the validation frame error in % after each epoch."""
    name = "validation" if weights == "global" else f"validation_{weights}"
    return [100 * (1 - log[f"{name}_frame_accuracy"]) for log in history["epochs"]]


def _rows() -> list[_Row]:
    rows = []
    for run in _runs():
        rows.append(_Row(run, "global", "global"))
        if "--ma" in run.options:
            rows += [_Row(run, weights, title) for weights, title in _AVERAGES.items()]
    return rows


def _results(out: Path, corpus: Path) -> list[dict[str, Any]]:
    common.setup_tensorflow()
    from input import index

    test = index.read(corpus)
    single = _speed(_history(out, _SINGLE.name))
    results = []
    for run, weights, title in _rows():
        model, description = runs.load(out / run.name, weights)
        model.compile(optimizer=None, **runs.metrics(description))
        dataset = held_out(test, "test", None, description)
        scores = runs.named_scores(model.evaluate(dataset, verbose=0, return_dict=True))
        history = _history(out, run.name)
        summary = history["summary"]
        results.append(
            {
                "name": run.name,
                "title": run.title,
                "weights": weights,
                "model": title,
                "workers": summary["workers"],
                "validation_frame_error_rate": _errors(history, weights)[-1],
                "frame_error_rate": scores["frame_error_rate"],
                "samples_per_second": _speed(history),
                "speedup": _speed(history) / single,
                "sync_fraction": summary.get("sync_fraction"),
            }
        )
    return results


def _print_table(results: list[dict[str, Any]]) -> None:
    width = max(len(r["title"]) for r in results)
    print(f"\n{'rule':{width}}  model     workers  test FER %  samples/s  speed-up  in sync %")
    for r in results:
        in_sync = "-" if r["sync_fraction"] is None else f"{100 * r['sync_fraction']:.1f}"
        print(
            f"{r['title']:{width}}  {r['model']:8}  {r['workers']:7}  "
            f"{r['frame_error_rate']:10.2f}  {r['samples_per_second']:9.0f}  "
            f"{r['speedup']:8.2f}  {in_sync:>9}"
        )
    print()


def _plot(out: Path) -> None:
    pyplot = common.pyplot("agg")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    start = _errors(_history(out, "initial"))[-1:]
    for run, weights, title in _rows():
        errors = start + _errors(_history(out, run.name), weights)
        label = run.title if weights == "global" else f"{run.title}, {title}"
        axes.plot(range(1, len(errors) + 1), errors, marker="o", markersize=3, label=label)
    axes.set(xlabel="epoch", ylabel="validation frame error rate (%)")
    axes.set_title(f"{_WORKERS.value} workers, sync every {_PERIOD.value} minibatches")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "learning_curves.png", dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    common.run(main)
