"""The local replicas' variables, packed into flat buckets for a sync and written back from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpara.cluster.call_site import CallSite
from tfpara.collectives import Collectives, Loopback, broadcast_to_devices
from tfpara.keras_model import constrained
from tfpara.sync.data.balance import Balance
from tfpara.sync.one_sync.buckets import Layout
from tfpara.sync.one_sync.graph_ops import fused
from tfpara.sync.settings import Settings
from tfpara.sync.workers.company import Company
from tfpara.sync.workers.data_place import first_replica_of
from tfpara.typing import Scalar

Buckets = Sequence[tf.Tensor]
BUCKET_BYTES = 8 << 20  # size in bytes of the largest buffer that is sent in one piece
# The bits of a float32 NaN, from which a graph makes the NaN when it runs. A graph with a constant
# NaN of a float type would fail under tf.debugging.enable_check_numerics().
_BITS_OF_NAN = 0x7FC00000


class Site(NamedTuple):
    """The place of this worker among all workers that train a model, and its links to them.

    name: prefix of the names of the model's exchanges; unique in a run, the same on every worker.
    num_replicas: N, over all workers, at the start of the run.
    devices: one for each local replica, the lead device first.
    collectives: between the workers' lead devices, for the weights.
    reports: collectives between the workers' hosts, for the reports.
    make: see `tfpara.sync.tensorflow.variables.plain_variable`.
    period: a variable with the sync period in minibatches, for all models of the strategy.
    balance: the lengths of the workers' blocks; None: all blocks are as long as the sync period.
    """

    name: str
    num_replicas: int
    company: Company
    devices: Sequence[str]
    collectives: Collectives
    reports: Collectives
    call_site: CallSite
    make: Callable[..., tf.Variable]
    period: tf.Variable
    balance: Balance | None = None

    def replicas_now(self) -> tuple[Scalar, Scalar]:
        """Returns N, and the index of this worker's first replica; in an elastic run as tensors."""
        return self.company.replicas_now(len(self.devices))

    def workers_now(self) -> tuple[Scalar, Scalar]:
        """Returns the number of workers, and this one's rank; in an elastic run as tensors."""
        if not self.company.changes:
            return self.collectives.size, self.collectives.rank
        replicas, first = (tf.cast(number, tf.int64) for number in self.replicas_now())
        return replicas // len(self.devices), first // len(self.devices)

    def first_replicas(self, replicas: int) -> Sequence[int]:
        """Returns for each worker the number of its first replica, among `replicas` in all."""
        unlike = self.company.unlike_devices
        workers = len(unlike) or replicas // len(self.devices)
        return [first_replica_of(each, len(self.devices), unlike) for each in range(workers)]

    @property
    def is_alone(self) -> bool:
        """Whether this worker trains alone, now and later."""
        return isinstance(self.reports, Loopback)

    @property
    def has_one_replica(self) -> bool:
        """Whether a single replica trains, from the beginning to the end of the run."""
        return self.num_replicas == 1 and self.is_alone


@dataclasses.dataclass
class ReplicaVariables:
    """The variables that a sync reads and writes: for each, its component on each local device.

    weights: trainable variables, to which the rule is applied.
    constraints: the Keras constraint of each weight, or None.
    state: other float variables, such as batch-norm statistics, which are averaged without a rule.
    slots: the optimizers' slots that a sync resets or averages.
    slot_resets: values of the slots after a reset.
    local_state: "keep", "reset" or "average": the effect of a sync on the slots.
    frozen: weights that are not trained, which no sync reads or writes.
    moments: the first and the second moments, if the rule filters them.
    counts: step counts of optimizers that are the same on all replicas after a sync, each with the
        number of steps over which gradients are accumulated.
    counts_to_reset: the same, of optimizers whose count a sync sets back together with `slots`.
    rates: learning rates that Python code can set. They must be equal on all replicas.
    """

    weights: Sequence[Sequence[tf.Variable]]
    weight_names: Sequence[str]
    constraints: Sequence[Callable[[tf.Tensor], tf.Tensor] | None]
    state: Sequence[Sequence[tf.Variable]]
    state_names: Sequence[str]
    slots: Sequence[Sequence[tf.Variable]]
    slot_names: Sequence[str]
    slot_resets: Sequence[float]
    local_state: str
    frozen: Sequence[Sequence[tf.Variable]]
    moments: Sequence[Sequence[Sequence[tf.Variable]]]
    counts: Sequence[tuple[Sequence[tf.Variable], int]]
    counts_to_reset: Sequence[tuple[Sequence[tf.Variable], int]]
    rates: Sequence[Sequence[tf.Variable]]

    def places(self) -> dict[int, tuple[str, int]]:
        """Returns (kind, number in its kind) by the `id` of each variable's first component."""
        kinds = {"weight": self.weights, "state": self.state, "frozen": self.frozen}
        return {id(v[0]): (kind, i) for kind, of in kinds.items() for i, v in enumerate(of)}


class Replicas:
    """The variables of a worker's replicas, packed into buckets and written from them."""

    def __init__(self, variables: ReplicaVariables, settings: Settings, site: Site) -> None:
        self.variables = variables
        self.site = site
        self.devices = list(site.devices)
        self._local_state = variables.local_state
        self.averaged_slots = variables.slots if self._local_state == "average" else []
        shapes = [v[0].shape for v in variables.weights]
        self.layout = Layout(shapes, BUCKET_BYTES, settings.fragments)
        self.state_layout = Layout([v[0].shape for v in variables.state], BUCKET_BYTES)
        self.slot_layout = Layout([v[0].shape for v in self.averaged_slots], BUCKET_BYTES)
        slot_names = variables.slot_names if self.averaged_slots else []
        self.averaged_names = [*variables.weight_names, *variables.state_names, *slot_names]

    def summary(self, replica: int, anchors: Buckets) -> tf.Tensor:
        """Returns the numbers of a replica's report that its device computes, as float64."""
        device = self.devices[replica]
        with tf.device(device):
            return fused(functools.partial(self._summary, replica), device)(list(anchors))

    def _summary(self, replica: int, anchors: Buckets) -> tf.Tensor:
        # A sum is finite only if all its terms are, and takes one pass and no memory.
        weights, slots = (
            [tf.reduce_sum(tf.cast(v[replica], tf.float32)) for v in of_kind]
            for of_kind in (self.variables.weights, self.averaged_slots)
        )
        # State may have huge numbers, such as those of a mask, so only its changes must be finite.
        moved = self.state_layout.unpack(self._moved(replica, anchors))
        finite = [tf.reduce_all(tf.math.is_finite(m)) for m in moved]
        state = [tf.bitcast(tf.where(each, 0, _BITS_OF_NAN), tf.float32) for each in finite]
        sums = tf.stack([*weights, *state, *slots])
        counts = [count for count, _ in self.variables.counts]
        others = [v[replica] for v in (*counts, *self.variables.rates)]
        exact = [tf.cast(other, tf.float64)[tf.newaxis] for other in others]
        return tf.concat([tf.cast(sums, tf.float64), *exact], 0)

    def weights(self, replica: int, fragment: int | None = None) -> list[tf.Tensor]:
        """Returns the buckets of a replica's weights: of one fragment, or, if None, of all."""
        run = slice(None) if fragment is None else self.layout.variables[fragment]
        own = self.variables.weights[run]
        with tf.device(self.devices[replica]):
            return self.layout.pack([v[replica] for v in own], fragment)

    def all_weights(self, fragment: int) -> list[list[tf.Tensor]]:
        return [self.weights(replica, fragment) for replica in range(len(self.devices))]

    def moments(self, replica: int) -> list[list[tf.Tensor]]:
        """Returns the buckets of a replica's first and second moments; empty: none are filtered."""
        moments = self.variables.moments
        with tf.device(self.devices[replica]):
            return [self.layout.pack([v[replica] for v in slots]) for slots in moments]

    def write_counts(self, furthest: tf.Tensor) -> None:
        for k, (count, cycle) in enumerate(self.variables.counts):
            for component in count:
                with tf.device(component.device):
                    newest = tf.cast(furthest[k], component.dtype)
                    # The remainder modulo `cycle` stays, since it counts the gradients that this
                    # replica has accumulated for its next step.
                    component.assign(newest - newest % cycle + component % cycle)

    def others(self, replica: int, anchors: Buckets) -> list[tf.Tensor]:
        """Returns a replica's buckets of state minus `anchors`, then those of averaged slots."""
        with tf.device(self.devices[replica]):
            # A sync averages the changes of the state since the last sync, so that unchanged values
            # stay exact.
            moved = self._moved(replica, anchors)
            return [*moved, *self.slot_layout.pack([v[replica] for v in self.averaged_slots])]

    def _moved(self, replica: int, anchors: Buckets) -> list[tf.Tensor]:
        state = self.state_layout.pack([v[replica] for v in self.variables.state])
        return [_difference(s, a) for s, a in zip(state, anchors, strict=True)]

    def write_weights(self, per_device: Sequence[Buckets], fragment: int) -> None:
        """Applies the constraints to a fragment's weights, and writes them on each device."""
        for replica, buckets in enumerate(per_device):
            device = self.devices[replica]
            write = functools.partial(self._write_weights, replica, fragment)
            with tf.device(device):
                # XLA may be unable to compile a user's constraint, so with constraints the function
                # is not fused.
                constraints = any(self.variables.constraints)
                (write if constraints else fused(write, device))(list(buckets))

    def _write_weights(self, replica: int, fragment: int, buckets: Buckets) -> None:
        run = self.layout.variables[fragment]
        tensors = self.constrained(self.layout.unpack(buckets, fragment), run)
        assign_on(replica, self.variables.weights[run], tensors)

    def constrained(
        self, weights: Sequence[tf.Tensor], run: slice = slice(None)
    ) -> list[tf.Tensor]:
        """Applies the Keras constraints to weights and returns them.

        It must be called for all weights from which replicas continue, or that are shown. No
        constraint is applied to the state of the rule and the averages, since a part of a flat
        vector may have only a piece of a weight. `run`: the slice of all weights that they are.
        """
        constraints = self.variables.constraints[run]
        if not any(constraints):
            return list(weights)
        dtypes = [of_devices[0].dtype for of_devices in self.variables.weights[run]]
        return constrained(
            [tf.cast(w, dtype) for w, dtype in zip(weights, dtypes, strict=True)], constraints
        )

    def write_moments(self, field: str, spread: Sequence[Buckets]) -> None:
        """Writes the field "momentum" or "velocity" of the moments, from each device's buckets."""
        slots = self.variables.moments[0 if field == "momentum" else 1]
        for replica, buckets in enumerate(spread):
            with tf.device(self.devices[replica]):
                assign_on(replica, slots, self.layout.unpack(buckets))

    def write_others(self, state: Buckets, slots: Buckets) -> None:
        """Writes the same state and averaged slots on all devices; resets slots if they are."""
        for layout, buckets, variables in (
            (self.state_layout, state, self.variables.state),
            (self.slot_layout, slots, self.averaged_slots),
        ):
            copies = broadcast_to_devices(buckets, self.devices)
            for replica, (device, copy) in enumerate(zip(self.devices, copies, strict=True)):
                with tf.device(device):
                    assign_on(replica, variables, layout.unpack(copy))
        if self._local_state == "reset":
            for slot, value in zip(self.variables.slots, self.variables.slot_resets, strict=True):
                for component in slot:
                    with tf.device(component.device):
                        component.assign(tf.fill(component.shape, tf.cast(value, component.dtype)))
            for count, cycle in self.variables.counts_to_reset:
                for component in count:
                    with tf.device(component.device):
                        component.assign(component % cycle)

    def average_devices(self, samples: tf.Tensor) -> None:
        """Sets the weights and state of all local replicas to their mean.

            w_i ← w_0 + Σ_j (n_j / Σ_k n_k) (w_j − w_0),  then the weight's constraint

        n_i, in `samples`, is the sum of the weights of replica i's minibatches since the replicas
        were last equal. If all n_i are 0, nothing changes.
        """
        total = tf.reduce_sum(samples)
        shares = tf.unstack(tf.cast(tf.math.divide_no_nan(samples, total), tf.float32))
        variables = self.variables
        weights = zip(variables.weights, variables.constraints, strict=True)
        kinds = [(v, tf.subtract, constraint) for v, constraint in weights]
        kinds += [(v, _difference, None) for v in variables.state]
        for variable, minus, constraint in kinds:
            with tf.device(self.devices[0]):
                values = [tf.cast(component, tf.float32) for component in variable]
                # The differences from the first replica are averaged, so that equal values stay
                # exact.
                moved = [
                    s * minus(v, values[0]) for s, v in zip(shares[1:], values[1:], strict=True)
                ]
                mean = tf.cast(tf.add_n([values[0], *moved]), variable[0].dtype)
                (mean,) = constrained([mean], [constraint])
            for component, own in zip(variable, values, strict=True):
                with tf.device(component.device):
                    own = tf.cast(own, component.dtype)
                    component.assign(tf.where(total > 0.0, mean, own))


def _difference(values: tf.Tensor, former: tf.Tensor) -> tf.Tensor:
    """Returns `values - former`, but 0 where the two are equal, even if they are infinite."""
    return tf.where(tf.equal(values, former), tf.zeros_like(values), values - former)


def assign(
    variables: Sequence[Sequence[tf.Variable]], per_device: Sequence[Sequence[tf.Tensor]]
) -> None:
    """Assigns tensors to the variables' components; `per_device` has a list for each device."""
    for replica, tensors in enumerate(per_device):
        assign_on(replica, variables, tensors)


def assign_on(
    replica: int, variables: Sequence[Sequence[tf.Variable]], tensors: Sequence[tf.Tensor]
) -> None:
    """Assigns tensors to the variables' components of one local replica."""
    for variable, tensor in zip(variables, tensors, strict=True):
        component = variable[replica]
        with tf.device(component.device):
            component.assign(tf.cast(tensor, component.dtype))
