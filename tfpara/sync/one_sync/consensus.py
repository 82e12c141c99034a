"""The first phase of a sync as operations of a graph: reports of all replicas, and a decision."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpara.cluster.call_site import TEXT_BYTES, sentence
from tfpara.sync.one_sync.block import Block
from tfpara.sync.one_sync.graph_ops import in_python, now
from tfpara.sync.one_sync.left_out import LeftOut
from tfpara.sync.one_sync.replicas import Buckets, Replicas
from tfpara.sync.one_sync.reports import (
    MET,
    NONFINITE,
    SAMPLES,
    Columns,
    Decision,
    are_apart,
    decide,
    problem_of,
    report_of,
    signature_of,
)
from tfpara.sync.one_sync.weight_exchange import ALIGNED, Shares, phase
from tfpara.sync.settings import NEVER, Settings
from tfpara.typing import Array

# When a worker ends, its messages that are still under way are lost. So a worker that is about to
# fail first waits for this time. Meanwhile the other workers receive its messages, from which they
# learn the reason, too.
_GRACE_SECONDS = 1.0
_APART = "the workers are apart"  # `decide` replaces it by the sentence that `_told` returns


class Part(NamedTuple):
    """The decision for a part of the model, as tensors: see `Decision`."""

    committed: tf.Tensor
    steps: tf.Tensor
    of_all: tf.Tensor
    shares: Shares


class Verdict(NamedTuple):
    """The decision of all workers, as tensors: see `Decision`.

    at: the time of the decision, on the clock of `now`.
    problem: the sentence that forbids the sync; "" if none does.
    """

    at: tf.Tensor
    problem: tf.Tensor
    is_last: tf.Tensor
    agreed: tf.Tensor
    counts: tf.Tensor
    trained: tf.Tensor
    parts: list[Part]


class Consensus:
    """The reports of a model's replicas, and the decision of all workers from them.

    Attributes:
        signatures: for each weight a number that must be equal on all replicas.
        other_signatures: such numbers for the state and the frozen weights. The number of a state
            variable is that of its first value, or of the value that Python code has set last.
        request: the request of this worker (see `Request`), a float64 variable.
        began: the time, on the clock of `now`, since which the sync waits for others; 0: not now.
        weights_seen: for each replica a number, 0 until a sync counts a minibatch of it.
        divided_in: the minibatches that this worker had taken before the block within which the
            data were divided anew; −1: none. In this block rates may differ: a schedule by the
            position in the epoch got other positions before and after that.
        carried: how many float32 numbers travel with each worker's report; see `WithReports`.
    """

    def __init__(
        self, replicas: Replicas, block: Block, settings: Settings, left_out: LeftOut | None
    ) -> None:
        site, variables, make = replicas.site, replicas.variables, replicas.site.make
        self._replicas, self._block, self._site = replicas, block, site
        self._fragments, self._left_out = settings.fragments, left_out
        self._share = settings.nonfinite_share
        self.divided_in = -1
        shared, rates = len(variables.counts), len(variables.rates)
        self.columns = Columns.of(block.parts, shared, rates, left_out is not None)
        self.weights_seen = np.zeros(site.num_replicas)
        self.carried = 0
        others = [*variables.state, *variables.frozen]
        self.signatures = make(_signatures(variables.weights), "signatures")
        self.other_signatures = make(_signatures(others), "other_signatures")
        self.request = make(tf.zeros([], tf.float64), "request")
        self.began = make(tf.zeros([], tf.float64), "sync_began")

    def reached(
        self, running: tf.Tensor, anchors: Buckets, carried: Buckets = ()
    ) -> tuple[tf.Tensor, Verdict, list[tf.Tensor]]:
        """Takes part in the decision of all workers on a sync.

        `running` says whether this worker has data left. The vectors `carried` travel with its
        report. Returns the time when this worker came to the sync; the decision; and for each
        worker, by rank, the vector that has travelled with its report.
        """
        if self._site.is_alone:
            began, read = self._read(running, anchors)
            return began, self.decide(read, self._rows), []
        began, rows = self.report(running, anchors)
        table, arrived = self.gather(rows, began, carried)
        return began, self.decide([table]), arrived

    def met(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchanges one number of each worker; returns all by rank, and the error's text or "".

        The number travels in a report, by the collective that gathers the reports before a sync. So
        if another worker runs a sync meanwhile, all workers notice.
        """
        columns, devices = self.columns, len(self._site.devices)

        def rows_of(number: Array) -> list[Array]:
            # The column RUNNING stays 0, as if this worker had no data left, because `are_apart`
            # compares the purposes of only such workers.
            row = np.zeros(columns.width)
            row[NONFINITE] = -1.0
            row[MET:SAMPLES] = self._site.call_site.mark()
            row[SAMPLES] = number
            return [np.tile(row, (devices, 1))]

        with tf.device("CPU:0"):
            (rows,) = in_python(rows_of, [number], self._of_rows)
            zeros = [tf.zeros([self.carried])] if self.carried else []
            reports, _ = self.gather(rows, now(), zeros)
            (differ,) = in_python(
                lambda table: [self._are_apart(table)], [reports], tf.TensorSpec([], tf.bool)
            )
            numbers = reports[::devices, SAMPLES]
            if self._site.company.unlike_devices:
                numbers = tf.gather(reports[:, SAMPLES], self._site.first_replicas(0))
            return numbers, tf.cond(differ, self._told, lambda: tf.constant(""))

    def report(self, running: tf.Tensor | bool, anchors: Buckets) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when this worker came to the sync, and its reports, [local replicas, columns]."""
        began, read = self._read(running, anchors)
        (rows,) = in_python(lambda *read: [self._rows(*read)], read, self._of_rows)
        return began, rows

    @property
    def _of_rows(self) -> tf.TensorSpec:
        return tf.TensorSpec([len(self._site.devices), self.columns.width], tf.float64)

    def _read(self, running: tf.Tensor | bool, anchors: Buckets) -> tuple[tf.Tensor, list[Any]]:
        """Returns the time when this worker came to the sync, and the arguments of `_rows`."""
        block, balance, replicas = self._block, self._site.balance, self._replicas
        left_out, each = self._left_out, range(len(self._site.devices))
        began = now()
        with tf.control_dependencies([began]), phase("check"):
            since = 0.0 if balance is None else balance.since.read_value()
            return began, [
                began,
                since,
                running,
                self.request.read_value(),
                self.signatures.read_value(),
                self.other_signatures.read_value(),
                block.counts.read_value(),
                block.stepped(),
                block.period.read_value(),
                *(replicas.summary(r, anchors) for r in each),
                *((() if left_out is None else left_out.of_epoch(r)) for r in each),
            ]

    def _rows(self, *read: Array) -> Array:
        """Returns the reports of the local replicas, [local replicas, columns], from `_read`."""
        began, since, running, request, signatures, others, counts, stepped, period, *each = read
        names = len(self._replicas.averaged_names)
        shared = len(self._replicas.variables.counts)
        own, block = len(self._site.devices), self._block
        steps = stepped if len(stepped) else [block.part_steps.of(counts)] * own
        of_replicas = steps, each[:own], block.samples, each[own:]
        taken, pending = block.taken.of(counts), block.steps.of(counts)
        rows = []
        for of_parts, summary, samples, left_out in zip(*of_replicas, strict=True):
            rows.append(
                report_of(
                    summary[:names],
                    samples.of(counts),
                    summary[names : names + shared],
                    summary[names + shared :],
                    running=bool(running),
                    signature=float(signatures.sum()),
                    others=float(others.sum()),
                    seconds=float(began - since) if since > 0.0 else -1.0,
                    request=float(request),
                    mark=self._site.call_site.mark(),
                    steps=of_parts,
                    taken=int(taken),
                    any_rates=bool(pending == 0)
                    or 0 <= self.divided_in == int(taken - of_parts[0]),
                    never=bool(period >= NEVER),
                    left_out=left_out,
                )
            )
        return np.stack(rows)

    def gather(
        self, rows: tf.Tensor, began: tf.Tensor, carried: Buckets = ()
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns all replicas' reports, [N, columns], and each worker's `carried` as a vector."""
        if self._site.is_alone:
            return rows, []
        self.began.assign(began)
        width, arrived = self.columns.width, []
        of_workers = self._site.company.unlike_devices
        if of_workers:
            # All workers must send equally many rows, so those with fewer devices append empty
            # rows.
            rows = tf.pad(rows, [[0, max(of_workers) - rows.shape[0]], [0, 0]])
        with phase("wait"):
            # The carried vectors are float32 and the reports float64. All of them are sent in one
            # int32 tensor, bit for bit, so that nothing is rounded.
            sent = [tf.bitcast(vector, tf.int32) for vector in carried]
            if sent:
                bits = tf.reshape(tf.bitcast(rows, tf.int32), [-1])
                rows = tf.concat([*sent, bits, tf.zeros([-bits.shape[0] % ALIGNED], tf.int32)], 0)
            table = self._site.reports.all_gather(rows, f"{self._site.name}/report")
            if sent:
                received = tf.unstack(table, num=self._site.reports.size)
                arrived = [tf.bitcast(each[: self.carried], tf.float32) for each in received]
                last = self.carried + bits.shape[0]
                bits = tf.stack([each[self.carried : last] for each in received])
                table = tf.bitcast(tf.reshape(bits, [-1, width, 2]), tf.float64)
        reports = tf.reshape(table, [-1, width])
        if of_workers:
            there = np.arange(max(of_workers)) < np.array(of_workers)[:, np.newaxis]
            reports = tf.gather(reports, np.flatnonzero(there))
        with tf.control_dependencies([reports]):
            self.began.assign(0.0)
        return reports, arrived

    def _are_apart(self, table: Array) -> bool:
        return not self._site.is_alone and are_apart(table, self._site.company.changes)

    def _told(self) -> tf.Tensor:
        """Returns a sentence with each worker's place in its script; all exchange their places."""
        site = self._site
        place = tf.TensorSpec([TEXT_BYTES], tf.int32)
        (mine,) = in_python(lambda: [site.call_site.told()], [], place)
        table = site.reports.all_gather(mine, f"{site.name}/places")

        def text(rows: Array) -> list[str]:
            time.sleep(_GRACE_SECONDS)
            return [sentence(rows)]

        return in_python(text, [table], tf.TensorSpec([], tf.string))[0]

    def decide(
        self,
        given: Sequence[tf.Tensor | bool],
        table_of: Callable[..., Array] = lambda reports: reports,
    ) -> Verdict:
        """Returns the decision of all workers from the table of reports.

        `table_of`, a Python function, makes the table from `given`.

        The decision is Python code. As graph operations it would be a third of a sync's operations,
        which TensorFlow has to make and optimise before the first step.
        """
        own = len(self._site.devices)

        def decided(replicas: int, first: int, period: int, *given: Array) -> Sequence[Any]:
            at, table = time.monotonic(), table_of(*given)
            text, decision = self._decision(table, replicas, first, period)
            if text not in ("", _APART) and not self._site.is_alone:
                time.sleep(_GRACE_SECONDS)
            return at, text, *decision

        arguments = [*self._site.replicas_now(), self._block.period.read_value(), *given]
        parts, f32, f64 = self._block.parts, tf.float32, tf.float64
        at, problem, is_last, agreed, counts, trained, *of_parts = in_python(
            decided,
            arguments,
            tf.TensorSpec([], f64),
            tf.TensorSpec([], tf.string),
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec([3], f64),
            tf.TensorSpec([len(self._replicas.variables.counts)], f64),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([parts], tf.bool),
            tf.TensorSpec([parts], f32),
            tf.TensorSpec([parts, None], f32),
            tf.TensorSpec([parts, own], f32),
            tf.TensorSpec([parts], f32),
            tf.TensorSpec([parts], f32),
        )
        if not self._site.is_alone:
            otherwise = functools.partial(tf.identity, problem)
            problem = tf.cond(tf.equal(problem, _APART), self._told, otherwise)
        by_part = zip(*map(tf.unstack, of_parts), strict=True)
        made = [Part(done, steps, of_all, Shares(*own)) for done, steps, of_all, *own in by_part]
        return Verdict(at, problem, is_last, agreed, counts, trained, made)

    def _decision(
        self, table: Array, replicas: int, first: int, period: int
    ) -> tuple[str, Decision]:
        """Returns the problem that forbids the sync, or "", and the decision from the table."""
        own, balance = len(self._site.devices), self._site.balance
        names, firsts = self._replicas.averaged_names, self._site.first_replicas(len(table))
        text = _APART
        if not self._are_apart(table):
            text = problem_of(table, self.columns, names, firsts, self._share)
        if not text and len(table) == len(self.weights_seen):
            self.weights_seen += table[:, self.columns.samples].max(1)
        share = None if balance is None else balance.mean_steps()
        found = decide(
            table,
            self.columns,
            text,
            local=slice(first, first + own),
            first_replicas=firsts,
            replicas=replicas,
            # With F fragments, the block of each fragment is F sync periods long.
            block=share or float(period) * self._fragments,
            by_speed=share is not None,
        )
        if balance is not None and not text:
            # With `balance` each worker has one replica, so each row of the table belongs to one
            # worker. In a simulation each replica stands for a worker.
            steps, seconds = table[:, self.columns.steps], table[:, self.columns.seconds]
            balance.reported = steps[:, 0].astype(int), seconds[:, 0]
        return text, found


def _signatures(variables: Sequence[Sequence[tf.Variable]]) -> tf.Tensor:
    """Returns the signature of each variable's component on the first device."""
    signatures = [signature_of(variable[0]) for variable in variables]
    return tf.stack(signatures) if signatures else tf.zeros([0], tf.float64)
