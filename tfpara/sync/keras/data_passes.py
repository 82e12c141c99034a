"""Passes over data of `fit` and `evaluate`, which are compared and divided among the workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfpara.cluster.place import FIT_BEGIN
from tfpara.sync.data import same_data
from tfpara.sync.data.position import Pass
from tfpara.sync.keras.batches import GeneratorSteps, PyDatasetSteps, ShuffledArrays, Steps
from tfpara.sync.keras.replacing import Method, adapters, trainer
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.typing import Json, Nest


def with_divided_data(make: Any) -> Method:
    """Replaces the class of passes over data: data are compared and divided among the workers."""

    @functools.wraps(make, updated=())
    def making(distribute_strategy: Any = None, **kwargs: Any) -> Any:
        extended = getattr(distribute_strategy, "extended", None)
        if not isinstance(extended, PeriodicSyncExtended):
            return make(distribute_strategy=distribute_strategy, **kwargs)
        rest = {k: kwargs.pop(k) for k in ("steps_per_execution",) if k in kwargs}
        rest["steps_per_epoch"] = kwargs.get("steps_per_epoch")
        # Keras chooses the adapter, and raises its own errors. It takes an adapter as it is.
        adapter = adapters.get_data_adapter(**kwargs)
        if isinstance(adapter, adapters.PyDatasetAdapter):
            adapter = PyDatasetSteps(kwargs["x"], adapter, extended)
        elif isinstance(adapter, adapters.GeneratorDataAdapter):
            adapter = GeneratorSteps(adapter, extended)
        elif isinstance(adapter, adapters.ArrayDataAdapter) and adapter._shuffle:
            adapter = ShuffledArrays.of(adapter, extended)
        divided = extended.share != (0, 1)
        _check(adapter, extended, divided)
        # Within an epoch the workers may be at different steps, so nothing is exchanged there.
        if not (extended.place.fits and extended.place.calls):
            drawn = isinstance(adapter, (PyDatasetSteps, ShuffledArrays))
            extended.check_data(_facts(adapter) if divided else {}, drawn)
        if extended.place.of_data() == FIT_BEGIN:
            extended.note_batches(_rows_of_batches(adapter))
        why = _order_of(adapter)
        if isinstance(adapter, adapters.TFDatasetAdapter):
            dataset = adapter.get_tf_dataset()
            if isinstance(dataset, tf.data.Dataset) and not same_data.divided_between_workers(
                dataset
            ):
                # Keras counts the steps of an epoch by the distributed dataset's cardinality.
                dataset = distribute_strategy.experimental_distribute_dataset(dataset)
                adapter = adapters.TFDatasetAdapter(dataset)
        kind = Epochs if isinstance(adapter, (Steps, ShuffledArrays)) else Passes
        passes = kind(distribute_strategy=distribute_strategy, x=adapter, **rest)
        passes.extended, passes.why_order_differs = extended, why
        return passes

    return making


def _order_of(adapter: Any) -> Callable[[bool], str]:
    """Returns a function that says why data may have another order when they are read again.

    It is `same_data.why_order_differs` of these data, which is "" where the order is the same.
    """
    data = adapter.get_tf_dataset() if isinstance(adapter, adapters.TFDatasetAdapter) else None
    if isinstance(data, tf.data.Dataset):
        return lambda made_anew: same_data.why_order_differs(data, made_anew)
    return lambda made_anew: ""


def _check(adapter: Any, extended: PeriodicSyncExtended, divided: bool) -> None:
    """Raises ValueError if data cannot be divided between the replicas."""
    known = (Steps, adapters.ArrayDataAdapter, adapters.TFDatasetAdapter)
    if divided and not isinstance(adapter, known):
        raise ValueError(
            f"{type(adapter).__name__.removesuffix('Adapter')} data are not divided among workers. "
            "Give each worker its part: data = strategy.distribute_datasets_from_function("
            "lambda context: dataset), with `dataset` a tf.data.Dataset of this worker's "
            "minibatches, and give them `data`."
        )


def _rows_of_batches(adapter: Any) -> int | None:
    """Returns the rows of the largest batch that is divided among replicas; None: not known."""
    if isinstance(adapter, adapters.ArrayDataAdapter):
        return min(adapter.batch_size, adapter._num_samples)
    dataset = adapter.get_tf_dataset() if isinstance(adapter, adapters.TFDatasetAdapter) else None
    if not isinstance(dataset, tf.data.Dataset) or not same_data.divided_between_workers(dataset):
        return None
    return same_data.batch_size(dataset)


def _facts(adapter: Any) -> dict[str, Json]:
    """Returns facts by which this worker's data are compared with others'."""
    if isinstance(adapter, Steps):
        return adapter.facts()
    if isinstance(adapter, adapters.ArrayDataAdapter):
        return {
            "kind": "arrays",
            "rows": adapter._num_samples,
            "batch_size": adapter.batch_size,
            "values": same_data.values_of(adapter._inputs),
        }
    dataset = adapter.get_tf_dataset()
    if not isinstance(dataset, tf.data.Dataset):
        return {"kind": same_data.OWN}
    return same_data.facts_of_dataset(dataset)


class Passes(trainer.TFEpochIterator):
    """Keras' passes over data; with `steps_per_epoch` one of them may last several epochs.

    A resumed run goes on within the pass in which the former process was.
    """

    extended: PeriodicSyncExtended
    why_order_differs: Callable[[bool], str]
    steps_per_epoch: int | None
    _num_batches: int | None  # None: not known
    _current_iterator: Iterator[Nest] | None
    _began = 0  # the epoch in which the present pass began

    def present(self) -> Pass | None:
        """Returns the pass that the next step goes on with; None if it begins one."""
        steps = 0 if self._current_iterator is None else self._steps_seen
        first = steps * self.extended._num_replicas_in_sync
        return Pass(self._began, first, steps) if steps else None

    def _interrupted_warning(self) -> None:
        """Warns that data had an end before `steps_per_epoch`; else they may end where they do."""
        if self.steps_per_epoch and self.extended._is_chief:
            super()._interrupted_warning()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends an epoch with its data; Keras would cut all later epochs to its length."""
        length = self._num_batches
        with super().catch_stop_iteration():
            yield
        if not self.steps_per_epoch:
            self._num_batches = length

    def _enumerate_iterator(self) -> Iterator[Nest]:
        place, position = self.extended.place, self.extended.position
        if not place.fits or place.calls:
            yield from super()._enumerate_iterator()
            return
        begun = position.begun if self.steps_per_epoch else None
        if position.steps or begun:
            self._note_order(begun.epoch if begun else position.epoch)
        if not self.steps_per_epoch:
            yield from super()._enumerate_iterator()
            return
        self.extended.passes = self
        left = self.steps_per_epoch - position.take_steps()
        if self.present() is None:
            self._began = position.epoch
        if begun:
            with position.within(begun):
                self._current_iterator = iter(self._get_iterator())
            self._began, self._steps_seen = begun.epoch, begun.steps
        yield from self._of_epoch(left)

    def _of_epoch(self, steps: int) -> Iterator[Nest]:
        """Yields what Keras does for the last `steps` steps of an epoch."""
        if steps > 0:
            whole, self.steps_per_epoch = self.steps_per_epoch, steps
            try:
                yield from super()._enumerate_iterator()
            finally:
                self.steps_per_epoch = whole
            return
        self.data_adapter.on_epoch_begin()
        if self._num_batches and self._steps_seen >= self._num_batches:
            self._current_iterator = None
        self.data_adapter.on_epoch_end()

    def _note_order(self, epoch: int) -> None:
        """Says so where data that go on in a pass are in another order.

        In the first epoch a seed gives the order that it gave in the former process.
        """
        why = self.why_order_differs(epoch == 0)
        if why:
            self.extended.note(
                f"the run goes on within its data, but their dataset {why}: rows may be trained "
                "twice or not at all. See docs/checkpoints.md, Data by epoch"
            )


class Epochs(Passes):
    """Keras' passes over Python data or shuffled arrays, which begin when a batch is used."""

    def _get_iterator(self) -> Iterable[Nest]:
        if self._current_iterator is not None:
            # At the end of a pass Keras makes the next one, before the dataset's on_epoch_end.
            return ()
        self.data_adapter.begin_pass()
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Nest]:
        if isinstance(self._current_iterator, type(iter(()))) or self.steps_per_epoch is None:
            self._current_iterator = None
        yield from super()._enumerate_iterator()
