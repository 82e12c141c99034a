"""Passes over the data of `fit` and `evaluate`, which workers compare and divide."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfpara.cluster.call_site import FIT_BEGIN
from tfpara.contexts import attributes
from tfpara.sync.data import same_data
from tfpara.sync.data.position import Pass
from tfpara.sync.keras.batches import GeneratorSteps, PyDatasetSteps, ShuffledArrays, Steps
from tfpara.sync.keras.replacing import Method, data_adapters, trainer
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.typing import Json, Nest

_OWN = "data"  # the name, in a note, of data that each worker has for itself


def with_divided_data(make: Any) -> Method:
    """Replaces Keras' class of passes over data, so that workers compare and divide their data."""

    @functools.wraps(make, updated=())
    def making(distribute_strategy: Any = None, **kwargs: Any) -> Any:
        extended = getattr(distribute_strategy, "extended", None)
        if not isinstance(extended, PeriodicSyncExtended):
            return make(distribute_strategy=distribute_strategy, **kwargs)
        execution = kwargs.pop("steps_per_execution", 1)
        adapter = _adapter_of(kwargs, extended)
        given = isinstance(adapter, data_adapters.TFDatasetAdapter)
        data = adapter.get_tf_dataset() if given else None
        dataset = data if isinstance(data, tf.data.Dataset) else None
        _compare(adapter, dataset, extended)
        if dataset is not None and not same_data.divided_between_workers(dataset):
            # Keras takes the number of steps from the adapter's dataset. The given dataset counts
            # batches, and only the distributed dataset counts this worker's steps. So the adapter
            # gets the distributed dataset.
            data = distribute_strategy.experimental_distribute_dataset(dataset)
            adapter = data_adapters.TFDatasetAdapter(data)
        kind = Epochs if isinstance(adapter, (Steps, ShuffledArrays)) else Passes
        passes = kind(
            distribute_strategy=distribute_strategy,
            x=adapter,
            steps_per_epoch=kwargs.get("steps_per_epoch"),
            steps_per_execution=execution,
        )
        passes.extended, passes.dataset = extended, dataset
        passes.of_parts = _of_parts(adapter, data)
        passes.of_minibatches = getattr(data, "of_minibatches", False)
        return passes

    return making


def _adapter_of(given: dict[str, Any], extended: PeriodicSyncExtended) -> Any:
    """Returns an adapter of the data among the arguments of `fit`, of the kind by Keras' choice."""
    adapter = data_adapters.get_data_adapter(**given)
    if isinstance(adapter, data_adapters.PyDatasetAdapter):
        return PyDatasetSteps(given["x"], adapter, extended)
    if isinstance(adapter, data_adapters.GeneratorDataAdapter):
        return GeneratorSteps(adapter, extended)
    if isinstance(adapter, data_adapters.ArrayDataAdapter) and adapter._shuffle:
        return ShuffledArrays.of(adapter, extended)
    return adapter


def _compare(adapter: Any, dataset: tf.data.Dataset | None, extended: PeriodicSyncExtended) -> None:
    """Compares data with the other workers', and prints a note on batches that are too small."""
    divided = extended.data.share != (0, 1)
    known = (Steps, data_adapters.ArrayDataAdapter, data_adapters.TFDatasetAdapter)
    if divided and not isinstance(adapter, known):
        raise ValueError(
            f"{type(adapter).__name__.removesuffix('Adapter')} data are not divided among workers. "
            "Give each worker its part: data = strategy.distribute_datasets_from_function("
            "lambda context: dataset), with `dataset` a tf.data.Dataset of this worker's "
            "minibatches, and give them `data`."
        )
    place = extended.call_site
    # To compare their data, all workers must take part in an exchange. If a callback of `fit` calls
    # `evaluate`, other workers may be at other steps of `fit`, so the data are not compared.
    if not (place.fits and place.calls):
        drawn = isinstance(adapter, (PyDatasetSteps, ShuffledArrays))
        extended.data.check(_facts(adapter, dataset) if divided else {}, drawn)
    if place.fits and place.of_data() == FIT_BEGIN:
        rows = None
        if isinstance(adapter, data_adapters.ArrayDataAdapter):
            rows = min(adapter.batch_size, adapter._num_samples)
        elif dataset is not None and same_data.divided_between_workers(dataset):
            rows = same_data.batch_size(dataset)
        extended.notes.small_batches(rows)


def _of_parts(adapter: Any, data: Any) -> str:
    """Returns the name of data of which each worker reads a part, and not a part of each batch.

    It is "" for other data, and if the user's function divides the rest of a resumed epoch anew.
    """
    if isinstance(adapter, PyDatasetSteps):
        return "PyDataset"
    dataset = getattr(data, "given", data)
    if isinstance(dataset, tf.data.Dataset) and same_data.divided_between_workers(dataset):
        return "files" if same_data.files_are_divided(dataset) else ""
    return "" if data is None or getattr(data, "is_by_epoch", False) else _OWN


def _facts(adapter: Any, dataset: tf.data.Dataset | None) -> dict[str, Json]:
    """Returns facts by which this worker's data are compared with others'."""
    if isinstance(adapter, Steps):
        return adapter.facts()
    if isinstance(adapter, data_adapters.ArrayDataAdapter):
        return {
            "kind": "arrays",
            "rows": adapter._num_samples,
            "batch_size": adapter.batch_size,
            "values": same_data.values_of(adapter._inputs),
        }
    return {"kind": same_data.OWN} if dataset is None else same_data.facts_of_dataset(dataset)


class Passes(trainer.TFEpochIterator):
    """Keras' passes over data; with `steps_per_epoch` they may last several epochs, and go on."""

    extended: PeriodicSyncExtended
    of_parts = ""  # the result of `_of_parts`
    of_minibatches = False  # whether the data are minibatches that the user's function has made
    dataset: tf.data.Dataset | None = None  # the data, if they are a `tf.data.Dataset`
    steps_per_epoch: int | None
    _num_batches: int | None  # number of batches of a pass; None: not known
    _current_iterator: Iterator[Nest] | None
    _began = 0  # the epoch in which the present pass began
    # The iterator of a pass that another number of replicas may have begun; and by how many the
    # pass's minibatches exceed those of its steps with the present replicas.
    _continued: tuple[Iterator[Nest] | None, int] = None, 0

    def present(self) -> Pass | None:
        """Returns the pass that the next step continues; None if that step begins a new pass."""
        steps = 0 if self._current_iterator is None else self._steps_seen
        iterator, more = self._continued
        more = more if iterator is self._current_iterator else 0
        first = steps * self.extended.worker.replicas + more
        return Pass(self._began, first, steps) if steps else None

    def _interrupted_warning(self) -> None:
        """Warns of data that end before `steps_per_epoch`; without it they may end anywhere."""
        if self.steps_per_epoch and self.extended.worker.rank == 0:
            super()._interrupted_warning()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends an epoch where its data end. Keras would also shorten all later epochs to that."""
        length = self._num_batches
        with super().catch_stop_iteration():
            yield
        if not self.steps_per_epoch:
            self._num_batches = length

    def _enumerate_iterator(self) -> Iterator[Nest]:
        place, position = self.extended.call_site, self.extended.data.position
        if not place.fits or place.calls:
            yield from super()._enumerate_iterator()
            return
        self.extended.data.passes = self
        begun = position.begun if self.steps_per_epoch else None
        resumes = bool(position.steps or begun)
        self._note_workers(resumes)
        if resumes:
            self._note_order(begun.epoch if begun else position.epoch)
        if not self.steps_per_epoch:
            yield from super()._enumerate_iterator()
            return
        left = self.steps_per_epoch - position.take_steps()
        if self.present() is None:
            self._began = position.epoch
        if begun:
            with position.within(begun):
                self._current_iterator = iter(self._get_iterator())
            replicas = self.extended.worker.replicas
            steps = begun.first // replicas if self.of_minibatches else begun.steps
            self._began, self._steps_seen = begun.epoch, steps
            self._continued = self._current_iterator, begun.first - steps * replicas
        yield from self._of_epoch(left)

    def _of_epoch(self, steps: int) -> Iterator[Nest]:
        """Yields the elements that Keras' method yields, for the last `steps` steps of an epoch."""
        if steps > 0:
            with attributes(self, steps_per_epoch=steps):
                yield from super()._enumerate_iterator()
            return
        self.data_adapter.on_epoch_begin()
        if self._num_batches and self._steps_seen >= self._num_batches:
            self._current_iterator = None
        self.data_adapter.on_epoch_end()

    def _note_workers(self, resumes: bool) -> None:
        """Prints a note if a resumed pass was divided among another number of workers before."""
        if not self.of_parts:
            return
        data, own = self.extended.data, self.of_parts == _OWN
        parts = self.extended.worker.num_workers if own else data.shares[0][1]
        former, data.order.workers = data.order.workers, parts
        if resumes and former not in (None, parts):
            was, now = ("was", "is") if self.of_parts == "PyDataset" else ("were", "are")
            counts = " (each device counts as one)" if data.is_by_replica and not own else ""
            self.extended.notes.tell(
                f"the run goes on within an epoch, whose {self.of_parts} {was} divided among "
                f"{former} workers and now {now} among {parts}{counts}: rows of this epoch may be "
                f"trained twice or not at all. Start {former} workers to have each once."
            )

    def _note_order(self, epoch: int) -> None:
        """Prints a note if the rest of a resumed pass may have another order than before."""
        if self.dataset is None:
            return
        # In a new process, a shuffle with a seed begins again with the order of the first epoch. So
        # a seed is enough for a pass that began in the first epoch.
        why = same_data.why_order_differs(self.dataset, epoch == 0)
        if why:
            self.extended.notes.tell(
                f"the run goes on within its data, but their dataset {why}: rows may be trained "
                "twice or not at all. Give fit strategy.minibatches_by_epoch(lambda epoch: ...), "
                "whose data can be entered in the middle of an epoch."
            )


class Epochs(Passes):
    """Keras' passes over Python data or shuffled arrays; each begins when a batch is first used."""

    def _get_iterator(self) -> Iterable[Nest]:
        if self._current_iterator is not None:
            # Keras asks for the next pass before it calls the dataset's `on_epoch_end`, which may
            # change the data. So Keras gets an empty pass now, and the next pass begins later.
            return ()
        self.data_adapter.begin_pass()
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Nest]:
        if isinstance(self._current_iterator, type(iter(()))) or self.steps_per_epoch is None:
            self._current_iterator = None
        yield from super()._enumerate_iterator()
