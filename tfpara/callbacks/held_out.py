"""Scores of the run's weights on held-out data."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from tfpara import files, fit_call
from tfpara.callbacks.scalars import Scalars, flat
from tfpara.callbacks.sync_watch import SyncWatch
from tfpara.callbacks.table import Table
from tfpara.cluster.call_site import of_callback
from tfpara.keras_model import carried_states
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Data, Json, Logs
from tfpara.whole_number import checked_whole

_LENGTH = of_callback("HeldOut")


class HeldOut(fit_call.Callback):
    """Scores weights of the run on held-out data: after each epoch, and within epochs if requested.

    The scores at the end of an epoch are added to the epoch's log on every worker. For the first of
    `which` their names are `NAME_loss` and `NAME_METRIC`, for the others `NAME_WHICH_loss` and
    `NAME_WHICH_METRIC`. This callback runs before Keras' and your callbacks, which may read the
    scores.

    Within an epoch the weights are scored at syncs, when all workers are at the same step. With a
    `tfpara.AsyncStrategy` the workers train on; all weights of a score are from one moment.

    Args:
        dataset: held-out data: a dataset, a tuple (x, y) or (x, y, sample_weight) of arrays, or
            another form that `fit` takes as `validation_data`, but no generator. Every worker gives
            the same whole data, which are divided among the workers.
        which: the weights to score: "global", "local" (each replica's own, on its part of the
            data), an average's name, a list of these, or "all".
        name: prefix of the scores' names.
        times_per_epoch: number of scores in an epoch, including the score at its end (paper 000
            scores four models in each epoch). Above 1, the length of an epoch must be known.
        steps_per_epoch: minibatches of a replica in an epoch; in an elastic run, of a replica with
            which the run began; with a `tfpara.AsyncStrategy`, of all workers together. None: as
            Keras, or the data, state it.
        csv: file that gets a row for each score: epoch (passes over the data so far, a fraction),
            syncs, weights (one of `which`), and the metrics; one with several values has the
            columns name/0, name/1, … When an interrupted run resumes, the rows of the part that is
            trained again are removed, and other rows stay. The chief writes this file.
        log_dir: directory of TensorBoard's event files, whose steps are numbers of syncs. The chief
            writes them.

    Raises:
        ValueError: `times_per_epoch` below 1, None or a generator as the data, or another table in
            the CSV file; in `fit`, a name of weights that do not exist, or an epoch of unknown
            length with `times_per_epoch` above 1.
    """

    order = fit_call.Order.SCORES

    def __init__(
        self,
        dataset: Data,
        which: str | Sequence[str] = "global",
        name: str = "validation",
        *,
        times_per_epoch: int = 1,
        steps_per_epoch: int | None = None,
        csv: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        times_per_epoch = checked_whole("times_per_epoch", times_per_epoch)
        if steps_per_epoch is not None:
            steps_per_epoch = checked_whole("steps_per_epoch", steps_per_epoch, of="minibatches")
        if not which:
            raise ValueError(f'which={which!r} names no weights. Give "global", or "all".')
        self._dataset = checked_held_out(dataset)
        self._asked = which
        self._which: list[str] = []
        self._name = name
        self._times = times_per_epoch
        self._steps_per_epoch = steps_per_epoch
        self._table = _Scores(Path(csv)) if csv is not None else None
        self._scalars = Scalars(log_dir)
        self._epoch = 0
        self._steps_before = 0
        self._done = 0  # number of scores in this epoch so far
        self._has_position = False  # whether `_go_on` has been called in this epoch
        # The length of an epoch in steps (in an elastic run: in units). The length is computed when
        # an epoch begins, but only if an epoch has several scores. Otherwise it stays 0.
        self._length = 0
        # If this worker joins a run within an epoch, this is the number of scores that the epoch
        # had before. Otherwise it is None.
        self._taken: int | None = None
        self._watch = SyncWatch()

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        known = self._strategy.weight_names
        asked = [self._asked] if isinstance(self._asked, str) else list(self._asked)
        self._which = known if asked == ["all"] else asked
        unknown = [which for which in self._which if which not in known]
        if unknown:
            raise ValueError(
                f"HeldOut(which={unknown[0]!r}): there are no such weights. There are: "
                f"{', '.join(known)}; or all."
            )
        # In the logs, the names of the first weights' scores are short: they do not name the
        # weights. The global weights get these short names, so "global" is moved to the front.
        if "global" in self._which:
            self._which.sort(key=lambda which: which != "global")

        if self._times > 1:
            self._strategy.company.share_state("held out", self)

    def get_state(self) -> dict[str, Json]:
        """Returns the facts that a worker needs when it joins within the epoch."""
        return {"done": self._done if self._has_position else None}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Takes over the number of scores that the other workers have had in the present epoch."""
        self._taken = state["done"]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch, self._steps_before, self._has_position = epoch, 0, False
        strategy = self._strategy
        if self._times > 1:
            self._length = self._length_of_all()
            if isinstance(strategy, PeriodicSyncStrategy):
                self._watch.begin(self.model)
        if strategy.running is not None:
            # An AsyncStrategy counts batches from the start of the epoch, also after a resume. So
            # `_steps_before` stays 0.
            self._go_on(strategy.running.server.trained())

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._find_position()

    def _find_position(self) -> None:
        """Continues from the position, which `Checkpoint` sets after this `on_epoch_begin`."""
        if not self._has_position:
            self._steps_before = self._strategy.steps_resumed(self._epoch)
            self._go_on(self._steps_before)

    def _go_on(self, steps: int) -> None:
        """Continues in an epoch of which each replica has trained so many `steps`."""
        self._has_position = True
        part, taken, self._taken = self._part(steps), self._taken, None
        self._done = int(self._times * part) if taken is None else taken
        if self._table and self._strategy.is_chief:
            self._table.cut(self._epoch, part)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._times == 1 or self._done >= self._times - 1:
            return
        steps = self._steps_before + batch + 1

        def due() -> int:
            part = self._part(steps)  # if it is 1.0, the epoch is over, and `on_epoch_end` scores
            return int(self._times * part) if part < 1.0 else 0

        if isinstance(self.model.distribute_strategy, PeriodicSyncStrategy):
            found = self._watch.after_batch(self.model, batch, lambda _: due() > self._done)
            scores_now = found is not None
        else:
            scores_now = due() > self._done
        if scores_now:
            self._done, part = due(), self._part(steps)
            with self._epoch_kept():
                self._score(self._epoch + part)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._find_position()  # needed if the worker has had no batch in this epoch
        results = self._score(float(epoch + 1))
        if logs is None:
            return
        for number, which in enumerate(self._which):
            prefix = self._name if number == 0 else f"{self._name}_{which}"
            logs.update({f"{prefix}_{key}": value for key, value in results[which].items()})

    def _length_of_all(self) -> int:
        """Returns the steps of this epoch on the worker that has the most.

        In an elastic run it returns the units of the epoch, which all workers share.
        """
        strategy, steps = self._strategy, self._steps_per_epoch or self.params.get("steps")
        length = strategy.company.epoch_units.total(steps)
        # A worker that joins an elastic run within an epoch comes here without the other workers,
        # so it must not exchange values with them. No exchange is needed in an elastic run, because
        # the length is the same for all workers.
        lengths = [length] if strategy.company.changes else strategy.everyones(length, _LENGTH)
        if not all(lengths):
            raise ValueError(
                f"HeldOut(times_per_epoch={self._times}): the number of steps in an epoch is not "
                "known. Give steps_per_epoch."
            )
        return max(lengths)

    def _part(self, steps: int) -> float:
        """Returns which part of an epoch, in [0, 1], `steps` minibatches of a replica are."""
        if not self._length:
            return 0.0
        return min(1.0, self._strategy.company.epoch_units.trained(steps) / self._length)

    @contextlib.contextmanager
    def _epoch_kept(self) -> Iterator[None]:
        """A context that restores metrics and carried states, which `evaluate` changes."""
        variables = [*self.model.metrics_variables, *carried_states(self.model)]
        of_replicas = self.model.distribute_strategy.experimental_local_results
        kept = [(c, tf.identity(c)) for v in variables for c in of_replicas(v.value)]
        try:
            yield
        finally:
            for component, value in kept:
                component.assign(value)

    def _score(self, passes: float) -> dict[str, dict[str, float]]:
        strategy = self._strategy
        results = {}
        with strategy.at_one_moment(self.model, self._which) as syncs:
            for which in self._which:
                with strategy.weights(self.model, which):
                    results[which] = evaluate(self.model, self._dataset)
            if strategy.is_chief:
                self._write(passes, syncs(), results)
        return results

    def _write(self, passes: float, syncs: int, results: dict[str, dict[str, float]]) -> None:
        if self._table:
            for which, scores in results.items():
                place = {"epoch": passes, "syncs": syncs, "weights": which}
                self._table.add_score(place | flat(scores))
        values = {
            f"{self._name}/{which}/{key}": value
            for which, scores in results.items()
            for key, value in scores.items()
        }
        self._scalars.write(syncs, values)


def checked_held_out(data: Data) -> Data:
    """Returns held-out data; raises ValueError if there are none, or they can be read only once."""
    x = data[0] if isinstance(data, tuple | list) and data else data
    if x is None:
        raise ValueError("the held-out data are None. Give arrays, a dataset or a PyDataset.")
    if inspect.isgenerator(x):
        raise ValueError(
            "the held-out data are a generator. It can be read only once, but each score reads all "
            "data. Give arrays, a keras.utils.PyDataset, or tf.data.Dataset.from_generator("
            "function, output_signature=…)."
        )
    return data


def evaluate(model: keras.Model, data: Data) -> dict[str, float]:
    """Returns a model's loss and metrics on data that `fit` would take as `validation_data`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return model.evaluate(x, y, sample_weight=sample_weight, verbose=0, return_dict=True)


class _Scores(Table):
    """A table of scores, from which a resumed run removes the part that it trains again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, files.regular)
        rows = self.rows()
        if rows and not {"epoch", "syncs", "weights"} <= set(rows[0]):
            raise ValueError(
                f"csv={path} has the columns {', '.join(map(str, rows[0]))}, so it is no table of "
                "scores, and rows of it would be removed. Give another file."
            )

    def cut(self, epoch: int, part: float) -> None:
        """Removes the rows after a part of an epoch, and that of its end, which is scored again."""
        rows = self.rows()
        kept = [r for r in rows if float(r["epoch"]) < min(epoch + part + 1e-9, epoch + 1)]
        if len(kept) < len(rows):
            self.rewrite(kept, list(rows[0]))

    def add_score(self, row: dict[str, Json]) -> None:
        """Adds a row, and columns for metrics that the table lacks."""
        rows = self.rows()
        if rows and list(rows[0]) != list(row):
            columns = [*row, *(key for key in rows[0] if key not in row)]
            self.rewrite(rows, columns)
            row = {key: row.get(key, "") for key in columns}
        self.add([row])
