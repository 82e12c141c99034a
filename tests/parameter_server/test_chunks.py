"""Training data in chunks: every sample once in an epoch, and what is refused."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpara.parameter_server.chunks import Chunks, as_chunks


def read(chunks, epoch=0):
    """Minibatches of each chunk, through a graph as on a worker."""
    found = []
    for chunk in range(chunks.count):
        place = (tf.constant(epoch, tf.int64), tf.constant(chunk, tf.int64))
        found.append(
            list(chunks.dataset(*place, *chunks.arguments(epoch, chunk)).as_numpy_iterator())
        )
    return found


def ids(chunks, epoch=0):
    return [int(i) for chunk in read(chunks, epoch) for batch in chunk for i in batch[0][:, 0]]


def numbered(size):
    return np.arange(size, dtype=np.float32)[:, None], np.arange(size) % 3


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_arrays_are_used_once_in_an_epoch(data, size, batch, shuffle, epoch):
    minibatches = -(-size // batch)
    count = data.draw(st.integers(1, minibatches))
    x, y = numbered(size)
    chunks = as_chunks(x, y, batch_size=batch, shuffle=shuffle, count=count)
    assert chunks.num_minibatches == minibatches
    parts = read(chunks, epoch)
    sizes = [len(part) for part in parts]
    assert sum(sizes) == minibatches
    assert max(sizes) - min(sizes) <= 1
    used = ids(chunks, epoch)
    assert sorted(used) == list(range(size))
    assert shuffle or used == list(range(size))
    for part in parts:
        for rows, labels in part:
            np.testing.assert_array_equal(rows[:, 0].astype(int) % 3, labels)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 5))
def test_a_datasets_minibatches_are_used_once(size, batch, count):
    dataset = tf.data.Dataset.from_tensor_slices(numbered(size)).batch(batch)
    chunks = as_chunks(dataset, count=count)
    assert sorted(ids(chunks)) == list(range(size))


def test_epochs_are_permuted_differently_and_repeatably():
    x, y = numbered(50)
    chunks = [as_chunks(x, y, batch_size=7, count=3, seed=seed) for seed in (1, 1, 2)]
    orders = [tuple(ids(c, epoch)) for c in chunks for epoch in (0, 1)]
    assert orders[:2] == orders[2:4]
    assert len(set(orders)) == 4


def test_a_dataset_is_read_inside_graphs():
    table = tf.constant([10.0, 20.0, 30.0, 40.0])
    dataset = tf.data.Dataset.range(4).map(lambda k: (tf.gather(table, k)[None], k)).batch(1)
    chunks = as_chunks(dataset, count=2)

    @tf.function
    def total(chunk):
        part = chunks.dataset(tf.zeros([], tf.int64), chunk)
        return part.reduce(0.0, lambda s, data: s + tf.reduce_sum(data[0]))

    assert [float(total(tf.constant(k, tf.int64))) for k in (0, 1)] == [40.0, 60.0]
    tf.nest.assert_same_structure(chunks.element_spec, dataset.element_spec)


def test_structures_sample_weights_and_class_weights():
    x, y = numbered(6)
    weights = np.arange(6, dtype=np.float32) / 2
    chunks = as_chunks({"a": x, "b": x + 1}, y, sample_weight=weights, batch_size=4, shuffle=False)
    ((first, second),) = read(chunks)
    np.testing.assert_array_equal(first[0]["b"], first[0]["a"] + 1)
    np.testing.assert_array_equal(np.concatenate([first[2], second[2]]), weights)

    chunks = as_chunks(x, y, batch_size=4, shuffle=False, class_weight={1: 5.0})
    ((first, second),) = read(chunks)
    np.testing.assert_array_equal(np.concatenate([first[2], second[2]]), [1, 5, 1, 1, 5, 1])


def test_chunks_of_ones_own():
    def part(epoch, chunk, offset):
        rows = tf.cast(tf.range(3) + 100 * tf.cast(epoch, tf.int32), tf.float32)
        rows += 10 * tf.cast(chunk, tf.float32) + tf.cast(offset, tf.float32)
        return tf.data.Dataset.from_tensors((rows[:, None], tf.zeros([3], tf.int32)))

    chunks = Chunks(2, part, lambda epoch, chunk: (np.int64(1000 * (chunk + 1)),))
    assert as_chunks(chunks) is chunks
    assert ids(chunks, 1) == [1100, 1101, 1102, 2110, 2111, 2112]
    assert chunks.element_spec[0].shape[1] == 1


def python_data():
    return tf.data.Dataset.range(3).map(lambda k: tf.py_function(lambda: 1.0, [], tf.float32))


def generated():
    return tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([]))


X, Y = numbered(6)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: as_chunks(python_data()), "a Python function in it"),
        (lambda: as_chunks(generated()), "a Python function in it"),
        (lambda: as_chunks(tf.data.Dataset.range(3).repeat()), "infinite.*take"),
        (lambda: as_chunks(tf.data.Dataset.range(3), Y), "y does not go with x of the type"),
        (lambda: as_chunks(tf.data.Dataset.range(3), batch_size=3), "batch_size does not go"),
        (lambda: as_chunks(Chunks(1, lambda e, c: None), count=2), "chunks does not go"),
        (lambda: as_chunks(X, Y[:5]), r"the arrays have \[5, 6\] samples"),
        (lambda: as_chunks(X[:0], Y[:0]), r"\[0\] samples"),
        (lambda: as_chunks(X), "y is None"),
        (lambda: as_chunks(X, Y, batch_size=0), "batch_size=0 must be a whole number"),
        (lambda: as_chunks(X, Y, count=-1), "chunks=-1 must be a whole number"),
        (lambda: as_chunks(tf.data.Dataset.range(3), count=0), "chunks=0 must be a whole number"),
        (lambda: as_chunks(X, Y, batch_size=4, count=3), "chunks=3 is more than the 2 minibatches"),
        (lambda: as_chunks(np.broadcast_to(np.float32(0), (1 << 15, 1 << 14)), Y), "samples"),
        (lambda: as_chunks(np.broadcast_to(np.float32(0), (6, 1 << 26)), Y), "more than 1 GB"),
        (lambda: read(as_chunks(X, {"a": Y}, class_weight={0: 2.0})), "class_weight needs"),
        (lambda: Chunks(0, lambda e, c: None), "count=0"),
        (lambda: Chunks(True, lambda e, c: None), "count=True"),
        (lambda: Chunks(1.0, lambda e, c: None), "count=1.0"),
    ],
)
def test_data_that_does_not_fit_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("x", [None, "file", 3, iter([1])])
def test_data_of_another_kind_is_refused(x):
    with pytest.raises(TypeError, match="without Python"):
        as_chunks(x)


def test_class_weights_of_one_hot_labels():
    x, y = numbered(6)
    labels = np.arange(6) % 3
    weighted = []
    for targets in (labels, np.eye(3, dtype="float32")[labels]):
        chunks = as_chunks(x, targets, batch_size=4, shuffle=False, class_weight={1: 5.0})
        weighted.append(np.concatenate([w for chunk in read(chunks) for _, _, w in chunk]))
    np.testing.assert_array_equal(*weighted)
    assert weighted[0].tolist() == [1, 5, 1, 1, 5, 1]
