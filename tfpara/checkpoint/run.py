"""Checkpoints of a run under a `PeriodicSyncStrategy`, and exact resume.

A checkpoint is taken at a sync, where all replicas are at the same step. It holds

- the global model, momentum and averages, of which each worker writes the pieces that it keeps;
- every replica's own weights, optimizer slots, statistics, dropout seeds and metrics;
- counters, the states of callbacks, Python's and NumPy's random state, the position in the data.

A run that is resumed on the same number of replicas continues bit for bit where TensorFlow is
deterministic (on CPUs). On another number, every replica starts from the weights that the rule
would broadcast, with the optimizer's slots of one of the former replicas.
"""

from __future__ import annotations

import json
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpara.checkpoint.base import Checkpoints, check_run, facts_of_model
from tfpara.checkpoint.parts import Parts
from tfpara.checkpoint.store import CheckpointError
from tfpara.checks import versions
from tfpara.keras_model import check_optimizers_known, optimizers
from tfpara.sync.data.reading import random_states, set_random_states
from tfpara.sync.keras.optimizer_steps import build_optimizers
from tfpara.sync.one_sync.state_vars import Kind, Slot, slots_of
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.tensorflow.model_variables import has_schedule
from tfpara.typing import Array, Json


class SyncCheckpoints(Checkpoints):
    """The checkpoints of one model of a `PeriodicSyncStrategy`.

    `may_change` has those keys of the strategy's `data_plan` that may differ when a run is resumed.
    """

    _is_async = False

    def __init__(
        self,
        model: keras.Model,
        directory: str | os.PathLike[str],
        keep: int,
        may_change: tuple[str, ...] = (),
    ) -> None:
        build_optimizers(model)
        super().__init__(model, directory, keep)
        self._may_change = may_change
        # How many steps each optimizer took in earlier calls of `fit`. These calls may have used
        # other optimizers, because the model may have been compiled anew since.
        steps = self._strategy.extended.steps.step_counts()
        self._steps_before = weakref.WeakKeyDictionary(dict(steps))
        # The generation in which the writing of the present checkpoint began; None if no checkpoint
        # is being written. The generation changes only in an elastic run.
        self._began_in: int | None = None
        self._told_of_lock = False
        # The variables that `restore_epoch` is to set, and their values.
        self._of_epoch: list[tuple[tf.Variable, tf.Tensor]] = []

    @property
    def synchronizer(self) -> Synchronizer:
        """The model's synchronizer."""
        with self._strategy.scope():
            return self._strategy.synchronizer_of(self.model)

    def restore_epoch(self, steps: int) -> None:
        """Restores metrics and the open block again, since `fit` resets them as it begins.

        `steps` is the number of steps that each replica has made in the epoch.
        """
        for variable, value in self._of_epoch:
            variable.assign(value)
        self._of_epoch = []
        left_out = self.synchronizer.graph.left_out
        if left_out is not None:
            left_out.go_on(steps)

    # -- elastic runs ----------------------------------------------------------------------------

    def state(self) -> dict[str, Json]:
        """Returns the state that a worker takes over when it joins an elastic run."""
        return {"mark": self.store.mark, "next": self._next}

    def join(self, state: Mapping[str, Json]) -> None:
        """Takes over the `state` of the other workers of an elastic run."""
        self.store.mark, self._next = state["mark"], state["next"]

    def save(self, position: Callable[[], Mapping[str, Json]]) -> None:
        """Writes a checkpoint at a sync.

        In an elastic run the members, and so the position, may change during that. Then the present
        members write the checkpoint anew.
        """
        self._note_unknown_optimizers()
        while True:
            self._take_the_lock()
            self._began_in = self._strategy.company.generation
            try:
                return super().save(position)
            except _ChangedError:
                if self._strategy.is_chief:
                    self.store.abandon(self._next - 1)
            finally:
                self._began_in = None

    def _note_unknown_optimizers(self) -> None:
        steps, before = self._strategy.extended.steps, self._steps_before
        now = dict(steps.step_counts())
        used = [each for each in steps.optimizers_of(self.model) if now[each] != before.get(each)]
        try:
            check_optimizers_known(self.model, used, "a checkpoint")
        except ValueError as error:
            self._strategy.note(f"{error} A resumed run would begin with a new one.")

    def _take_the_lock(self) -> None:
        """Locks the directory if this worker has become the chief of an elastic run."""
        if not (self._strategy.company.changes and self._strategy.is_chief):
            return
        try:
            self.store.lock()
        except CheckpointError as error:
            # A former chief that is suspended may hold the lock. That does no harm: the run has
            # gone on without the former chief, so the former chief's next exchange fails before it
            # can write.
            if not self._told_of_lock:
                self._told_of_lock = True
                warnings.warn(f"{error} A former chief may hold it; goes on.", stacklevel=2)

    def _everyones(self, value: Json, name: str) -> list[Json]:
        everyone = super()._everyones([value, self._began_in], name)
        # All workers compare the same values. So either all raise the error and write the
        # checkpoint anew, or none does.
        began_in = {generation for _, generation in everyone}
        if began_in != {None} and began_in != {self._strategy.company.completed_in}:
            raise _ChangedError
        return [value for value, _ in everyone]

    # -- content ---------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Json]:
        settings = self._strategy.settings
        compiled = {}
        # Only the chief's `jit_compile` is kept. It may differ between workers, because
        # what "auto" stands for depends on the device.
        if self._strategy.is_chief:
            compiled["jit_compile"] = str(bool(getattr(self.model, "jit_compile", False)))
        return {
            "run": {
                **settings.of_a_run(),
                "sync_period": settings.sync_period,
                **facts_of_model(self.model),
            },
            "versions": {**versions(), **compiled},
            "replicas": self._strategy.num_replicas,
            "bucket_sizes": self.synchronizer.graph.global_state.bucket_sizes,
        }

    def _check_run(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Refuses a checkpoint of another run; entries of `data_plan` in `may_change` may differ.

        Entries that the checkpoint lacks count as equal: in older versions a run left out those of
        its own `may_change`.
        """
        mine = self._facts()
        free = {f"data_plan.{key}" for key in self._may_change}
        free |= {
            key for key in mine["run"].keys() - manifest["run"] if key.startswith("data_plan.")
        }
        theirs, mine = (
            {**facts, "run": {k: v for k, v in facts["run"].items() if k not in free}}
            for facts in (manifest, mine)
        )
        check_run(self.store.path(number), theirs, mine)

    def _tensors(self) -> dict[str, Array]:
        ids = self._strategy.local_replica_ids
        # If the global state is not sharded, it is the same on all workers. Then only the chief
        # writes it.
        cells = self._strategy.is_chief or self.synchronizer.graph.global_state.is_sharded
        tensors = {
            slot.key(ids): slot.variable.read_value()
            for slot in slots_of(self.model)
            if not slot.empty and (cells or slot.kind is not Kind.HOLDER)
        }
        tensors["random"] = tf.constant(json.dumps(random_states()))
        return tensors

    # -- restoring -------------------------------------------------------------------------------

    def _take_over(self, number: int, manifest: Mapping[str, Json]) -> None:
        self.synchronizer.give_up_block()
        sizes, mine = manifest["bucket_sizes"], self.synchronizer.graph.global_state.bucket_sizes
        if sizes != mine:
            raise CheckpointError(
                f"the checkpoint has its weights in {len(sizes)} buckets, of other sizes than the "
                f"{len(mine)} of this version. Resume with the version of tfpara that wrote it, or "
                "start anew."
            )
        readers = self.store.readers(number, manifest)
        parts = Parts(readers, manifest["replicas"], sizes)
        self._of_epoch = []
        slots = slots_of(self.model)
        self._check_optimizer(number, parts, slots)
        has_metrics = parts.shapes("metrics") == _shapes(slots, "metrics")
        if not has_metrics and manifest["position"]["steps"]:
            warnings.warn(
                f"{self.store.path(number)} is from the middle of an epoch, and of a model with "
                "other metrics: the metrics of this epoch cover only the rest of it.",
                stacklevel=2,
            )
        for slot in slots:
            if not has_metrics and slot.name.startswith("metrics/"):
                continue
            value = parts.value(slot, self._strategy)
            if value is not None and slot.kind is not Kind.BLOCK:
                slot.variable.assign(value)
            if value is not None and (slot.kind is Kind.BLOCK or slot.kind.is_aggregated):
                self._of_epoch.append((slot.variable, value))
        self._strategy.note_restored_period(self.synchronizer.sync_period)
        rank = self._strategy.worker_index % len(readers)
        set_random_states(json.loads(parts.of_worker(rank, "random")))
        self._give_states(manifest["states"], readers[rank])

    def _check_optimizer(self, number: int, parts: Parts, slots: Sequence[Slot]) -> None:
        """Refuses a checkpoint without all variables of the optimizer; it may have more of them."""
        theirs, mine = parts.shapes("optimizer"), _shapes(slots, "optimizer")
        if not mine.items() <= theirs.items():
            of_theirs, own = (list(each.values())[:6] for each in (theirs, mine))
            raise CheckpointError(
                f"{self.store.path(number)} is of another run: the shapes of its optimizer's "
                f"variables begin with {of_theirs}, and here with {own}. Compile with the same "
                "settings of the optimizer (a number or a schedule as its rate, its momentum, …), "
                "or give this run a directory of its own."
            )

    def restore(self, if_damaged: str) -> tuple[int, dict[str, Json]] | None:
        restored = super().restore(if_damaged)
        if restored is not None and restored[1]["replicas"] != self._strategy.num_replicas:
            self._start_anew(*restored)
            self._note_schedule(restored[1]["replicas"])
        return restored

    def _note_schedule(self, replicas: int) -> None:
        if any(map(has_schedule, optimizers(self.model))):
            self._strategy.note(
                f"the run goes on with {self._strategy.num_replicas} in place of {replicas} "
                "replicas, and the optimizer's learning-rate schedule counts the steps of one "
                "replica. If an epoch now has more or fewer of them, the schedule ends too early "
                "or too late. In the next run compile with a number as the rate, and give fit "
                "tfpara.callbacks.LearningRate(schedule, ...), where the schedule counts epochs."
            )

    def _start_anew(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Sets every replica to the weights from which the rule lets a new replica start."""
        weights = self.synchronizer.broadcast_point()
        readers = self.store.readers(number, manifest)
        parts = Parts(readers, manifest["replicas"], manifest["bucket_sizes"])
        pending = [p for p in parts.of_replicas("sync/pending_samples") if p is not None]
        for k, is_open in enumerate(self.synchronizer.open_fragments(pending)):
            # The mean of the former replicas has what they have trained since the last sync.
            if is_open:
                mean = np.mean(parts.of_replicas(f"weights/{k}"), 0)
                weights[k] = tf.constant(mean, weights[k].dtype)
        self.synchronizer.start_from(weights)


def _shapes(slots: Sequence[Slot], group: str) -> dict[str, list[int]]:
    """Returns the shapes of the model's variables of a group, such as "optimizer", by name."""
    return {
        slot.name: slot.variable.shape.as_list()
        for slot in slots
        if slot.replica == 0 and slot.name.startswith(f"{group}/")
    }


class _ChangedError(Exception):
    """The members of an elastic run have changed during a checkpoint."""
