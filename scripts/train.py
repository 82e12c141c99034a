"""Trains the DNN on a corpus, in one process or as a worker of a cluster.

python -m scripts.train --corpus=corpus --run_dir=runs/single --rule=none
tfpara-launch -n 2 -- python -m scripts.train --corpus=corpus --run_dir=runs/bmuf --rule=bmuf

A replica is a device of a worker. The run directory gets the weights, the log, the flags and
TensorBoard's event files; scripts.evaluate and scripts.export read it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # before TensorFlow

import keras
import tensorflow as tf
from absl import flags

import tfpara
from input import index, pipeline
from models.dnn import dnn
from scripts import runs
from scripts.data import held_out, training_epoch

_RULES = ("bsp", "bmuf", "easgd", "none")

_CORPUS = flags.DEFINE_string("corpus", None, "directory of a prepared corpus", required=True)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "directory for the results", required=True)
_INIT = flags.DEFINE_string("init", None, "weights file (.weights.h5) to start from")

_RULE = flags.DEFINE_enum(
    "rule", "bmuf", _RULES, "how replicas agree; none: plain Keras SGD in one process"
)
_PERIOD = flags.DEFINE_integer(
    "sync_period", 20, "minibatches of each replica between two syncs", lower_bound=1
)
_ETA = flags.DEFINE_float("block_momentum", None, "BMUF: in [0, 1); 1 - 1/replicas if not set")
_ZETA = flags.DEFINE_float("block_learning_rate", 1.0, "BMUF: positive")
_NESTEROV = flags.DEFINE_boolean("nesterov", True, "BMUF: Nesterov block momentum, or classical")
_COMPAT = flags.DEFINE_enum("compat", None, ["cntk", "fairseq"], "BMUF: the form of that toolkit")
_ALPHA = flags.DEFINE_float(
    "elasticity", None, "EASGD: in [0, 2/(replicas + 1)); 0.9/replicas if not set"
)
_LOCAL_STATE = flags.DEFINE_enum(
    "local_state", "keep", ["keep", "reset", "average"], "the local momentum at a sync"
)
_EMA = flags.DEFINE_list(
    "ema_decay", [], "decays, in [0, 1), of moving averages over the syncs' global models"
)

_EPOCHS = flags.DEFINE_integer("epochs", 4, "passes over the training data", lower_bound=1)
_MINIBATCH = flags.DEFINE_integer(
    "minibatch", 256, "frames of a minibatch of one replica", lower_bound=1
)
_RATE = flags.DEFINE_float("learning_rate", 0.1, "of the first epoch, per minibatch", lower_bound=0)
_FINAL_RATE = flags.DEFINE_float(
    "final_learning_rate",
    None,
    "of the last epoch, with exponential decay up to there; constant if not set",
    lower_bound=0,
)
_MOMENTUM = flags.DEFINE_float("momentum", 0.9, "local momentum, in [0, 1)", 0.0, 1.0)
_SEED = flags.DEFINE_integer("seed", 0, "of initial weights and data order", lower_bound=0)
_SHUFFLE = flags.DEFINE_integer(
    "shuffle_frames", pipeline.SHUFFLE_FRAMES, "frames that are shuffled together", lower_bound=1
)

_LAYERS = flags.DEFINE_integer("layers", 6, "hidden layers", lower_bound=0)
_WIDTH = flags.DEFINE_integer("width", 1024, "units of a hidden layer", lower_bound=1)
_ACTIVATION = flags.DEFINE_string("activation", "relu", "of the hidden layers, as Keras names it")
_CONTEXT = flags.DEFINE_integer("context", 5, "frames spliced on each side", lower_bound=0)

_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 60.0, "longest wait in a sync for another worker", lower_bound=1.0
)
_STARTUP = flags.DEFINE_float(
    "startup_timeout_seconds", 300.0, "longest wait for all workers to start", lower_bound=1.0
)
flags.adopt_module_key_flags(common)


def main() -> None:
    with common.bad_input():
        rates = _learning_rates()
        corpus = index.read(_CORPUS.value)
        data_plan = _data_plan(corpus, _file_mark(_INIT.value))
        strategy = _strategy(common.setup_tensorflow(), data_plan)
        keras.utils.set_random_seed(_SEED.value)
        model = _model(corpus, strategy)
        partition = _partition(corpus, strategy)
    chief = strategy is None or strategy.is_chief
    run_dir = Path(_RUN_DIR.value)
    if chief:
        with common.bad_input():
            _start_run(run_dir, corpus)
    history = _fit(model, strategy, corpus, partition, rates, chief, run_dir)
    _finish(model, strategy, run_dir, history, partition)
    common.part(strategy)


def _learning_rates() -> list[float]:
    """The learning rate of each epoch."""
    first, last, epochs = _RATE.value, _FINAL_RATE.value, _EPOCHS.value
    if last is None or epochs == 1:
        return [first] * epochs
    if not first > 0 or not last > 0:
        raise ValueError(
            f"exponential decay needs --learning_rate={first} and --final_learning_rate={last} to "
            "be positive."
        )
    return [first * (last / first) ** (epoch / (epochs - 1)) for epoch in range(epochs)]


def _rule() -> Any:
    eta, zeta = _ETA.value, _ZETA.value
    if _RULE.value == "bmuf":
        return tfpara.BMUF(eta, zeta, nesterov=_NESTEROV.value, compat=_COMPAT.value)
    return tfpara.EASGD(_ALPHA.value) if _RULE.value == "easgd" else tfpara.BSP()


def _averages() -> dict[str, Any]:
    try:
        return {f"ema-{decay}": tfpara.EMA(float(decay)) for decay in _EMA.value}
    except ValueError as error:
        raise ValueError(f"--ema_decay={','.join(_EMA.value)}: {error}") from error


def _strategy(devices: list[str] | None, data_plan: dict[str, Any]) -> Any:
    rule, averages = _rule(), _averages()
    if _RULE.value != "none":
        return tfpara.PeriodicSyncStrategy(
            rule,
            sync_period=_PERIOD.value,
            averages=averages,
            local_state=_LOCAL_STATE.value,
            devices=devices,
            data_plan=data_plan,
            timeout_seconds=_TIMEOUT.value,
            startup_timeout_seconds=_STARTUP.value,
        )
    if tfpara.cluster.read().num_workers > 1 or len(devices or []) > 1:
        raise ValueError(
            "--rule=none is plain Keras on one replica. Start it without the launcher and with "
            "--devices_per_worker=0, or choose --rule=bsp, bmuf or easgd."
        )
    if averages:
        raise ValueError("--ema_decay averages the models of syncs, and --rule=none has none.")
    return None


def _data_plan(corpus: index.CorpusIndex, init_mark: str) -> dict[str, Any]:
    """What all workers must agree on for the data and the schedule to be the same."""
    shared = (_SEED, _EPOCHS, _MINIBATCH, _CONTEXT, _SHUFFLE, _RATE, _FINAL_RATE, _MOMENTUM)
    plan = {flag.name: str(flag.value) for flag in shared}
    return {"corpus": corpus.fingerprint, "init": init_mark, **plan}


def _file_mark(path: str | None) -> str:
    """A short checksum of a file; "" without one."""
    if path is None:
        return ""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"--init={path} does not exist.")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _scope(strategy: Any) -> Any:
    return (strategy or tf.distribute.get_strategy()).scope()


def _dnn_arguments(corpus: index.CorpusIndex) -> dict[str, Any]:
    return {
        "input_dim": corpus.feature_dim * (2 * _CONTEXT.value + 1),
        "num_classes": corpus.num_classes,
        "layers": _LAYERS.value,
        "width": _WIDTH.value,
        "activation": _ACTIVATION.value,
    }


def _model(corpus: index.CorpusIndex, strategy: Any) -> keras.Model:
    with _scope(strategy):
        model = dnn(**_dnn_arguments(corpus), seed=_SEED.value)
        if _INIT.value:
            runs.load_weights(model, Path(_INIT.value))
        model.compile(
            keras.optimizers.SGD(_RATE.value, momentum=_MOMENTUM.value),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="frame_accuracy")],
        )
    return model


def _partition(corpus: index.CorpusIndex, strategy: Any) -> Any:
    partition = pipeline.partition(
        corpus,
        "train",
        num_replicas=strategy.num_replicas if strategy else 1,
        minibatch=_MINIBATCH.value,
        sync_period=_PERIOD.value,
        shuffle_frames=_SHUFFLE.value,
    )
    if partition.num_minibatches < partition.num_replicas:
        raise ValueError(
            f"--minibatch={_MINIBATCH.value} makes {partition.num_minibatches} minibatches of the "
            f"{partition.num_frames} training frames, too few for {partition.num_replicas} "
            "replicas. Lower it, or start fewer replicas."
        )
    return partition


def _fit(
    model: keras.Model,
    strategy: Any,
    corpus: index.CorpusIndex,
    partition: Any,
    rates: list[float],
    chief: bool,
    run_dir: Path,
) -> list[dict[str, float]]:
    """Trains; returns the log of each epoch."""
    validation = held_out(corpus, "validation", strategy, _MINIBATCH.value, _CONTEXT.value)
    # A progress bar on the chief alone. One list for all epochs, so that it knows their number.
    callbacks = keras.callbacks.CallbackList(
        [
            tfpara.callbacks.Telemetry(run_dir / "tensorboard", partition.num_frames),
            tfpara.callbacks.HeldOut(validation),
        ],
        add_history=True,
        add_progbar=chief,
        verbose=1 if os.isatty(1) else 2,
        epochs=len(rates),
        steps=partition.num_steps,
        model=model,
    )
    history = []
    for epoch, rate in enumerate(rates):
        model.optimizer.learning_rate = rate
        dataset = training_epoch(
            corpus,
            strategy,
            epoch,
            minibatch=_MINIBATCH.value,
            sync_period=_PERIOD.value,
            seed=_SEED.value,
            context=_CONTEXT.value,
            shuffle_frames=_SHUFFLE.value,
        )
        # Every epoch has an order of its own, and so a dataset and a fit of its own.
        log = model.fit(dataset, initial_epoch=epoch, epochs=epoch + 1, callbacks=callbacks)
        history.append({name: float(values[-1]) for name, values in log.history.items()})
        history[-1]["learning_rate"] = rate
    return history


def _start_run(run_dir: Path, corpus: index.CorpusIndex) -> None:
    runs.clear(run_dir)
    common.write_text(run_dir / "flags.txt", common.resolved_flags())
    runs.describe(
        run_dir, _dnn_arguments(corpus), _CONTEXT.value, str(corpus.directory), corpus.fingerprint
    )


def _finish(
    model: keras.Model,
    strategy: Any,
    run_dir: Path,
    history: list[dict[str, float]],
    partition: Any,
) -> None:
    """Leaves the weights and the log in the run's directory."""
    if strategy is None:
        runs.save_weights(model, runs.weights_path(run_dir, "global"))
    else:
        for which in ("global", *strategy.averages):
            with strategy.weights(model, which):
                if strategy.is_chief:
                    runs.save_weights(model, runs.weights_path(run_dir, which))
    if strategy is not None and not strategy.is_chief:
        return
    summary = {
        "rule": repr(strategy.rule) if strategy else "none",
        "workers": strategy.num_workers if strategy else 1,
        "replicas": strategy.num_replicas if strategy else 1,
        "frames": partition.num_frames,
        "parameters": model.count_params(),
        **runs.speed(history),
    }
    common.write_json(run_dir / "history.json", {"summary": summary, "epochs": history})
    print(json.dumps({"run": str(run_dir), **summary}))


if __name__ == "__main__":
    common.run(main)
