"""A chunk's training on a worker of a cluster, as one graph that the chief sends it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpara.parameter_server.chunks import Chunks
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.work import CHUNK_STREAMS, Block, Work

_numbers = itertools.count()


class Cluster:
    """Trains chunks on the workers of a cluster.

    A chunk whose worker dies is given to another, which goes on with the first minibatch that is
    not in the model yet.

    Args:
        coordinator: of the cluster.
        server, work, chunks, sync_period, choose_rate: as for `chunk_function`.
    """

    def __init__(
        self,
        coordinator: Any,
        server: Server,
        work: Work,
        chunks: Chunks,
        sync_period: int,
        choose_rate: Callable[[tf.data.Dataset], tf.Tensor] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._chunks = chunks
        self._train = chunk_function(server, work, chunks, sync_period, choose_rate)

    def submit(self, epoch: int, chunks: Sequence[int]) -> None:
        """Hands chunks of an epoch to the workers, one at a time."""
        for chunk in chunks:
            place = (tf.constant(epoch, tf.int64), tf.constant(chunk, tf.int64))
            arguments = tf.nest.map_structure(
                tf.convert_to_tensor, self._chunks.arguments(epoch, chunk)
            )
            self._coordinator.schedule(self._train, args=(*place, *arguments))

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns whether all chunks are done, or have been halted.

        Raises:
            tf.errors.OpError: of a chunk; the others are given up.
        """
        until = time.monotonic() + seconds
        while not self._coordinator.done():
            if time.monotonic() >= until:
                return False
            time.sleep(min(0.01, seconds))
        self._coordinator.join()
        return True

    def halt(self) -> None:
        """Nothing: workers that are halted end their chunks by themselves."""


class _Place(NamedTuple):
    """Where a worker is in a chunk; what a loop of TensorFlow carries.

    Attributes:
        element: the next minibatch, a `tf.experimental.Optional`.
        own: the worker's own state of the model.
        go: whether to go on, after the last push.
    """

    element: Any
    own: list[tf.Tensor]
    go: tf.Tensor


def chunk_function(
    server: Server,
    work: Work,
    chunks: Chunks,
    sync_period: int,
    choose_rate: Callable[[tf.data.Dataset], tf.Tensor] | None = None,
) -> Callable[..., Any]:
    """A graph function for `ClusterCoordinator.schedule`: `fn(epoch, chunk, *arguments)`.

    It loops over the chunk, from where the books say that it is: pull, `sync_period` minibatches,
    push; and ends early when workers are halted.

    Args:
        server: the global model.
        work: the computation of a minibatch.
        chunks: the data.
        sync_period: τ, minibatches of a push; the last push of a chunk may have fewer.
        choose_rate: gives the learning rate of a chunk, from its minibatches.
    """
    local = _LocalModel(work, server) if work.local else None

    @tf.function(reduce_retracing=True, autograph=False)
    def train(epoch: Any, chunk: Any, *arguments: Any) -> tf.Tensor:
        worker = tf.cast(
            tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64
        )
        with tf.device(server.first.device):
            done = tf.gather(server.books.progress.read_value(), chunk)
        dataset = chunks.dataset(epoch, chunk, *arguments).skip(done)
        rate = tf.constant(-1.0)
        if choose_rate is not None:
            rate = choose_rate(dataset)
        iterator = iter(dataset)

        def block(place: _Place) -> tuple[_Place]:
            with tf.control_dependencies([place.go]):
                pulled = server.pull(worker)
                kept = local.read(pulled.weights) if local else ((), ())
            begun = work.begin(pulled, place.own, *kept)
            trained, element = _minibatches(work, begun, place.element, iterator, sync_period)
            versions, moves = server.push(work.push(trained, pulled, worker, chunk, rate), pulled)
            written = [*versions]
            if local:
                written += local.write(
                    [w - m for w, m in zip(trained.weights, moves, strict=True)], trained.optimizer
                )
            with tf.control_dependencies(written):
                return (_Place(element, trained.own, tf.logical_not(pulled.halted)),)

        stream = (epoch * chunks.count + chunk) * CHUNK_STREAMS + done
        place = _Place(iterator.get_next_as_optional(), work.own_start(stream), tf.constant(True))
        (place,) = tf.while_loop(
            lambda p: tf.logical_and(p.go, p.element.has_value()), block, (place,)
        )
        with tf.control_dependencies([place.go]):
            ended = tf.logical_not(place.element.has_value())
            return server.finish(chunk, ended)

    return train


def _minibatches(
    work: Work, block: Block, element: Any, iterator: Any, count: int
) -> tuple[Block, Any]:
    """Adds up to `count` minibatches, of which there is one."""
    block = work.add(block, element.get_value())
    element = iterator.get_next_as_optional()
    if count == 1:
        return block, element
    return tf.while_loop(
        lambda b, e: tf.logical_and(b.minibatches < count, e.has_value()),
        lambda b, e: (work.add(b, e.get_value()), iterator.get_next_as_optional()),
        (block, element),
    )


class _LocalModel:
    """A worker's own weights and optimizer, kept in its process from chunk to chunk.

    The variables are known by name on whatever worker the graph runs. A worker that has none, at
    first or since it was started again, begins with the server's model.
    """

    def __init__(self, work: Work, server: Server) -> None:
        self._run = f"tfpara_local_{next(_numbers)}"
        self._start = [tf.convert_to_tensor(value) for value in work.optimizer_start]
        self._count = len(server.names)

    def read(self, weights: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The local weights and optimizer; `weights` and a new optimizer at first."""
        first = [*weights, *self._start]
        handles = self._handles(first)
        there = tf.raw_ops.VarIsInitializedOp(resource=handles[-1])
        values = tf.cond(
            there,
            lambda: [
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
                for handle, value in zip(handles, first, strict=True)
            ],
            lambda: [tf.identity(value) for value in first],
        )
        for value, start in zip(values, first, strict=True):
            value.set_shape(start.shape)
        return values[: self._count], values[self._count :]

    def write(
        self, weights: Sequence[tf.Tensor], optimizer: Sequence[tf.Tensor]
    ) -> list[tf.Operation]:
        """Keeps both."""
        values = [*weights, *optimizer]
        return [
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            for handle, value in zip(self._handles(values), values, strict=True)
        ]

    def _handles(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [
            tf.raw_ops.VarHandleOp(
                dtype=value.dtype, shape=value.shape, shared_name=f"{self._run}_{k}"
            )
            for k, value in enumerate(values)
        ]
