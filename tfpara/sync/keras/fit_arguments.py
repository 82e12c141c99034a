"""Checks of the arguments of `fit`, and replacement of its data by numbered minibatches."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpara.sync.data.elastic_data import (
    PARTS,
    Began,
    Facts,
    agreed_order,
    are_arrays,
    check_dealt,
    deal_out_arrays,
    deal_out_dataset,
    numbers_of,
    place_of,
)
from tfpara.sync.data.reading import ahead, shuffled
from tfpara.sync.keras.batches import part_of, shown_values, signature_of, without_none
from tfpara.sync.keras.replacing import array_slicing, data_adapter_utils, data_adapters
from tfpara.sync.workers import data_place
from tfpara.typing import Data, Json


def refuse_spent(given: dict[str, Json]) -> None:
    """Raises ValueError for a generator that would have to be read again in a second epoch."""
    if given.get("epochs", 1) - given.get("initial_epoch", 0) < 2:
        return
    validation = given.get("validation_data")
    validation = validation[0] if isinstance(validation, tuple) and validation else validation
    for data, name, steps in (
        (given.get("x"), "x", "steps_per_epoch"),
        (validation, "validation_data", "validation_steps"),
    ):
        if inspect.isgenerator(data) and given.get(steps) is None:
            raise ValueError(
                f"{name} is a generator, which can be read once, and epochs={given['epochs']}. "
                f"Write {steps}=… if it has no end, or else give a keras.utils.PyDataset, or "
                "tf.data.Dataset.from_generator(function, output_signature=…)."
            )


def deal_out(strategy: Any, began: Began, given: dict[str, Any]) -> None:
    """Replaces the data among the arguments of `fit`, in place, by numbered minibatches."""
    arrays = are_arrays(given)
    if given.get("steps_per_epoch") is not None and not arrays:
        return  # the caller refuses such data afterwards, by `check_dealt`
    data, class_weight = given.get("x"), given.get("class_weight")
    if class_weight and isinstance(data, (tf.data.Dataset, tf.distribute.DistributedDataset)):
        weighted = data_adapters.TFDatasetAdapter(data, class_weight=class_weight)
        given["x"], given["class_weight"] = weighted.get_tf_dataset(), None
    if isinstance(data, tf.data.Dataset):
        deal_out_dataset(strategy, began, given)
    elif isinstance(data, keras.utils.PyDataset):
        _deal_out_py_dataset(strategy, began, given)
    elif arrays:
        divide_and_weight(given)
        deal_out_arrays(strategy, began, given)


def deal_out_by_speed(strategy: Any, given: dict[str, Any]) -> None:
    """Replaces the data among the arguments of `fit`, in place, as `balance=` deals them out."""
    if strategy.extended.call_site.fits > 1:
        raise ValueError(
            "fit was called in a callback of fit, and balance= deals out the data of one fit at a "
            "time. Call one after the other."
        )
    devices = len(strategy.extended.worker_devices)
    deal_out(strategy, Began(strategy.num_replicas, devices, "balance="), given)
    check_dealt(
        given,
        "balance=",
        steps="a worker takes as many steps as its speed allows",
        data="balance= deals minibatches out by number, and those of x, a "
        f"{type(given.get('x')).__name__}, have none. Give fit arrays, a PyDataset, a "
        "tf.data.Dataset of known order, strategy.minibatches_by_epoch(...) or "
        "strategy.datasets_by_epoch(...).",
    )


def _deal_out_py_dataset(strategy: Any, began: Began, given: dict[str, Any]) -> None:
    """Replaces a `keras.utils.PyDataset` among the arguments of `fit`, in place.

    Each batch is cut into N minibatches, for the N replicas with which the run begins. Their
    numbers of rows differ by one at most. Until members change, each of the W workers reads every
    W-th batch, as without `elastic=`. After that, it reads each batch of which it needs a part.
    """
    data: keras.utils.PyDataset = given["x"]
    _check_py_dataset(data, began.option, given)
    adapter = data_adapters.PyDatasetAdapter(data, given.get("class_weight"), given.get("shuffle"))
    adapter.enqueuer = None  # the enqueuer's threads would read batches that nobody uses
    count = adapter.num_batches
    if count is None:
        raise ValueError(
            "the PyDataset has no end, and its minibatches are to be dealt out: write its __len__."
        )
    if count == 0:
        raise ValueError("the data have no batch: their length is 0.")

    def standard(batch: Data) -> Data:
        return without_none(adapter._standardize_batch(batch))

    shuffle = given.get("shuffle", True)
    some = [standard(data[number]) for number in sorted({0, min(1, count - 1), count - 1})]
    signature = signature_of(some)
    facts: Facts = {"kind": "PyDataset", "batches": count}
    order = agreed_order(strategy, began, {**facts, "values": shown_values(some)})

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        seed, parts, devices = order.known()
        in_order = shuffled(count, seed, epoch) if shuffle else range(count)
        dealt = data_place.dealt()
        if dealt is not None:
            # Parts of a batch have successive numbers, so the cache mostly saves a second read.
            recent = functools.lru_cache(1)(data.__getitem__)

            def one(number: int) -> Iterator[Any]:
                place, part = divmod(int(number), parts)
                yield part_of(standard(recent(in_order[place])), part, parts)

            def taken(number: tf.Tensor) -> tf.data.Dataset:
                return tf.data.Dataset.from_generator(
                    one, args=(number,), output_signature=signature
                )

            return dealt.numbers(count * parts).flat_map(taken)
        numbers = numbers_of(strategy, first, count * parts)
        if strategy.extended.balance is None:
            places = [place_of(number, count, parts, devices) for number in numbers]
        else:
            places = [divmod(number, parts) for number in numbers]  # (place, part), as in `one`
        runs = [
            (in_order[place], [part for _, part in own])
            for place, own in itertools.groupby(places, operator.itemgetter(0))
        ]

        def read() -> Iterator[Any]:
            wanted = (number for number, _ in runs)
            found = ahead(data, wanted, steady=strategy.extended.worker.company.steady)
            with contextlib.closing(found):
                for batch, (_, own) in zip(found, runs, strict=True):
                    batch = standard(batch)
                    for part in own:
                        yield part_of(batch, part, parts)

        return tf.data.Dataset.from_generator(read, output_signature=signature)

    given["x"] = strategy.datasets_by_number(minibatches)
    given["x"].facts = facts
    given["class_weight"] = None


def _check_py_dataset(data: keras.utils.PyDataset, option: str, given: dict[str, Any]) -> None:
    """Raises ValueError for a PyDataset that `option` cannot deal out, or for data beside it."""
    for name in ("y", "sample_weight", "validation_split"):
        value = given.get(name)
        if value is not None and (name != "validation_split" or value):
            raise ValueError(
                f"{name}= does not go with a PyDataset, whose batches have the labels and weights. "
                "Leave it out."
            )
    for hook in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(data), hook, None) is not getattr(keras.utils.PyDataset, hook, None):
            raise ValueError(
                f"{type(data).__name__}.{hook} changes the dataset, which {option} deals out "
                "by number, also to workers that have not called it. Leave the order to "
                "fit(shuffle=True)."
            )
    if data.use_multiprocessing and data.workers > 0:
        raise ValueError(
            f"PyDataset(use_multiprocessing=True) does not go with {option}, which would "
            "start its processes anew whenever it deals data out. Write use_multiprocessing=False, "
            "for threads."
        )


def divide_and_weight(given: dict[str, Any]) -> None:
    """Applies `validation_split` and `class_weight` to arrays, in place, as `fit` would."""
    if given.get("validation_split") and given.get("validation_data") is None:
        parts = tuple(given.get(name) for name in PARTS)
        training, given["validation_data"] = array_slicing.train_validation_split(
            parts, validation_split=given["validation_split"]
        )
        given.update(zip(PARTS, training, strict=True), validation_split=0.0)
    if given.get("class_weight"):
        if given.get("sample_weight") is not None or keras.tree.is_nested(given.get("y")):
            raise ValueError(
                "class_weight weighs the only labels of a model, and does not go with "
                "sample_weight. Multiply the two before fit, and give sample_weight."
            )
        given["sample_weight"] = data_adapter_utils.class_weight_to_sample_weights(
            given["y"], given["class_weight"]
        )
        given["class_weight"] = None
