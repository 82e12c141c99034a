"""Datasets whose copies all have the same minibatches in the same order.

Each chunk of an epoch reads a copy of the dataset and keeps its share of the minibatches. So all
copies must have the same minibatches in the same order, also a copy that another worker reads again
after a failure. But `shuffle` draws an order of its own in each copy, and `deterministic=False`
takes elements in the order in which they are ready. This module rewrites the dataset's TensorFlow
graph: the chief fills in the seeds of all shuffles for each epoch, and operations keep their order.
Datasets with other randomness that decides which elements come are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# 1 GB. One message of protocol buffers can have at most 2 GB.
LARGEST_BYTES = 1 << 30

# Operations with seeds: the indices of their inputs "seed", "seed2" and "seed_generator" (None if
# they have none). Through the generator, copies would share the state of the original dataset.
_SEEDED = {
    "GlobalShuffleDataset": (1, 2, 3),
    "RandomDataset": (0, 1, None),
    "RandomDatasetV2": (0, 1, 2),
    "SamplingDataset": (2, 3, None),
    "ShuffleAndRepeatDataset": (2, 3, None),
    "ShuffleAndRepeatDatasetV2": (2, 3, 5),
    "ShuffleDataset": (2, 3, None),
    "ShuffleDatasetV3": (2, 3, 4),
}
_ANEW = ("reshuffle_each_iteration", "rerandomize_each_iteration")
_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
_RANDOM = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
    "TruncatedNormal",
}


class RepeatableProgram:
    """A dataset as a graph that any process can read; its order depends on given seeds only.

    Args:
        dataset: a finite dataset without Python functions.

    Raises:
        ValueError: the dataset has more than 1 GB of data inside, Python functions, or randomness
            that decides which elements come.
    """

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
        self._mark = secrets.token_bytes(8)  # placeholder of a seed in the serialized graph
        self._spec = dataset.element_spec
        self._anew: list[bool] = []  # for each shuffle: whether each epoch has another order
        for scope in _scopes(graph):
            for node in list(scope.nodes):
                self._rewrite(node, scope)
        # The marks are in the serialized graph in the order in which they were added.
        self._pieces = graph.SerializeToString().split(self._mark)

    def _rewrite(self, node: tf.compat.v1.NodeDef, scope: _Scope) -> None:
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            node.attr["sloppy"].b = False
        if node.op == "CacheDatasetV2":
            node.input[2] = scope.add("DummyMemoryCache", "handle")
        if node.op not in _SEEDED:
            return
        first, second, generator = _SEEDED[node.op]
        if generator is not None:
            node.input[generator] = scope.add("DummySeedGenerator", "handle")
        seeds = [node.input[place] for place in (first, second)]
        if not all(map(scope.is_fixed, seeds)):  # computed from the data: the same in all copies
            return
        anew = any(node.attr[name].b for name in _ANEW if name in node.attr)
        if not anew and list(map(scope.number, seeds)) != [0, 0]:  # one order, as the dataset says
            return
        self._anew.append(anew)
        for place in (first, second):
            node.input[place] = scope.add_number(self._mark)

    def seeds(self, order: Sequence[int], epoch: int) -> tf.Tensor:
        """Returns the seeds of all shuffles for `dataset`.

        Args:
            order: numbers ≥ 0 that the order depends on.
            epoch: the epoch, from 0.
        """
        found: list[int] = []
        for number, anew in enumerate(self._anew):
            # The dataset's own seeds are not used: under a global seed they depend on the number of
            # operations that the program has created before.
            key = [*order, epoch, number] if anew else [*order[:1], number]
            drawn = np.random.default_rng(key).integers(1, 1 << 62, size=2)
            found += map(int, drawn)
        # A seed has 8 bytes, as many as its placeholder, so that lengths in the graph stay right.
        return tf.constant([*(np.int64(seed).tobytes() for seed in found), b""])

    def dataset(self, seeds: tf.Tensor) -> tf.data.Dataset:
        """Returns the dataset with these seeds; in a graph or eagerly.

        Args:
            seeds: the result of the method `seeds`, a string tensor.
        """
        pieces = [part for k, piece in enumerate(self._pieces) for part in (piece, seeds[k])]
        variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.strings.join(pieces))
        return tf.data.experimental.from_variant(variant, self._spec)


def check_order(graph: tf.compat.v1.GraphDef, what: str) -> None:
    """Refuses a dataset whose order, or whose elements, cannot be repeated.

    Args:
        graph: a GraphDef with the dataset's operations.
        what: the dataset's name in messages.

    Raises:
        ValueError: the dataset has Python functions, reads from tf.data's service, or has
            randomness that decides which elements come.
    """
    bodies = {f.signature.name: f.node_def for f in graph.library.function}
    for node in _all_nodes(graph):
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
    for scope in _scopes(graph):
        for node in filter(_chooses, scope.nodes):
            chance = _random_in(node, bodies, _calls) or next(
                (found for n in scope.before(node) if (found := _random_in(n, bodies))), ""
            )
            if chance:
                raise ValueError(
                    f"{what} has a {node.op} that may depend on chance ({chance}, in it or before "
                    "it), so workers that read it might not have the same minibatches. Let what is "
                    "random come after it, in a map, or use tf.random.stateless_uniform and the "
                    "like with a seed from the data (dataset.enumerate() numbers them)."
                )


def check_seeds(graph: tf.compat.v1.GraphDef) -> None:
    """Refuses chunks whose order may differ each time that they are read.

    Args:
        graph: a GraphDef with the operations of a chunk's dataset.

    Raises:
        ValueError: a chunk has a shuffle without a seed, or operations that do not keep the order.
    """
    for scope in _scopes(graph):
        for node in scope.nodes:
            if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                raise ValueError(
                    f"the dataset of a chunk has deterministic=False in a {node.op}, so a chunk "
                    "that is taken up again would have another order. Leave it out."
                )
            if node.op in _SEEDED:
                seeds = [scope.number(node.input[k]) for k in _SEEDED[node.op][:2]]
                if seeds == [0, 0]:
                    raise ValueError(
                        f"the dataset of a chunk has a {node.op} without a seed, so a chunk that "
                        "is taken up again would have another order. Give it one, as in "
                        "dataset.shuffle(size, seed=epoch)."
                    )


class _Scope:
    """The nodes of a graph or of a function's body; the two name inputs differently."""

    def __init__(self, nodes: Any, is_function: bool) -> None:
        self.nodes = nodes
        self._is_function = is_function
        self._by_name = {node.name: node for node in nodes}

    def number(self, name: str) -> int | None:
        """Returns the value of an integer input; None if it is not a constant."""
        node = self._by_name.get(name.split(":")[0])
        if node is None or node.op != "Const":
            return None
        return int(tf.make_ndarray(node.attr["value"].tensor))

    def is_fixed(self, name: str) -> bool:
        """Returns whether an input does not depend on the arguments of the function.

        It need not be a constant: under a global seed, a seed in a function is computed from two.
        """
        return all(found in self._by_name for found in self._names_before([name]))

    def before(self, node: tf.compat.v1.NodeDef) -> list[tf.compat.v1.NodeDef]:
        """Returns all nodes on which a node depends, directly or not."""
        names = self._names_before(node.input)
        return [self._by_name[name] for name in names if name in self._by_name]

    def _names_before(self, inputs: Sequence[str]) -> list[str]:
        """Returns the names of all nodes, and arguments of the function, on which inputs depend."""
        found: dict[str, None] = {}
        names = list(inputs)
        while names:
            name = names.pop().removeprefix("^").split(":")[0]
            if name not in found:
                found[name] = None
                names += self._by_name[name].input if name in self._by_name else ()
        return list(found)

    def add(self, op: str, output: str) -> str:
        """Adds an operation without inputs; returns its output as an input of others."""
        node = self.nodes.add(name=f"tfpara_{op}_{len(self.nodes)}", op=op)
        return f"{node.name}:{output}:0" if self._is_function else node.name

    def add_number(self, content: bytes) -> str:
        """Adds an int64 constant, given as 8 bytes."""
        name = self.add("Const", "output")
        value = self.nodes[-1].attr["value"].tensor
        value.dtype = self.nodes[-1].attr["dtype"].type = tf.int64.as_datatype_enum
        value.tensor_shape.SetInParent()
        value.tensor_content = content
        return name


def _scopes(graph: tf.compat.v1.GraphDef) -> Iterator[_Scope]:
    yield _Scope(graph.node, is_function=False)
    for function in graph.library.function:
        yield _Scope(function.node_def, is_function=True)


def _all_nodes(graph: tf.compat.v1.GraphDef) -> Iterator[tf.compat.v1.NodeDef]:
    for scope in _scopes(graph):
        yield from scope.nodes


def _chooses(node: tf.compat.v1.NodeDef) -> bool:
    """Returns whether an operation may select or reorder elements, depending on their values."""
    # A map does not: it makes one element from each. Other operations that call functions may.
    is_map = "Map" in node.op.replace("FlatMap", "")
    calls = "Dataset" in node.op and not is_map and any(_functions(node))
    return calls or node.op == "DirectedInterleaveDataset"


def _functions(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """Yields the names of the functions that an operation calls."""
    for value in node.attr.values():
        if value.func.name:
            yield value.func.name
        yield from (f.name for f in value.list.func)


def _calls(node: tf.compat.v1.NodeDef) -> bool:
    """Returns whether an operation computes values, and does not make a dataset."""
    return "Dataset" not in node.op


def _random_in(
    node: tf.compat.v1.NodeDef,
    bodies: Mapping[str, Sequence[tf.compat.v1.NodeDef]],
    counts: Callable[[tf.compat.v1.NodeDef], bool] = lambda node: True,
) -> str:
    """Returns a random operation that a node is, or that functions have which it calls.

    Args:
        node: a node of a graph.
        bodies: the nodes of functions, by name.
        counts: returns whether a node of a function is looked at.

    Returns:
        The operation's type, such as "RandomUniform"; empty if there is none.
    """
    if node.op in _RANDOM:
        return str(node.op)
    inner = (n for name in _functions(node) for n in bodies.get(name, ()) if counts(n))
    return next((found for n in inner if (found := _random_in(n, bodies, counts))), "")
