"""The datasets of single devices, which TensorFlow makes from one dataset for all devices."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpara import program
from tfpara.contexts import attributes
from tfpara.steps import without_tuner
from tfpara.tensorflow_private import context as _context
from tfpara.tensorflow_private import multi_device as _multi_device
from tfpara.typing import Nest


def iterator_over(data: Any, begin: Callable[[], Iterator[Nest]]) -> Iterator[Nest]:
    """Returns an iterator over a distributed dataset of this worker; `begin` returns TensorFlow's.

    If the host is the only device, the result is a plain iterator. TensorFlow's iterator over
    devices calls functions for each element, and asks each time whether some devices have none. On
    the host this would be a fifth of the step of a small network. For a GPU TensorFlow's iterator
    stays, since it copies data while a step is computed: 0.5 of 2.3 ms for a minibatch of 5 MB on
    an H200.
    """
    devices = data._input_workers.compute_devices_for_worker(0)
    if len(devices) > 1 or "CPU" not in devices[0].upper():
        with _own_iterators():
            return begin()
    (dataset,) = getattr(data, "_cloned_datasets", None) or data._datasets
    dataset = dataset.prefetch(1)
    with tf.device(data._input_workers.worker_devices[0]):
        iterator = iter(dataset)
    if tf.executing_eagerly():
        _iterators[iterator] = os.getpid(), dataset
    return iterator


def _own_iterators() -> contextlib.AbstractContextManager[None]:
    """A context in which iterators over devices own their datasets, and do without tf.data's tuner.

    TensorFlow makes a dataset for each device, and no public name reaches the options of that
    dataset. With the tuner, the deletion of an iterator would wait for the tuner's thread, for each
    device in turn; see `without_tuner`. For the functions of these datasets see `_Shared`.
    """
    return attributes(
        _multi_device,
        _create_device_dataset=lambda *args: without_tuner(_make_device_dataset(*args)),
        _PerDeviceGenerator=_shared,
        _ReincarnatedPerDeviceGenerator=_once_more,
        OwnedMultiDeviceIterator=_OwningIterator,
    )


_make_device_dataset = _multi_device._create_device_dataset
_Generator = _multi_device._PerDeviceGenerator
_Reincarnated = _multi_device._ReincarnatedPerDeviceGenerator
_PARTS = ("init", "next", "finalize")  # names of the functions of a device's dataset
# The functions of a device's dataset, by their names in `_PARTS`. Beside each function are the
# names of the tensors that it captures; None stands for a tensor without a name.
_Traced = dict[str, tuple[Any, list[str | None]]]
_traced: dict[tuple[object, ...], _Traced] = {}


class _Shared(tf.data.Dataset):
    """The dataset of one device, with functions that were traced for an earlier one.

    TensorFlow traces seven functions for each device whenever a pass over data begins, which takes
    longer than the steps of a small epoch. The functions of two passes differ only in the tensors
    that they capture.
    """

    def __init__(self, traced: _Traced, spec: Nest, tensors: Mapping[str | None, tf.Tensor]):
        self._spec = spec
        given: dict[str, Any] = {}
        for part, (function, names) in traced.items():
            given[f"{part}_func"] = function
            given[f"{part}_func_other_args"] = [tensors[name] for name in names]
        super().__init__(tf.raw_ops.GeneratorDataset(**given, **self._flat_structure))

    def _inputs(self) -> list[tf.data.Dataset]:
        return []

    @property
    def element_spec(self) -> Nest:
        return self._spec


def _shared(
    shard_num: int,
    resource: tf.Tensor,
    incarnation_id: tf.Tensor,
    source_device: tf.Tensor,
    element_spec: Nest,
    iterator_is_anonymous: bool,
) -> tf.data.Dataset:
    """Replaces `_PerDeviceGenerator`; returns the dataset of one device."""

    def make() -> Any:
        # The constructor looks the name `_PerDeviceGenerator` up in TensorFlow's module, so this
        # name stands for the original class again while the constructor runs.
        with attributes(_multi_device, _PerDeviceGenerator=_Generator):
            args = shard_num, resource, incarnation_id, source_device, element_spec
            return _Generator(*args, iterator_is_anonymous=iterator_is_anonymous)

    if not tf.executing_eagerly():
        return make()
    tensors: dict[str | None, tf.Tensor] = {
        "resource": resource,
        "incarnation": incarnation_id,
        "source": source_device,
    }
    specs = tuple(tf.nest.flatten(element_spec))
    host, device = tf.config.list_logical_devices("CPU")[0].name, _context.context().device_name
    key = host, device, source_device.numpy(), shard_num, iterator_is_anonymous, specs
    if key not in _traced:
        made = make()
        names = {id(tensor): name for name, tensor in tensors.items()}
        found: _Traced = {}
        for part in _PARTS:
            captured = getattr(made, f"_{part}_captured_args")
            found[part] = getattr(made, f"_{part}_func"), [names.get(id(t)) for t in captured]
        # The function `init` also captures the handle of the resource, which has no name in
        # `names`. If another tensor without a name is captured, the functions cannot be used again.
        if [found[part][1].count(None) for part in _PARTS] != [1, 0, 0]:
            return made
        _traced[key] = found
    handle = tf.raw_ops.MultiDeviceIteratorToStringHandle(multi_device_iterator=resource)
    return _Shared(_traced[key], element_spec, {**tensors, None: handle})


def _once_more(dataset: tf.data.Dataset, incarnation_id: tf.Tensor) -> tf.data.Dataset:
    """Replaces `_ReincarnatedPerDeviceGenerator`; returns a dataset that can be read once more."""
    return dataset if isinstance(dataset, _Shared) else _Reincarnated(dataset, incarnation_id)


class _OwningIterator(_multi_device.OwnedMultiDeviceIterator):
    """An iterator over devices that keeps the dataset it reads alive.

    TensorFlow's own class makes that dataset and drops it, but the thread that reads ahead has a
    bare pointer to the dataset. Since TensorFlow 2.21 the thread reads each element's types through
    this pointer, from memory that may be freed.
    """

    def __init__(self, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        made = None if dataset is None else _Remembering(dataset)
        super().__init__(made, *args, **kwargs)
        # Attributes are deleted in the order in which they were set. `_kept` is set last, so the
        # dataset outlives the other attributes. The thread that reads ahead ends when they are
        # deleted, so the dataset also outlives this thread.
        self._kept = made
        if made is not None and tf.executing_eagerly():
            _iterators[self] = os.getpid(), made


# For each iterator: the id of the process that made the iterator, and the dataset that the iterator
# reads.
_iterators: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()


def _end_iterators() -> None:
    """Ends the reading of data while Python can still run generators.

    After a failed `fit` its error lives until the interpreter ends, and so does the iterator. By
    then the thread that reads ahead can call no generator any more, but the end of the iterator
    waits for this thread.
    """
    for iterator, (process, dataset) in list(_iterators.items()):
        if process == os.getpid():  # a forked process has no thread that reads ahead
            with contextlib.suppress(tf.errors.OpError):
                _give_no_elements(iterator, dataset)


def _give_no_elements(iterator: Any, dataset: Any) -> None:
    if not isinstance(iterator, _OwningIterator):
        none = dataset.take(0)._variant_tensor
        tf.raw_ops.MakeIterator(dataset=none, iterator=iterator._iterator_resource)
        return
    with tf.device(iterator._source_device):
        tf.raw_ops.MultiDeviceIteratorInit(
            dataset=dataset.with_its_options.take(0)._variant_tensor,
            multi_device_iterator=iterator._multi_device_iterator_resource,
            max_buffer_size=1,
        )


def _forget_iterators(orderly: bool) -> None:
    """Forgets the iterators of a process that ends at once, without waiting for a generator."""
    del orderly
    _iterators.clear()


atexit.register(_end_iterators)
program.on_leaving(_forget_iterators)


class _Remembering:
    """A stand-in for a dataset. It keeps the copy that an iterator makes by `with_options`."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset

    def with_options(self, options: tf.data.Options) -> tf.data.Dataset:
        self.with_its_options = self._dataset.with_options(options)
        return self.with_its_options
