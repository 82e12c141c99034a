"""The strategy as callbacks, checkpoints and programs use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpara.cluster.call_site import Purpose
from tfpara.strategy import StateHolder, Strategy
from tfpara.sync.data.position import Pass
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.settings import Settings
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.workers import data_place
from tfpara.sync.workers.company import Company
from tfpara.sync.workers.json_exchange import everyones
from tfpara.typing import Json


class ForCallbacks(Strategy):
    """The side of a `PeriodicSyncStrategy` that callbacks, checkpoints and programs use."""

    extended: PeriodicSyncExtended

    @property
    def company(self) -> Company:
        return self.extended.worker.company

    @property
    def states(self) -> dict[str, StateHolder]:
        return self.extended.states

    def request(self, request: Request) -> None:
        """Requests, on any worker, something that all are to do; they agree at the next sync."""
        for synchronizer in self.extended.models.synchronizers:
            synchronizer.graph.request(request)

    def everyones(self, value: Json, purpose: Purpose) -> list[Json]:
        return everyones(value, self.extended.control, purpose)

    @property
    def blocks_differ(self) -> bool:
        return self.company.changes or self.extended.balance is not None

    def note(self, text: str) -> None:
        """Prints a note once, on the chief."""
        self.extended.notes.tell(text)

    def synchronizer_of(self, model: keras.Model) -> Synchronizer:
        """Returns the synchronizer of a built and compiled model; makes one if there is none."""
        return self.extended.models.synchronizer_of(model)

    @property
    def settings(self) -> Settings:
        """The settings, with those that depend on the number of replicas filled in."""
        return self.extended.settings

    @property
    def blocks_closed(self) -> int:
        """How often Python code has closed the open blocks; the same number on all workers."""
        return self.extended.models.blocks_closed

    def note_scheduled_period(self) -> None:
        """Notes that callbacks of `fit` set the sync period."""
        self.extended.momentum.is_scheduled = True

    def note_restored_period(self, sync_period: int | None) -> None:
        """Notes τ after a checkpoint has set it."""
        self.extended.momentum.sync_period = sync_period

    def put_back_sync_period(self, sync_period: int | None) -> None:
        """Sets τ again after a failed `fit`, even if that has left a block open."""
        self.extended.momentum.set_period(sync_period)

    def position(self, first: int, steps: int) -> dict[str, Json]:
        """Returns the position at a sync, after `first` minibatches and `steps` of each replica."""
        found = self.company.epoch_units.position() if steps else {}
        if found:
            return found
        passes = self.extended.data.passes
        begun = passes.present() if passes is not None and passes.steps_per_epoch else None
        if begun is not None:
            found["pass"] = dataclasses.asdict(begun)
        return found | {"minibatches": first + steps * self.num_replicas}

    def go_on_from(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Sets where an epoch begins to read its data: at a checkpoint's position within it."""
        within = position if position.get("epoch") == epoch else {}
        first, steps = within.get("minibatches", 0), within.get("steps", 0)
        begun = Pass(epoch, first, steps) if steps else None
        if "pass" in position:
            begun = Pass(**position["pass"])
        seen = self.extended.models.steps_seen
        self.extended.data.position.move(epoch, seen, first, steps, begun)
        if first:
            self.company.epoch_units.resume(epoch, position)

    def steps_resumed(self, epoch: int) -> int:
        position = self.extended.data.position
        return position.resumed if position.epoch == epoch else 0

    def answered(self, *requests: Request) -> None:
        """Forgets requests of these kinds, also one that is agreed on; all call it at one sync."""
        for synchronizer in self.extended.models.synchronizers:
            synchronizer.graph.answered(*requests)

    def datasets_by_number(
        self, minibatches: Callable[[int, int], tf.data.Dataset]
    ) -> tf.distribute.DistributedDataset:
        """Does what `datasets_by_epoch` does, for a function that itself selects minibatches."""

        def make(context: object) -> tf.data.Dataset:
            place = data_place.present()
            assert place is not None
            return minibatches(place.epoch, place.first)

        return self.extended.datasets_by_epoch(make)
