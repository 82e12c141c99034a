"""The synchronizer, which keeps the replicas of one model together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpara.contexts import attributes
from tfpara.sync.one_sync.graph import SyncGraph
from tfpara.sync.one_sync.graph_ops import NotInlined, where
from tfpara.sync.one_sync.overlap import Overlap
from tfpara.sync.one_sync.replicas import Buckets, ReplicaVariables, Site, assign
from tfpara.sync.one_sync.reports import signature_of
from tfpara.sync.one_sync.state_vars import Slot
from tfpara.sync.one_sync.statistics import Agreement
from tfpara.sync.settings import NEVER, Settings


class Synchronizer:
    """The syncs of one model. `name` is the prefix of the names of its exchanges."""

    def __init__(self, variables: ReplicaVariables, settings: Settings, site: Site) -> None:
        self.name = site.name
        self._variables = variables
        self._site = site
        # The replicas' own weights, by device, while `showing` has put other weights into the
        # model's variables; else None.
        self._own: list[list[tf.Tensor]] | None = None
        self._shown: str | None = None  # the name given to `showing`, inside its context
        # If the global model is in parts on several workers, the chief keeps a copy of the whole
        # model: `_gathered` has its buckets, in the host's memory. `_gathered_at` is the number of
        # syncs when the copy was made. It is -1 if there is no copy, or if the copy is out of date.
        self._gathered: list[tf.Tensor] = []
        self._gathered_at = -1
        self._places = variables.places()
        self.graph = SyncGraph(variables, settings, site)
        self._overlap = Overlap(self.graph, settings.overlap, site) if settings.overlap else None
        self._device_period = settings.device_sync_period
        with tf.device("CPU:0"):
            self._device_steps = site.make(tf.zeros([], tf.int64), "device_steps")
            self._device_samples = site.make(
                tf.zeros([len(site.devices)], tf.float64), "device_samples"
            )
        self._average_devices = NotInlined(self._average_devices_step)

    # -- steps and syncs ---------------------------------------------------------------------

    def count(
        self,
        samples: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        nonfinite: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Counts a minibatch of each local replica; returns whether `act` has something to do.

        Given are each minibatch's number of samples, its weight in the mean of the replicas, and
        whether it was left out for NaN or Inf; `nonfinite` is empty if none is ever left out.
        """
        # The host decides by the result whether to call `act`. If a GPU computed the result, the
        # host would have to wait for the GPU in every step.
        with tf.device("CPU:0"):
            of_each = [tf.cast(n, tf.float64) for n in samples]
            counts = [tf.cast(n, tf.float64) for n in weights]
            if nonfinite and self.graph.left_out is not None:
                self.graph.left_out.count(nonfinite)
                none = tf.zeros([], tf.float64)
                of_each = [tf.where(b, none, n) for b, n in zip(nonfinite, of_each, strict=True)]
                counts = [tf.where(b, none, n) for b, n in zip(nonfinite, counts, strict=True)]
            of_all = tf.add_n(of_each)
            steps = self.graph.block.count(of_all, counts, samples)
            due = self._is_due(steps)
            if self._device_period is not None:
                self._device_samples.assign_add(tf.stack(counts))
                due |= self._device_steps.assign_add(1) >= self._device_period
            return due

    def act_if(self, due: tf.Tensor) -> None:
        """Calls `act` if something is due; where Python code calls the syncs, without the sync."""
        if self._site.company.syncs_in_steps or tf.executing_eagerly():
            where(due, self.act)
        elif self._device_period is not None:
            where(due, self._average_devices_if_due)

    def is_due(self) -> bool:
        """Returns whether a sync is due, or the merge of one in flight; for Python code."""
        return bool(self._is_due(self.graph.block.steps.read_value()))

    def _is_due(self, steps: tf.Tensor) -> tf.Tensor:
        if self._overlap is not None:
            return self._overlap.is_due(steps)
        return steps >= self.graph.block.due()

    def act(self) -> None:
        """Averages the local replicas if that is due; syncs all replicas if that is due."""
        with tf.device("CPU:0"):
            if self._device_period is not None:
                self._average_devices_if_due()
            if self._overlap is not None:
                self._overlap.act()
            elif self._device_period is None:
                # `act` is called if `count` has found something due. Here that can only be a sync.
                self.graph.sync(tf.constant(True))
            else:
                due = self._is_due(self.graph.block.steps.read_value())
                where(due, lambda: self.graph.sync(tf.constant(True)))

    def _average_devices_if_due(self) -> None:
        with tf.device("CPU:0"):
            devices_due = self._device_steps.read_value() >= self._device_period
            where(devices_due, self._average_devices)

    def _average_devices_step(self) -> None:
        """Sets the local replicas to their mean."""
        samples = self._device_samples.read_value()
        never = self.graph.block.period >= NEVER
        self.graph.replicas.average_devices(tf.where(never, tf.zeros_like(samples), samples))
        self._device_samples.assign(tf.zeros_like(self._device_samples))
        self._device_steps.assign(0)

    def finish_block(self) -> None:
        """Closes the open block: takes part in syncs until every worker has called it."""
        if self._device_period is not None:
            self._average_devices()
        with self._watched():
            if self._overlap is not None:
                self._overlap.end()
            while not bool(self.graph.sync(tf.constant(False))):
                pass
            self._gather()

    def rehearse(self) -> None:
        """Runs a sync of this worker alone, so that TensorFlow sets up its functions."""
        if self._overlap is not None:
            self._overlap.start()
        self.finish_block()

    def settle(self) -> None:
        """Ends a sync in flight, whether its exchange has succeeded or failed: `Overlap.settle`."""
        if self._overlap is not None:
            self._overlap.settle()

    def meet(self, number: float) -> list[float]:
        """Waits for a sync in flight, then exchanges a number; returns all workers' by rank."""
        self.land()
        with self._watched():
            return self.graph.meet(tf.constant(number, tf.float64)).numpy().tolist()

    def give_up_block(self) -> None:
        """Drops the counters of the open block, whose work a checkpoint replaces.

        Every worker must call it, since it waits for a sync in flight.
        """
        if self._overlap is not None:
            self._overlap.flight.give_up()
        self.graph.block.give_up()
        self._device_steps.assign(0)
        self._device_samples.assign(tf.zeros_like(self._device_samples))
        self._gathered_at = -1

    def land(self) -> Agreement:
        """Waits for a sync in flight, if there is one; returns the agreement of all workers.

        Every worker must call it at the same step. The replicas' weights do not change.
        """
        if self._overlap is not None:
            with self._watched():
                self._overlap.await_landing()
        return self.agreement()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A context for a sync from Python code; if that fails, the watchdog sees no wait."""
        try:
            yield
        except BaseException:
            self.graph.forget_waiting()
            raise

    def step_is_over(self) -> None:
        """Notes that no training step runs, so any wait still noted is of a sync that failed."""
        if not self._in_the_air:
            self.graph.forget_waiting()

    # -- agreement and period ----------------------------------------------------------------

    @property
    def _in_the_air(self) -> bool:
        return self._overlap is not None and self._overlap.flight.in_the_air

    @property
    def in_flight(self) -> bool:
        """Whether a sync has begun and is not merged yet."""
        return self._overlap is not None and self._overlap.flight.is_open

    @property
    def open_steps(self) -> int:
        """Minibatches of each replica that are in no sync that has ended, if the model is whole."""
        steps = self.graph.block.trained
        if self._overlap is not None and self._in_the_air:
            rows = self._overlap.flight.rows.numpy()
            steps += int(rows[0, self.graph.consensus.columns.steps.start])
        return steps

    @property
    def sync_period(self) -> int | None:
        """The sync period τ; None while there are no syncs."""
        period = int(self.graph.block.period)
        return None if period >= NEVER else period

    def agreement(self) -> Agreement:
        """Returns the agreement of the last sync that is not in flight."""
        request, all_running = self.graph.agreed()
        return Agreement(
            request=request,
            all_running=all_running,
            syncs=self.graph.syncs + self._in_the_air,
            block_open=int(self.graph.block.steps) > 0,
        )

    # -- weights -----------------------------------------------------------------------------

    def has_any_of(self, components: Sequence[tf.Variable]) -> bool:
        """Returns whether any of these is the first device's component of a weight of the model."""
        mine = {id(v[0]) for v in self._variables.weights}
        return any(id(component) in mine for component in components)

    def was_set(self, component: tf.Variable) -> None:
        """Takes over the value of a variable that Python code has set, equally on all devices.

        The new value of a weight also becomes its value in the global model. The weight's momentum
        becomes zero, and its averages restart from the new value. A variable that is not the
        model's is ignored. `component` is the one on the first device.
        """
        kind, index = self._places.get(id(component), ("", 0))
        if kind == "weight" and self.shows_others:
            raise ValueError(
                "a weight is set while strategy.weights(...) shows other weights than those of "
                "the replicas; the new value would be lost at the end of the with block. Read the "
                "weights in the block, and set them after it."
            )
        graph = self.graph
        given = tf.identity(component)
        value = tf.reshape(tf.cast(given, tf.float32), [-1])
        if kind == "state":
            for bucket, at, piece in graph.replicas.state_layout.places(index):
                graph.averaging.anchors[bucket][at : at + piece.stop - piece.start].assign(
                    value[piece.start : piece.stop]
                )
        if kind == "weight":
            keepers: list[Any] = [graph.global_state]
            keepers += [graph.compressed] if graph.compressed is not None else []
            if self._overlap is not None:
                self._site.company.land(self)
                # If a worker was lost meanwhile, the variables may have another worker's weights.
                assign([self._variables.weights[index]], [[given]] * len(self._site.devices))
                keepers.append(self._overlap.flight)
            anew = graph.global_state.restarts_whole
            for bucket, at, piece in graph.replicas.layout.places(index):
                for keeper in keepers:
                    keeper.set_part(bucket, at, value[piece.start : piece.stop])
            self._set_gathered(index, value, anew)
            graph.consensus.signatures[index].assign(signature_of(value))
        if kind in ("state", "frozen"):
            others = index if kind == "state" else len(self._variables.state) + index
            graph.consensus.other_signatures[others].assign(signature_of(value))

    def _set_gathered(self, index: int, value: tf.Tensor, anew: bool) -> None:
        """Puts `value`, the flat new value of weight `index`, into the gathered global model.

        `anew`: whether the rule restarts in all weights, from the weights that it would broadcast.
        """
        graph = self.graph
        if anew and not graph.global_state.rule.last().overwrites:
            # The copy is out of date: the rule restarts from a model that no worker has as a whole.
            self._gathered_at = -1
        if not self._is_gathered or not self._gathered:
            return
        with tf.device("CPU:0"):
            if anew:
                self._gathered = [tf.identity(bucket) for bucket in graph.replicas.weights(0)]
            for bucket, at, piece in graph.replicas.layout.places(index):
                former, new = self._gathered[bucket], value[piece.start : piece.stop]
                self._gathered[bucket] = tf.concat([former[:at], new, former[at + len(new) :]], 0)

    def global_weights(self, which: str) -> list[tf.Tensor]:
        """Returns the "global" model or a named average; every worker must call it."""
        with self.graph.waiting():
            return self._whole_weights(self.graph.global_state.value(which))

    def _whole_weights(self, buckets: Buckets) -> list[tf.Tensor]:
        replicas = self.graph.replicas
        return replicas.constrained(replicas.layout.unpack(buckets))

    @property
    def shows_others(self) -> bool:
        """Whether `showing` has put other weights than the replicas' own into the variables."""
        return self._own is not None

    @contextlib.contextmanager
    def showing(self, which: str) -> Iterator[None]:
        """Shows the "global" model, a named average or the "local" weights in the variables.

        Every worker must enter, while the block is closed.
        """
        with attributes(self, _shown=which):
            if which == "local" and self._own is None:
                yield
                return
            count = len(self._site.devices)
            of_all = self._own if which == "local" else [self.global_weights(which)] * count
            assert of_all is not None
            with self._holding(of_all):
                yield

    @contextlib.contextmanager
    def _holding(self, per_device: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        weights, outer = self._variables.weights, self._own
        held = [[tf.identity(v[k]) for v in weights] for k in range(len(self._site.devices))]
        try:
            self._own = held if outer is None else outer
            assign(weights, per_device)
            yield
        finally:
            assign(weights, held)
            self._own = outer

    # -- the global model in files -----------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, note: Callable[[str], None]) -> Iterator[None]:
        """Puts the global model into the variables while a file is written.

        Nothing is exchanged, since the chief may write alone. The variables stay as they are inside
        `showing`, or if there are no syncs. Within a block the global model is that of the last
        sync, and `note` prints a note. If each worker has only a part of the model, the chief has
        the whole as of the last block that was closed; after a later sync, the variables stay.
        """
        closed = not self.graph.block.is_open and not self.in_flight
        stays = self._shown is not None or self.sync_period is None
        if stays or (closed and self._replicas_have_it):
            yield
            return
        weights, has = None, "the weights of the chief's first replica"
        if not self._is_in_parts:
            if self._overlap is not None:
                self._overlap.flight.wait()  # a sync under way may write the global model
            weights, has = self.global_weights("global"), "the global model of the last sync"
        elif closed and self._is_gathered:
            with tf.device("CPU:0"):
                weights = self._whole_weights(self._gathered)
        if weights is None or not closed:
            note(
                f"a model is saved within a block: the file has {has}. Save where an epoch ends, "
                "or call strategy.synchronize() on every worker before."
            )
        given = None if weights is None else [weights] * len(self._site.devices)
        with self._holding(given) if given else contextlib.nullcontext():
            yield

    @property
    def _is_in_parts(self) -> bool:
        """Whether the global model is in parts on several workers."""
        return self.graph.global_state.is_sharded and self._site.collectives.size > 1

    @property
    def _replicas_have_it(self) -> bool:
        """Whether a sync leaves the global model itself, to the bit, in all replicas."""
        return self.graph.compressed is None and self.graph.global_state.is_broadcast

    @property
    def _is_gathered(self) -> bool:
        return self._gathered_at == self.graph.syncs

    def _gather(self) -> None:
        """Gathers the global model for the chief, if it is in parts and has changed.

        The buckets are gathered one by one, so that no device has to hold more than one of them.
        Every worker must call it, while the block is closed.
        """
        if not self._is_in_parts or self._replicas_have_it or self._is_gathered:
            return
        self._gathered = []
        with self.graph.waiting():
            for bucket in self.graph.global_state.in_turn("rule/global_model"):
                if self._site.collectives.rank == 0:
                    with tf.device("CPU:0"):
                        self._gathered.append(tf.identity(bucket))
        self._gathered_at = self.graph.syncs

    def was_put_back(self) -> None:
        """Notes that the state of an earlier point of the run was restored."""
        self._gathered_at = -1
        self._gather()

    def restart(self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor]) -> None:
        """Sets all replicas to these weights and state; momentum and averages restart from them.

        Every worker must call it, with equal tensors, right after a sync.
        """
        count = len(self._site.devices)
        assign(self._variables.weights, [tensors] * count)
        assign(self._variables.state, [state] * count)
        for variable in (*self._variables.weights, *self._variables.state):
            self.was_set(variable[0])
        if self._variables.moments:
            self.graph.averaging.restart_moments()
            counts = [[tf.cast(c, tf.float64) for c in own] for own, _ in self._variables.counts]
            largest = tf.reduce_max(tf.stack(counts), 1)  # the largest of this worker's replicas
            table = self._site.reports.all_gather(largest, f"{self.name}/counts")
            self.graph.replicas.write_counts(tf.reduce_max(table, 0))

    def replica_values(self, replica: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        weights, state = self._variables.weights, self._variables.state
        return [tf.identity(v[replica]) for v in weights], [tf.identity(v[replica]) for v in state]

    # -- state -------------------------------------------------------------------------------

    def slots(self) -> Iterator[Slot]:
        yield from self.graph.slots()
        if self._overlap is not None:
            yield from self._overlap.flight.slots()

    def broadcast_point(self) -> list[tf.Tensor]:
        """Returns the weights from which replicas that took no part in the last sync continue.

        Their constraints are not applied. Every worker must call it.
        """
        return self.graph.replicas.layout.unpack(self.graph.global_state.broadcast_point())

    def start_from(self, weights: Sequence[tf.Tensor]) -> None:
        """Makes all replicas begin the block anew from these weights; every worker must call it."""
        graph, count = self.graph, len(self._site.devices)
        assign(self._variables.weights, [graph.replicas.constrained(weights)] * count)
        graph.averaging.start_moments()
        if graph.compressed is not None:
            graph.compressed.begin_anew()

    def open_fragments(self, pending_samples: Sequence[tf.Tensor]) -> list[bool]:
        """Returns for each weight whether its fragment was trained since its last sync.

        `pending_samples` are `Block.samples` of all replicas, from a checkpoint.
        """
        runs = self.graph.replicas.layout.variables
        return [
            any(own[fragment] > 0 for own in pending_samples)
            for fragment, run in enumerate(runs)
            for _ in range(run.start, run.stop)
        ]

    def leave(
        self,
        is_left: Callable[[tf.Variable], bool],
        from_chief: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Gives all replicas the same values of the weights that are left to another synchronizer.

        `is_left` tells that by the weight's component on the first device. If there are no syncs,
        these are the values of the chief's first replica: `from_chief` takes each worker's own
        tensor and returns the chief's. If the rule leaves the replicas apart, they are the values
        of the global model. Every worker must call it, while the block is closed.
        """
        left = [i for i, v in enumerate(self._variables.weights) if is_left(v[0])]
        if not left:
            return
        graph = self.graph
        if self.sync_period is None:
            values = graph.replicas.layout.unpack(list(map(from_chief, graph.replicas.weights(0))))
        elif not graph.global_state.rule.last().overwrites:
            values = self.global_weights("global")
        else:
            return  # all replicas have the same weights already
        variables = [self._variables.weights[i] for i in left]
        assign(variables, [[values[i] for i in left]] * len(self._site.devices))
