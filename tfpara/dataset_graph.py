"""Finds operations of datasets that draw at random, choose elements, lose the order or set states.

A graph may be that of a serialized dataset or that of a dataset's function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# For each type of operation with seeds: the indices of the inputs "seed", "seed2" and
# "seed_generator". The last is None if the operation takes no generator. A copy of a dataset must
# not keep the generator of the original, because both would then draw numbers from one state.
SEEDED = {
    "GlobalShuffleDataset": (1, 2, 3),
    "RandomDataset": (0, 1, None),
    "RandomDatasetV2": (0, 1, 2),
    "SamplingDataset": (2, 3, None),
    "ShuffleAndRepeatDataset": (2, 3, None),
    "ShuffleAndRepeatDatasetV2": (2, 3, 5),
    "ShuffleDataset": (2, 3, None),
    "ShuffleDatasetV3": (2, 3, 4),
}
# Operations that draw new random numbers each time they run.
RANDOM = {
    *("Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson"),
    *("RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform"),
    *("RandomUniformInt", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
    "TruncatedNormal",
}


def unseeded(graph: tf.compat.v1.GraphDef) -> str:
    """Returns the type of an operation that shuffles or draws without a seed; "" if none does."""
    for scope in scopes(graph):
        for node in scope.nodes:
            places = SEEDED.get(node.op, ())[:2]
            if places and all(scope.constant(node.input[place]) == 0 for place in places):
                return str(node.op)
    return ""


def unordered(graph: tf.compat.v1.GraphDef) -> str:
    """Returns the type of an operation with deterministic=False; "" if there is none."""
    for node in all_nodes(graph):
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            return str(node.op)
    return ""


def cache_file(graph: tf.compat.v1.GraphDef) -> str:
    """Returns the name of a file in which a `cache` keeps elements; "" if none is known."""
    for scope in scopes(graph):
        for node in scope.nodes:
            if node.op in ("CacheDataset", "CacheDatasetV2"):
                name = scope.constant(node.input[1])
                if name:
                    return str(tf.compat.as_str_any(name))
    return ""


def by_chance(graph: tf.compat.v1.GraphDef) -> tuple[str, str] | None:
    """Returns the types of an operation that chooses elements and of a random operation before it.

    The choice may depend on the random numbers. Returns None if there is no such pair.
    """
    bodies = {each.signature.name: each.node_def for each in graph.library.function}

    def random_in(node: tf.compat.v1.NodeDef, computing: bool = False) -> str:
        """Returns the type of a random operation in a node or in functions it calls; else "".

        `computing`: whether to skip operations that make datasets.
        """
        if node.op in RANDOM:
            return str(node.op)
        called = (inner for name in _functions(node) for inner in bodies.get(name, ()))
        inner = (each for each in called if not (computing and "Dataset" in each.op))
        return next((found for each in inner if (found := random_in(each, computing))), "")

    for scope in scopes(graph):
        for node in filter(_chooses, scope.nodes):
            chance = random_in(node, computing=True) or next(
                (found for each in scope.before(node) if (found := random_in(each))), ""
            )
            if chance:
                return str(node.op), chance
    return None


def changes(graph: tf.compat.v1.GraphDef, handle: str) -> bool:
    """Returns whether a dataset's functions change the variable with this handle."""
    functions = {each.signature.name: each for each in graph.library.function}

    def changed(nodes: Sequence[tf.compat.v1.NodeDef], name: str) -> bool:
        for node in nodes:
            inputs = [each.split(":")[0] for each in node.input if not each.startswith("^")]
            for place in (k for k, each in enumerate(inputs) if each == name):
                if node.op.startswith(("Assign", "Rng")):
                    return True
                if node.op == "Identity" and changed(nodes, node.name):
                    return True
                # `place` is the variable's index in the operation's inputs. If the operation calls
                # a function, `place` is turned into the index of the same value in the function's
                # arguments. The index is counted from the end, where the captured values are. An
                # operation that makes a dataset has another dataset as its first input. The
                # captured values follow, and the attribute Targuments lists their types.
                if "Targuments" in node.attr:
                    place -= 1 + len(node.attr["Targuments"].list.type)
                elif "Dataset" in node.op:
                    continue
                else:
                    place -= len(inputs)
                for called in filter(None, map(functions.get, _functions(node))):
                    if changed(called.node_def, called.signature.input_arg[place].name):
                        return True
        return False

    # In the dataset's own graph, an AssignVariableOp gives a variable its first value. That is no
    # change.
    return changed([each for each in graph.node if each.op != "AssignVariableOp"], handle)


def _chooses(node: tf.compat.v1.NodeDef) -> bool:
    """Returns whether an operation may select or reorder elements by their values."""
    # A map makes one element from each element, so it does not choose. Other operations that call
    # functions may choose.
    is_map = "Map" in node.op.replace("FlatMap", "")
    calls = "Dataset" in node.op and not is_map and any(_functions(node))
    return calls or node.op == "DirectedInterleaveDataset"


def _functions(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """Yields the names of the functions that an operation calls."""
    for value in node.attr.values():
        if value.func.name:
            yield value.func.name
        yield from (f.name for f in value.list.func)


class Scope:
    """The nodes of a graph or of a function's body.

    An input is "node:output:0" in a function's body, and "node" or "node:0" in a graph.
    """

    def __init__(self, nodes: Any, is_function: bool) -> None:
        self.nodes = nodes
        self._is_function = is_function
        self._by_name = {node.name: node for node in nodes}

    def constant(self, name: str) -> Any:
        """Returns the value of an input with one element; None if it is not a constant."""
        found = self.array(name)
        return None if found is None else found.item()

    def array(self, name: str) -> Any:
        """Returns the value of an input as an array; None if it is not a constant."""
        node = self._by_name.get(name.split(":")[0])
        if node is None or node.op != "Const":
            return None
        return tf.make_ndarray(node.attr["value"].tensor)

    def is_fixed(self, name: str) -> bool:
        """Returns whether an input does not depend on the arguments of the function."""
        # Such an input may be computed: with a global seed, a function mixes two seeds into one.
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
        """Adds an operation without inputs; returns the name by which others take its output."""
        node = self.nodes.add(name=f"tfpara_{op}_{len(self.nodes)}", op=op)
        return f"{node.name}:{output}:0" if self._is_function else node.name

    def add_number(self, content: bytes, shape: Sequence[int] = ()) -> str:
        """Adds an int64 constant, given as 8 bytes for each number; returns the name as `add`."""
        name = self.add("Const", "output")
        value = self.nodes[-1].attr["value"].tensor
        value.dtype = self.nodes[-1].attr["dtype"].type = tf.int64.as_datatype_enum
        value.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
        value.tensor_content = content
        return name


def scopes(graph: tf.compat.v1.GraphDef) -> Iterator[Scope]:
    """Yields the nodes of a graph, and those of each function in its library."""
    yield Scope(graph.node, is_function=False)
    for function in graph.library.function:
        yield Scope(function.node_def, is_function=True)


def all_nodes(graph: tf.compat.v1.GraphDef) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the nodes of a graph and of all functions in its library."""
    for scope in scopes(graph):
        yield from scope.nodes
