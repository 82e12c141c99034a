"""Checkpoints of a run under a `PeriodicSyncStrategy`, and exact resume.

A checkpoint is taken at a sync, where all replicas are at the same step. It holds the global
model, momentum and averages (each worker writes the parts it keeps), every replica's own weights,
optimizer slots, statistics, dropout seeds and metrics, the counters, the state of callbacks,
Python's and NumPy's random state, and the position in the data.

A run resumed on the same number of replicas continues as if it had not been interrupted. It is bit
for bit the same where TensorFlow itself is deterministic (on CPUs). On another number, every
replica starts from the point that the rule would broadcast, with the optimizer's slots of one of
the former replicas.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfpara.checkpoint.store import CheckpointError, Store
from tfpara.checks import versions
from tfpara.cluster.place import Purpose
from tfpara.strategy import StateHolder
from tfpara.sync.data.reading import random_states, set_random_states
from tfpara.sync.keras.hooks import build_optimizers
from tfpara.sync.one_sync.state_vars import Kind, Slot, slots_of
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.settings_check import differences
from tfpara.typing import Array, Json

if TYPE_CHECKING:
    from tfpara.sync.strategy import PeriodicSyncStrategy

IF_DAMAGED = ("refuse", "start")
# The manifest's further keys, beside those of every run, and their types.
_FIELDS = {
    "replicas": int,
    "bucket_sizes": list,
    "position.steps": int,
    "position.minibatches": int,
}


class Checkpoints:
    """The checkpoints of one model, for writing and reading; every worker calls the same methods.

    Args:
        model: a built and compiled model.
        directory: the directory, which all workers share.
        keep: number of the newest checkpoints that stay.
        may_change: keys of the strategy's `data_plan` that may differ when a run is resumed.

    Raises:
        ValueError: the model has an optimizer whose slots cannot be made before its first step.
    """

    def __init__(
        self,
        model: keras.Model,
        directory: str | os.PathLike[str],
        keep: int,
        may_change: tuple[str, ...] = (),
    ) -> None:
        build_optimizers(model)
        self._model = model
        self._strategy = model.distribute_strategy
        self._may_change = may_change
        self._extended = self._strategy.extended
        self.store = Store(directory, keep, _FIELDS)
        self._next = 0
        self._began_in: int | None = None  # generation in which a checkpoint is begun
        self._told_of_lock = False
        # Variables and values for `restore_epoch`.
        self._of_epoch: list[tuple[tf.Variable, tf.Tensor]] = []

    def is_of(self, model: keras.Model) -> bool:
        """Returns whether they are of this model, and not of another one that looks alike."""
        return self._model is model

    @property
    def synchronizer(self) -> Synchronizer:
        """The model's synchronizer."""
        with self._strategy.scope():
            return self._extended.synchronizer_of(self._model)

    def lock(self) -> None:
        """Locks the directory for this run.

        Raises:
            CheckpointError: on every worker, if the chief cannot.
        """
        self._together(self.store.lock, "lock", chief_only=True)
        # Each run has its own mark, since a worker of an earlier run may still write its part.
        self.store.mark = self._everyones(secrets.token_hex(4), "mark")[0]
        seen = self._together(lambda: [socket.gethostname(), self.store.numbers()], "numbers")
        (chief_host, numbers), *_ = seen
        for worker, (host, theirs) in enumerate(seen):
            if theirs != numbers:
                self.store.release()
                raise CheckpointError(
                    f"{self.store.directory} must be one directory that all workers share: the "
                    f"chief on {chief_host} and worker {worker} on {host} see different "
                    f"checkpoints in it, {numbers} and {theirs}."
                )
        self._next = max(numbers, default=0) + 1

    def join(self, state: Mapping[str, Json]) -> None:
        """Goes on as the other workers of an elastic run do, which tell by `state`."""
        self.store.mark, self._next = state["mark"], state["next"]

    def state(self) -> dict[str, Json]:
        """What a worker that joins an elastic run has to know."""
        return {"mark": self.store.mark, "next": self._next}

    def save(self, position: Callable[[], Mapping[str, Json]]) -> int:
        """Writes a checkpoint at a sync; returns its number.

        Args:
            position: gives where the run is. In an elastic run that may change meanwhile: the
                checkpoint is then written anew, by the workers that are there.

        Raises:
            CheckpointError: on every worker, if one could not write; the message names it. Earlier
                checkpoints are intact.
        """
        while True:
            number, self._next = self._next, self._next + 1
            self._take_the_lock()
            elastic = self._extended.elastic
            self._began_in = elastic.form.number if elastic is not None else None
            try:
                self._save(number, position())
                return number
            except _ChangedError:
                if self._strategy.is_chief:
                    self.store.abandon(number)
            finally:
                self._began_in = None

    def _take_the_lock(self) -> None:
        """Locks the directory where this worker has become the chief of an elastic run."""
        if self._extended.elastic is None or not self._strategy.is_chief:
            return
        try:
            self.store.lock()
        except CheckpointError as error:
            # A former chief that is stopped holds it. The others have done without it, so it will
            # write nothing: its next exchange fails.
            if not self._told_of_lock:
                self._told_of_lock = True
                warnings.warn(f"{error} A former chief may hold it; goes on.", stacklevel=2)

    def _versions(self) -> dict[str, str]:
        """Returns what the last digits of a run depend on beside its settings."""
        return {**versions(), "jit_compile": str(bool(getattr(self._model, "jit_compile", False)))}

    def _save(self, number: int, position: Mapping[str, Json]) -> None:
        rank = self._strategy.worker_index
        manifest = {
            **self._of_a_run(),
            "versions": self._versions(),
            "replicas": self._strategy.num_replicas,
            "workers": self._strategy.num_workers,
            "bucket_sizes": self.synchronizer.graph.global_state.bucket_sizes,
            "position": dict(position),
            "states": collected(self._extended.states),
        }
        try:
            begun = self._together(lambda: self.store.begin(number), "begin", chief_only=True)
            tensors = self._tensors()
            parts = self._together(
                lambda: self.store.write_part(number, rank, tensors, begun[0]), "write"
            )
            manifest["files"] = {name: mark for part in parts for name, mark in part.items()}
            self._together(lambda: self.store.commit(number, manifest), "commit", chief_only=True)
        except CheckpointError:
            if self._strategy.is_chief:
                self.store.abandon(number)
            raise

    def restore(self, if_damaged: str) -> dict[str, Json] | None:
        """Restores the newest undamaged checkpoint; returns its position, or None without any.

        Args:
            if_damaged: "refuse" or "start", what to do if there are checkpoints and all are
                damaged.

        Raises:
            CheckpointError: on every worker, if all are damaged and `if_damaged` is "refuse", or
                the newest undamaged one is of another run.
        """
        numbers = self.store.numbers()
        problems = []
        for number in numbers:
            problem = self._problem(number)
            if problem is None:
                read = self._together(lambda n=number: self.store.read_manifest(n), "manifest")
                manifest = read[self._strategy.worker_index]
                mine = self._of_a_run()["run"]
                check_run(self.store.path(number), manifest, mine, self._versions())
                self._together(lambda n=number, m=manifest: self._load(n, m), "load")
                if manifest["replicas"] != self._strategy.num_replicas:
                    self._start_anew(number, manifest)
                return {**manifest["position"], "number": number}
            warnings.warn(f"{problem}; trying the checkpoint before it.", stacklevel=2)
            problems.append(problem)
            self.store.damaged.add(number)
        if problems and if_damaged == "refuse":
            raise CheckpointError(
                f"no checkpoint in {self.store.directory} can be used: {'; '.join(problems)}. To "
                'train from the beginning, remove the directory or give if_damaged="start".'
            )
        return None

    def restore_epoch(self) -> None:
        """Restores metrics and the open block again, when `fit` has begun the interrupted epoch.

        The begin of `fit` closes the block, and Keras resets the metrics.
        """
        for variable, value in self._of_epoch:
            variable.assign(value)
        self._of_epoch = []

    # -- exchanges between workers -------------------------------------------------------------

    def _everyones(self, value: Json, name: str) -> list[Json]:
        advice = "give tfpara.callbacks.Checkpoint to fit on every worker"
        return everyones(value, self._extended.control, Purpose(f"in Checkpoint ({name})", advice))

    def _together(
        self, action: Callable[..., Json], name: str, chief_only: bool = False
    ) -> list[Json]:
        """Runs an action on every worker, or on the chief alone; returns the results by rank.

        Raises:
            CheckpointError: on all workers, if the action fails on one; the message names it.
        """
        result = problem = None
        if self._strategy.is_chief or not chief_only:
            try:
                result = action()
            except (CheckpointError, OSError) as error:
                problem = str(error)
        everyone = self._everyones([result, problem, self._began_in], name)
        elastic = self._extended.elastic
        # All compare the same values, so that all write the checkpoint anew, or none does.
        began_in = {generation for _, _, generation in everyone}
        if elastic is not None and began_in != {None} and began_in != {elastic.completed_in}:
            raise _ChangedError
        for worker, (_, theirs, _) in enumerate(everyone):
            if theirs is not None:
                where = f"worker {worker}: " if len(everyone) > 1 else ""
                raise CheckpointError(where + theirs)
        return [value for value, _, _ in everyone]

    def _problem(self, number: int) -> str | None:
        """Returns why a checkpoint cannot be used, the same on all workers; None if it can."""
        problem = None
        if self._strategy.is_chief:
            try:
                self.store.check(number, self.store.read_manifest(number))
            except CheckpointError as error:
                problem = str(error)
        return self._everyones(problem, "problem")[0]

    def _of_a_run(self) -> dict[str, Json]:
        run = self._extended.settings.of_a_run()
        optimizer = getattr(self._model, "optimizer", None)
        shapes = [f"{tuple(v.shape)} {v.dtype}" for v in self._model.trainable_variables]
        return {
            "run": {
                **{k: v for k, v in run.items() if k.split(".")[-1] not in self._may_change},
                "sync_period": self._extended.settings.sync_period,
                "model": "; ".join(shapes),
                "optimizer": type(optimizer).__name__,
            }
        }

    # -- what is in a part ---------------------------------------------------------------------

    def _tensors(self) -> dict[str, Array]:
        """Returns the tensors of this worker's part, by name."""
        ids = self._strategy.local_replica_ids
        # A global state that is not sharded is the same on all workers, so the chief writes it.
        cells = self._strategy.is_chief or self.synchronizer.graph.global_state.is_sharded
        tensors = {
            slot.key(ids): slot.variable.read_value()
            for slot in slots_of(self._model)
            if not slot.empty and (cells or slot.kind is not Kind.HOLDER)
        }
        tensors["random"] = tf.constant(json.dumps(random_states()))
        return tensors

    # -- restoring -----------------------------------------------------------------------------

    def _load(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Sets all state from a checkpoint; no collective may run in it."""
        try:
            self._take_over(self.store.readers(number, manifest), manifest)
        except UNREADABLE as error:
            raise unreadable(self.store.path(number), error) from error

    def _take_over(self, readers: list[Any], manifest: Mapping[str, Json]) -> None:
        self.synchronizer.give_up_block()
        sizes, mine = manifest["bucket_sizes"], self.synchronizer.graph.global_state.bucket_sizes
        if sizes != mine:
            raise CheckpointError(
                f"the checkpoint has its weights in {len(sizes)} buckets, of other sizes than the "
                f"{len(mine)} of this version. Resume with the version of tfpara that wrote it, or "
                "start anew."
            )
        parts = Parts(readers, manifest["replicas"], sizes)
        self._of_epoch = []
        for slot in slots_of(self._model):
            value = parts.value(slot, self._strategy)
            if value is not None and slot.kind is not Kind.BLOCK:
                slot.variable.assign(value)
            if value is not None and slot.kind.is_of_epoch:
                self._of_epoch.append((slot.variable, value))
        self._extended.sync_period = self.synchronizer.sync_period
        rank = self._strategy.worker_index % len(readers)
        set_random_states(json.loads(parts.of_worker(rank, "random")))
        for name, state in manifest["states"].items():
            if name in self._extended.states:
                give_state(name, self._extended.states[name], state)
            else:
                warnings.warn(
                    f"the checkpoint has a state of {name!r}, which this run does not have; it is "
                    "left out.",
                    stacklevel=2,
                )

    def _start_anew(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Sets every replica to the weights from which the rule lets a new replica start.

        Fragments that were trained since their last sync start from the mean of the former
        replicas, so that this training is not lost.
        """
        weights = self.synchronizer.broadcast_point()
        readers = self.store.readers(number, manifest)
        parts = Parts(readers, manifest["replicas"], manifest["bucket_sizes"])
        pending = [p for p in parts.of_replicas("sync/pending_samples") if p is not None]
        for k, is_open in enumerate(self.synchronizer.open_fragments(pending)):
            if is_open:
                mean = np.mean(parts.of_replicas(f"weights/{k}"), 0)
                weights[k] = tf.constant(mean, weights[k].dtype)
        self.synchronizer.start_from(weights)


class _ChangedError(Exception):
    """Members of an elastic run were lost, or came, while something was done together."""


class Parts:
    """The parts of a checkpoint, from which each slot of a run takes its value.

    Args:
        readers: one for each worker's part.
        replicas: number of replicas of the run that wrote it.
        sizes: lengths of the buckets of the global state.
    """

    def __init__(self, readers: Sequence[Any], replicas: int, sizes: Sequence[int]) -> None:
        self._readers = readers
        self._replicas = replicas
        self._sizes = sizes
        self._reader_of = {name: r for r in readers for name in r.get_variable_to_shape_map()}
        there = {name.split("/")[0] for name in self._reader_of if name.startswith("replica-")}
        if len(there) != replicas:
            raise ValueError(f"it has {len(there)} replicas, and its manifest says {replicas}")

    def value(self, slot: Slot, strategy: PeriodicSyncStrategy) -> Array | None:
        """Returns the value of a slot of this run; None if the slot stays as it is.

        Raises:
            CheckpointError: the checkpoint lacks the value.
        """
        if slot.kind is Kind.HOLDER:
            return self._of_holder(slot)
        get: Callable[[int, str], Any]
        if slot.replica is None:
            owner, owners = strategy.worker_index, strategy.num_workers
            former, get = len(self._readers), self.of_worker
        else:
            owner, owners = strategy.local_replica_ids[slot.replica], strategy.num_replicas
            former, get = self._replicas, self._of_replica
        if slot.kind in (Kind.REPLICA, Kind.BLOCK) and strategy.num_replicas != self._replicas:
            return None
        if slot.kind is Kind.RANDOM and owner >= former:
            return None
        sources: Sequence[int] = [owner % former]
        if slot.kind is Kind.SUM:
            sources = range(owner, former, owners)
        elif slot.kind is Kind.MEAN and owners != former:
            sources = range(former)
        values = [get(source, slot.name) for source in sources]
        if any(value is None for value in values):
            if slot.absent is None:
                raise _lacks(slot.name)
            return tf.fill(slot.variable.shape, tf.cast(slot.absent, slot.variable.dtype))
        if slot.kind is Kind.SUM:
            return sum(values, start=tf.zeros(slot.variable.shape, slot.variable.dtype))
        if len(values) > 1:
            return tf.cast(np.mean(values, 0, np.float64), slot.variable.dtype)
        return values[0]

    def of_worker(self, rank: int, name: str) -> Any:
        """Returns a tensor of a worker's part; None if the part lacks it."""
        reader = self._readers[rank]
        return reader.get_tensor(name) if reader.has_tensor(name) else None

    def of_replicas(self, name: str) -> list[Any]:
        """Returns a tensor of each replica of the former run; None for one that lacks it."""
        return [self._of_replica(replica, name) for replica in range(self._replicas)]

    def _of_replica(self, replica: int, name: str) -> Any:
        key = f"replica-{replica}/{name}"
        return self._reader_of[key].get_tensor(key) if key in self._reader_of else None

    def _of_holder(self, slot: Slot) -> NDArray[Any]:
        """Returns a part of a field, cut from the parts in which the former run wrote it."""
        field, start = slot.name.rsplit("/", 1)
        parts = {
            int(name.rsplit("/", 1)[1]): (name, reader)
            for name, reader in self._reader_of.items()
            if name.rsplit("/", 1)[0] == field
        }
        if not parts and slot.absent is None:
            raise _lacks(slot.name)
        if not parts:
            return np.full(slot.variable.shape, slot.absent, slot.variable.dtype.as_numpy_dtype)
        shape, begin, size = slot.variable.shape, int(start), self._sizes[int(field.split("/")[-1])]
        if not shape.rank:  # a scalar, which is the same in all parts
            name, reader = parts[min(parts)]
            return reader.get_tensor(name)
        value = np.zeros(shape, slot.variable.dtype.as_numpy_dtype)  # zeros past the bucket's end
        for at, (name, reader) in parts.items():
            (length,) = reader.get_variable_to_shape_map()[name]
            first, last = max(at, begin), min(at + length, begin + shape[0], size)
            if first < last:
                piece = reader.get_tensor(name)[first - at : last - at]
                value[first - begin : last - begin] = piece
        return value


# Errors that come of reading a part, or of setting a state that it has.
UNREADABLE = (tf.errors.OpError, ValueError, TypeError, AttributeError, LookupError)


def unreadable(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """Returns the error of a checkpoint that has another content than its manifest says."""
    why = " ".join(str(error).split())[:200]
    return CheckpointError(f"{path} cannot be used ({type(error).__name__}: {why})")


def _lacks(name: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint lacks {name}, which this model has.")


def check_run(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Json],
    mine: Mapping[str, Json],
    versions: Mapping[str, str],
) -> None:
    """Compares a checkpoint's settings with those of this run; other versions are a warning.

    Args:
        path: path of the checkpoint.
        manifest: manifest of the checkpoint.
        mine: settings of this run, by name.
        versions: what the last digits depend on in this run, by name.

    Raises:
        CheckpointError: the settings differ; the message names those that do.
    """
    mine = json.loads(json.dumps(mine, default=repr))
    # Version 0.1 listed its version among the settings. The format's number decides instead.
    theirs = {k: v for k, v in manifest["run"].items() if k != "tfpara version"}
    states = (theirs.get("local_state"), mine.get("local_state"))
    if "tfpara version" in manifest["run"] and states == ("keep", "auto"):
        theirs["local_state"] = "auto"  # what was the default before there was "auto"
    rule = theirs.get("rule")
    if isinstance(rule, str) and "warmup=" not in rule:
        # A run of a version without a warm-up of η goes on with the η that it had.
        warmup = "False" if "warmup=False" in mine.get("rule", "") else "None"
        theirs["rule"] = re.sub(r"(^BMUF.*compat=[\w']+)", rf"\1, warmup={warmup}", rule)
    differing = differences({"the checkpoint": theirs, "this run": mine})
    if differing:
        raise CheckpointError(
            f"{path} is of another run. {differing}. Resume with the same settings, or give this "
            "run a directory of its own."
        )
    others = {k: v for k, v in manifest["versions"].items() if versions.get(k) != v}
    if others:
        warnings.warn(
            f"{path} was written with {', '.join(f'{k} {v}' for k, v in others.items())}; numbers "
            "may differ in the last digits.",
            stacklevel=3,
        )


def taken_up(
    directory: str | os.PathLike[str],
    number: int,
    position: Mapping[str, Json],
    where: str,
    epochs: int,
) -> str:
    """Returns the message on a resumed run: where it continues, or that it is complete.

    Args:
        directory: directory of the checkpoints.
        number: number of the checkpoint.
        position: its "epoch", from 0, and whether training was "finished".
        where: the place within the epoch, in words; "" at its begin.
        epochs: the epochs of this `fit`.
    """
    done = position["epoch"]
    if not position["finished"] and done < epochs:
        return f"Resuming from checkpoint {number}: epoch {done + 1}{where}."
    if position["finished"]:
        why = f"it stopped by itself after {done} epochs"
        longer = (
            "To go on after it, call fit once more after this one, with "
            f"initial_epoch={done} and a Checkpoint of another directory. "
        )
    else:
        why = f"{epochs} of {epochs} epochs are trained"
        longer = "To train longer, give more epochs. "
    return (
        f"The run in {os.fspath(directory)!r} is complete: {why} (checkpoint {number}), so nothing "
        f"is trained now. {longer}To begin anew, give another directory or remove this one."
    )


def give_state(name: str, holder: StateHolder, state: Json) -> None:
    """Sets the state of an object to that of a checkpoint.

    Raises:
        ValueError: the object does not take it; the message names it.
    """
    try:
        holder.set_state(state)
    except UNREADABLE as error:
        raise ValueError(
            f"set_state() of {name!r} does not take its state: {type(error).__name__}: {error}"
        ) from error


def collected(states: Mapping[str, StateHolder]) -> dict[str, Json]:
    """Returns the states of objects with `get_state`, by name, as JSON values.

    Raises:
        CheckpointError: JSON cannot carry a state.
    """
    collected_states = {}
    for name, holder in states.items():
        try:
            collected_states[name] = json.loads(json.dumps(holder.get_state()))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {name!r} cannot be kept ({error}): get_state() must return "
                "numbers, texts, lists and dicts of Python's own."
            ) from error
    return collected_states
