"""Datasets whose copies all have the same minibatches in the same order.

Each chunk of an epoch reads a copy of the dataset and keeps its share of the minibatches. So all
copies must have the same minibatches in the same order, also if another worker reads a chunk again
after a failure. But `shuffle` draws another order in each copy, and `deterministic=False` takes
elements in the order in which they are ready. This module rewrites the dataset's TensorFlow graph:
for each epoch the chief inserts the seeds of all shuffles, and all operations are deterministic.
The chief also inserts the states of random generators, which each copy would begin as they were
when `fit` began. A dataset is refused if other random operations decide which elements come.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpara.dataset_graph import (
    SEEDED,
    Scope,
    all_nodes,
    by_chance,
    cache_file,
    changes,
    scopes,
    unordered,
    unseeded,
)

# The data are sent in a protocol buffer, which can have at most 2 GB. This limit keeps a margin.
LARGEST_BYTES = 1 << 30

_ANEW = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# A random generator's state has one of these shapes. The first belongs to Keras' SeedGenerator
# (Keras' random layers have one), the second to tf.random.Generator.
_STATES = {(2,), (3,)}
_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}


class RepeatableProgram:
    """A finite dataset as a graph that any process can read; only the seeds determine its order."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        program = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=0,
            strip_device_assignment=True,
        ).numpy()
        if len(program) > LARGEST_BYTES:
            raise ValueError(
                f"the dataset carries {len(program) / 2**30:.1f} GB of data inside, more than can "
                "be sent to workers. Write them to files and read those in the dataset."
            )
        graph = tf.compat.v1.GraphDef.FromString(program)
        check_order(graph, "the dataset")
        self._mark = secrets.token_bytes(8)  # placeholder for a seed in the serialized graph
        self._spec = dataset.element_spec
        self._copies = itertools.count()
        # For each operation that gets seeds, such as a shuffle: whether it draws other numbers in
        # each epoch.
        self._anew: list[bool] = []
        for scope in scopes(graph):
            for node in list(scope.nodes):
                self._rewrite(node, scope)
                if node.op == "AssignVariableOp":
                    self._begin_anew(node, scope, graph)
        # The serialized graph is cut at the marks. It has them in the order in which they were
        # added, so seed k belongs between pieces k and k + 1.
        self._pieces = graph.SerializeToString().split(self._mark)

    def _rewrite(self, node: tf.compat.v1.NodeDef, scope: Scope) -> None:
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            node.attr["sloppy"].b = False
        if node.op == "CacheDatasetV2":
            node.input[2] = scope.add("DummyMemoryCache", "handle")
        if node.op not in SEEDED:
            return
        first, second, generator = SEEDED[node.op]
        if generator is not None:
            node.input[generator] = scope.add("DummySeedGenerator", "handle")
        seeds = [node.input[place] for place in (first, second)]
        # Seeds that are computed from the data are not replaced, because they are the same in all
        # workers' copies already.
        if not all(map(scope.is_fixed, seeds)):
            return
        anew = any(node.attr[name].b for name in _ANEW if name in node.attr)
        # Fixed seeds that the dataset itself has are not replaced, because they give the same order
        # in all copies and epochs already.
        if not anew and list(map(scope.constant, seeds)) != [0, 0]:
            return
        self._anew.append(anew)
        for place in (first, second):
            node.input[place] = scope.add_number(self._mark)

    def _begin_anew(
        self, node: tf.compat.v1.NodeDef, scope: Scope, graph: tf.compat.v1.GraphDef
    ) -> None:
        """Gives a generator another state in each epoch; `node` sets a variable's first value."""
        value = scope.array(node.input[1])
        is_state = value is not None and value.dtype == np.int64 and value.shape in _STATES
        if is_state and changes(graph, node.input[0]):
            self._anew.append(True)
            # Any numbers are a valid state. `seeds` draws only two numbers, so in a state of three
            # numbers the third is 0.
            rest = bytes(8 * (value.size - 2))
            node.input[1] = scope.add_number(2 * self._mark + rest, value.shape)

    def seeds(self, order: Sequence[int], epoch: int) -> tf.Tensor:
        """Returns the seeds of all shuffles, for `dataset`; `order` is that of `as_chunks`."""
        found: list[int] = []
        for number, anew in enumerate(self._anew):
            # The dataset's own seeds are not part of the key, because under a global seed they
            # depend on the number of operations that the program created earlier.
            key = [*order, epoch, number] if anew else [*order[:1], number]
            drawn = np.random.default_rng(key).integers(1, 1 << 62, size=2)
            found += map(int, drawn)
        # A seed has 8 bytes, as its placeholder has, so that lengths in the serialized graph stay
        # valid.
        return tf.constant([*(np.int64(seed).tobytes() for seed in found), b""])

    def dataset(self, seeds: tf.Tensor) -> tf.data.Dataset:
        """Returns a new dataset with `seeds`, a result of `seeds()`; in a graph or eagerly."""
        pieces = [part for k, piece in enumerate(self._pieces) for part in (piece, seeds[k])]
        # TensorFlow merges equal operations of a graph. So two datasets of one graph would become
        # one dataset, which would be read twice, the second time in another order. To prevent this,
        # each dataset gets a node of its own that does nothing.
        nothing = tf.compat.v1.NodeDef(name=f"tfpara_copy_{next(self._copies)}", op="NoOp")
        pieces.append(tf.compat.v1.GraphDef(node=[nothing]).SerializeToString())
        variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.strings.join(pieces))
        return tf.data.experimental.from_variant(variant, self._spec)


def check_order(graph: tf.compat.v1.GraphDef, what: str) -> None:
    """Refuses a dataset, in messages called `what`, whose order or elements cannot be repeated."""
    for node in all_nodes(graph):
        if node.op in _PYTHON:
            raise ValueError(
                f"{what} has a Python function in it (py_function, numpy_function or "
                "from_generator), which exists in this process only. Write it with TensorFlow "
                "operations, or the data to TFRecord files."
            )
        if node.op.startswith("DataServiceDataset"):
            raise ValueError(
                f"{what} reads from tf.data's service, which gives every reader another order. "
                "Read the files themselves."
            )
    if file := cache_file(graph):
        raise ValueError(
            f"{what} has cache({file!r}), and all workers that read it would write this one file. "
            "Keep the data in memory, with cache(), or write them to TFRecord files beforehand."
        )
    found = by_chance(graph)
    if found is not None:
        raise ValueError(
            f"{what} has a {found[0]} that may depend on chance ({found[1]}, in it or before it), "
            "so workers that read it might not have the same minibatches. Let what is random come "
            "after it, in a map, or use tf.random.stateless_uniform and the like with a seed from "
            "the data (dataset.enumerate() numbers them)."
        )


def check_seeds(graph: tf.compat.v1.GraphDef) -> None:
    """Refuses chunks whose order may differ each time they are read."""
    if op := unordered(graph):
        raise ValueError(
            f"the dataset of a chunk has deterministic=False in a {op}, so a chunk that is taken "
            "up again would have another order. Leave it out."
        )
    if op := unseeded(graph):
        raise ValueError(
            f"the dataset of a chunk has a {op} without a seed, so a chunk that is taken up again "
            "would have another order. Give it one, as in dataset.shuffle(size, seed=epoch)."
        )
