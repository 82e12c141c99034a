"""Who reads what, reading ahead, and what tells one worker's data from another's."""

import random
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tfpara.steps import with_own_memory
from tfpara.sync.data import reading, same_data

pytestmark = pytest.mark.latest


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_each_part_of_each_batch_has_one_reader(count, workers):
    order = reading.shuffled(count, seed=7, epoch=2)
    plans = [reading.reads(order, worker, workers) for worker in range(workers)]
    for plan in plans:
        assert sum(len(read.parts) for read in plan) == count, "steps"
    rows = [0] * (10 * count)
    for read in (read for plan in plans for read in plan):
        for part in read.parts:
            for row in range(10)[reading.bounds(10, part, workers)]:
                rows[10 * read.batch + row] += 1
    assert rows == [1] * (10 * count)


def test_whole_batches_have_one_reader_each():
    plans = [reading.reads([4, 2, 0, 3, 1], worker, 2) for worker in range(2)]
    assert [[read.batch for read in plan] for plan in plans] == [[4, 0, 1], [2, 3, 1]]


def test_endless_data_are_read_in_turn():
    plans = [reading.endless_reads(worker, 2) for worker in range(2)]
    assert [[next(plan).batch for _ in range(3)] for plan in plans] == [[0, 2, 4], [1, 3, 5]]


def test_orders_are_by_seed_and_epoch():
    orders = {(s, e): tuple(reading.shuffled(30, s, e)) for s in range(3) for e in range(3)}
    assert len(set(orders.values())) == 9
    assert reading.shuffled(30, 1, 2) == list(orders[1, 2])


def test_rows_are_shuffled_by_seed_and_epoch():
    seeds = (1, 2, 1 + 2**32, 2**48 - 1)
    orders = {(s, e): tuple(reading.shuffled_rows(30, s, e)) for s in seeds for e in range(3)}
    assert len(set(orders.values())) == 12
    assert all(sorted(order) == list(range(30)) for order in orders.values())
    assert tuple(reading.shuffled_rows(30, 2, 1)) == orders[2, 1]
    within = reading.shuffled_rows(30, 2, 1, batch_size=8)
    assert within.tolist() != list(range(30))
    for start in range(0, 30, 8):
        batch = sorted(within[start : start + 8].tolist())
        assert batch == list(range(start, min(start + 8, 30)))


class Slow:
    """Later numbers are there sooner."""

    def __init__(self, workers=2, max_queue_size=4):
        self.workers, self.max_queue_size = workers, max_queue_size
        self.threads, self.read = set(), []

    def __getitem__(self, number):
        self.threads.add(threading.get_ident())
        self.read.append(number)
        time.sleep(0.02 * (number % 2 == 0))
        if number == 90:
            raise KeyError("no such row")
        return number


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_read_ahead_comes_in_order(workers):
    data, numbers = Slow(workers, 3), [5, 3, 8, 2, 9, 1, 0, 4]
    assert list(reading.ahead(data, numbers)) == numbers
    assert (threading.get_ident() in data.threads) == (workers < 2)


def test_no_more_is_read_ahead_than_allowed_and_an_abandoned_pass_ends():
    before, data = threading.active_count(), Slow()
    batches = reading.ahead(data, range(80))
    next(batches)
    batches.close()
    assert len(data.read) <= 6
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_an_error_in_a_thread_comes_where_its_batch_would():
    batches = reading.ahead(Slow(), [1, 90, 2])
    assert next(batches) == 1
    with pytest.raises(KeyError, match="no such row"):
        next(batches)


def test_common_randomness_leaves_no_trace():
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.normal()
    random.seed(1), np.random.seed(1)
    draws = []
    for _ in range(2):
        with reading.common_randomness("3/4"):
            draws.append((random.random(), np.random.normal()))
    assert draws[0] == draws[1]
    assert (random.random(), np.random.normal()) == expected


def facts(**changes):
    return {"kind": "arrays", "rows": 9, "values": [1.0, 2.0], **changes}


@pytest.mark.parametrize(
    "theirs, words",
    [
        (facts(), ""),
        (facts(values=[1.0, 2.0 + 1e-5]), ""),
        (facts(values=[1.0, 2.1]), "rows: those of worker 1 are not those of worker 0"),
        (facts(values=[1.0]), "rows: those of worker 1"),
        (facts(rows=8), "rows: worker 0 has 9, worker 1 has 8"),
        ({"kind": same_data.OWN}, "kind: worker 0 has 'arrays'"),
        (facts(**{"shuffle seeds": [[3, 0]]}), "the same seed|set_random_seed"),
    ],
)
def test_differences_are_told(theirs, words):
    mine = facts(**{"shuffle seeds": [[2, 0]]}) if "shuffle seeds" in theirs else facts()
    found = same_data.difference([mine, theirs])
    assert bool(found) == bool(words)
    assert any(word in found for word in words.split("|"))


def test_own_data_may_differ():
    assert not same_data.difference([{"kind": same_data.OWN}] * 3)


@pytest.mark.parametrize("order", [np.arange(40), np.arange(40).reshape(8, 5)])
def test_values_tell_orders_apart(order):
    values = same_data.values_of({"a": order, "none": None})
    assert values == same_data.values_of({"a": tf.constant(order), "none": None})
    assert values != same_data.values_of({"a": order[::-1], "none": None})
    if order.ndim > 1:
        assert values != same_data.values_of({"a": order[:, ::-1], "none": None})


def test_facts_tell_datasets_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("one\n")
    text = tf.data.TextLineDataset
    numbers = tf.data.Dataset.range(8)
    pairs = [
        (numbers.shard(2, 0).batch(2), numbers.shard(2, 1).batch(2)),
        (numbers.shuffle(8, seed=1).batch(2), numbers.shuffle(8, seed=2).map(abs).batch(2)),
        (text(str(tmp_path / "a")).batch(2), text(str(tmp_path / "b")).batch(2)),
        (numbers.batch(2), numbers.take(6).batch(2)),
        (numbers.batch(2), numbers.batch(4, drop_remainder=True)),
        (
            tf.data.Dataset.from_tensor_slices(["a", "b"]).batch(2),
            tf.data.Dataset.from_tensor_slices(["a", "c"]).batch(2),
        ),
    ]
    for one, other in pairs:
        mine, theirs = same_data.facts_of_dataset(one), same_data.facts_of_dataset(other)
        assert not same_data.difference([mine, same_data.facts_of_dataset(one)])
        assert same_data.difference([mine, theirs]), (mine, theirs)


class Pair(NamedTuple):
    x: tf.Tensor
    y: tf.Tensor


def test_copies_have_the_elements_and_the_structure_of_what_they_copy():
    ragged = tf.ragged.constant([[1], [2, 3]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    element = {"a": Pair(tf.constant([1, 2]), tf.constant(["u", "v"])), "b": (ragged, sparse)}
    for one in (element, Pair(tf.constant([1.0]), tf.constant([True])), tf.constant([1, 2])):
        dataset = tf.data.Dataset.from_tensors(one)
        copies = with_own_memory(dataset)
        assert copies.element_spec == dataset.element_spec
        assert int(copies.cardinality()) == 1
        tensors = [
            tf.nest.flatten(next(iter(d)), expand_composites=True) for d in (dataset, copies)
        ]
        for original, copy in zip(*tensors, strict=True):
            np.testing.assert_array_equal(original.numpy(), copy.numpy())


def test_files_that_are_too_few_are_refused(tmp_path):
    for name in "ab":
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(b"x")
    one, two = [str(tmp_path / "a")], [str(tmp_path / name) for name in "ab"]
    records, rows = tf.data.TFRecordDataset, tf.data.Dataset
    counts = [
        (records(one).map(lambda r: r).batch(4), 1),
        (records(two).shuffle(3).batch(4).prefetch(1), 2),
        (records(two, num_parallel_reads=2), 2),
        (tf.data.TextLineDataset(one[0]).batch(2), 1),
        (rows.list_files(str(tmp_path / "*")).interleave(records, num_parallel_calls=2), 2),
        (rows.from_tensor_slices(one).flat_map(lambda file: records(file)).batch(4), 1),
        (rows.zip((records(two), records(one))), 1),
        (rows.range(8).batch(2), None),
    ]
    for dataset, files in counts:
        assert same_data.files_of(dataset) == files
        same_data.check_files(dataset, files or 9)
    with pytest.raises(ValueError, match=r"reads 2 files, .* among the 3 workers.*AutoShardPolicy"):
        same_data.check_files(counts[1][0], 3)
    for policy in ("DATA", "OFF"):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, policy
        )
        same_data.check_files(counts[0][0].with_options(options), 2)


def test_batches_have_a_first_axis_in_common():
    def spec(*shape):
        return tf.TensorSpec(shape)

    for good in [(spec(None, 4), spec(None)), spec(8, 3), {"a": spec(8, 3), "b": spec(8)}]:
        same_data.check_batched(good)
    same_data.check_batched((tf.RaggedTensorSpec([None, None]), spec(None)))
    same_data.check_batched(tf.TensorSpec(None))
    for bad in [(spec(4), spec()), (spec(64), spec(10)), spec()]:
        with pytest.raises(ValueError, match=r"Write dataset.batch\(32\)"):
            same_data.check_batched(bad)
    # One replica divides nothing, so that tensors may differ in rows.
    same_data.check_batched((spec(64), spec(10)), several=False)
    with pytest.raises(ValueError, match=r"Write dataset.batch\(32\)"):
        same_data.check_batched((spec(4), spec()), several=False)
    assert same_data.batch_size(tf.data.Dataset.range(8)) is None
