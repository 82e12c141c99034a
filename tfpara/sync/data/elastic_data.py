"""Data of `fit` as numbered minibatches, which can be assigned to any worker.

A batch is cut into a minibatch for each of the N replicas with which the run began. The minibatches
of an epoch are numbered from 0, and any worker can read any of them. So other workers can train
what a lost worker has left, and faster workers can get more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfpara.cluster.call_site import FIT_BEGIN
from tfpara.steps import mapped
from tfpara.sync.data import same_data
from tfpara.sync.data.dealt import rows_of_all, slice_of
from tfpara.sync.data.reading import Order, shuffled_rows
from tfpara.sync.workers import data_place
from tfpara.typing import Json

Facts: TypeAlias = dict[str, Json]
PARTS = ("x", "y", "sample_weight")  # the arguments of `fit` that hold training data
_BATCH_SIZE = 32  # the default of `fit`


class Began(NamedTuple):
    """The number of replicas with which a run began: of all workers, and of each worker.

    `option` is the strategy's argument that requires numbered data, for messages.
    """

    replicas: int
    devices: int
    option: str = "elastic="


def leaves_of(given: Mapping[str, Any]) -> list[Any]:
    """Returns all data among the arguments of `fit`."""
    parts = [given.get(name) for name in PARTS]
    return [leaf for part in parts for leaf in tf.nest.flatten(part) if leaf is not None]


def are_arrays(given: Mapping[str, Any]) -> bool:
    """Returns whether the data among the arguments of `fit` are NumPy arrays or tensors."""
    leaves = leaves_of(given)
    return bool(leaves) and all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves)


def deal_out_arrays(strategy: Any, began: Began, given: dict[str, Any]) -> None:
    """Replaces arrays among the arguments of `fit`, in place, by `strategy.datasets_by_epoch`.

    A replica's minibatch has `batch_size` / N rows, rounded up, for the N replicas with which the
    run begins, as without `elastic=`. The size stays when replicas are lost or join. Each row of an
    epoch is trained once. With `shuffle` (the default) each epoch has another order; with
    `shuffle="batch"`, only within each batch. With `steps_per_epoch` an epoch has as many
    minibatches as N replicas train in so many steps, and the next epoch continues at the row where
    it ended; without `batch_size` it is a pass over all rows.
    """
    parts = [given.get(name) for name in PARTS]
    leaves = leaves_of(given)
    rows = len(leaves[0])
    if any(len(leaf) != rows for leaf in leaves):
        raise ValueError(
            f"the arrays have {', '.join(str(len(leaf)) for leaf in leaves)} rows. Give as many."
        )
    steps = given.get("steps_per_epoch")
    batch_size = given.get("batch_size") or (-(-rows // steps) if steps else _BATCH_SIZE)
    facts: Facts = {"kind": "arrays", "rows": rows, "batch_size": batch_size}
    order = agreed_order(strategy, began, {**facts, "values": same_data.values_of(leaves)})
    shuffle = given.get("shuffle", True)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    with tf.device("CPU:0"):
        # Lists are turned into tuples, as Keras does, because `Dataset.map` would make one tensor
        # from a list.
        arrays = mapped(_tensor_of, keras.tree.lists_to_tuples(tuple(parts)))

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        seed, parts, _ = order.known()
        size = -(-batch_size // parts)
        in_a_pass = -(-rows // size)  # number of minibatches in a pass over all rows
        in_an_epoch = steps * parts if steps else in_a_pass
        begin = epoch * in_an_epoch
        passes = range(begin // in_a_pass, (begin + in_an_epoch - 1) // in_a_pass + 1)
        within = size * parts if shuffle == "batch" else None
        orders = [
            shuffled_rows(rows, seed, each, within) if shuffle else np.arange(rows)
            for each in passes
        ]
        ordered = tf.constant(np.array(orders), tf.int64)

        def taken(number: tf.Tensor) -> Any:
            since = number + (begin - passes.start * in_a_pass)
            place = since % in_a_pass
            own = ordered[since // in_a_pass, place * size : (place + 1) * size]
            gathered = mapped(lambda array: tf.gather(array, own), arrays)
            return gathered if len(gathered) > 1 else gathered[0]

        numbers = _own(strategy, first).numbers(in_an_epoch)
        return numbers.map(taken, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    given["x"] = strategy.datasets_by_number(minibatches)
    given["x"].facts = facts
    for name in ("y", "sample_weight", "batch_size", "steps_per_epoch"):
        given[name] = None


def _tensor_of(array: Any) -> tf.Tensor:
    """Returns an array as a tensor; as in `fit`, floating-point numbers get the dtype `floatx`."""
    tensor = tf.convert_to_tensor(array)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor


def deal_out_dataset(strategy: Any, began: Began, given: dict[str, Any]) -> None:
    """Replaces a `tf.data.Dataset` of batches among the arguments of `fit`, in place.

    Each batch is cut into N minibatches, for the N replicas with which the run begins. Their
    numbers of rows differ by one at most. Every worker reads the whole dataset, and keeps its own
    minibatches. Raises ValueError for data that cannot be dealt out, or differ between workers.
    """
    dataset: tf.data.Dataset = given["x"]
    same_data.check_batched(dataset.element_spec)
    if not same_data.divided_between_workers(dataset):
        raise ValueError(
            "the dataset has AutoShardPolicy.OFF, so each worker has data of its own, and "
            f"{began.option} deals minibatches out to others. Give all workers the same data."
        )
    _check_order(
        dataset,
        "For one order in all epochs give shuffle a seed and reshuffle_each_iteration=False; for "
        f"an order of each epoch's own, give fit data = {_BY_EPOCH}.",
    )
    facts = same_data.facts_of_dataset(dataset)
    order = agreed_order(strategy, began, facts)

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        return _parts_of(dataset, order.known()[1], _own(strategy, first))

    given["x"] = strategy.datasets_by_number(minibatches)
    given["x"].facts = _without_values(facts)


def by_epoch(strategy: Any, dataset_fn: Callable[[int], tf.data.Dataset]) -> Any:
    """Implements `strategy.minibatches_by_epoch`."""
    facts: Facts = {}

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        dataset = dataset_fn(epoch)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"the function gave {dataset!r} for epoch {epoch}: no tf.data.Dataset.")
        same_data.check_batched(dataset.element_spec)
        _check_order(dataset, "Give a seed to all that is drawn.", made_anew=True)
        if not facts:
            # The seed of the whole program (tf.random.set_seed) is not enough: TensorFlow derives
            # another seed from it for each new operation. To find operations without a seed of
            # their own, the function is called twice, and the seeds of the two datasets are
            # compared.
            facts.update(same_data.facts_of_dataset(dataset))
            if same_data.difference([facts, same_data.facts_of_dataset(dataset_fn(epoch))]):
                raise ValueError(
                    f"the function's dataset of epoch {epoch} has other rows, or seeds, when it is "
                    "called again, and so another order. Let the epoch decide what is drawn: "
                    "dataset.shuffle(1000, seed=epoch), np.random.default_rng(epoch)."
                )
        return _own(strategy, first).among(dataset.skip(first).enumerate(first))

    data = strategy.datasets_by_number(minibatches)
    data.facts = _without_values(facts)
    return data


def check_dealt(given: Mapping[str, Any], option: str, steps: str, data: str) -> None:
    """Raises ValueError if the data given to `fit` are not numbered, or a number of steps is given.

    For the messages: `option` is the strategy's argument that requires numbered data, `steps` says
    why no number of steps can be given, and `data` is the whole message on data without numbers.
    """
    if given.get("steps_per_epoch") is not None:
        raise ValueError(
            f"steps_per_epoch={given['steps_per_epoch']} and {option} contradict each other: "
            f"{steps}. Give arrays, or data for as long an epoch."
        )
    if not hasattr(given.get("x"), "built_for"):
        raise ValueError(data)


def of_one_reader(dataset_fn: Callable[[int, int], tf.data.Dataset]) -> Callable[..., Any]:
    """Converts a user's function of one worker's minibatches, for `datasets_by_number`."""

    def minibatches(epoch: int, first: int) -> tf.data.Dataset:
        dealt = data_place.dealt()
        if dealt is None:
            return dataset_fn(epoch, first)
        # The function is called as for the only worker of a run.
        with data_place.making(data_place.DataPlace(0, 1, 1, epoch, first)):
            return dealt.among(dataset_fn(epoch, first).enumerate(first))

    return minibatches


_BY_EPOCH = (
    "strategy.minibatches_by_epoch(lambda epoch: files.shuffle(1000, seed=epoch).batch(32)), with "
    "batches for one replica"
)


def _check_order(dataset: tf.data.Dataset, fix: str, made_anew: bool = False) -> None:
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError("the dataset has no end, which an epoch needs: write dataset.take(1000).")
    problem = same_data.why_order_differs(dataset, made_anew)
    if problem:
        raise ValueError(
            f"the dataset {problem}. Where minibatches are dealt out by number, and in a resumed "
            f"run, its order must be known. {fix}"
        )


def _without_values(facts: Facts) -> Facts:
    """Returns facts without the values, whose last digits may differ between machines."""
    return {name: fact for name, fact in facts.items() if name != "values"}


def agreed_order(strategy: Any, began: Began, facts: Facts) -> Order:
    """Returns the run's order of data, once workers have compared data and agreed on a seed."""
    order: Order = strategy.extended.data.order
    if order.seed is None:
        drawn = random.getrandbits(48)
        if not strategy.company.joining:
            everyone = strategy.everyones({"seed": drawn, "facts": facts}, FIT_BEGIN)
            drawn = everyone[0]["seed"]
            problem = same_data.difference(
                [each["facts"] for each in everyone], "Give all workers of an elastic run the same."
            )
            if problem:
                raise ValueError(problem)
        order.seed = drawn
    if order.parts is None:
        order.parts, order.devices = began.replicas, began.devices
    return order


def numbers_of(strategy: Any, first: int, count: int) -> list[int]:
    """Returns the numbers of this worker's minibatches, those from `first` to before `count`."""
    starts = range(first, count, strategy.num_replicas)
    numbers = [start + own for start in starts for own in strategy.local_replica_ids]
    return [number for number in numbers if number < count]


class _Own:
    """This worker's minibatches from `first` on, by its replicas' numbers, like a `Dealt`.

    Minibatch `first` belongs to the first replica of the run, `first` + 1 to the second, and so on.
    """

    def __init__(self, strategy: Any, first: int) -> None:
        self.first, self._strategy = first, strategy
        self._replicas = strategy.num_replicas
        self._ids = np.array(strategy.local_replica_ids, np.int64)

    def numbers(self, end: int) -> tf.data.Dataset:
        own = np.array(numbers_of(self._strategy, self.first, end), np.int64)
        return tf.data.Dataset.from_tensor_slices(own)

    def among(self, numbered: tf.data.Dataset) -> tf.data.Dataset:
        """Returns this worker's minibatches from a dataset of pairs (number, minibatch)."""

        def is_own(number: tf.Tensor, element: Any) -> tf.Tensor:
            since = number - self.first - self._ids
            return tf.reduce_any((since >= 0) & (since % self._replicas == 0))

        return numbered.filter(is_own).map(lambda number, element: element)


def _own(strategy: Any, first: int) -> Any:
    """Returns this worker's minibatches from `first` on."""
    return data_place.dealt() or _Own(strategy, first)


def _parts_of(dataset: tf.data.Dataset, parts: int, own: Any) -> tf.data.Dataset:
    """Returns those minibatches of a dataset of batches that are this worker's `own`."""

    def numbered(batch: tf.Tensor, element: Any) -> tf.data.Dataset:
        rows = rows_of_all(element)
        numbers = tf.data.Dataset.range(batch * parts, (batch + 1) * parts)
        return numbers.map(lambda number: (number, (number, rows, element)))

    def part(number: tf.Tensor, rows: tf.Tensor, element: Any) -> Any:
        begin, end = (rows * (number % parts + k) // parts for k in (0, 1))
        return tf.nest.map_structure(lambda leaf: slice_of(leaf, begin, end), element)

    # The worker's own minibatches are chosen before batches are cut. So no time is lost in cutting
    # out the minibatches of other workers.
    return own.among(dataset.enumerate().flat_map(numbered)).map(part)


def place_of(number: int, count: int, parts: int, devices: int) -> tuple[int, int]:
    """Returns the batch of a minibatch, by its place in the epoch's order, and which part it is.

    The W = parts / devices workers read W batches at a time, one each, and each worker takes W
    steps on the parts of its batch. The last batches, fewer than W, are divided among all workers.

    `number` is the minibatch's in the epoch, which has `count` batches of so many `parts`.
    """
    workers = parts // devices
    step, device = divmod(number, devices)
    if number < count // workers * workers * parts:
        group, rest = divmod(step, workers * workers)
        part, rank = divmod(rest, workers)
        return group * workers + rank, part * devices + device
    return divmod(number, parts)
