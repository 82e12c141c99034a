"""Trains an acoustic model on a corpus, in one process or as a worker of a cluster.

python -m scripts.train --corpus=corpus --run_dir=runs/single --rule=none
tfpara-launch -n 2 -- python -m scripts.train --corpus=corpus --run_dir=runs/bmuf --rule=bmuf
tfpara-launch --ps 1 -n 2 -- python -m scripts.train --corpus=corpus --run_dir=runs/asgd --rule=asgd
tfpara-launch --evaluator -n 2 -- python -m scripts.train --corpus=corpus --run_dir=runs/2

A replica is a device of a worker. The run directory gets the weights, the log, the flags,
checkpoints and TensorBoard's event files; scripts.evaluate and scripts.export read it. On SIGTERM
the run writes a checkpoint and ends with exit code 75. If an interrupted run is started again with
the same flags, it continues. An evaluator scores each checkpoint on the validation data while
others train; it writes RUN_DIR/evaluator/scores.csv, and the best weights to
RUN_DIR/best.weights.h5.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

import keras
from absl import flags

import tfpara
from input import index, pipeline, streams
from scripts import (
    async_flags,
    async_training,
    model_flags,
    rule_flags,
    run_files,
    runs,
    schedule_flags,
)
from scripts.data import TrainingData, held_out, is_recurrent
from scripts.scores import scores
from tfpara.checkpoint.store import CheckpointError

_CORPUS = flags.DEFINE_string("corpus", None, "directory of a prepared corpus", required=True)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "directory for the results", required=True)
_INIT = flags.DEFINE_string("init", None, "weights file (.weights.h5) to start from")
_SEED = flags.DEFINE_integer("seed", 0, "of initial weights and data order", 0, 2**32 - 1)
_SHUFFLE = flags.DEFINE_integer(
    "shuffle_frames", pipeline.SHUFFLE_FRAMES, "frames that are shuffled together", lower_bound=1
)

_STREAMS = flags.DEFINE_integer(
    "streams", streams.STREAMS, "recurrent models: utterances side by side in a minibatch", 1
)
_TRUNCATION = flags.DEFINE_integer(
    "truncation", streams.TRUNCATION, "recurrent models: frames of a step of truncated BPTT", 1
)
_DELAY = flags.DEFINE_integer(
    "label_delay", 0, "recurrent models: frames by which outputs are late", lower_bound=0
)
_COEFFICIENTS = flags.DEFINE_integer(
    "coefficients",
    None,
    "recurrent models: the first ones of each frame that are used, such as 80 of 120; all if not "
    "set",
    lower_bound=1,
)
_NORMALISATION = flags.DEFINE_enum(
    "normalisation",
    "global",
    streams.NORMALISATIONS,
    "recurrent models: mean and deviation of frames made 0 and 1, of the corpus' or each "
    "utterance's own",
)

_MINUTES = flags.DEFINE_float(
    "checkpoint_minutes", None, "minutes between checkpoints within epochs; none if not set", 0.0
)
_SYNCS = flags.DEFINE_integer(
    "checkpoint_syncs", None, "syncs between checkpoints within epochs; none if not set", 1
)
_KEEP = flags.DEFINE_integer("keep_checkpoints", 3, "how many of the newest stay", lower_bound=1)
_START_OVER = flags.DEFINE_boolean(
    "start_over",
    False,
    "begin anew, and remove the files of the run that was in --run_dir. Restarts by tfpara-launch "
    "continue the new run. Leave the flag out where a scheduler starts the job again: it would "
    "begin anew each time",
)
_TIMES = flags.DEFINE_integer(
    "held_out_times_per_epoch", 1, "scores of the held-out data in an epoch", lower_bound=1
)

_TRACE = flags.DEFINE_string(
    "trace",
    None,
    "synchronous rules: folder for a timeline of the steps around the second sync, for Chrome's "
    "tracing page or TensorBoard; none if not set",
)
common.refuse_urls(_RUN_DIR, _TRACE)

_WAIT_MINUTES = 60.0  # the evaluator's longest wait for the run to begin or for a new checkpoint
_BEST = "best"  # the name of the weights with the evaluator's best score

_PLANNED = (_SEED, _SHUFFLE, _STREAMS, _TRUNCATION, _DELAY, _COEFFICIENTS, _NORMALISATION)

for _module in (common, model_flags, rule_flags, async_flags, schedule_flags):
    flags.adopt_module_key_flags(_module)


def main() -> None:
    run_dir = Path(_RUN_DIR.value)
    with common.bad_input():
        _check()
        corpus = index.read(_CORPUS.value)
        _check_held_out(corpus)
        description = _description(corpus)
        first_period = next(iter(schedule_flags.sync_periods().values()))
        # With parameter servers, this call returns only in the chief. All other processes do their
        # work within the call, and end there.
        strategy = rule_flags.strategy(first_period, _data_plan(corpus))
        files = _files(strategy)
        # A launcher restarts its processes with the same flags. A restarted process must continue
        # the run that the launcher has begun, so it ignores --start_over.
        start_over = _START_OVER.value and not run_files.is_begun_here(run_dir)
        run_files.check(run_dir, files, start_over, _INIT.value)
        keras.utils.set_random_seed(_SEED.value)
        model = _model(description, strategy)
        warm = schedule_flags.warm_start()
        order = {"seed": _SEED.value, "shuffle_frames": _SHUFFLE.value}
        data: Any
        if rule_flags.is_async():
            data = async_training.ChunkedData(corpus, strategy, description, **order)
        else:
            data = TrainingData(
                corpus,
                strategy,
                description,
                minibatch=schedule_flags.minibatches(),
                sync_period=first_period,
                warm=warm,
                **order,
            )
        scored = len(corpus.split("validation")) > 0
        validation = held_out(corpus, "validation", strategy, description) if scored else None
        callbacks = _callbacks(run_dir, validation, data, warm)
        checkpoint = _checkpoint(run_dir, data, _data_plan(corpus))
    history = _History()
    try:
        if strategy.is_chief:
            with common.bad_input():
                _start_run(run_dir, files, description, start_over)
            if not scored:
                print(f"{corpus.directory} has no validation data, so no epoch is scored.")
            sizes = data.about_sizes() if isinstance(data, TrainingData) else None
            for about in filter(None, (model_flags.about_width(description), sizes)):
                print(about)
        _fit(model, strategy, data, [*callbacks, history, checkpoint])
    except CheckpointError as error:
        raise _failure(error, history) from error
    _finish(model, strategy, run_dir, history.epochs, data)


def score_checkpoints() -> None:
    """Runs the program of an evaluator."""
    run_dir = Path(_RUN_DIR.value)
    with common.bad_input():
        _check()
        corpus = index.read(_CORPUS.value)
        description = _description(corpus)
        common.setup_tensorflow()
        validation = held_out(corpus, "validation", None, description)
        model = runs.build(description, **_streams(description))
        model.compile(optimizer=None, **runs.metrics(description))
        if _START_OVER.value:
            run_files.wait_for_begin(run_dir, _WAIT_MINUTES)
    try:
        tfpara.evaluate_checkpoints(
            model,
            run_files.checkpoints(run_dir),
            validation,
            run_dir / run_files.EVALUATOR,
            epochs=schedule_flags.epochs(),
            averages=rule_flags.all_averages(),
            monitor=runs.entropy_name(description),
            best=runs.weights_path(run_dir, _BEST),
            save=lambda model, path: model.save_weights(path),
            wait_minutes=_WAIT_MINUTES,
        )
    except CheckpointError as error:
        raise common.Failure(str(error)) from error


def _failure(error: CheckpointError, history: _History) -> common.Failure:
    # If a run has trained and then cannot write a checkpoint, --start_over is bad advice, because
    # it removes what the run has written so far. So the message does not give it.
    advise = not (_START_OVER.value or history.has_begun)
    return common.Failure(f"{error}{' To begin anew, give --start_over.' if advise else ''}")


class _History(keras.callbacks.Callback):
    """Keeps the log of every epoch, including those before an interruption."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = False  # whether this process has begun an epoch
        # The logs are not copied, because later callbacks may still add entries to the last log.
        self._logs: list[dict[str, Any]] = []

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The log of each epoch."""
        return [{name: float(value) for name, value in log.items()} for log in self._logs]

    def get_state(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def set_state(self, state: dict[str, Any]) -> None:
        self._logs = list(state["epochs"])

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        model.distribute_strategy.keep_state("history", self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.has_begun = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._logs.append({} if logs is None else logs)


class _Bar(keras.callbacks.ProgbarLogger):
    """A progress bar for epochs that may differ in length.

    If the length is not known, Keras' own bar takes that of the first epoch for all epochs.
    """

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self._steps = params["steps"]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.target = self._steps
        super().on_epoch_begin(epoch, logs)


def _check() -> None:
    """Refuses flags that do not go together."""
    of_streams = (_STREAMS, _TRUNCATION, _DELAY, _COEFFICIENTS, _NORMALISATION)
    recurrent = model_flags.recurrent()
    common.only_for(recurrent, of_streams, "recurrent models, such as --model=lstm-000")
    common.only_for(not recurrent, (_SHUFFLE,), "models of single frames, such as --model=dnn")
    if _MINUTES.value is not None and not _MINUTES.value > 0:
        raise ValueError(f"--checkpoint_minutes={_MINUTES.value} must be positive.")
    of_syncs = (_SYNCS, _TRACE)
    common.only_for(not rule_flags.is_async(), of_syncs, "synchronous rules such as --rule=bmuf")
    schedule_flags.check()


def _check_held_out(corpus: index.CorpusIndex) -> None:
    """Refuses flags that need held-out scores if the corpus has no validation data."""
    if len(corpus.split("validation")):
        return
    needing = schedule_flags.of_scores()
    if rule_flags.rule_name() == "aasgd":
        needing.append("--rule=aasgd")
    if _TIMES.value > 1:
        needing.append(f"--{_TIMES.name}={_TIMES.value}")
    if needing:
        raise ValueError(
            f"corpus {corpus.directory} has no validation data, which {needing[0]} needs. Prepare "
            "the corpus with --validation_data or --validation_share, or leave the flag out."
        )


def _description(corpus: index.CorpusIndex) -> dict[str, Any]:
    return {
        **model_flags.description(corpus, _COEFFICIENTS.value),
        "streams": _STREAMS.value,
        "truncation": _TRUNCATION.value,
        "label_delay": _DELAY.value,
        "normalisation": _NORMALISATION.value,
        "frames": runs.describe_frames(corpus),
    }


def _data_plan(corpus: index.CorpusIndex) -> dict[str, Any]:
    """Returns the settings that must be the same on all workers, and when a run is resumed."""
    shared = [flag.name for flag in _PLANNED]
    for module in (model_flags, async_flags, schedule_flags):
        shared += [flag.name for flag in flags.FLAGS.get_key_flags_for_module(module)]
    plan = {name: str(flags.FLAGS[name].value) for name in shared}
    return {"corpus": corpus.fingerprint, "init": _file_mark(_INIT.value), **plan}


def _file_mark(path: str | None) -> str:
    """Returns a short checksum of a file; "" if there is no file."""
    if path is None:
        return ""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"--init={path} does not exist.")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _model(description: dict[str, Any], strategy: Any) -> keras.Model:
    with strategy.scope():
        model = runs.build(description, seed=_SEED.value, **_streams(description))
        if _INIT.value:
            runs.check_activation(description, Path(_INIT.value))
            runs.load_weights(model, Path(_INIT.value))
        # The loss is a mean over frames. The optimizer Adapt multiplies gradients by the number of
        # these frames, to turn means into sums. A recurrent model reads streams. Its loss is a mean
        # over all frames of a step, including padding, so `frames` counts padding, too.
        in_streams = is_recurrent(description)
        frames = description["streams"] * description["truncation"] if in_streams else None
        optimizer = schedule_flags.optimizer(model, strategy.num_replicas, frames)
        model.compile(optimizer, **runs.metrics(description))
    return model


def _streams(description: dict[str, Any]) -> dict[str, int]:
    return {"streams": description["streams"]} if is_recurrent(description) else {}


def _files(strategy: Any) -> list[str]:
    """Returns the names of all files that the run writes in its directory."""
    kept = ("global", *strategy.averages, _BEST)
    return run_files.of_training(runs.weights_path(Path(), which).name for which in kept)


def _start_run(
    run_dir: Path, files: list[str], description: dict[str, Any], start_over: bool
) -> None:
    """Prepares the directory; the files of an interrupted run stay."""
    if _START_OVER.value and not start_over:
        print("--start_over is ignored: tfpara-launch has restarted the run that it has begun.")
    if start_over or not run_files.can_resume(run_dir):
        try:
            run_files.begin(run_dir, files, start_over)
        # This error means that another run is still writing to the directory. If `main` handled the
        # error, it would advise --start_over, but that would not help.
        except CheckpointError as error:
            raise common.Failure(str(error)) from error
        common.write_json(run_dir / "model.json", description)
    # The flags are written at every start, because a resumed run may have other flags, such as more
    # epochs.
    common.write_text(run_dir / "flags.txt", common.resolved_flags(_START_OVER))


def _callbacks(
    run_dir: Path, validation: Any, data: Any, warm: Any
) -> list[keras.callbacks.Callback]:
    """Returns all callbacks but history and checkpoints; none scores if `validation` is None."""
    replicas = data.strategy.num_replicas
    traced = [] if _TRACE.value is None else [tfpara.callbacks.Trace(_TRACE.value)]
    choosing = async_training.before_scores(data, validation) if rule_flags.is_async() else []
    averages = list(data.strategy.averages)
    scoring = []
    if validation is not None:
        scoring.append(scores(validation, averages, run_dir, _TIMES.value, data.num_steps))
    return [
        *traced,
        tfpara.callbacks.Telemetry(run_dir / "tensorboard", data.num_frames),
        *schedule_flags.before_scores(replicas, warm),
        *choosing,
        *scoring,
        *schedule_flags.after_scores(runs.entropy_name(data.description), validation),
    ]


def _checkpoint(run_dir: Path, data: Any, plan: dict[str, Any]) -> keras.callbacks.Callback:
    if rule_flags.is_async():
        return async_training.checkpoint(run_dir, data, _MINUTES.value, _KEEP.value, plan)
    return tfpara.callbacks.Checkpoint(
        run_files.checkpoints(run_dir),
        every_syncs=_SYNCS.value,
        every_minutes=_MINUTES.value,
        keep=_KEEP.value,
        may_change=() if schedule_flags.epochs_matter() else ("epochs",),
    )


def _fit(
    model: keras.Model, strategy: Any, data: Any, callbacks: list[keras.callbacks.Callback]
) -> None:
    # `fit` would make a CallbackList itself. But the list that is made here is told the number of
    # steps in an epoch, and it shows progress only on the chief.
    chosen = keras.callbacks.CallbackList(
        [*callbacks, _Bar()] if strategy.is_chief else callbacks,
        add_history=True,
        verbose=1 if os.isatty(1) else 2,
        epochs=schedule_flags.epochs(),
        steps=data.num_steps,
        model=model,
    )
    if rule_flags.is_async():
        async_training.fit(model, data, chosen)
        return
    strategy.keep_state("data", data)
    dataset = strategy.datasets_by_epoch(data)
    model.fit(dataset, epochs=schedule_flags.epochs(), callbacks=chosen)


def _finish(
    model: keras.Model,
    strategy: Any,
    run_dir: Path,
    history: list[dict[str, float]],
    data: Any,
) -> None:
    """Writes the weights and the log to the run's directory."""
    for which in ("global", *strategy.averages):
        with strategy.weights(model, which):
            if strategy.is_chief:
                runs.save_weights(model, runs.weights_path(run_dir, which))
    if not strategy.is_chief:
        return
    summary = {
        "rule": "none" if rule_flags.rule_name() == "none" else repr(strategy.rule),
        "workers": strategy.num_workers,
        "replicas": strategy.num_workers if rule_flags.is_async() else strategy.num_replicas,
        "frames": data.num_frames,
        "parameters": model.count_params(),
        **runs.speed(history),
    }
    if rule_flags.is_async():
        found = strategy.statistics(model)
        summary |= {"pushes": found.pushes, "staleness": round(found.mean_staleness, 3)}
    common.write_json(run_dir / "history.json", {"summary": summary, "epochs": history})
    print(json.dumps({"run": str(run_dir), **summary}))


if __name__ == "__main__":
    common.run(main, score_checkpoints)
