"""Keras' functions that have to know that several workers run one script.

Keras 3 does not. Each worker would write to the same path at once. So the functions that write are
replaced here, for models whose weights are a `PeriodicSyncStrategy`'s:

- what saves a model writes on the chief, and nothing on the other workers;
- callbacks run on all workers, and those that write are given a folder on the other workers that is
  removed, as in Keras 2;
- `fit` and `train_on_batch` look first whether the model was made in a strategy's scope;
- `fit` tells callbacks of its end, where it raises too;
- `fit` returns when all workers have come to its end, so what the chief wrote in it is there;
- the log of an epoch and of `evaluate` is the same on all workers;
- the progress bars of `fit`, `evaluate` and `predict` are the chief's, unless `verbose` is given;
- `fit` and `evaluate` look first whether all workers have the same data, which they divide, and
  read Python data (`PyDataset`, generators) so that each batch has one reader;
- `fit`, `evaluate` and lists of callbacks say where this worker is, for the others;
- `predict` gives the worker that calls it all rows.

None of them waits for other workers within a save, since scripts may call it on the chief alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import multiprocessing
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

# Where fit, evaluate and predict make datasets of what they are given, and what they make them of.
from keras.src.backend.tensorflow import trainer as _trainer

# The functions that all public ways to save end in: Model.save, Model.save_weights, and
# keras.saving's and keras.models' functions, also where a script imported these by their names.
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5_format
from keras.src.saving import saving_lib as _saving_lib
from keras.src.trainers import data_adapters as _adapters
from keras.src.trainers.data_adapters import data_adapter_utils as _adapter_utils

from tfpara import files, fit_call
from tfpara.cluster.place import EVALUATE, FIT_END, Place
from tfpara.keras_model import (
    build_optimizer,
    check_optimizers_built,
    strategy_of,
    unbuilt_optimizers,
)
from tfpara.sync import division, reading, scope
from tfpara.sync.exchange import everyones
from tfpara.sync.extended import PeriodicSyncExtended, in_replica
from tfpara.typing import Data, Json, Nest, Variable

_CALLBACKS = keras.callbacks
# A function of Keras, or what is put in its place.
Method: TypeAlias = Callable[..., Any]

_PLACE = "tfpara_place"  # attribute of a list of callbacks
# The callbacks that write, and the attribute that says where.
_PATHS = {
    _CALLBACKS.ModelCheckpoint: "filepath",
    _CALLBACKS.CSVLogger: "filename",
    _CALLBACKS.TensorBoard: "log_dir",
}
_replaced: set[tuple[int, str, Method]] = set()
# While a step is traced to see them, the weights that optimizers without slots train, by their ids.
_unbuilt: dict[int, keras.optimizers.Optimizer] = {}
_element_specs: weakref.WeakKeyDictionary[keras.Model, Nest] = weakref.WeakKeyDictionary()


def install() -> None:
    """Replaces Keras' functions; a second call changes nothing."""
    _replace(_saving_lib, "save_model", _by_the_chief)
    _replace(_saving_lib, "save_weights_only", _by_the_chief)
    _replace(_legacy_h5_format, "save_model_to_hdf5", _by_the_chief)
    _replace(keras.Model, "export", _by_the_chief)
    for method in ("fit", "evaluate", "predict"):
        _replace(keras.Model, method, _shown_by_the_chief)
    watch_fit()
    _replace(keras.Model, "fit", _together)
    _replace(keras.Model, "evaluate", _placed)
    _replace(keras.Model, "train_on_batch", _looked_at)
    _replace(keras.Model, "predict", _of_all_rows)
    # With what a custom step has returned, `fit` and `evaluate` ask this for their log.
    _replace(keras.Model, "_get_metrics_result_or_logs", _of_all_workers)
    # Which optimizers a loop has, it does not say.
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _replace(kind, "apply", _step_noted)
    _replace(_CALLBACKS.CallbackList, "__init__", _with_files_of_the_chief)
    for hook, make in _HOOKS.items():
        _replace(_CALLBACKS.CallbackList, hook, make)
    _replace(_trainer, "TFEpochIterator", _with_divided_data)
    _replace(keras.Model, "_maybe_symbolic_build", _without_reading)
    _replace(keras.Model, "_maybe_symbolic_build", _looking)  # around the former


def watch_fit() -> None:
    """Has `fit` call at its end what `fit_call.at_end` was given; a second call changes nothing."""
    _replace(keras.Model, "fit", _watched)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if (id(owner), name, make) not in _replaced:
        _replaced.add((id(owner), name, make))
        setattr(owner, name, make(getattr(owner, name)))


def _strategy(model: keras.Model) -> Any:
    """The `PeriodicSyncStrategy` of a model; None if it has another or none."""
    strategy = strategy_of(model)
    return strategy if isinstance(strategy.extended, PeriodicSyncExtended) else None


# -- saving ----------------------------------------------------------------------------------------


def _by_the_chief(write: Method) -> Method:
    """What saves a model, made to write on the chief alone, and whole."""

    @functools.wraps(write)
    def saving(
        model: keras.Model, filepath: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return write(model, filepath, *args, **kwargs)
        # To see what optimizers and layers have by nature, Keras makes some, with variables.
        with strategy.extended.creating_alone():
            if not isinstance(filepath, (str, os.PathLike)):
                return write(model, filepath, *args, **kwargs)
            if not strategy.is_chief:
                return None
            with _scratch(os.fspath(filepath)) as scratch:
                return write(model, scratch, *args, **kwargs)

    return saving


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    """Where to write a model so that it appears at `path` whole."""
    if "://" in path or (os.path.isdir(path) and not files.holds_a_model_alone(Path(path))):
        # A remote place has no renames, and a folder of other things is not replaced.
        yield path
        return
    with files.whole(path) as scratch, _printing(os.fspath(scratch), path):
        yield os.fspath(scratch)


@contextlib.contextmanager
def _printing(former: str, path: str) -> Iterator[None]:
    """Has what Keras prints about one path name another."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(printed.getvalue().replace(former, path), end="")


# -- fit, predict, callbacks ----------------------------------------------------------------------


def _watched(fit: Method) -> Method:
    """`fit` of any model, made to tell callbacks of its end."""

    @functools.wraps(fit)
    def fitting(*args: object, **kwargs: object) -> object:
        with fit_call.under_way():
            return fit(*args, **kwargs)

    return fitting


# What pybind11 says where Ctrl-C comes while an operation raises an error of its own, as it does
# where another worker has ended by Ctrl-C.
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"


def _shown_by_the_chief(method: Method) -> Method:
    """A method of a model with a progress bar, which other workers show only where asked to."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def showing(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        given = signature.bind(model, *args, **kwargs)
        others = strategy is not None and not strategy.is_chief
        if others and given.arguments.get("verbose", "auto") == "auto":
            given.arguments["verbose"] = 0
        try:
            return method(*given.args, **given.kwargs)
        except RuntimeError as error:
            if _INTERRUPTED in str(error):
                raise KeyboardInterrupt from None
            raise

    return showing


def _together(fit: Method) -> Method:
    """`fit`, made to return when every worker has come to its end."""

    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fitting(model: keras.Model, *args: object, **kwargs: object) -> object:
        _look(model)
        strategy = _strategy(model)
        if strategy is None:
            return fit(model, *args, **kwargs)
        _refuse_spent(signature.bind(model, *args, **kwargs).arguments)
        extended = strategy.extended
        with extended.in_fit(model), _with_data("fit", strategy):
            history = fit(model, *args, **kwargs)
            if strategy.num_workers > 1:
                extended.finish_blocks(FIT_END)
        return history

    return fitting


@contextlib.contextmanager
def _with_data(name: str, strategy: Any) -> Iterator[None]:
    """Says in a sentence that there are no data, for which Keras has an empty StopIteration."""
    try:
        yield
    except StopIteration:
        raise ValueError(
            f"{name} got data without a single batch on worker {strategy.worker_index}. Every "
            "worker needs at least one: give it data, or start fewer workers."
        ) from None


def _placed(evaluate: Method) -> Method:
    """`evaluate`, whose reading of metrics all workers must come to."""

    @functools.wraps(evaluate)
    def evaluating(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return evaluate(model, *args, **kwargs)
        with strategy.extended.place.in_call(EVALUATE), _with_data("evaluate", strategy):
            return evaluate(model, *args, **kwargs)

    return evaluating


def _looked_at(train: Method) -> Method:
    """A method that trains a model, made to look first where that was made."""

    @functools.wraps(train)
    def training(model: keras.Model, *args: object, **kwargs: object) -> object:
        _look(model)
        return train(model, *args, **kwargs)

    return training


def _look(model: keras.Model) -> None:
    """Raises ValueError if a model cannot be trained as it stands."""
    scope.look(model)
    strategy = _strategy(model)
    trained = strategy.extended.trained(model) if strategy is not None else None
    if trained is not None and trained.shows_others:
        raise ValueError(
            "the model is trained while strategy.weights(...) shows others than the replicas' own; "
            "it would be lost on leaving. Leave first, and train then."
        )


def _of_all_workers(read: Method) -> Method:
    """What makes the log of an epoch, made to give all workers the same.

    Keras takes the metrics' values only if the last step returned these and no others; else all of
    its log is what that step returned on this worker. Here metrics are those of all replicas in
    each case, and of another value the workers' means of their last steps are averaged.
    """

    @functools.wraps(read)
    def reading(model: keras.Model, logs: dict[str, Nest]) -> dict[str, Nest]:
        strategy = _strategy(model)
        if strategy is None or not isinstance(logs, dict):
            return read(model, logs)
        metrics = model.get_metrics_result()
        if not _has_own_steps(model):
            return metrics  # A worker that has taken no step of a resumed epoch has no logs.
        extended = strategy.extended
        purpose = extended.place.of_metric()
        # Others may still have data, and with no metrics to read nothing has waited for them.
        extended.finish_blocks(purpose)
        returned = everyones(_plain(logs), extended.control, purpose)
        names = {name: None for of_worker in returned for name in of_worker} or metrics
        if names.keys() == metrics.keys():
            return metrics
        log = {}
        for name in names:
            values = [of_worker[name] for of_worker in returned if name in of_worker]
            counted = name in metrics and not _counted_nothing(model, name, metrics[name])
            log[name] = metrics[name] if counted else _mean(values)
        return log

    return reading


def _has_own_steps(model: keras.Model) -> bool:
    """Whether steps of a model may return other values than its metrics; alike on all workers."""
    names = ("train_step", "test_step", "compute_metrics")
    own = (getattr(getattr(model, name), "__func__", None) for name in names)
    return any(one is not getattr(keras.Model, name) for one, name in zip(own, names, strict=True))


def _plain(logs: dict[str, Json]) -> dict[str, Json]:
    """Logs as numbers and lists; what is under a name of its own within a dict comes out of it."""
    found: dict[str, Json] = {}
    for name, value in logs.items():
        found |= _plain(value) if isinstance(value, dict) else {name: np.asarray(value).tolist()}
    return found


def _mean(values: list[Nest]) -> Nest:
    """Of numbers and arrays the mean; of what has none the first worker's."""
    try:
        mean = np.mean(np.array(values, np.float64), 0)
    except (TypeError, ValueError):
        return values[0]
    return mean if mean.ndim else float(mean)


def _counted_nothing(model: keras.Model, name: str, value: Nest) -> bool:
    """Whether the step left out a metric of this name, as one that returns a loss of its own does.

    Keras makes a metric "loss" for each compiled model. The variables, whose reading is an exchange
    of all workers, are looked at only where the value, which all have alike, is 0.
    """
    if np.any(value):
        return False
    of_name = [metric for metric in model.metrics if metric.name == name]
    return not any(np.any(v) for metric in of_name for v in metric.variables)


def _looking(build: Method) -> Method:
    """What builds a model from a first batch, made to look at its shapes alone."""

    @functools.wraps(build)
    def building(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return build(model, *args, **kwargs)
        with strategy.extended.looking():
            built = build(model, *args, **kwargs)
        iterator: Any = (*args, kwargs.get("iterator"))[0]
        if iterator is not None:
            # What `fit` iterates over; it has no public name.
            _element_specs[model] = iterator._distributed_dataset.element_spec
        return built

    return building


def _step_noted(apply: Method) -> Method:
    """An optimizer's step, made to be noticed by the strategy in whose replica it is taken."""

    @functools.wraps(apply)
    def applying(
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> object:
        if id(optimizer) in _unbuilt:
            _unbuilt[id(optimizer)] = trainable_variables
            return None
        strategy = tf.distribute.get_strategy()
        if isinstance(strategy.extended, PeriodicSyncExtended) and in_replica():
            strategy.extended.note_step(optimizer)
        return apply(optimizer, grads, trainable_variables)

    return applying


def build_optimizers(model: keras.Model) -> None:
    """Makes the slots of all of a model's optimizers, which its first step would make later.

    Which weights one of several optimizers trains, only the model's `train_step` knows: it is
    traced for the data of the `fit` that is under way, and not run.

    Raises:
        ValueError: an optimizer has none even so; the message has the line that makes them.
    """
    build_optimizer(model)
    spec = _element_specs.get(model)
    unbuilt = [getattr(model, name) for name in unbuilt_optimizers(model)]
    if unbuilt and spec is not None and not model.run_eagerly:
        strategy = model.distribute_strategy
        # TensorFlow's: ours would make the model's synchronizer, which is to know the slots.
        run = tf.distribute.MultiWorkerMirroredStrategy.run
        step = tf.autograph.experimental.do_not_convert(
            lambda minibatch: run(strategy, model.train_step, args=(minibatch,))
        )
        _unbuilt.update((id(optimizer), None) for optimizer in unbuilt)
        try:
            tf.function(step).get_concrete_function(spec)
            weights = dict(_unbuilt)
        finally:
            _unbuilt.clear()
        with strategy.scope():
            for optimizer in unbuilt:
                if weights[id(optimizer)] is not None:
                    optimizer.build(weights[id(optimizer)])
    check_optimizers_built(model)


def _of_all_rows(predict: Method) -> Method:
    """`predict`, made to compute all rows on the worker that calls it."""

    @functools.wraps(predict)
    def predicting(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return predict(model, *args, **kwargs)
        with strategy.extended.undivided():
            return predict(model, *args, **kwargs)

    return predicting


def _with_files_of_the_chief(make: Callable[..., None]) -> Callable[..., None]:
    """`CallbackList`'s constructor, which `fit`, `evaluate` and `predict` call."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def making(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        model = given.arguments.get("model")
        strategy = None if model is None else _strategy(model)
        if strategy is not None:
            callbacks = keras.tree.flatten(given.arguments.get("callbacks") or [])
            prepared = [_prepared(c, strategy) for c in fit_call.arranged(callbacks)]
            given.arguments["callbacks"] = [p for p in prepared if p is not None]
        make(*given.args, **given.kwargs)
        if strategy is not None:
            setattr(given.arguments["self"], _PLACE, strategy.extended.place)

    return making


def _in_place(name: str) -> Callable[[Method], Method]:
    """What makes a hook of `CallbackList` say where `fit` is, and that it is in callbacks."""

    def make(hook: Method) -> Method:
        @functools.wraps(hook)
        def calling(
            callbacks: keras.callbacks.CallbackList, *args: Any, **kwargs: object
        ) -> object:
            place: Place | None = getattr(callbacks, _PLACE, None)
            if place is None:
                return hook(callbacks, *args, **kwargs)
            if name == "on_epoch_begin":
                place.epoch_begins(*args[:1])
            if name == "on_train_batch_begin":
                place.step_begins(*args[:1])
            with place.in_callbacks():
                return hook(callbacks, *args, **kwargs)

        return calling

    return make


_HOOKS = {
    f"on_{of}_{when}": _in_place(f"on_{of}_{when}")
    for of in ("train", "epoch", "train_batch")
    for when in ("begin", "end")
}


def _prepared(callback: keras.callbacks.Callback, strategy: Any) -> Any:
    """What runs in a callback's place on this worker; None if nothing does.

    Raises:
        ValueError: the callback cannot work under the strategy.
    """
    _refuse(callback, strategy)
    attribute = next((a for kind, a in _PATHS.items() if isinstance(callback, kind)), None)
    if not strategy.is_chief:
        if type(callback) is _CALLBACKS.RemoteMonitor:
            return None
        return callback if attribute is None else _Elsewhere(callback, attribute)
    if isinstance(callback, _CALLBACKS.CSVLogger):
        # Keras makes the folders of the others.
        os.makedirs(os.path.dirname(callback.filename) or ".", exist_ok=True)
    return callback


def _refuse(callback: keras.callbacks.Callback, strategy: Any) -> None:
    if isinstance(callback, _CALLBACKS.BackupAndRestore):
        raise ValueError(
            "BackupAndRestore keeps the weights of one replica, and neither the global model, its "
            "momentum and averages nor the other replicas: a run would not go on where it was. Use "
            f"tfpara.callbacks.Checkpoint({os.fspath(callback.backup_dir)!r}) in its place."
        )
    orbax = getattr(_CALLBACKS, "OrbaxCheckpoint", None)
    if orbax is not None and isinstance(callback, orbax) and strategy.num_workers > 1:
        raise ValueError(
            "OrbaxCheckpoint would write from every worker into one folder. Use "
            "keras.callbacks.ModelCheckpoint, or to go on after a failure "
            "tfpara.callbacks.Checkpoint(directory)."
        )


class _Elsewhere(keras.callbacks.Callback):
    """A callback whose files go to a folder that is removed, and that prints nothing of them.

    The callback has its own path again whenever none of its methods runs.
    """

    def __init__(self, callback: keras.callbacks.Callback, attribute: str) -> None:
        super().__init__()
        self._callback, self._attribute = callback, attribute
        self._folder = tempfile.mkdtemp(prefix="tfpara-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def set_model(self, model: keras.Model) -> None:
        self._call("set_model", model)

    def set_params(self, params: dict[str, Json]) -> None:
        self._callback.set_params(params)

    def _call(self, method: str, *args: object, **kwargs: object) -> None:
        path = os.fspath(getattr(self._callback, self._attribute))
        meanwhile: dict[str, Json] = {
            self._attribute: os.path.join(self._folder, os.path.basename(path) or "files")
        }
        if hasattr(self._callback, "verbose"):
            meanwhile["verbose"] = 0
        own = {name: getattr(self._callback, name) for name in meanwhile}
        try:
            for name, value in meanwhile.items():
                setattr(self._callback, name, value)
            getattr(self._callback, method)(*args, **kwargs)
        finally:
            for name, value in own.items():
                # What the callback has set itself stays.
                if getattr(self._callback, name) == meanwhile[name]:
                    setattr(self._callback, name, value)


def _passed_on(method: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self._call(method, *args, **kwargs)


for _name in dir(_CALLBACKS.Callback):
    if _name.startswith("on_"):
        setattr(_Elsewhere, _name, _passed_on(_name))


# -- data ------------------------------------------------------------------------------------------


def _with_divided_data(make: Any) -> Method:
    """The class of `fit`'s passes over data, made to look at the data first."""

    @functools.wraps(make, updated=())
    def making(distribute_strategy: Any = None, **kwargs: Any) -> Any:
        extended = getattr(distribute_strategy, "extended", None)
        if not isinstance(extended, PeriodicSyncExtended):
            return make(distribute_strategy=distribute_strategy, **kwargs)
        rest = {k: kwargs.pop(k) for k in ("steps_per_execution",) if k in kwargs}
        rest["steps_per_epoch"] = kwargs.get("steps_per_epoch")
        # Keras' own choice and errors; what it is given back it takes as it is.
        adapter = _adapters.get_data_adapter(**kwargs)
        if isinstance(adapter, _adapters.PyDatasetAdapter):
            adapter = _PyDatasetSteps(kwargs["x"], adapter, extended)
        elif isinstance(adapter, _adapters.GeneratorDataAdapter):
            adapter = _GeneratorSteps(adapter, extended)
        divided = extended.share != (0, 1)
        _check(adapter, extended, divided)
        # In the midst of an epoch the workers may be at different steps.
        if divided and not (extended.place.fits and extended.place.calls):
            extended.check_data(_facts(adapter), bool(getattr(adapter, "_shuffle", False)))
        if isinstance(adapter, _adapters.TFDatasetAdapter):
            dataset = adapter.get_tf_dataset()
            if isinstance(dataset, tf.data.Dataset) and not division.divided_between_workers(
                dataset
            ):
                # Keras counts the steps of an epoch by it.
                dataset = distribute_strategy.experimental_distribute_dataset(dataset)
                adapter = _adapters.TFDatasetAdapter(dataset)
        kind = _Epochs if isinstance(adapter, _Steps) else make
        return kind(distribute_strategy=distribute_strategy, x=adapter, **rest)

    return making


def _check(adapter: Any, extended: PeriodicSyncExtended, divided: bool) -> None:
    """Raises ValueError if data cannot be divided between the replicas."""
    if isinstance(adapter, _adapters.TFDatasetAdapter):
        dataset = adapter.get_tf_dataset()
        if isinstance(dataset, tf.data.Dataset) and extended._num_replicas_in_sync > 1:
            division.check_batched(dataset.element_spec)
    elif divided and not isinstance(adapter, (_Steps, _adapters.ArrayDataAdapter)):
        raise ValueError(
            f"{type(adapter).__name__.removesuffix('Adapter')} data are not divided among workers. "
            "Give each worker its part: data = strategy.distribute_datasets_from_function("
            "lambda context: dataset), with `dataset` a tf.data.Dataset of this worker's "
            "minibatches, and give them `data`."
        )


def _facts(adapter: Any) -> dict[str, Json]:
    """What tells this worker's data from another's: see `division.difference`."""
    if isinstance(adapter, _Steps):
        return adapter.facts()
    if isinstance(adapter, _adapters.ArrayDataAdapter):
        return {
            "kind": "arrays",
            "rows": adapter._num_samples,
            "batch_size": adapter.batch_size,
            "values": division.values_of(adapter._inputs),
        }
    dataset = adapter.get_tf_dataset()
    if not isinstance(dataset, tf.data.Dataset):
        return {"kind": division.OWN}
    return division.facts_of_dataset(dataset)


def _refuse_spent(given: dict[str, Json]) -> None:
    """Raises ValueError for a generator that would have to be read again in a second epoch."""
    if given.get("epochs", 1) - given.get("initial_epoch", 0) < 2:
        return
    validation = given.get("validation_data")
    validation = validation[0] if isinstance(validation, tuple) and validation else validation
    for data, name, steps in (
        (given.get("x"), "x", "steps_per_epoch"),
        (validation, "validation_data", "validation_steps"),
    ):
        if inspect.isgenerator(data) and given.get(steps) is None:
            raise ValueError(
                f"{name} is a generator, which can be read once, and epochs={given['epochs']}. "
                f"Write {steps}=… if it has no end, or else give a keras.utils.PyDataset, or "
                "tf.data.Dataset.from_generator(function, output_signature=…)."
            )


def _without_reading(build: Method) -> Method:
    """Keras' look at a first batch, made not to begin a pass over Python data for it."""

    @functools.wraps(build)
    def building(model: keras.Model, iterator: object = None, data_batch: Nest = None) -> object:
        if isinstance(iterator, _Epochs):
            return build(model, data_batch=iterator.data_adapter.first_minibatch())
        return build(model, iterator=iterator, data_batch=data_batch)

    return building


class _Epochs(_trainer.TFEpochIterator):
    """Keras' passes over Python data, each begun where it is used first."""

    _current_iterator: Iterator[Nest] | None

    def _get_iterator(self) -> Iterable[Nest]:
        if self._current_iterator is not None:
            # Where a pass ends Keras makes the next one, before the dataset's on_epoch_end.
            return ()
        self.data_adapter.begin_pass()
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Nest]:
        if isinstance(self._current_iterator, type(iter(()))) or self.steps_per_epoch is None:
            self._current_iterator = None
        yield from super()._enumerate_iterator()


class _Steps(_adapters.data_adapter.DataAdapter):
    """Python data as this worker's steps, which are divided between its devices alone.

    Subclasses yield batches, and which part of how many is a step.
    """

    def __init__(self, batches: list[Data], extended: PeriodicSyncExtended) -> None:
        if not batches:
            raise ValueError("the data have no batch: their length is 0.")
        self._first = [_without_none(batch) for batch in batches]
        self._extended = extended
        self._worker, self._workers = extended.share
        self._signature = _adapter_utils.get_tensor_spec(self._first)

    def begin_pass(self) -> None:
        """The next pass over the data begins."""

    def _batches(self) -> Iterator[tuple[Data, range, int]]:
        raise NotImplementedError

    def _steps(self) -> Iterator[Nest]:
        for batch, parts, of in self._batches():
            batch = _without_none(batch)
            for part in parts:
                yield _part(batch, part, of)

    def get_tf_dataset(self) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(self._steps, output_signature=self._signature)
        return self._extended.distribute_steps(dataset.prefetch(1))

    def first_minibatch(self) -> Nest:
        """A minibatch of one replica, for its shapes."""
        replicas = self._workers * len(self._extended.worker_devices)
        return _part(self._first[0], 0, replicas, at_least=1)

    def facts(self) -> dict[str, Json]:
        """See `division.difference`."""
        # Of inputs a worker may have other ones, as where it draws noise; their order is in the
        # labels, if there are any.
        batches = [b[1] if isinstance(b, tuple) and len(b) > 1 else b for b in self._first]
        return {"elements": repr(self._signature), "values": division.values_of(batches)}

    @property
    def num_batches(self) -> int | None:
        return None

    @property
    def batch_size(self) -> None:
        return None


class _PyDatasetSteps(_Steps):
    """A `keras.utils.PyDataset`, of which each worker reads other batches."""

    def __init__(
        self, dataset: keras.utils.PyDataset, adapter: Any, extended: PeriodicSyncExtended
    ) -> None:
        self._dataset, self._adapter = dataset, adapter
        adapter.enqueuer = None  # whose queue would mix batches of one pass with those of another
        self._processes = bool(dataset.use_multiprocessing) and dataset.workers > 0
        if self._processes and extended._num_workers > 1:
            self._refuse_fork()
        count = adapter.num_batches
        numbers = range(2 if count is None else min(2, count))
        super().__init__([adapter._standardize_batch(dataset[n]) for n in numbers], extended)
        self._order: Sequence[int] = ()
        self._hooks_called = 0

    def _refuse_fork(self) -> None:
        if multiprocessing.get_start_method() == "fork":
            raise ValueError(
                "PyDataset(use_multiprocessing=True) would fork a worker, beside threads that hold "
                "locks, and never end. Write use_multiprocessing=False, for threads; or, below "
                'if __name__ == "__main__":, multiprocessing.set_start_method("spawn").'
            )

    def facts(self) -> dict[str, Json]:
        return {"kind": "PyDataset", "batches": self.num_batches, **super().facts()}

    def begin_pass(self) -> None:
        count = self.num_batches
        if count is not None:
            shuffle = self._adapter.shuffle
            self._order = self._extended.next_order(count) if shuffle else range(count)

    def _batches(self) -> Iterator[tuple[Data, range, int]]:
        if self.num_batches is None:
            plan: Any = reading.endless_reads(self._worker, self._workers)
        else:
            plan = reading.reads(self._order, self._worker, self._workers)
        plan, numbers = itertools.tee(plan)
        data = self._dataset
        batches = reading.ahead(
            data,
            (read.batch for read in numbers),
            data.workers,
            self._processes,
            data.max_queue_size,
        )
        with contextlib.closing(batches):
            for batch, read in zip(batches, plan, strict=True):
                yield self._adapter._standardize_batch(batch), read.parts, read.of

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def on_epoch_begin(self) -> None:
        with self._agreed():
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        with self._agreed():
            self._adapter.on_epoch_end()

    def _agreed(self) -> Any:
        """What the dataset does meanwhile, as shuffling itself, it does alike on all workers."""
        self._hooks_called += 1
        seed = self._extended.order.seed
        if self._workers == 1 or seed is None:
            return contextlib.nullcontext()
        return reading.common_randomness(f"{seed}/{self._hooks_called}")


class _GeneratorSteps(_Steps):
    """A Python generator, which every worker reads from its beginning to its end, once."""

    def __init__(self, adapter: Any, extended: PeriodicSyncExtended) -> None:
        super().__init__(adapter._first_batches, extended)
        self._rest = adapter.generator()

    def facts(self) -> dict[str, Json]:
        return {"kind": "generator", **super().facts()}

    def _batches(self) -> Iterator[tuple[Data, range, int]]:
        for batch in self._rest:
            yield batch, range(self._worker, self._worker + 1), self._workers


def _without_none(batch: Nest) -> Nest:
    """`batch` without a last part that is None, which cannot be divided."""
    if isinstance(batch, list):
        batch = tuple(batch)
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch


def _part(batch: Nest, part: int, of: int, at_least: int = 0) -> Nest:
    """Some rows of a batch: `part` among `of`."""

    def rows_of(leaf: Nest) -> Nest:
        if _adapter_utils.is_scipy_sparse(leaf):
            leaf = _adapter_utils.scipy_sparse_to_tf_sparse(leaf)
        if leaf is None or of == 1:
            return leaf
        ragged = isinstance(leaf, tf.RaggedTensor)
        rows = reading.bounds(int(leaf.nrows()) if ragged else leaf.shape[0], part, of)
        if rows.stop - rows.start < at_least:
            rows = slice(0, at_least)
        if isinstance(leaf, tf.SparseTensor):
            start = [rows.start, *[0] * (leaf.shape.rank - 1)]
            return tf.sparse.slice(leaf, start, [rows.stop - rows.start, *leaf.shape[1:]])
        return leaf[rows]

    return keras.tree.map_structure(rows_of, batch, none_is_leaf=False)
