"""Large embedding tables, of which workers pull and push only the rows that they use.

A block's minibatches use the rows of some ids. The worker computes these ids from the data, before
it pulls: the part of the model's graph that leads from the data to the ids of `Embedding` layers
runs in the input pipeline. In the block, a table is the tensor of the pulled rows, and the layers
look up positions in this tensor in place of ids. So gradients, local steps and pushes have only
these rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.algorithms.asgd import AsyncRule
from tfpara.algorithms.keras_step import step_of_rows
from tfpara.contexts import attributes
from tfpara.keras_model import lookups
from tfpara.parameter_server.messages import NO_ROWS, Rows
from tfpara.typing import Nest

# Embedding tables with fewer bytes are pulled and pushed whole.
LARGE_BYTES = 1 << 22

# Operations that give the same floating-point results in every graph. All of them but Cast are
# exact. Cast may round when it changes the type, but it rounds equally in every graph.
_EXACT = {
    *("Placeholder", "Const", "Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose"),
    *("StridedSlice", "Slice", "Split", "SplitV", "Unpack", "Pack", "ConcatV2", "GatherV2"),
    *("Tile", "BroadcastTo", "Pad", "PadV2", "ReverseV2", "SelectV2", "Neg", "Abs", "Floor"),
    *("Ceil", "Round", "Rint", "Sign", "Minimum", "Maximum", "Relu"),
}


class Tables:
    """The tables of a model that are pulled and pushed by rows, and the layers that use them.

    Attributes:
        known: all large tables, by rows or not, as indices among the model's trainable weights.
        indices: those of the `known` tables that are pulled and pushed by rows.
        lazy: those of `indices` of which a push changes only its own rows and their slots. For
            the other tables, the server takes the rows that a push lacks as zero.
        notes: sentences for the user.
    """

    def __init__(self, model: keras.Model, rule: AsyncRule) -> None:
        self._model, self._rule = model, rule
        weights = model.trainable_variables
        places = {id(v): k for k, v in enumerate(weights)}
        self._layers: dict[int, list[keras.layers.Embedding]] = {}
        for layer in lookups(model):
            index = places.get(id(layer.embeddings))
            if index is not None and _bytes(weights[index]) >= LARGE_BYTES:
                self._layers.setdefault(index, []).append(layer)
        self.known, self.indices = list(self._layers), list[int]()
        self.lazy: list[int] = []
        self.notes: list[str] = []
        self._looking = self._by_rows = False
        self._read_whole: set[int] = set()

    def find(
        self, trace: Callable[[Nest, Sequence[tf.Tensor]], None], spec: Nest, values: Nest
    ) -> None:
        """Finds out which of the tables can be pulled and pushed by rows.

        `trace` computes a minibatch and its loss in a graph, from its data (`spec`) and the values
        of all variables (`values` has their specs).
        """
        self._trace, self._values = trace, values
        if not self._layers:
            return
        weights, optimizer = self._model.trainable_variables, self._model.optimizer
        unfit = self._graph(spec)[1]
        for index in self._layers:
            table, kind = weights[index], type(optimizer).__name__
            by_rows = unmoved = False
            why = unfit.get(index, "")
            if self._rule.local_models:
                why = f"under {type(self._rule).__name__} each worker has a table of its own"
            elif self._model.jit_compile:
                why = "with jit_compile=True, XLA would compile a step for each number of rows"
            elif table.constraint is not None:
                why = "it has a constraint, which may need all rows"
            elif self._rule.local_steps or not why:
                by_rows, unmoved = step_of_rows(optimizer, table.path)
                if self._rule.local_steps and not by_rows:
                    why = f"the step of {kind} needs all rows"
            if why:
                megabytes = _bytes(table) / 2**20
                self.notes.append(f"{table.path!r} ({megabytes:.0f} MB) travels whole: {why}")
                continue
            self.indices.append(index)
            if by_rows and not self._rule.keeps_state:
                self.lazy.append(index)
            if by_rows and not unmoved:
                self.notes.append(
                    f"of {table.path!r} only the rows that a push uses take a step of {kind}; "
                    "other rows keep their values and slots, while plain Keras moves them too. "
                    "AsyncStrategy(sparse_embeddings=False) does as Keras"
                )

    def ahead(self, dataset: tf.data.Dataset, period: int) -> tf.data.Dataset:
        """Returns the dataset with pairs (minibatch, rows) in place of minibatches.

        A block has `period` minibatches (the last block may have fewer), and all of these have the
        same rows. Without tables the dataset is returned as it is.
        """
        if not self.indices:
            return dataset
        spec = dataset.element_spec
        rows_of = self._program(spec)
        unpacked = type(spec) is tuple  # tf.data passes the parts of a tuple as arguments

        def whole(minibatch: tuple[Nest, ...]) -> Nest:
            return minibatch if unpacked else minibatch[0]

        if period == 1:
            return dataset.map(lambda *batch: (whole(batch), rows_of(batch)))

        # An element may have None in place of sample weights. tf.data makes no windows of None, so
        # such parts are left out of the windows.
        is_there = [bool(tf.nest.flatten(s, expand_composites=True)) for s in tf.nest.flatten(spec)]

        def parts(*minibatch: Nest) -> tuple[Nest, ...]:
            flat = tf.nest.flatten(whole(minibatch))
            return tuple(part for part, there in zip(flat, is_there, strict=True) if there)

        def packed(flat: Iterator[Nest]) -> Nest:
            found = [next(flat) if there else None for there in is_there]
            return tf.nest.pack_sequence_as(spec, found)

        def block(*window: tf.data.Dataset) -> tf.data.Dataset:
            minibatches = tf.data.Dataset.zip(window)
            none = {index: tf.zeros([0], tf.int64) for index in self.indices}
            rows = minibatches.map(lambda *flat: rows_of(flat)).reduce(none, _union)
            return minibatches.map(lambda *flat: (packed(iter(flat)), rows))

        return dataset.map(parts).window(period).flat_map(block)

    def split(self, element: Nest) -> tuple[Nest, Rows]:
        """Returns the minibatch and the rows of an element of `ahead`."""
        return element if self.indices else (element, NO_ROWS)

    @contextlib.contextmanager
    def looked_up(self, rows: Rows) -> Iterator[None]:
        """A context in which layers look ids up in the pulled `rows`; if empty, in whole tables."""

        def positions(index: int, ids: tf.Tensor) -> tf.Tensor:
            wanted = tf.cast(tf.reshape(ids, [-1]), tf.int64)
            found = tf.searchsorted(rows[index], wanted)
            there = tf.gather(rows[index], tf.minimum(found, tf.size(rows[index]) - 1))
            told = (
                "tfpara: an Embedding was given an id that the data alone do not give. Give "
                "AsyncStrategy(sparse_embeddings=False)."
            )
            with tf.control_dependencies([tf.debugging.assert_equal(there, wanted, told)]):
                return tf.ensure_shape(tf.reshape(found, tf.shape(ids)), ids.shape)

        if not rows:
            yield
            return
        with attributes(self, _by_rows=True), self._hooked(list(rows), positions):
            yield

    def is_read(self, index: int, assigned: bool) -> None:
        """Notes that the model reads one of the `known` tables, or that a layer assigned to it.

        Raises ValueError if only rows of the table were pulled.
        """
        if self._looking and not assigned:  # a layer looks ids up, so it needs only their rows
            return
        self._read_whole.add(index)
        if self._by_rows:
            raise ValueError(
                f"{self._model.trainable_variables[index].path!r} is read as a whole, and only "
                "rows of it are pulled. Give AsyncStrategy(sparse_embeddings=False)."
            )

    @contextlib.contextmanager
    def _hooked(
        self, indices: Sequence[int], replaced: Callable[[int, tf.Tensor], tf.Tensor]
    ) -> Iterator[None]:
        """A context in which the tables' layers get `replaced(index, ids)` in place of ids."""
        layers = [(index, layer) for index in indices for layer in self._layers[index]]

        def call_of(index: int, layer: keras.layers.Embedding) -> Callable[[Nest], tf.Tensor]:
            original, rows = layer.call, self._model.trainable_variables[index].shape[0]

            def call(inputs: Nest) -> tf.Tensor:
                ids = replaced(index, _as_ids(inputs, rows))
                with attributes(self, _looking=True):
                    return original(ids)

            return call

        for index, layer in layers:
            vars(layer)["call"] = call_of(index, layer)
        try:
            yield
        finally:
            for _, layer in layers:
                vars(layer).pop("call", None)

    def _graph(self, spec: Nest) -> tuple[dict[int, list[tf.Tensor]], dict[int, str], list[str]]:
        """Traces a minibatch of this element spec.

        Returns, by table, the ids that are looked up in it, and why it cannot be pulled by rows (if
        so); and the names of the data's tensors.
        """
        ids: dict[int, list[tf.Tensor]] = {index: [] for index in self._layers}
        unfit: dict[int, str] = {}

        def record(index: int, given: Nest) -> Nest:
            if isinstance(given, tf.Tensor):
                ids[index].append(tf.cast(tf.reshape(given, [-1]), tf.int64))
            else:
                unfit[index] = "its ids are a sparse or ragged tensor"
            return given

        @tf.function(autograph=False)
        def minibatch(data: Nest, values: Sequence[tf.Tensor]) -> None:
            with self._hooked(list(self._layers), record):
                self._trace(data, values)

        self._read_whole.clear()
        traced = minibatch.get_concrete_function(spec, self._values)
        count = len([t for t in tf.nest.flatten(spec, expand_composites=True) if t is not None])
        names = [tensor.name for tensor in traced.inputs[:count]]
        for index, tensors in ids.items():
            if not tensors:
                unfit.setdefault(index, "the model does not look ids up in it")
            elif index in self._read_whole:
                unfit[index] = "the model reads more of it than the rows of ids"
            elif any(_reach_beyond(tensor, traced.graph, names) for tensor in tensors):
                unfit[index] = "its ids depend on more than the data"
            elif any(map(_may_round, tensors)):
                unfit[index] = (
                    "its ids are computed with floating-point numbers, or in a tf.function"
                )
        return ids, unfit, names

    def _program(self, spec: Nest) -> Callable[[Nest], Rows]:
        """Returns the function from a minibatch of this element spec to its rows."""
        ids, unfit, names = self._graph(spec)
        for index in set(self.indices) & set(unfit):
            raise ValueError(
                f"{self._model.trainable_variables[index].path!r}: {unfit[index]}, with these data "
                "and not with the earlier ones. Give AsyncStrategy(sparse_embeddings=False)."
            )
        wanted = {index: ids[index] for index in self.indices}
        used = {op for tensors in wanted.values() for t in tensors for op in _ancestors(t)}
        graph = next(tensors for tensors in wanted.values() if tensors)[0].graph.as_graph_def()
        kept = [node for node in graph.node if node.name in {op.name for op in used}]
        for node in kept:
            node.device = ""
        pruned = tf.compat.v1.GraphDef(node=kept, library=graph.library, versions=graph.versions)
        there = {f"{node.name}:0" for node in kept}

        def rows(minibatch: Nest) -> Rows:
            flat = tf.nest.flatten(minibatch, expand_composites=True)
            given = dict(zip(names, (t for t in flat if t is not None), strict=True))
            return {
                index: _unique(
                    tf.graph_util.import_graph_def(
                        pruned,
                        {name: tensor for name, tensor in given.items() if name in there},
                        [tensor.name for tensor in tensors],
                    )
                )
                for index, tensors in wanted.items()
            }

        return rows


def _as_ids(inputs: Nest, size: int) -> Nest:
    """Returns ids as a layer looks them up, from 0; sparse and ragged tensors as they are."""
    if isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
        return inputs
    ids = tf.convert_to_tensor(inputs)
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    return tf.where(ids < 0, ids + size, ids)


def _unique(ids: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.sort(tf.unique(tf.concat([*ids, tf.zeros([0], tf.int64)], 0)).y)


def _union(some: Rows, others: Rows) -> Rows:
    return {index: _unique([some[index], others[index]]) for index in some}


def _bytes(table: keras.Variable) -> int:
    return table.value.shape.num_elements() * table.value.dtype.size


def _ancestors(tensor: tf.Tensor) -> set[Any]:
    """Returns the operations of a graph that a tensor needs."""
    found, left = set(), [tensor.op]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [*op.control_inputs, *(t.op for t in op.inputs)]
    return found


def _reach_beyond(tensor: tf.Tensor, graph: tf.Graph, data: Sequence[str]) -> bool:
    """Returns whether a tensor needs more than the tensors `data` and stateless operations."""
    if tensor.graph is not graph:  # the tensor is inside a loop or a called function
        return True
    return any(
        op.outputs[0].name not in data if op.type == "Placeholder" else op.op_def.is_stateful
        for op in _ancestors(tensor)
    )


def _may_round(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor needs floating-point arithmetic, or a graph function, which may.

    TensorFlow may compute x / 0.1 as x * 10 in one graph and not in another. So the input pipeline
    could find other ids than the training step does.
    """

    def may(op: tf.Operation) -> bool:
        floating = any(out.dtype.is_floating for out in op.outputs)
        is_call = any(value.HasField("func") for value in op.node_def.attr.values())
        return is_call or (floating and op.type not in _EXACT)

    return any(map(may, _ancestors(tensor)))
