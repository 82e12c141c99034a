"""The periodic step: when replicas sync, and agreeing on when to stop.

A sync has two phases. First every replica sends a short *report* (samples since the last sync,
whether it still has data, whether its weights are finite, what its worker asks for). All workers
decide from the same table of reports: stop with an error, skip, or commit. Then, in the second
phase, the weights travel. The weights of no replica are touched before every buffer has arrived.

Of an overlapped sync (see `tfpara.flight`) both phases run in a thread, with copies of weights and
reports; its results are merged a fixed number of steps later. The model may have *fragments*, which
take turns at the sync points. Where a block is closed (an epoch ends, weights are looked at) a sync
in the air is merged first, and the last sync is one of all fragments, in the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpara import aggregation as aggregations
from tfpara.averaging import Averaging, PlainWire, phase
from tfpara.collectives import Collectives
from tfpara.compression import CompressedWire
from tfpara.flight import FLYING, LANDED, NONE, Flight
from tfpara.global_state import GlobalState
from tfpara.replicas import Buckets, Replicas, ReplicaVariables, assign
from tfpara.reports import (
    REQUEST,
    RUNNING,
    SAMPLES,
    STEPS,
    Request,
    checks,
    is_bad,
    signature_of,
)
from tfpara.statistics import Agreement, SyncStatistics

LOCAL_STATE = ("keep", "reset", "average")
# The replicas' distance is measured at each of the first syncs, then at every such one: it needs a
# pass over the model, and where the state is sharded an all-gather.
MEASURED_SYNCS = 16
# A sync period that no run reaches: the replicas stay independent, and nothing is averaged.
NEVER = 2**62


class Synchronizer:
    """Keeps the replicas of one model together.

    Args:
        variables: the model's replica variables.
        rule: a rule of `tfpara.algorithms`, resolved for `num_replicas`.
        averages: averages of the global model, by name.
        local_state: "keep", "reset" or "average": the optimizer's slots at a sync.
        sync_period: τ, minibatches of each replica between two syncs; None: no syncs.
        aggregation: "replicated", "sharded" or "auto": see `tfpara.aggregation`.
        num_replicas: N, over all workers.
        first_replica: index of this worker's first replica.
        devices: this worker's devices, one for each local replica.
        collectives: between the workers' lead devices, for the weights.
        reports: between the workers' hosts, for the reports.
        name: unique among the synchronizers of a run, the same on every worker.
        make_variable: creates a plain variable, `make_variable(initial_value, name)`.
        bucket_bytes: largest buffer sent in one piece.
        overlap: whether syncs run beside the training, to be merged where the next one begins; or
            after how many steps they are merged.
        fragments: parts of the weights that take turns at the sync points.
        device_sync_period: minibatches between two averages of the local replicas; None: none.
        compression: how weights travel between workers; see `tfpara.compression`.
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
        make_variable: Callable[[Any, str], tf.Variable],
        bucket_bytes: int = 8 << 20,
        overlap: bool | int = False,
        fragments: int = 1,
        device_sync_period: int | None = None,
        compression: str = "none",
    ) -> None:
        self._variables = variables
        self.shows_others = False  # whether the model's variables hold a global model for a while
        self._rule = rule
        self._num_replicas = num_replicas
        self._first_replica = first_replica
        self._devices = list(devices)
        self._report_collectives = reports
        self._name = name
        self._overlap = overlap
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
                variables.iterations,
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
        with tf.device("CPU:0"):
            self._make_counters(make_variable, sync_period)
        self._flight = None
        if overlap:
            columns = SAMPLES + self._parts
            fly = tf.function(self._fly_step, autograph=False)
            self._flight = Flight(fly, devices, sizes, columns, num_replicas, make_variable)
        # Inlined into a while loop (Keras' steps_per_execution), a collective is known by the
        # loop's iteration too, and would not meet that of a worker elsewhere in its loop.
        self._sync = _not_inlined(self._sync_step)
        self._land = _not_inlined(self._land_step)
        self._merge = _not_inlined(self._merge_step)
        self._start = _not_inlined(self._start_step)
        self._average_devices = _not_inlined(self._average_devices_step)

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

    # -- what the strategy calls -------------------------------------------------------------

    def after_step(self, samples: Sequence[tf.Tensor]) -> None:
        """Counts a minibatch of each local replica and syncs at the end of a block.

        Args:
            samples: how many samples each local replica has just processed.
        """
        counts = tf.stack([tf.cast(n, tf.float64) for n in samples])
        for replica, pending in enumerate(self._pending_samples):
            pending.assign_add(tf.fill(pending.shape, counts[replica]))
        self._samples.assign_add(tf.reduce_sum(counts))
        self._steps.assign_add(1)
        steps = self._pending_steps.assign_add(1)
        if self._device_period is not None:
            self._device_samples.assign_add(counts)
            of_devices = self._device_steps.assign_add(1)
            _where(of_devices >= self._device_period, self._average_devices)
        if self._flight is None:
            _where(steps >= self._period, lambda: self._sync(tf.constant(True)))
            return
        delay = self._period if self._overlap is True else tf.constant(self._overlap, tf.int64)
        _where((self._flight.state != NONE) & (steps >= delay), self._merge)
        _where(steps >= self._period, self._start)

    def finish_block(self) -> None:
        """Takes part in syncs until every worker has come here; closes the open block."""
        if self._device_period is not None:
            self._average_devices()
        if self._flight is not None:
            self._merge()
        while not bool(self._sync(tf.constant(False))):
            pass

    def land(self) -> Agreement:
        """Waits for the sync that is in the air, if one is; what all know alike then.

        Every worker must call it at the same step. The replicas' weights stay as they are.
        """
        if self._flight is not None:
            self._land()
        return self.agreement()

    def set_sync_period(self, sync_period: int | None) -> None:
        """τ from here on, None: no syncs; all workers must set it at the same sync."""
        self._period.assign(NEVER if sync_period is None else sync_period)

    def request(self, request: Request) -> None:
        """Asks all workers for something; at the next sync they agree on the most that is asked."""
        self._request.assign(tf.maximum(self._request, float(request)))

    def agreement(self) -> Agreement:
        """What the last sync that is not in the air has made known to all."""
        request, running = self._agreed.numpy()
        in_flight = self._flight is not None and int(self._flight.state) == FLYING
        return Agreement(
            request=Request(int(request)),
            all_running=int(running) in (0, self._num_replicas),
            syncs=int(self._syncs) + in_flight,
            block_open=int(self._pending_steps) > 0,
            in_flight=in_flight,
        )

    @property
    def in_flight(self) -> bool:
        """Whether a sync has begun and is not merged yet."""
        return self._flight is not None and int(self._flight.state) != NONE

    def answered(self) -> None:
        """Forgets what was asked for and agreed on; every worker calls it at the same sync."""
        self._request.assign(0.0)
        self._agreed.assign(tf.zeros_like(self._agreed))

    def was_set(self, component: tf.Variable) -> None:
        """Notes that Python code has set a variable, on all devices alike.

        A weight's new value becomes that of the global model, without momentum, and averages start
        again from it.

        Args:
            component: the variable's component on the first device; unknown ones are ignored.
        """
        kind, index = self._index.get(id(component), ("", 0))
        if kind == "weight" and self.shows_others:
            raise ValueError(
                "a weight is set while strategy.weights(...) shows others than the replicas' own; "
                "it would be lost on leaving. Read the weights inside, leave, and set them then."
            )
        value = tf.reshape(tf.cast(component, tf.float32), [-1])
        if kind == "state":
            for bucket, at, piece in self._replicas.state_layout.places(index):
                self._averaging.anchors[bucket][at : at + piece.stop - piece.start].assign(
                    value[piece.start : piece.stop]
                )
        if kind == "weight":
            if self._flight is not None:
                self._land()
            for bucket, at, piece in self._layout.places(index):
                part = value[piece.start : piece.stop]
                self.global_state.set_part(bucket, at, part)
                for keeper in (self._flight, self._compressed):
                    if keeper is not None:
                        keeper.set_part(bucket, at, part)
            self._signatures[index].assign(signature_of(value))

    def adopt(self, former: Synchronizer) -> None:
        """Goes on from the state of the synchronizer that the same model had before.

        Weights that both have keep their global model, momentum and averages; the others start from
        their present values. Every worker must call it.
        """
        sources = [former._index.get(id(v[0]), ("", 0)) for v in self._variables.weights]
        scalars = {
            (cell.field, cell.part.bucket): cell.variable
            for cell in former.global_state.cells()
            if cell.is_scalar
        }
        for cell in {cell.field: cell for cell in self.global_state.cells()}.values():
            if cell.field.startswith("moments/"):
                continue  # Those of the optimizer's present slots.
            if cell.is_scalar:
                # The fragments count their syncs by themselves.
                values = [
                    scalars[cell.field, theirs.start]
                    for theirs, mine in zip(
                        former._layout.buckets, self._layout.buckets, strict=True
                    )
                    for _ in range(mine.start, mine.stop)
                ]
                self.global_state.set_field(cell.field, values)
                continue
            old = former._layout.unpack(former.global_state.whole(cell.field))
            new = self._layout.unpack(self.global_state.whole(cell.field))
            merged = [
                old[index] if kind == "weight" else mine
                for (kind, index), mine in zip(sources, new, strict=True)
            ]
            self.global_state.set_field(cell.field, self._layout.pack(merged))
        if self._compressed is not None and former._compressed is not None:
            old = former._layout.unpack(former._compressed.points)
            new = self._layout.unpack(self._compressed.points)
            merged = [
                old[index] if kind == "weight" else mine
                for (kind, index), mine in zip(sources, new, strict=True)
            ]
            self._compressed.set_points(self._layout.pack(merged))
        for name in _COUNTED:
            getattr(self, name).assign(getattr(former, name))
        # What is adopted was agreed on; the local weights may differ.
        self._signatures.assign(tf.zeros_like(self._signatures))

    def has_any_of(self, components: Sequence[tf.Variable]) -> bool:
        """Whether any of these is a weight's component on the first device."""
        mine = {id(v[0]) for v in self._variables.weights}
        return any(id(component) in mine for component in components)

    def waiting_since(self) -> float:
        """When the sync under way began, in seconds since the epoch; 0 if none is."""
        return float(self._sync_began.numpy())

    def statistics(self) -> SyncStatistics:
        """What this worker has done so far."""
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

    def global_weights(self, which: str) -> list[tf.Tensor]:
        """The tensors of the "global" model or of a named average, one for each weight.

        Every worker must call it.
        """
        return self._layout.unpack(self.global_state.value(which))

    def local_weights(self) -> list[list[tf.Tensor]]:
        """Copies of the local weights: for each device a list."""
        return [
            [tf.identity(v[replica]) for v in self._variables.weights]
            for replica in range(len(self._devices))
        ]

    def set_weights(self, per_device: Sequence[Sequence[tf.Tensor]]) -> None:
        """Puts weights into the model's variables, device by device."""
        assign(self._variables.weights, per_device)

    def restart(self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor]) -> None:
        """All replicas go on from these weights and state; momentum and averages start there too.

        Every worker must call it, with equal tensors, right after a sync.
        """
        assign(self._variables.weights, [tensors] * len(self._devices))
        assign(self._variables.state, [state] * len(self._devices))
        for variable in (*self._variables.weights, *self._variables.state):
            self.was_set(variable[0])
        if self._variables.moments:
            self._averaging.restart_moments()

    def replica_values(self, replica: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Copies of the weights and the state of a local replica."""
        weights, state = self._variables.weights, self._variables.state
        return [tf.identity(v[replica]) for v in weights], [tf.identity(v[replica]) for v in state]

    def broadcast_point(self) -> list[tf.Tensor]:
        """The weights from which a replica goes on that had no part in the last sync.

        Every worker must call it.
        """
        return self._layout.unpack(self.global_state.broadcast_point())

    @property
    def sync_period(self) -> int | None:
        """τ; None while there are no syncs."""
        period = int(self._period)
        return None if period >= NEVER else period

    def counters(self) -> dict[str, tf.Variable]:
        """What a checkpoint keeps beside the global state and the replicas' own variables."""
        names = (*_COUNTED, "_signatures")
        found = {name.strip("_"): getattr(self, name) for name in names}
        points = self._compressed.points if self._compressed else []
        found |= {f"point/{k}": point for k, point in enumerate(points)}
        return found | {f"anchor/{k}": a for k, a in enumerate(self._averaging.anchors)}

    def of_wire(self) -> Iterator[tuple[str, int, tf.Variable]]:
        """What rounding has left out, for a checkpoint: (name, local replica, variable)."""
        return self._compressed.of_replicas() if self._compressed else iter(())

    def start_from(self, weights: Sequence[tf.Tensor]) -> None:
        """Other replicas than before go on, all from these weights."""
        self.set_weights([weights] * len(self._devices))
        if self._compressed:
            self._compressed.set_points(self._layout.pack(weights))

    def of_replicas(self) -> Iterator[tuple[str, int, tf.Variable]]:
        """What a checkpoint keeps for each local replica: (name, replica, variable)."""
        if not self._whole:
            for replica, pending in enumerate(self._pending_samples):
                yield "pending_samples", replica, pending
        if self._flight is not None and int(self._flight.state) == LANDED:
            yield from self._flight.of_replicas()

    def of_open_block(self) -> dict[str, tf.Variable]:
        """What else it keeps where not all blocks are closed, the same on all workers."""
        found = {} if self._whole else {"turn": self._turn}
        if self._flight is None or int(self._flight.state) != LANDED:
            return found
        return found | self._flight.variables()

    def expect_flight(self) -> None:
        """`of_replicas` and `of_open_block` are about to be given a landed sync's values."""
        self._in_the_air.state.assign(LANDED)

    def flight_restored(self) -> None:
        """They have been."""
        if self._flight is not None:
            self._flight.restored()

    def open_fragments(self, pending_samples: Sequence[Any]) -> list[bool]:
        """Of each weight, whether its fragment has trained since its last sync.

        Args:
            pending_samples: those of all replicas, as a checkpoint has kept them.
        """
        is_open = [any(p[f] > 0 for p in pending_samples) for f in range(self._fragments)]
        runs = self._layout.variables
        return [o for o, run in zip(is_open, runs, strict=True) for _ in range(run.start, run.stop)]

    # -- one sync ----------------------------------------------------------------------------

    def _sync_step(self, running: tf.Tensor) -> tf.Tensor:
        """One sync, in the training thread; returns whether no replica has data left."""
        began = _now()
        self._sync_began.assign(began)
        reports = self._gathered(self._rows(running, began))
        with tf.control_dependencies([reports]):
            met = _now()
            # What the checks stop is over: only a collective can be waited for.
            self._sync_began.assign(0.0)
            self._agree(reports)
        with tf.control_dependencies(self._checks(reports)):
            is_last = tf.reduce_sum(reports[:, RUNNING]) == 0.0
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
            ended = _now()
        self._syncs.assign_add(committed)
        self._seconds.assign_add(tf.stack([ended - began, met - began]))
        self._next_turn(self._turn.read_value(), is_last)
        return is_last

    def _rows(self, running: tf.Tensor | bool, after: tf.Tensor) -> tf.Tensor:
        """This worker's reports, [replicas, columns]."""
        with tf.control_dependencies([after]), phase("check"):
            never = self._period >= NEVER
            request = self._request.read_value()
            steps = tf.cast(self._pending_steps, tf.float64)
            signature = tf.reduce_sum(self._signatures)
        rows = []
        running = tf.cast(running, tf.float64)
        with phase("check"):
            for replica in range(len(self._devices)):
                bad = tf.cast(self._replicas.first_nonfinite(replica), tf.float64)
                samples = self._pending_samples[replica].read_value()
                samples = tf.where(never, tf.zeros_like(samples), samples)
                rows.append(tf.concat([[running, bad, signature, request, steps], samples], 0))
            return tf.stack(rows)

    def _gathered(self, rows: tf.Tensor) -> tf.Tensor:
        """The table of all replicas' reports, [N, columns], the same on every worker."""
        with phase("wait"):
            table = self._report_collectives.all_gather(rows, f"{self._name}/report")
        return tf.reshape(table, [self._num_replicas, SAMPLES + self._parts])

    def _agree(self, reports: tf.Tensor) -> None:
        running = tf.reduce_sum(reports[:, RUNNING])
        self._agreed.assign(tf.stack([tf.reduce_max(reports[:, REQUEST]), running]))

    def _checks(self, reports: tf.Tensor) -> list[tf.Operation]:
        return checks(reports, self._replicas.averaged_names, len(self._devices))

    def _next_turn(self, done: tf.Tensor, is_last: tf.Tensor) -> None:
        """After a sync of the fragment `done`, or of all."""
        self._turn.assign(tf.where(is_last, 0, (done + 1) % self._fragments))
        self._pending_steps.assign(0)
        kept = 1.0 - tf.one_hot(done, self._parts, dtype=tf.float64)
        for pending in self._pending_samples:
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

    def _shares(self, part: int, reports: tf.Tensor) -> tf.Tensor:
        """Of the local replicas in the means of a part."""
        samples = reports[:, SAMPLES + part]
        local = samples[self._first_replica :][: len(self._devices)]
        return tf.cast(local / tf.reduce_sum(samples), tf.float32)

    def _commit(self, fragment: int, reports: tf.Tensor) -> tf.Tensor:
        """Averages a fragment, applies the rule and writes the result; returns 1."""
        self._sync_began.assign(_now())
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
            steps = tf.maximum(tf.reduce_max(reports[:, STEPS]), 1.0)
            moments = self._averaging.exchange_moments(shares, steps)
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
        return tf.constant(1, tf.int64)

    def _commit_others(self, reports: tf.Tensor) -> tf.Tensor:
        """Averages the state that no rule works on; returns 0: no sync of its own."""
        self._sync_began.assign(_now())
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
        """The local replicas become one model; does nothing where they have taken no step."""
        self._replicas.average_devices(self._device_samples.read_value())
        self._device_samples.assign(tf.zeros_like(self._device_samples))
        self._device_steps.assign(0)

    # -- a sync beside the training ------------------------------------------------------------

    def _start_step(self) -> None:
        """Lets the sync of the block that ends here begin."""
        flight = self._in_the_air
        began = _now()
        rows = self._rows(True, began)
        turn = self._turn.read_value()

        def start(fragment: int) -> tf.Tensor:
            with phase("pack"):
                local = [self._replicas.weights(r, fragment) for r in range(len(self._devices))]
                return flight.start(rows, turn, local, self._layout.buckets[fragment])

        with tf.control_dependencies([self._of_fragment(turn, start)]):
            self._next_turn(turn, tf.constant(False))
            self._seconds.assign_add(tf.stack([_now() - began, 0.0]))

    def _fly_step(self) -> tf.Tensor:
        """Both phases, from the flight's copies; called in its thread."""
        flight = self._in_the_air
        self._sync_began.assign(_now())
        reports = self._gathered(flight.rows.read_value())
        with tf.control_dependencies([reports]):
            self._sync_began.assign(0.0)
            flight.table.assign(reports)
        committed = tf.cond(
            is_bad(reports),
            lambda: tf.constant(0, tf.int64),  # `_checks` raise where the flight lands
            lambda: self._of_fragment(
                flight.fragment,
                lambda f: self._if_any(f, reports, lambda: self._exchange_in_flight(f, reports)),
            ),
        )
        return flight.committed.assign(committed)

    def _exchange_in_flight(self, fragment: int, reports: tf.Tensor) -> tf.Tensor:
        flight, buckets = self._in_the_air, self._layout.buckets[fragment]
        self._sync_began.assign(_now())
        local = [[v.read_value() for v in own[buckets]] for own in flight.snapshots]
        arrival = self._averaging.exchange(fragment, local, self._shares(fragment, reports))
        distance = self._measured(fragment, local, arrival)
        with tf.control_dependencies([distance, *tf.nest.flatten(arrival.received)]):
            self._sync_began.assign(0.0)
            self._distance.assign(distance)
            self._count_bytes(fragment)
            self._averaging.commit(arrival)
            for kept, new in zip(flight.arrived, arrival.received, strict=True):
                for variable, value in zip(kept[buckets], new, strict=True):
                    variable.assign(value)
        return tf.constant(1, tf.int64)

    def _land_step(self) -> None:
        """Waits until the flight has landed, if there is one, and takes what all know alike."""
        _where(self._in_the_air.state == FLYING, self._wait)

    def _wait(self) -> None:
        flight = self._in_the_air
        began = _now()
        with tf.control_dependencies([began]), phase("wait"):
            message, of_collective = flight.landing()
        failure = _where(message != "", lambda: self._fail(message, of_collective))
        with tf.control_dependencies([failure]):
            landed = _now()
            reports = flight.table.read_value()
        with tf.control_dependencies(self._checks(reports)):
            self._agree(reports)
            committed = flight.committed.read_value()
            self._syncs.assign_add(committed)
            self._seconds.assign_add(tf.fill([2], landed - began))
            flight.state.assign(tf.where(committed > 0, tf.constant(LANDED, tf.int64), NONE))

    def _fail(self, message: tf.Tensor, of_collective: tf.Tensor) -> None:
        """Raises in the training thread what ended the flight.

        After a failed collective all others fail as it did: one more raises the same error here.
        """
        again = _where(of_collective, lambda: self._gathered(self._in_the_air.rows.read_value()))
        with tf.control_dependencies([again]):
            tf.debugging.Assert(False, [message])

    def _merge_step(self) -> None:
        """Replicas take in what the flight brought, if there is one."""
        flight = self._in_the_air
        self._land_step()
        began = _now()

        def merge(fragment: int) -> tf.Tensor:
            buckets = self._layout.buckets[fragment]
            with phase("unpack"):
                local = [self._replicas.weights(r, fragment) for r in range(len(self._devices))]
                before = [[v.read_value() for v in own[buckets]] for own in flight.snapshots]
                arrived = [[v.read_value() for v in own[buckets]] for own in flight.arrived]
                merged = self._on_devices(self._rule.restart_delayed, local, before, arrived)
                self._replicas.write_weights(merged, fragment)
            return tf.constant(0)

        landed = flight.state == LANDED
        done = _where(landed, lambda: self._of_fragment(flight.fragment, merge))
        flight.state.assign(NONE)
        with tf.control_dependencies([done]):
            self._seconds.assign_add(tf.stack([_now() - began, 0.0]))

    @property
    def _in_the_air(self) -> Flight:
        if self._flight is None:
            raise RuntimeError("syncs are not overlapped")
        return self._flight


# Variables that go on where a model's synchronizer is made anew, and in checkpoints.
_COUNTED = (
    "_period",
    "_steps",
    "_samples",
    "_syncs",
    "_seconds",
    "_distance",
    "_bytes_sent",
)


def _where(condition: tf.Tensor, function: Callable[[], Any]) -> tf.Tensor:
    """Calls `function` where the condition holds; returns it, to wait for."""

    def called() -> tf.Tensor:
        function()
        return tf.constant(True)

    return tf.cond(condition, called, lambda: tf.constant(False))


def _not_inlined(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def _now() -> tf.Tensor:
    """Seconds since the epoch, float64. `tf.timestamp` is refused where operations must be
    deterministic."""
    return tf.numpy_function(time.time, [], tf.float64)
