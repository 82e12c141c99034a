"""Checkpoints of both kinds of run: writing, checking, choosing and restoring them."""

from __future__ import annotations

import abc
import itertools
import json
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfpara.checkpoint.local_store import LocalStore
from tfpara.checkpoint.manifest import is_async
from tfpara.checkpoint.remote_store import RemoteStore
from tfpara.checkpoint.store import MANIFEST, CheckpointError, Store
from tfpara.cluster.call_site import Purpose
from tfpara.remote_files import is_url
from tfpara.strategy import HAS_WEIGHTS, StateHolder
from tfpara.sync.workers.settings_check import differences
from tfpara.typing import Array, Json

IF_DAMAGED = ("refuse", "start")
# A worker's part of a checkpoint also has the arrays that belong to callbacks and other objects.
# The names of these arrays begin with this prefix.
ARRAYS = "arrays of "
# Errors that may be raised when a part is read, or when a state is set from a part.
_UNREADABLE = (tf.errors.OpError, ValueError, TypeError, AttributeError, LookupError)
_ADVICE = "give tfpara.callbacks.Checkpoint to fit on every worker"


class Checkpoints(abc.ABC):
    """The checkpoints of one model; every process that runs callbacks calls the same methods."""

    _is_async: ClassVar[bool]  # whether these are checkpoints of asynchronous runs

    def __init__(self, model: keras.Model, directory: str | os.PathLike[str], keep: int) -> None:
        self.model = model
        self._strategy = model.distribute_strategy
        self.store = store_at(directory, keep)
        self._next = 0

    # -- defined by each kind of run -------------------------------------------------------------

    @abc.abstractmethod
    def _facts(self) -> dict[str, Json]:
        """Returns entries of the manifest, among them "run" and "versions".

        A run that resumes must have the same settings in "run". With other "versions" its numbers
        may differ in the last digits.
        """

    @abc.abstractmethod
    def _tensors(self) -> dict[str, Array]:
        """Returns the tensors of this process's part, by name."""

    @abc.abstractmethod
    def _take_over(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Sets all state from a checkpoint. This method must run no collective."""

    @abc.abstractmethod
    def _check_run(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Refuses a checkpoint of another run."""

    def lock(self) -> None:
        """Locks the directory for this run, and checks that all workers share it."""
        # Each run writes parts under a mark of its own, because a worker of an earlier run may
        # still be writing its part.
        self.store.mark = self._everyones(secrets.token_hex(4), "mark")[0]
        self._together(self.store.lock, "lock", chief_only=True)
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

    def save(self, position: Callable[[], Mapping[str, Json]]) -> None:
        """Writes a checkpoint, with `position()`. No state may change before this returns.

        If a worker cannot write, all raise CheckpointError. Earlier checkpoints are intact.
        """
        number, self._next = self._next, self._next + 1
        manifest = {
            **self._facts(),
            "position": dict(position()),
            "states": _collected(self._strategy.states),
        }
        try:
            self._together(lambda: self.store.begin(number), "begin", chief_only=True)
            tensors = self._tensors() | self._arrays(manifest["states"])
            rank = self._strategy.worker_index
            parts = self._together(lambda: self.store.write_part(number, rank, tensors), "write")
            manifest["workers"] = len(parts)
            manifest["files"] = {name: mark for part in parts for name, mark in part.items()}
            self._together(lambda: self.store.commit(number, manifest), "commit", chief_only=True)
        except CheckpointError:
            if self._strategy.is_chief:
                self.store.abandon(number)
            raise

    def restore(self, if_damaged: str) -> tuple[int, dict[str, Json]] | None:
        """Restores the newest undamaged checkpoint.

        Returns its number and its manifest, or None without any checkpoint.

        If there are checkpoints but all are damaged, `if_damaged="refuse"` raises an error, and
        "start" returns None. If the newest undamaged one is of another run or kind of strategy,
        this raises CheckpointError.
        """
        problems = []
        for number in self._together(self.store.numbers, "numbers")[0]:
            problem = self._problem(number)
            if problem is None:
                read = self._together(lambda n=number: self.store.read_manifest(n), "manifest")
                found = number, read[self._strategy.worker_index]
                self._read(self._check_run, *found)
                self._together(lambda found=found: self._read(self._take_over, *found), "load")
                return found
            warnings.warn(f"{problem}; trying the checkpoint before it.", stacklevel=2)
            problems.append(problem)
            self.store.damaged.add(number)
        if problems and if_damaged == "refuse":
            raise CheckpointError(
                f"no checkpoint in {self.store.directory} can be used: {'; '.join(problems)}. To "
                'train from the beginning, remove the directory or give if_damaged="start".'
            )
        return None

    def _read(self, action: Callable[..., None], number: int, manifest: Mapping[str, Json]) -> None:
        """Calls an action with a checkpoint; raises its errors of reading as CheckpointError."""
        try:
            action(number, manifest)
        except _UNREADABLE as error:
            why = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{self.store.path(number)} cannot be used ({type(error).__name__}: {why})"
            ) from error

    def _arrays(self, states: Mapping[str, Json]) -> dict[str, Array]:
        """Returns the arrays of objects whose state has `HAS_WEIGHTS`, by name."""
        return {
            f"{ARRAYS}{name}/{k}": array
            for name, state in states.items()
            if isinstance(state, dict) and state.get(HAS_WEIGHTS)
            for k, array in enumerate(self._strategy.states[name].weights)
        }

    def _give_states(self, states: Mapping[str, Json], reader: Any) -> None:
        """Restores the objects that have a state; `reader` has their arrays."""
        for name, state in states.items():
            holder = self._strategy.states.get(name)
            if holder is None:
                warnings.warn(
                    f"the checkpoint has a state of {name!r}, which this run does not have; it is "
                    "left out.",
                    stacklevel=2,
                )
                continue
            try:
                holder.set_state(state)
                if isinstance(state, dict) and state.get(HAS_WEIGHTS):
                    keys = (f"{ARRAYS}{name}/{k}" for k in itertools.count())
                    holder.weights = [
                        reader.get_tensor(key)
                        for key in itertools.takewhile(reader.has_tensor, keys)
                    ]
            except _UNREADABLE as error:
                raise ValueError(
                    f"set_state() of {name!r} does not take its state: {type(error).__name__}: "
                    f"{error}"
                ) from error

    def _everyones(self, value: Json, name: str) -> list[Json]:
        return self._strategy.everyones(value, Purpose(f"in Checkpoint ({name})", _ADVICE))

    def _together(
        self, action: Callable[..., Json], name: str, chief_only: bool = False
    ) -> list[Json]:
        """Runs an action on every worker, or on the chief alone; returns the results by rank.

        If it fails on one, all raise CheckpointError, which names that worker.
        """
        result = problem = None
        if self._strategy.is_chief or not chief_only:
            try:
                result = action()
            except (CheckpointError, OSError) as error:
                problem = str(error)
        everyone = self._everyones([result, problem], name)
        for worker, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                where = f"worker {worker}: " if len(everyone) > 1 else ""
                raise CheckpointError(where + theirs)
        return [value for value, _ in everyone]

    def _problem(self, number: int) -> str | None:
        """Returns why no worker can use a checkpoint; None if all can.

        Raises CheckpointError if it is of the other kind of strategy.
        """

        def found() -> str | None:
            try:
                manifest = self.store.read_manifest(number)
                if is_async(manifest) == self._is_async:
                    self.store.check(number, manifest)
                    return None
            except CheckpointError as error:
                return str(error)
            raise self._of_other_kind(number)

        return self._together(found, "problem", chief_only=True)[0]

    def _of_other_kind(self, number: int) -> CheckpointError:
        theirs, callback = "AsyncStrategy", "AsyncCheckpoint"
        if self._is_async:
            theirs, callback = "PeriodicSyncStrategy", "callbacks.Checkpoint"
        return CheckpointError(
            f"{self.store.path(number)}/{MANIFEST} cannot be used (it is of the other kind of "
            f"strategy: go on with tfpara.{theirs} and tfpara.{callback}, which have written it, "
            "or give this run a directory of its own)"
        )


def store_at(directory: str | os.PathLike[str], keep: int) -> Store:
    """Returns the store of a directory, a path or URL (`Store`); raises as `RemoteFolder` does."""
    if is_url(directory):
        return RemoteStore(os.fspath(directory), keep)
    return LocalStore(Path(directory), keep)


def facts_of_model(model: keras.Model) -> dict[str, Json]:
    """Returns the facts about a model in which a resumed run must agree."""
    shapes = [f"{tuple(v.shape)} {v.dtype}" for v in model.trainable_variables]
    optimizer: Any = getattr(model, "optimizer", None)
    return {"model": "; ".join(shapes), "optimizer": type(optimizer).__name__}


def check_run(
    path: str | os.PathLike[str], manifest: Mapping[str, Json], facts: Mapping[str, Json]
) -> None:
    """Compares a checkpoint's settings with those of this run; warns if versions differ.

    `facts` has "run" and "versions" of this run, as the manifest has them. If settings differ,
    raises CheckpointError, which names them.
    """
    mine = json.loads(json.dumps(facts["run"], default=repr))
    differing = differences({"the checkpoint": manifest["run"], "this run": mine})
    if differing:
        raise CheckpointError(
            f"{path} is of another run. {differing}. Resume with the same settings, or give this "
            "run a directory of its own."
        )
    versions = facts["versions"]
    others = {k: v for k, v in manifest["versions"].items() if versions.get(k, v) != v}
    if others:
        warnings.warn(
            f"{path} was written with {', '.join(f'{k} {v}' for k, v in others.items())}; numbers "
            "may differ in the last digits.",
            stacklevel=3,
        )


def _collected(states: Mapping[str, StateHolder]) -> dict[str, Json]:
    """Returns the states of objects, by name; raises CheckpointError if JSON cannot carry one."""
    found = {}
    for name, holder in states.items():
        try:
            found[name] = json.loads(json.dumps(holder.get_state()))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {name!r} cannot be kept ({error}): get_state() must return "
                "numbers, texts, lists and dicts of Python's own."
            ) from error
    return found
