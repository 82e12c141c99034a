"""Overlapped syncs, as graph operations: start beside the training, wait, and merge.

Both phases of such a sync (reports, then weights) run in a thread (see `flight`), with copies of
weights and reports. The results of the sync are merged a fixed number of steps later. When a block
is closed (an epoch ends, or weights are read), a sync in flight is merged first. Then a last sync,
of all fragments, runs in the training thread.
"""

from __future__ import annotations

import tensorflow as tf

from tfpara.sync.one_sync.consensus import Verdict
from tfpara.sync.one_sync.flight import FLYING, LANDED, NONE, OF_COLLECTIVE, Flight
from tfpara.sync.one_sync.graph import SyncGraph, if_any
from tfpara.sync.one_sync.graph_ops import NotInlined, now, on_host, where
from tfpara.sync.one_sync.replicas import Site
from tfpara.sync.one_sync.reports import Request, stop_if
from tfpara.sync.one_sync.weight_exchange import phase


class Overlap:
    """The overlapped syncs of one model.

    A sync is merged `overlap` steps after its start, or, if `overlap` is True, when the next sync
    begins.
    """

    def __init__(self, graph: SyncGraph, overlap: bool | int, site: Site) -> None:
        self._graph = graph
        self._overlap, self._changes = overlap, site.company.changes
        self._flight_in_graph = tf.function(self._fly_step, autograph=False)
        sizes, columns = graph.replicas.layout.bucket_sizes, graph.consensus.columns.width
        self.flight = Flight(self._fly, site.devices, sizes, columns, site.make)
        self._land = NotInlined(self._land_step)
        self._merge = NotInlined(self._merge_step)
        self.start = NotInlined(self._start_step)

    def is_due(self, steps: tf.Tensor) -> tf.Tensor:
        """Returns whether `act` has something to do, `steps` steps after the last sync began."""
        return tf.logical_or(*self._due(steps))

    def act(self) -> None:
        """Merges a sync if that is due, then starts the next sync if that is due."""
        arrives, begins = self._due(self._graph.block.steps.read_value())
        with tf.control_dependencies([where(arrives, self.merge)]):
            stops = self.flight.stops.read_value()
            where(begins & ~stops, self.start)
            if self._changes:
                where(begins & stops, self._sync)

    def _sync(self) -> None:
        """Runs a sync for which training stops."""
        self.flight.stops.assign(False)
        self._graph.sync(tf.constant(True))

    def _due(self, steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        period = self._graph.block.period.read_value()
        delay = period if self._overlap is True else tf.constant(self._overlap, tf.int64)
        arrives = (self.flight.state.read_value() != NONE) & (steps >= delay)
        return arrives, steps >= period

    def await_landing(self) -> None:
        """Waits until the flight, if any, has landed; notes the decision of all workers."""
        self._stop_if(self._land())

    def settle(self) -> None:
        """Ends a flight whose exchange may have failed; called in an elastic run.

        The result lands if this worker has it. Otherwise the block of the flight is open again, and
        the next sync covers it, too.
        """
        self.flight.wait()
        if self.flight.in_the_air and self.flight.was_cut_off:
            self._reopen()
        elif self.flight.in_the_air:
            self.await_landing()
        self.flight.stops.assign(False)

    def merge(self) -> None:
        """Waits for the flight, if there is one, and merges its results into the weights."""
        self._stop_if(self._merge())

    def end(self) -> None:
        """Merges the flight, if there is one, where a block is closed; called by Python code."""
        self.merge()
        # Training stops for the syncs that close the block. The first sync after them is a flight
        # on all workers, also on one whose data ended before the sync for which training stops.
        self.flight.stops.assign(False)

    def _start_step(self) -> None:
        """Starts the sync of the block that ends here, and opens the next block."""
        graph, flight = self._graph, self.flight
        began, rows = graph.consensus.report(True, graph.averaging.anchors)
        turn = graph.block.turn.read_value()

        def start(fragment: int) -> tf.Tensor:
            with phase("pack"):
                local = graph.replicas.all_weights(fragment)
                return flight.start(rows, turn, local, graph.replicas.layout.buckets[fragment])

        with tf.control_dependencies([began]):
            started = graph.of_fragment(turn, start)
        with tf.control_dependencies([started]):
            graph.block.close(turn, tf.constant(False))
            graph.stood_still(began)

    def _fly(self) -> None:
        """Runs the sync of a flight; called in its thread."""
        try:
            on_host(self._flight_in_graph)
        except BaseException:
            self._graph.forget_waiting()
            raise

    def _fly_step(self) -> tf.Tensor:
        """Exchanges reports and, if they allow it, weights, from the flight's copies."""
        graph, flight = self._graph, self.flight
        reports, _ = graph.consensus.gather(flight.rows.read_value(), now())
        # If the reports forbid the sync, no error is raised here: `_touch_down` passes the reason
        # on to the training thread.
        verdict = graph.consensus.decide([reports])
        flight.agreed.assign(verdict.agreed)
        flight.trained.assign(verdict.trained)
        flight.problem.assign(verdict.problem)
        committed = graph.of_fragment(
            flight.fragment,
            lambda f: if_any(verdict.parts[f], lambda: self._exchange(f, verdict)),
        )
        return flight.committed.assign(committed)

    def _exchange(self, fragment: int, verdict: Verdict) -> tf.Tensor:
        graph, flight = self._graph, self.flight
        buckets = graph.replicas.layout.buckets[fragment]
        graph.begin_waiting(verdict)
        local = [[v.read_value() for v in own[buckets]] for own in flight.snapshots]
        arrival, distance = graph.exchange(fragment, local, verdict.parts[fragment].shares)
        with tf.control_dependencies([distance, *tf.nest.flatten(arrival.received)]):
            graph.commit(fragment, arrival, distance)
            for kept, new in zip(flight.arrived, arrival.received, strict=True):
                for variable, value in zip(kept[buckets], new, strict=True):
                    variable.assign(value)
        return tf.constant(1, tf.int64)

    def _stop_if(self, problem: tf.Tensor) -> None:
        """Raises the error that ended the flight, in the training thread."""
        if self._changes and tf.executing_eagerly() and problem.numpy() and self.flight.was_cut_off:
            raise tf.errors.AbortedError(None, None, problem.numpy().decode())

        # If a collective has failed, all later collectives fail with the same error. So another one
        # raises that error here, with its original type.
        def again() -> None:
            self._graph.consensus.gather(self.flight.rows.read_value(), now())

        with tf.device("CPU:0"):
            of_collective = tf.strings.regex_full_match(problem, OF_COLLECTIVE)
        with tf.control_dependencies([where(of_collective, again)]):
            stop_if(problem)

    def _land_step(self) -> tf.Tensor:
        """Waits for the flight, if one is in the air; returns its end, as `Flight.landing` does."""
        # A flight that failed never lands, so a second call returns the same error.
        return tf.cond(self.flight.state == FLYING, self._wait, lambda: tf.constant(""))

    def _wait(self) -> tf.Tensor:
        began = now()
        with tf.control_dependencies([began]), phase("wait"):
            message = self.flight.landing()
        with tf.control_dependencies([message]):
            waited = now() - began
        return tf.cond(message == "", lambda: self._touch_down(waited), lambda: message)

    def _touch_down(self, waited: tf.Tensor) -> tf.Tensor:
        graph, flight = self._graph, self.flight
        problem = flight.problem.read_value()

        def landed() -> None:
            committed = flight.committed.read_value()
            agreed = flight.agreed.read_value()
            if self._changes:
                # Members of an elastic run meet after a sync for which training stops, since then
                # none is in a sync, and their blocks are closed. So the next sync is such a one.
                meets = (agreed[0] == float(Request.MEET)) & (agreed[1] == agreed[2])
                flight.stops.assign(meets)
                agreed = tf.where(meets, agreed * [0.0, 1.0, 1.0], agreed)
            graph.note(agreed, committed, tf.fill([2], waited))
            graph.dealt.assign_add(flight.trained.read_value())
            flight.state.assign(tf.where(committed > 0, tf.constant(LANDED, tf.int64), NONE))

        allowed = tf.equal(problem, "")
        where(allowed, landed)
        where(~allowed, self._reopen)  # the reports forbid it on all workers
        return problem

    def _reopen(self) -> None:
        """Drops a flight that has changed nothing; its block is open again."""
        graph, flight = self._graph, self.flight
        rows, columns = flight.rows.read_value(), graph.consensus.columns
        graph.block.reopen(flight.fragment, rows[0, columns.steps], rows[:, columns.samples])
        flight.state.assign(NONE)

    def _merge_step(self) -> tf.Tensor:
        graph, flight = self._graph, self.flight
        problem = self._land_step()
        with tf.control_dependencies([problem]):
            began = now()

        def merge(fragment: int) -> tf.Tensor:
            buckets = graph.replicas.layout.buckets[fragment]
            with phase("unpack"):
                local = graph.replicas.all_weights(fragment)
                before = [[v.read_value() for v in own[buckets]] for own in flight.snapshots]
                arrived = [[v.read_value() for v in own[buckets]] for own in flight.arrived]
                merged = graph.global_state.restart(local, before, arrived)
                graph.replicas.write_weights(merged, fragment)
            return tf.constant(0)

        def merged() -> None:
            with tf.control_dependencies([graph.of_fragment(flight.fragment, merge)]):
                flight.state.assign(NONE)

        with tf.control_dependencies([began]):
            done = where(flight.state == LANDED, merged)
        with tf.control_dependencies([done]):
            graph.stood_still(began)
        return problem
