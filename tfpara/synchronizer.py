"""The periodic step: pack, reduce, rule and averages, unpack; and agreeing on when to stop.

A sync has two phases. First every replica sends a short *report* (samples since the last sync,
whether it still has data, whether its weights are finite). All workers decide from the same table
of reports: stop with an error, skip, or commit. Then, in the second phase, the weights travel. The
weights of no replica are touched before every buffer has arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpara.buffers import Layout
from tfpara.collectives import Collectives, broadcast_to_devices, sum_on_first_device
from tfpara.reports import RUNNING, SAMPLES, checks, first_nonfinite

LOCAL_STATE = ("keep", "reset", "average")


class SyncStatistics(NamedTuple):
    """What a worker has done so far.

    steps: minibatches taken by each replica. samples: of all local replicas. syncs: committed.
    sync_seconds: in syncs, waiting included. wait_seconds: the part spent waiting for the slowest
    replica. distance: relative distance ‖w_i − w̄‖ / ‖w̄‖ of the local replicas before the last
    sync, root mean square over them.
    """

    steps: int
    samples: int
    syncs: int
    sync_seconds: float
    wait_seconds: float
    distance: float


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


class Synchronizer:
    """Keeps the replicas of one model together.

    Args:
        variables: the model's replica variables.
        rule: a rule of `tfpara.algorithms`, resolved for `num_replicas`.
        averages: averages of the global model, by name.
        local_state: "keep", "reset" or "average": the optimizer's slots at a sync.
        sync_period: τ, minibatches of each replica between two syncs.
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
        sync_period: int,
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
        self._rule = rule
        self._averages = dict(averages)
        self._local_state = local_state
        self._period = sync_period
        self._num_replicas = num_replicas
        self._first_replica = first_replica
        self._devices = list(devices)
        self._lead = self._devices[0]
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
        self._make_variables(make_variable)
        self._index = {id(v[0]): ("weight", i) for i, v in enumerate(variables.weights)}
        self._index |= {id(v[0]): ("state", i) for i, v in enumerate(variables.state)}
        # Inlined into a while loop (Keras' steps_per_execution), a collective is known by the
        # loop's iteration too, and would not meet that of a worker elsewhere in its loop.
        self._sync = tf.function(
            self._sync_step, autograph=False, experimental_attributes={"_noinline": True}
        )

    def _make_variables(self, make: Callable[[Any, str], tf.Variable]) -> None:
        with tf.device(self._lead):
            weights = self._packed(0)
            # Per bucket: the rule's state and each average's state, a variable for every field.
            self._rule_state = [
                _state_variables(self._rule.init(w), f"rule_{k}", make)
                for k, w in enumerate(weights)
            ]
            self._average_states = {
                name: [
                    _state_variables(average.init(w), f"{name}_{k}", make)
                    for k, w in enumerate(weights)
                ]
                for name, average in self._averages.items()
            }
            anchors = self._state_layout.pack([v[0] for v in self._variables.state])
            self._state_anchor = [make(a, f"state_anchor_{k}") for k, a in enumerate(anchors)]
        with tf.device("CPU:0"):
            self._unsigned = make(True, "unsigned")
            self._signature = make(tf.zeros([], tf.float64), "signature")
            self._pending_steps = make(tf.zeros([], tf.int64), "pending_steps")
            self._pending_samples = make(
                tf.zeros([len(self._devices)], tf.float64), "pending_samples"
            )
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

    def was_set(self, component: tf.Variable) -> None:
        """Notes that Python code has set a variable, on all devices alike.

        A weight's new value becomes that of the global model, without momentum, and averages start
        again from it.

        Args:
            component: the variable's component on the first device; unknown ones are ignored.
        """
        kind, index = self._index.get(id(component), ("", 0))
        value = tf.reshape(tf.cast(component, tf.float32), [-1])
        if kind == "state":
            for bucket, at, piece in self._state_layout.places(index):
                self._state_anchor[bucket][at : at + piece.stop - piece.start].assign(
                    value[piece.start : piece.stop]
                )
        if kind == "weight":
            for bucket, at, piece in self._layout.places(index):
                part = value[piece.start : piece.stop]
                _assign_part(self._rule_state[bucket], self._rule.init(part), at)
                for name, average in self._averages.items():
                    self._restart_average(name, average, bucket, part, at)
            self._unsigned.assign(True)

    def _restart_average(
        self, name: str, average: Any, bucket: int, part: tf.Tensor, at: int
    ) -> None:
        """Starts an average again from its present value, with `part` of a bucket set anew."""
        for number, variables in enumerate(self._average_states[name]):
            value = average.value(_read(variables))
            if number == bucket:
                value = tf.concat([value[:at], part, value[at + part.shape[0] :]], 0)
            _assign(variables, average.init(value))

    def adopt(self, former: Synchronizer) -> None:
        """Goes on from the state of the synchronizer that the same model had before.

        Weights that both have keep their global model, momentum and averages; the others start from
        their present values.
        """
        for index, variable in enumerate(self._variables.weights):
            kind, old_index = former._index.get(id(variable[0]), ("", 0))
            if kind != "weight":
                continue
            _adopt(
                self._layout, index, self._rule_state, former._layout, old_index, former._rule_state
            )
            for name, states in self._average_states.items():
                _adopt(
                    self._layout,
                    index,
                    states,
                    former._layout,
                    old_index,
                    former._average_states[name],
                )
        for name in ("_steps", "_samples", "_syncs", "_seconds", "_distance"):
            getattr(self, name).assign(getattr(former, name))

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
        """The tensors of the "global" model or of a named average, one for each weight."""
        with tf.device(self._lead):
            if which == "global":
                buckets = [s.global_model.read_value() for s in self._rule_state]
            else:
                average = self._averages[which]
                states = [_read(s) for s in self._average_states[which]]
                buckets = [average.value(s) for s in states]
            return self._layout.unpack(buckets)

    def local_weights(self) -> list[list[tf.Tensor]]:
        """Copies of the local weights: for each device a list."""
        return [
            [tf.identity(v[replica]) for v in self._variables.weights]
            for replica in range(len(self._devices))
        ]

    def set_weights(self, per_device: Sequence[Sequence[tf.Tensor]]) -> None:
        """Puts weights into the model's variables, device by device."""
        for replica, tensors in enumerate(per_device):
            for variable, tensor in zip(self._variables.weights, tensors, strict=True):
                variable[replica].assign(tf.cast(tensor, variable[replica].dtype))

    # -- one sync ----------------------------------------------------------------------------

    def _sync_step(self, running: tf.Tensor) -> tf.Tensor:
        """One sync; returns whether no replica has data left."""
        began = tf.timestamp()
        self._sync_began.assign(began)
        reports = self._exchange_reports(running, began)
        with tf.control_dependencies([reports]):
            met = tf.timestamp()
            # What the checks stop is over: only a collective can be waited for.
            self._sync_began.assign(0.0)
        with tf.control_dependencies(checks(reports, self._averaged_names, len(self._devices))):
            total = tf.reduce_sum(reports[:, SAMPLES])
        committed = tf.cond(
            total > 0.0, lambda: self._commit(reports, total), lambda: tf.constant(0, tf.int64)
        )
        with tf.control_dependencies([committed]):
            ended = tf.timestamp()
        self._syncs.assign_add(committed)
        self._seconds.assign_add(tf.stack([ended - began, met - began]))
        self._pending_steps.assign(0)
        self._pending_samples.assign(tf.zeros_like(self._pending_samples))
        return tf.reduce_sum(reports[:, RUNNING]) == 0.0

    def _exchange_reports(self, running: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        """The table of all replicas' reports, [N, columns], the same on every worker."""
        with tf.control_dependencies([after]):
            samples = self._pending_samples.read_value()
        signature = self._global_signature()
        bad = [
            first_nonfinite([v[r] for v in self._averaged], device)
            for r, device in enumerate(self._devices)
        ]
        rows = []
        for replica in range(len(self._devices)):
            row = [
                samples[replica],
                tf.cast(running, tf.float64),
                tf.cast(bad[replica], tf.float64),
                signature,
            ]
            rows.append(tf.stack(row))
        table = self._report_collectives.all_gather(tf.stack(rows), f"{self._name}/report")
        return tf.reshape(table, [self._num_replicas, len(row)])

    def _commit(self, reports: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Averages, applies the rule and writes the result; returns 1."""
        self._sync_began.assign(tf.timestamp())
        local_samples = reports[self._first_replica :, SAMPLES][: len(self._devices)]
        shares = tf.cast(local_samples / total, tf.float32)
        local = [self._packed(replica) for replica in range(len(self._devices))]
        buffers = self._weighted_sums(local, shares)
        sums = self._collectives.all_reduce(buffers, f"{self._name}/reduce")
        cuts = [len(self._rule_state), len(self._state_anchor), -1]
        average = sums[: cuts[0]]
        state = sums[cuts[0] : cuts[0] + cuts[1]]
        slots = sums[cuts[0] + cuts[1] :]
        with tf.control_dependencies(sums):
            self._sync_began.assign(0.0)
            return self._write(local, average, state, slots)

    def _weighted_sums(
        self, local: Sequence[Sequence[tf.Tensor]], shares: tf.Tensor
    ) -> list[tf.Tensor]:
        """This worker's share of the weighted means: of weights, state and averaged slots."""
        per_device = []
        for replica, device in enumerate(self._devices):
            with tf.device(device):
                state = self._state_layout.pack([v[replica] for v in self._variables.state])
                # Measured from the last sync's value, so that what has not moved stays exact.
                moved = [s - a for s, a in zip(state, self._state_anchor, strict=True)]
                slots = self._slot_layout.pack([v[replica] for v in self._averaged_slots])
                buffers = [*local[replica], *moved, *slots]
                per_device.append([shares[replica] * b for b in buffers])
        return sum_on_first_device(per_device, self._devices)

    def _write(
        self,
        local: Sequence[Sequence[tf.Tensor]],
        average: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        slots: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        self._distance.assign(self._relative_distance(local, average))
        with tf.device(self._lead):
            before = [_read(s) for s in self._rule_state]
            after = [
                self._rule.update(b, w, self._num_replicas)
                for b, w in zip(before, average, strict=True)
            ]
            for variables, values in zip(self._rule_state, after, strict=True):
                _assign(variables, values)
            for name, kind in self._averages.items():
                for variables, new in zip(self._average_states[name], after, strict=True):
                    _assign(variables, kind.update(_read(variables), new.global_model))
            new_state = [a + s for a, s in zip(self._state_anchor, state, strict=True)]
            for anchor, value in zip(self._state_anchor, new_state, strict=True):
                anchor.assign(value)
        self._restart(local, before, after)
        self._write_to_devices(self._state_layout, new_state, self._variables.state)
        if self._local_state == "average":
            self._write_to_devices(self._slot_layout, slots, self._averaged_slots)
        elif self._local_state == "reset":
            for slot, value in zip(self._variables.slots, self._variables.slot_resets, strict=True):
                for component in slot:
                    component.assign(tf.fill(component.shape, tf.cast(value, component.dtype)))
        return tf.constant(1, tf.int64)

    def _restart(
        self, local: Sequence[Sequence[tf.Tensor]], before: Sequence[Any], after: Sequence[Any]
    ) -> None:
        """Writes every local replica's new weights."""
        for replica, device in enumerate(self._devices):
            with tf.device(device):
                buckets = [
                    self._rule.restart(w, b, a)
                    for w, b, a in zip(local[replica], before, after, strict=True)
                ]
                for variable, tensor in zip(
                    self._variables.weights, self._layout.unpack(buckets), strict=True
                ):
                    variable[replica].assign(tf.cast(tensor, variable[replica].dtype))

    def _write_to_devices(
        self,
        layout: Layout,
        buckets: Sequence[tf.Tensor],
        variables: Sequence[Sequence[tf.Variable]],
    ) -> None:
        copies = broadcast_to_devices(buckets, self._devices)
        for replica, device in enumerate(self._devices):
            with tf.device(device):
                tensors = layout.unpack(copies[replica])
                for variable, tensor in zip(variables, tensors, strict=True):
                    variable[replica].assign(tf.cast(tensor, variable[replica].dtype))

    def _relative_distance(
        self, local: Sequence[Sequence[tf.Tensor]], average: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        squares = [
            2.0 * tf.nn.l2_loss(w - m)
            for buckets in local
            for w, m in zip(buckets, average, strict=True)
        ]
        norm = tf.add_n([2.0 * tf.nn.l2_loss(m) for m in average])
        return tf.sqrt(tf.add_n(squares) / (len(local) * tf.maximum(norm, 1e-30)))

    def _global_signature(self) -> tf.Tensor:
        """A number that equal global models share and others almost surely do not.

        Computed once for each model that was set from outside.
        """

        def sign() -> tf.Tensor:
            # Sums of the bits, as integers: the same in whatever order a machine adds them.
            sums = [
                (1 + k) * tf.reduce_sum(tf.cast(tf.bitcast(s.global_model, tf.int32), tf.int64))
                for k, s in enumerate(self._rule_state)
            ]
            self._unsigned.assign(False)
            signature = tf.cast(tf.add_n(sums) % (1 << 52), tf.float64)
            return self._signature.assign(signature, read_value=True)

        return tf.cond(self._unsigned, sign, self._signature.read_value)

    def _packed(self, replica: int) -> list[tf.Tensor]:
        with tf.device(self._devices[replica]):
            return self._layout.pack([v[replica] for v in self._variables.weights])


def _layout(variables: Sequence[Sequence[tf.Variable]], bucket_bytes: int) -> Layout:
    return Layout([v[0].shape for v in variables], bucket_bytes)


def _state_variables(state: Any, name: str, make: Callable[[Any, str], tf.Variable]) -> Any:
    """A NamedTuple of variables that holds the NamedTuple `state`."""
    return type(state)(
        *(
            make(tf.convert_to_tensor(value, tf.float32), f"{name}_{field}")
            for field, value in zip(state._fields, state, strict=True)
        )
    )


def _read(variables: Any) -> Any:
    return type(variables)(*(v.read_value() for v in variables))


def _adopt(
    layout: Layout,
    variable: int,
    states: Sequence[Any],
    old_layout: Layout,
    old_variable: int,
    old_states: Sequence[Any],
) -> None:
    """Copies one variable's part of every field, and the scalar fields, from other states."""
    for number, field in enumerate(states[0]._fields):
        if not states[0][number].shape.rank:
            for state in states:
                getattr(state, field).assign(getattr(old_states[0], field))
            continue
        parts = [
            getattr(old_states[bucket], field)[at : at + piece.stop - piece.start]
            for bucket, at, piece in old_layout.places(old_variable)
        ]
        whole = tf.concat(parts, 0)
        for bucket, at, piece in layout.places(variable):
            target = getattr(states[bucket], field)
            target[at : at + piece.stop - piece.start].assign(whole[piece.start : piece.stop])


def _assign_part(variables: Any, values: Any, at: int) -> None:
    """Assigns to `at` … of the flat variables; scalars as they are."""
    for variable, value in zip(variables, values, strict=True):
        if variable.shape.rank:
            variable[at : at + value.shape[0]].assign(value)
        else:
            variable.assign(value)


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
