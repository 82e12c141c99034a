"""The check that all workers have the same data, by a few facts and numbers about them.

Each worker takes its part. If the workers' data differed, some rows would not be trained.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara.dataset_graph import RANDOM, all_nodes, unordered, unseeded
from tfpara.sync.start_line import counted
from tfpara.sync.workers.settings_check import differences
from tfpara.tensorflow_private import compute_batch_size
from tfpara.typing import Json, Nest

_ROWS = 16  # at most this number of rows of each array are compared
# The value of "kind" in the facts about data that are not divided among the workers.
OWN = "each worker its own"

_REMEDY = (
    "fit and evaluate divide their data among the workers, so all must give the same (what is "
    "drawn at random, by np.random.default_rng(1) with the same seed). Where each worker "
    "has its own part already, write data = strategy.distribute_datasets_from_function("
    "lambda context: dataset), with `dataset` a tf.data.Dataset of this worker's minibatches, and "
    "give them `data`."
)


def difference(facts: Sequence[Mapping[str, Json]], remedy: str = _REMEDY) -> str:
    """Returns a text about a difference between workers' data, with the fix; "" if there is none.

    `facts` are those about each worker's data, by rank. The floats in "values" may differ by 1e-3
    of their size, since machines may compute the last digits differently.
    """
    if all(one.get("kind") == OWN for one in facts):
        return ""
    texts = [{k: v for k, v in one.items() if k != "values"} for one in facts]
    differing = differences({f"worker {rank}": one for rank, one in enumerate(texts)})
    if not differing:
        values = [one.get("values") or [] for one in facts]
        odd = [rank for rank, v in enumerate(values) if not _close(v, values[0])]
        differing = f"rows: those of worker {odd[0]} are not those of worker 0" if odd else ""
    if not differing:
        return ""
    if differing.startswith("shuffle"):
        return (
            f"the workers shuffle their data in different orders ({differing}). Write "
            "keras.utils.set_random_seed(1) on every worker, after the strategy is made, or "
            "dataset.shuffle(…, seed=1)."
        )
    return f"the workers have different data ({differing}). {remedy}"


def _close(a: Sequence[Json], b: Sequence[Json]) -> bool:
    if len(a) != len(b):
        return False
    return all(
        np.isclose(x, y, rtol=1e-3, atol=1e-6, equal_nan=True)
        if isinstance(x, float) and isinstance(y, float)
        else x == y
        for x, y in zip(a, b, strict=True)
    )


def values_of(structure: Nest) -> list[Json]:
    """Returns some values of arrays, by which workers compare the rows and their order."""
    values: list[Json] = []
    for leaf in keras.tree.flatten(structure):
        rows = getattr(leaf, "shape", None)
        if rows is None or not len(rows) or not rows[0]:
            continue
        values.append(int(rows[0]))
        for row in np.unique(np.linspace(0, rows[0] - 1, _ROWS).astype(int)):
            values.append(_value(leaf, int(row)))
    return values


def _value(leaf: Nest, row: int) -> Json:
    try:
        array = np.asarray(leaf.iloc[row] if hasattr(leaf, "iloc") else leaf[row])
        if array.dtype.kind in "biuf":
            # These weights make the mean depend on the order of the columns, so that a worker whose
            # columns have another order is noticed.
            weights = np.linspace(1.0, 2.0, array.size)
            return float((array.astype(np.float64).ravel() * weights).mean())
        if array.dtype.kind in "SUO":
            return hashlib.blake2b(repr(array.tolist()).encode(), digest_size=8).hexdigest()
    except (TypeError, ValueError, IndexError, NotImplementedError):
        pass
    return None  # for data that Python cannot index, such as sparse tensors, and for other dtypes


def divided_between_workers(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is to be divided; without auto-sharding each worker has its own."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy != tf.data.experimental.AutoShardPolicy.OFF


def facts_of_dataset(dataset: tf.data.Dataset) -> dict[str, Json]:
    """Returns facts by which workers compare their datasets, without reading the data."""
    if not divided_between_workers(dataset):
        return {"kind": OWN}
    shards, values = [], []
    for part in _parts(dataset):
        # Private names are used, because no public function lists the datasets of which a dataset
        # is made. If a version of TensorFlow lacks one of the names, one fact is missing.
        name = type(part).__name__
        if "Shard" in name:
            shards.append([_number(part, "_num_shards"), _number(part, "_index")])
        if hasattr(part, "_tensors"):
            values += values_of([t for t in part._tensors if t.dtype != tf.variant])
    return {
        "kind": "tf.data.Dataset",
        "batches": int(dataset.cardinality()),
        "elements": repr(dataset.element_spec),
        "shard(number of shards, index)": shards,
        "values": values,
        "shuffle seeds": [_seeds(part) for part in _parts(dataset) if _is_drawn(part)],
    }


def _parts(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        yield part
        # `_inputs()` is not enough: datasets that read files have an input in `_dataset` or
        # `_filenames`.
        wrapped = [getattr(part, name, None) for name in ("_dataset", "_filenames")]
        waiting += [*part._inputs(), *(p for p in wrapped if isinstance(p, tf.data.Dataset))]


def _number(part: object, name: str) -> int | None:
    value = getattr(part, name, None)
    return None if value is None else int(value)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of rows of all batches but the last; None if unknown."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    # An input of the model may be None. Its spec then has no shape.
    if any(shape is not None and shape.rank == 0 for shape in shapes):
        return None
    found = int(compute_batch_size(dataset))
    return found if found > 0 else None


def why_order_differs(dataset: tf.data.Dataset, made_anew: bool = False) -> str:
    """Returns why a dataset may have another order in each pass, or on each worker; else "".

    `made_anew`: whether each pass makes the dataset anew, so that a seed is enough for one order.
    """
    if dataset.options().deterministic is False:
        return "has the option deterministic=False, which lets it reorder what is ready first"
    for part in _parts(dataset):
        name = type(part).__name__
        if getattr(part, "_deterministic", None) == "false":
            return f"has {_method(name)}(deterministic=False), which reorders what is ready first"
        if _is_drawn(part) and not any(_seeds(part)):
            return f"has {_method(name)} without a seed, so each worker has an order of its own"
        if not made_anew and any(getattr(part, each, False) for each in _EACH_ITERATION):
            return f"has {_method(name)}, which gives another order whenever it is read"
        for function in part._functions():
            problem = _why_function_differs(function.function, name, made_anew)
            if problem:
                return problem
    return ""


# A dataset draws at random anew in each pass if one of these private attributes is true.
_EACH_ITERATION = ("_reshuffle_each_iteration", "_rerandomize_each_iteration", "_rerandomize")
# Some datasets have a function that decides which rows there are. The names of their classes
# contain one of these words.
_CHOOSING = ("Filter", "FlatMap", "Interleave", "TakeWhile")


def _why_function_differs(function: Any, name: str, made_anew: bool) -> str:
    """Returns why the function of a dataset may give other rows, or another order, in each pass."""
    where = f"inside the function of {_method(name)}"
    graph = function.graph.as_graph_def()
    called = {node.op for node in all_nodes(graph)}
    if not made_anew and any("ShuffleDataset" in operation for operation in called):
        return f"has shuffle {where}, of unknown order"
    if operation := unseeded(graph):
        return f"has {_method(operation)} without a seed {where}"
    if "GeneratorDataset" in called and not made_anew:
        return "reads a Python function (from_generator), of unknown order"
    if unordered(graph):
        return f"reorders what is ready first (deterministic=False) {where}"
    if "RandomShuffle" in called or (called & RANDOM and any(k in name for k in _CHOOSING)):
        return f"draws at random which rows there are {where}"
    if not made_anew and any(each.dtype == tf.variant for each in function.captured_inputs):
        return f"reads another dataset {where}, of unknown order"
    return ""


def _is_drawn(part: tf.data.Dataset) -> bool:
    """Returns whether a dataset shuffles or draws, by the name of its class."""
    return "Shuffle" in type(part).__name__ or "Random" in type(part).__name__


def _seeds(part: tf.data.Dataset) -> list[int | None]:
    return [_number(part, "_seed"), _number(part, "_seed2")]


def _method(name: str) -> str:
    """Returns the name of the method that makes datasets of a class: "map" for MapDatasetV2."""
    words = re.findall("[A-Z][a-z]+", name.replace("Dataset", "").replace("Parallel", ""))
    return "_".join(words).lower() or name


def files_are_divided(dataset: tf.data.Dataset) -> bool:
    """Returns whether TensorFlow divides a dataset's files among workers, and not its batches."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if policy == policies.AUTO:
        return files_of(dataset) is not None
    return policy in (policies.FILE, policies.HINT)


def check_files(dataset: tf.data.Dataset, parts: int, of: str = "workers") -> None:
    """Raises ValueError if a dataset reads fewer files than `parts`, among which they are divided.

    `of`: the plural name of what gets the parts, for the message.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if parts < 2 or policy not in (policies.AUTO, policies.FILE):
        return
    count = files_of(dataset)
    if count is not None and count < parts:
        raise ValueError(
            f"the dataset reads {counted(count, 'file')}, and files are divided "
            f"among the {parts} {of}. Write the data to at least {parts} files, or let all "
            "workers read all of them and divide the batches: options = tf.data.Options(); "
            "options.experimental_distribute.auto_shard_policy = "
            "tf.data.experimental.AutoShardPolicy.DATA; dataset = dataset.with_options(options). "
            "(With AutoShardPolicy.OFF every worker would train every row.)"
        )


# The names of operations that read files. TensorFlow divides these files among the workers.
_READERS = {
    name + version
    for name in ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
    for version in ("", "V2")
}


def files_of(dataset: tf.data.Dataset) -> int | None:
    """Returns how many files a dataset reads, in its shortest list; None if it is not known."""
    counts = []
    for part in _parts(dataset):
        names = getattr(part, "_filenames", None)
        if isinstance(names, tf.data.Dataset):
            counts.append(int(names.cardinality()))
        for function in part._functions():
            graph = function.function.graph.as_graph_def()
            if any(node.op in _READERS for node in all_nodes(graph)):
                counts += [int(source.cardinality()) for source in part._inputs()[:1]]
    return min((count for count in counts if count >= 0), default=None)


def check_batched(spec: Nest, several: bool = True) -> None:
    """Raises ValueError if the elements of a dataset, which have this spec, cannot be batches.

    `several`: whether the elements are divided among several replicas.
    """
    leaves = [leaf for leaf in tf.nest.flatten(spec) if isinstance(leaf, tf.TensorSpec)]
    shapes = [leaf.shape for leaf in leaves if leaf.shape.rank is not None]
    rows = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if (several and len(rows) > 1) or any(shape.rank == 0 for shape in shapes):
        raise ValueError(
            f"the dataset's elements, {spec}, are not batches: their tensors have no first axis in "
            "common, by which they could be divided among the replicas. Write dataset.batch(32)."
        )
