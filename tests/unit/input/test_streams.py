"""Parallel streams of a real (small) corpus."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from input import features, index, stream_plan, streams
from input.streams import StreamOptions
from tests.lib.random_examples import random_examples
from tests.lib.streams import SMALL, read, utterances


@pytest.fixture(name="whole", scope="module")
def _whole(tiny):
    """Normalised frames and labels of each training utterance."""
    split = tiny.split("train")
    with index.open_shards(split) as files:
        read = [index.read_utterance(tiny, split, files, u) for u in range(len(split))]
    return [(features.normalise(f, tiny.mean, tiny.stddev).numpy(), labels) for f, labels in read]


def by_bytes(arrays):
    return sorted(array.tobytes() for array in arrays)


@random_examples(60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    num_replicas=st.integers(1, 4),
    rows=st.integers(1, 5),
    truncation=st.integers(1, 9),
)
def test_every_utterance_goes_to_one_stream_without_gaps(lengths, num_replicas, rows, truncation):
    if len(lengths) < num_replicas:
        return
    order = np.random.default_rng(0).permutation(len(lengths))
    plan = stream_plan.plan(
        np.array(lengths),
        num_replicas=num_replicas,
        streams=rows,
        truncation=truncation,
        order=order,
    )
    seen, ends = [], []
    for replica in range(num_replicas):
        of_rows = plan.rows(replica)
        assert len(of_rows) == rows
        for row in of_rows:
            at = 0
            for position in row:
                assert plan.first_step[position] == at
                at = plan.end_step[position]
                length = lengths[plan.utterance[position]]
                assert (at - plan.first_step[position] - 1) * truncation < length
                assert (at - plan.first_step[position]) * truncation >= length
            seen += [plan.utterance[position] for position in row]
            ends.append(at)
        assert plan.steps(replica) == max(ends[-rows:])
    assert sorted(seen) == list(range(len(lengths)))
    longest = -(-max(lengths) // truncation)
    assert max(ends) - min(ends) <= longest
    assert plan.num_steps == max(ends)
    assert plan.num_minibatches == sum(plan.steps(r) for r in range(num_replicas))


@pytest.mark.parametrize("workers", [[[0]], [[0], [1]], [[0, 1], [2]], [[0], [1, 2, 3], [4]]])
def test_every_frame_exactly_once(tiny, whole, workers):
    num_replicas = sum(len(ids) for ids in workers)
    frames, labels, utts = [], [], []
    for ids in workers:
        batches = read(tiny, num_replicas=num_replicas, replica_ids=ids)
        assert len(batches) % len(ids) == 0
        for local in range(len(ids)):
            mine = [b for b in batches[local :: len(ids)] if len(b[1])]
            for parts in utterances(mine):
                real = parts[2] > 0
                utts.append(parts[0][real])
                labels.append(parts[1][real])
            frames.append(sum(b[3].sum() for b in mine))
    assert sum(frames) == tiny.num_frames("train")
    assert by_bytes(utts) == by_bytes(f for f, _ in whole)
    assert by_bytes(labels) == by_bytes(c for _, c in whole)


def test_streams_start_with_different_utterances_and_padding_is_zero(tiny):
    batches = read(tiny)
    plan = streams.partition(tiny, "train", StreamOptions(**SMALL), num_replicas=1, seed=5)
    assert len(batches) == plan.num_steps == plan.steps(0)
    frames, reset, *_ = batches[0]
    assert frames.shape == (4, 7, 120) and reset.all()
    assert len({row.tobytes() for row in frames}) == 4
    for frames, _, labels, weights in batches:
        assert set(np.unique(weights)) <= {0.0, 1.0}
        assert not frames[weights == 0].any() and not labels[weights == 0].any()
        assert (np.diff(weights, axis=1) <= 0).all()  # padding comes last
    assert sum(reset.sum() for _, reset, *_ in batches) == len(tiny.split("train"))


def test_a_replica_at_its_end_gets_no_rows(tiny):
    options = StreamOptions(**SMALL)
    plan = streams.partition(tiny, "train", options, num_replicas=3, seed=5)
    steps = [plan.steps(replica) for replica in range(3)]
    assert len(set(steps)) > 1
    batches = read(tiny, num_replicas=3, replica_ids=[0, 1, 2])
    assert len(batches) == 3 * max(steps)
    for number, (frames, reset, labels, weights) in enumerate(batches):
        rows = 4 if number // 3 < steps[number % 3] else 0
        assert len(frames) == len(reset) == len(labels) == len(weights) == rows
        assert frames.shape[1:] == (7, 120)


def test_evaluation_keeps_the_order_of_the_corpus(tiny, whole):
    batches = read(tiny, shuffle=False, options={"streams": 1, "truncation": 7})
    for (frames, labels, weights), (expected, classes) in zip(
        utterances(batches), whole, strict=True
    ):
        np.testing.assert_array_equal(frames[weights > 0], expected)
        np.testing.assert_array_equal(labels[weights > 0], classes)


def test_epochs_and_seeds_differ_and_repeat(tiny):
    first, again = read(tiny, epoch=1), read(tiny, epoch=1)
    for one, other in zip(first, again, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first[0][0], read(tiny, epoch=2)[0][0])
    assert not np.array_equal(first[0][0], read(tiny, epoch=1, seed=6)[0][0])


@pytest.mark.parametrize("ids", [[0], [0, 1]])
def test_an_epoch_is_taken_up_again_at_a_step(tiny, ids):
    whole = read(tiny, num_replicas=2, replica_ids=ids)
    for first_step in (1, 9, len(whole) // len(ids) + 3):
        rest = read(tiny, num_replicas=2, replica_ids=ids, first_step=first_step)
        assert len(rest) == max(0, len(whole) - first_step * len(ids))
        for one, other in zip(whole[first_step * len(ids) :], rest, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_dataset_can_be_read_twice(tiny):
    dataset = streams.minibatches(
        tiny, "test", StreamOptions(**SMALL), num_replicas=1, replica_ids=[0]
    )
    first, second = ([y.numpy() for _, y, _ in dataset] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stack", [2, 3])
def test_stacking_without_overlap(tiny, whole, stack):
    batches = read(tiny, shuffle=False, options={"streams": 1, "truncation": 5, "stack": stack})
    for (frames, labels, weights), (raw, classes) in zip(utterances(batches), whole, strict=True):
        missing = -len(raw) % stack
        padded = np.concatenate([raw, np.repeat(raw[-1:], missing, 0)])
        expected = padded.reshape(-1, stack * 120)
        np.testing.assert_array_equal(frames[weights > 0], expected)
        later = np.concatenate([classes, np.repeat(classes[-1:], missing)])
        np.testing.assert_array_equal(labels[weights > 0], later.reshape(-1, stack)[:, stack // 2])


def test_splice_and_coefficients(tiny, whole):
    options = {"streams": 1, "truncation": 5, "context": 2, "coefficients": 80}
    batches = read(tiny, shuffle=False, options=options)
    assert StreamOptions(**options).input_dim(120) == 400
    for (frames, _, weights), (raw, _) in zip(utterances(batches), whole, strict=True):
        expected = features.splice(raw[:, :80], 2, 2).numpy()
        np.testing.assert_array_equal(frames[weights > 0], expected)


def test_label_delay_hears_the_future_and_keeps_every_label(tiny, whole):
    batches = read(tiny, shuffle=False, options={"streams": 1, "truncation": 5, "label_delay": 3})
    for (frames, labels, weights), (raw, classes) in zip(utterances(batches), whole, strict=True):
        n = len(classes)
        np.testing.assert_array_equal(frames[:n], raw)
        np.testing.assert_array_equal(frames[n : n + 3], np.repeat(raw[-1:], 3, 0))
        np.testing.assert_array_equal(labels[3 : n + 3], classes)
        np.testing.assert_array_equal(weights[: n + 3], [0.0] * 3 + [1.0] * n)
        assert not weights[n + 3 :].any()


def test_normalisations(tiny):
    options = {"streams": 1, "truncation": 5}
    none, utterance = (
        utterances(read(tiny, shuffle=False, options={**options, "normalisation": kind}))
        for kind in ("none", "utterance")
    )
    for (raw, _, weights), (frames, *_) in zip(none, utterance, strict=True):
        raw, frames = raw[weights > 0].astype("float64"), frames[weights > 0]
        np.testing.assert_allclose(frames, (raw - raw.mean(0)) / raw.std(0), atol=1e-3)
        np.testing.assert_allclose(frames.mean(0), 0, atol=1e-4)


def test_shapes_are_static_where_they_can_be(tiny):
    for ids, rows in (([0], 4), ([0, 1], None)):
        dataset = streams.minibatches(
            tiny, "train", StreamOptions(**SMALL), num_replicas=2, replica_ids=ids
        )
        x, y, w = dataset.element_spec
        assert x["frames"] == tf.TensorSpec([rows, 7, 120], tf.float32)
        assert x["reset"] == tf.TensorSpec([rows], tf.float32)
        assert y == tf.TensorSpec([rows, 7], tf.int32)
        assert w == tf.TensorSpec([rows, 7], tf.float32)


def test_a_damaged_utterance_is_named(tiny, tiny_directory, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(tiny_directory, copy)
    split = tiny.split("train")
    place = split.place(len(split) - 1)
    path = copy / place.path.rsplit("/", 1)[-1]
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(tf.errors.InvalidArgumentError, match=place.id):
        read(index.read(copy))


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"streams": 0}, {}, "streams .*Received: 0"),
        ({"truncation": 2.5}, {}, r"truncation .*Received: 2\.5"),
        ({"context": -1}, {}, "context .*Received: -1"),
        ({"stack": 0}, {}, "stack .*Received: 0"),
        ({"label_delay": -1}, {}, "label_delay .*Received: -1"),
        ({"normalisation": "speaker"}, {}, "global, utterance, none. Received: 'speaker'"),
        ({"coefficients": 0}, {}, "coefficients .*Received: 0"),
        ({"coefficients": 121}, {}, "coefficients=121 are more than the 120"),
        ({}, {"replica_ids": []}, r"replica_ids .*Received: \[\]"),
        ({}, {"replica_ids": [1]}, r"\[0, 1\).*Received: \[1\]"),
        ({}, {"num_replicas": 0}, "num_replicas .*Received: 0"),
        ({}, {"num_replicas": 999}, "too few for num_replicas=999"),
        ({}, {"epoch": -1}, "epoch .*Received: -1"),
        ({}, {"seed": -1}, "seed .*Received: -1"),
        ({}, {"first_step": -1}, "first_step .*Received: -1"),
        ({}, {"split": "dev"}, "split must be one of train, validation, test. Received: 'dev'"),
    ],
)
def test_bad_arguments(tiny, options, change, message):
    with pytest.raises(ValueError, match=message):
        read(tiny, options={**SMALL, **options}, **change)


def test_a_replica_out_of_range_is_refused(tiny):
    plan = streams.partition(tiny, "train", StreamOptions(**SMALL), num_replicas=2)
    with pytest.raises(ValueError, match=r"\[0, 2\). Received: 2"):
        plan.steps(2)
