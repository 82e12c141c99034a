"""Lists of callbacks: which callbacks a worker runs, and the place in `fit` that they tell."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfpara import fit_call
from tfpara.cluster.place import Place
from tfpara.sync.keras import chiefs_callbacks
from tfpara.sync.keras.replacing import Method, strategy_of_ours

_PLACE = "tfpara_place"  # the attribute of a list of callbacks that has the strategy's `Place`


def with_files_of_the_chief(make: Callable[..., None]) -> Callable[..., None]:
    """Replaces the constructor of `CallbackList`: other workers' callbacks write elsewhere.

    `fit`, `evaluate` and `predict` call that constructor.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def making(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        model = given.arguments.get("model")
        strategy = None if model is None else strategy_of_ours(model)
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
    strategy = strategy_of_ours(callbacks._model) if getattr(callbacks, "_model", None) else None
    return strategy.extended if strategy is not None else None


HOOKS = {
    f"on_{of}_{when}": _in_place(f"on_{of}_{when}")
    for of in ("train", "epoch", "train_batch")
    for when in ("begin", "end")
}
