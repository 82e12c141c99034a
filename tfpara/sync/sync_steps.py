"""One sync in the training thread, as operations of a graph: reports, then the second phase.

Of a model with fragments, one takes part in a sync, in turn; all do where no replica has data left.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpara.cluster.place import MARKS, TEXT_BYTES, Place, sentence
from tfpara.collectives import Collectives
from tfpara.sync import aggregation as aggregations
from tfpara.sync.averaging import Averaging, PlainWire, Shares, phase
from tfpara.sync.compression import CompressedWire
from tfpara.sync.global_state import GlobalState
from tfpara.sync.replicas import Buckets, Replicas, ReplicaVariables
from tfpara.sync.reports import (
    REQUEST,
    RUNNING,
    SAMPLES,
    Columns,
    are_apart,
    problem_of,
    signature_of,
    stop_if,
)

# The replicas' distance is measured at each of the first syncs, then at every such one: it needs a
# pass over the weights.
MEASURED_SYNCS = 16
# A sync period that no run reaches: the replicas stay independent, and nothing is averaged.
NEVER = 2**62


class SyncSteps:
    """The variables that syncs of one model need, and the operations of a sync.

    Args:
        variables: the model's replica variables.
        rule: a rule of `tfpara.algorithms`, resolved for `num_replicas`.
        averages: averages of the global model, by name.
        local_state: "keep", "reset" or "average": the optimizer's slots at a sync.
        sync_period: τ, minibatches of each replica between two syncs; None: no syncs.
        aggregation: "replicated", "sharded" or "auto": see `tfpara.sync.aggregation`.
        num_replicas: N, over all workers.
        first_replica: index of this worker's first replica.
        devices: this worker's devices, one for each local replica.
        collectives: between the workers' lead devices, for the weights.
        reports: between the workers' hosts, for the reports.
        name: unique among the synchronizers of a run, the same on every worker.
        place: where this process is, kept up to date by its owner.
        make_variable: creates a plain variable, `make_variable(initial_value, name)`.
        bucket_bytes: largest buffer sent in one piece.
        overlap: whether syncs run beside the training, to be merged where the next one begins; or
            after how many steps they are merged.
        fragments: parts of the weights that take turns at the sync points.
        device_sync_period: minibatches between two averages of the local replicas; None: none.
        compression: how weights travel between workers; see `tfpara.sync.compression`.
    """

    def __init__(
        self,
        variables: ReplicaVariables,
        *,
        rule: Any,
        averages: Mapping[str, Any],
        local_state: str,
        sync_period: int | None,
        aggregation: str,
        num_replicas: int,
        first_replica: int,
        devices: Sequence[str],
        collectives: Collectives,
        reports: Collectives,
        name: str,
        place: Place,
        make_variable: Callable[[Any, str], tf.Variable],
        bucket_bytes: int = 8 << 20,
        overlap: bool | int = False,
        fragments: int = 1,
        device_sync_period: int | None = None,
        compression: str = "none",
    ) -> None:
        self._variables = variables
        # The replicas' weights, of each device, while the model's variables hold others.
        self._own: list[list[tf.Tensor]] | None = None
        self._rule = rule
        self._num_replicas = num_replicas
        self._first_replica = first_replica
        self._devices = list(devices)
        self._report_collectives = reports
        self._name = name
        self._place = place
        self._fragments = fragments
        self._device_period = device_sync_period
        # State that no rule works on is averaged with the weights, or where a block is closed.
        self._whole = fragments == 1 and not overlap
        self._parts = fragments + (0 if self._whole else 1)  # averaged at times of their own
        self._replicas = Replicas(variables, devices, local_state, bucket_bytes, fragments)
        self._layout = self._replicas.layout
        self._index = {id(v[0]): ("weight", i) for i, v in enumerate(variables.weights)}
        self._index |= {id(v[0]): ("state", i) for i, v in enumerate(variables.state)}
        sizes = self._layout.bucket_sizes
        if compression != "none" and aggregation == "auto":
            aggregation = "sharded"
        chosen = aggregations.choose(aggregation, sizes, collectives, devices)
        with tf.device(self._devices[0]):
            self.global_state = GlobalState(
                chosen,
                rule,
                averages,
                num_replicas,
                self._replicas.weights(0),
                make_variable,
                name,
                self._replicas.moments(0) if variables.moments else None,
            )
            self._compressed = None
            if isinstance(chosen, aggregations.Sharded) and compression != "none":
                self._compressed = CompressedWire(
                    compression,
                    chosen,
                    self._replicas,
                    collectives,
                    self.global_state,
                    make_variable,
                    name,
                )
            self._averaging = Averaging(
                self._replicas,
                self._compressed or PlainWire(chosen, self._replicas, collectives.size, name),
                chosen,
                collectives,
                self.global_state,
                num_replicas,
                make_variable,
                name,
            )
        self._steps_from = SAMPLES + self._parts  # columns of a report
        self._counts_from = self._steps_from + self._parts
        taken = self._counts_from + len(self._replicas.shared_counts)
        self._columns = taken + 1 + len(variables.rates)
        self._model_columns = Columns(
            samples=slice(SAMPLES, self._steps_from),
            steps=slice(self._steps_from, self._counts_from),
            taken=slice(taken, taken + 1),
            rates=slice(taken + 1, self._columns),
        )
        with tf.device("CPU:0"):
            self._make_counters(make_variable, sync_period)
        # Inlined into a while loop (Keras' steps_per_execution), a collective is known by the
        # loop's iteration too, and would not meet that of a worker elsewhere in its loop.
        self._sync = not_inlined(self._sync_step, tf.TensorSpec([], tf.bool))
        self._meet = not_inlined(self._meet_step, tf.TensorSpec([], tf.float64))
        self._average_devices = not_inlined(self._average_devices_step)

    def _make_counters(
        self, make: Callable[[Any, str], tf.Variable], sync_period: int | None
    ) -> None:
        period = NEVER if sync_period is None else sync_period
        self._period = make(tf.constant(period, tf.int64), "sync_period")
        # All workers must start from the same weights, whoever has loaded them.
        signatures = [signature_of(v[0]) for v in self._variables.weights]
        signatures = tf.stack(signatures) if signatures else tf.zeros([0], tf.float64)
        self._signatures = make(signatures, "signatures")
        self._request = make(tf.zeros([], tf.float64), "request")
        self._agreed = make(tf.zeros([2], tf.float64), "agreed")  # request, replicas running
        self._pending_steps = make(tf.zeros([], tf.int64), "pending_steps")
        self._block_steps = make(tf.zeros([self._parts], tf.float64), "block_steps")
        self._pending_samples = [
            make(tf.zeros([self._parts], tf.float64), f"pending_samples_{replica}")
            for replica in range(len(self._devices))
        ]
        self._turn = make(tf.zeros([], tf.int32), "turn")  # the fragment that is next
        self._device_steps = make(tf.zeros([], tf.int64), "device_steps")
        self._device_samples = make(tf.zeros([len(self._devices)], tf.float64), "device_samples")
        self._steps = make(tf.zeros([], tf.int64), "steps")
        self._samples = make(tf.zeros([], tf.float64), "samples")
        self._syncs = make(tf.zeros([], tf.int64), "syncs")
        self._seconds = make(tf.zeros([2], tf.float64), "seconds")
        self._distance = make(tf.zeros([]), "distance")
        self._bytes_sent = make(tf.zeros([], tf.float64), "bytes_sent")
        self._sync_began = make(tf.zeros([], tf.float64), "sync_began")

    # -- one sync ----------------------------------------------------------------------------

    def sync(self, running: tf.Tensor) -> tf.Tensor:
        """One sync, in the training thread; returns whether no replica has data left."""
        is_last, problem = self._sync(running)
        with tf.control_dependencies([stop_if(problem)]):
            return tf.identity(is_last)

    def _sync_step(self, running: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether no replica has data left, and what forbids the sync, "" if nothing does."""
        began, mark = self._arrival()
        self._sync_began.assign(began)
        reports = self._gathered(self._rows(running, mark))
        with tf.control_dependencies([reports]):
            met = now()
            # What the checks stop is over: only a collective can be waited for.
            self._sync_began.assign(0.0)
        is_last = tf.reduce_sum(reports[:, RUNNING]) == 0.0
        problem = self._problem(reports, self._apart(reports))
        where(problem == "", lambda: self._close_block(reports, is_last, began, met))
        return is_last, problem

    def _meet_step(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The numbers of all workers, and what forbids that they meet, "" if nothing does.

        The exchange is that of the reports before a sync, so that a worker which comes to a sync
        in place of it is noticed.
        """
        with tf.device("CPU:0"):
            began, mark = self._arrival()
            self._sync_began.assign(began)
            flags = tf.constant([0.0, -1.0, 0.0, 0.0], tf.float64)  # no data, no bad weight
            others = tf.zeros([self._columns - SAMPLES - 1], tf.float64)
            row = tf.concat([flags, mark, number[tf.newaxis], others], 0)
            reports = self._gathered(tf.stack([row] * len(self._devices)))
            with tf.control_dependencies([reports]):
                self._sync_began.assign(0.0)
            return reports[:: len(self._devices), SAMPLES], self._apart(reports)

    def _close_block(
        self, reports: tf.Tensor, is_last: tf.Tensor, began: tf.Tensor, met: tf.Tensor
    ) -> None:
        """Commits what the reports allow; then counts it, so that a failure counts nothing."""
        if self._whole:
            committed = self._commit_if_any(0, reports)
        else:
            committed = tf.cond(
                is_last,
                lambda: self._commit_all(reports),
                lambda: self._of_fragment(
                    self._turn, lambda fragment: self._commit_if_any(fragment, reports)
                ),
            )
        with tf.control_dependencies([committed]):
            ended = now()
            self._agree(reports)
            self._syncs.assign_add(committed)
            self._seconds.assign_add(tf.stack([ended - began, met - began]))
            self._next_turn(self._turn.read_value(), is_last)

    def _arrival(self) -> tuple[tf.Tensor, tf.Tensor]:
        """When and for what this worker comes to an exchange: the time as by `now`, and a mark."""

        def arrival() -> np.ndarray:
            return np.array([time.monotonic(), *self._place.mark()])

        found = tf.numpy_function(arrival, [], tf.float64)
        found.set_shape([1 + MARKS])
        return found[0], found[1:]

    def _rows(self, running: tf.Tensor | bool, mark: tf.Tensor) -> tf.Tensor:
        """This worker's reports, [replicas, columns]."""
        with tf.control_dependencies([mark]), phase("check"):
            never = self._period >= NEVER
            request = self._request.read_value()
            steps = self._block_steps.read_value()
            signature = tf.reduce_sum(self._signatures)
            taken = tf.cast(self._steps.read_value(), tf.float64)
            idle = never | (self._pending_steps.read_value() == 0)
        rows = []
        running = tf.cast(running, tf.float64)
        with phase("check"):
            for replica in range(len(self._devices)):
                bad = tf.cast(self._replicas.first_nonfinite(replica), tf.float64)
                samples = self._pending_samples[replica].read_value()
                samples = tf.where(never, tf.zeros_like(samples), samples)
                counts = [tf.cast(c[replica], tf.float64) for c in self._replicas.shared_counts]
                # Nothing was trained with the rate of a replica that is idle.
                rates = [tf.cast(r[replica], tf.float64) for r in self._variables.rates]
                rates = [tf.where(idle, tf.cast(np.nan, tf.float64), rate) for rate in rates]
                flags = [running, bad, signature, request]
                own = [*counts, taken, *rates]
                rows.append(tf.concat([flags, mark, samples, steps, own], 0))
            return tf.stack(rows)

    def _gathered(self, rows: tf.Tensor) -> tf.Tensor:
        """The table of all replicas' reports, [N, columns], the same on every worker."""
        with phase("wait"):
            table = self._report_collectives.all_gather(rows, f"{self._name}/report")
        return tf.reshape(table, [self._num_replicas, self._columns])

    def _apart(self, reports: tf.Tensor) -> tf.Tensor:
        """Who is where, if the workers have come to different exchanges; else ""."""
        workers = self._report_collectives.size
        if workers == 1:
            return tf.constant("")

        def told() -> tf.Tensor:
            mine = tf.numpy_function(
                lambda: np.array(self._place.told(), np.int32), [], tf.int32, stateful=True
            )
            mine.set_shape([TEXT_BYTES])
            table = self._report_collectives.all_gather(mine, f"{self._name}/places")
            return tf.numpy_function(lambda rows: sentence(rows).encode(), [table], tf.string)

        return tf.cond(are_apart(reports), told, lambda: tf.constant(""))

    def _agree(self, reports: tf.Tensor) -> None:
        running = tf.reduce_sum(reports[:, RUNNING])
        self._agreed.assign(tf.stack([tf.reduce_max(reports[:, REQUEST]), running]))

    def _problem(self, reports: tf.Tensor, apart: tf.Tensor) -> tf.Tensor:
        names, own = self._replicas.averaged_names, len(self._devices)
        return problem_of(reports, self._model_columns, names, own, apart)

    def _next_turn(self, done: tf.Tensor, is_last: tf.Tensor) -> None:
        """After a sync of the fragment `done`, or of all."""
        self._turn.assign(tf.where(is_last, 0, (done + 1) % self._fragments))
        self._pending_steps.assign(0)
        kept = 1.0 - tf.one_hot(done, self._parts, dtype=tf.float64)
        for pending in (self._block_steps, *self._pending_samples):
            pending.assign(tf.where(is_last | self._whole, tf.zeros_like(pending), kept * pending))

    def _of_fragment(self, number: tf.Tensor, function: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """`function` of the fragment with this number."""
        if self._fragments == 1:
            return function(0)
        branches = [lambda fragment=f: function(fragment) for f in range(self._fragments)]
        return tf.switch_case(tf.convert_to_tensor(number), branches)

    def _if_any(
        self, part: int, reports: tf.Tensor, function: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """`function()`, which gives 1, if replicas have processed samples; else 0."""
        total = tf.reduce_sum(reports[:, SAMPLES + part])
        return tf.cond(total > 0.0, function, lambda: tf.constant(0, tf.int64))

    def _commit_if_any(self, fragment: int, reports: tf.Tensor) -> tf.Tensor:
        return self._if_any(fragment, reports, lambda: self._commit(fragment, reports))

    def _commit_all(self, reports: tf.Tensor) -> tf.Tensor:
        committed = [self._commit_if_any(f, reports) for f in range(self._fragments)]
        committed.append(
            self._if_any(self._fragments, reports, lambda: self._commit_others(reports))
        )
        return tf.reduce_max(tf.stack(committed))

    def _shares(self, part: int, reports: tf.Tensor) -> Shares:
        """Of the local replicas in the means of a part."""
        samples = reports[:, SAMPLES + part]
        local = samples[self._first_replica :][: len(self._devices)]
        portions = tf.cast(local / tf.reduce_sum(samples), tf.float32)
        alike = tf.reduce_all(samples == samples[0])
        # A fragment's block is as many sync periods long as there are fragments.
        whole = tf.cast(self._period, tf.float64) * float(self._fragments)
        of_block = tf.cast(tf.minimum(self._longest(part, reports) / whole, 1.0), tf.float32)
        return Shares(portions, tf.where(alike, float(self._num_replicas), 1.0), of_block)

    def _longest(self, part: int, reports: tf.Tensor) -> tf.Tensor:
        """Minibatches of the block, of the replica with the most."""
        return tf.reduce_max(reports[:, self._steps_from + part])

    def _commit(self, fragment: int, reports: tf.Tensor) -> tf.Tensor:
        """Averages a fragment, applies the rule and writes the result; returns 1."""
        # The watchdog is to see a wait for whatever is sent.
        with tf.control_dependencies([self._sync_began.assign(now())]):
            shares = self._shares(fragment, reports)
            with phase("pack"):
                local = [self._replicas.weights(r, fragment) for r in range(len(self._devices))]
        others = self._averaging.exchange_others(shares) if self._whole else []
        arrival = self._averaging.exchange(fragment, local, shares)
        distance = self._measured(fragment, local, arrival)
        arrived = [distance, *others, *tf.nest.flatten(arrival.received)]
        moments = None
        if self._variables.moments:
            # At least 1: a block of none has no mean gradient.
            steps = tf.maximum(self._longest(fragment, reports), 1.0)
            (counted,) = tf.unstack(self._furthest(reports), num=1)
            # Fewer, where loss scaling has left steps out; the rule's have all of the block.
            counted = tf.maximum(counted, steps)
            moments = self._averaging.exchange_moments(shares, steps, counted)
            arrived += tf.nest.flatten(moments.spread)
        with tf.control_dependencies(arrived), phase("unpack"):
            self._sync_began.assign(0.0)
            self._distance.assign(distance)
            self._count_bytes(fragment)
            self._averaging.commit(arrival)
            if moments is not None:
                self._averaging.commit_moments(moments)
            restarted = self._on_devices(self._rule.restart, local, arrival.received)
            self._replicas.write_weights(restarted, fragment)
            if self._whole:
                self._averaging.commit_others(others)
            self._replicas.write_counts(self._furthest(reports))
        return tf.constant(1, tf.int64)

    def _furthest(self, reports: tf.Tensor) -> tf.Tensor:
        """The largest of each of the optimizers' shared counts over all replicas."""
        counts = slice(self._counts_from, self._model_columns.taken.start)
        return tf.reduce_max(reports[:, counts], 0)

    def _commit_others(self, reports: tf.Tensor) -> tf.Tensor:
        """Averages the state that no rule works on; returns 0: no sync of its own."""
        self._sync_began.assign(now())
        means = self._averaging.exchange_others(self._shares(self._fragments, reports))
        with tf.control_dependencies(means):
            self._sync_began.assign(0.0)
            self._bytes_sent.assign_add(float(self._averaging.bytes_sent_of_others))
            self._averaging.commit_others(means)
        return tf.constant(0, tf.int64)

    def _measured(self, fragment: int, local: Sequence[Buckets], arrival: Any) -> tf.Tensor:
        with tf.control_dependencies(tf.nest.flatten(arrival.means)):
            return tf.cond(
                (self._syncs < MEASURED_SYNCS) | (self._syncs % MEASURED_SYNCS == 0),
                lambda: self._averaging.distance(fragment, local, arrival),
                self._distance.read_value,
            )

    def _count_bytes(self, fragment: int) -> None:
        others = self._averaging.bytes_sent_of_others if self._whole else 0
        self._bytes_sent.assign_add(float(self._averaging.bytes_sent(fragment) + others))

    def _on_devices(self, function: Callable[..., tf.Tensor], *lists: Any) -> list[list[tf.Tensor]]:
        """`function` of each device's buckets, taken from each of the lists in turn."""
        found = []
        for device, *of_device in zip(self._devices, *lists, strict=True):
            with tf.device(device):
                found.append([function(*each) for each in zip(*of_device, strict=True)])
        return found

    def _average_devices_step(self) -> None:
        """The local replicas become one model; nothing changes where they have taken no step, or
        are to be independent."""
        samples = self._device_samples.read_value()
        never = self._period >= NEVER
        self._replicas.average_devices(tf.where(never, tf.zeros_like(samples), samples))
        self._device_samples.assign(tf.zeros_like(self._device_samples))
        self._device_steps.assign(0)


def where(condition: tf.Tensor, function: Callable[[], Any]) -> tf.Tensor:
    """Calls `function` where the condition holds; returns it, to wait for."""

    def called() -> tf.Tensor:
        function()
        return tf.constant(True)

    return tf.cond(condition, called, lambda: tf.constant(False))


def not_inlined(function: Callable[..., Any], *specs: tf.TensorSpec) -> Callable[..., Any]:
    """The operations of `function`, whose arguments are of these specs, as a function of their own.

    They are made once. A tf.function would make them again for the first call from Python, which
    is out of the strategy's scope, after that in a step's graph: half a second or more of each run.
    """
    attributes = {"_noinline": True}
    in_graph = tf.function(function, specs, autograph=False, experimental_attributes=attributes)
    made = functools.cache(in_graph.get_concrete_function)
    return lambda *arguments: made()(*arguments)


def now() -> tf.Tensor:
    """Seconds on the monotonic clock, float64, whatever is done to the machine's time."""
    # Called eagerly, it would make of Python's own number a float32.
    return tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
