"""Replacements of Keras' functions that must know that several workers run one script.

Keras 3 does not know it, so that each worker would write to the same path at once. The functions
below are replaced for models of a `PeriodicSyncStrategy`:

- functions that save a model write the global model on the chief, and do nothing on the other
  workers;
- callbacks run on all workers; those that write get a temporary folder on the other workers, as in
  Keras 2;
- `fit` and `train_on_batch` first check that the model was made in a strategy's scope;
- `fit` tells callbacks of its end, also if it raises;
- `fit` returns when all workers have come to its end, so that all can read what the chief wrote;
- the log of an epoch and of `evaluate` is the same on all workers;
- only the chief shows what `fit`, `evaluate` and `predict` print of their progress;
- `fit` and `evaluate` first check that all workers have the same data, which they divide; and they
  read Python data (`PyDataset`, generators) so that each part of a batch has one reader;
- `fit`, `evaluate` and lists of callbacks note where in its script this worker is;
- `predict` returns all rows on the worker that calls it.

Saving waits for no other worker, since a script may save on the chief alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

# In these modules `fit`, `evaluate` and `predict` make datasets of their arguments.
from keras.src.backend.tensorflow import trainer as _trainer

# All public functions that save call functions of these modules: Model.save, Model.save_weights,
# and those of keras.saving and keras.models, even if a script imported them by name.
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5_format
from keras.src.saving import saving_lib as _saving_lib
from keras.src.trainers import data_adapters as _adapters
from keras.src.trainers.data_adapters import array_slicing as _array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as _adapter_utils

from tfpara import files, fit_call, program
from tfpara.cluster.place import EVALUATE, FIT_BEGIN, FIT_END, Place
from tfpara.graph_files import without_tasks
from tfpara.keras_model import (
    build_optimizer,
    check_optimizers_built,
    strategy_of,
    unbuilt_optimizers,
)
from tfpara.sync.data import reading, same_data
from tfpara.sync.data.elastic_data import (
    PARTS,
    Batches,
    Began,
    are_arrays,
    deal_out_arrays,
    deal_out_dataset,
    deal_out_py_dataset,
    slice_of,
)
from tfpara.sync.data.position import Pass
from tfpara.sync.keras import chiefs_callbacks, scope
from tfpara.sync.tensorflow.compiled_step import CompiledStep, explained
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.tensorflow.variables import in_replica
from tfpara.sync.workers.json_exchange import everyones
from tfpara.typing import Data, Json, Nest, Variable

_CALLBACKS = keras.callbacks
# A function of Keras, or its replacement.
Method: TypeAlias = Callable[..., Any]

_PLACE = "tfpara_place"  # the attribute of a list of callbacks that has the strategy's `Place`
_replaced: set[tuple[int, str, Method]] = set()
# Optimizers without slots, by id, while `build_optimizers` traces a step: the weights that each
# trains, once its `apply` was called.
_unbuilt: dict[int, keras.optimizers.Optimizer] = {}
# During a step of an optimizer whose momentum is fitted to the block, by its id: that momentum (or
# Adam's β₁) and the factor of SGD's learning rate.
_fitted: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
_element_specs: weakref.WeakKeyDictionary[keras.Model, Nest] = weakref.WeakKeyDictionary()


def install() -> None:
    """Replaces Keras' functions; a second call changes nothing."""
    _replace(_saving_lib, "save_model", _by_the_chief)
    _replace(_saving_lib, "save_weights_only", _by_the_chief)
    _replace(_legacy_h5_format, "save_model_to_hdf5", _by_the_chief)
    _replace(keras.Model, "export", _for_any_task)
    _replace(keras.Model, "export", _by_the_chief)  # outside of the line above
    for method in ("fit", "evaluate", "predict"):
        _replace(keras.Model, method, _shown_by_the_chief)
    watch_fit()
    _replace(keras.Model, "fit", _together)
    _replace(keras.Model, "evaluate", _placed)
    _replace(keras.Model, "train_on_batch", _looked_at)
    _replace(keras.Model, "predict", _of_all_rows)
    # `fit` and `evaluate` make their log by this method from what a step returned.
    _replace(keras.Model, "_get_metrics_result_or_logs", _of_all_workers)
    # A custom loop does not say which optimizers it has, so each step of an optimizer is noted.
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _replace(kind, "apply", _step_noted)
    _replace(keras.optimizers.SGD, "update_step", _with_fitted_momentum)
    _replace(keras.optimizers.Adam, "update_step", _with_fitted_average)
    if hasattr(keras.optimizers, "Muon"):
        _replace(keras.optimizers.Muon, "update_step", _with_fitted_average)
    _replace(_CALLBACKS.CallbackList, "__init__", _with_files_of_the_chief)
    for hook, make in _HOOKS.items():
        _replace(_CALLBACKS.CallbackList, hook, make)
    _replace(_trainer, "TFEpochIterator", _with_divided_data)
    _replace(keras.Model, "_maybe_symbolic_build", _without_reading)
    _replace(keras.Model, "_maybe_symbolic_build", _looking)  # outside of the line above
    _replace(keras.Model, "_symbolic_build", _of_a_row)
    _replace(keras.Model, "_resolve_auto_jit_compile", _compiled_by_default)
    _replace(keras.Model, "_make_function", _compiled_by_replica)


# -- compilation by XLA ----------------------------------------------------------------------------


def _compiled_by_default(resolve: Method) -> Method:
    """Replaces what decides for `jit_compile="auto"`: as without a strategy, for our devices."""

    @functools.wraps(resolve)
    def resolving(model: keras.Model) -> bool:
        strategy = _strategy(model)
        if strategy is None:
            return resolve(model)
        if not any("GPU" in device.upper() for device in strategy.extended.worker_devices):
            return False
        with _holding(model, "_distribute_strategy", None):
            return resolve(model)

    return resolving


@contextlib.contextmanager
def _holding(model: keras.Model, attribute: str, value: object) -> Iterator[None]:
    """Gives an attribute of a model another value for a while, past the checks of its property."""
    former = getattr(model, attribute)
    setattr(model, attribute, value)
    try:
        yield
    finally:
        setattr(model, attribute, former)


def _compiled_by_replica(make: Method) -> Method:
    """Replaces what makes the functions of `fit` and `evaluate`.

    XLA compiles each replica's step, and not the function around it, which has the sync.
    """

    @functools.wraps(make)
    def making(model: keras.Model, step: Callable[..., Nest]) -> object:
        if _strategy(model) is None or not model.jit_compile or model.run_eagerly:
            return make(model, step)
        if step.__name__ == "train_step" and model.trainable_variables:
            build_optimizers(model)  # XLA makes no variables
        with _holding(model, "_jit_compile", False):
            return explained(make(model, CompiledStep(step)))

    return making


def watch_fit() -> None:
    """Makes `fit` call the functions given to `fit_call.at_end`; a second call changes nothing."""
    _replace(keras.Model, "fit", _watched)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if (id(owner), name, make) not in _replaced:
        _replaced.add((id(owner), name, make))
        setattr(owner, name, make(getattr(owner, name)))


def _strategy(model: keras.Model) -> Any:
    """Returns the `PeriodicSyncStrategy` of a model; None if it has another or none."""
    strategy = strategy_of(model)
    return strategy if isinstance(strategy.extended, PeriodicSyncExtended) else None


# -- saving ----------------------------------------------------------------------------------------


def _by_the_chief(write: Method) -> Method:
    """Replaces a function that saves a model: it writes on the chief alone, all or nothing.

    It writes the global model, unless the model shows other weights (`strategy.weights`).
    """

    @functools.wraps(write)
    def saving(
        model: keras.Model, filepath: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return write(model, filepath, *args, **kwargs)
        # Keras creates optimizers and layers, with variables, to compare the model's with.
        with strategy.extended.creating_alone():
            if not isinstance(filepath, (str, os.PathLike)):
                with strategy.extended.writing(model):
                    return write(model, filepath, *args, **kwargs)
            if not strategy.is_chief:
                return None
            with _scratch(os.fspath(filepath)) as scratch, strategy.extended.writing(model):
                return write(model, scratch, *args, **kwargs)

    return saving


def _for_any_task(export: Method) -> Method:
    """Replaces a function that writes a SavedModel: no operation in it is bound to a task."""

    @functools.wraps(export)
    def exporting(
        model: keras.Model, filepath: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        result = export(model, filepath, *args, **kwargs)
        if _strategy(model) is not None:
            without_tasks(filepath)
        return result

    return exporting


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    """Yields the path to which a model is written, so that it appears at `path` whole."""
    if "://" in path or (os.path.isdir(path) and not files.holds_a_model_alone(Path(path))):
        # Remote files cannot be renamed, and a folder with other files must not be replaced.
        yield path
        return
    with files.whole(path) as scratch, _printing(os.fspath(scratch), path):
        yield os.fspath(scratch)


@contextlib.contextmanager
def _printing(former: str, path: str) -> Iterator[None]:
    """Replaces a path by another one in all that is printed inside."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(printed.getvalue().replace(former, path), end="")


# -- fit, predict, callbacks ----------------------------------------------------------------------


def _watched(fit: Method) -> Method:
    """Replaces `fit` of any model: it tells callbacks of its end."""

    @functools.wraps(fit)
    def fitting(*args: object, **kwargs: object) -> object:
        with fit_call.under_way():
            return fit(*args, **kwargs)

    return fitting


# pybind11's text in an error that an operation raised while Ctrl-C came. It raises one if another
# worker has ended by Ctrl-C.
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"


def _shown_by_the_chief(method: Method) -> Method:
    """Replaces a method with a progress bar: workers other than the chief do not show it."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def showing(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        given = signature.bind(model, *args, **kwargs)
        others = strategy is not None and not strategy.is_chief
        others = others and strategy.extended.elastic is None  # there the chief may change
        if others:
            given.arguments["verbose"] = 0
        try:
            return method(*given.args, **given.kwargs)
        except RuntimeError as error:
            if _INTERRUPTED in str(error):
                raise KeyboardInterrupt from None
            raise

    return showing


def _together(fit: Method) -> Method:
    """Replaces `fit`: it returns when every worker has come to its end."""

    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fitting(model: keras.Model, *args: object, **kwargs: object) -> object:
        _look(model)
        strategy = _strategy(model)
        if strategy is None:
            return fit(model, *args, **kwargs)
        bound = signature.bind(model, *args, **kwargs)
        _refuse_spent(bound.arguments)
        extended = strategy.extended
        in_fit = extended.in_fit(model, bound.arguments.get("initial_epoch", 0))
        changing: Any = extended.elastic or extended.replay
        if changing is not None:
            _deal_out(strategy, changing.began, bound.arguments)
            changing.check(model, bound.arguments)
            args, kwargs = bound.args[1:], bound.kwargs
        elastic = changing.training(model) if changing else contextlib.nullcontext()
        with program.noting(), in_fit, _with_data("fit", strategy), elastic:
            if extended.elastic is not None:
                history = extended.elastic.fit(
                    lambda: fit(model, *args, **kwargs),
                    lambda: fit(model, bound.arguments["x"], epochs=0, verbose=0),
                )
            else:
                history = fit(model, *args, **kwargs)
            if strategy.num_workers > 1:
                extended.finish_blocks(FIT_END)
        return history

    return fitting


def _deal_out(strategy: Any, began: Began, given: dict[str, Any]) -> None:
    """Replaces data among the arguments of `fit` by such as can be dealt out anew, in place."""
    if given.get("steps_per_epoch") is not None and not are_arrays(given):
        return  # which the run refuses
    data, class_weight = given.get("x"), given.get("class_weight")
    if class_weight and isinstance(data, (tf.data.Dataset, tf.distribute.DistributedDataset)):
        weighted = _adapters.TFDatasetAdapter(data, class_weight=class_weight)
        given["x"], given["class_weight"] = weighted.get_tf_dataset(), None
    if isinstance(data, tf.data.Dataset):
        deal_out_dataset(strategy, began, given)
    elif isinstance(data, keras.utils.PyDataset):
        deal_out_py_dataset(strategy, began, given, _batches_of(data, given))
    else:
        _divide_and_weight(given)
        deal_out_arrays(strategy, began, given)


def _batches_of(data: keras.utils.PyDataset, given: dict[str, Any]) -> Batches:
    """Returns the batches of a dataset that `fit` was given."""
    beside = {"y": given.get("y"), "sample_weight": given.get("sample_weight")}
    beside["validation_split"] = given.get("validation_split") or None
    for name, value in beside.items():
        if value is not None:
            raise ValueError(
                f"{name}= does not go with a PyDataset, whose batches have the labels and weights. "
                "Leave it out."
            )
    adapter = _adapters.PyDatasetAdapter(data, given.get("class_weight"), given.get("shuffle"))
    adapter.enqueuer = None  # whose threads would read for nobody
    count = adapter.num_batches
    if count is None:
        raise ValueError("the PyDataset has no end, which elastic= needs: write its __len__.")
    if count == 0:
        raise ValueError("the data have no batch: their length is 0.")

    def standard(batch: Data) -> Data:
        return _without_none(adapter._standardize_batch(batch))

    first = [standard(data[number]) for number in sorted({0, min(1, count - 1), count - 1})]
    return Batches(
        count, _adapter_utils.get_tensor_spec(first), _shown_values(first), standard, _part
    )


def _shown_values(batches: list[Data]) -> list[Json]:
    """Returns values by which batches are compared.

    Inputs may differ between workers, for example by noise. So the labels are compared, if there
    are any; they show the order too.
    """
    return same_data.values_of(
        [b[1] if isinstance(b, tuple) and len(b) > 1 else b for b in batches]
    )


def _divide_and_weight(given: dict[str, Any]) -> None:
    """Does what `fit` would do to arrays for `validation_split` and `class_weight`, in place."""
    if not are_arrays(given):
        return
    if given.get("validation_split") and given.get("validation_data") is None:
        parts = tuple(given.get(name) for name in PARTS)
        training, given["validation_data"] = _array_slicing.train_validation_split(
            parts, validation_split=given["validation_split"]
        )
        given.update(zip(PARTS, training, strict=True), validation_split=0.0)
    if given.get("class_weight"):
        if given.get("sample_weight") is not None or keras.tree.is_nested(given.get("y")):
            raise ValueError(
                "class_weight weighs the only labels of a model, and does not go with "
                "sample_weight. Multiply the two before fit, and give sample_weight."
            )
        given["sample_weight"] = _adapter_utils.class_weight_to_sample_weights(
            given["y"], given["class_weight"]
        )
        given["class_weight"] = None


@contextlib.contextmanager
def _with_data(name: str, strategy: Any) -> Iterator[None]:
    """Replaces Keras' empty StopIteration, where there are no data, by an error that says so."""
    try:
        yield
    except StopIteration:
        raise ValueError(
            f"{name} got data without a single batch on worker {strategy.worker_index}. Every "
            "worker needs at least one: give it data, or start fewer workers."
        ) from None


def _placed(evaluate: Method) -> Method:
    """Replaces `evaluate`: all workers must call it, since it reads metrics."""

    @functools.wraps(evaluate)
    def evaluating(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return evaluate(model, *args, **kwargs)
        with strategy.extended.place.in_call(EVALUATE), _with_data("evaluate", strategy):
            return evaluate(model, *args, **kwargs)

    return evaluating


def _looked_at(train: Method) -> Method:
    """Replaces a method that trains a model: it first checks that the model can be trained."""

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
    """Replaces the method that makes the log of an epoch: it is the same on all workers.

    Keras uses the metrics' values only if the last step returned exactly the metrics; otherwise its
    log is what that step returned on this worker. The replacement always uses the metrics of all
    replicas. Other values are averaged over the workers, from the last step of each.
    """

    @functools.wraps(read)
    def reading(model: keras.Model, logs: dict[str, Nest]) -> dict[str, Nest]:
        strategy = _strategy(model)
        if strategy is None or not isinstance(logs, dict):
            return read(model, logs)
        with strategy.extended.reading_metrics(model):
            metrics = model.get_metrics_result()
        if not _has_own_steps(model):
            return metrics  # `logs` may be empty: a worker may take no step of a resumed epoch
        extended = strategy.extended
        purpose = extended.place.of_metric()
        # Others may still have data. A model without metrics has not waited for them yet.
        extended.finish_blocks(purpose)
        returned = everyones(_plain(logs), extended.control, purpose)
        if not any(returned):
            return metrics
        log = {}
        for name in {name: None for of_worker in returned for name in of_worker}:
            values = [of_worker[name] for of_worker in returned if name in of_worker]
            counted = name in metrics and not _counted_nothing(model, name, metrics)
            log[name] = metrics[name] if counted else _mean(values)
        return log

    return reading


def _has_own_steps(model: keras.Model) -> bool:
    """Returns whether a model's own steps may return other values than its metrics.

    The answer is the same on all workers.
    """
    return _has_own(model, ("train_step", "test_step", "compute_metrics"))


def _has_own(model: keras.Model, names: Sequence[str]) -> bool:
    """Returns whether a model has methods of its own among those of `keras.Model` named here."""
    own = (getattr(getattr(model, name), "__func__", None) for name in names)
    return any(one is not getattr(keras.Model, name) for one, name in zip(own, names, strict=True))


def _plain(logs: dict[str, Json]) -> dict[str, Json]:
    """Returns logs as numbers and lists, with nested dicts flattened."""
    plain: dict[str, Json] = {}
    for name, value in logs.items():
        plain |= _plain(value) if isinstance(value, dict) else {name: np.asarray(value).tolist()}
    return plain


def _mean(values: list[Nest]) -> Nest:
    """Returns the mean of numbers or arrays; the first value if they have no mean."""
    try:
        mean = np.mean(np.array(values, np.float64), 0)
    except (TypeError, ValueError):
        return values[0]
    return mean if mean.ndim else float(mean)


def _counted_nothing(model: keras.Model, name: str, metrics: dict[str, Nest]) -> bool:
    """Returns whether no step has updated the metric of this name, among all metrics' values.

    Keras makes a metric "loss" for each compiled model, which a custom step may leave out. Reading
    a metric's variables is an exchange of all workers. So they are read only if the metric's value,
    which is the same on all, is 0.
    """
    if np.any(metrics[name]):
        return False
    of_name = [metric for metric in model.metrics if metric.name == name]
    # The metrics given to `compile` are parts of one, whose own name is not in the log.
    of_name = of_name or [metric for metric in model.metrics if metric.name not in metrics]
    return not any(np.any(v) for metric in of_name for v in metric.variables)


def _looking(build: Method) -> Method:
    """Replaces the method that builds a model from a first batch: it sees the shapes alone."""

    @functools.wraps(build)
    def building(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return build(model, *args, **kwargs)
        with strategy.extended.looking():
            built = build(model, *args, **kwargs)
        iterator: Any = (*args, kwargs.get("iterator"))[0]
        if iterator is not None:
            # The dataset over which `fit` iterates has no public name.
            _element_specs[model] = iterator._distributed_dataset.element_spec
        return built

    return building


def _of_a_row(build: Method) -> Method:
    """Replaces Keras' building of a model from a batch's shapes: the batch has a row at least.

    Of a small first batch a worker may have no row, and Keras divides by their number. A model with
    steps of its own may not be callable, as a GAN is not. Without a strategy Keras does not try.
    """

    def with_a_row(leaf: Any) -> Any:
        if len(getattr(leaf, "shape", ())) and leaf.shape[0] == 0:
            dtype = keras.backend.standardize_dtype(leaf.dtype)
            return keras.KerasTensor((1, *leaf.shape[1:]), dtype)
        return leaf

    @functools.wraps(build)
    def building(
        model: keras.Model, iterator: object = None, data_batch: Nest = None, **kwargs: object
    ) -> object:
        if _strategy(model) is None:
            return build(model, iterator=iterator, data_batch=data_batch, **kwargs)
        if data_batch is not None:
            data_batch = keras.tree.map_structure(with_a_row, data_batch)
        own = _has_own(model, ("train_step", "test_step"))
        # What is wrong with a model comes up again in its step.
        with contextlib.suppress(*([Exception] if own else [])):
            return build(model, iterator=iterator, data_batch=data_batch, **kwargs)
        return None

    return building


def _step_noted(apply: Method) -> Method:
    """Replaces an optimizer's step: the strategy notes a step that is taken in a replica."""

    @functools.wraps(apply)
    def applying(
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> object:
        if id(optimizer) in _unbuilt:
            _unbuilt[id(optimizer)] = trainable_variables
            return None
        extended = tf.distribute.get_strategy().extended
        if not isinstance(extended, PeriodicSyncExtended) or not in_replica():
            return apply(optimizer, grads, trainable_variables)
        fitted = extended.fit_momentum(optimizer)
        if fitted is not None:
            _fitted[id(optimizer)] = fitted
        try:
            with extended.steps.trace.step_of(optimizer):
                return apply(optimizer, grads, trainable_variables)
        finally:
            _fitted.pop(id(optimizer), None)

    return applying


def _where_fitted(step: Callable[..., None]) -> Callable[[Method], Method]:
    """Returns what replaces an optimizer's `update_step`, by `step` where momentum is fitted.

    Args:
        step: called as `step(update_step, optimizer, gradient, variable, rate, momentum, factor)`,
            with the last two of `local_momentum` for a block.
    """

    def replacing(update_step: Method) -> Method:
        @functools.wraps(update_step)
        def updating(
            optimizer: keras.optimizers.Optimizer,
            gradient: tf.Tensor,
            variable: Variable,
            learning_rate: tf.Tensor,
        ) -> None:
            given = optimizer, gradient, variable, learning_rate
            if id(optimizer) not in _fitted:
                update_step(*given)
                return
            fitted = (keras.ops.cast(each, variable.dtype) for each in _fitted[id(optimizer)])
            step(update_step, *given, *fitted)

        return updating

    return replacing


@_where_fitted
def _with_fitted_momentum(
    update_step: Method,
    optimizer: keras.optimizers.SGD,
    gradient: tf.Tensor,
    variable: Variable,
    learning_rate: tf.Tensor,
    momentum: tf.Tensor,
    factor: tf.Tensor,
) -> None:
    """Takes a step of SGD: m ← m'm − rate'·g."""
    # Keras asks whether its momentum is 0, which no value of a graph can answer. Its operations
    # take gradients of some rows, too.
    ops = keras.ops
    rate = ops.cast(learning_rate, variable.dtype) * factor
    step = ops.multiply(ops.cast(gradient, variable.dtype), rate)
    velocity = optimizer.momentums[optimizer._get_variable_index(variable)]
    optimizer.assign(velocity, ops.subtract(ops.multiply(velocity, momentum), step))
    if optimizer.nesterov:
        velocity = ops.subtract(ops.multiply(velocity, momentum), step)
    optimizer.assign_add(variable, velocity)


@_where_fitted
def _with_fitted_average(
    update_step: Method,
    optimizer: keras.optimizers.Optimizer,
    gradient: tf.Tensor,
    variable: Variable,
    learning_rate: tf.Tensor,
    momentum: tf.Tensor,
    factor: tf.Tensor,
) -> None:
    """Takes a step of Adam with another β₁, or of Muon with that and another momentum."""
    names = [name for name in ("beta_1", "adam_beta_1", "momentum") if hasattr(optimizer, name)]
    given = {name: getattr(optimizer, name) for name in names}
    try:
        for name, own in given.items():
            setattr(optimizer, name, keras.ops.minimum(own, momentum))
        update_step(optimizer, gradient, variable, learning_rate)
    finally:
        for name, own in given.items():
            setattr(optimizer, name, own)


def build_optimizers(model: keras.Model) -> None:
    """Makes the slots of all optimizers of a model, which its first step would make later.

    If there are several optimizers, only the model's `train_step` knows which weights each trains.
    So the step is traced for the data of the present `fit`, and not run.

    Raises:
        ValueError: an optimizer has no slots even so; the message has the line that makes them.
    """
    build_optimizer(model)
    spec = _element_specs.get(model)
    unbuilt = [getattr(model, name) for name in unbuilt_optimizers(model)]
    if unbuilt and spec is not None and not model.run_eagerly:
        strategy = model.distribute_strategy
        # TensorFlow's `run`: that of `strategy` would make a synchronizer, which needs the slots.
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
    """Replaces `predict`: it computes all rows on the worker that calls it."""

    @functools.wraps(predict)
    def predicting(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = _strategy(model)
        if strategy is None:
            return predict(model, *args, **kwargs)
        with strategy.extended.undivided():
            return predict(model, *args, **kwargs)

    return predicting


def _with_files_of_the_chief(make: Callable[..., None]) -> Callable[..., None]:
    """Replaces the constructor of `CallbackList`: other workers' callbacks write elsewhere.

    `fit`, `evaluate` and `predict` call that constructor.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def making(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        model = given.arguments.get("model")
        strategy = None if model is None else _strategy(model)
        if strategy is not None:
            callbacks = keras.tree.flatten(given.arguments.get("callbacks") or [])
            prepared = [
                chiefs_callbacks.prepared(c, strategy) for c in fit_call.arranged(callbacks)
            ]
            prepared = [p for p in prepared if p is not None]
            if given.arguments.get("add_progbar") and strategy.extended.elastic is not None:
                prepared.append(chiefs_callbacks.ChiefsBar(strategy))
            given.arguments["callbacks"] = prepared
        make(*given.args, **given.kwargs)
        if strategy is not None:
            setattr(given.arguments["self"], _PLACE, strategy.extended.place)

    return making


def _in_place(name: str) -> Callable[[Method], Method]:
    """Returns a replacement for a hook of `CallbackList`, which notes where `fit` is."""

    def make(hook: Method) -> Method:
        @functools.wraps(hook)
        def calling(
            callbacks: keras.callbacks.CallbackList, *args: Any, **kwargs: object
        ) -> object:
            place: Place | None = getattr(callbacks, _PLACE, None)
            if place is None:
                return hook(callbacks, *args, **kwargs)
            elastic = _elastic(callbacks)
            if name == "on_epoch_begin":
                place.epoch_begins(*args[:1])
                extended = _extended(callbacks)
                extended.position.enter(args[0], extended.steps_seen)
                changing = elastic or getattr(_extended(callbacks), "replay", None)
                if changing is not None:
                    changing.begin_epoch(*args[:1])
            if name == "on_train_batch_begin":
                place.step_begins(*args[:1])
            with place.in_callbacks():
                result = hook(callbacks, *args, **kwargs)
            if name == "on_train_begin" and elastic is not None:
                elastic.begin()
            if name in ("on_epoch_begin", "on_train_end"):
                # Callbacks may have changed the sync period.
                steps = callbacks.params.get("steps") if name == "on_epoch_begin" else None
                _extended(callbacks).note_epoch(callbacks._model, steps)
            if name == "on_epoch_end" and place.fits and place.in_first_epoch:
                _extended(callbacks).note_idle(callbacks._model)
            if name == "on_epoch_begin" and place.fits and place.in_first_epoch:
                epochs = callbacks.params["epochs"]
                _extended(callbacks).note_syncs(steps, epochs if epochs - args[0] > 1 else 0)
            return result

        return calling

    return make


def _elastic(callbacks: keras.callbacks.CallbackList) -> Any:
    """The regrouping of an elastic run in whose `fit` callbacks run; else None."""
    return getattr(_extended(callbacks), "elastic", None)


def _extended(callbacks: keras.callbacks.CallbackList) -> Any:
    """The strategy's extended part of the model whose callbacks these are; None if it has none."""
    strategy = _strategy(callbacks._model) if getattr(callbacks, "_model", None) else None
    return strategy.extended if strategy is not None else None


_HOOKS = {
    f"on_{of}_{when}": _in_place(f"on_{of}_{when}")
    for of in ("train", "epoch", "train_batch")
    for when in ("begin", "end")
}


# -- data ------------------------------------------------------------------------------------------


def _with_divided_data(make: Any) -> Method:
    """Replaces the class of passes over data: data are compared and divided among the workers."""

    @functools.wraps(make, updated=())
    def making(distribute_strategy: Any = None, **kwargs: Any) -> Any:
        extended = getattr(distribute_strategy, "extended", None)
        if not isinstance(extended, PeriodicSyncExtended):
            return make(distribute_strategy=distribute_strategy, **kwargs)
        rest = {k: kwargs.pop(k) for k in ("steps_per_execution",) if k in kwargs}
        rest["steps_per_epoch"] = kwargs.get("steps_per_epoch")
        # Keras chooses the adapter, and raises its own errors. It takes an adapter as it is.
        adapter = _adapters.get_data_adapter(**kwargs)
        if isinstance(adapter, _adapters.PyDatasetAdapter):
            adapter = _PyDatasetSteps(kwargs["x"], adapter, extended)
        elif isinstance(adapter, _adapters.GeneratorDataAdapter):
            adapter = _GeneratorSteps(adapter, extended)
        elif isinstance(adapter, _adapters.ArrayDataAdapter) and adapter._shuffle:
            adapter = _ShuffledArrays.of(adapter, extended)
        divided = extended.share != (0, 1)
        _check(adapter, extended, divided)
        # Within an epoch the workers may be at different steps, so nothing is exchanged there.
        if not (extended.place.fits and extended.place.calls):
            drawn = isinstance(adapter, (_PyDatasetSteps, _ShuffledArrays))
            extended.check_data(_facts(adapter) if divided else {}, drawn)
        if extended.place.of_data() == FIT_BEGIN:
            extended.note_batches(_rows_of_batches(adapter))
        why = _order_of(adapter)
        if isinstance(adapter, _adapters.TFDatasetAdapter):
            dataset = adapter.get_tf_dataset()
            if isinstance(dataset, tf.data.Dataset) and not same_data.divided_between_workers(
                dataset
            ):
                # Keras counts the steps of an epoch by the distributed dataset's cardinality.
                dataset = distribute_strategy.experimental_distribute_dataset(dataset)
                adapter = _adapters.TFDatasetAdapter(dataset)
        kind = _Epochs if isinstance(adapter, (_Steps, _ShuffledArrays)) else _Passes
        passes = kind(distribute_strategy=distribute_strategy, x=adapter, **rest)
        passes.extended, passes.why_order_differs = extended, why
        return passes

    return making


def _order_of(adapter: Any) -> Callable[[bool], str]:
    """Returns a function that says why data may have another order when they are read again.

    It is `same_data.why_order_differs` of these data, which is "" where the order is the same.
    """
    data = adapter.get_tf_dataset() if isinstance(adapter, _adapters.TFDatasetAdapter) else None
    if isinstance(data, tf.data.Dataset):
        return lambda made_anew: same_data.why_order_differs(data, made_anew)
    return lambda made_anew: ""


def _check(adapter: Any, extended: PeriodicSyncExtended, divided: bool) -> None:
    """Raises ValueError if data cannot be divided between the replicas."""
    known = (_Steps, _adapters.ArrayDataAdapter, _adapters.TFDatasetAdapter)
    if divided and not isinstance(adapter, known):
        raise ValueError(
            f"{type(adapter).__name__.removesuffix('Adapter')} data are not divided among workers. "
            "Give each worker its part: data = strategy.distribute_datasets_from_function("
            "lambda context: dataset), with `dataset` a tf.data.Dataset of this worker's "
            "minibatches, and give them `data`."
        )


def _rows_of_batches(adapter: Any) -> int | None:
    """Returns the rows of the largest batch that is divided among replicas; None: not known."""
    if isinstance(adapter, _adapters.ArrayDataAdapter):
        return min(adapter.batch_size, adapter._num_samples)
    dataset = adapter.get_tf_dataset() if isinstance(adapter, _adapters.TFDatasetAdapter) else None
    if not isinstance(dataset, tf.data.Dataset) or not same_data.divided_between_workers(dataset):
        return None
    return same_data.batch_size(dataset)


def _facts(adapter: Any) -> dict[str, Json]:
    """Returns facts by which this worker's data are compared with others'."""
    if isinstance(adapter, _Steps):
        return adapter.facts()
    if isinstance(adapter, _adapters.ArrayDataAdapter):
        return {
            "kind": "arrays",
            "rows": adapter._num_samples,
            "batch_size": adapter.batch_size,
            "values": same_data.values_of(adapter._inputs),
        }
    dataset = adapter.get_tf_dataset()
    if not isinstance(dataset, tf.data.Dataset):
        return {"kind": same_data.OWN}
    return same_data.facts_of_dataset(dataset)


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
    """Replaces Keras' look at a first batch: it begins no pass over Python data."""

    @functools.wraps(build)
    def building(model: keras.Model, iterator: object = None, data_batch: Nest = None) -> object:
        if isinstance(iterator, _Epochs):
            return build(model, data_batch=iterator.data_adapter.first_minibatch())
        return build(model, iterator=iterator, data_batch=data_batch)

    return building


class _Passes(_trainer.TFEpochIterator):
    """Keras' passes over data; with `steps_per_epoch` one of them may last several epochs.

    A resumed run goes on within the pass in which the former process was.
    """

    extended: PeriodicSyncExtended
    why_order_differs: Callable[[bool], str]
    steps_per_epoch: int | None
    _num_batches: int | None  # None: not known
    _current_iterator: Iterator[Nest] | None
    _began = 0  # the epoch in which the present pass began

    def present(self) -> Pass | None:
        """Returns the pass that the next step goes on with; None if it begins one."""
        steps = 0 if self._current_iterator is None else self._steps_seen
        first = steps * self.extended._num_replicas_in_sync
        return Pass(self._began, first, steps) if steps else None

    def _interrupted_warning(self) -> None:
        """Warns that data had an end before `steps_per_epoch`; else they may end where they do."""
        if self.steps_per_epoch and self.extended._is_chief:
            super()._interrupted_warning()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends an epoch with its data; Keras would cut all later epochs to its length."""
        length = self._num_batches
        with super().catch_stop_iteration():
            yield
        if not self.steps_per_epoch:
            self._num_batches = length

    def _enumerate_iterator(self) -> Iterator[Nest]:
        place, position = self.extended.place, self.extended.position
        if not place.fits or place.calls:
            yield from super()._enumerate_iterator()
            return
        begun = position.begun if self.steps_per_epoch else None
        if position.steps or begun:
            self._note_order(begun.epoch if begun else position.epoch)
        if not self.steps_per_epoch:
            yield from super()._enumerate_iterator()
            return
        self.extended.passes = self
        left = self.steps_per_epoch - position.take_steps()
        if self.present() is None:
            self._began = position.epoch
        if begun:
            with position.within(begun):
                self._current_iterator = iter(self._get_iterator())
            self._began, self._steps_seen = begun.epoch, begun.steps
        yield from self._of_epoch(left)

    def _of_epoch(self, steps: int) -> Iterator[Nest]:
        """Yields what Keras does for the last `steps` steps of an epoch."""
        if steps > 0:
            whole, self.steps_per_epoch = self.steps_per_epoch, steps
            try:
                yield from super()._enumerate_iterator()
            finally:
                self.steps_per_epoch = whole
            return
        self.data_adapter.on_epoch_begin()
        if self._num_batches and self._steps_seen >= self._num_batches:
            self._current_iterator = None
        self.data_adapter.on_epoch_end()

    def _note_order(self, epoch: int) -> None:
        """Says so where data that go on in a pass are in another order.

        In the first epoch a seed gives the order that it gave in the former process.
        """
        why = self.why_order_differs(epoch == 0)
        if why:
            self.extended.note(
                f"the run goes on within its data, but their dataset {why}: rows may be trained "
                "twice or not at all. See docs/checkpoints.md, Data by epoch"
            )


class _Epochs(_Passes):
    """Keras' passes over Python data or shuffled arrays, which begin when a batch is used."""

    def _get_iterator(self) -> Iterable[Nest]:
        if self._current_iterator is not None:
            # At the end of a pass Keras makes the next one, before the dataset's on_epoch_end.
            return ()
        self.data_adapter.begin_pass()
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Nest]:
        if isinstance(self._current_iterator, type(iter(()))) or self.steps_per_epoch is None:
            self._current_iterator = None
        yield from super()._enumerate_iterator()


class _ShuffledArrays(_adapters.ArrayDataAdapter):
    """Keras' adapter of arrays that `fit` shuffles, in an order that the run keeps by epoch."""

    _extended: PeriodicSyncExtended
    _order: tf.Variable  # the rows' numbers, as the present pass has them
    _spec: Nest  # of a batch

    @classmethod
    def of(cls, adapter: Any, extended: PeriodicSyncExtended) -> _ShuffledArrays:
        """Makes an adapter of Keras' one of these."""
        adapter.__class__, adapter._extended = cls, extended
        numbers = np.arange(adapter._num_samples, dtype=np.int64)
        adapter._order = extended.host_variable(numbers, "order of rows")
        return adapter

    def begin_pass(self) -> None:
        """Draws the order of the next pass over the data."""
        within = self._batch_size if self._shuffle == "batch" else None
        self._order.assign(self._extended.next_order_of_rows(self._num_samples, within))

    def get_tf_dataset(self) -> tf.data.Dataset:
        # Keras draws by this function an order of all rows, or (shuffle="batch") of each batch.
        draw, calls = tf.random.shuffle, []

        def ordered(numbers: tf.Tensor) -> tf.Tensor:
            calls.append(numbers)
            return tf.gather(self._order, numbers)

        tf.random.shuffle = ordered
        try:
            dataset = super().get_tf_dataset()
        finally:
            tf.random.shuffle = draw
        if not calls:
            raise RuntimeError(
                f"Keras {keras.__version__} shuffles arrays in a way that tfpara does not know, so "
                "that a resumed run would train other rows. Take an earlier version of Keras."
            )
        self._spec = dataset.element_spec
        return dataset

    def first_minibatch(self) -> Nest:
        """Returns the shapes and dtypes of a minibatch of one replica."""
        replicas = self._extended._num_replicas_in_sync
        rows = -(-min(self._batch_size, self._num_samples) // replicas)

        def minibatch(spec: tf.TypeSpec) -> tf.TensorSpec:
            return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)

        return keras.tree.map_structure(minibatch, self._spec)


class _Steps(_adapters.data_adapter.DataAdapter):
    """An adapter of Python data: this worker's steps, which its own devices share.

    Subclasses yield batches, each with the parts of it that are steps and the number of its parts.
    """

    def __init__(self, batches: list[Data], extended: PeriodicSyncExtended) -> None:
        if not batches:
            raise ValueError("the data have no batch: their length is 0.")
        self._first = [_without_none(batch) for batch in batches]
        self._extended = extended
        self._worker, self._workers = extended.share
        self._signature = _adapter_utils.get_tensor_spec(self._first)

    def begin_pass(self) -> None:
        """Begins the next pass over the data."""

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
        """Returns a minibatch of one replica, of which Keras uses the shapes."""
        replicas = self._workers * len(self._extended.worker_devices)
        return _part(self._first[0], 0, replicas, at_least=1)

    def facts(self) -> dict[str, Json]:
        """Returns facts by which these data are compared with other workers'."""
        return {"elements": repr(self._signature), "values": _shown_values(self._first)}

    @property
    def num_batches(self) -> int | None:
        return None

    @property
    def batch_size(self) -> None:
        return None


class _PyDatasetSteps(_Steps):
    """A `keras.utils.PyDataset`, whose batches are divided among the workers."""

    def __init__(
        self, dataset: keras.utils.PyDataset, adapter: Any, extended: PeriodicSyncExtended
    ) -> None:
        self._dataset, self._adapter = dataset, adapter
        adapter.enqueuer = None  # its queue would mix the batches of two passes
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
        self._note_workers()
        count = self.num_batches
        if count is not None:
            shuffle = self._adapter.shuffle
            self._order = self._extended.next_order(count) if shuffle else range(count)

    def _note_workers(self) -> None:
        """Says so where a resumed run goes on within a pass that other workers have begun."""
        order, former = self._extended.order, self._extended.order.workers
        if self._extended.position.steps and former not in (None, self._workers):
            self._extended.note(
                f"the run goes on within an epoch, whose PyDataset was divided among {former} "
                f"workers and now is among {self._workers}: rows of this epoch may be trained "
                "twice or not at all. See docs/checkpoints.md, On another number of replicas"
            )
        order.workers = self._workers

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
        """Returns a context with the same random numbers on all workers, for the dataset's hooks.

        A dataset may shuffle itself in such a hook.
        """
        self._hooks_called += 1
        seed = self._extended.order.seed
        if self._workers == 1 or seed is None:
            return contextlib.nullcontext()
        return reading.common_randomness(f"{seed}/{self._hooks_called}")


class _GeneratorSteps(_Steps):
    """A Python generator, which every worker reads whole, once; it uses a part of each batch."""

    def __init__(self, adapter: Any, extended: PeriodicSyncExtended) -> None:
        super().__init__(adapter._first_batches, extended)
        self._rest = adapter.generator()

    def facts(self) -> dict[str, Json]:
        return {"kind": "generator", **super().facts()}

    def _batches(self) -> Iterator[tuple[Data, range, int]]:
        for batch in self._rest:
            yield batch, range(self._worker, self._worker + 1), self._workers


def _without_none(batch: Nest) -> Nest:
    """Returns a batch without trailing elements that are None, which cannot be divided."""
    if isinstance(batch, list):
        batch = tuple(batch)
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch


def _part(batch: Nest, part: int, of: int, at_least: int = 0) -> Nest:
    """Returns the rows of part number `part` of a batch, which is cut into `of` parts."""

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
            return slice_of(leaf, *(tf.constant(row, tf.int64) for row in (rows.start, rows.stop)))
        return leaf[rows]

    return keras.tree.map_structure(rows_of, batch, none_is_leaf=False)
