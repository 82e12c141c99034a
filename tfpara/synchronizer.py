"""The periodic step: pack, gather, rule and averages, spread, unpack; and agreeing on when to stop.

A sync has two phases. First every replica sends a short *report* (samples since the last sync,
whether it still has data, whether its weights are finite, what its worker asks for). All workers
decide from the same table of reports: stop with an error, skip, or commit. Then, in the second
phase, the weights travel. The weights of no replica are touched before every buffer has arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpara import aggregation as aggregations
from tfpara.buffers import Layout
from tfpara.collectives import Collectives, broadcast_to_devices, sum_on_first_device
from tfpara.global_state import GlobalState
from tfpara.reports import (
    REQUEST,
    RUNNING,
    SAMPLES,
    STEPS,
    Request,
    checks,
    first_nonfinite,
    signature_of,
)

LOCAL_STATE = ("keep", "reset", "average")
# The replicas' distance is measured at each of the first syncs, then at every such one: it needs a
# pass over the model, and where the state is sharded an all-gather.
MEASURED_SYNCS = 16
# A sync period that no run reaches: the replicas stay independent, and nothing is averaged.
NEVER = 2**62


class SyncStatistics(NamedTuple):
    """What a worker has done so far.

    steps: minibatches taken by each replica. samples: of all local replicas. syncs: committed.
    sync_seconds: in syncs, waiting included. wait_seconds: the part spent waiting for the slowest
    replica. distance: relative distance ‖w_i − w̄‖ / ‖w̄‖ of the local replicas before a sync, root
    mean square over them; measured at the first 16 syncs and then at every 16th.
    """

    steps: int
    samples: int
    syncs: int
    sync_seconds: float
    wait_seconds: float
    distance: float


class Agreement(NamedTuple):
    """What all workers know alike after a sync.

    request: the largest that any worker made. all_running: whether every replica still had data
    (or none was asked to go on: Python code on all workers has closed the block).
    syncs: committed so far. block_open: whether steps were taken since (this worker's).
    """

    request: Request
    all_running: bool
    syncs: int
    block_open: bool


@dataclasses.dataclass
class ReplicaVariables:
    """The variables that a sync reads and writes: for each, its component on each local device.

    weights: trainable; the rule works on them. state: averaged as it is (batch-norm statistics).
    slots: of the optimizer; kept, reset or averaged. slot_resets: their values after a reset.
    """

    weights: Sequence[Sequence[tf.Variable]]
    weight_names: Sequence[str]
    state: Sequence[Sequence[tf.Variable]]
    state_names: Sequence[str]
    slots: Sequence[Sequence[tf.Variable]]
    slot_names: Sequence[str]
    slot_resets: Sequence[float]
    moments: Sequence[Sequence[Sequence[tf.Variable]]] = ()
    iterations: int = 0


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
    ) -> None:
        self._variables = variables
        self.shows_others = False  # whether the model's variables hold a global model for a while
        self._rule = rule
        self._local_state = local_state
        self._num_replicas = num_replicas
        self._first_replica = first_replica
        self._devices = list(devices)
        self._collectives = collectives
        self._report_collectives = reports
        self._name = name
        self._layout = _layout(variables.weights, bucket_bytes)
        self._state_layout = _layout(variables.state, bucket_bytes)
        averaged_slots = variables.slots if local_state == "average" else []
        self._slot_layout = _layout(averaged_slots, bucket_bytes)
        self._averaged_slots = averaged_slots
        self._averaged = [*variables.weights, *variables.state, *averaged_slots]
        slot_names = variables.slot_names if averaged_slots else []
        self._averaged_names = [*variables.weight_names, *variables.state_names, *slot_names]
        self._index = {id(v[0]): ("weight", i) for i, v in enumerate(variables.weights)}
        self._index |= {id(v[0]): ("state", i) for i, v in enumerate(variables.state)}
        sizes = self._layout.bucket_sizes
        self._aggregation = aggregations.choose(aggregation, sizes, collectives, devices)
        with tf.device(self._devices[0]):
            self.global_state = GlobalState(
                self._aggregation,
                rule,
                averages,
                num_replicas,
                self._packed(0),
                make_variable,
                name,
                self._packed_moments(0) if variables.moments else None,
                variables.iterations,
            )
            anchors = self._state_layout.pack([v[0] for v in variables.state])
            self._state_anchor = [make_variable(a, f"anchor_{k}") for k, a in enumerate(anchors)]
        with tf.device("CPU:0"):
            self._make_counters(make_variable, sync_period)
        # Inlined into a while loop (Keras' steps_per_execution), a collective is known by the
        # loop's iteration too, and would not meet that of a worker elsewhere in its loop.
        self._sync = tf.function(
            self._sync_step, autograph=False, experimental_attributes={"_noinline": True}
        )

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
        self._pending_samples = make(tf.zeros([len(self._devices)], tf.float64), "pending_samples")
        self._steps = make(tf.zeros([], tf.int64), "steps")
        self._samples = make(tf.zeros([], tf.float64), "samples")
        self._syncs = make(tf.zeros([], tf.int64), "syncs")
        self._seconds = make(tf.zeros([2], tf.float64), "seconds")
        self._distance = make(tf.zeros([]), "distance")
        self._sync_began = make(tf.zeros([], tf.float64), "sync_began")

    # -- what the strategy calls -------------------------------------------------------------

    def after_step(self, samples: Sequence[tf.Tensor]) -> None:
        """Counts a minibatch of each local replica and syncs at the end of a block.

        Args:
            samples: how many samples each local replica has just processed.
        """
        counts = tf.stack([tf.cast(n, tf.float64) for n in samples])
        self._pending_samples.assign_add(counts)
        self._samples.assign_add(tf.reduce_sum(counts))
        self._steps.assign_add(1)
        pending = self._pending_steps.assign_add(1)
        tf.cond(
            pending >= self._period,
            lambda: self._sync(tf.constant(True)),
            lambda: tf.constant(False),
        )

    def finish_block(self) -> None:
        """Takes part in syncs until every worker has come here; closes the open block."""
        while not bool(self._sync(tf.constant(False))):
            pass

    def set_sync_period(self, sync_period: int | None) -> None:
        """τ from here on, None: no syncs; all workers must set it at the same sync."""
        self._period.assign(NEVER if sync_period is None else sync_period)

    def request(self, request: Request) -> None:
        """Asks all workers for something; at the next sync they agree on the most that is asked."""
        self._request.assign(tf.maximum(self._request, float(request)))

    def agreement(self) -> Agreement:
        """What the last sync has made known to all."""
        request, running = self._agreed.numpy()
        return Agreement(
            request=Request(int(request)),
            all_running=int(running) in (0, self._num_replicas),
            syncs=int(self._syncs),
            block_open=int(self._pending_steps) > 0,
        )

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
            for bucket, at, piece in self._state_layout.places(index):
                self._state_anchor[bucket][at : at + piece.stop - piece.start].assign(
                    value[piece.start : piece.stop]
                )
        if kind == "weight":
            for bucket, at, piece in self._layout.places(index):
                self.global_state.set_part(bucket, at, value[piece.start : piece.stop])
            self._signatures[index].assign(signature_of(value))

    def adopt(self, former: Synchronizer) -> None:
        """Goes on from the state of the synchronizer that the same model had before.

        Weights that both have keep their global model, momentum and averages; the others start from
        their present values. Every worker must call it.
        """
        sources = [former._index.get(id(v[0]), ("", 0)) for v in self._variables.weights]
        old_cells = {cell.field: cell for cell in former.global_state.cells()}
        for cell in {cell.field: cell for cell in self.global_state.cells()}.values():
            if cell.field.startswith("moments/"):
                continue  # Those of the optimizer's present slots.
            if cell.is_scalar:
                self.global_state.set_field(cell.field, old_cells[cell.field].variable)
                continue
            old = former._layout.unpack(former.global_state.whole(cell.field))
            new = self._layout.unpack(self.global_state.whole(cell.field))
            merged = [
                old[index] if kind == "weight" else mine
                for (kind, index), mine in zip(sources, new, strict=True)
            ]
            self.global_state.set_field(cell.field, self._layout.pack(merged))
        for name in ("_period", "_steps", "_samples", "_syncs", "_seconds", "_distance"):
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
        _assign(self._variables.weights, per_device)

    def restart(self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor]) -> None:
        """All replicas go on from these weights and state; momentum and averages start there too.

        Every worker must call it, with equal tensors, right after a sync.
        """
        _assign(self._variables.weights, [tensors] * len(self._devices))
        _assign(self._variables.state, [state] * len(self._devices))
        for variable in (*self._variables.weights, *self._variables.state):
            self.was_set(variable[0])
        if self._variables.moments:
            # A block begins with equal moments on all replicas: the mean of those there are.
            shares = tf.fill([len(self._devices)], 1.0 / self._num_replicas)
            for field, means in zip(
                ("momentum", "velocity"), self._mean_moments(shares), strict=True
            ):
                spread = self._aggregation.spread(means, f"{self._name}/{field}")
                self.global_state.set_field(f"moments/{field}", spread[0])
                self._write_moments(field, spread)
            self.global_state.set_field("moments/equivalent_steps", tf.constant(0.0))

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
        names = ("_period", "_signatures", "_steps", "_samples", "_syncs", "_seconds", "_distance")
        found = {name.strip("_"): getattr(self, name) for name in names}
        return found | {f"anchor/{k}": anchor for k, anchor in enumerate(self._state_anchor)}

    # -- one sync ----------------------------------------------------------------------------

    def _sync_step(self, running: tf.Tensor) -> tf.Tensor:
        """One sync; returns whether no replica has data left."""
        began = _now()
        self._sync_began.assign(began)
        reports = self._exchange_reports(running, began)
        with tf.control_dependencies([reports]):
            met = _now()
            # What the checks stop is over: only a collective can be waited for.
            self._sync_began.assign(0.0)
            still_running = tf.reduce_sum(reports[:, RUNNING])
            self._agreed.assign(tf.stack([tf.reduce_max(reports[:, REQUEST]), still_running]))
        with tf.control_dependencies(checks(reports, self._averaged_names, len(self._devices))):
            total = tf.reduce_sum(reports[:, SAMPLES])
        committed = tf.cond(
            total > 0.0, lambda: self._commit(reports, total), lambda: tf.constant(0, tf.int64)
        )
        with tf.control_dependencies([committed]):
            ended = _now()
        self._syncs.assign_add(committed)
        self._seconds.assign_add(tf.stack([ended - began, met - began]))
        self._pending_steps.assign(0)
        self._pending_samples.assign(tf.zeros_like(self._pending_samples))
        return still_running == 0.0

    def _exchange_reports(self, running: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        """The table of all replicas' reports, [N, columns], the same on every worker."""
        with tf.control_dependencies([after]), phase("check"):
            counted = self._pending_samples.read_value()
            samples = tf.where(self._period < NEVER, counted, tf.zeros_like(counted))
            request = self._request.read_value()
            steps = tf.cast(self._pending_steps, tf.float64)
            signature = tf.reduce_sum(self._signatures)
        with phase("check"):
            rows = []
            for replica, device in enumerate(self._devices):
                bad = first_nonfinite([v[replica] for v in self._averaged], device)
                row = [
                    samples[replica],
                    tf.cast(running, tf.float64),
                    tf.cast(bad, tf.float64),
                    signature,
                    request,
                    steps,
                ]
                rows.append(tf.stack(row))
        with phase("wait"):
            table = self._report_collectives.all_gather(tf.stack(rows), f"{self._name}/report")
        return tf.reshape(table, [self._num_replicas, len(row)])

    def _commit(self, reports: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Averages, applies the rule and writes the result; returns 1."""
        self._sync_began.assign(_now())
        local_samples = reports[self._first_replica :, SAMPLES][: len(self._devices)]
        shares = tf.cast(local_samples / total, tf.float32)
        with phase("pack"):
            local = [self._packed(replica) for replica in range(len(self._devices))]
            weighted, others = self._weighted(local, shares)
        with phase("reduce"):
            means = self._aggregation.gather(weighted, f"{self._name}/weights")
            sums = sum_on_first_device(others, self._devices)
            sums = self._collectives.all_reduce(sums, f"{self._name}/others")
        state, slots = sums[: len(self._state_anchor)], sums[len(self._state_anchor) :]
        with tf.control_dependencies([*tf.nest.flatten(means), *sums]), phase("rule"):
            distance = tf.cond(
                (self._syncs < MEASURED_SYNCS) | (self._syncs % MEASURED_SYNCS == 0),
                lambda: self._relative_distance(local, means),
                self._distance.read_value,
            )
            update = self.global_state.update(means)
            arrived = [distance]
            if self._variables.moments:
                # At least 1: a block of none has no mean gradient.
                steps = tf.maximum(tf.reduce_max(reports[:, STEPS]), 1.0)
                first, second = self._mean_moments(shares)
                moments = self.global_state.update_moments(
                    first, second, tf.cast(steps, tf.float32)
                )
                spread_moments = {
                    field: self._aggregation.spread(
                        [[getattr(m, field) for m in parts] for parts in moments],
                        f"{self._name}/{field}",
                    )
                    for field in ("momentum", "velocity")
                }
                arrived += tf.nest.flatten(spread_moments)
        with phase("reduce"):
            received = self._aggregation.spread(update.broadcasts, f"{self._name}/broadcast")
        with tf.control_dependencies([*arrived, *tf.nest.flatten(received)]), phase("unpack"):
            self._sync_began.assign(0.0)
            self._distance.assign(distance)
            self.global_state.commit(update)
            if self._variables.moments:
                self.global_state.commit_moments(moments)
                for field, spread in spread_moments.items():
                    self._write_moments(field, spread)
            self._write(local, received, state, slots)
        return tf.constant(1, tf.int64)

    def _packed_moments(self, replica: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        with tf.device(self._devices[replica]):
            first, second = (
                self._layout.pack([v[replica] for v in slots]) for slots in self._variables.moments
            )
        return first, second

    def _mean_moments(self, shares: tf.Tensor) -> list[list[list[tf.Tensor]]]:
        """For each of the two moments, and each holder, its parts of the replicas' mean."""
        weighted: list[list[list[tf.Tensor]]] = [[], []]
        for replica, device in enumerate(self._devices):
            with tf.device(device):
                for kind, buckets in zip(weighted, self._packed_moments(replica), strict=True):
                    kind.append([shares[replica] * b for b in buckets])
        return [
            self._aggregation.gather(kind, f"{self._name}/moments/{k}")
            for k, kind in enumerate(weighted)
        ]

    def _write_moments(self, field: str, spread: Sequence[Sequence[tf.Tensor]]) -> None:
        slots = self._variables.moments[0 if field == "momentum" else 1]
        _assign(slots, [self._layout.unpack(buckets) for buckets in spread])

    def _weighted(
        self, local: Sequence[Sequence[tf.Tensor]], shares: tf.Tensor
    ) -> tuple[list[list[tf.Tensor]], list[list[tf.Tensor]]]:
        """The local replicas' shares of the means: of weights; of state and averaged slots."""
        weights, others = [], []
        for replica, device in enumerate(self._devices):
            with tf.device(device):
                state = self._state_layout.pack([v[replica] for v in self._variables.state])
                # Measured from the last sync's value, so that what has not moved stays exact.
                moved = [s - a for s, a in zip(state, self._state_anchor, strict=True)]
                slots = self._slot_layout.pack([v[replica] for v in self._averaged_slots])
                weights.append([shares[replica] * b for b in local[replica]])
                others.append([shares[replica] * b for b in (*moved, *slots)])
        return weights, others

    def _write(
        self,
        local: Sequence[Sequence[tf.Tensor]],
        received: Sequence[Sequence[tf.Tensor]],
        state: Sequence[tf.Tensor],
        slots: Sequence[tf.Tensor],
    ) -> None:
        """Writes every local replica's new weights, state and slots."""
        restarted = []
        for replica, device in enumerate(self._devices):
            with tf.device(device):
                pairs = zip(local[replica], received[replica], strict=True)
                restarted.append(self._layout.unpack([self._rule.restart(w, b) for w, b in pairs]))
        self.set_weights(restarted)
        with tf.device(self._devices[0]):
            new_state = [a + s for a, s in zip(self._state_anchor, state, strict=True)]
            for anchor, value in zip(self._state_anchor, new_state, strict=True):
                anchor.assign(value)
        for layout, buckets, variables in (
            (self._state_layout, new_state, self._variables.state),
            (self._slot_layout, slots, self._averaged_slots),
        ):
            copies = broadcast_to_devices(buckets, self._devices)
            _assign(variables, [layout.unpack(copy) for copy in copies])
        if self._local_state == "reset":
            for slot, value in zip(self._variables.slots, self._variables.slot_resets, strict=True):
                for component in slot:
                    component.assign(tf.fill(component.shape, tf.cast(value, component.dtype)))

    def _relative_distance(
        self, local: Sequence[Sequence[tf.Tensor]], means: Sequence[Sequence[tf.Tensor]]
    ) -> tf.Tensor:
        with phase("reduce"):
            average = self._aggregation.spread(means, f"{self._name}/mean")[0]
        squares = [
            2.0 * tf.nn.l2_loss(w - m)
            for buckets in local
            for w, m in zip(buckets, average, strict=True)
        ]
        norm = tf.add_n([2.0 * tf.nn.l2_loss(m) for m in average])
        return tf.sqrt(tf.add_n(squares) / (len(local) * tf.maximum(norm, 1e-30)))

    def _packed(self, replica: int) -> list[tf.Tensor]:
        with tf.device(self._devices[replica]):
            return self._layout.pack([v[replica] for v in self._variables.weights])


def phase(name: str) -> contextlib.AbstractContextManager:
    """Names the operations made inside after a phase of the sync, for `tfpara.callbacks.Trace`."""
    return tf.name_scope(f"sync/{name}")


def _now() -> tf.Tensor:
    """Seconds since the epoch, float64. `tf.timestamp` is refused where operations must be
    deterministic."""
    return tf.numpy_function(time.time, [], tf.float64)


def _layout(variables: Sequence[Sequence[tf.Variable]], bucket_bytes: int) -> Layout:
    return Layout([v[0].shape for v in variables], bucket_bytes)


def _assign(
    variables: Sequence[Sequence[tf.Variable]], per_device: Sequence[Sequence[tf.Tensor]]
) -> None:
    """Assigns to every variable's component on each device; `per_device` has a list for each."""
    for replica, tensors in enumerate(per_device):
        for variable, tensor in zip(variables, tensors, strict=True):
            component = variable[replica]
            with tf.device(component.device):
                component.assign(tf.cast(tensor, component.dtype))
