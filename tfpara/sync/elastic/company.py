"""Elastic: the company of a run whose workers may join and leave."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfpara.cluster.call_site import FIT_END, Purpose, call
from tfpara.collectives.members import Members
from tfpara.contexts import attributes
from tfpara.elastic.settings import Elastic as Settings
from tfpara.strategy import StateHolder
from tfpara.sync.elastic.connection import LOST, Connection, in_short
from tfpara.sync.elastic.data_plan import DataPlan
from tfpara.sync.elastic.fit_again import FitAgain
from tfpara.sync.elastic.rejoin import Rejoin
from tfpara.sync.keras.fit_arguments import deal_out
from tfpara.sync.one_sync.sized_rule import check_sizes
from tfpara.sync.one_sync.statistics import Agreement
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.workers.company import Company, Fit
from tfpara.typing import Json, Scalar

_log = logging.getLogger(__name__)


class Elastic(Company):
    """The workers of a run that continues while some are lost, leave and join.

    `connection` leads to the meeting point, for which a worker waits `timeout_seconds` at most.
    `epoch_units` are this worker's data of the present epoch, by the plan of all workers.
    """

    changes = True
    # After each change of members, TensorFlow prepares all functions anew. If the graph of a step
    # contained the sync, TensorFlow would prepare the sync twice: in this graph, and in the
    # function that Python code calls at the end of an epoch.
    syncs_in_steps = False
    epoch_units: DataPlan

    def __init__(self, settings: Settings, timeout_seconds: float) -> None:
        self._settings = settings
        self.connection = Connection(settings, timeout_seconds)
        self._inside = False  # whether `together` is running an exchange

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        return self.connection.resolver()

    def attach(self, extended: PeriodicSyncExtended) -> None:
        settings, devices = extended.settings, len(extended.worker_devices)
        # The rule may start TensorFlow, so it is checked only now: the server runs already.
        follows = settings.following_rule
        largest = check_sizes(follows or settings.rule, self._settings.max_workers, devices)
        if follows is not None:
            extended.settings = dataclasses.replace(settings, largest_rule=largest)
        self._extended = extended
        self.connection.attach(extended)
        self._rejoin = Rejoin(extended, self.connection)
        self._fit = FitAgain(self._rejoin)
        self.epoch_units = self._rejoin.data

    @property
    def joining(self) -> bool:
        return self.connection.joining

    @property
    def generation(self) -> int:
        return self.connection.form.number

    @property
    def completed_in(self) -> int:
        return self._rejoin.progress.completed_in

    @property
    def members(self) -> Members:
        return self.connection.members

    @property
    def leader(self) -> str:
        return self.connection.names[0]

    @property
    def is_chief(self) -> bool:
        """Whether this worker has the lowest rank of all members that are left.

        Within `fit` a lost member counts until the others have met without it, after `fit` not.
        """
        connection = self.connection
        if connection.joining:
            return False
        lower = connection.form.tasks[: connection.rank]
        return not lower or (not connection.in_fit and connection.line.lost.issuperset(lower))

    def founding_replicas(self, devices: int) -> int:
        return self.connection.founders * devices

    def replicas_now(self, devices: int) -> tuple[Scalar, Scalar]:
        size, rank = self.members.size_and_rank()
        return size * devices, rank * devices

    def together(self, exchange: Callable[[], Json]) -> Any:
        """Runs an exchange of all members, which each member calls once.

        If a member is lost meanwhile, the remaining members repeat the exchange. But if the
        exchange has already succeeded on one of them, the others take over its result instead.
        """
        if self._inside:
            return exchange()
        progress, place = self._rejoin.progress, self._extended.call_site
        number, met = progress.operations, place.met
        while True:
            try:
                with attributes(self, _inside=True):
                    result = exchange()
                    progress.completed_in = self.generation
            except LOST as error:
                _log.info("tfpara: an exchange has failed: %s", in_short(error))
                # `met` counts the completed exchanges. Only some members may have counted the
                # failed one, so each member sets `met` back.
                place.met = met
                self._rejoin.meet(failed=True)
                others = self._rejoin.others
                if others["operations"] <= number:
                    continue
                result, progress.completed_in = others["result"], others["completed_in"]
                place.met = others["met"]
            progress.operations, progress.result = number + 1, result
            return result

    def check_in_fit(self) -> None:
        if not self.connection.in_fit or self._extended.call_site.is_in_callbacks:
            raise ValueError(
                "a model is trained outside of the steps of fit, and elastic= needs these: a loop "
                "of your own, or train_on_batch, would not repeat the sync in which a worker is "
                "lost. Call model.fit, or leave elastic= out."
            )

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        """Lets the chief write a file; if the chief is lost meanwhile, the next chief writes it."""
        if self.joining:
            return

        def chief() -> int:
            self._extended.control.together(call(name))
            return self.connection.form.tasks[0]

        writer = None
        while writer != (found := self.together(chief)):
            writer = found
            if writer == self.connection.line.task:
                write()

    def finish_block(self, synchronizer: Synchronizer, purpose: Purpose) -> None:
        # The sync is not marked with its purpose. Otherwise the workers would compare their
        # purposes, and fail if these differ. Here they may differ, because a worker whose data have
        # ended may take part in this sync for another purpose.
        del purpose
        self.together(synchronizer.finish_block)

    def land(self, synchronizer: Synchronizer) -> Agreement:
        try:
            return synchronizer.land()
        except LOST as error:
            _log.info("tfpara: a sync has failed: %s", in_short(error))
            self._rejoin.meet(failed=True)
            return synchronizer.agreement()

    def finish_blocks(self, purpose: Purpose) -> None:
        if not self.joining and not self._rejoin.progress.epoch_is_closed:
            for synchronizer in self._extended.models.synchronizers:
                self.finish_block(synchronizer, purpose)

    def sums(self, parts: Sequence[tf.Tensor], evaluates: bool) -> list[tf.Tensor]:
        # All parts are summed in one exchange, so that all sums are over the same members.
        if not parts:
            return []
        flat = tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)

        def summed() -> list[float]:
            hosts = self._extended.control.collectives
            # In an evaluation each worker has processed all data, so the values of any one worker
            # are the result.
            if evaluates:
                return hosts.all_gather(flat, "metrics")[0].numpy().tolist()
            return hosts.all_reduce([flat], "metrics")[0].numpy().tolist()

        total = tf.constant(self.together(summed), tf.float64)
        pieces = tf.split(total, [int(tf.size(part)) for part in parts])
        return [
            tf.cast(tf.reshape(piece, part.shape), part.dtype)
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def fit(self, model: keras.Model, given: dict[str, Any], fit: Fit) -> keras.callbacks.History:
        self._fit.check(model)
        deal_out(model.distribute_strategy, self.epoch_units.began, given)
        self.epoch_units.take(given)
        with self._fit.training(model):
            history = self._fit.call(model, given, fit)
            if len(self.connection.form.tasks) > 1:
                self._extended.models.finish_blocks(FIT_END)
        return history

    def fit_begins(self) -> None:
        self._fit.begin()

    def epoch_begins(self, epoch: int) -> None:
        self._fit.begin_epoch(epoch)

    def check_step(self) -> None:
        self._fit.check_step()

    def steady(self) -> AbstractContextManager[Any]:
        return self.connection.steady.shared()

    def report(self, waits: float, place: str) -> None:
        self.connection.line.report(waits, place)

    def leave(self) -> bool:
        self.connection.leaves = True
        return False

    def share_state(self, name: str, holder: StateHolder) -> None:
        self._rejoin.transfer.keep(name, holder)

    def keep_record(self, checkpoints: StateHolder, append: Callable[[str, str], None]) -> None:
        self._rejoin.transfer.holders["checkpoints"] = checkpoints
        self._rejoin.record = functools.partial(append, "generations.jsonl")

    def write_record(self, syncs: int) -> None:
        self._rejoin.write_record(syncs)

    def part(self) -> None:
        self.connection.part(completed=not self._fit.gave_up)

    def program_ends(self) -> None:
        # `part` tells the others that this worker has completed the run. That is true only if `fit`
        # was called, and if its last call has returned, or has ended because all workers were asked
        # to end.
        if self._rejoin.progress.fit >= 0 and not self._fit.gave_up:
            self.part()
