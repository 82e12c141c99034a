"""A trained model as a SavedModel."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    strategy: Any = None,
    which: str = "global",
    signature: Sequence[tf.TensorSpec] | None = None,
    preprocessing: Callable[..., Any] | None = None,
    postprocessing: Callable[[Any], Mapping[str, tf.Tensor]] | None = None,
) -> None:
    """Writes a SavedModel whose `serving_default` is postprocessing(model(preprocessing(*inputs))).

    It appears at `path` whole or not at all, and takes the place of one there. Every worker must
    call this; the chief writes.

    Args:
        model: a built model.
        path: directory of the SavedModel.
        strategy: the `PeriodicSyncStrategy` that trained the model; None exports the weights that
            the model has.
        which: with a strategy, the weights: "global", "local" or an average's name.
        signature: the inputs; their names become those of the signature. None: those of the model.
        preprocessing: TensorFlow function from the inputs to the model's. None: nothing is done.
        postprocessing: TensorFlow function from the model's output to named outputs. None: the
            output as it is.

    Raises:
        FileExistsError: `path` is there and is no SavedModel.
        ValueError: `which` is unknown, or the model has not been built.
    """
    path = Path(path)
    if path.exists() and not (path / "saved_model.pb").is_file():
        raise FileExistsError(
            f"{path} exists and is no SavedModel. Remove it, or export to another path."
        )
    if not model.built:
        raise ValueError("The model has no weights yet. Call it on data, or build it, first.")

    def serve(*inputs: Any) -> Any:
        outputs = model(preprocessing(*inputs) if preprocessing else inputs[0], training=False)
        return dict(postprocessing(outputs)) if postprocessing else outputs

    specs = list(signature) if signature is not None else _input_specs(model)
    with contextlib.ExitStack() as stack:
        if strategy is not None:
            stack.enter_context(strategy.weights(model, which))
            if not strategy.is_chief:
                return
        _write(model, path, serve, specs)


def _write(model: keras.Model, path: Path, serve: Callable[..., Any], specs: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.replaced")
    try:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serve", serve, input_signature=specs)
        archive.write_out(os.fspath(partial), verbose=False)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
    finally:
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def _input_specs(model: keras.Model) -> list[tf.TensorSpec]:
    inputs = model.inputs or []
    if len(inputs) != 1:
        raise ValueError(
            f"The model has {len(inputs)} inputs. Give signature= and preprocessing=, which makes "
            "the model's inputs of the signature's."
        )
    (only,) = inputs
    return [tf.TensorSpec(only.shape, only.dtype, name=only.name.split(":")[0])]
