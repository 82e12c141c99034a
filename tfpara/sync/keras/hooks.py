"""The list of Keras' functions that are replaced, since Keras 3 does not know of other workers.

The replacements act on models of a `PeriodicSyncStrategy`; docs/design.md ("Keras and data") has
the reasons. Each replacement is described where it is defined.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from tfpara import fit_call, program
from tfpara.cluster.call_site import EVALUATE, PREDICT
from tfpara.sync.keras import scope
from tfpara.sync.keras.building import looking, of_a_row
from tfpara.sync.keras.callbacks import HOOKS, with_files_of_the_chief
from tfpara.sync.keras.compiling import compiled_by_default, compiled_by_replica
from tfpara.sync.keras.data_passes import with_divided_data
from tfpara.sync.keras.fit_arguments import deal_out_by_speed, refuse_spent
from tfpara.sync.keras.logs import of_all_workers
from tfpara.sync.keras.optimizer_steps import (
    loss_looked_at,
    step_noted,
    with_fitted_average,
    with_fitted_momentum,
)
from tfpara.sync.keras.replacing import (
    Method,
    file_utils,
    for_ours,
    legacy_h5_format,
    replace,
    saving_lib,
    strategy_of_ours,
    trainer,
)
from tfpara.sync.keras.saving import asks_store, by_the_chief, for_any_task, makes_no_folder
from tfpara.sync.tensorflow.run_steps import predicting


def install() -> None:
    """Replaces Keras' functions; a second call changes nothing.

    If one function is replaced several times, the last replacement is the outermost.
    """
    replace(saving_lib, "save_model", by_the_chief)
    replace(saving_lib, "save_weights_only", by_the_chief)
    replace(legacy_h5_format, "save_model_to_hdf5", by_the_chief)
    # ModelCheckpoint calls these two functions for its folder. If the folder is in an object store,
    # the replacements look for it in the store, and do not make it, as a store needs no folders.
    replace(file_utils, "exists", asks_store)
    replace(file_utils, "makedirs", makes_no_folder)
    replace(keras.Model, "export", for_any_task)
    replace(keras.Model, "export", by_the_chief)
    for method in ("fit", "evaluate", "predict"):
        replace(keras.Model, method, _shown_by_the_chief)
    watch_fit()
    replace(keras.Model, "fit", _together)
    replace(keras.Model, "fit", _looked_at)
    replace(keras.Model, "evaluate", _placed)
    replace(keras.Model, "train_on_batch", _looked_at)
    replace(keras.Model, "train_on_batch", _refused_beside_fit)
    for method in ("predict", "predict_on_batch"):
        replace(keras.Model, method, _of_all_rows)
    # `fit` and `evaluate` call this method to turn the outputs of a step into their log.
    replace(keras.Model, "_get_metrics_result_or_logs", of_all_workers)
    # In a custom loop, the strategy learns of an optimizer only when the optimizer takes its first
    # step. So these methods of all optimizers are replaced.
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        replace(kind, "apply", step_noted)
        replace(kind, "scale_loss", loss_looked_at)
    replace(keras.optimizers.SGD, "update_step", with_fitted_momentum)
    replace(keras.optimizers.Adam, "update_step", with_fitted_average)
    if hasattr(keras.optimizers, "Muon"):
        replace(keras.optimizers.Muon, "update_step", with_fitted_average)
    replace(keras.callbacks.CallbackList, "__init__", with_files_of_the_chief)
    for hook, make in HOOKS.items():
        replace(keras.callbacks.CallbackList, hook, make)
    replace(trainer, "TFEpochIterator", with_divided_data)
    replace(keras.Model, "_maybe_symbolic_build", looking)
    replace(keras.Model, "_symbolic_build", of_a_row)
    replace(keras.Model, "_resolve_auto_jit_compile", compiled_by_default)
    replace(keras.Model, "_make_function", compiled_by_replica)


def watch_fit() -> None:
    """Makes `fit` call the functions given to `fit_call.at_end`; a second call changes nothing."""
    replace(keras.Model, "fit", _watched)


def _watched(fit: Method) -> Method:
    """Replaces `fit` of any model."""

    @functools.wraps(fit)
    def fitting(*args: object, **kwargs: object) -> object:
        with fit_call.under_way():
            return fit(*args, **kwargs)

    return fitting


# If an operation fails while Ctrl-C interrupts this process, its error contains this text.
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"


@for_ours
def _shown_by_the_chief(
    method: Method, strategy: Any, model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Runs a method with a progress bar, which workers other than the chief do not show."""
    given = inspect.signature(method).bind(model, *args, **kwargs)
    # In an elastic run any worker may become the chief. So all of them keep their progress bar, and
    # `ChiefsBar` lets only the present chief draw it.
    if not (strategy.is_chief or strategy.company.changes):
        given.arguments["verbose"] = 0
    try:
        return method(*given.args, **given.kwargs)
    except RuntimeError as error:
        if _INTERRUPTED in str(error):
            raise KeyboardInterrupt from None
        raise


@for_ours
def _together(
    fit: Method, strategy: Any, model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Runs `fit`; returns once all workers have ended it, so that all can read its files."""
    given = dict(inspect.signature(fit).bind(model, *args, **kwargs).arguments)
    given.pop("self")
    refuse_spent(given)
    extended = strategy.extended
    in_fit = extended.in_fit(model, given.get("initial_epoch", 0))
    with program.noting(), in_fit, _with_data("fit", strategy):
        if extended.balance is not None and not extended.worker.changes:
            deal_out_by_speed(strategy, given)
        return extended.worker.company.fit(model, given, lambda given: fit(model, **given))


@for_ours
def _refused_beside_fit(
    method: Method, strategy: Any, model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Runs a method that trains a model outside of `fit`, if the company of workers allows it."""
    strategy.extended.worker.company.check_in_fit()
    return method(model, *args, **kwargs)


@for_ours
def _placed(
    evaluate: Method, strategy: Any, model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Runs `evaluate`, which all workers must call, since it reads metrics."""
    with strategy.extended.call_site.in_call(EVALUATE), _with_data("evaluate", strategy):
        return evaluate(model, *args, **kwargs)


@for_ours
def _of_all_rows(
    predict: Method, strategy: Any, model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Runs a method that predicts, for each row once, on the worker that calls it."""
    extended = strategy.extended
    with extended.call_site.in_call(PREDICT), predicting():
        return predict(model, *args, **kwargs)


@contextlib.contextmanager
def _with_data(name: str, strategy: Any) -> Iterator[None]:
    """Replaces the empty StopIteration that Keras raises if there are no data."""
    try:
        yield
    except StopIteration:
        raise ValueError(
            f"{name} got data without a single batch on worker {strategy.worker_index}. Every "
            "worker needs at least one: give it data, or start fewer workers."
        ) from None


def _looked_at(train: Method) -> Method:
    """Replaces a method that trains any model by one that first checks the model."""

    @functools.wraps(train)
    def training(model: keras.Model, *args: object, **kwargs: object) -> object:
        scope.look(model)
        strategy = strategy_of_ours(model)
        trained = strategy.extended.models.trained(model) if strategy is not None else None
        if trained is not None and trained.shows_others:
            raise ValueError(
                "the model is trained while strategy.weights(...) shows other weights than those "
                "of the replicas; the training would be lost at the end of the with block. Train "
                "after the block."
            )
        return train(model, *args, **kwargs)

    return training
