"""Saving a model: the chief alone writes the global model, completely or not at all."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from tfpara import files, remote_files
from tfpara.graph_files import without_tasks
from tfpara.remote_files import RemoteFolder
from tfpara.sync.keras.replacing import Method, for_ours


@for_ours
def by_the_chief(
    write: Method,
    strategy: Any,
    model: keras.Model,
    filepath: str | os.PathLike[str],
    *args: object,
    **kwargs: object,
) -> object:
    """Writes a model, with the global weights or those shown, on the chief alone."""
    models = strategy.extended.models
    # While Keras saves, it creates optimizers and layers to compare with the model's. The initial
    # values of their variables must not be exchanged, because the chief may be the only worker that
    # saves.
    with strategy.extended.initial_values.alone():
        if not isinstance(filepath, (str, os.PathLike)):
            with models.writing(model):
                return write(model, filepath, *args, **kwargs)
        if not strategy.is_chief:
            return None
        with _scratch(os.fspath(filepath)) as scratch, models.writing(model):
            return write(model, scratch, *args, **kwargs)


@for_ours
def for_any_task(
    export: Method,
    strategy: Any,
    model: keras.Model,
    filepath: str | os.PathLike[str],
    *args: object,
    **kwargs: object,
) -> object:
    """Writes a SavedModel with no operation that is bound to a task of the cluster."""
    result = export(model, filepath, *args, **kwargs)
    without_tasks(filepath)
    return result


def is_of_keras(path: str) -> bool:
    """Returns whether a path is a URL to which Keras itself can write without tensorflow-io."""
    # Whether tensorflow-io is imported must not decide how a model is written.
    return path.partition("://")[0] in {"hf", "gs", "ram", "file"} and "://" in path


def _for_stores(ours: Callable[[str], object]) -> Callable[[Method], Method]:
    """Replaces a function of Keras by `ours` for paths in stores that TensorFlow does not know."""

    def make(function: Method) -> Method:
        @functools.wraps(function)
        def calling(path: str | os.PathLike[str]) -> object:
            url = os.fspath(path)
            return ours(url) if "://" in url and not is_of_keras(url) else function(path)

        return calling

    return make


makes_no_folder = _for_stores(lambda url: None)  # object stores need no folders
asks_store = _for_stores(lambda url: RemoteFolder(url).exists())


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    """Yields the path to write a model to, which appears at `path` only once it is complete."""
    if is_of_keras(path) or (os.path.isdir(path) and not files.holds_a_model_alone(Path(path))):
        # The path is used as it is in two cases. If it is a URL that Keras knows, Keras itself
        # writes there. If it is a folder with files of other kinds than a model's, the code below
        # must not be used, because it would replace the folder, and those files would be lost.
        yield path
        return
    printed = io.StringIO()
    with remote_files.whole(path) as scratch:
        try:
            with contextlib.redirect_stdout(printed):
                yield os.fspath(scratch)
        finally:
            print(printed.getvalue().replace(os.fspath(scratch), path), end="")
