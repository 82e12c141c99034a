"""One sync as operations of a graph: reports, a decision, the exchange of weights, the commit.

First every replica sends a short *report* (samples since the last sync, whether it still has data,
whether its weights are finite, what its worker asks for). All workers decide from the same table of
reports: stop with an error, skip, or commit. Then they exchange the weights. No replica's weights
change before every buffer has arrived.

If the model is divided into fragments, each sync is of one fragment, in turn. When no replica has
data left, a sync is of all fragments.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpara.cluster.place import MARKS, TEXT_BYTES, sentence
from tfpara.sync.one_sync import placement as aggregations
from tfpara.sync.one_sync.block import Block
from tfpara.sync.one_sync.compression import CompressedWire
from tfpara.sync.one_sync.global_state import GlobalState
from tfpara.sync.one_sync.replicas import Buckets, Replicas, ReplicaVariables, Site
from tfpara.sync.one_sync.reports import (
    SAMPLES,
    Columns,
    Request,
    are_apart,
    decide,
    problem_of,
    report_of,
    signature_of,
    stop_if,
)
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.one_sync.statistics import SyncStatistics
from tfpara.sync.one_sync.weight_exchange import Arrival, Averaging, PlainWire, Shares, phase
from tfpara.sync.settings import NEVER, Settings
from tfpara.typing import Array, Nest

# A worker waits this long before it fails, so that the others receive the table that says why. Its
# failure would end what they have not received yet.
_GRACE_SECONDS = 1.0
# The replicas' distance is measured at each of the first 16 syncs, then at every 16th, since it
# needs a pass over the weights.
MEASURED_SYNCS = 16


class Part(NamedTuple):
    """What was decided for a part of the model, as tensors: see `Decision`."""

    committed: tf.Tensor
    steps: tf.Tensor
    shares: Shares


class Verdict(NamedTuple):
    """What all workers decided, as tensors: see `Decision`.

    at: when they had decided, as by `now`. allowed: whether there is no problem.
    """

    at: tf.Tensor
    allowed: tf.Tensor
    problem: tf.Tensor
    is_last: tf.Tensor
    agreed: tf.Tensor
    counts: tf.Tensor
    trained: tf.Tensor
    parts: list[Part]


class SyncGraph:
    """The variables that syncs of one model need, and the operations of a sync.

    Args:
        variables: the model's replica variables.
        settings: the strategy's settings, with the rule resolved for all replicas.
        site: this worker's place and links.

    Attributes:
        whole: whether each sync in the training thread is of the whole model: the weights, and the
            state that no rule updates. Otherwise that state is averaged when a block is closed.
        block: the counters of the open block.
        columns: the columns of a report that depend on the model.
        replicas: the local replicas' variables.
        global_state: the state of the rule and the averages.
        averaging: the exchanges.
        compressed: the wire that compresses; None if weights are sent as they are.
        signatures: for each weight a number that must be equal on all replicas.
        other_signatures: the same for the state, as it was at first or was set, and for the frozen
            weights.
        weights_seen: for each replica a number that is 0 as long as no sync has had a minibatch of
            it that counts.
        dealt: steps of each worker that are in the model since the data were dealt out.
    """

    def __init__(self, variables: ReplicaVariables, settings: Settings, site: Site) -> None:
        self._variables = variables
        self._site = site
        self._fragments = settings.fragments
        self.weights_seen = np.zeros(site.num_replicas)
        self.whole = settings.fragments == 1 and not settings.overlap
        self.replicas = Replicas(variables, settings, site)
        self._make_state(settings)
        with tf.device("CPU:0"):
            self.block = Block(settings, self.whole, site)
            self._make_counters()
        self.columns = Columns.of(
            self.block.parts, len(self.replicas.shared_counts), len(variables.rates)
        )
        # In a while loop (Keras' steps_per_execution) TensorFlow identifies a collective by the
        # loop's iteration too. Inlined there, the collectives of two workers that are in different
        # iterations would not meet.
        self._sync = not_inlined(self._sync_step, tf.TensorSpec([], tf.bool))
        self._meet = not_inlined(self._meet_step, tf.TensorSpec([], tf.float64))

    def _make_state(self, settings: Settings) -> None:
        site, replicas, compression = self._site, self.replicas, settings.compression
        aggregation = settings.aggregation
        if compression != "none" and aggregation == "auto":
            aggregation = "sharded"
        sizes = replicas.layout.bucket_sizes
        chosen = aggregations.choose(aggregation, sizes, site.collectives, site.devices)
        with tf.device(site.devices[0]):
            self.global_state = GlobalState(chosen, settings, replicas)
            self.compressed = None
            if isinstance(chosen, aggregations.Sharded) and compression != "none":
                self.compressed = CompressedWire(compression, chosen, replicas, self.global_state)
            wire = self.compressed or PlainWire(chosen, replicas)
            self.averaging = Averaging(replicas, wire, self.global_state)

    def _make_counters(self) -> None:
        make = self._site.make
        # All workers must start from the same weights, also if a script has loaded them.
        variables = self._variables
        others = [*variables.state, *variables.frozen]
        self.signatures = make(_signatures(variables.weights), "signatures")
        self.other_signatures = make(_signatures(others), "other_signatures")
        self._request = make(tf.zeros([], tf.float64), "request")
        self._agreed = make(tf.zeros([3], tf.float64), "agreed")  # request, replicas running, all
        self._steps = make(tf.zeros([], tf.int64), "steps")
        self._samples = make(tf.zeros([], tf.float64), "samples")
        self._syncs = make(tf.zeros([], tf.int64), "syncs")
        self._seconds = make(tf.zeros([2], tf.float64), "seconds")
        self._distance = make(tf.zeros([]), "distance")
        self._bytes_sent = make(tf.zeros([], tf.float64), "bytes_sent")
        self._sync_began = make(tf.zeros([], tf.float64), "sync_began")
        workers = [self._site.num_replicas // len(self._site.devices)]
        self.dealt = make(tf.zeros(workers, tf.int64), "dealt", [None])

    # -- in the training thread --------------------------------------------------------------

    def count(self, samples: Sequence[tf.Tensor], weights: tf.Tensor) -> tf.Tensor:
        """Counts a minibatch of each local replica; returns the number of steps of the block.

        Args:
            samples: number of samples that each local replica has just processed.
            weights: weight of these minibatches in the mean of the replicas.
        """
        self._samples.assign_add(tf.add_n([tf.cast(n, tf.float64) for n in samples]))
        self._steps.assign_add(1)
        return self.block.count(weights)

    def sync(self, running: tf.Tensor) -> tf.Tensor:
        """Runs one sync in the training thread; returns whether no replica has data left."""
        is_last, problem = self._sync(running)
        with tf.control_dependencies([stop_if(problem)]):
            return tf.identity(is_last)

    def meet(self, number: tf.Tensor) -> tf.Tensor:
        """Exchanges one number of each worker as a sync exchanges reports; returns all by rank."""
        numbers, problem = self._meet(number)
        with tf.control_dependencies([stop_if(problem)]):
            return tf.identity(numbers)

    def _sync_step(self, running: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Runs one sync.

        Returns:
            Whether no replica has data left; and what forbids the sync, "" if nothing does.
        """
        began, rows = self.report(running)
        reports = self.gather(rows, began)
        verdict = self.decide(reports, self.apart(reports))
        self._close_block(verdict, began)
        return verdict.is_last, verdict.problem

    def _meet_step(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchanges one number of each worker.

        The number travels in a report, by the same collective as before a sync. So a worker that
        runs a sync at this point is noticed.

        Returns:
            The numbers by rank; and the error if workers came to different exchanges, else "".
        """
        with tf.device("CPU:0"):
            began, mark = self._arrival()
            flags = tf.constant([0.0, -1.0, 0.0, 0.0], tf.float64)  # no data, no bad weight
            others = tf.zeros([self.columns.width - SAMPLES - 1], tf.float64)
            row = tf.concat([flags, mark, number[tf.newaxis], others], 0)
            devices = len(self._site.devices)
            reports = self.gather(tf.stack([row] * devices), began)
            return reports[::devices, SAMPLES], self.apart(reports)

    def _close_block(self, verdict: Verdict, began: tf.Tensor) -> None:
        """Averages and commits what the reports allow; then updates the counters.

        If an exchange fails, or the reports forbid the sync, the counters stay as they are.
        """

        def one(fragment: int) -> tf.Tensor:
            return if_any(verdict.parts[fragment], lambda: self._commit_now(fragment, verdict))

        def rest() -> tf.Tensor:
            return if_any(verdict.parts[-1], lambda: self._commit_others(verdict))

        def every() -> tf.Tensor:
            return tf.reduce_max(tf.stack([*map(one, range(self._fragments)), rest()]))

        def closed() -> None:
            ended = now()
            self.note(verdict, committed, tf.stack([ended - began, verdict.at - began]))
            self.block.close(self.block.turn.read_value(), verdict.is_last)

        if self.whole:
            committed = one(0)
        else:
            turn = self.block.turn
            committed = tf.cond(verdict.is_last, every, lambda: self.of_fragment(turn, one))
        with tf.control_dependencies([committed]):
            where(verdict.allowed, closed)

    # -- reports and the decision ------------------------------------------------------------

    def report(self, running: tf.Tensor | bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when this worker came to the sync, as by `now`, and its reports.

        The reports have the shape [local replicas, columns].
        """
        began, mark = self._arrival()
        block = self.block
        with tf.control_dependencies([mark]), phase("check"):
            common = {
                "mark": mark,
                "running": running,
                "request": self._request.read_value(),
                "signature": self.signatures.read_value(),
                "others": self.other_signatures.read_value(),
                "steps": block.part_steps.read_value(),
                "taken": self._steps.read_value(),
                "pending": block.steps.read_value(),
                "period": block.period.read_value(),
            }
            each = [
                (
                    self.replicas.sums(r, self.averaging.anchors),
                    block.samples[r].read_value(),
                    [tf.convert_to_tensor(count[r]) for count in self.replicas.shared_counts],
                    [tf.convert_to_tensor(rate[r]) for rate in self._variables.rates],
                )
                for r in range(len(self._site.devices))
            ]
            shape = [len(each), self.columns.width]
            (rows,) = in_python(_rows, (common, each), tf.TensorSpec(shape, tf.float64))
            return began, rows

    def _arrival(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when this worker came to an exchange, as by `now`, and its mark."""

        def arrival() -> list[np.ndarray]:
            return [np.array([time.monotonic(), *self._site.place.mark()])]

        (numbers,) = in_python(arrival, (), tf.TensorSpec([1 + MARKS], tf.float64))
        return numbers[0], numbers[1:]

    def gather(self, rows: tf.Tensor, began: tf.Tensor) -> tf.Tensor:
        """Returns the table of all replicas' reports, [N, columns], the same on every worker."""
        self._sync_began.assign(began)
        with phase("wait"):
            table = self._site.reports.all_gather(rows, f"{self._site.name}/report")
        reports = tf.reshape(table, [-1, self.columns.width])
        with tf.control_dependencies([reports]):
            # The wait is over. If the reports forbid the sync, no other wait follows.
            self._sync_began.assign(0.0)
        return reports

    def apart(self, reports: tf.Tensor) -> tf.Tensor:
        """Returns the sentence that says which worker is where, if they are apart; else ""."""
        site = self._site
        if site.is_alone:
            return tf.constant("")

        def told() -> tf.Tensor:
            mine = tf.numpy_function(
                lambda: np.array(site.place.told(), np.int32), [], tf.int32, stateful=True
            )
            mine.set_shape([TEXT_BYTES])
            table = site.reports.all_gather(mine, f"{self._site.name}/places")
            return tf.numpy_function(lambda rows: sentence(rows).encode(), [table], tf.string)

        changes = site.company.changes
        (differ,) = in_python(
            lambda table: [are_apart(table, changes)], (reports,), tf.TensorSpec([], tf.bool)
        )
        return tf.cond(differ, told, lambda: tf.constant(""))

    def decide(self, reports: tf.Tensor, apart: tf.Tensor, *, patient: bool = True) -> Verdict:
        """Returns what all workers decide from the table of reports.

        It runs as Python: as operations it would be a third of those of a sync, all of which have
        to be made and optimised before the first step.

        Args:
            reports: the table of all replicas' reports.
            apart: the sentence for workers that have come to different exchanges, else "".
            patient: whether to wait a little if the sync is forbidden. A worker that fails ends
                what the others have not received yet, such as the table that says why.
        """
        site, columns, names = self._site, self.columns, self.replicas.averaged_names
        own, fragments = len(site.devices), self._fragments

        def decided(
            table: np.ndarray, apart: bytes, replicas: int, first: int, period: int
        ) -> Sequence[Array | bytes]:
            at = time.monotonic()
            text = apart.decode() or problem_of(table, columns, names, own)
            if not text and len(table) == len(self.weights_seen):
                self.weights_seen += table[:, columns.samples].max(1)
            if text and patient and not site.is_alone:
                time.sleep(_GRACE_SECONDS)
            # With F fragments, each fragment's block is F sync periods long.
            block = float(period) * fragments
            local = slice(first, first + own)
            found = decide(table, columns, text, local=local, replicas=replicas, block=block)
            return at, not text, *found

        replicas, first = site.replicas_now()
        arguments = reports, apart, replicas, first, self.block.period.read_value()
        parts, f32, f64 = self.block.parts, tf.float32, tf.float64
        at, allowed, problem, is_last, agreed, counts, trained, *of_parts = in_python(
            decided,
            arguments,
            tf.TensorSpec([], f64),
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec([], tf.string),
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec([3], f64),
            tf.TensorSpec([len(self.replicas.shared_counts)], f64),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([parts], tf.bool),
            tf.TensorSpec([parts], f32),
            tf.TensorSpec([parts, own], f32),
            tf.TensorSpec([parts], f32),
            tf.TensorSpec([parts], f32),
        )
        made = [
            Part(committed, steps, Shares(portions, divisor, of_block))
            for committed, steps, portions, divisor, of_block in zip(
                *map(tf.unstack, of_parts), strict=True
            )
        ]
        return Verdict(at, allowed, problem, is_last, agreed, counts, trained, made)

    def of_fragment(self, number: tf.Tensor, function: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """Returns `function` of the fragment with this number, a tensor."""
        if self._fragments == 1:
            return function(0)
        branches = [lambda fragment=f: function(fragment) for f in range(self._fragments)]
        return tf.switch_case(tf.convert_to_tensor(number), branches)

    # -- the exchange ------------------------------------------------------------------------

    def exchange(
        self, fragment: int, local: Sequence[Buckets], shares: Shares
    ) -> tuple[Arrival, tf.Tensor]:
        """Exchanges a fragment; returns the result and the replicas' distance.

        Nothing is written.
        """
        arrival = self.averaging.exchange(fragment, local, shares)
        with tf.control_dependencies(tf.nest.flatten(arrival.means)):
            distance = tf.cond(
                (self._syncs < MEASURED_SYNCS) | (self._syncs % MEASURED_SYNCS == 0),
                lambda: self.averaging.distance(fragment, local, arrival),
                self._distance.read_value,
            )
        return arrival, distance

    # -- the commit --------------------------------------------------------------------------

    def _commit_now(self, fragment: int, verdict: Verdict) -> tf.Tensor:
        """Averages a fragment, applies the rule and writes the result; returns 1."""
        _, block_steps, shares = verdict.parts[fragment]
        # The wait is noted before anything is sent, so that the watchdog sees it.
        with tf.control_dependencies([self.begin_waiting(verdict)]), phase("pack"):
            local = self.replicas.all_weights(fragment)
        others = self.averaging.exchange_others(shares) if self.whole else []
        arrival, distance = self.exchange(fragment, local, shares)
        arrived = [distance, *others, *tf.nest.flatten(arrival.received)]
        moments = None
        if self._variables.moments:
            # At least 1, since an empty block has no mean gradient.
            steps = tf.maximum(block_steps, 1.0)
            (counted,) = tf.unstack(verdict.counts, num=1)
            # Loss scaling skips steps of the optimizer, but not of the block that the rule counts.
            counted = tf.maximum(tf.cast(counted, tf.float32), steps)
            moments = self.averaging.exchange_moments(shares, steps, counted)
            arrived += tf.nest.flatten(moments.spread)
        with tf.control_dependencies(arrived), phase("unpack"):
            self.commit(fragment, arrival, distance)
            if moments is not None:
                self.averaging.commit_moments(moments)
            restarted = self.global_state.restart(local, arrival.received)
            self.replicas.write_weights(restarted, fragment)
            if self.whole:
                self.averaging.commit_others(others)
            self.replicas.write_counts(verdict.counts)
        return tf.constant(1, tf.int64)

    def commit(self, fragment: int, arrival: Arrival, distance: tf.Tensor) -> None:
        """Writes the result of an exchange except the replicas' weights; ends the noted wait."""
        self.forget_waiting()
        self._distance.assign(distance)
        others = self.averaging.bytes_sent_of_others if self.whole else 0
        self._bytes_sent.assign_add(float(self.averaging.bytes_sent(fragment) + others))
        self.averaging.commit(arrival)

    def _commit_others(self, verdict: Verdict) -> tf.Tensor:
        """Averages the state that no rule updates; returns 0, since it does not count as a sync."""
        with tf.control_dependencies([self.begin_waiting(verdict)]):
            means = self.averaging.exchange_others(verdict.parts[-1].shares)
        with tf.control_dependencies(means):
            self.forget_waiting()
            self._bytes_sent.assign_add(float(self.averaging.bytes_sent_of_others))
            self.averaging.commit_others(means)
        return tf.constant(0, tf.int64)

    # -- counters, waits and requests --------------------------------------------------------

    def note(self, verdict: Verdict, committed: tf.Tensor, seconds: tf.Tensor) -> None:
        """Updates the counters after a sync.

        Args:
            verdict: what was decided.
            committed: 1 if the sync was committed, else 0.
            seconds: for which training stood still, and the part of these spent waiting.
        """
        self._agreed.assign(verdict.agreed)
        self.dealt.assign_add(verdict.trained)
        self._syncs.assign_add(committed)
        self._seconds.assign_add(seconds)

    def stood_still(self, began: tf.Tensor) -> None:
        """Counts the time since `began`, when training stood still for a sync without waiting."""
        self._seconds.assign_add(tf.stack([now() - began, 0.0]))

    def begin_waiting(self, verdict: Verdict) -> tf.Tensor:
        """Notes that after a decision a collective begins, which may wait for other workers."""
        return self._sync_began.assign(verdict.at)

    def forget_waiting(self) -> None:
        """Notes that the sync no longer waits: all has arrived, or it has failed."""
        self._sync_began.assign(0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Notes that this process waits inside, in an exchange of this model from Python."""
        self._sync_began.assign(time.monotonic())
        try:
            yield
        finally:
            self.forget_waiting()

    def waiting_since(self) -> float:
        """Returns when the wait of a sync began, on the monotonic clock; 0 if none waits."""
        return float(self._sync_began.numpy())

    def request(self, request: Request) -> None:
        """Makes a request to all workers; at the next sync they agree on the largest one."""
        self._request.assign(tf.maximum(self._request, float(request)))

    def agreed(self) -> tuple[Request, bool]:
        """Returns the request of the last sync, and whether all replicas, or none, had data."""
        request, running, replicas = self._agreed.numpy()
        return Request(int(request)), int(running) in (0, int(replicas))

    def answered(self, *requests: Request) -> None:
        """Forgets the request of this worker, and the one agreed on, where it is one of these."""
        if int(self._request) in requests:
            self._request.assign(0.0)
        agreed = self._agreed.numpy()
        if int(agreed[0]) in requests:
            self._agreed.assign([0.0, *agreed[1:]])

    def set_statistics(self, past: SyncStatistics) -> None:
        """Sets what this worker has counted and measured to what it was in the past."""
        self._steps.assign(past.steps)
        self._samples.assign(past.samples)
        self._syncs.assign(past.syncs)
        self._seconds.assign([past.sync_seconds, past.wait_seconds])
        self._distance.assign(past.distance)
        self._bytes_sent.assign(past.bytes_sent)

    def statistics(self) -> SyncStatistics:
        """Returns the counts and times of this worker's syncs so far."""
        seconds = self._seconds.numpy()
        return SyncStatistics(
            steps=int(self._steps),
            samples=int(self._samples),
            syncs=int(self._syncs),
            sync_seconds=float(seconds[0]),
            wait_seconds=float(seconds[1]),
            distance=float(self._distance),
            bytes_sent=float(self._bytes_sent),
        )

    # -- state -------------------------------------------------------------------------------

    def slots(self) -> Iterator[Slot]:
        """Yields the state of the syncs, without the model's own variables."""
        yield from self.global_state.slots()
        yield from self.counted()
        yield Slot("counter/signatures", Kind.SHARED, self.signatures)
        others = self.other_signatures
        yield Slot("counter/other_signatures", Kind.SHARED, others, absent=0.0)
        yield from self.averaging.slots()
        if self.compressed is not None:
            yield from self.compressed.slots()
        yield from self.block.slots()

    def counted(self) -> list[Slot]:
        """Returns the counters that a new synchronizer of the same model takes over."""
        return [
            Slot("counter/period", Kind.WORKER, self.block.period),
            Slot("counter/steps", Kind.WORKER, self._steps),
            Slot("counter/samples", Kind.SUM, self._samples),
            Slot("counter/syncs", Kind.WORKER, self._syncs),
            Slot("counter/seconds", Kind.WORKER, self._seconds),
            Slot("counter/distance", Kind.WORKER, self._distance),
            Slot("counter/bytes_sent", Kind.WORKER, self._bytes_sent, absent=0.0),
        ]


def _signatures(variables: Sequence[Sequence[tf.Variable]]) -> tf.Tensor:
    """Returns the signature of each variable's component on the first device."""
    signatures = [signature_of(variable[0]) for variable in variables]
    return tf.stack(signatures) if signatures else tf.zeros([0], tf.float64)


def _rows(common: dict[str, Any], replicas: Sequence[tuple]) -> tuple[np.ndarray]:
    """Returns the reports of the local replicas, [local replicas, columns], from what they read."""
    period, pending = common.pop("period"), common.pop("pending")
    common["signature"] = common["signature"].sum()
    common["others"] = common["others"].sum()
    common.update(never=period >= NEVER, idle=pending == 0)
    return (np.stack([report_of(*each, **common) for each in replicas]),)


def in_python(
    function: Callable[..., Sequence[Any]], arguments: Nest, *specs: tf.TensorSpec
) -> list[tf.Tensor]:
    """Returns as operations what a Python function returns; it gets NumPy arrays.

    Args:
        function: called with `arguments` as arrays.
        arguments: a tuple of tensors, or of structures of tensors.
        *specs: of what it returns, arrays or what NumPy makes arrays of.
    """
    tensors = tf.nest.flatten(arguments)

    def called(*values: np.ndarray) -> list[np.ndarray]:
        returned = function(*tf.nest.pack_sequence_as(arguments, values))
        return [np.asarray(r, s.dtype.as_numpy_dtype) for r, s in zip(returned, specs, strict=True)]

    results = tf.numpy_function(called, tensors, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    return results


def if_any(part: Part, function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns `function()` if the part is averaged, else 0."""
    return tf.cond(part.committed, function, lambda: tf.constant(0, tf.int64))


def where(condition: tf.Tensor, function: Callable[[], object]) -> tf.Tensor:
    """Calls `function` if the condition holds; returns the condition, as a control dependency."""

    def called() -> tf.Tensor:
        function()
        return tf.constant(True)

    return tf.cond(condition, called, lambda: tf.constant(False))


def not_inlined(function: Callable[..., Nest], *specs: tf.TensorSpec) -> Callable[..., Nest]:
    """Returns `function` as a graph function that TensorFlow does not inline, traced once.

    A tf.function would be traced twice: in a training step's graph, and for the first call from
    Python, which is outside of the strategy's scope. That takes half a second or more.

    Args:
        function: its operations.
        *specs: of its arguments.
    """
    attributes = {"_noinline": True}
    in_graph = tf.function(function, specs, autograph=False, experimental_attributes=attributes)
    made = functools.cache(in_graph.get_concrete_function)
    return lambda *arguments: made()(*arguments)


def now() -> tf.Tensor:
    """Returns the seconds on the monotonic clock, float64."""
    # Called eagerly, numpy_function would turn a Python float into float32.
    return tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
