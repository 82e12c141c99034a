"""The state of the rule and of the averages, in the parts that this worker keeps.

The variables of this state are created here and nowhere else. A *holder* is a local device that
keeps a part of each bucket (see `placement`). A *field* is one array of the state, such as
"rule/global_model", "rule/delta" or "averages/ema/average". A scalar field has one variable for
each part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpara.algorithms.rule import Rule
from tfpara.sync.one_sync.graph_ops import fused
from tfpara.sync.one_sync.placement import ALL, Aggregation, Part, Sharded, cut
from tfpara.sync.one_sync.replicas import Buckets, Replicas
from tfpara.sync.one_sync.sized_rule import SizedRule
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.settings import Settings
from tfpara.typing import Array, State

MakeVariable = Callable[[Array, str], tf.Variable]


class Cell(NamedTuple):
    """One variable of the state: what a field has for one part of a bucket, array or number."""

    field: str
    holder: int
    part: Part
    variable: tf.Variable

    @property
    def is_scalar(self) -> bool:
        """Whether the field is one number, rather than one for each weight."""
        return self.variable.shape.rank == 0


class Update(NamedTuple):
    """A global step that is not written yet.

    buckets: the slice of the list of buckets that the step updates.
    broadcasts: the tensors that the rule broadcasts, by holder and bucket.
    states: the new states, by label, holder and bucket.
    """

    buckets: slice
    broadcasts: list[list[tf.Tensor]]
    states: dict[str, list[list[State]]]


class GlobalState:
    """The state of the rule and of the averages.

    When this object is made, the replicas' weights and filtered moments must be equal on all
    workers.

    Attributes:
        is_new: whether the rule has taken no step since its state was made or has restarted.
    """

    def __init__(self, aggregation: Aggregation, settings: Settings, replicas: Replicas) -> None:
        rule: Any = settings.rule  # typed as Any, since BMUFAdam has methods that Rule lacks
        self.rule = SizedRule(rule, settings.following_rule, replicas.site.make)
        averages, make = settings.averages, replicas.site.make
        self._absent, self._averages = rule.absent, dict(averages)
        self.aggregation = aggregation
        self._site, self._name, self._devices = replicas.site, replicas.site.name, replicas.devices
        buckets = replicas.weights(0)
        moments = replicas.moments(0)
        self.bucket_sizes = [int(b.shape[0]) for b in buckets]
        # The variables of the state, by label ("rule", "averages/NAME" or "moments"), by holder (a
        # device that keeps a part of each bucket) and by bucket.
        self._states: dict[str, list[list[State]]] = {}
        for holder, device in enumerate(aggregation.holders):
            with tf.device(device):
                parts = aggregation.parts(holder)
                own = [cut(buckets[p.bucket], p) for p in parts]
                states = {"rule": list(map(rule.init, own))}
                for label, average in averages.items():
                    states[f"averages/{label}"] = list(map(average.init, own))
                if moments:
                    both = [[cut(kind[p.bucket], p) for p in parts] for kind in moments]
                    states["moments"] = list(map(rule.init_moments, *both))
                for label, of_parts in states.items():
                    kept = [_variables(s, f"{label}_{k}", make) for k, s in enumerate(of_parts)]
                    self._states.setdefault(label, []).append(kept)
        lasting = {f"rule/{name}" for name in rule.lasting}
        self._counts = any(
            cell.is_scalar and cell.field not in lasting and not cell.field.startswith("averages/")
            for cell in self.cells()
        )
        with tf.device("CPU:0"):
            self.is_new = make(tf.constant(True), "is_new")

    def update_moments(
        self, *means: Sequence[Sequence[tf.Tensor]], **of_block: tf.Tensor
    ) -> list[list[State]]:
        """Returns the moments for the next block, for each holder; nothing is written.

        `means` are two, with each holder's parts of the means of the replicas' first and second
        moments. For the other arguments see `BMUFAdam.update_moments`.
        """
        replicas, update = self._site.num_replicas, self.rule.present().update_moments
        with_block = functools.partial(update, num_replicas=replicas, **of_block)
        return self._of_states("moments", with_block, *means)

    def update(
        self, means: Sequence[Sequence[tf.Tensor]], buckets: slice, share: tf.Tensor
    ) -> Update:
        """Takes the rule's and the averages' steps on every local holder; nothing is written.

        `means` has, for each holder, its parts of the mean of the replicas' models, in the slice
        `buckets` of all buckets. The block is the fraction `share` of a whole one.
        """
        labels = [f"averages/{label}" for label in self._averages]
        update = Update(buckets, [], {label: [] for label in ("rule", *labels)})
        rule, (replicas, _) = self.rule.present(), self._site.replicas_now()
        # XLA may be unable to compile a user's rule or average. So the steps are compiled only if
        # the rule and all averages are those of tfpara.
        kinds = map(type, (rule, *self._averages.values()))
        ours = all(kind.__module__.startswith("tfpara.") for kind in kinds)
        for holder, device in enumerate(self.aggregation.holders):
            of_holder = zip(
                *(self._states[label][holder][buckets] for label in ("rule", *labels)), strict=True
            )
            with tf.device(device):
                before: list[tuple[State, list[State], tf.Tensor]] = []
                for mean, (kept, *of_averages) in zip(means[holder], of_holder, strict=True):
                    # The state is read after the bucket's mean has arrived. An earlier read would
                    # run during the exchange of the means, and take time from it.
                    state = self.rule.carried(_read(kept, after=mean))
                    before.append((state, [_read(each, after=mean) for each in of_averages], mean))
                plain = functools.partial(self._steps, rule)
                steps = fused(plain, device) if ours else plain
                # With one replica nothing is sent, so a single function can take the steps of all
                # buckets. Otherwise the step of each bucket is taken as soon as the bucket's mean
                # has arrived.
                together = [before] if self._site.has_one_replica else [[each] for each in before]
                after = [one for some in together for one in steps(some, replicas, share)]
            update.broadcasts.append([broadcast for _, broadcast in after])
            for number, label in enumerate(update.states):
                update.states[label].append([states[number] for states, _ in after])
        return update

    def _steps(
        self,
        rule: Any,
        before: Sequence[tuple[State, Sequence[State], tf.Tensor]],
        replicas: int | tf.Tensor,
        share: tf.Tensor,
    ) -> list[tuple[list[State], tf.Tensor]]:
        """Takes buckets' steps; returns the rule's and averages' states, and the broadcasts."""
        if isinstance(replicas, tf.Tensor):
            replicas = tf.cast(replicas, tf.float32)

        def step(
            state: State, averaged: Sequence[State], mean: tf.Tensor
        ) -> tuple[list[State], tf.Tensor]:
            # Most blocks are whole: `share` is 1. For whole blocks the rule is called without
            # `share`, because the rule then needs fewer passes over the weights.
            after = tf.cond(
                share < 1.0,
                lambda: rule.update(state, mean, replicas, share),
                lambda: rule.update(state, mean, replicas),
            )
            broadcast = rule.broadcast(state, after)
            # The averages are updated only after the broadcast is computed, so that the broadcast
            # can be sent while the averages are updated.
            with tf.control_dependencies([broadcast]):
                new = [
                    average.update(before, after.global_model, share)
                    for average, before in zip(self._averages.values(), averaged, strict=True)
                ]
            return [after, *new], broadcast

        return [step(*each) for each in before]

    def commit(self, update: Update) -> None:
        """Writes the step that `update` returned."""
        self.is_new.assign(False)
        self.rule.commit()
        for label, new in update.states.items():
            for variables, values in zip(self._states[label], new, strict=True):
                for variable, value in zip(variables[update.buckets], values, strict=True):
                    _assign(variable, value)

    def whole(self, field: str) -> list[tf.Tensor]:
        """Returns the whole buckets of a field; every worker must call it."""
        return list(self.in_turn(field))

    def in_turn(self, field: str) -> Iterator[tf.Tensor]:
        """Yields the whole buckets of a field one by one; every worker must take all of them."""
        cells = [cell for cell in self.cells() if cell.field == field]
        for number in range(len(self.bucket_sizes)):
            per_holder = [[c.variable.read_value()] for c in cells if c.part.bucket == number]
            name = f"{self._name}/{field} of bucket {number}"
            (bucket,) = self.aggregation.spread(per_holder, name, slice(number, number + 1))[0]
            yield bucket

    def value(self, which: str) -> list[tf.Tensor]:
        """Returns the buckets of the "global" model or an average; every worker must call it."""
        if which == "global":
            return self.whole("rule/global_model")
        per_holder = self._of_states(f"averages/{which}", self._averages[which].value)
        return self.aggregation.spread(per_holder, f"{self._name}/value of {which}")[0]

    def share_of_start(self, which: str) -> float:
        """Returns how much, 0 to 1, the model before the first sync weighs in average `which`.

        It is 0 if `which` is no average, and from the first sync on for an average that corrects
        for that model.
        """
        if which not in self._averages:
            return 0.0
        states = [s for of_holder in self._states[f"averages/{which}"] for s in of_holder]
        share = max((float(getattr(state, "bias", 0.0)) for state in states), default=0.0)
        return float(share == 1.0) if self.is_corrected(which) else share

    def is_corrected(self, which: str) -> bool:
        """Returns whether `which` is an average that corrects for the model before all syncs."""
        return getattr(self._averages.get(which), "zero_debias", False)

    def set_part(self, bucket: int, at: int, values: tf.Tensor) -> None:
        """Sets elements `at` … of a bucket: they lose their momentum, and averages restart there.

        Some rules keep a count for all elements together: an outer optimizer counts its steps, and
        BMUFAdam the steps that Δ is worth. Such a rule cannot restart in some elements alone,
        unless its count is in `Rule.lasting`. So it restarts in all elements, from the weights that
        it would broadcast.
        """
        if self.restarts_whole:
            self._start_anew()
        stop = at + int(values.shape[0])
        for holder, part in self._held():
            own = self._states["rule"][holder][part.bucket]
            start, end = max(at, part.start), min(stop, part.stop)
            inside = part.bucket == bucket and start < end
            piece = values[start - at : end - at] if inside else values[:0]
            if inside:
                for variable, value in zip(own, self.rule.last().init(piece), strict=True):
                    if variable.shape.rank:  # scalars are common to all elements, and stay
                        variable[start - part.start : end - part.start].assign(value)
            for label, average in self._averages.items():
                state = self._states[f"averages/{label}"][holder][part.bucket]
                # An average whose count is 0 needs no restart: it is new, or it was restarted when
                # another weight was set earlier. A user's average may have no count, and is then
                # restarted again. This does no harm, because it restarts from its present value.
                restarted = "count" in state._fields and float(state.count) == 0.0
                if not inside and restarted:
                    continue
                value = average.value(_read(state))
                if inside:
                    before, after = value[: start - part.start], value[end - part.start :]
                    value = tf.concat([before, piece, after], 0)
                _assign(state, average.init(value))

    @property
    def restarts_whole(self) -> bool:
        """Whether the next `set_part` makes the rule restart in all elements."""
        return self._counts and not bool(self.is_new)

    def _start_anew(self) -> None:
        rule = self.rule.last()
        for holder, part in self._held():
            own = self._states["rule"][holder][part.bucket]
            before = _read(own)
            _assign(own, rule.init(rule.broadcast(before, before)))
        for states in self._states.get("moments", []):
            for state in states:
                _assign(state, rule.init_moments(state.momentum, state.velocity))
        self.is_new.assign(True)

    def cells(self) -> Iterator[Cell]:
        """Yields every variable of the state that this worker keeps."""
        for holder, part in self._held():
            for label, states in self._states.items():
                state = states[holder][part.bucket]
                for name, variable in zip(state._fields, state, strict=True):
                    yield Cell(f"{label}/{name}", holder, part, variable)

    def slots(self) -> Iterator[Slot]:
        """Yields the slots of all cells, and of `is_new`."""
        for cell in self.cells():
            name = f"global/{cell.field}/{cell.part.bucket}/{cell.part.start}"
            owner, _, field = cell.field.rpartition("/")
            absent = None if owner.startswith("averages") else self._absent.get(field)
            yield Slot(name, Kind.HOLDER, cell.variable, absent=absent)
        yield Slot("counter/is_new", Kind.SHARED, self.is_new, absent=False)

    def set_field(self, field: str, buckets: Sequence[tf.Tensor] | tf.Tensor) -> None:
        """Sets a field from whole buckets; a scalar one from one number, or one for each bucket."""
        self.is_new.assign(False)
        for cell in self.cells():
            if cell.field != field:
                continue
            value = buckets[cell.part.bucket] if isinstance(buckets, list) else buckets
            value = value if cell.is_scalar else cut(value, cell.part)
            cell.variable.assign(tf.cast(value, cell.variable.dtype))

    def carry(self, former: Rule) -> None:
        """Converts the state that the rule `former`, of the same kind, has left, for `rule`."""
        rule = self.rule.last()
        if rule is former:
            return
        for holder, part in self._held():
            own = self._states["rule"][holder][part.bucket]
            _assign(own, rule.carry(_read(own), former))

    def measured_from(
        self, received: Sequence[Sequence[tf.Tensor]], buckets: slice
    ) -> list[list[tf.Tensor]]:
        """Returns `Rule.measured_from` of each holder's parts of the points `received`."""
        return self._of_states("rule", self.rule.last().measured_from, received, buckets=buckets)

    def restart(self, *of_devices: Sequence[Buckets]) -> list[list[tf.Tensor]]:
        """Returns for each device the buckets from which its replica continues after a sync.

        Given are buckets for every device: the replicas' present weights; if they have trained
        since the sync began, their weights at its begin; and the weights that the rule broadcast.
        """
        rule = self.rule.present()
        restart = rule.restart if len(of_devices) == 2 else rule.restart_delayed
        restarted = []
        for device, *buckets in zip(self._devices, *of_devices, strict=True):
            with tf.device(device):
                restarted.append([restart(*each) for each in zip(*buckets, strict=True)])
        return restarted

    def broadcast_point(self) -> list[tf.Tensor]:
        """See `Synchronizer.broadcast_point`."""
        rule = self.rule.last()
        per_holder = self._of_states("rule", lambda state: rule.broadcast(state, state))
        return self.aggregation.spread(per_holder, f"{self._name}/broadcast point")[0]

    @property
    def is_sharded(self) -> bool:
        """Whether each replica keeps a part of the state; else every worker keeps the whole."""
        return isinstance(self.aggregation, Sharded)

    @property
    def is_broadcast(self) -> bool:
        """Whether all replicas continue from the global model itself after a sync."""
        rule = self.rule.last()
        state = rule.init(np.zeros(1, np.float32))
        return rule.overwrites and rule.broadcast(state, state) is state.global_model

    @property
    def nbytes(self) -> list[int]:
        """The number of bytes of state that each local holder keeps."""
        totals = [0] * len(self.aggregation.holders)
        for cell in self.cells():
            totals[cell.holder] += cell.variable.shape.num_elements() * cell.variable.dtype.size
        return totals

    def _of_states(
        self,
        label: str,
        function: Callable[..., Any],
        *arguments: Sequence[Sequence[tf.Tensor]],
        buckets: slice = ALL,
    ) -> list[list[Any]]:
        """Returns, for each holder, a function of each state of a label in a slice of the buckets.

        The function also gets one of each of the `arguments`, which are by holder and bucket, too.
        """
        results = []
        by_holder = zip(self.aggregation.holders, self._states[label], *arguments, strict=True)
        for device, states, *others in by_holder:
            with tf.device(device):
                read = [_read(state) for state in states[buckets]]
                results.append([function(*each) for each in zip(read, *others, strict=True)])
        return results

    def _held(self) -> Iterator[tuple[int, Part]]:
        for holder in range(len(self.aggregation.holders)):
            for part in self.aggregation.parts(holder):
                yield holder, part


def _variables(state: State, name: str, make: MakeVariable) -> State:
    """Returns variables with the values of `state`."""
    return type(state)(
        *(
            make(tf.convert_to_tensor(value), f"{name}_{field}")
            for field, value in zip(state._fields, state, strict=True)
        )
    )


def _read(variables: State, after: tf.Tensor | None = None) -> State:
    """Reads variables, once the tensor `after` is computed."""
    with tf.control_dependencies([] if after is None else [after]):
        return type(variables)(*(v.read_value() for v in variables))


def _assign(variables: State, values: State) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
