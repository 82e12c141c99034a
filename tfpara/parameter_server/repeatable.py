"""Datasets whose copies all have one order of minibatches.

The chunks of an epoch read copies of one dataset, and each keeps its share, so all copies must have
the same minibatches in the same order; so must a copy that is read again, by a worker that takes
over. By itself `shuffle` draws an order where it is read, and `deterministic=False` gives what
comes first. Here the dataset's program (a TensorFlow graph) is written anew: each shuffle has seeds
that are filled in for each epoch, and operations keep their order. What stays random is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Below what protocol buffers carry in one message, 2 GB.
LARGEST_BYTES = 1 << 30

# Operations with seeds: the places, among their inputs, of the two seeds and of the generator, by
# which a program shares its state with the dataset that it was made from (None: there is none).
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
    """A dataset as a program that any process can run, with an order that its seeds decide alone.

    Args:
        dataset: finite, of TensorFlow operations.

    Raises:
        ValueError: more than 1 GB of data inside, Python functions, or randomness that decides
            which elements come.
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
        self._mark = secrets.token_bytes(8)  # stands where a seed is filled in
        self._spec = dataset.element_spec
        self._anew: list[bool] = []  # of each shuffle: whether each epoch has another order
        for scope in _scopes(graph):
            for node in list(scope.nodes):
                self._rewrite(node, scope)
        # The marks are there in the order in which they were added.
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
        """The seeds of all shuffles: what `dataset` needs.

        Args:
            order: numbers ≥ 0 that the order depends on.
            epoch: from 0.
        """
        found: list[int] = []
        for number, anew in enumerate(self._anew):
            # Not the dataset's own seeds: those of a global one depend on the program's past.
            key = [*order, epoch, number] if anew else [*order[:1], number]
            drawn = np.random.default_rng(key).integers(1, 1 << 62, size=2)
            found += map(int, drawn)
        # As in memory: of fixed length, where the other numbers of a program have any.
        return tf.constant([*(np.int64(seed).tobytes() for seed in found), b""])

    def dataset(self, seeds: tf.Tensor) -> tf.data.Dataset:
        """The dataset, in a graph or outside.

        Args:
            seeds: from `seeds`, of type string.
        """
        pieces = [part for k, piece in enumerate(self._pieces) for part in (piece, seeds[k])]
        variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.strings.join(pieces))
        return tf.data.experimental.from_variant(variant, self._spec)


def check_order(graph: tf.compat.v1.GraphDef, what: str) -> None:
    """Refuses a dataset whose order, or whose elements, cannot be repeated.

    Args:
        graph: a GraphDef with the dataset's operations.
        what: it is called in the message.

    Raises:
        ValueError: Python functions, or randomness that decides which elements come.
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
    """Refuses chunks with another order each time that they are read.

    Args:
        graph: a GraphDef with the operations of a chunk's dataset.

    Raises:
        ValueError: a shuffle without a seed, or operations that do not keep the order.
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
    """The nodes of a graph, or of a function's body, which name their inputs in another way."""

    def __init__(self, nodes: Any, is_function: bool) -> None:
        self.nodes = nodes
        self._is_function = is_function
        self._by_name = {node.name: node for node in nodes}

    def number(self, name: str) -> int | None:
        """The value of an input, where it is a constant."""
        node = self._by_name.get(name.split(":")[0])
        if node is None or node.op != "Const":
            return None
        return int(tf.make_ndarray(node.attr["value"].tensor))

    def is_fixed(self, name: str) -> bool:
        """Whether an input depends on nothing that a function is given.

        It need not be a constant: under a global seed, a seed in a function is computed from two.
        """
        return all(found in self._by_name for found in self._names_before([name]))

    def before(self, node: tf.compat.v1.NodeDef) -> list[tf.compat.v1.NodeDef]:
        """All nodes that a node has its inputs from, directly or not."""
        names = self._names_before(node.input)
        return [self._by_name[name] for name in names if name in self._by_name]

    def _names_before(self, inputs: Sequence[str]) -> list[str]:
        """The names of inputs, of what these are made from, and so on; a function's own as well."""
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
    """Whether the number, or the order, of a dataset's elements depends on what they are."""
    # A map gives one element for each.
    is_map = "Map" in node.op.replace("FlatMap", "")
    calls = "Dataset" in node.op and not is_map and any(_functions(node))
    return calls or node.op == "DirectedInterleaveDataset"


def _functions(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """The names of the functions that an operation calls."""
    for value in node.attr.values():
        if value.func.name:
            yield value.func.name
        yield from (f.name for f in value.list.func)


def _calls(node: tf.compat.v1.NodeDef) -> bool:
    """Whether an operation is part of the function that has it, and not a dataset inside it."""
    return "Dataset" not in node.op


def _random_in(
    node: tf.compat.v1.NodeDef,
    bodies: Mapping[str, Sequence[tf.compat.v1.NodeDef]],
    counts: Callable[[tf.compat.v1.NodeDef], bool] = lambda node: True,
) -> str:
    """A random operation that a node is, or has in the functions that it calls.

    Args:
        node: of a graph.
        bodies: the nodes of functions, by name.
        counts: which nodes of functions are looked at.
    """
    if node.op in _RANDOM:
        return str(node.op)
    inner = (n for name in _functions(node) for n in bodies.get(name, ()) if counts(n))
    return next((found for n in inner if (found := _random_in(n, bodies, counts))), "")
