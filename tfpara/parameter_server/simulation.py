"""Simulated asynchronous workers in one process, with a repeatable order of pulls and pushes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpara import program
from tfpara.algorithms.asgd import AsyncRule
from tfpara.parameter_server.counters import Pushed
from tfpara.parameter_server.exchange import Exchange
from tfpara.parameter_server.messages import Answer, Place, Pulled, Rows
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.strategy import AsyncStrategy
from tfpara.parameter_server.worker_step import Block, stream_of
from tfpara.parameter_server.workers import Executor, Training, Workers
from tfpara.typing import Nest
from tfpara.whole_number import checked_whole


@dataclasses.dataclass(frozen=True)
class Speed:
    """The distribution of the time that a simulated worker takes for a minibatch: log-normal.

        seconds = mean · exp(spread · z − spread²/2),   z ~ N(0, 1)

    Args:
        mean: mean time in seconds, > 0. Only the ratios between workers matter.
        spread: standard deviation of the logarithm of the time, ≥ 0; if 0, each time is the mean.

    Raises:
        ValueError: a value outside its range.
    """

    mean: float = 1.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.mean < float("inf") or not 0.0 <= self.spread < float("inf"):
            raise ValueError(f"{self!r}: mean must be positive and spread 0 or more, both finite.")

    def draw(self, generator: np.random.Generator) -> float:
        """Returns a random time for one minibatch, in seconds."""
        shift = self.spread * generator.standard_normal() - self.spread**2 / 2
        return float(self.mean * np.exp(shift))


_ALIKE = Speed(spread=0.2)


def simulate_async(
    num_workers: int,
    rule: AsyncRule,
    *,
    speeds: Sequence[Speed] | Speed = _ALIKE,
    order: Sequence[Pushed] | None = None,
    **options: Any,
) -> AsyncStrategy:
    """Returns an `AsyncStrategy` with simulated workers and a repeatable order of pulls and pushes.

    All methods work as on a cluster, with the same functions for pull, minibatch and push. The time
    that a worker takes for a minibatch is drawn from its `Speed`. This time is simulated: the
    program does not wait. Two runs with the same arguments, data and seeds are equal bit for bit.

    Args:
        num_workers: number of workers, N ≥ 1.
        rule: a rule of `AsyncStrategy`.
        speeds: one speed for each worker, or one for all. A slow worker: `tfpara.Speed(10.0)`.
        order: the record of another run (`strategy.record()`), to repeat its order of pulls and
            pushes and each worker's chunks; the speeds are then not used.
        **options: the other arguments of `AsyncStrategy`; `seed` is also the seed of the speeds.

    Returns:
        The strategy. Its `record()` lists all pushes, unless `record=False` is given.

    Raises:
        ValueError: `num_workers` is not a whole number of at least 1, or differs from the number
            of speeds, or the record has more workers. `fit` raises ValueError if the record
            is of a run with other data or settings.

    Example:
        >>> strategy = simulate_async(8, tfpara.ASGD(), speeds=tfpara.Speed(1.0, spread=0.5))
        >>> strategy.num_workers
        8
    """
    program.explain_errors()
    num_workers = checked_whole("num_workers", num_workers)
    each = [speeds] * num_workers if isinstance(speeds, Speed) else list(speeds)
    if len(each) != num_workers:
        raise ValueError(
            f"speeds has {len(each)} entries for {num_workers} workers. Give one for each, or one "
            "tfpara.Speed for all."
        )
    highest = max((pushed.worker for pushed in order or ()), default=0)
    if highest >= num_workers:
        raise ValueError(
            f"order= has pushes of worker {highest}, and there are {num_workers} workers. Simulate "
            "as many as the record was made with."
        )
    options = {"record": True} | options
    return AsyncStrategy(rule, _processes=_Simulated(each, order), **options)


class _Kept(NamedTuple):
    """A worker's local model and optimizer between blocks; empty if the rule has none."""

    weights: list[tf.Tensor]
    optimizer: list[tf.Tensor]
    generation: int  # both are used only in this generation of the server's model


class _Simulated(Workers):
    """Simulated workers, all in the chief's process."""

    def __init__(self, speeds: list[Speed], order: Sequence[Pushed] | None) -> None:
        self.state = types.SimpleNamespace(asked_to_end=None, restart_code=None)
        self.num_workers = len(speeds)
        # The full name of the device is read from a tensor, because the name is a different one if
        # this process is the chief of a cluster.
        with tf.device("CPU:0"):
            self.chief_device = tf.zeros([]).device
        self.server_devices = (self.chief_device,)
        self._speeds = speeds
        self._order = order
        # The workers' local models and optimizers, which are kept from one `fit` to the next. The
        # keys are the server and the worker's index.
        self._kept = weakref.WeakKeyDictionary[Server, dict[int, _Kept]]()

    def executor(self, training: Training) -> _Simulation:
        kept = self._kept.setdefault(training.server, {})
        return _Simulation(training, self._speeds, self._order, kept)


@dataclasses.dataclass(eq=False)
class _Worker:
    """A simulated worker: its position in a chunk, and its block between a pull and a push."""

    index: int
    epoch: int = -1
    chunk: int = -1
    iterator: Any = None
    element: Nest = None  # the next minibatch
    # ids of the rows that the block of `element` uses, for each table that is pulled by rows
    rows: Rows = dataclasses.field(default_factory=dict)
    own: Sequence[tf.Tensor] = ()  # random seeds and carried recurrent states (`Block.own`)
    start: int = 0  # index of the block's first minibatch in the chunk
    idle_since: int = 0  # number of all workers' pushes up to this worker's last push
    rate: tf.Tensor = dataclasses.field(default_factory=lambda: tf.constant(-1.0))
    pulled: Pulled | None = None
    block: Block | None = None


class _Simulation(Executor):
    """Trains chunks on simulated workers, as `ChunkRunner` does on those of a cluster.

    Pushes are made in the order of their simulated times (if these are equal, in the order of the
    workers), or in the order of the record `order`.
    """

    def __init__(
        self,
        training: Training,
        speeds: Sequence[Speed],
        order: Sequence[Pushed] | None,
        kept: dict[int, _Kept],
    ) -> None:
        self._training = training
        self._server, self._work, self._chunks = training.server, training.work, training.chunks
        self._exchange = exchange = Exchange(training.server)
        self._speeds = speeds
        self._random = [np.random.default_rng([training.seed, k]) for k in range(len(speeds))]
        self._start = [tf.convert_to_tensor(value) for value in self._work.optimizer_start]
        self._workers = [_Worker(k) for k in range(len(speeds))]
        self._kept = kept
        # (epoch, chunk) of the chunks that no worker has
        self._waiting = collections.deque[tuple[int, int]]()
        self._due: dict[int, float] = {}  # the time of each worker's next push
        self._refused: list[_Worker] = []  # workers whose pushes would make others too stale
        self._now = 0.0
        self._order = collections.deque(order or ())
        self._repeats = order is not None
        graph = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        self._choose_rate = graph(self._rate_of)
        # A graph makes the dataset of each chunk, because Python would take much longer to make it.
        self._minibatches = graph(self._ahead)
        self._pull = graph(exchange.read)
        self._ask = graph(lambda worker: exchange.ask_to_pull(worker, waits=False))
        self._begin = graph(self._work.begin)
        self._add = graph(self._work.add)
        self._push = graph(self._push_block)
        self._traced = False  # whether `_trace` was called

    def submit(self, epoch: int, chunks: Sequence[int]) -> None:
        self._waiting.extend((epoch, chunk) for chunk in chunks)

    def wait(self, seconds: float) -> bool:
        """Trains until a worker has pushed; `seconds` has no effect.

        As the real time has none, what callbacks do comes between the same pushes in all runs.
        Raises ValueError if the record is of another run.
        """
        self._pull_where_free()
        if not self._due:
            if self._repeats and self._chunks_left():
                raise self._other_run("it has no pull that could come next")
            return True
        self._push_of(self._next_to_push())
        self._push_refused()
        return False

    def halt(self) -> None:
        # Blocks that were not pushed are lost. If the epoch goes on, their minibatches are trained
        # again.
        self._waiting.clear()
        self._due.clear()
        self._refused.clear()
        for worker in self._workers:
            worker.iterator = worker.element = worker.block = None

    def _pull_where_free(self) -> None:
        """Makes every idle worker that has a chunk, or gets one, pull and compute its block."""
        for worker in sorted(self._workers, key=lambda w: w.idle_since):
            if worker.block is not None or not self._may_pull(worker):
                continue
            if not self._next_minibatch(worker):
                continue
            if not self._ask(_long(worker.index)):
                continue
            rows = worker.rows
            kept = self._kept_of(worker)
            if rows and not self._traced and not tf.config.functions_run_eagerly():
                self._trace(worker, kept.optimizer)
            worker.pulled = self._pull(rows).with_rate(worker.rate)
            weights, optimizer = kept.weights or worker.pulled.weights, list(kept.optimizer)
            for k, table in self._work.slots_by_rows.items():
                optimizer[k] = tf.gather(optimizer[k], rows[table])
            worker.block = self._begin(worker.pulled, worker.own, weights, optimizer, rows)
            duration = 0.0
            for _ in range(self._training.sync_period):
                worker.block = self._add(worker.block, worker.element)
                worker.element = self._next_element(worker)
                duration += self._speeds[worker.index].draw(self._random[worker.index])
                if worker.element is None:
                    break
            worker.own = worker.block.own
            self._due[worker.index] = self._now + duration

    def _trace(self, worker: _Worker, optimizer: Sequence[tf.Tensor]) -> None:
        """Traces the graphs of blocks for any number of rows; else each table would retrace them.

        Embedding tables are pulled by rows only under rules whose workers keep no local models.
        """
        self._traced = True
        rows = {index: tf.TensorSpec([None], tf.int64) for index in worker.rows}
        slots = [_spec(value) for value in optimizer]
        for k in self._work.slots_by_rows:
            slots[k] = tf.TensorSpec([None, *slots[k].shape[1:]], slots[k].dtype)
        pulled = _specs_of(self._pull, rows)
        block = _specs_of(self._begin, pulled, _spec(worker.own), pulled.weights, slots, rows)
        minibatch = _spec(worker.element)
        # Only after its first minibatch a block has gradients, so its type changes once.
        for _ in range(min(2, self._training.sync_period)):
            block = _specs_of(self._add, block, minibatch)
        number = tf.TensorSpec([], tf.int64)
        place = Place(number, number, number)
        _specs_of(self._push, block, pulled, number, place, _spec(worker.rate))

    def _may_pull(self, worker: _Worker) -> bool:
        """Returns whether the record has a pull of this worker next; True without a record."""
        if not self._repeats:
            return True
        coming = next((p for p in self._order if p.worker == worker.index), None)
        if coming is None or coming.pulled != int(self._server.first.version):
            return False
        # A worker without a minibatch takes the first chunk of the queue. Here it must take the
        # same chunk as in the record, so that chunk moves to the front.
        if worker.element is None:
            mine = [place for place in self._waiting if place[1] == coming.chunk]
            if not mine:
                return False
            self._waiting.remove(mine[0])
            self._waiting.appendleft(mine[0])
        return True

    def _next_to_push(self) -> _Worker:
        if self._repeats:
            if not self._order:
                raise self._other_run("it has ended")
            index = self._order.popleft().worker
            if index not in self._due:
                raise self._other_run(f"worker {index} pushes next in it, but has nothing to push")
        else:
            self._now, index = min((at, worker) for worker, at in self._due.items())
        del self._due[index]
        return self._workers[index]

    def _chunks_left(self) -> int:
        return len(self._waiting) + sum(w.element is not None for w in self._workers)

    def _other_run(self, why: str) -> ValueError:
        pushes = int(self._server.first.version)
        return ValueError(
            f"order= is the record of another run: {why}, after {pushes} pushes and with "
            f"{self._chunks_left()} chunks of the epoch left. Repeat it with the workers, data, "
            "chunks, sync_period and epochs that it was made with, in one fit of a new strategy."
        )

    def _next_minibatch(self, worker: _Worker) -> bool:
        """Gives a worker a chunk if it has none; returns whether it has a next minibatch."""
        while worker.element is None and self._waiting:
            epoch, chunk = self._waiting.popleft()
            worker.epoch, worker.chunk = epoch, chunk
            worker.start = done = int(self._exchange.done(_long(chunk)))
            arguments = self._chunks.arguments(epoch, chunk)
            place = (_long(done), _long(epoch), _long(chunk), *arguments)
            if self._training.choose_rate is not None:
                worker.rate = self._choose_rate(*place)
            worker.iterator = iter(self._minibatches(*place))
            worker.element = self._next_element(worker)
            stream = stream_of(self._training.order, epoch, chunk)
            worker.own = self._work.own_start(_long(stream + done))
            if worker.element is None:
                self._finish(worker)
        return worker.element is not None

    def _rest_of(self, done: tf.Tensor, *chunk: Nest) -> tf.data.Dataset:
        return self._chunks.dataset(*chunk).skip(done)

    def _rate_of(self, *place: Nest) -> tf.Tensor:
        choose: Any = self._training.choose_rate
        return choose(lambda: self._rest_of(*place))

    def _ahead(self, *place: Nest) -> tf.data.Dataset:
        return self._work.tables.ahead(self._rest_of(*place), self._training.sync_period)

    def _next_element(self, worker: _Worker) -> Nest:
        try:
            element = next(worker.iterator, None)
        except tf.errors.OpError as error:
            error.chunk = (worker.epoch, worker.chunk)
            raise
        if element is None:
            return None
        minibatch, worker.rows = self._work.tables.split(element)
        return minibatch

    def _kept_of(self, worker: _Worker) -> _Kept:
        """Returns what the worker has kept of the server's present model, or else begins with."""
        kept = self._kept.get(worker.index)
        if kept is None or kept.generation != self._server.generation:
            return _Kept([], self._start, self._server.generation)
        return kept

    def _push_of(self, worker: _Worker) -> bool:
        """Offers a push; returns False, and keeps it, if the bound on staleness forbids it."""
        block: Any = worker.block
        place = Place(*map(_long, (worker.epoch, worker.chunk, worker.start)))
        answer = self._push(block, worker.pulled, _long(worker.index), place, worker.rate)
        if not answer.settled:
            self._refused.append(worker)
            return False
        worker.block = None
        worker.start += int(block.minibatches)
        worker.idle_since = int(answer.versions[0])
        weights, optimizer = self._work.kept(block, answer.moves)
        whole, optimizer = self._kept_of(worker).optimizer, list(optimizer)
        for k, table in self._work.slots_by_rows.items():
            ids = block.rows[table][:, None]
            optimizer[k] = tf.tensor_scatter_nd_update(whole[k], ids, optimizer[k])
        self._kept[worker.index] = _Kept(weights, optimizer, self._server.generation)
        if worker.element is None:
            self._finish(worker)
        return True

    def _push_refused(self) -> None:
        """Offers the refused pushes again, oldest first, until none of them can be applied."""
        again = True
        while again:
            waiting, self._refused = self._refused, []
            again = False
            for worker in waiting:
                again |= self._push_of(worker)

    def _finish(self, worker: _Worker) -> None:
        self._exchange.finish(_long(worker.epoch), _long(worker.chunk), tf.constant(True))

    def _push_block(
        self, block: Block, pulled: Pulled, worker: tf.Tensor, place: Place, rate: tf.Tensor
    ) -> Answer:
        push = self._work.push(block, pulled, worker, place, rate)
        return self._exchange.push(push, pulled, waits=False)


def _specs_of(graph: Any, *specs: Nest) -> Any:
    """Traces a graph function for arguments of these specs; returns the specs of its results."""
    return _spec(graph.get_concrete_function(*specs).structured_outputs)


def _spec(values: Nest) -> Any:
    return tf.nest.map_structure(
        lambda v: None if v is None else tf.type_spec_from_value(v), values
    )


def _long(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)
