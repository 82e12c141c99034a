"""Saving a model: the global one, written by the chief alone, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path

import keras

from tfpara import files
from tfpara.graph_files import without_tasks
from tfpara.sync.keras.replacing import Method, strategy_of_ours


def by_the_chief(write: Method) -> Method:
    """Replaces a function that saves a model: it writes on the chief alone, all or nothing.

    It writes the global model, unless the model shows other weights (`strategy.weights`).
    """

    @functools.wraps(write)
    def saving(
        model: keras.Model, filepath: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        strategy = strategy_of_ours(model)
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


def for_any_task(export: Method) -> Method:
    """Replaces a function that writes a SavedModel: no operation in it is bound to a task."""

    @functools.wraps(export)
    def exporting(
        model: keras.Model, filepath: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        result = export(model, filepath, *args, **kwargs)
        if strategy_of_ours(model) is not None:
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
