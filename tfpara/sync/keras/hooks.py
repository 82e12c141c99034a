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
from collections.abc import Iterator
from typing import Any

import keras

from tfpara import fit_call, program
from tfpara.cluster.place import EVALUATE, FIT_END
from tfpara.sync.keras import scope
from tfpara.sync.keras.building import looking, of_a_row, without_reading
from tfpara.sync.keras.callbacks import HOOKS, with_files_of_the_chief
from tfpara.sync.keras.compiling import compiled_by_default, compiled_by_replica
from tfpara.sync.keras.data_passes import with_divided_data
from tfpara.sync.keras.fit_arguments import deal_out, refuse_spent
from tfpara.sync.keras.logs import of_all_workers
from tfpara.sync.keras.optimizer_steps import step_noted, with_fitted_average, with_fitted_momentum
from tfpara.sync.keras.replacing import (
    Method,
    legacy_h5_format,
    replace,
    saving_lib,
    strategy_of_ours,
    trainer,
)
from tfpara.sync.keras.saving import by_the_chief, for_any_task


def install() -> None:
    """Replaces Keras' functions; a second call changes nothing."""
    replace(saving_lib, "save_model", by_the_chief)
    replace(saving_lib, "save_weights_only", by_the_chief)
    replace(legacy_h5_format, "save_model_to_hdf5", by_the_chief)
    replace(keras.Model, "export", for_any_task)
    replace(keras.Model, "export", by_the_chief)  # outside of the line above
    for method in ("fit", "evaluate", "predict"):
        replace(keras.Model, method, _shown_by_the_chief)
    watch_fit()
    replace(keras.Model, "fit", _together)
    replace(keras.Model, "evaluate", _placed)
    replace(keras.Model, "train_on_batch", _looked_at)
    replace(keras.Model, "predict", _of_all_rows)
    # `fit` and `evaluate` make their log by this method from what a step returned.
    replace(keras.Model, "_get_metrics_result_or_logs", of_all_workers)
    # A custom loop does not say which optimizers it has, so each step of an optimizer is noted.
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        replace(kind, "apply", step_noted)
    replace(keras.optimizers.SGD, "update_step", with_fitted_momentum)
    replace(keras.optimizers.Adam, "update_step", with_fitted_average)
    if hasattr(keras.optimizers, "Muon"):
        replace(keras.optimizers.Muon, "update_step", with_fitted_average)
    replace(keras.callbacks.CallbackList, "__init__", with_files_of_the_chief)
    for hook, make in HOOKS.items():
        replace(keras.callbacks.CallbackList, hook, make)
    replace(trainer, "TFEpochIterator", with_divided_data)
    replace(keras.Model, "_maybe_symbolic_build", without_reading)
    replace(keras.Model, "_maybe_symbolic_build", looking)  # outside of the line above
    replace(keras.Model, "_symbolic_build", of_a_row)
    replace(keras.Model, "_resolve_auto_jit_compile", compiled_by_default)
    replace(keras.Model, "_make_function", compiled_by_replica)


def watch_fit() -> None:
    """Makes `fit` call the functions given to `fit_call.at_end`; a second call changes nothing."""
    replace(keras.Model, "fit", _watched)


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
        strategy = strategy_of_ours(model)
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
        strategy = strategy_of_ours(model)
        if strategy is None:
            return fit(model, *args, **kwargs)
        bound = signature.bind(model, *args, **kwargs)
        refuse_spent(bound.arguments)
        extended = strategy.extended
        in_fit = extended.in_fit(model, bound.arguments.get("initial_epoch", 0))
        changing: Any = extended.elastic or extended.replay
        if changing is not None:
            deal_out(strategy, changing.began, bound.arguments)
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
        strategy = strategy_of_ours(model)
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
    strategy = strategy_of_ours(model)
    trained = strategy.extended.trained(model) if strategy is not None else None
    if trained is not None and trained.shows_others:
        raise ValueError(
            "the model is trained while strategy.weights(...) shows others than the replicas' own; "
            "it would be lost on leaving. Leave first, and train then."
        )


def _of_all_rows(predict: Method) -> Method:
    """Replaces `predict`: it computes all rows on the worker that calls it."""

    @functools.wraps(predict)
    def predicting(model: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = strategy_of_ours(model)
        if strategy is None:
            return predict(model, *args, **kwargs)
        with strategy.extended.undivided():
            return predict(model, *args, **kwargs)

    return predicting
