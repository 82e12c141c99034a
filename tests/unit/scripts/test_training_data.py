"""The training data of all epochs: every frame once, whatever N, sizes and interruptions are."""

import dataclasses

import numpy as np
import pytest

from input import index
from scripts import common
from scripts.data import TrainingData, held_out
from tfpara.callbacks import WarmStart

FRAMES = {"kind": "dnn", "context": 0}
STREAMS = {
    "kind": "lstm",
    "streams": 2,
    "truncation": 20,
    "context": 0,
    "stack": 1,
    "label_delay": 0,
    "coefficients": None,
}


@dataclasses.dataclass
class Strategy:
    """As much of a strategy as the data need to know."""

    num_replicas: int
    local_replica_ids: list


@pytest.fixture(scope="module")
def corpus(corpus_directory):
    return index.read(corpus_directory)


def data(corpus, replicas, ids, minibatch=None, warm=0, description=FRAMES):
    return TrainingData(
        corpus,
        Strategy(replicas, ids),
        description,
        minibatch=minibatch or {0: 64},
        sync_period=5,
        seed=3,
        shuffle_frames=500,
        warm=WarmStart(warm, verbose=0),
    )


def read(found, epoch=0, first=0):
    return [(x.numpy(), y.numpy()) for x, y in found(epoch, first)]


def rows(batches):
    """The frames with their labels, sorted: the same for the same multiset."""
    x = np.concatenate([x for x, _ in batches])
    y = np.concatenate([y for _, y in batches])
    joined = np.concatenate([y[:, None].astype("float32"), x], axis=1)
    return joined[np.lexsort(joined.T[::-1])]


@pytest.fixture(scope="module")
def every_frame(corpus):
    return rows(read(data(corpus, 1, [0])))


def test_sizes_that_are_rounded_away_are_told(corpus):
    assert data(corpus, 1, [0]).about_sizes() is None
    assert data(corpus, 2, [0, 1], {0: 32, 0.3: 64, 1.5: 128}).about_sizes() is None
    # Both replicas have as many frames of 7 as of 1000 at multiples of 14,000 alone.
    found = data(corpus, 2, [0, 1], {0: 7, 0.25: 1000})
    assert {len(y) for _, y in read(found)[:-1]} == {1000}
    said = found.about_sizes()
    assert "no minibatch has 7 frames. The size changes at multiples of 14000 frames alone" in said


@pytest.mark.parametrize("workers", [[[0]], [[0, 1], [2]]])
def test_every_frame_once_where_the_size_changes(corpus, every_frame, workers):
    replicas = sum(map(len, workers))
    sizes = {0: 32, 0.3: 64, 1.5: 128}
    for epoch in range(3):
        parts = [read(data(corpus, replicas, ids, sizes), epoch) for ids in workers]
        assert np.array_equal(rows([batch for part in parts for batch in part]), every_frame)
        found = {len(y) for part in parts for _, y in part[:-1]}
        expected = ({32, 64}, {64, 128}, {128})[epoch]
        # The last one of an epoch may be short.
        assert expected <= found and len(found - expected) <= 1
        # Elements are dealt out in turn: all replicas of a worker have minibatches of one size.
        for ids, part in zip(workers, parts, strict=True):
            lengths = [len(y) for _, y in part]
            for step in range(0, len(lengths) - 2 * len(ids), len(ids)):
                assert len(set(lengths[step : step + len(ids)])) == 1


@pytest.mark.nightly_cases("sizes1-1", "sizes1-16", "sizes1-21")
@pytest.mark.parametrize("steps", [1, 7, 15, 16, 21])
@pytest.mark.parametrize("sizes", [{0: 64}, {0: 32, 0.3: 64}])
def test_what_is_left_of_an_epoch_is_what_was_not_done(corpus, sizes, steps):
    for ids in ([0], [1]):
        whole = read(data(corpus, 2, ids, sizes))
        rest = read(data(corpus, 2, ids, sizes), first=2 * steps)
        assert len(rest) == len(whole) - steps
        for (x, y), (expected_x, expected_y) in zip(rest, whole[steps:], strict=True):
            np.testing.assert_array_equal(x, expected_x)
            np.testing.assert_array_equal(y, expected_y)


def test_a_run_goes_on_with_other_replicas(corpus, every_frame):
    done = [batch for ids in ([0], [1]) for batch in read(data(corpus, 2, ids))[:6]]
    rest = [b for ids in ([0, 1], [2]) for b in read(data(corpus, 3, ids), first=12)]
    assert np.array_equal(rows(done + rest), every_frame)


@pytest.mark.parametrize(
    "options", [{"minibatch": {0: 32, 0.3: 64}}, {"warm": 1}, {"description": STREAMS}]
)
def test_but_not_where_the_position_depends_on_their_number(corpus, options):
    found = data(corpus, 3, [0, 1], **options)
    found.set_state({"replicas": 2})
    found(0, 0)
    with pytest.raises(common.Failure, match="with 2 replicas, and goes on with 3: .* Start 2;"):
        found(0, 12)
    assert found.get_state() == {"replicas": 3}


def test_a_warm_epoch_is_that_of_one_replica_on_every_replica(corpus):
    alone = read(data(corpus, 1, [0]))
    shared = data(corpus, 3, [1, 2], warm=1)
    for first, expected in ((0, alone), (3 * 4, alone[4:])):
        warm = read(shared, first=first)
        assert len(warm) == 2 * len(expected)
        for number, (x, _) in enumerate(warm):
            np.testing.assert_array_equal(x, expected[number // 2][0])
    assert len(read(shared, epoch=1)) < len(alone)


def test_streams_are_taken_up_again_at_a_step(corpus):
    found = data(corpus, 2, [0, 1], description=STREAMS)
    whole, rest = list(found(0, 0)), list(found(0, 6))
    for (x, y, w), (x2, y2, w2) in zip(whole[6:], rest, strict=True):
        np.testing.assert_array_equal(x["frames"], x2["frames"])
        np.testing.assert_array_equal(y, y2)
        np.testing.assert_array_equal(w, w2)


def test_too_many_replicas_are_refused(corpus):
    with pytest.raises(ValueError, match="too few for 999 replicas"):
        data(corpus, 999, [0])
    with pytest.raises(ValueError, match="too few for num_replicas=999"):
        data(corpus, 999, [0], description=STREAMS)


def test_streams_need_an_utterance_for_each_replica(corpus):
    with pytest.raises(ValueError, match="the test split .* one for each of 99 replicas"):
        held_out(corpus, "test", Strategy(99, [0]), STREAMS)


@pytest.mark.parametrize("description", [FRAMES, STREAMS], ids=["frames", "streams"])
def test_a_split_without_data_is_named(corpus, description):
    columns = dict.fromkeys(("frames", "id"), ())
    empty = dataclasses.replace(corpus.split("test"), **columns)
    without = dataclasses.replace(corpus, splits={**corpus.splits, "test": empty})
    with pytest.raises(ValueError, match="has no test data. Choose .*--test_data or --test_share"):
        held_out(without, "test", None, description)


def test_held_out_streams_have_the_models_rows(corpus):
    (inputs, labels, weights) = next(iter(held_out(corpus, "test", None, STREAMS)))
    assert inputs["frames"].shape == (2, 20, corpus.feature_dim)
    assert labels.shape == weights.shape == (2, 20)
