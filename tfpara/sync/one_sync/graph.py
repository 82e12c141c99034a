"""One sync as operations of a graph: reports, a decision, the exchange of weights, the commit.

See docs/design.md, "A sync has two phases". No replica's weights change before every buffer has
arrived.

If the model is divided into fragments, each sync exchanges one fragment, and the fragments take
turns. When no replica has data left, a sync exchanges all fragments.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfpara.sync.one_sync import placement as aggregations
from tfpara.sync.one_sync.block import Block
from tfpara.sync.one_sync.compression import wire_of
from tfpara.sync.one_sync.consensus import Consensus, Part, Verdict
from tfpara.sync.one_sync.global_state import GlobalState
from tfpara.sync.one_sync.graph_ops import (
    NotInlined,
    if_running,
    in_python,
    now,
    unless_left_out,
    where,
)
from tfpara.sync.one_sync.left_out import LeftOut
from tfpara.sync.one_sync.replicas import Buckets, Replicas, ReplicaVariables, Site
from tfpara.sync.one_sync.reports import Request, stop_if
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.sync.one_sync.statistics import SyncStatistics
from tfpara.sync.one_sync.weight_exchange import (
    Arrival,
    Averaging,
    PlainWire,
    Shares,
    WithReports,
    phase,
)
from tfpara.sync.settings import Settings
from tfpara.typing import Scalar

# The replicas' distance is measured at the first 16 syncs, and then at the 17th, 33rd, 49th and so
# on. It is not measured at each sync, because a measurement needs a pass over the weights.
MEASURED_SYNCS = 16


class SyncGraph:
    """The variables that syncs of one model need, and the operations of a sync.

    Attributes:
        whole: whether each sync in the training thread exchanges the whole model: the weights, and
            the state that no rule updates. Otherwise that state is averaged when a block is closed.
        dealt: for each worker, the steps since the data were dealt out that syncs have averaged.
    """

    def __init__(self, variables: ReplicaVariables, settings: Settings, site: Site) -> None:
        self._variables, self._site, self._fragments = variables, site, settings.fragments
        self.whole = settings.fragments == 1 and not settings.overlap
        self.replicas = replicas = Replicas(variables, settings, site)
        aggregation, compression, make = settings.aggregation, settings.compression, site.make
        if compression != "none" and aggregation == "auto":
            aggregation = "sharded"
        sizes = replicas.layout.bucket_sizes
        unlike = site.company.unlike_devices
        chosen = aggregations.choose(aggregation, sizes, site.collectives, site.devices, unlike)
        with tf.device(site.devices[0]):
            self.global_state = GlobalState(chosen, settings, replicas)
            self.compressed = None
            if compression != "none":
                self.compressed = wire_of(compression, chosen, replicas, self.global_state)
            wire = self.compressed or PlainWire(chosen, replicas)
            self.averaging = Averaging(replicas, wire, self.global_state)
        goes_along = self.whole and self.compressed is None
        self._with_reports = WithReports.of(chosen, replicas, goes_along)
        with tf.device("CPU:0"):
            self.block = Block(settings, self.whole, site)
            self.left_out = LeftOut(site) if settings.nonfinite == "skip" else None
            self.consensus = Consensus(replicas, self.block, settings, self.left_out)
            if self._with_reports is not None:
                self.consensus.carried = self._with_reports.elements
            self._agreed = make(tf.zeros([3], tf.float64), "agreed")  # see `Decision`
            self._syncs = make(tf.zeros([], tf.int64), "syncs")
            self._seconds = make(tf.zeros([2], tf.float64), "seconds")
            self._distance = make(tf.zeros([]), "distance")
            self._bytes_sent = make(tf.zeros([], tf.float64), "bytes_sent")
            self.dealt = make(tf.zeros([site.reports.size], tf.int64), "dealt", [None])
        # See docs/design.md, "The function of a sync is not inlined".
        self._sync = NotInlined(self._sync_step, *[tf.TensorSpec([], tf.bool)] * 2)
        self._meet = NotInlined(
            self._meet_step, tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.bool)
        )
        self._preparing: threading.Thread | None = None

    # -- in the training thread --------------------------------------------------------------

    def sync(self, running: tf.Tensor) -> tf.Tensor:
        """Runs one sync in the training thread; returns whether no replica has data left."""
        self.await_prepared()
        is_last, problem = self._sync(running, tf.constant(True))
        with tf.control_dependencies([stop_if(problem)]):
            return tf.identity(is_last)

    def prepare(self) -> None:
        """Lets TensorFlow set up the functions of `sync` and `meet`, if traced, in a thread."""
        self.await_prepared()
        self._preparing = threading.Thread(target=self._set_up)
        self._preparing.start()

    def _set_up(self) -> None:
        leave_out = tf.constant(False)
        with contextlib.suppress(tf.errors.OpError):  # if this fails, the next sync fails as well
            if self._sync.is_traced:
                self._sync(leave_out, leave_out)
            if self._meet.is_traced:
                self._meet(tf.zeros([], tf.float64), leave_out)

    def await_prepared(self) -> None:
        """Waits for the thread of `prepare`, if there is one."""
        if self._preparing is not None:
            self._preparing.join()

    def meet(self, number: tf.Tensor) -> tf.Tensor:
        """Exchanges a number of each worker as if it were a report; returns all by rank."""
        self.await_prepared()
        numbers, problem = self._meet(number, tf.constant(True))
        with tf.control_dependencies([stop_if(problem)]):
            return tf.identity(numbers)

    def _sync_step(self, running: tf.Tensor, runs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Averages and commits what the reports allow; then updates the counters.

        If an exchange fails, or the reports forbid the sync, the counters stay as they are. If
        `runs` is False, all of this is left out. Returns whether no replica has data left, and why
        the sync is forbidden, or "".
        """
        own, sent = [], []
        with tf.control_dependencies([if_running(runs)]):
            if self._with_reports is not None:
                own = self.replicas.weights(0)
                sent = self._with_reports.sent(own)
            anchors = self.averaging.anchors
            began, verdict, arrived = self.consensus.reached(running, anchors, sent)

        def one(fragment: int) -> tf.Tensor:
            part = verdict.parts[fragment]
            return if_any(part, lambda: self._commit_now(fragment, verdict, own, arrived))

        def every() -> tf.Tensor:
            weights = [*map(one, range(self._fragments))]
            others = if_any(verdict.parts[-1], lambda: self._commit_others(verdict))
            return tf.reduce_max(tf.stack([*weights, others]))

        def closed() -> None:
            ended = now()
            self.note(verdict.agreed, committed, tf.stack([ended - began, verdict.at - began]))
            self.dealt.assign_add(verdict.trained)
            balance = self._site.balance
            if balance is not None:
                (due,) = in_python(lambda: [balance.close()], [], tf.TensorSpec([], tf.int64))
                balance.due.assign(due)
                balance.since.assign(ended)
            self.block.close(self.block.turn.read_value(), verdict.is_last)

        if self.whole:
            committed = one(0)
        else:
            turn = self.block.turn
            committed = tf.cond(verdict.is_last, every, lambda: self.of_fragment(turn, one))
        with tf.control_dependencies([committed]):
            where(tf.equal(verdict.problem, ""), closed)
        return (
            unless_left_out(runs, verdict.is_last, tf.constant(False)),
            unless_left_out(runs, verdict.problem, tf.constant("")),
        )

    def _meet_step(self, number: tf.Tensor, runs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([if_running(runs)]):
            numbers, problem = self.consensus.met(number)
        return (
            unless_left_out(runs, numbers, tf.zeros([0], tf.float64)),
            unless_left_out(runs, problem, tf.constant("")),
        )

    def of_fragment(self, number: tf.Tensor, function: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """Returns `function(number)`, where the fragment's number is a tensor."""
        if self._fragments == 1:
            return function(0)
        branches = [lambda fragment=f: function(fragment) for f in range(self._fragments)]
        return tf.switch_case(tf.convert_to_tensor(number), branches)

    # -- the exchange ------------------------------------------------------------------------

    def exchange(
        self,
        fragment: int,
        local: Sequence[Buckets],
        shares: Shares,
        means: list[list[tf.Tensor]] | None = None,
    ) -> tuple[Arrival, tf.Tensor]:
        """Exchanges a fragment like `Averaging.exchange`; also returns the replicas' distance."""
        arrival = self.averaging.exchange(fragment, local, shares, means)
        if self._site.has_one_replica:
            return arrival, tf.zeros([])
        with tf.control_dependencies(tf.nest.flatten(arrival.means)):
            distance = tf.cond(
                (self._syncs < MEASURED_SYNCS) | (self._syncs % MEASURED_SYNCS == 0),
                lambda: self.averaging.distance(fragment, local, arrival),
                self._distance.read_value,
            )
        return arrival, distance

    # -- the commit --------------------------------------------------------------------------

    def _commit_now(
        self, fragment: int, verdict: Verdict, own: Buckets, everyones: Buckets
    ) -> tf.Tensor:
        """Averages a fragment, applies the rule and writes the result; returns 1.

        If the weights have travelled with the reports, `own` are the buckets of this worker's, and
        `everyones` has the vector of each worker's. Otherwise both are empty.
        """
        _, block_steps, of_all, shares = verdict.parts[fragment]
        # The wait for other workers is noted before the exchange begins, so that the watchdog sees
        # this wait.
        with tf.control_dependencies([self.begin_waiting(verdict)]), phase("pack"):
            local = [own] if own else self.replicas.all_weights(fragment)
        others = self.averaging.exchange_others(shares) if self.whole else []
        means = None
        if self._with_reports is not None:
            means = self._with_reports.mean(everyones, of_all, shares)
        arrival, distance = self.exchange(fragment, local, shares, means)
        arrived = [distance, *others, *tf.nest.flatten(arrival.received)]
        moments: dict[str, list[list[tf.Tensor]]] = {}
        if self._variables.moments:
            steps = tf.maximum(block_steps, 1.0)
            (counted,) = tf.unstack(verdict.counts, num=1)
            # With loss scaling the optimizer may skip steps. `steps` includes these, but `counted`
            # does not. The rule divides by 1 − β^(counted + a), where a is above −`steps`. So
            # `counted` must be at least `steps`; otherwise the divisor could be 0 or negative.
            counted = tf.maximum(tf.cast(counted, tf.float32), steps)
            moments = self.averaging.exchange_moments(arrival.update, shares, steps, counted)
            arrived += tf.nest.flatten(moments)
        with tf.control_dependencies(arrived), phase("unpack"):
            self.commit(fragment, arrival, distance)
            for field, spread in moments.items():
                self.replicas.write_moments(field, spread)
            restarted = self.global_state.restart(local, arrival.received)
            self.replicas.write_weights(restarted, fragment)
            if self.whole:
                self.averaging.commit_others(others)
            self.replicas.write_counts(verdict.counts)
        return tf.constant(1, tf.int64)

    def commit(self, fragment: int, arrival: Arrival, distance: tf.Tensor) -> None:
        """Writes the result of an exchange except the replicas' weights; ends the noted wait."""
        self.forget_waiting()
        self._distance.assign(distance)
        others = self.averaging.bytes_sent_of_others if self.whole else 0
        together = self._with_reports
        wire = self.averaging.wire
        sent = wire.bytes_sent(fragment) if together is None else together.bytes_sent
        self._bytes_sent.assign_add(_exact(sent) + _exact(others))
        self.averaging.commit(arrival)

    def _commit_others(self, verdict: Verdict) -> tf.Tensor:
        """Averages the state that no rule updates; returns 0, since it does not count as a sync."""
        with tf.control_dependencies([self.begin_waiting(verdict)]):
            means = self.averaging.exchange_others(verdict.parts[-1].shares)
        with tf.control_dependencies(means):
            self.forget_waiting()
            self._bytes_sent.assign_add(_exact(self.averaging.bytes_sent_of_others))
            self.averaging.commit_others(means)
        return tf.constant(0, tf.int64)

    # -- counters, waits and requests --------------------------------------------------------

    def note(self, agreed: tf.Tensor, committed: tf.Tensor, seconds: tf.Tensor) -> None:
        """Updates the counters after a sync, on whose reports all workers have `agreed`.

        `committed` is 1 if the sync was committed, else 0. `seconds` has two numbers: the time for
        which training stood still, and the part of that time spent waiting.
        """
        self._agreed.assign(agreed)
        self._syncs.assign_add(committed)
        # A single worker has no other workers to wait for. Its measured wait is the time of its own
        # work, so 0 is added instead.
        self._seconds.assign_add([seconds[0], 0.0] if self._site.is_alone else seconds)

    def stood_still(self, began: tf.Tensor) -> None:
        """Counts the time since `began` as one that a sync has cost, but not as a wait."""
        self._seconds.assign_add(tf.stack([now() - began, 0.0]))

    def begin_waiting(self, verdict: Verdict) -> tf.Tensor:
        """Notes that since the decision a collective may wait for other workers."""
        return self.consensus.began.assign(verdict.at)

    def forget_waiting(self) -> None:
        """Notes that the sync no longer waits, since all has arrived or the sync has failed."""
        self.consensus.began.assign(0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this process counts as waiting, in an exchange from Python code."""
        self.consensus.began.assign(time.monotonic())
        try:
            yield
        finally:
            self.forget_waiting()

    def waiting_since(self) -> float:
        """Returns when the present wait began, on the monotonic clock; 0 if no sync waits."""
        return float(self.consensus.began.numpy())

    def request(self, request: Request) -> None:
        """Makes a request to all workers; at the next sync they agree on the largest request."""
        asked = self.consensus.request
        asked.assign(tf.maximum(asked, float(request)))

    def agreed(self) -> tuple[Request, bool]:
        """Returns the last sync's agreed request, and whether all replicas, or none, had data."""
        request, running, replicas = self._agreed.numpy()
        return Request(int(request)), int(running) in (0, int(replicas))

    def answered(self, *requests: Request) -> None:
        """Forgets this worker's request and the agreed one, each if it is among `requests`."""
        if int(self.consensus.request) in requests:
            self.consensus.request.assign(0.0)
        agreed = self._agreed.numpy()
        if int(agreed[0]) in requests:
            self._agreed.assign([0.0, *agreed[1:]])

    def set_statistics(self, past: SyncStatistics) -> None:
        """Sets the counts and times of this worker to `past`."""
        self.block.taken.assign(past.steps)
        self.block.seen.assign(past.samples)
        self._syncs.assign(past.syncs)
        self._seconds.assign([past.sync_seconds, past.wait_seconds])
        self._distance.assign(past.distance)
        self._bytes_sent.assign(past.bytes_sent)
        if self.left_out is not None:
            self.left_out.total.assign(past.left_out)

    @property
    def syncs(self) -> int:
        """Number of syncs so far."""
        return int(self._syncs)

    def statistics(self) -> SyncStatistics:
        """Returns the counts and times of this worker's syncs so far."""
        seconds = self._seconds.numpy()
        return SyncStatistics(
            steps=int(self.block.taken),
            samples=int(self.block.seen),
            syncs=self.syncs,
            sync_seconds=float(seconds[0]),
            wait_seconds=float(seconds[1]),
            distance=float(self._distance),
            bytes_sent=float(self._bytes_sent),
            left_out=0 if self.left_out is None else int(self.left_out.total),
        )

    # -- state -------------------------------------------------------------------------------

    def slots(self) -> Iterator[Slot]:
        """Yields the state of the syncs, without the model's own variables."""
        yield from self.global_state.slots()
        yield from self.counted()
        yield Slot("counter/signatures", Kind.SHARED, self.consensus.signatures)
        others = self.consensus.other_signatures
        yield Slot("counter/other_signatures", Kind.SHARED, others, absent=0.0)
        yield from self.averaging.slots()
        if self.compressed is not None:
            yield from self.compressed.slots()
        yield from self.block.slots()
        if self.left_out is not None:
            yield from self.left_out.slots()

    def counted(self) -> list[Slot]:
        """Returns the counters that a new synchronizer of the same model takes over."""
        left_out = [] if self.left_out is None else [self.left_out.total]
        return [
            Slot("counter/period", Kind.WORKER, self.block.period),
            Slot("counter/steps", Kind.WORKER, self.block.taken),
            Slot("counter/samples", Kind.SUM, self.block.seen),
            Slot("counter/syncs", Kind.WORKER, self._syncs),
            Slot("counter/seconds", Kind.WORKER, self._seconds),
            Slot("counter/distance", Kind.WORKER, self._distance),
            Slot("counter/bytes_sent", Kind.WORKER, self._bytes_sent, absent=0.0),
            *(Slot("counter/left_out", Kind.SUM, total, absent=0.0) for total in left_out),
        ]

    def adopt(self, old: SyncGraph) -> None:
        """Takes over the state of `old`, the syncs that the same model had before.

        Weights that are in both keep their global model, momentum, averages and compression errors.
        Other weights start from their present values. Every worker must call it.
        """
        places = old._variables.places()

        def adopted(kind: str, theirs: Buckets, mine: Buckets) -> list[tf.Tensor]:
            """Returns `mine` with the values of `theirs` for all variables that are in both."""
            weights = kind == "weight"
            from_layout, layout = (
                graph.replicas.layout if weights else graph.replicas.state_layout
                for graph in (old, self)
            )
            variables = self._variables.weights if weights else self._variables.state
            indices = [places.get(id(v[0]), ("", 0)) for v in variables]
            former_values, values = from_layout.unpack(theirs), layout.unpack(mine)
            return layout.pack(
                [
                    former_values[index] if of == kind else value
                    for (of, index), value in zip(indices, values, strict=True)
                ]
            )

        of_weights = functools.partial(adopted, "weight")
        scalars = {
            (cell.field, cell.part.bucket): cell.variable
            for cell in old.global_state.cells()
            if cell.is_scalar
        }
        runs = zip(old.replicas.layout.buckets, self.replicas.layout.buckets, strict=True)
        # For each new bucket: the number of the former bucket from which it takes its scalars, such
        # as counts of syncs. This is the first former bucket of the same fragment, because all
        # buckets of a fragment have equal scalars.
        counting = [theirs.start for theirs, mine in runs for _ in range(mine.start, mine.stop)]
        for cell in {cell.field: cell for cell in self.global_state.cells()}.values():
            if cell.field in ("moments/momentum", "moments/velocity"):
                continue  # the new state has taken the moments from the optimizer's slots
            if cell.is_scalar:
                values = [scalars[cell.field, bucket] for bucket in counting]
            else:
                mine = self.global_state.whole(cell.field)
                owner = cell.field.rpartition("/")[0]  # "rule", "averages/NAME" or "moments"
                if self.global_state.is_corrected(owner.partition("/")[2]):
                    # When a corrected average is shown, it is divided by 1 − bias (except before
                    # the first sync). The average of new weights starts from their present values,
                    # so these are multiplied by 1 − bias.
                    biases = [scalars.get((f"{owner}/bias", bucket), 0.0) for bucket in counting]
                    pairs = zip(mine, biases, strict=True)
                    mine = [part * (1.0 - bias) if bias < 1.0 else part for part, bias in pairs]
                values = of_weights(old.global_state.whole(cell.field), mine)
            self.global_state.set_field(cell.field, values)
        # If the model has another optimizer now, the rule may have other defaults than before. So
        # the state is converted for the present rule.
        self.global_state.carry(old.global_state.rule.last())
        if self.compressed is not None and old.compressed is not None:
            self.compressed.adopt(old.compressed, of_weights)
        # Anchors are the replicas' state as the last sync wrote it. The new anchors were made from
        # the present state, which may have changed since that sync. So the former anchors are taken
        # over, too.
        anchors = adopted("state", old.averaging.anchors, self.averaging.anchors)
        for anchor, value in zip(self.averaging.anchors, anchors, strict=True):
            anchor.assign(value)
        for slot, theirs in zip(self.counted(), old.counted(), strict=True):
            slot.variable.assign(theirs.variable.read_value())
        # A sync compares the workers' signatures, to find workers that start from different values.
        # After training, values of variables that `old` had may rightly differ between workers. So
        # all workers set the signatures of such variables to 0. The new variables keep theirs.
        variables = self._variables
        for signatures, of_kind in (
            (self.consensus.signatures, variables.weights),
            (self.consensus.other_signatures, [*variables.state, *variables.frozen]),
        ):
            compared = tf.constant([id(v[0]) in places for v in of_kind], tf.bool)
            signatures.assign(tf.where(compared, tf.zeros_like(signatures), signatures))


def _exact(number: Scalar) -> tf.Tensor:
    """Returns a number as float64; `tf.cast` alone would make a Python float a float32 first."""
    return tf.cast(tf.convert_to_tensor(number, dtype_hint=tf.float64), tf.float64)


def if_any(part: Part, function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns `function()` if all workers have decided to average this part, else 0."""
    return tf.cond(part.committed, function, lambda: tf.constant(0, tf.int64))
