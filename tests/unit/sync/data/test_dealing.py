"""Data of `fit` in an elastic run, cut into minibatches that any worker can read."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpara import cluster
from tfpara.sync.data import elastic_data
from tfpara.sync.data.reading import Order
from tfpara.sync.keras import fit_arguments
from tfpara.sync.workers.company import Company

pytestmark = pytest.mark.latest

Dataset = tf.data.Dataset


@pytest.fixture(autouse=True)
def _no_seed_for_all():
    """Other tests may have set one."""
    tf.random.set_seed(None)


def test_arrays_of_different_lengths():
    with pytest.raises(ValueError, match=r"the arrays have 4, 3 rows"):
        elastic_data.deal_out_arrays(
            None, elastic_data.Began(2, 1), {"x": np.ones((4, 2)), "y": np.ones((3, 1))}
        )


def strategy_of(order, replicas, ids):
    data = types.SimpleNamespace(order=order)
    worker = types.SimpleNamespace(company=Company(cluster.ALONE))
    extended = types.SimpleNamespace(
        data=data, worker=worker, worker_devices=["CPU:0"] * len(ids), balance=None
    )
    return types.SimpleNamespace(
        company=types.SimpleNamespace(joining=True),
        extended=extended,
        num_replicas=replicas,
        local_replica_ids=ids,
        datasets_by_number=lambda minibatches: types.SimpleNamespace(made=minibatches),
    )


def dealt_out(data, parts, replicas, epochs=1, first=0, devices=1, order=None, **given):
    """The rows of each minibatch of each epoch, in the order of their numbers.

    Args:
        data: given to `fit`.
        parts: replicas with which the run began.
        replicas: that there are.
        epochs: number of them.
        first: number of the first minibatch.
        devices: of each worker.
        order: of a run that is resumed; None: of a new one.
        **given: other arguments of `fit`.
    """
    if order is None:
        order = Order()
        order.seed = 7
    found = [{} for _ in range(epochs)]
    for begin in range(0, replicas, devices):
        ids = list(range(begin, begin + devices))
        strategy = strategy_of(order, replicas, ids)
        arguments = {"x": data, **given}
        fit_arguments.deal_out(strategy, elastic_data.Began(parts, devices), arguments)
        for epoch in range(epochs):
            numbers = (s + own for s in range(first, 10_000, replicas) for own in ids)
            for number, own in zip(numbers, arguments["x"].made(epoch, first), strict=False):
                found[epoch][number] = tf.nest.map_structure(listed, own)
    for epoch in found:
        assert sorted(epoch) == list(range(first, first + len(epoch)))
    return [[epoch[number] for number in sorted(epoch)] for epoch in found]


def listed(tensor):
    if tensor is None:
        return None
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()


@pytest.mark.parametrize("workers", [2, 3])
def test_epochs_of_so_many_steps_go_on_in_the_arrays(workers):
    """Three steps of two replicas, with two rows of a minibatch of four each; ten rows."""
    given = {"batch_size": 4, "steps_per_epoch": 3}
    first, second, third = dealt_out(np.arange(10), 2, workers, 3, shuffle=False, **given)
    ordered = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert first == [*ordered, ordered[0]]
    assert second == [*ordered[1:], *ordered[:2]]
    assert third == [*ordered[2:], *ordered[:3]]
    epochs = dealt_out(np.arange(10), 2, workers, 5, **given)
    shuffled = [row for epoch in epochs for row in sum(epoch, [])]
    passes = [shuffled[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 6


def test_steps_without_a_batch_size_divide_all_rows():
    epochs = dealt_out(np.arange(1000), 2, 2, 2, shuffle=False, steps_per_epoch=4)
    assert epochs == [cut(list(range(1000)), 8)] * 2


def test_rows_are_shuffled_within_batches():
    first, second = dealt_out(np.arange(32), 2, 2, 2, shuffle="batch", batch_size=16)
    assert [len(own) for own in first] == [8] * 4 and first != second
    for epoch in (first, second):
        assert sorted(epoch[0] + epoch[1]) == list(range(16)) != epoch[0] + epoch[1]
        assert sorted(epoch[2] + epoch[3]) == list(range(16, 32))


def test_arrays_in_lists_are_dealt_out_as_such():
    x = np.arange(4)
    ((first, second),) = dealt_out(
        [x, {"a": [10 * x]}], 2, 2, y=[x, x], shuffle=False, batch_size=4
    )
    assert first == (([0, 1], {"a": ([0, 10],)}), ([0, 1], [0, 1]))
    assert second == (([2, 3], {"a": ([20, 30],)}), ([2, 3], [2, 3]))


class OfNone(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return ({"a": np.arange(4), "b": None},)


def test_an_input_may_be_none():
    dataset = Dataset.range(4).batch(4).map(lambda rows: {"a": rows, "b": None})
    for data in ({"a": np.arange(4), "b": None}, dataset, OfNone()):
        (minibatches,) = dealt_out(data, 2, 2, shuffle=False, batch_size=4)
        inputs = [one[0] if isinstance(one, tuple) else one for one in minibatches]
        assert inputs == [{"a": [0, 1], "b": None}, {"a": [2, 3], "b": None}]


def test_arrays_have_the_dtypes_that_keras_gives_them():
    given = {"x": np.ones((4, 2)), "y": tf.ones(4, tf.float16), "sample_weight": np.arange(4)}
    order = Order()
    order.seed = 7
    elastic_data.deal_out_arrays(strategy_of(order, 1, [0]), elastic_data.Began(1, 1), given)
    dtypes = [spec.dtype for spec in given["x"].made(0, 0).element_spec]
    assert dtypes == [tf.float32, tf.float32, tf.int64]


def test_arrays_are_divided_and_weighted_as_by_fit():
    x, y = np.arange(10.0), np.arange(10) % 3
    given = {"x": x, "y": y, "validation_split": 0.3, "class_weight": {0: 2.0, 2: 0.5}}
    fit_arguments.divide_and_weight(given)
    assert given["x"].tolist() == x[:7].tolist() and given["y"].tolist() == y[:7].tolist()
    assert given["sample_weight"].tolist() == [2.0, 1.0, 0.5, 2.0, 1.0, 0.5, 2.0]
    assert [part.tolist() for part in given["validation_data"][:2]] == [[7, 8, 9], [1, 2, 0]]
    assert not given["validation_split"] and given["class_weight"] is None
    with pytest.raises(ValueError, match="class_weight weighs the only labels"):
        fit_arguments.divide_and_weight(
            {"x": x, "y": y, "sample_weight": x, "class_weight": {0: 1}}
        )


def test_what_is_no_array_is_left_alone():
    given = {"x": iter([]), "batch_size": 3}
    fit_arguments.deal_out(None, elastic_data.Began(2, 1), given)
    assert given["batch_size"] == 3


def test_a_resumed_run_keeps_the_size_of_its_minibatches():
    """It began with three replicas, and goes on with two."""
    order = Order()
    order.set_state({"seed": 7, "parts": 3, "devices": 1})
    assert order.get_state() == {"seed": 7, "parts": 3, "devices": 1, "workers": None}
    (whole,) = dealt_out(np.arange(20), 3, 3, batch_size=6)
    (rest,) = dealt_out(np.arange(20), 2, 2, first=4, order=order, batch_size=6)
    assert rest == whole[4:]
    order.set_state({"seed": None, "parts": None, "devices": None})  # of a run without elastic=
    assert order.known() == (7, 3, 1)


def cut(rows, parts):
    """Parts that differ by one row at most, in NumPy's words."""
    bounds = np.arange(parts + 1) * len(rows) // parts
    return [rows[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize(
    "parts,replicas,first,devices",
    [(2, 2, 0, 1), (4, 3, 0, 1), (3, 2, 4, 1), (4, 4, 0, 2), (4, 2, 2, 2), (9, 3, 1, 1)],
)
def test_batches_of_a_dataset_are_cut_for_those_that_began(parts, replicas, first, devices):
    data = Dataset.range(23).map(lambda n: (n, 2 * n)).batch(8)
    batches = [list(range(23))[start : start + 8] for start in (0, 8, 16)]
    rows = [part for own in batches for part in cut(own, parts)]
    (found,) = dealt_out(data, parts, replicas, first=first, devices=devices)
    assert found == [(own, [2 * n for n in own]) for own in rows][first:]


def test_batches_whose_tensors_differ_in_rows():
    data = Dataset.zip(Dataset.range(8).batch(4), Dataset.range(4).batch(2))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the tensors of a batch differ in rows"
    ):
        dealt_out(data, 2, 2)


def test_sparse_and_ragged_batches_are_cut():
    rows = Dataset.from_tensor_slices(np.eye(5))
    (sparse,) = dealt_out(rows.map(tf.sparse.from_dense).batch(3), 2, 2)
    assert sum(sparse, []) == np.eye(5).tolist() and [len(own) for own in sparse] == [1, 2, 1, 1]
    (ragged,) = dealt_out(Dataset.range(4).map(tf.range).ragged_batch(3), 2, 2)
    assert ragged == [[[]], [[0], [0, 1]], [], [[0, 1, 2]]]


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, number):
        self.read.append(number)
        return np.arange(4 * number, 4 * number + 4), np.full(4, number % 2)


@pytest.mark.nightly_cases("*-True")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "parts,replicas,first,devices,threads",
    [(2, 2, 0, 1, 1), (3, 3, 0, 1, 2), (4, 4, 0, 2, 1), (4, 2, 2, 2, 2), (3, 2, 5, 1, 1)],
)
def test_rows_of_a_py_dataset_are_trained_once(parts, replicas, first, devices, threads, shuffle):
    data = Rows(workers=threads)
    data.read = []
    options = {"devices": devices, "shuffle": shuffle}
    whole = dealt_out(data, parts, parts, 2, **options)
    for epoch in whole:
        assert sorted(sum((x for x, _ in epoch), [])) == list(range(28))
    assert (whole[0] == whole[1]) is not shuffle
    data.read.clear()
    rest = dealt_out(data, parts, replicas, 2, first=first, **options)
    assert rest == [epoch[first:] for epoch in whole]
    workers = parts // devices
    if replicas == parts:  # each batch has one reader, but for the last that do not go round
        last = 7 % workers
        assert len(data.read) == 2 * (7 - last + last * workers) + 3 * workers  # three for the spec


@pytest.mark.parametrize("workers,devices", [(1, 1), (1, 3), (2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_each_part_of_each_batch_has_one_place(workers, devices, count):
    parts = workers * devices
    numbers = range(count * parts)
    places = [elastic_data.place_of(number, count, parts, devices) for number in numbers]
    assert sorted(places) == [(batch, part) for batch in range(count) for part in range(parts)]


def test_class_weights_of_datasets():
    data = Dataset.range(4).map(lambda n: (n, n % 2)).batch(4)
    ((_, _, weights),) = dealt_out(data, 1, 1, class_weight={0: 3.0, 1: 1.0})[0]
    assert weights == [3.0, 1.0, 3.0, 1.0]
    rows = Rows()
    rows.read = []
    found = dealt_out(rows, 1, 1, class_weight={0: 3.0, 1: 0.5}, shuffle=False)[0]
    assert [own[2][0] for own in found] == [3.0, 0.5, 3.0, 0.5, 3.0, 0.5, 3.0]


def off(data):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def any_order(data):
    options = tf.data.Options()
    options.deterministic = False
    return data.with_options(options)


def eight():
    return Dataset.range(8)


def drawn(rows):
    return tf.random.uniform([]) < 0.5


def shuffled_before(data):
    shuffled = data.shuffle(4)
    return lambda _: shuffled


@pytest.mark.parametrize(
    "make,sentence",
    [
        (lambda: eight().shuffle(3).batch(2), "has shuffle without a seed"),
        (lambda: eight().shuffle(3, seed=1).batch(2), "another order whenever it is read"),
        (lambda: eight().batch(2).repeat(), "has no end"),
        (lambda: eight(), "are not batches"),
        (lambda: off(eight().batch(2)), "has AutoShardPolicy.OFF"),
        (lambda: any_order(eight().batch(2)), "has the option deterministic=False"),
        (
            lambda: eight().batch(2).map(abs, num_parallel_calls=2, deterministic=False),
            r"has map\(deterministic=False\)",
        ),
        (
            lambda: Dataset.sample_from_datasets([eight().batch(2), eight().batch(2)]),
            "has random without a seed",
        ),
        (
            lambda: eight().interleave(lambda n: Dataset.range(n).shuffle(2, seed=1)).batch(2),
            "has shuffle inside the function of interleave",
        ),
        (lambda: eight().batch(2).filter(drawn), "draws at random which rows there are inside"),
        (lambda: eight().batch(2).map(tf.random.shuffle), "draws at random which rows there are"),
        (
            lambda: Dataset.range(1).flat_map(shuffled_before(eight().batch(2))),
            "reads another dataset inside the function of flat_map",
        ),
        (
            lambda: eight().interleave(
                lambda n: eight().map(abs, num_parallel_calls=2, deterministic=False).batch(2)
            ),
            "reorders what is ready first",
        ),
        (
            lambda: Dataset.from_generator(
                lambda: iter([[1, 2]]), output_signature=tf.TensorSpec([2], tf.int32)
            ),
            "reads a Python function",
        ),
    ],
)
def test_datasets_whose_order_cannot_be_repeated(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        dealt_out(make(), 2, 2)


class Reshuffled(Rows):
    def on_epoch_end(self):
        pass


class Empty(Rows):
    def __len__(self):
        return 0


def test_labels_beside_a_py_dataset():
    with pytest.raises(ValueError, match="y= does not go with a PyDataset"):
        dealt_out(Rows(), 2, 2, y=np.ones(28))


class OfLengths(Rows):
    """Batches of one row, whose lengths differ."""

    def __getitem__(self, number):
        return np.ones((1, 5 + number % 2))


def test_batches_of_a_py_dataset_may_differ_in_length():
    (found,) = dealt_out(OfLengths(), 1, 1, shuffle=False)
    assert [len(own[0][0]) for own in found] == [5, 6, 5, 6, 5, 6, 5]


def of_value(value):
    return Dataset.from_tensor_slices(np.full(8, value)).batch(2)


def test_workers_that_begin_with_other_data():
    """Each hears of it, before the first step."""
    other = {"seed": 1, "facts": elastic_data.same_data.facts_of_dataset(of_value(2.0))}
    order = Order()
    strategy = strategy_of(order, 2, [0])
    strategy.company.joining = False
    strategy.everyones = lambda mine, purpose: [mine, other]
    with pytest.raises(ValueError, match="rows: those of worker 1 are not those of worker 0"):
        fit_arguments.deal_out(strategy, elastic_data.Began(2, 1), {"x": of_value(1.0)})
    assert order.seed is None
    fit_arguments.deal_out(strategy, elastic_data.Began(2, 1), {"x": of_value(2.0)})
    assert order.seed is not None


@pytest.mark.parametrize(
    "data,sentence",
    [
        (Reshuffled(), "Reshuffled.on_epoch_end changes the dataset"),
        (Rows(workers=2, use_multiprocessing=True), "Write use_multiprocessing=False"),
        (Empty(), "the data have no batch: their length is 0"),
    ],
)
def test_py_datasets_that_are_refused(data, sentence):
    data.read = []
    with pytest.raises(ValueError, match=sentence):
        dealt_out(data, 2, 2)


def test_minibatches_by_epoch():
    """Each epoch has an order of its own; workers read their own part of it, in turn."""

    def made(epoch):
        return Dataset.range(10).shuffle(10, seed=epoch).batch(2)

    for epoch in (0, 3):
        whole = [own.numpy().tolist() for own in made(epoch)]
        for ids in ([0], [1, 2]):
            data = elastic_data.by_epoch(strategy_of(Order(), 3, ids), made)
            for first in (0, 2):
                found = [own.numpy().tolist() for own in data.made(epoch, first)]
                numbers = [s + own for s in range(first, 5, 3) for own in ids]
                assert found == [whole[number] for number in numbers if number < 5]


def test_rows_that_are_no_number_are_no_other_rows():
    data = elastic_data.by_epoch(strategy_of(Order(), 1, [0]), lambda epoch: of_value(np.nan))
    assert len(list(data.made(0, 0))) == 4


def test_a_seeded_shuffle_inside_a_function_of_an_epoch():
    def made(epoch):
        return eight().interleave(lambda n: eight().shuffle(8, seed=epoch + 1)).batch(4)

    data = elastic_data.by_epoch(strategy_of(Order(), 1, [0]), made)
    first, again = ([own.numpy().tolist() for own in data.made(2, 0)] for _ in range(2))
    assert first == again != [own.numpy().tolist() for own in data.made(3, 0)]


@pytest.mark.parametrize(
    "make,error,sentence",
    [
        (lambda epoch: [epoch], TypeError, r"gave \[0\] for epoch 0: no tf.data.Dataset"),
        (lambda epoch: eight().shuffle(3).batch(2), ValueError, "has shuffle without a seed"),
        (lambda epoch: eight().batch(2).repeat(), ValueError, "has no end"),
        (lambda epoch: eight(), ValueError, "are not batches"),
        (
            lambda epoch: eight().interleave(lambda n: eight().shuffle(3)).batch(2),
            ValueError,
            "has shuffle without a seed inside the function of interleave",
        ),
        (lambda epoch: of_value(np.random.uniform()), ValueError, "has other rows, or seeds"),
    ],
)
def test_functions_of_an_epoch_that_are_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        elastic_data.by_epoch(strategy_of(Order(), 1, [0]), make).made(0, 0)


def test_a_seed_for_all_is_no_seed_of_a_function_of_an_epoch():
    tf.random.set_seed(1)
    data = elastic_data.by_epoch(
        strategy_of(Order(), 1, [0]), lambda epoch: eight().shuffle(3).batch(2)
    )
    with pytest.raises(ValueError, match="has other rows, or seeds, when it is called again"):
        data.made(0, 0)
