"""The first phase of a sync as operations of a graph: reports of all replicas, and a decision."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfpara.cluster.place import MARKS, TEXT_BYTES, sentence
from tfpara.sync.one_sync.block import Block
from tfpara.sync.one_sync.graph_ops import in_python
from tfpara.sync.one_sync.left_out import LeftOut
from tfpara.sync.one_sync.replicas import Buckets, Replicas
from tfpara.sync.one_sync.reports import (
    SAMPLES,
    Columns,
    are_apart,
    decide,
    problem_of,
    report_of,
    signature_of,
)
from tfpara.sync.one_sync.weight_exchange import Shares, phase
from tfpara.sync.settings import NEVER, Settings
from tfpara.typing import Array

# A worker waits this long before it fails, so that the others receive the table that says why. Its
# failure would end what they have not received yet.
_GRACE_SECONDS = 1.0
# What the reports are made of: numbers of the worker, and for each replica its own.
_Read: TypeAlias = tuple[dict[str, Any], Sequence[tuple[Any, Any, Any]]]


class Part(NamedTuple):
    """The decision for a part of the model, as tensors: see `Decision`."""

    committed: tf.Tensor
    steps: tf.Tensor
    shares: Shares


class Verdict(NamedTuple):
    """The decision of all workers, as tensors: see `Decision`.

    at: when they had decided, as by `now`. allowed: whether there is no problem.
    """

    at: tf.Tensor
    allowed: tf.Tensor
    problem: tf.Tensor
    is_last: tf.Tensor
    agreed: tf.Tensor
    counts: tf.Tensor
    trained: tf.Tensor
    parts: list[Part]


class Consensus:
    """The reports of a model's replicas, and the decision of all workers from them.

    Args:
        replicas: the local replicas.
        block: the counters of the open block.
        settings: the strategy's settings.
        left_out: minibatches that were left out for NaN or Inf; None: none are.

    Attributes:
        columns: the columns of a report that depend on the model.
        signatures: for each weight a number that must be equal on all replicas.
        other_signatures: the same for the state, as it was at first or was set, and for the frozen
            weights.
        request: what this worker asks of all (see `Request`), a float64 variable.
        began: since when the sync waits for other workers, as by `now`; 0 if it does not.
        weights_seen: for each replica a number that is 0 as long as no sync has had a minibatch of
            it that counts.
    """

    def __init__(
        self, replicas: Replicas, block: Block, settings: Settings, left_out: LeftOut | None
    ) -> None:
        site, variables, make = replicas.site, replicas.variables, replicas.site.make
        self._replicas, self._block, self._site = replicas, block, site
        self._fragments, self._left_out = settings.fragments, left_out
        self._share = settings.nonfinite_share
        shared, rates = len(replicas.shared_counts), len(variables.rates)
        self.columns = Columns.of(block.parts, shared, rates, left_out is not None)
        self.weights_seen = np.zeros(site.num_replicas)
        # All workers must start from the same weights, also if a script has loaded them.
        others = [*variables.state, *variables.frozen]
        self.signatures = make(_signatures(variables.weights), "signatures")
        self.other_signatures = make(_signatures(others), "other_signatures")
        self.request = make(tf.zeros([], tf.float64), "request")
        self.began = make(tf.zeros([], tf.float64), "sync_began")

    def reached(self, running: tf.Tensor, anchors: Buckets) -> tuple[tf.Tensor, Verdict]:
        """Returns when this worker came to the sync, as by `now`, and what all decide there.

        Args:
            running: whether this worker has data left.
            anchors: buckets of the replicas' state as the last sync wrote it.
        """
        if self._site.is_alone:
            began, read = self._read(running, anchors)
            return began, self.decide(read, tf.constant(""))
        began, rows = self.report(running, anchors)
        reports = self.gather(rows, began)
        return began, self.decide(reports, self.apart(reports))

    def met(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchanges one number of each worker.

        The number travels in a report, by the same collective as before a sync. So a worker that
        runs a sync at this point is noticed.

        Returns:
            The numbers by rank; and the error if workers came to different exchanges, else "".
        """
        with tf.device("CPU:0"):
            began, mark = self._arrival()
            flags = tf.constant([0.0, -1.0, 0.0, 0.0], tf.float64)  # no data, no bad weight
            others = tf.zeros([self.columns.width - SAMPLES - 1], tf.float64)
            row = tf.concat([flags, mark, number[tf.newaxis], others], 0)
            devices = len(self._site.devices)
            reports = self.gather(tf.stack([row] * devices), began)
            return reports[::devices, SAMPLES], self.apart(reports)

    def report(self, running: tf.Tensor | bool, anchors: Buckets) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when this worker came to the sync, as by `now`, and its reports.

        The reports have the shape [local replicas, columns].
        """
        began, read = self._read(running, anchors)
        shape = [len(self._site.devices), self.columns.width]
        (rows,) = in_python(
            lambda *read: [self._rows(*read)], read, tf.TensorSpec(shape, tf.float64)
        )
        return began, rows

    def _read(self, running: tf.Tensor | bool, anchors: Buckets) -> tuple[tf.Tensor, _Read]:
        """Returns when this worker came to the sync, and the arguments of `_rows`."""
        began, mark = self._arrival()
        block = self._block
        with tf.control_dependencies([mark]), phase("check"):
            common = {
                "mark": mark,
                "running": running,
                "request": self.request.read_value(),
                "signature": self.signatures.read_value(),
                "others": self.other_signatures.read_value(),
                "steps": block.part_steps.read_value(),
                "taken": block.taken.read_value(),
                "pending": block.steps.read_value(),
                "period": block.period.read_value(),
            }
            if self._site.balance is not None:
                common["seconds"] = self._site.balance.seconds(began)
            left_out, summary = self._left_out, self._replicas.summary
            each = [
                (
                    summary(r, anchors),
                    samples.read_value(),
                    tf.zeros([0]) if left_out is None else left_out.of_epoch(r),
                )
                for r, samples in enumerate(block.samples)
            ]
            return began, (common, each)

    def _rows(
        self, common: dict[str, Any], each: Sequence[tuple[Array, Array, Array]]
    ) -> np.ndarray:
        """Returns the reports of the local replicas, [local replicas, columns]."""
        period, pending = common.pop("period"), common.pop("pending")
        common["signature"] = common["signature"].sum()
        common["others"] = common["others"].sum()
        common.update(never=period >= NEVER, idle=pending == 0)
        names, counts = len(self._replicas.averaged_names), len(self._replicas.shared_counts)
        rows = []
        for summary, samples, left_out in each:
            sums, of_steps, rates = np.split(summary, [names, names + counts])
            rows.append(report_of(sums, samples, of_steps, rates, left_out=left_out, **common))
        return np.stack(rows)

    def _arrival(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when this worker came to an exchange, as by `now`, and its mark."""

        def arrival() -> list[np.ndarray]:
            return [np.array([time.monotonic(), *self._site.place.mark()])]

        (numbers,) = in_python(arrival, (), tf.TensorSpec([1 + MARKS], tf.float64))
        return numbers[0], numbers[1:]

    def gather(self, rows: tf.Tensor, began: tf.Tensor) -> tf.Tensor:
        """Returns the table of all replicas' reports, [N, columns], the same on every worker."""
        if self._site.is_alone:
            return rows
        self.began.assign(began)
        with phase("wait"):
            table = self._site.reports.all_gather(rows, f"{self._site.name}/report")
        reports = tf.reshape(table, [-1, self.columns.width])
        with tf.control_dependencies([reports]):
            # The wait is over. If the reports forbid the sync, no other wait follows.
            self.began.assign(0.0)
        return reports

    def apart(self, reports: tf.Tensor) -> tf.Tensor:
        """Returns the sentence that says which worker is where, if they are apart; else ""."""
        site = self._site
        if self._site.is_alone:
            return tf.constant("")

        def told() -> tf.Tensor:
            mine = tf.numpy_function(
                lambda: np.array(site.place.told(), np.int32), [], tf.int32, stateful=True
            )
            mine.set_shape([TEXT_BYTES])
            table = site.reports.all_gather(mine, f"{site.name}/places")
            return tf.numpy_function(lambda rows: sentence(rows).encode(), [table], tf.string)

        changes = site.company.changes
        (differ,) = in_python(
            lambda table: [are_apart(table, changes)], (reports,), tf.TensorSpec([], tf.bool)
        )
        return tf.cond(differ, told, lambda: tf.constant(""))

    def decide(
        self, reports: tf.Tensor | _Read, apart: tf.Tensor, *, patient: bool = True
    ) -> Verdict:
        """Returns what all workers decide from the table of reports.

        It runs as Python: as operations it would be a third of those of a sync, all of which have
        to be made and optimised before the first step.

        Args:
            reports: the table of all replicas' reports; or what `_rows` makes it of, where this
                worker is alone.
            apart: the sentence for workers that have come to different exchanges, else "".
            patient: whether to wait a little if the sync is forbidden. A worker that fails ends
                what the others have not received yet, such as the table that says why.
        """
        columns, names = self.columns, self._replicas.averaged_names
        own = len(self._site.devices)

        def decided(
            table: Any, apart: bytes, replicas: int, first: int, period: int
        ) -> Sequence[Array | bytes]:
            at = time.monotonic()
            table = self._rows(*table) if isinstance(table, tuple) else table
            text = apart.decode() or problem_of(table, columns, names, own, self._share)
            if not text and len(table) == len(self.weights_seen):
                self.weights_seen += table[:, columns.samples].max(1)
            if text and patient and not self._site.is_alone:
                time.sleep(_GRACE_SECONDS)
            # With F fragments, each fragment's block is F sync periods long.
            block, balance = float(period) * self._fragments, self._site.balance
            share = None if balance is None else balance.mean_steps()
            local, by_speed = slice(first, first + own), share is not None
            found = decide(
                table,
                columns,
                text,
                local=local,
                replicas=replicas,
                block=share or block,
                by_speed=by_speed,
            )
            if balance is not None and not text:
                balance.close(found.trained.astype(int), table[::own, columns.seconds.start])
            return at, not text, *found

        replicas, first = self._site.replicas_now()
        arguments = reports, apart, replicas, first, self._block.period.read_value()
        parts, f32, f64 = self._block.parts, tf.float32, tf.float64
        at, allowed, problem, is_last, agreed, counts, trained, *of_parts = in_python(
            decided,
            arguments,
            tf.TensorSpec([], f64),
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec([], tf.string),
            tf.TensorSpec([], tf.bool),
            tf.TensorSpec([3], f64),
            tf.TensorSpec([len(self._replicas.shared_counts)], f64),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([parts], tf.bool),
            tf.TensorSpec([parts], f32),
            tf.TensorSpec([parts, own], f32),
            tf.TensorSpec([parts], f32),
            tf.TensorSpec([parts], f32),
        )
        made = [
            Part(committed, steps, Shares(portions, divisor, of_block))
            for committed, steps, portions, divisor, of_block in zip(
                *map(tf.unstack, of_parts), strict=True
            )
        ]
        return Verdict(at, allowed, problem, is_last, agreed, counts, trained, made)


def _signatures(variables: Sequence[Sequence[tf.Variable]]) -> tf.Tensor:
    """Returns the signature of each variable's component on the first device."""
    signatures = [signature_of(variable[0]) for variable in variables]
    return tf.stack(signatures) if signatures else tf.zeros([0], tf.float64)
