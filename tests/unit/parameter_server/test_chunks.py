"""Training data in chunks: every sample once in an epoch, and what is refused."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.random_examples import random_examples
from tfpara.parameter_server.chunks import Chunks, as_chunks


@functools.lru_cache(maxsize=4)
def graph_of(chunks):
    """A function that makes the dataset of a chunk in a graph, as on a worker, and what it has."""
    specs = []

    @tf.function(autograph=False, reduce_retracing=True)
    def make(*place_and_arguments):
        dataset = chunks.dataset(*place_and_arguments)
        specs.append(dataset.element_spec)
        return tf.data.experimental.to_variant(dataset)

    return make, specs


def read(chunks, epoch=0):
    """Minibatches of each chunk, through a graph as on a worker."""
    make, specs = graph_of(chunks)
    found = []
    for chunk in range(chunks.count):
        arguments = tf.nest.map_structure(tf.convert_to_tensor, chunks.arguments(epoch, chunk))
        variant = make(tf.constant(epoch, tf.int64), tf.constant(chunk, tf.int64), *arguments)
        dataset = tf.data.experimental.from_variant(variant, specs[0])
        found.append(list(dataset.as_numpy_iterator()))
    return found


def ids(chunks, epoch=0):
    return [int(i) for chunk in read(chunks, epoch) for batch in chunk for i in batch[0][:, 0]]


def numbered(size):
    return np.arange(size, dtype=np.float32)[:, None], np.arange(size) % 3


@random_examples(25)
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
    arguments = [tf.nest.flatten(chunks.arguments(epoch, k)) for k in range(count)]
    shapes = {tuple(tuple(a.shape) for a in each) for each in arguments}
    assert len(shapes) == 1  # else workers make a second graph
    used = ids(chunks, epoch)
    assert sorted(used) == list(range(size))
    assert shuffle or used == list(range(size))
    for part in parts:
        for rows, labels in part:
            np.testing.assert_array_equal(rows[:, 0].astype(int) % 3, labels)


def test_inputs_may_be_a_list_of_arrays():
    x, y = numbered(5)
    chunks = as_chunks([x, x[:, 0] + 1], [y, y], batch_size=3, shuffle=False, count=1)
    ((first, second),) = read(chunks)
    for rows, (inputs, labels) in ((slice(3), first), (slice(3, 5), second)):
        np.testing.assert_array_equal(inputs[0], x[rows])
        np.testing.assert_array_equal(inputs[1], x[rows, 0] + 1)
        np.testing.assert_array_equal(labels[1], y[rows])


def test_an_input_may_be_none():
    x, y = numbered(5)
    chunks = as_chunks({"a": None, "b": x}, y, batch_size=3, shuffle=False, count=1)
    zero = tf.zeros([], tf.int64)
    first, second = chunks.dataset(zero, zero, *chunks.arguments(0, 0))
    for rows, (inputs, labels) in ((slice(3), first), (slice(3, 5), second)):
        assert inputs["a"] is None
        np.testing.assert_array_equal(inputs["b"], x[rows])
        np.testing.assert_array_equal(labels, y[rows])


def test_floating_point_arrays_have_the_type_that_keras_gives_them():
    x, y = numbered(5)
    data = as_chunks({"a": x.astype("float64"), "b": x}, y.astype("float16"), count=1)
    (((inputs, labels),),) = read(data)
    types = [inputs["a"].dtype, inputs["b"].dtype, labels.dtype]
    assert types == ["float32"] * 3
    assert as_chunks(x, y).element_spec[1].dtype == "int64"


def test_the_graph_of_a_chunk_copies_no_array(monkeypatch):
    x, y = numbered(5000)
    given = {"batch_size": 64, "count": 3, "order": [4]}
    assert largest_graph(as_chunks(x, y, **given)) < x.nbytes / 2
    monkeypatch.setattr("tfpara.parameter_server.chunks.LARGEST_BYTES", 100)
    with pytest.raises(ValueError, match="which the chief would send to the workers"):
        as_chunks(x, y, **given)
    assert as_chunks(x, y, **given, sent=False).count == 3


def largest_graph(chunks):
    """The size of the largest graph of a chunk's dataset, in bytes."""
    zero = tf.zeros([], tf.int64)
    datasets, sizes = [chunks.dataset(zero, zero, *chunks.arguments(0, 0))], []
    while datasets:
        dataset = datasets.pop()
        datasets += dataset._inputs()
        functions = [each.function for each in dataset._functions()]
        sizes += [each.graph.as_graph_def().ByteSize() for each in functions]
    return max(sizes)


@random_examples(15)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 5))
def test_a_datasets_minibatches_are_used_once(size, batch, count):
    dataset = tf.data.Dataset.from_tensor_slices(numbered(size)).batch(batch)
    chunks = as_chunks(dataset, count=count)
    assert sorted(ids(chunks)) == list(range(size))


def test_epochs_are_permuted_differently_and_repeatably():
    x, y = numbered(50)
    chunks = [as_chunks(x, y, batch_size=7, count=3, order=[k]) for k in (1, 1, 2)]
    orders = [tuple(ids(c, epoch)) for c in chunks for epoch in (0, 1)]
    assert orders[:2] == orders[2:4]
    assert len(set(orders)) == 4


def kept(dataset):
    """Rows like those of `numbered`, of which the first column is the number."""
    return dataset.map(lambda k: (tf.cast(k, tf.float32)[..., None], k))


def unordered(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def per_file(file, seed=None):
    return tf.data.Dataset.range(file * 10, file * 10 + 10).shuffle(10, seed)


def files(**options):
    return tf.data.Dataset.range(4).shuffle(4).interleave(per_file, cycle_length=3, **options)


def noisy(x, k):
    return x + 0.0 * tf.random.uniform(tf.shape(x)), k


def forty():
    return tf.data.Dataset.range(40)


def mixed():
    halves = [tf.data.Dataset.range(20), tf.data.Dataset.range(20, 40)]
    return tf.data.Dataset.sample_from_datasets(halves, rerandomize_each_iteration=True)


SHUFFLED = {
    "before the batches": lambda: kept(forty().shuffle(40)).batch(3),
    "in a small buffer": lambda: kept(forty().shuffle(7)).batch(3, drop_remainder=False),
    "with a seed": lambda: kept(forty().shuffle(40, seed=5)).batch(3),
    "after the batches": lambda: kept(forty()).batch(3).shuffle(9),
    "twice": lambda: kept(forty().shuffle(40)).batch(3).shuffle(9).prefetch(2),
    "then repeated": lambda: kept(forty().shuffle(40).repeat(2)).batch(3),
    "then cached": lambda: kept(forty().shuffle(40).cache()).batch(3),
    "files in turn": lambda: kept(files()).batch(3),
    "files at once": lambda: kept(
        files(num_parallel_calls=3, deterministic=False).shuffle(5)
    ).batch(3),
    "flat": lambda: kept(tf.data.Dataset.range(4).flat_map(per_file)).batch(3),
    "flat with a seed": lambda: kept(
        tf.data.Dataset.range(4).flat_map(lambda file: per_file(file, 5))
    ).batch(3),
    "without order": lambda: unordered(kept(forty().shuffle(40)).map(noisy, 4).batch(3)),
    "filtered, then noisy": lambda: (
        kept(tf.data.Dataset.range(60).shuffle(60).filter(lambda k: k < 40)).map(noisy).batch(3)
    ),
    "noisy files": lambda: (
        tf.data.Dataset.range(4).interleave(lambda file: kept(per_file(file)).map(noisy)).batch(3)
    ),
    "mixed": lambda: kept(mixed()).batch(3),
}


@pytest.fixture
def seeded(request):
    """A global seed, or none, whatever the tests before have left."""
    tf.random.set_seed(request.param)
    yield
    tf.random.set_seed(None)


@pytest.mark.nightly_cases(
    "*-3",
    "then *",
    "files in turn-None",
    "flat-None",
    "mixed-None",
    "twice-None",
    "noisy files-None",
)
@pytest.mark.parametrize(
    ("name", "seeded"),
    [(name, None) for name in SHUFFLED]
    + [(name, 3) for name in ("before the batches", "flat", "noisy files")],
    indirect=["seeded"],
)
def test_a_shuffled_datasets_samples_are_used_once_in_new_orders(name, seeded):
    dataset = SHUFFLED[name]()
    times = 2 if "repeated" in name else 1
    chunks = as_chunks(dataset, count=3, order=[1, 0])
    orders = [ids(chunks, epoch) for epoch in range(3)]
    for used in orders:
        assert sorted(used) == sorted([*range(40)] * times)
    assert len({tuple(order) for order in orders}) == 3
    assert ids(chunks, 1) == orders[1]  # of a worker that takes over
    assert ids(as_chunks(SHUFFLED[name](), count=3, order=[1, 0]), 1) == orders[1]  # resumed
    assert ids(as_chunks(dataset, count=3, order=[1, 1]), 1) != orders[1]  # of the next fit
    assert sum(len(chunk) for chunk in read(chunks)) == -(-40 * times // 3)
    assert chunks.num_minibatches in (None, -(-40 * times // 3))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_dataset_that_is_shuffled_once_keeps_its_order(seed):
    dataset = kept(forty().shuffle(40, seed=seed, reshuffle_each_iteration=False)).batch(3)
    chunks = as_chunks(dataset, count=1, order=[1, 0])
    first = ids(chunks, 0)
    assert sorted(first) == list(range(40)) and first != sorted(first)
    assert ids(chunks, 1) == first
    if seed is not None:  # TensorFlow's own
        assert first == [int(k) for batch in dataset for k in batch[1]]


@pytest.mark.parametrize("kind", [keras.random.SeedGenerator, tf.random.Generator.from_seed])
def test_what_a_map_draws_is_new_in_each_epoch(kind):
    """As in plain Keras, where the generator's state goes on from epoch to epoch."""
    generator = kind(5)
    sizes = tf.Variable([7, 8], dtype=tf.int64)  # of no generator

    def noise(k):
        if isinstance(generator, tf.random.Generator):
            return generator.normal([2]), tf.identity(sizes)
        return keras.random.normal([2], seed=generator), tf.identity(sizes)

    dataset = tf.data.Dataset.range(6).map(noise).batch(2)

    def drawn(order, epoch):
        (batches,) = read(as_chunks(dataset, count=1, order=order), epoch)
        assert all((batch[1] == [7, 8]).all() for batch in batches)
        return [float(number) for batch in batches for number in batch[0].ravel()]

    found = [drawn([1, 0], 0), drawn([1, 0], 1), drawn([1, 1], 0)]
    assert len({number for numbers in found for number in numbers}) == 3 * 12
    assert drawn([1, 0], 1) == found[1]  # of a worker that takes over


def test_each_worker_of_a_simulation_reads_what_is_its_share_at_once():
    """The copies that are read at the same time do not disturb each other."""
    chunks = as_chunks(SHUFFLED["then cached"](), count=3)
    zero = tf.zeros([], tf.int64)
    iterators = [
        iter(chunks.dataset(zero, tf.constant(k, tf.int64), *chunks.arguments(0, k)))
        for k in range(3)
    ]
    used = [
        int(k) for _ in range(5) for it in iterators for b in [next(it, None)] if b for k in b[1]
    ]
    assert sorted(used) == list(range(40))


def test_shares_that_are_of_several_datasets_are_noticed():
    chunks = as_chunks(kept(forty()).batch(3), count=3)
    chunks.check(0, [5, 5, 4])
    with pytest.raises(ValueError, match=r"in epoch 2 its 3 chunks had \[4, 6, 4\] .*\[5, 5, 4\]"):
        chunks.check(2, [4, 6, 4])
    Chunks(3, lambda e, c: None).check(0, [4, 6, 4])
    as_chunks(X, Y, batch_size=1, count=4).check(0, [1, 2, 1, 2])


def test_a_dataset_is_read_inside_graphs():
    table = tf.constant([10.0, 20.0, 30.0, 40.0])
    dataset = tf.data.Dataset.range(4).map(lambda k: (tf.gather(table, k)[None], k)).batch(1)
    chunks = as_chunks(dataset, count=2)

    @tf.function
    def total(chunk, *arguments):
        part = chunks.dataset(tf.zeros([], tf.int64), chunk, *arguments)
        return part.reduce(0.0, lambda s, data: s + tf.reduce_sum(data[0]))

    sums = [float(total(tf.constant(k, tf.int64), *chunks.arguments(0, k))) for k in (0, 1)]
    assert sums == [40.0, 60.0]
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


def in_chunks(make):
    return as_chunks(Chunks(2, lambda epoch, chunk: make(epoch)))


def by_chance(k):
    return tf.random.uniform([]) < 0.5


def with_noise(k):
    return tf.cast(k, tf.float32) + tf.random.normal([])


def noisy_file(file):
    return tf.data.Dataset.range(file).map(with_noise)


def rejecting():
    labels = tf.data.Dataset.range(40).map(lambda k: tf.cast(k % 2, tf.int32))
    return labels.rejection_resample(lambda k: k, [0.5, 0.5], [0.2, 0.8])


def some_of_each(k):
    count = tf.random.uniform([], maxval=3, dtype=tf.int64)
    return tf.data.Dataset.range(count)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: as_chunks(python_data()), "a Python function in it"),
        (lambda: as_chunks(generated()), "a Python function in it"),
        (lambda: in_chunks(lambda e: python_data()), "chunk has a Python function"),
        (
            lambda: as_chunks(forty().filter(by_chance)),
            "a FilterDataset that may depend on chance .*Uni",
        ),
        (lambda: as_chunks(rejecting()), "a FilterDataset that may depend on chance"),
        (
            lambda: as_chunks(forty().cache("a/file")),
            "has cache\\('a/file'\\), and all .*cache\\(\\)",
        ),
        (lambda: as_chunks(forty().flat_map(lambda k: forty().cache("a"))), "cache\\('a'\\)"),
        (lambda: in_chunks(lambda e: forty().cache("a")), "a chunk has cache\\('a'\\)"),
        (lambda: as_chunks(forty().flat_map(some_of_each)), "a FlatMapDataset that may depend on"),
        (lambda: in_chunks(lambda e: forty().filter(by_chance)), "dataset of a chunk .* on chance"),
        (lambda: as_chunks(forty().map(with_noise).filter(lambda x: x < 9.0)), "Filter.*Normal"),
        (lambda: as_chunks(forty().flat_map(noisy_file).filter(lambda x: x < 9.0)), "Filter.*Norm"),
        (lambda: in_chunks(lambda e: forty().shuffle(9)), "ShuffleDatasetV3 without .*seed=epoch"),
        (
            lambda: in_chunks(lambda e: forty().flat_map(per_file)),
            "ShuffleDatasetV3 without a seed",
        ),
        (
            lambda: in_chunks(lambda e: forty().map(lambda k: k, 2, deterministic=False)),
            "deterministic=False in a ParallelMap.*Leave it out",
        ),
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


@pytest.mark.parametrize("seeded", [3], indirect=True)
def test_a_global_seed_is_none_of_a_chunks_shuffle(seeded):
    with pytest.raises(ValueError, match="without a seed"):
        in_chunks(lambda epoch: forty().shuffle(9))


def test_two_datasets_of_a_graph_have_one_order():
    chunks = as_chunks(forty().shuffle(40).batch(4), count=2)

    @tf.function(autograph=False)
    def read_twice(*place_and_seeds):
        datasets = [chunks.dataset(*place_and_seeds) for _ in range(2)]
        return [next(iter(dataset)) for dataset in datasets]

    zero = tf.zeros([], tf.int64)
    np.testing.assert_array_equal(*read_twice(zero, zero, *chunks.arguments(0, 0)))


def test_chunks_may_shuffle_with_the_epoch_as_a_seed():
    def part(epoch, chunk):
        return kept(tf.data.Dataset.range(chunk * 20, chunk * 20 + 20).shuffle(20, epoch)).batch(3)

    chunks = as_chunks(Chunks(2, part))
    orders = [ids(chunks, epoch) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert [sorted(order) for order in orders] == [list(range(40))] * 3


class InPython(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:3], Y[:3]


@pytest.mark.parametrize("x", [None, "file", 3, iter([1]), InPython()])
def test_data_of_another_kind_is_refused(x):
    with pytest.raises(TypeError, match="without Python"):
        as_chunks(x)


def test_a_ragged_tensor_is_refused():
    with pytest.raises(TypeError, match="x is a RaggedTensor.* without Python"):
        as_chunks(tf.ragged.constant([[1], []]), [0, 1])


def test_class_weights_of_one_hot_labels():
    x, y = numbered(6)
    labels = np.arange(6) % 3
    weighted = []
    for targets in (labels, np.eye(3, dtype="float32")[labels]):
        chunks = as_chunks(x, targets, batch_size=4, shuffle=False, class_weight={1: 5.0})
        weighted.append(np.concatenate([w for chunk in read(chunks) for _, _, w in chunk]))
    np.testing.assert_array_equal(*weighted)
    assert len(read(as_chunks(x, labels, class_weight={}))[0][0]) == 2  # no weights
    assert weighted[0].tolist() == [1, 5, 1, 1, 5, 1]


def test_classes_that_have_no_weight_count_as_in_keras():
    """A label of -1, which a loss may leave out, counts 1 if it has no weight of its own."""
    x, _ = numbered(4)
    for of_classes, wanted in (({0: 3.0}, [1, 3, 1, 1]), ({-1: 0.0, 9: 2.0}, [0, 1, 1, 2])):
        chunks = as_chunks(x, np.array([-1, 0, 5, 9]), shuffle=False, class_weight=of_classes)
        (((_, _, weights),),) = read(chunks)
        assert weights.tolist() == wanted
