"""A trained model as a SavedModel."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara import files, remote_files
from tfpara.graph_files import without_tasks
from tfpara.keras_model import strategy_of
from tfpara.remote_files import RemoteFolder
from tfpara.strategy import Strategy
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Nest

# A warning is given if the initial weights make up more than this share of an average.
_YOUNG = 0.1


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    which: str = "global",
    strategy: Strategy | None = None,
    signature: Sequence[tf.TensorSpec] | None = None,
    preprocessing: Callable[..., Nest] | None = None,
    postprocessing: Callable[[Nest], Mapping[str, tf.Tensor]] | None = None,
) -> None:
    """Writes a SavedModel whose `serving_default` is postprocessing(model(preprocessing(*inputs))).

    It replaces a former SavedModel at `path`, and is visible only when it is complete. Every worker
    must call this function. The chief writes the SavedModel and prints the path; the function
    returns on all workers when the SavedModel is written. There is a warning if an average still
    consists mostly of the initial weights.

    Args:
        model: a built model.
        path: directory of the SavedModel, or a URL that fsspec knows, such as s3://bucket/path.
        which: the weights: "global", "local" (those of the chief) or an average's name. If the
            model belongs to no strategy of tfpara, "global" and "local" both mean the model's own
            weights.
        strategy: the strategy that trained the model; None finds it from the model.
        signature: the inputs, with the names that they get. None: the inputs of the model; several
            inputs are one argument, with the structure in which the model takes them.
        preprocessing: TensorFlow function from the inputs of the signature to the inputs of the
            model. If it needs a layer with a table of words, such as StringLookup, it must be that
            layer, or a Keras model with it. None: both are the same.
        postprocessing: TensorFlow function from the model's output to named outputs. None: the
            output as it is.

    Raises:
        FileExistsError: `path` exists, and is no SavedModel or has other files in it.
        ImportError: `path` is a URL, and fsspec or its package for the scheme is not installed.
        OSError: `path` cannot be written to.
        ValueError: `which` is unknown, the model has not been built, its inputs are not known, a
            function needs a layer with a table of words, or this is called inside
            `strategy.weights(...)`.
    """
    if strategy is None:
        found: Any = strategy_of(model)
        strategy = found if isinstance(found, Strategy) else None
    if strategy is None and which not in ("global", "local"):
        raise ValueError(
            f"which={which!r}: the model has no weights of that name, since no strategy of tfpara "
            "trained it. Leave out which=, or give strategy=."
        )
    if isinstance(strategy, PeriodicSyncStrategy) and strategy.extended.shown is not None:
        shown = strategy.extended.shown
        raise ValueError(
            f"tfpara.export(..., which={which!r}) inside strategy.weights(model, {shown!r}): it is "
            f"not clear which are meant. Call tfpara.export(model, path, which={shown!r}) outside."
        )
    write = writer(model, path, signature, preprocessing, postprocessing)

    def write_and_tell() -> None:
        write()
        # Without a strategy the message does not call the weights global, because they may be an
        # average that a script has loaded.
        what = f"{which!r} weights are" if strategy else "model is"
        print(f"tfpara: the {what} exported to {os.fspath(path)}", file=sys.stderr)

    with strategy.weights(model, which) if strategy else contextlib.nullcontext():
        if strategy is not None and strategy.is_chief and which not in ("global", "local"):
            _warn_of_young_average(strategy, model, which)
        if isinstance(strategy, PeriodicSyncStrategy):
            strategy.company.by_the_chief(write_and_tell, "tfpara.export()")
        elif strategy is None or strategy.is_chief:
            write_and_tell()


def _warn_of_young_average(strategy: Any, model: keras.Model, which: str) -> None:
    share = 0.0
    if isinstance(strategy, PeriodicSyncStrategy):
        synchronizer = strategy.extended.models.trained(model)
        trained = synchronizer is not None
        if synchronizer is not None:
            share = synchronizer.graph.global_state.share_of_start(which)
    else:
        trained = strategy.has_fitted(model)
    if not trained:
        warnings.warn(
            f"which={which!r}: the model was not trained under this strategy yet, so this average "
            "is the weights that the model has. Export it after fit.",
            stacklevel=3,
        )
    if share > _YOUNG:
        warnings.warn(
            f"which={which!r}: {share:.0%} of this average are still the weights from which it "
            "began, for there were few syncs since the training began or since set_weights set "
            "weights, as EarlyStopping(restore_best_weights=True) does at the end of fit. "
            'Give the average zero_debias=True or a smaller decay; or export which="global".',
            stacklevel=3,
        )


def writer(
    model: keras.Model,
    path: str | os.PathLike[str],
    signature: Sequence[tf.TensorSpec] | None = None,
    preprocessing: Callable[..., Nest] | None = None,
    postprocessing: Callable[[Nest], Mapping[str, tf.Tensor]] | None = None,
) -> Callable[[], None]:
    """Checks the arguments; returns a function that writes the model as it is at the call."""
    if not remote_files.is_url(path):
        _check_place(path)
    if not model.built:
        raise ValueError("The model has no weights yet. Call it on data, or build it, first.")
    specs = list(signature) if signature is not None else _input_specs(model)

    def serve(*inputs: tf.Tensor) -> Nest:
        outputs = model(preprocessing(*inputs) if preprocessing else inputs[0], training=False)
        return dict(postprocessing(outputs)) if postprocessing else outputs

    def write() -> None:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serve", serve, input_signature=specs)
        for layer in (preprocessing, postprocessing):
            if isinstance(layer, keras.layers.Layer):
                # The archive saves the lookup tables of the objects that it tracks. But it refuses
                # to track an unbuilt layer, and a StringLookup may be unbuilt. So the archive
                # tracks a module that holds the layer.
                holder = tf.Module()
                holder.layer = layer
                archive.track(holder)
        if remote_files.is_url(path):
            # A URL is checked here because only one process of a run calls `write`. If another
            # worker checked the URL, it might see a folder that the chief has written in part.
            _check_place(path)
        with remote_files.whole(path) as scratch:
            try:
                archive.write_out(os.fspath(scratch), verbose=False)
            except AssertionError as error:
                given = preprocessing or postprocessing
                if not given or "'untracked' resource" not in str(error):
                    raise
                raise ValueError(
                    "preprocessing= or postprocessing= is a function that uses a variable, or a "
                    "layer with a table of words, such as StringLookup. These cannot be saved "
                    "with a function. Give the layer itself, or a Keras model with it."
                ) from error
            without_tasks(scratch)

    return write


def _check_place(path: str | os.PathLike[str]) -> None:
    """Refuses a place where there is anything but a SavedModel."""
    if remote_files.is_url(path):
        names = {name.split("/")[0] for name in RemoteFolder(os.fspath(path)).sizes()}
    elif os.path.isdir(path):
        names = {*os.listdir(path)} or {""}
    else:
        names = {os.path.basename(path)} if os.path.exists(path) else set()
    foreign = files.foreign_entries(names - {""})
    if names and (foreign or "saved_model.pb" not in names):
        raise FileExistsError(
            f"{os.fspath(path)} exists and is no SavedModel, or not that alone: it has "
            f"{', '.join(foreign[:3]) or 'no saved_model.pb'}. Remove it, or export to another "
            "path."
        )


def _input_specs(model: keras.Model) -> list[Nest]:
    """Returns the signature of a model: its only input, or all inputs in their structure."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            "The model does not say which inputs it has, since it is not made of layers' outputs. "
            "Give signature=, such as signature=[tf.TensorSpec([None, 20], tf.float32)] for one "
            "input of 20 numbers. Where the model has several inputs, also give preprocessing=, "
            "which makes them of the signature's."
        )

    def spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
        # The first axis is left open. A Sequential model without Input would otherwise keep the
        # batch size with which `fit` built it.
        shape = [None, *tensor.shape[1:]]
        return tf.TensorSpec(shape, tensor.dtype, name=tensor.name.split(":")[0])

    return [spec(inputs[0]) if len(inputs) == 1 else keras.tree.map_structure(spec, model.input)]
