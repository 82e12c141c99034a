"""Checkpoints of the parameter servers' state, which the chief alone writes and reads.

A checkpoint holds weights, the optimizer's slots, averages, counters, how far each chunk of the
epoch is, the weights that are not trained, and the states of callbacks. The workers' own state is
not kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpara.checkpoint.base import ARRAYS, Checkpoints, check_run, facts_of_model
from tfpara.checkpoint.store import CheckpointError
from tfpara.checks import versions
from tfpara.typing import Array, Json


class ServerCheckpoints(Checkpoints):
    """The checkpoints of a model of an `AsyncStrategy` in `fit`.

    `data_plan` has the facts and settings that a resumed run must share, by name.
    """

    _is_async = True

    def __init__(
        self,
        model: keras.Model,
        directory: str | os.PathLike[str],
        keep: int,
        data_plan: Mapping[str, Json],
    ) -> None:
        super().__init__(model, directory, keep)
        self._running: Any = self._strategy.running
        self._plan = data_plan

    def _facts(self) -> dict[str, Json]:
        strategy, rate = self._strategy, self.model.optimizer.learning_rate
        return {
            "run": {
                "rule": repr(strategy.rule_of_a_run),
                "sync_period": strategy.sync_period,
                "averages": {name: repr(a) for name, a in strategy.averages.items()},
                "parameter servers": len(self._running.server.shards),
                "chunks": self._running.chunks.count,
                **facts_of_model(self.model),
                **{f"data_plan.{key}": value for key, value in self._plan.items()},
            },
            "versions": versions(),
            "data": self._running.chunks.facts,
            "learning_rate": float(rate) if isinstance(rate, keras.Variable) else None,
        }

    def _variables(self) -> dict[str, tf.Variable]:
        """Returns the variables of a checkpoint: the servers', and those that are not trained."""
        work = self._running.work
        frozen = {f"frozen/{k}": v.value for k, v in enumerate(work.frozen)}
        integers = {f"integer/{k}": v.value for k, v in enumerate(work.integers)}
        return {**self._running.server.variables(), **frozen, **integers}

    def _tensors(self) -> dict[str, Array]:
        return {name: tf.identity(held) for name, held in self._variables().items()}

    def _check_run(self, number: int, manifest: Mapping[str, Json]) -> None:
        """Refuses a checkpoint of another run or, if taken in an epoch, of other minibatches."""
        theirs, mine = dict(manifest), self._facts()
        if manifest["position"]["within"]:
            for facts in (theirs, mine):
                facts["run"] = {**facts["run"], **facts["data"]}
        check_run(self.store.path(number), theirs, mine)

    def _take_over(self, number: int, manifest: Mapping[str, Json]) -> None:
        (reader,) = self.store.readers(number, manifest)
        shapes = reader.get_variable_to_shape_map().items()
        there = {name: shape for name, shape in shapes if not name.startswith(ARRAYS)}
        # Version 0.2 of tfpara did not keep integer variables. If that version wrote the
        # checkpoint, the integer variables keep the values that they have in this program.
        held = {
            name: variable
            for name, variable in self._variables().items()
            if name in there or not name.startswith("integer/")
        }
        self._check_shapes(number, there, {name: list(v.shape) for name, v in held.items()})
        for name, variable in held.items():
            variable.assign(reader.get_tensor(name))
        self._give_states(manifest["states"], reader)
        if manifest["learning_rate"] is not None:
            self.model.optimizer.learning_rate = manifest["learning_rate"]
        position = manifest["position"]
        names = ("epoch", "within", "finished", "order")
        self._running.resume(**{name: position[name] for name in names})

    def _check_shapes(
        self, number: int, there: Mapping[str, Json], mine: Mapping[str, Json]
    ) -> None:
        """Refuses a checkpoint with other variables of the model, its metrics or its optimizer."""
        for name in sorted({*there, *mine}):
            theirs, own = there.get(name, "none"), mine.get(name, "none")
            if theirs != own:
                raise CheckpointError(
                    f"{self.store.path(number)} is of another run: its variable {name!r} has the "
                    f"shape {theirs}, and here {own}. Resume with the same model, metrics and "
                    "optimizer, or give this run a directory of its own."
                )
