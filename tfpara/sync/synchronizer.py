"""The periodic step: when replicas sync, and agreeing on when to stop.

A sync has two phases. First every replica sends a short *report* (samples since the last sync,
whether it still has data, whether its weights are finite, what its worker asks for). All workers
decide from the same table of reports: stop with an error, skip, or commit. Then, in the second
phase, the weights travel. The weights of no replica are touched before every buffer has arrived.

Of an overlapped sync (see `tfpara.sync.flight`) both phases run in a thread, with copies of weights
and reports; its results are merged a fixed number of steps later. The model may have *fragments*,
which take turns at the sync points. Where a block is closed (an epoch ends, weights are looked at)
a sync in the air is merged first, and the last sync is one of all fragments, in the training
thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpara.sync.buffers import Layout
from tfpara.sync.flight import FLYING, NONE
from tfpara.sync.overlapped import OverlappedSteps
from tfpara.sync.replicas import Buckets, assign
from tfpara.sync.reports import Request, signature_of, stop_if
from tfpara.sync.state import Kind, Slot
from tfpara.sync.statistics import Agreement, SyncStatistics
from tfpara.sync.sync_steps import NEVER

LOCAL_STATE = ("keep", "reset", "average")


class Synchronizer(OverlappedSteps):
    """Keeps the replicas of one model together: what the strategy calls, from Python.

    Its arguments are those of `SyncSteps` and `OverlappedSteps`.
    """

    @property
    def name(self) -> str:
        """The same on every worker, and another for each model."""
        return self._name

    def finish_block(self) -> None:
        """Takes part in syncs until every worker has come here; closes the open block."""
        if self._device_period is not None:
            self._average_devices()
        with self._watched():
            if self._flight is not None:
                self.merge()
            while not bool(self.sync(tf.constant(False))):
                pass

    def meet(self, number: float) -> list[float]:
        """What each worker has given, by rank, in an exchange that no sync can be taken for.

        Every worker must call it; a sync that is in the air is waited for.

        Raises:
            tf.errors.InvalidArgumentError: on every worker, if one has come to something else.
        """
        self.land()
        with self._watched():
            numbers, problem = self._meet(tf.constant(number, tf.float64))
            stop_if(problem)
        return numbers.numpy().tolist()

    def give_up_block(self) -> None:
        """What was trained since the last sync counts no more: a checkpoint takes its place.

        Every worker must call it, since it waits for a sync that is in the air.
        """
        if self._flight is not None:
            self._flight.give_up()
        self._pending_steps.assign(0)
        for pending in (self._block_steps, *self._pending_samples):
            pending.assign(tf.zeros_like(pending))
        self._turn.assign(0)
        self._device_steps.assign(0)
        self._device_samples.assign(tf.zeros_like(self._device_samples))

    def land(self) -> Agreement:
        """Waits for the sync that is in the air, if one is; what all know alike then.

        Every worker must call it at the same step. The replicas' weights stay as they are.
        """
        if self._flight is not None:
            with self._watched():
                self.await_landing()
        return self.agreement()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A sync that is called from Python, and may fail."""
        try:
            yield
        except BaseException:
            self.forget_waiting()
            raise

    def step_is_over(self) -> None:
        """No training step runs: a sync that one waited in has failed."""
        if self._flight is None or int(self._flight.state) != FLYING:
            self.forget_waiting()

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
                self.land()
            for bucket, at, piece in self._layout.places(index):
                part = value[piece.start : piece.stop]
                self.global_state.set_part(bucket, at, part)
                for keeper in (self._flight, self._compressed):
                    if keeper is not None:
                        keeper.set_part(bucket, at, part)
            self._signatures[index].assign(signature_of(value))

    def adopt(self, former: Synchronizer) -> None:
        """Goes on from the state of the synchronizer that the same model had before.

        Weights that both have keep their global model, momentum and averages, and what compression
        has yet to send; the others start from their present values. Every worker must call it.
        """
        scalars = {
            (cell.field, cell.part.bucket): cell.variable
            for cell in former.global_state.cells()
            if cell.is_scalar
        }

        def of_weights(theirs: Buckets, mine: Buckets) -> list[tf.Tensor]:
            places = [former._index.get(id(v[0]), ("", 0)) for v in self._variables.weights]
            return _adopted("weight", places, former._layout, theirs, self._layout, mine)

        for cell in {cell.field: cell for cell in self.global_state.cells()}.values():
            if cell.field in ("moments/momentum", "moments/velocity"):
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
            old, new = (s.global_state.whole(cell.field) for s in (former, self))
            self.global_state.set_field(cell.field, of_weights(old, new))
        if self._compressed is not None and former._compressed is not None:
            self._compressed.adopt(former._compressed, of_weights)
        self._adopt_anchors(former)
        for mine, theirs in zip(self._counted(), former._counted(), strict=True):
            mine.variable.assign(theirs.variable)
        # What is adopted was agreed on; the local weights may differ.
        self._signatures.assign(tf.zeros_like(self._signatures))

    def _adopt_anchors(self, former: Synchronizer) -> None:
        """State is measured from its value at the last sync, and may have moved since."""
        places = [former._index.get(id(v[0]), ("", 0)) for v in self._variables.state]
        layouts = [s._replicas.state_layout for s in (former, self)]
        old, new = (s._averaging.anchors for s in (former, self))
        values = _adopted("state", places, layouts[0], old, layouts[1], new)
        for anchor, value in zip(new, values, strict=True):
            anchor.assign(value)

    def has_any_of(self, components: Sequence[tf.Variable]) -> bool:
        """Whether any of these is a weight's component on the first device."""
        mine = {id(v[0]) for v in self._variables.weights}
        return any(id(component) in mine for component in components)

    def waiting_since(self) -> float:
        """When the sync under way began, on the monotonic clock; 0 if none is."""
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

    @property
    def shows_others(self) -> bool:
        """Whether the model's variables hold others than the replicas' own weights for a while."""
        return self._own is not None

    @contextlib.contextmanager
    def showing(self, which: str) -> Iterator[None]:
        """The model's variables hold the "global" model, an average, or the "local" weights.

        Every worker must enter, where the block is closed.
        """
        if which == "local" and self._own is None:
            yield
            return
        shown, outer = self.local_weights(), self._own
        own = shown if outer is None else outer
        try:
            self._own = own
            of_all = own if which == "local" else [self.global_weights(which)] * len(own)
            self.set_weights(of_all)
            yield
        finally:
            self.set_weights(shown)
            self._own = outer

    def local_weights(self) -> list[list[tf.Tensor]]:
        """Copies of the weights that the model's variables hold: for each device a list."""
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
            counts = [[tf.cast(c, tf.float64) for c in count] for count in self._variables.counts]
            table = self._report_collectives.all_gather(
                tf.transpose(tf.stack(counts)), f"{self._name}/counts"
            )
            self._replicas.write_counts(tf.reduce_max(table, [0, 1]))

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

    def slots(self) -> Iterator[Slot]:
        """The state of the syncs, beside the model's own variables."""
        yield from self.global_state.slots()
        yield from self._counted()
        yield Slot("counter/signatures", Kind.SHARED, self._signatures)
        for k, anchor in enumerate(self._averaging.anchors):
            yield Slot(f"counter/anchor/{k}", Kind.SHARED, anchor)
        if self._compressed is not None:
            yield from self._compressed.slots()
        if not self._whole:
            yield Slot("open/turn", Kind.BLOCK, self._turn)
            yield Slot("open/block_steps", Kind.BLOCK, self._block_steps, absent=0.0)
            for replica, pending in enumerate(self._pending_samples):
                yield Slot("sync/pending_samples", Kind.BLOCK, pending, replica)
        if self._flight is not None:
            yield from self._flight.slots()

    def _counted(self) -> list[Slot]:
        """What goes on where the model's synchronizer is made anew."""
        return [
            Slot("counter/period", Kind.WORKER, self._period),
            Slot("counter/steps", Kind.WORKER, self._steps),
            Slot("counter/samples", Kind.SUM, self._samples),
            Slot("counter/syncs", Kind.WORKER, self._syncs),
            Slot("counter/seconds", Kind.WORKER, self._seconds),
            Slot("counter/distance", Kind.WORKER, self._distance),
            Slot("counter/bytes_sent", Kind.WORKER, self._bytes_sent, absent=0.0),
        ]

    def start_from(self, weights: Sequence[tf.Tensor]) -> None:
        """Other replicas than before go on, all from these weights."""
        self.set_weights([weights] * len(self._devices))
        if self._compressed:
            self._compressed.set_points(self._layout.pack(weights))

    def open_fragments(self, pending_samples: Sequence[Any]) -> list[bool]:
        """Of each weight, whether its fragment has trained since its last sync.

        Args:
            pending_samples: those of all replicas, as a checkpoint has kept them.
        """
        is_open = [any(p[f] > 0 for p in pending_samples) for f in range(self._fragments)]
        runs = self._layout.variables
        return [o for o, run in zip(is_open, runs, strict=True) for _ in range(run.start, run.stop)]


def _adopted(
    kind: str,
    places: Sequence[tuple[str, int]],
    their_layout: Layout,
    theirs: Buckets,
    my_layout: Layout,
    mine: Buckets,
) -> list[tf.Tensor]:
    """Buckets of `my_layout` with the values of another synchronizer, where that has them.

    Args:
        kind: "weight" or "state".
        places: for each of my variables the kind and the index that the other knows it by.
        their_layout, theirs: of the other synchronizer.
        my_layout, mine: of the variables, with the values of those that the other has not.
    """
    old, new = their_layout.unpack(theirs), my_layout.unpack(mine)
    return my_layout.pack(
        [
            old[index] if of == kind else value
            for (of, index), value in zip(places, new, strict=True)
        ]
    )
