"""Chunks of a real (small) corpus, read in graphs without Python."""

import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from input import features, index, pipeline, records, streams
from input.chunks import Division
from input.frame_chunks import frame_chunks
from input.graph_reader import GraphReader, utterances
from input.stream_chunks import stream_chunks
from input.streams import StreamOptions
from tests.lib.random_examples import random_examples

FRAMES = {"minibatch": 97, "seconds": 9.0, "seed": 5, "shuffle_frames": 300}
SMALL = StreamOptions(streams=3, truncation=7)


def read_all(chunks, pairs):
    """The minibatches of each (epoch, chunk), as lists of arrays; the graph is made once."""
    first = chunks.arguments(0, 0)
    signature = tuple(
        tf.TensorSpec([None] * np.ndim(array), tf.convert_to_tensor(array).dtype) for array in first
    )
    number = tf.TensorSpec([], tf.int64)

    def arguments():
        for at, (epoch, chunk) in enumerate(pairs):
            yield at, epoch, chunk, *chunks.arguments(epoch, chunk)

    asked = tf.data.Dataset.from_generator(
        arguments, output_signature=(number, number, number, *signature)
    )
    batches = asked.flat_map(
        lambda at, *rest: chunks.dataset(*rest).map(lambda *batch: (at, batch))
    )
    found = [[] for _ in pairs]
    for at, batch in batches:
        found[int(at)].append([array.numpy() for array in tf.nest.flatten(batch)])
    return found


def read(chunks, epoch, chunk):
    """The minibatches of a chunk."""
    return read_all(chunks, [(epoch, chunk)])[0]


def all_of(chunks, *epochs):
    """For each epoch, the minibatches of each of its chunks."""
    count = chunks.count
    found = read_all(chunks, [(epoch, chunk) for epoch in epochs for chunk in range(count)])
    return [found[first : first + count] for first in range(0, len(found), count)]


def epoch_of(chunks, epoch):
    return sum(*all_of(chunks, epoch), [])


def same(one, other):
    return len(one) == len(other) and all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def rows(batches):
    """The bytes of each frame with its label, sorted, to compare multisets."""
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    together = np.concatenate([y[:, None].astype(np.float32), x], axis=1)
    return sorted(row.tobytes() for row in together)


def whole_epoch(corpus, **changes):
    """What the synchronous pipeline makes of an epoch."""
    settings_ = {"minibatch": 97, "sync_period": 1, "epoch": 0, "seed": 5, **changes}
    dataset = pipeline.minibatches(corpus, "train", num_replicas=1, replica_ids=[0], **settings_)
    return [[x.numpy(), y.numpy()] for x, y in dataset]


class FakeCorpus:
    """As much of a corpus as `Division` looks at."""

    directory = "nowhere"

    def __init__(self, frames):
        empty = np.zeros(len(frames), np.int64)
        names = tuple(str(number) for number in range(len(frames)))
        self._split = index.Split(
            (), empty, empty, empty, empty, np.array(frames, np.int64), names, names
        )

    def split(self, name):
        return self._split

    def num_frames(self, name):
        return int(self._split.frames.sum())


@random_examples(150)
@given(
    frames=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    seconds=st.floats(0.05, 60.0),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_epoch_has_each_utterance_once_in_as_many_chunks(frames, seconds, seed, shuffle):
    corpus, count = FakeCorpus(frames), math.ceil(sum(frames) / (seconds / 0.01))
    if count > len(frames):
        with pytest.raises(ValueError, match=f"would be {count}, more than the {len(frames)}"):
            Division(corpus, "train", seconds, seed, shuffle)
        return
    division = Division(corpus, "train", seconds, seed, shuffle)
    assert division.count == count
    for epoch in (0, 1, 7):
        chunks = [division(epoch, chunk) for chunk in range(count)]
        assert all(len(chunk) for chunk in chunks)
        assert sorted(np.concatenate(chunks)) == list(range(len(frames)))
        if not shuffle:
            assert list(np.concatenate(chunks)) == list(range(len(frames)))
        if len(frames) >= 10 * count and count > 1:  # long enough to be of about equal length
            lengths = [sum(frames[u] for u in chunk) for chunk in chunks]
            assert max(lengths) - min(lengths) <= 2 * max(frames)


@pytest.mark.nightly_cases("100000")
@pytest.mark.parametrize("shuffle_frames", [200, 100_000])
def test_every_frame_exactly_once(tiny, shuffle_frames):
    chunks = frame_chunks(tiny, "train", **{**FRAMES, "shuffle_frames": shuffle_frames})
    assert chunks.count == 5
    expected = rows(whole_epoch(tiny))
    for epoch, of_chunks in zip((0, 3), all_of(chunks, 0, 3), strict=True):
        sizes = []
        for batches in of_chunks:
            sizes.append([len(y) for _, y in batches])
            assert sizes[-1][:-1] == [97] * (len(batches) - 1) and 0 < sizes[-1][-1] <= 97
            assert max(sum(sizes[-1]) - 900, 900 - sum(sizes[-1])) < 600
        if epoch == 0:
            assert sum(map(len, sizes)) == chunks.num_minibatches
        assert rows(sum(of_chunks, [])) == expected


def test_one_chunk_in_order_is_the_synchronous_epoch(tiny):
    chunks = frame_chunks(tiny, "train", minibatch=97, shuffle_frames=300, shuffle=False)
    assert chunks.count == 1  # the corpus has less than an hour
    assert same(epoch_of(chunks, 0), whole_epoch(tiny, shuffle=False))


def test_chunks_in_order_are_runs_of_the_corpus(tiny):
    chunks = frame_chunks(tiny, "train", **FRAMES, context=2, shuffle=False)
    frames, labels = (np.concatenate(parts) for parts in zip(*epoch_of(chunks, 0), strict=True))
    split, at = tiny.split("train"), 0
    with index.open_shards(split) as files:
        for utterance in range(len(split)):
            raw, classes = index.read_utterance(tiny, split, files, utterance)
            normal = features.normalise(raw, tiny.mean, tiny.stddev)
            here = slice(at, at + len(classes))
            np.testing.assert_array_equal(frames[here], features.splice(normal, 2, 2).numpy())
            np.testing.assert_array_equal(labels[here], classes)
            at += len(classes)
    assert at == len(labels)


def test_frames_are_permuted_within_windows_of_a_chunk(tiny):
    ordered = frame_chunks(tiny, "train", **{**FRAMES, "seconds": 60.0}, context=0, shuffle=False)
    permuted = frame_chunks(tiny, "train", **{**FRAMES, "seconds": 60.0}, context=0)
    assert permuted.count == 1
    # As if the order of the utterances were that of the corpus.
    arguments = list(permuted.arguments(0, 0))
    arguments[:4] = ordered.arguments(0, 0)[:4]
    found = [[x.numpy(), y.numpy()] for x, y in permuted.dataset(0, 0, *arguments)]
    expected = read(ordered, 0, 0)
    assert not same(found, expected)
    window = 4  # minibatches: 300 frames are rounded up to 388
    for first in range(0, len(found), window):
        part = slice(first, first + window)
        assert rows(found[part]) == rows(expected[part])
    assert not np.array_equal(found[0][1][:50], found[4][1][:50])


@pytest.mark.nightly_cases("<lambda>1")
@pytest.mark.parametrize(
    "make",
    [
        lambda corpus, seed: frame_chunks(corpus, "train", **{**FRAMES, "seed": seed}),
        lambda corpus, seed: stream_chunks(corpus, "train", SMALL, seconds=9.0, seed=seed),
    ],
)
def test_a_chunk_is_the_same_again_and_epochs_chunks_and_seeds_differ(tiny, make):
    first, again = make(tiny, 5), make(tiny, 5)
    reference, *others = read_all(first, [(1, 2), (2, 2), (1, 3)])
    _, once_more, retaken = read_all(again, [(3, 0), (1, 2), (1, 2)])
    assert same(reference, once_more) and same(reference, retaken)
    for other in (*others, read(make(tiny, 6), 1, 2)):
        assert not same(reference, other)


def test_the_minibatch_size_may_follow_the_position(tiny):
    asked = []

    def size(position):
        asked.append(position)
        return 50 if position < 1.4 else 120

    chunks = frame_chunks(tiny, "train", **{**FRAMES, "minibatch": size})
    assert asked == [0.0, 0.2, 0.4, 0.6, 0.8]
    small, large = read_all(chunks, [(1, 1), (1, 2)])
    assert small[0][1].shape == (50,) and large[0][1].shape == (120,)


@pytest.mark.nightly_cases("options1", "options2", "options3", "options4")
@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        StreamOptions(streams=1, truncation=5, stack=3, context=2),
        StreamOptions(streams=4, truncation=20, label_delay=3, coefficients=80),
        StreamOptions(streams=2, truncation=6, stack=2, label_delay=7, normalisation="utterance"),
        StreamOptions(streams=50, truncation=9, normalisation="none"),
    ],
)
def test_one_chunk_of_streams_is_the_synchronous_epoch(tiny, options):
    shuffle = options != SMALL
    chunks = stream_chunks(tiny, "train", options, seed=5, shuffle=shuffle)
    dataset = streams.minibatches(
        tiny, "train", options, num_replicas=1, replica_ids=[0], epoch=2, seed=5, shuffle=shuffle
    )
    expected = [[array.numpy() for array in tf.nest.flatten(batch)] for batch in dataset]
    found = read(chunks, 2, 0)
    assert chunks.count == 1 and len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            # The statistics of an utterance are added up in another order.
            tolerance = 1e-4 if options.normalisation == "utterance" else 0
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    spec = chunks.dataset(0, 0, *chunks.arguments(0, 0)).element_spec
    assert spec == dataset.element_spec


def test_chunks_of_streams_have_every_frame_once_and_start_anew(tiny):
    chunks = stream_chunks(tiny, "train", SMALL, seconds=9.0, seed=5)
    assert chunks.count == 5
    unspliced = rows(whole_epoch(tiny, context=0))
    for epoch, of_chunks in enumerate(all_of(chunks, 0, 1)):
        utterances_, real, labels = 0, [], []
        for batches in of_chunks:
            assert batches[0][1].all()  # reset
            for frames, reset, classes, weights in batches:
                assert frames.shape == (3, 7, 120)
                real.append(frames[weights > 0])
                labels.append(classes[weights > 0])
                utterances_ += int((reset.astype(bool) & (weights[:, 0] > 0)).sum())
        assert utterances_ == len(tiny.split("train"))
        assert rows(list(zip(real, labels, strict=True))) == unspliced
        if epoch == 0:
            assert chunks.num_minibatches == sum(map(len, of_chunks))


@pytest.mark.nightly_cases("frames")
@pytest.mark.parametrize("kind", ["frames", "streams"])
def test_a_chunk_runs_in_a_graph_without_python(tiny, kind):
    chunks = (
        frame_chunks(tiny, "train", **FRAMES)
        if kind == "frames"
        else stream_chunks(tiny, "train", SMALL, seconds=9.0)
    )

    @tf.function(reduce_retracing=True, autograph=False)
    def sums(epoch, chunk, done, *arguments):
        dataset = chunks.dataset(epoch, chunk, *arguments).skip(done)
        return dataset.reduce(
            np.float32(0), lambda total, *batch: total + tf.reduce_sum(tf.nest.flatten(batch)[0])
        )

    for (chunk, done), batches in zip(
        ((0, 0), (1, 0), (2, 3), (3, 0)), *all_of(chunks, 1), strict=False
    ):
        arguments = [tf.convert_to_tensor(a) for a in chunks.arguments(1, chunk)]
        numbers = [tf.constant(number, tf.int64) for number in (1, chunk, done)]
        expected = sum(batch[0].sum(dtype=np.float64) for batch in batches[done:])
        np.testing.assert_allclose(sums(*numbers, *arguments), expected, rtol=1e-3, atol=1.0)
    assert sums.experimental_get_tracing_count() <= 2
    graph = sums.get_concrete_function(*numbers, *arguments).graph.as_graph_def()
    assert b"TFRecordDatasetV2" in graph.SerializeToString()
    assert b"PyFunc" not in graph.SerializeToString()


@pytest.fixture(name="copy")
def _copy(tiny_directory, tmp_path):
    """A corpus that may be damaged after its index was read."""
    shutil.copytree(tiny_directory, tmp_path / "corpus")
    return index.read(tmp_path / "corpus")


def cut(path, place):
    path.write_bytes(path.read_bytes()[: place.offset + place.length // 2])


def end(path, place):
    path.write_bytes(path.read_bytes()[: place.offset])


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 2] ^= 1
    path.write_bytes(content)


def remove(path, place):
    path.unlink()


def replace(path, place, data):
    """Puts another example, with right checksums, in the place of an utterance."""
    with tf.io.TFRecordWriter(str(path.with_suffix(".one"))) as file:
        file.write(data)
    record, content = path.with_suffix(".one").read_bytes(), path.read_bytes()
    path.write_bytes(content[: place.offset] + record + content[place.offset + place.length :])


def example(place, frames=None, dim=120, value=0.0, label=0, name=None):
    count = frames or place.frames
    wrong = np.zeros([count, dim], np.float32)
    wrong[-1, -1] = value
    return records.encode(wrong, np.full(count, label, np.int32), name or place.id, "x")


@pytest.mark.nightly_cases(
    "end-*", "flip-*", "remove-*", "<lambda>-not*", "<lambda>-NaN or Inf1", "*of the0"
)
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, "missing, cut short or damaged"),
        (end, "missing, cut short or damaged"),
        (flip, "missing, cut short or damaged"),
        (remove, "missing, cut short or damaged"),
        (lambda p, u: replace(p, u, example(u, name="someone")), "record of another utterance"),
        (lambda p, u: replace(p, u, example(u, frames=u.frames - 1)), "not as many frames"),
        (lambda p, u: replace(p, u, example(u, dim=119)), "not of 120 numbers"),
        (lambda p, u: replace(p, u, example(u, value=np.nan)), "NaN or Inf"),
        (lambda p, u: replace(p, u, example(u, value=-np.inf)), "NaN or Inf"),
        (lambda p, u: replace(p, u, example(u, label=9999)), "label that is not one of the"),
        (lambda p, u: replace(p, u, example(u, label=-1)), "label that is not one of the"),
    ],
)
def test_what_cannot_be_read_is_named(copy, tmp_path, harm, message):
    split = copy.split("train")
    place = split.place(len(split) - 1)
    path = tmp_path / "corpus" / place.path.rsplit("/", 1)[-1]
    harm(path, place)
    first = np.flatnonzero(split.shard == split.shard[-1])[0]
    named = split.place(first if harm is remove else len(split) - 1)
    # Streams read the same way.
    chunks = (
        stream_chunks(copy, "train", StreamOptions(streams=1), shuffle=False)
        if harm in (flip, remove)
        else frame_chunks(copy, "train", minibatch=97, shuffle=False)
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        read(chunks, 0, 0)
    assert f"{path}, utterance {named.id} at byte {named.offset}, " in caught.value.message
    assert message in caught.value.message


def test_any_utterances_are_read_in_any_order(tiny):
    split, numbers = tiny.split("train"), np.array([3, 0, 7, 3])
    reader, chosen = GraphReader(tiny, "train"), utterances(tiny.split("train"), np.array(numbers))
    raw = next(iter(reader.records(chosen).batch(len(numbers))))
    frames, labels = reader.decode(chosen, raw)
    with index.open_shards(split) as files:
        expected = [index.read_utterance(tiny, split, files, number) for number in numbers]
    np.testing.assert_array_equal(frames, np.concatenate([f for f, _ in expected]))
    np.testing.assert_array_equal(labels, np.concatenate([c for _, c in expected]))


def test_the_working_directory_does_not_matter(tiny_directory, tmp_path, monkeypatch):
    shutil.copytree(tiny_directory, tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    chunks = frame_chunks(index.read("corpus"), "train", **FRAMES)
    dataset = chunks.dataset(0, 0, *chunks.arguments(0, 0))
    monkeypatch.chdir("/")
    assert len(list(dataset)) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0}, "seconds .*Received: 0"),
        ({"seconds": math.nan}, "seconds .*Received: nan"),
        ({"seconds": 0.5}, r"0\.5 seconds would be \d+, more than the \d+ utterances"),
        ({"seed": -1}, "seed .*Received: -1"),
        ({"minibatch": 0}, "minibatch .*Received: 0"),
        ({"shuffle_frames": 0}, "shuffle_frames .*Received: 0"),
        ({"context": -1}, "left=-1"),
        ({"split": "dev"}, "split must be one of train, validation, test. Received: 'dev'"),
    ],
)
def test_bad_arguments(tiny, change, message):
    chosen = {"split": "train", **FRAMES, **change}
    with pytest.raises(ValueError, match=message):
        frame_chunks(tiny, **chosen)


def test_bad_arguments_of_streams_and_calls(tiny):
    with pytest.raises(ValueError, match="coefficients=121 are more than the 120"):
        stream_chunks(tiny, "train", StreamOptions(coefficients=121))
    chunks = stream_chunks(tiny, "train", SMALL, seconds=9.0)
    with pytest.raises(ValueError, match="chunk must be below 5. Received: 5"):
        chunks.arguments(0, 5)
    with pytest.raises(ValueError, match="epoch must be 0 or more. Received: -1"):
        chunks.arguments(-1, 0)
