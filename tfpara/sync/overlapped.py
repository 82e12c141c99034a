"""Syncs that run beside the training: started, waited for and merged as operations of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpara.sync.averaging import phase
from tfpara.sync.flight import FLYING, LANDED, NONE, Flight
from tfpara.sync.replicas import ReplicaVariables
from tfpara.sync.reports import SAMPLES, is_bad, stop_if
from tfpara.sync.sync_steps import SyncSteps, not_inlined, now, where


class OverlappedSteps(SyncSteps):
    """Syncs of one model, of which those at sync points may run beside the training.

    Args:
        variables, options: of `SyncSteps`.
        make_variable: creates a plain variable, `make_variable(initial_value, name)`.
        overlap: whether syncs run beside the training, to be merged where the next one begins; or
            after how many steps they are merged.
    """

    def __init__(
        self,
        variables: ReplicaVariables,
        *,
        make_variable: Callable[[Any, str], tf.Variable],
        overlap: bool | int = False,
        **options: Any,
    ) -> None:
        super().__init__(variables, make_variable=make_variable, overlap=overlap, **options)
        self._overlap = overlap
        self._flight: Flight | None = None
        if overlap:
            self._flight_in_graph = tf.function(self._fly_step, autograph=False)
            self._flight = Flight(
                self._fly,
                self._devices,
                self._layout.bucket_sizes,
                self._columns,
                self._num_replicas,
                make_variable,
            )
        self._land = not_inlined(self._land_step)
        self._merge = not_inlined(self._merge_step)
        self._start = not_inlined(self._start_step)

    def after_step(self, samples: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> None:
        """Counts a minibatch of each local replica and syncs at the end of a block.

        Args:
            samples: how many samples each local replica has just processed.
            weights: what these count in the mean of the replicas.
        """
        counts = tf.stack([tf.cast(n, tf.float64) for n in weights])
        for replica, pending in enumerate(self._pending_samples):
            pending.assign_add(tf.fill(pending.shape, counts[replica]))
        self._samples.assign_add(tf.add_n([tf.cast(n, tf.float64) for n in samples]))
        self._steps.assign_add(1)
        self._block_steps.assign_add(tf.ones_like(self._block_steps))
        steps = self._pending_steps.assign_add(1)
        if self._device_period is not None:
            self._device_samples.assign_add(counts)
            of_devices = self._device_steps.assign_add(1)
            where(of_devices >= self._device_period, self._average_devices)
        if self._flight is None:
            where(steps >= self._period, lambda: self.sync(tf.constant(True)))
            return
        delay = self._period if self._overlap is True else tf.constant(self._overlap, tf.int64)
        where((self._flight.state != NONE) & (steps >= delay), self.merge)
        where(steps >= self._period, self._start)

    def _start_step(self) -> None:
        """Lets the sync of the block that ends here begin."""
        flight = self._in_the_air
        began, mark = self._arrival()
        rows = self._rows(True, mark)
        turn = self._turn.read_value()

        def start(fragment: int) -> tf.Tensor:
            with phase("pack"):
                local = [self._replicas.weights(r, fragment) for r in range(len(self._devices))]
                return flight.start(rows, turn, local, self._layout.buckets[fragment])

        with tf.control_dependencies([began]):
            started = self._of_fragment(turn, start)
        with tf.control_dependencies([started]):
            self._next_turn(turn, tf.constant(False))
            self._seconds.assign_add(tf.stack([now() - began, 0.0]))

    def _fly(self) -> None:
        """The exchange of a flight; called in its thread."""
        try:
            self._flight_in_graph()
        except BaseException:
            self.forget_waiting()
            raise

    def forget_waiting(self) -> None:
        """A sync has failed, so that nobody waits in it any more."""
        self._sync_began.assign(0.0)

    def _fly_step(self) -> tf.Tensor:
        """Both phases, from the flight's copies."""
        flight = self._in_the_air
        self._sync_began.assign(now())
        reports = self._gathered(flight.rows.read_value())
        with tf.control_dependencies([reports]):
            self._sync_began.assign(0.0)
            flight.table.assign(reports)
            flight.apart.assign(self._apart(reports))
        committed = tf.cond(
            is_bad(reports, self._model_columns),
            lambda: tf.constant(0, tf.int64),  # `_touch_down` says why
            lambda: self._of_fragment(
                flight.fragment,
                lambda f: self._if_any(f, reports, lambda: self._exchange_in_flight(f, reports)),
            ),
        )
        return flight.committed.assign(committed)

    def _exchange_in_flight(self, fragment: int, reports: tf.Tensor) -> tf.Tensor:
        flight, buckets = self._in_the_air, self._layout.buckets[fragment]
        self._sync_began.assign(now())
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

    def await_landing(self) -> None:
        """Waits until the flight has landed, if there is one, and takes what all know alike."""
        self._stop_if(*self._land())

    def merge(self) -> None:
        """Replicas take in what the flight brought, if there is one."""
        self._stop_if(*self._merge())

    def _stop_if(self, problem: tf.Tensor, of_collective: tf.Tensor) -> None:
        """Raises in the training thread what ended the flight.

        After a failed collective all others fail as it did: one more raises the same error here.
        """

        def again() -> None:
            self._sync_began.assign(now())
            self._gathered(self._in_the_air.rows.read_value())

        with tf.control_dependencies([where(of_collective, again)]):
            stop_if(problem)

    def _land_step(self) -> tuple[tf.Tensor, tf.Tensor]:
        """What ended the flight before it landed, "" if nothing; and whether a collective did.

        A flight that has failed does not land: whoever asks again is told the same. But where the
        reports forbade the sync, on all workers alike, the flight is over and its block open.
        """
        return tf.cond(
            self._in_the_air.state == FLYING,
            self._wait,
            lambda: (tf.constant(""), tf.constant(False)),
        )

    def _wait(self) -> tuple[tf.Tensor, tf.Tensor]:
        flight = self._in_the_air
        began = now()
        with tf.control_dependencies([began]), phase("wait"):
            message, of_collective = flight.landing()
        with tf.control_dependencies([message]):
            waited = now() - began
        problem = tf.cond(message == "", lambda: self._touch_down(waited), lambda: message)
        return problem, of_collective

    def _touch_down(self, waited: tf.Tensor) -> tf.Tensor:
        flight = self._in_the_air
        reports = flight.table.read_value()
        problem = self._problem(reports, flight.apart.read_value())

        def landed() -> None:
            self._agree(reports)
            committed = flight.committed.read_value()
            self._syncs.assign_add(committed)
            self._seconds.assign_add(tf.fill([2], waited))
            flight.state.assign(tf.where(committed > 0, tf.constant(LANDED, tf.int64), NONE))

        def forbidden() -> None:
            self._reopen_block()
            flight.state.assign(NONE)

        where(problem == "", landed)
        where(problem != "", forbidden)
        return problem

    def _reopen_block(self) -> None:
        """The block with which the flight started has not been synced."""
        flight = self._in_the_air
        rows = flight.rows.read_value()
        carried = tf.one_hot(flight.fragment, self._parts, dtype=tf.float64)
        self._turn.assign(flight.fragment)
        steps = rows[0, self._steps_from : self._counts_from]
        # The part that was synced last has the steps since the last sync point.
        self._pending_steps.assign_add(tf.cast(tf.reduce_min(steps), tf.int64))
        self._block_steps.assign_add(carried * steps)
        for replica, pending in enumerate(self._pending_samples):
            pending.assign_add(carried * rows[replica, SAMPLES : self._steps_from])

    def _merge_step(self) -> tuple[tf.Tensor, tf.Tensor]:
        flight = self._in_the_air
        problem, of_collective = self._land_step()
        with tf.control_dependencies([problem]):
            began = now()

        def merge(fragment: int) -> tf.Tensor:
            buckets = self._layout.buckets[fragment]
            with phase("unpack"):
                local = [self._replicas.weights(r, fragment) for r in range(len(self._devices))]
                before = [[v.read_value() for v in own[buckets]] for own in flight.snapshots]
                arrived = [[v.read_value() for v in own[buckets]] for own in flight.arrived]
                merged = self._on_devices(self._rule.restart_delayed, local, before, arrived)
                self._replicas.write_weights(merged, fragment)
            return tf.constant(0)

        def merged() -> None:
            with tf.control_dependencies([self._of_fragment(flight.fragment, merge)]):
                flight.state.assign(NONE)

        with tf.control_dependencies([began]):
            done = where(flight.state == LANDED, merged)
        with tf.control_dependencies([done]):
            self._seconds.assign_add(tf.stack([now() - began, 0.0]))
        return problem, of_collective

    @property
    def _in_the_air(self) -> Flight:
        if self._flight is None:
            raise RuntimeError("syncs are not overlapped")
        return self._flight
