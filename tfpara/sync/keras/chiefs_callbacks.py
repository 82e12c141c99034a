"""Keras' callbacks on several workers: only those of the chief write files, print and draw bars.

In an elastic run another worker may become the chief between two steps. The new chief continues
the files and the progress bar of the former one.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfpara.typing import Json

_CALLBACKS = keras.callbacks
Hook = Callable[..., None]
# For each kind of callback: the name of its attribute that holds the path to which it writes.
_PATHS = {
    _CALLBACKS.ModelCheckpoint: "filepath",
    _CALLBACKS.CSVLogger: "filename",
    _CALLBACKS.TensorBoard: "log_dir",
}
# The kinds of callbacks that write no files, but print lines if they have `verbose=1`.
_PRINTING = (
    _CALLBACKS.EarlyStopping,
    _CALLBACKS.LearningRateScheduler,
    _CALLBACKS.ReduceLROnPlateau,
)


def prepared(callback: keras.callbacks.Callback, strategy: Any) -> Any:
    """Returns the callback to run for a given one, or None; raises ValueError if it cannot work."""
    _refuse(callback, strategy)
    attribute = next((a for kind, a in _PATHS.items() if isinstance(callback, kind)), None)
    if strategy.company.changes or not strategy.is_chief:
        if type(callback) is _CALLBACKS.RemoteMonitor:
            return callback if strategy.is_chief else None
        if attribute is not None:
            return _Elsewhere(callback, attribute, strategy)
        return _Silent(callback, strategy) if isinstance(callback, _PRINTING) else callback
    _make_folder(callback)
    return callback


def _make_folder(callback: keras.callbacks.Callback) -> None:
    """Makes the folder of a CSVLogger's file; the other kinds of callbacks make theirs."""
    if isinstance(callback, _CALLBACKS.CSVLogger):
        os.makedirs(os.path.dirname(callback.filename) or ".", exist_ok=True)


def _refuse(callback: keras.callbacks.Callback, strategy: Any) -> None:
    if isinstance(callback, _CALLBACKS.BackupAndRestore):
        raise ValueError(
            "BackupAndRestore keeps the weights of one replica, and neither the global model, its "
            "momentum and averages nor the other replicas: a run would not go on where it was. Use "
            f"tfpara.callbacks.Checkpoint({os.fspath(callback.backup_dir)!r}) in its place."
        )
    several = strategy.num_workers > 1 or strategy.company.changes
    if several and not strategy.rule.overwrites and _restores_best(callback):
        raise ValueError(
            "EarlyStopping(restore_best_weights=True) would restore other weights on each worker, "
            f"since under {type(strategy.rule).__name__} the replicas' weights differ after a "
            "sync, too. Leave restore_best_weights out, and save the best model by "
            "keras.callbacks.ModelCheckpoint(path, save_best_only=True)."
        )
    why = getattr(callback, "not_elastic", "")
    if why and strategy.company.changes:
        raise ValueError(f"{type(callback).__name__} and elastic= contradict each other: {why}")
    orbax = getattr(_CALLBACKS, "OrbaxCheckpoint", None)
    if several and orbax is not None and isinstance(callback, orbax):
        raise ValueError(
            "OrbaxCheckpoint would write from every worker into one folder. Use "
            "keras.callbacks.ModelCheckpoint, or to go on after a failure "
            "tfpara.callbacks.Checkpoint(directory)."
        )


def _restores_best(callback: Any) -> bool:
    """Returns whether a callback is an EarlyStopping that sets the best weights when `fit` ends."""
    kind = _CALLBACKS.EarlyStopping
    ends = isinstance(callback, kind) and type(callback).on_train_end is kind.on_train_end
    return ends and bool(callback.restore_best_weights)


class _Silent(keras.callbacks.Callback):
    """A wrapper that lets a callback print nothing while this worker is not the chief."""

    def __init__(self, callback: keras.callbacks.Callback, strategy: Any) -> None:
        super().__init__()
        self._callback, self._strategy = callback, strategy

    def set_model(self, model: keras.Model) -> None:
        self._call("set_model", model)

    def set_params(self, params: dict[str, Json]) -> None:
        self._callback.set_params(params)

    def _call(self, method: str, *args: object, **kwargs: object) -> None:
        if self._strategy.is_chief:
            getattr(self._callback, method)(*args, **kwargs)
        else:
            self._call_elsewhere(method, *args, **kwargs)

    def _call_elsewhere(self, method: str, *args: object, **kwargs: object) -> None:
        meanwhile = self._meanwhile()
        if hasattr(self._callback, "verbose"):
            meanwhile["verbose"] = 0
        own = {name: getattr(self._callback, name) for name in meanwhile}
        try:
            for name, value in meanwhile.items():
                setattr(self._callback, name, value)
            getattr(self._callback, method)(*args, **kwargs)
        finally:
            for name, value in own.items():
                # If the callback itself has changed a value during the call, it keeps that value.
                if getattr(self._callback, name) == meanwhile[name]:
                    setattr(self._callback, name, value)

    def _meanwhile(self) -> dict[str, Json]:
        """Returns the attributes that the callback has during its calls, beside `verbose`."""
        return {}


class _Elsewhere(_Silent):
    """A wrapper that lets a callback write to a temporary folder, and print nothing.

    The callback has the folder's path only while one of its methods runs, else the user's path. If
    this worker becomes the chief of an elastic run, the callback begins anew at the user's path,
    and appends to the files of the former chief.
    """

    def __init__(self, callback: keras.callbacks.Callback, attribute: str, strategy: Any) -> None:
        super().__init__(callback, strategy)
        self._attribute = attribute
        self._elsewhere = False  # whether the callback's last call wrote to the temporary folder
        self._trains = False
        self._folder = tempfile.mkdtemp(prefix="tfpara-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def _call(self, method: str, *args: object, **kwargs: object) -> None:
        if not self._strategy.is_chief:
            self._elsewhere = True
            self._call_elsewhere(method, *args, **kwargs)
        else:
            if self._elsewhere or method == "on_train_begin":
                _make_folder(self._callback)
            if self._elsewhere:
                self._elsewhere = False
                self._begin_anew()
            getattr(self._callback, method)(*args, **kwargs)
        self._trains = method == "on_train_begin" or (self._trains and method != "on_train_end")

    def _begin_anew(self) -> None:
        """Lets the callback end its files in the folder, and continue those of the former chief."""
        if self._trains:
            self._call_elsewhere("on_train_end")
        if hasattr(self._callback, "append"):
            self._callback.append = True
        self._callback.set_model(self._callback.model)
        if self._trains:
            self._callback.on_train_begin()

    def _meanwhile(self) -> dict[str, Json]:
        path = os.fspath(getattr(self._callback, self._attribute))
        return {self._attribute: os.path.join(self._folder, os.path.basename(path) or "files")}


class ChiefsBar(keras.callbacks.ProgbarLogger):
    """The progress bar of an elastic run, which the chief of the moment draws."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy

    def set_params(self, params: dict[str, Json]) -> None:
        super().set_params({**params, "steps": None})

    def on_epoch_begin(self, epoch: int, logs: dict[str, Json] | None = None) -> None:
        # The number of steps is not known: it changes with the number of workers.
        self.target = None
        super().on_epoch_begin(epoch, logs)


def _of_the_chief(hook: Hook) -> Hook:
    @functools.wraps(hook)
    def calling(bar: ChiefsBar, *args: object, **kwargs: object) -> None:
        if bar._strategy.is_chief:
            bar._maybe_init_progbar()  # a worker that became chief within the epoch has no bar yet
            hook(bar, *args, **kwargs)

    return calling


for _name in (
    *("epoch_begin", "epoch_end", "train_batch_end", "test_begin", "test_batch_end", "test_end"),
    *("predict_begin", "predict_batch_end", "predict_end"),
):
    setattr(ChiefsBar, f"on_{_name}", _of_the_chief(getattr(ChiefsBar, f"on_{_name}")))


def _passed_on(method: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self._call(method, *args, **kwargs)


for _name in dir(_CALLBACKS.Callback):
    if _name.startswith("on_"):
        setattr(_Silent, _name, _passed_on(_name))
