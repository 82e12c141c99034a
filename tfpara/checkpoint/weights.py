"""The global model and averages of a checkpoint, for a model that no strategy trains.

The checkpoint may be of either kind of run, with any number of replicas or servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpara.checkpoint.base import facts_of_model
from tfpara.checkpoint.manifest import is_async
from tfpara.checkpoint.parts import Parts
from tfpara.checkpoint.store import CheckpointError, Store
from tfpara.keras_model import constrained, is_seed, parts_not_trained, training_variables
from tfpara.sync.one_sync.buckets import Layout
from tfpara.sync.one_sync.replicas import BUCKET_BYTES
from tfpara.typing import Array, Json, State


class Weights(NamedTuple):
    """The models of a checkpoint, in memory."""

    # The values of each model's trainable variables. The key is "global" or the name of an average.
    models: dict[str, list[tf.Tensor]]
    # Other variables, such as moving statistics and frozen weights, with their values.
    others: list[tuple[keras.Variable, Array]]

    def put_into(self, model: keras.Model, which: str) -> None:
        """Assigns one of the models to the variables of a Keras model."""
        for variable, value in zip(model.trainable_variables, self.models[which], strict=True):
            variable.assign(value)
        for variable, value in self.others:
            variable.assign(value)


def check(
    store: Store,
    number: int,
    manifest: Mapping[str, Json],
    model: keras.Model,
    averages: Mapping[str, Any],
) -> None:
    """Raises CheckpointError unless a checkpoint is of such a model, and has these averages."""
    run, mine = manifest["run"], facts_of_model(model)["model"]
    theirs = run.get("model")
    if theirs != mine:
        raise CheckpointError(
            f"{store.path(number)} is of another model: its trainable weights are {theirs}, and "
            f"here {mine}. Build the model that the run trains."
        )
    kept = run.get("averages", {})
    for name, average in averages.items():
        # The manifest of a synchronous run describes all averages in one text. The manifest of an
        # asynchronous run has a text for each average.
        said = f"{name!r}: {average!r}"
        same = said in kept if isinstance(kept, str) else kept.get(name) == repr(average)
        if not same:
            raise CheckpointError(
                f"{store.path(number)} has not the average {said}: the run's averages are {kept}. "
                "Give those of its strategy."
            )


def read(
    store: Store,
    number: int,
    manifest: Mapping[str, Json],
    model: keras.Model,
    averages: Mapping[str, Any],
) -> Weights:
    """Reads the models of a checkpoint that has passed `check`, with the same arguments.

    If a file is missing, perhaps since the run has removed it, it raises OSError or OpError.
    """
    store.check(number, manifest)
    readers, sizes = store.readers(number, manifest), manifest.get("bucket_sizes", [])
    parts = Parts(readers, manifest.get("replicas", 0), sizes)
    if is_async(manifest):
        return _of_servers(parts, model, averages)
    return _of_workers(parts, manifest, model, averages)


def _of_workers(
    parts: Parts,
    manifest: Mapping[str, Json],
    model: keras.Model,
    averages: Mapping[str, Any],
) -> Weights:
    """Reads the checkpoint of a `PeriodicSyncStrategy`."""
    weights = model.trainable_variables
    fragments = int(manifest["run"].get("fragments", 1))
    layout = Layout([v.value.shape for v in weights], BUCKET_BYTES, fragments)
    if layout.bucket_sizes != manifest["bucket_sizes"]:
        raise CheckpointError(
            f"the checkpoint has its weights in {len(manifest['bucket_sizes'])} buckets, of other "
            f"sizes than the {len(layout.bucket_sizes)} of this version of tfpara"
        )

    def whole(field: str) -> list[tf.Tensor]:
        sizes = enumerate(layout.bucket_sizes)
        return [tf.constant(parts.piece(f"global/{field}/{k}", 0, [size])) for k, size in sizes]

    found = {"global": whole("rule/global_model")}
    for name, average in averages.items():
        fields = [whole(f"averages/{name}/{field}") for field in _state_of(average)._fields]
        states = zip(*fields, strict=True)
        found[name] = [average.value(type(_state_of(average))(*state)) for state in states]
    models = {name: _cast(layout.unpack(buckets), weights) for name, buckets in found.items()}
    others = [
        (variable, parts.tensor(f"replica-0/{name}"))
        for name, variable in training_variables(model)
        if name.startswith("state/") and not is_seed(variable.path)
    ]
    return Weights(models, others)


def _of_servers(parts: Parts, model: keras.Model, averages: Mapping[str, Any]) -> Weights:
    """Reads the checkpoint of an `AsyncStrategy`."""
    weights = model.trainable_variables
    frozen, statistics, integers, _ = parts_not_trained(model)
    others = [(v, parts.tensor(f"state/{k}")) for k, v in enumerate(statistics)]
    others += [(v, parts.tensor(f"frozen/{k}")) for k, v in enumerate(frozen)]
    kept = [(v, parts.of_worker(0, f"integer/{k}")) for k, v in enumerate(integers)]
    # Version 0.2 of tfpara did not keep integer variables. If that version wrote the checkpoint,
    # their values are None here, and the model keeps its own values.
    others += [(v, value) for v, value in kept if value is not None]
    models = {"global": [tf.constant(parts.tensor(f"weight/{k}")) for k in range(len(weights))]}
    for name, average in averages.items():
        kind = type(_state_of(average))
        states = (
            kind(*(tf.constant(parts.tensor(f"average/{name}/{k}/{f}")) for f in kind._fields))
            for k in range(len(weights))
        )
        models[name] = _cast([average.value(state) for state in states], weights)
    return Weights(models, others)


def _state_of(average: Any) -> State:
    """Returns some state of an average, for the names of its fields."""
    return average.init(tf.zeros([1]))


def _cast(values: Sequence[tf.Tensor], weights: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns values in the types of the variables, with their Keras constraints applied."""
    cast = [tf.cast(value, v.value.dtype) for value, v in zip(values, weights, strict=True)]
    return constrained(cast, [v.constraint for v in weights])
