"""Keras' functions that have to know that several workers run one script.

Keras 3 does not. Each worker would write to the same path at once. So the functions that write are
replaced here, for models whose weights are a `PeriodicSyncStrategy`'s:

- what saves a model writes on the chief, and nothing on the other workers;
- callbacks run on all workers, and those that write are given a folder on the other workers that is
  removed, as in Keras 2;
- `fit` and `train_on_batch` look first whether the model was made in a strategy's scope;
- `fit` tells callbacks of its end, where it raises too;
- `fit` returns when all workers have come to its end, so what the chief wrote in it is there;
- the progress bars of `fit`, `evaluate` and `predict` are the chief's, unless `verbose` is given.

None of them waits for other workers within a save, since scripts may call it on the chief alone.
And `predict` gives the worker that calls it all rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

# The functions that all public ways to save end in: Model.save, Model.save_weights, and
# keras.saving's and keras.models' functions, also where a script imported these by their names.
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5_format
from keras.src.saving import saving_lib as _saving_lib

from tfpara import files, fit_call, scope
from tfpara.extended import PeriodicSyncExtended
from tfpara.model_variables import strategy_of

_CALLBACKS = keras.callbacks
# The callbacks that write, and the attribute that says where.
_PATHS = {
    _CALLBACKS.ModelCheckpoint: "filepath",
    _CALLBACKS.CSVLogger: "filename",
    _CALLBACKS.TensorBoard: "log_dir",
}
_replaced: set[tuple[int, str, Callable[..., Any]]] = set()


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
    _replace(keras.Model, "train_on_batch", _looked_at)
    _replace(keras.Model, "predict", _of_all_rows)
    _replace(_CALLBACKS.CallbackList, "__init__", _with_files_of_the_chief)


def watch_fit() -> None:
    """Has `fit` call at its end what `fit_call.at_end` was given; a second call changes nothing."""
    _replace(keras.Model, "fit", _watched)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if (id(owner), name, make) not in _replaced:
        _replaced.add((id(owner), name, make))
        setattr(owner, name, make(getattr(owner, name)))


def _strategy(model: Any) -> Any:
    """The `PeriodicSyncStrategy` of a model; None if it has another or none."""
    strategy = strategy_of(model)
    return strategy if isinstance(strategy.extended, PeriodicSyncExtended) else None


# -- saving ----------------------------------------------------------------------------------------


def _by_the_chief(write: Callable[..., Any]) -> Callable[..., Any]:
    """What saves a model, made to write on the chief alone, and whole."""

    @functools.wraps(write)
    def saving(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = _strategy(model) if isinstance(filepath, (str, os.PathLike)) else None
        if strategy is None:
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


def _watched(fit: Callable[..., Any]) -> Callable[..., Any]:
    """`fit` of any model, made to tell callbacks of its end."""

    @functools.wraps(fit)
    def fitting(*args: Any, **kwargs: Any) -> Any:
        with fit_call.under_way():
            return fit(*args, **kwargs)

    return fitting


def _shown_by_the_chief(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model with a progress bar, which other workers show only where asked to."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def showing(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        strategy = _strategy(model)
        given = signature.bind(model, *args, **kwargs)
        others = strategy is not None and not strategy.is_chief
        if others and given.arguments.get("verbose", "auto") == "auto":
            given.arguments["verbose"] = 0
        return method(*given.args, **given.kwargs)

    return showing


def _together(fit: Callable[..., Any]) -> Callable[..., Any]:
    """`fit`, made to return when every worker has come to its end."""

    @functools.wraps(fit)
    def fitting(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        _look(model)
        history = fit(model, *args, **kwargs)
        strategy = _strategy(model)
        if strategy is not None and strategy.num_workers > 1:
            strategy.synchronize()
        return history

    return fitting


def _looked_at(train: Callable[..., Any]) -> Callable[..., Any]:
    """A method that trains a model, made to look first where that was made."""

    @functools.wraps(train)
    def training(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
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


def _of_all_rows(predict: Callable[..., Any]) -> Callable[..., Any]:
    """`predict`, made to compute all rows on the worker that calls it."""

    @functools.wraps(predict)
    def predicting(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
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
    def making(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        model = given.arguments.get("model")
        strategy = None if model is None else _strategy(model)
        if strategy is not None:
            callbacks = keras.tree.flatten(given.arguments.get("callbacks") or [])
            prepared = [_prepared(callback, strategy) for callback in callbacks]
            given.arguments["callbacks"] = [p for p in prepared if p is not None]
        make(*given.args, **given.kwargs)

    return making


def _prepared(callback: Any, strategy: Any) -> Any:
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


def _refuse(callback: Any, strategy: Any) -> None:
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

    def __init__(self, callback: Any, attribute: str) -> None:
        super().__init__()
        self._callback, self._attribute = callback, attribute
        self._folder = tempfile.mkdtemp(prefix="tfpara-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def set_model(self, model: Any) -> None:
        self._call("set_model", model)

    def set_params(self, params: Any) -> None:
        self._callback.set_params(params)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        path = os.fspath(getattr(self._callback, self._attribute))
        meanwhile: dict[str, Any] = {
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
