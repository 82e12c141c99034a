"""Replacements in Keras' `CallbackList`: they choose callbacks, and note epochs and steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras.callbacks import CallbackList

from tfpara import fit_call
from tfpara.clock import for_tensorboard
from tfpara.measuring import is_asked
from tfpara.sync.keras import chiefs_callbacks, left_out
from tfpara.sync.keras.measured_fit import MeasuredFit
from tfpara.sync.keras.replacing import Method, strategy_of_ours

# The name of a `CallbackList`'s attribute that holds the `PeriodicSyncExtended` of its model.
_EXTENDED = "tfpara_extended"
# The name of a `CallbackList`'s attribute that holds the number of steps that this process had
# taken when the present epoch began.
_STEPS_BEFORE = "tfpara_steps_before"


def with_files_of_the_chief(make: Callable[..., None]) -> Callable[..., None]:
    """Replaces the constructor of `CallbackList`, which `fit`, `evaluate` and `predict` call."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def making(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        model = given.arguments.get("model")
        strategy = None if model is None else strategy_of_ours(model)
        if strategy is not None and given.arguments.get("add_history") and is_asked():
            given.arguments |= {"callbacks": [MeasuredFit(strategy)], "add_progbar": False}
        elif strategy is not None:
            callbacks = for_tensorboard(keras.tree.flatten(given.arguments.get("callbacks") or []))
            callbacks = fit_call.arranged(callbacks)
            fit_call.keep_memories(callbacks, strategy)
            callbacks = [chiefs_callbacks.prepared(each, strategy) for each in callbacks]
            if given.arguments.get("add_progbar") and strategy.company.changes:
                callbacks.append(chiefs_callbacks.ChiefsBar(strategy))
            given.arguments["callbacks"] = [each for each in callbacks if each is not None]
        make(*given.args, **given.kwargs)
        if strategy is not None:
            setattr(given.arguments["self"], _EXTENDED, strategy.extended)

    return making


def _in_place(name: str) -> Callable[[Method], Method]:
    """Returns a replacement for a hook of `CallbackList` that notes which epoch and step it is."""

    def make(hook: Method) -> Method:
        @functools.wraps(hook)
        def calling(callbacks: CallbackList, *args: Any, **kwargs: object) -> object:
            extended = getattr(callbacks, _EXTENDED, None)
            if extended is None:
                return hook(callbacks, *args, **kwargs)
            if name.startswith("on_train_batch"):
                args = (_counted(name, extended, callbacks, args[0]), *args[1:])
            # The first argument is the number of the epoch or of the batch. Hooks of the whole
            # training, such as `on_train_begin`, have no number, so 0 stands for it.
            number = args[0] if args else 0
            _before(name, extended, callbacks, *args)
            with extended.call_site.in_callbacks():
                result = hook(callbacks, *args, **kwargs)
            _after(name, extended, callbacks, number)
            return result

        return calling

    return make


def _counted(name: str, extended: Any, callbacks: CallbackList, batch: int) -> int:
    """Returns the number in the epoch, from 0, of the first or last minibatch of a step of Keras.

    Keras counts `steps_per_execution` minibatches for each. With `balance=` there may be fewer.
    """
    if extended.balance is None or callbacks._model.steps_per_execution == 1:
        return batch
    taken = extended.models.steps_seen - getattr(callbacks, _STEPS_BEFORE)
    return taken if name == "on_train_batch_begin" else taken - 1


def _before(
    name: str, extended: Any, callbacks: CallbackList, number: Any = 0, logs: Any = None
) -> None:
    """Notes the begin of an epoch or a step, or the end of an epoch, before callbacks run."""
    if name == "on_epoch_begin":
        left_out.begin_epoch(extended, callbacks._model)
        extended.call_site.epoch_begins(number)
        extended.data.enter_epoch(number)
        extended.worker.company.epoch_begins(number)
    elif name == "on_train_batch_begin":
        extended.call_site.step_begins(number)
    elif name == "on_epoch_end":
        left_out.tell(extended, callbacks._model, number, logs)


def _after(name: str, extended: Any, callbacks: CallbackList, number: int) -> None:
    """Notes the begin or the end of `fit` or of an epoch, after callbacks have run."""
    place, model = extended.call_site, callbacks._model
    first = place.fits and place.in_first_epoch
    if name == "on_train_begin":
        extended.worker.company.fit_begins()
    elif name == "on_train_end":
        extended.momentum.end_fit()
        extended.progress.report(last=True)
    elif name == "on_epoch_begin":
        setattr(callbacks, _STEPS_BEFORE, extended.models.steps_seen)
        epochs = callbacks.params.get("epochs", 1)
        epochs = epochs if first and epochs - number > 1 else 0
        # This call comes after the callbacks, since they may have changed the sync period.
        extended.momentum.begin_epoch(model, callbacks.params.get("steps"), epochs)
    elif name == "on_epoch_end":
        extended.progress.epoch_ends(number, model.history.history)
        if extended.data.position.resumed:
            # A resumed epoch has only the steps that were left. Keras' progress bar would expect
            # this number of steps in every later epoch, too. So the bar is told the number of steps
            # of a whole epoch.
            for each in callbacks.callbacks:
                if isinstance(each, keras.callbacks.ProgbarLogger):
                    each.target = callbacks.params.get("steps")
        if first:
            extended.note_idle(model)


HOOKS = {
    f"on_{of}_{when}": _in_place(f"on_{of}_{when}")
    for of in ("train", "epoch", "train_batch")
    for when in ("begin", "end")
}
