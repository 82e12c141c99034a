"""The training of a chunk on a worker of a cluster, as one graph that the chief sends to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpara.parameter_server.exchange import Exchange
from tfpara.parameter_server.messages import Place, Rows
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.worker_step import Block, WorkerStep, stream_of
from tfpara.parameter_server.workers import Executor, Training
from tfpara.typing import Nest


class ChunkRunner(Executor):
    """Trains chunks on the workers of a cluster, by TensorFlow's coordinator.

    If a worker dies, another one gets its chunk, and continues with the first minibatch that is not
    in the model yet. A run of a chunk ends at its end, after a push that was not applied, or when
    workers are halted.
    """

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, training: Training
    ) -> None:
        self._coordinator = coordinator
        self._training = training
        # For each scheduled chunk: (epoch, chunk), and the coordinator's handle for the result.
        self._scheduled: list[tuple[tuple[int, int], Any]] = []
        self._train = chunk_function(training)

    def submit(self, epoch: int, chunks: Sequence[int]) -> None:
        training = self._training
        for chunk in chunks:
            stream = stream_of(training.order, epoch, chunk)
            numbers = (epoch, chunk, training.server.generation, stream)
            place = [tf.constant(number, tf.int64) for number in numbers]
            arguments = training.chunks.arguments(epoch, chunk)
            value = self._coordinator.schedule(self._train, args=(*place, *arguments))
            self._scheduled.append(((epoch, chunk), value))

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        try:
            while not self._coordinator.done():
                if time.monotonic() >= until:
                    return False
                time.sleep(min(0.01, seconds))
            self._coordinator.join()
        except tf.errors.OpError as error:
            error.chunk = self._chunk_of(error)
            raise
        self._scheduled.clear()
        return True

    def _chunk_of(self, error: tf.errors.OpError) -> tuple[int, int] | None:
        """Returns (epoch, chunk) of the failed chunk; None if unknown or if a process was lost."""
        if isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
            return None
        for place, value in self._scheduled:
            try:
                value.fetch()
            except tf.errors.CancelledError:
                continue
            except tf.errors.OpError:
                return place
        return None


class _At(NamedTuple):
    """A worker's position in a chunk: the loop variables of a `tf.while_loop`."""

    element: tf.experimental.Optional  # the next minibatch
    own: list[tf.Tensor]  # random seeds and carried recurrent states (`Block.own`)
    done: tf.Tensor  # number of the chunk's minibatches before `element`
    go: tf.Tensor  # whether another block (a pull, its minibatches, a push) may begin


def chunk_function(training: Training) -> Callable[..., tf.Tensor]:
    """Returns a graph function for `ClusterCoordinator.schedule` that trains one chunk.

    The function is called as `fn(epoch, chunk, generation, stream, *arguments)`. The first four are
    int64 scalars: `generation` is the server's, and `stream` is the chunk's `stream_of`. The
    `arguments` are those of `Chunks`. The function starts with the first minibatch that is not in
    the model yet, and repeats: pull, `sync_period` minibatches, push.
    """
    server, work, chunks, sync_period, choose_rate, *_ = training
    exchange = Exchange(server)
    local = _LocalModel(work, server) if work.local else None

    @tf.function(reduce_retracing=True, autograph=False)
    def train(
        epoch: tf.Tensor,
        chunk: tf.Tensor,
        generation: tf.Tensor,
        stream: tf.Tensor,
        *arguments: Nest,
    ) -> tf.Tensor:
        worker = tf.cast(
            tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64
        )
        done = exchange.begin(worker, chunk)
        halted = exchange.halted()

        def read() -> tf.data.Dataset:
            return chunks.dataset(epoch, chunk, *arguments).skip(done)

        rate = tf.constant(-1.0)
        if choose_rate is not None:
            rate = tf.cond(halted, lambda: rate, lambda: choose_rate(read))
        iterator = iter(work.tables.ahead(read(), sync_period))

        def block(at: _At) -> tuple[_At]:
            with tf.control_dependencies([at.go]):
                _, rows = work.tables.split(at.element.get_value())
                pulled = exchange.pull(worker, rows).with_rate(rate)
                kept = local.read(pulled.weights, generation, rows) if local else ([], [])
            begun = work.begin(pulled, at.own, *kept, rows)
            trained, element = _minibatches(work, begun, at.element, iterator, sync_period)
            place = Place(epoch, chunk, at.done)
            answer = exchange.push(work.push(trained, pulled, worker, place, rate), pulled)
            written: list[tf.Operation] = []
            if local:
                written += local.write(*work.kept(trained, answer.moves), rows)
            with tf.control_dependencies(written):
                # If the push was not applied, the loop ends. The servers would refuse all later
                # pushes of this chunk, because each push must begin where the last applied one
                # has ended.
                go = answer.included & ~pulled.halted
                return (_At(element, trained.own, at.done + trained.minibatches, go),)

        first = iterator.get_next_as_optional()
        at = _At(first, work.own_start(stream + done), done, ~halted)
        (at,) = tf.while_loop(lambda p: p.go & p.element.has_value(), block, (at,))
        with tf.control_dependencies([at.go]):
            # If the last push was not applied, the chunk is not finished, and the chief hands it
            # out again.
            all_in = exchange.done(chunk) >= at.done
            ended = ~at.element.has_value() & all_in
            return exchange.finish(epoch, chunk, ended)

    return train


def _minibatches(
    work: WorkerStep,
    block: Block,
    element: tf.experimental.Optional,
    iterator: tf.data.Iterator,
    count: int,
) -> tuple[Block, tf.experimental.Optional]:
    """Returns the block with `element` and up to `count` − 1 more minibatches, and what is next."""

    def added(block: Block, element: tf.experimental.Optional) -> Block:
        return work.add(block, work.tables.split(element.get_value())[0])

    block = added(block, element)
    element = iterator.get_next_as_optional()
    if count == 1:
        return block, element
    return tf.while_loop(
        lambda b, e: (b.minibatches < count) & e.has_value(),
        lambda b, e: (added(b, e), iterator.get_next_as_optional()),
        (block, element),
    )


class _LocalModel:
    """A worker's local optimizer, and local weights if the rule has them, kept between blocks.

    A graph finds their variables by name on the worker that runs the graph, so the next `fit`
    continues with them. A worker begins with the server's model if it has no such variables
    (because it is new or was restarted), or if they are of an earlier generation of that model. If
    a table is pulled by rows, only the same rows of its slots are read and written.
    """

    def __init__(self, work: WorkerStep, server: Server) -> None:
        self._run = f"tfpara_local_{server.number}"
        weights = work.weights if work.local_models else []
        self._count, start = len(weights), work.optimizer_start
        self._tables = {self._count + k: table for k, table in work.slots_by_rows.items()}
        self._shapes = [*(v.shape for v in weights), *(value.shape for value in start)]
        # These tensors are sent to the worker with each chunk. So a slot whose elements begin
        # equal, as most do, is sent as one number, and `read` repeats it. In a slot of a table, all
        # rows begin equal, because tables of other optimizers are not trained by rows
        # (`step_of_rows`).
        self._start = [
            tf.convert_to_tensor(_short(value[:1] if k in work.slots_by_rows else value))
            for k, value in enumerate(start)
        ]
        self._types = [*(tf.as_dtype(v.dtype) for v in weights), *(v.dtype for v in self._start)]

    def read(
        self, weights: Sequence[tf.Tensor], generation: tf.Tensor, rows: Rows
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the kept weights and optimizer; at first, `weights` and a new optimizer."""
        handles = self._handles()
        of_all = self._handle("generation", tf.int64, [])  # the generation of all these values

        def begin() -> tf.Tensor:
            start = [*weights[: self._count], *self._start]
            whole = map(tf.broadcast_to, start, self._shapes)
            written = [_assign(*each) for each in zip(handles, whole, strict=True)]
            # The generation is written last, because it tells `read` that the values are there.
            with (
                tf.control_dependencies(written),
                tf.control_dependencies([_assign(of_all, generation)]),
            ):
                return tf.constant(True)

        there = tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=of_all),
            lambda: tf.raw_ops.ReadVariableOp(resource=of_all, dtype=tf.int64) == generation,
            lambda: False,
        )
        values = []
        with tf.control_dependencies([tf.cond(there, lambda: True, begin)]):
            for k, (resource, dtype) in enumerate(zip(handles, self._types, strict=True)):
                if k in self._tables:
                    ids = rows[self._tables[k]]
                    value = tf.raw_ops.ResourceGather(resource=resource, indices=ids, dtype=dtype)
                else:
                    value = tf.raw_ops.ReadVariableOp(resource=resource, dtype=dtype)
                    value.set_shape(self._shapes[k])
                values.append(value)
        return values[: self._count], values[self._count :]

    def write(
        self, weights: Sequence[tf.Tensor], optimizer: Sequence[tf.Tensor], rows: Rows
    ) -> list[tf.Operation]:
        """Writes weights and optimizer after `read`; returns the operations."""
        return [
            tf.raw_ops.ResourceScatterUpdate(
                resource=handle, indices=rows[self._tables[k]], updates=value
            )
            if k in self._tables
            else _assign(handle, value)
            for k, (handle, value) in enumerate(
                zip(self._handles(), [*weights, *optimizer], strict=True)
            )
        ]

    def _handles(self) -> list[tf.Tensor]:
        kinds = zip(self._types, self._shapes, strict=True)
        return [self._handle(str(k), *kind) for k, kind in enumerate(kinds)]

    def _handle(self, name: str, dtype: tf.DType, shape: Sequence[int]) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=f"{self._run}_{name}")


def _assign(handle: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _short(value: np.ndarray) -> np.ndarray:
    """Returns an array; if all its elements are equal, one of them."""
    one = value.ravel()[:1]
    return one.reshape(()) if one.size and (value == one).all() else value
