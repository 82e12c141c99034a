"""Minibatches read through tf.data from a real (small) corpus."""

import numpy as np
import pytest
import tensorflow as tf

from input import features, index, pipeline

SETTINGS = {"minibatch": 97, "sync_period": 3, "shuffle_frames": 1000, "epoch": 0, "seed": 5}


def read(corpus, split="train", **changes):
    settings = {"num_replicas": 1, "replica_ids": [0], **SETTINGS, **changes}
    dataset = pipeline.minibatches(corpus, split, **settings)
    return [(frames.numpy(), labels.numpy()) for frames, labels in dataset]


@pytest.fixture(scope="module")
def reference(tiny):
    """The training frames and labels, spliced one utterance at a time, in the corpus' order."""
    split, frames, labels = tiny.split("train"), [], []
    with index.open_shards(split) as files:
        for utterance in range(len(split)):
            raw, classes = index.read_utterance(tiny, split, files, utterance)
            normal = features.normalise(raw, tiny.mean, tiny.stddev)
            frames.append(features.splice(normal, 5, 5).numpy())
            labels.append(classes)
    return np.concatenate(frames), np.concatenate(labels)


def rows(frames, labels):
    """The bytes of each frame with its label, sorted, to compare multisets."""
    together = np.concatenate([labels[:, None].astype(np.float32), frames], axis=1)
    return sorted(row.tobytes() for row in together)


def join(batches):
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle_frames", [250, 100_000])
def test_every_frame_exactly_once(tiny, num_replicas, shuffle_frames):
    workers = [[0]] if num_replicas == 1 else [[0], list(range(1, num_replicas))]
    batches = [
        batch
        for ids in workers
        for batch in read(
            tiny, num_replicas=num_replicas, replica_ids=ids, shuffle_frames=shuffle_frames
        )
    ]
    assert sorted(len(labels) for _, labels in batches)[1:] == [97] * (len(batches) - 1)
    assert rows(*join(batches)) == rows(*join(read(tiny, shuffle=False)))


def test_without_shuffle_the_order_is_that_of_the_corpus(tiny, reference):
    frames, labels = join(read(tiny, shuffle=False))
    np.testing.assert_allclose(frames, reference[0], atol=1e-6)
    np.testing.assert_array_equal(labels, reference[1])


def test_replicas_deal_out_one_sequence_in_turn(tiny):
    """Step-major: element j of a worker with L replicas is step j // L of replica_ids[j % L]."""
    whole = read(tiny)
    plan = pipeline.partition(tiny, "train", num_replicas=5, minibatch=97, sync_period=3)
    for ids in ([0, 1], [2, 3, 4]):
        mine = read(tiny, num_replicas=5, replica_ids=ids)
        expected = sorted(k for replica in ids for k in plan.minibatches(replica))
        assert len(mine) == len(expected)
        for (frames, labels), k in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(frames, whole[k][0])
            np.testing.assert_array_equal(labels, whole[k][1])
        for position, k in enumerate(expected):
            assert k % 5 == ids[position % len(ids)]
            assert k // 5 == position // len(ids)


@pytest.mark.parametrize("minibatch", [90, 97, 101, 113])
def test_in_the_last_step_only_trailing_local_replicas_have_none(tiny, minibatch):
    """So L consecutive elements are always one step: no element goes to another's replica."""
    plan = pipeline.partition(tiny, "train", num_replicas=5, minibatch=minibatch, sync_period=3)
    for ids in ([0, 1, 2], [3, 4], [1, 2, 3]):
        counts = [len(plan.minibatches(replica)) for replica in ids]
        assert counts == sorted(counts, reverse=True)
        dataset = read(tiny, num_replicas=5, replica_ids=ids, minibatch=minibatch)
        assert len(dataset) == sum(counts)


def test_a_replica_without_minibatches_gets_an_empty_dataset(tiny):
    many = tiny.num_frames("test")
    assert read(tiny, "test", num_replicas=many, replica_ids=[many - 1]) == []
    assert len(read(tiny, "test", num_replicas=many, replica_ids=[0])) == 1


@pytest.mark.nightly_cases("2-*")
@pytest.mark.parametrize("first", [1, 6, 15, 31])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_an_epoch_is_taken_up_again_on_any_number_of_replicas(tiny, first, num_replicas):
    """Minibatch first + i goes to replica i mod N: what is left, each exactly once."""
    whole = read(tiny)[first:]
    assert whole
    workers = [[0]] if num_replicas == 1 else [[0], list(range(1, num_replicas))]
    taken = []
    for ids in workers:
        rest = read(tiny, num_replicas=num_replicas, replica_ids=ids, first_minibatch=first)
        expected = [i for i in range(len(whole)) if i % num_replicas in ids]
        assert len(rest) == len(expected)
        for (frames, labels), i in zip(rest, expected, strict=True):
            np.testing.assert_array_equal(frames, whole[i][0])
            np.testing.assert_array_equal(labels, whole[i][1])
        taken += expected
    assert sorted(taken) == list(range(len(whole)))


def test_windows_that_are_done_are_not_read(tiny, monkeypatch):
    plan = pipeline.partition(
        tiny, "train", num_replicas=1, minibatch=97, sync_period=3, shuffle_frames=1000
    )
    first = plan.window_minibatches(plan.num_windows - 1).start
    windows = []
    real = pipeline._WindowReader.read

    def spy(self, window):
        windows.append(int(window))
        return real(self, window)

    monkeypatch.setattr(pipeline._WindowReader, "read", spy)
    assert len(read(tiny, first_minibatch=first)) == plan.num_minibatches - first
    assert windows == [plan.num_windows - 1]
    assert read(tiny, first_minibatch=plan.num_minibatches) == []


@pytest.mark.parametrize("first", [-1, 10**6])
def test_a_position_outside_the_epoch_is_refused(tiny, first):
    with pytest.raises(ValueError, match=rf"first_minibatch must lie in .* Received: {first}"):
        read(tiny, first_minibatch=first)


def test_epochs_and_seeds_differ_and_repeat(tiny):
    first, again = read(tiny, epoch=1), read(tiny, epoch=1)
    for (frames, labels), (frames_again, labels_again) in zip(first, again, strict=True):
        np.testing.assert_array_equal(frames, frames_again)
        np.testing.assert_array_equal(labels, labels_again)
    assert not np.array_equal(join(first)[1], join(read(tiny, epoch=2))[1])
    assert not np.array_equal(join(first)[1], join(read(tiny, epoch=1, seed=6))[1])


@pytest.mark.parametrize("context", [0, 2])
def test_context_sets_the_width_which_is_static(tiny, context):
    dataset = pipeline.minibatches(
        tiny, "train", num_replicas=1, replica_ids=[0], context=context, **SETTINGS
    )
    width = 120 * (2 * context + 1)
    assert dataset.element_spec == (
        tf.TensorSpec([None, width], tf.float32),
        tf.TensorSpec([None], tf.int32),
    )
    assert next(iter(dataset))[0].shape == (97, width)


def test_counts_agree_with_what_is_read(tiny):
    plan = pipeline.partition(tiny, "train", num_replicas=3, minibatch=97, sync_period=3)
    for replica in range(3):
        count = len(read(tiny, num_replicas=3, replica_ids=[replica]))
        assert count == len(plan.minibatches(replica))
    assert plan.num_blocks == -(-plan.num_steps // 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replica_ids": []}, r"replica_ids .*Received: \[\]"),
        ({"replica_ids": [1, 0], "num_replicas": 2}, r"ascending.*Received: \[1, 0\]"),
        ({"replica_ids": [0, 0], "num_replicas": 2}, r"ascending.*Received: \[0, 0\]"),
        ({"replica_ids": [1]}, r"\[0, 1\).*Received: \[1\]"),
        ({"minibatch": 0}, "minibatch .*Received: 0"),
        ({"epoch": -1}, "epoch .*Received: -1"),
        ({"seed": -1}, "seed .*Received: -1"),
        ({"context": -1}, "left=-1"),
        ({"split": "dev"}, "split must be one of train, validation, test. Received: 'dev'"),
    ],
)
def test_bad_arguments(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        read(tiny, **change)
