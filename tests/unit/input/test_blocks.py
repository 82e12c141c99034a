"""The partition of an epoch: every frame once, whatever N is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from input import blocks
from tests.lib.random_examples import random_examples

PLANS = st.builds(
    blocks.partition,
    num_frames=st.integers(1, 600),
    minibatch=st.integers(1, 40),
    num_replicas=st.integers(1, 7),
    sync_period=st.integers(1, 6),
    shuffle_frames=st.integers(1, 200),
)


def epoch_sequence(plan, seed=0, epoch=0):
    return np.concatenate(
        [blocks.frame_order(plan, window, seed, epoch) for window in range(plan.num_windows)]
    )


@given(PLANS)
def test_replicas_take_every_frame_exactly_once(plan):
    sequence = epoch_sequence(plan)
    taken = [
        sequence[plan.frames(k).start : plan.frames(k).stop]
        for replica in range(plan.num_replicas)
        for k in plan.minibatches(replica)
    ]
    assert sorted(np.concatenate(taken)) == list(range(plan.num_frames))


@given(PLANS)
def test_blocks_and_splits_hold_every_minibatch_exactly_once(plan):
    splits = [
        plan.split(block, replica)
        for block in range(plan.num_blocks)
        for replica in range(plan.num_replicas)
    ]
    assert sorted(k for split in splits for k in split) == list(range(plan.num_minibatches))
    assert all(len(split) <= plan.sync_period for split in splits)
    full = splits[: -plan.num_replicas]  # all but the last block
    assert all(len(split) == plan.sync_period for split in full)
    assert plan.split(plan.num_blocks - 1, 0)  # no block is empty


@given(PLANS)
def test_a_block_is_a_run_of_the_sequence_and_replica_i_has_k_mod_n(plan):
    per_block = plan.num_replicas * plan.sync_period
    for block in range(plan.num_blocks):
        for replica in range(plan.num_replicas):
            for k in plan.split(block, replica):
                assert k // per_block == block
                assert k % plan.num_replicas == replica


@given(PLANS)
def test_only_the_very_last_minibatch_is_short(plan):
    sizes = [len(plan.frames(k)) for k in range(plan.num_minibatches)]
    assert set(sizes[:-1]) <= {plan.minibatch}
    assert 1 <= sizes[-1] <= plan.minibatch


@given(PLANS)
def test_replicas_differ_by_one_minibatch_and_the_last_have_less(plan):
    counts = [len(plan.minibatches(replica)) for replica in range(plan.num_replicas)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1
    assert counts[0] == plan.num_steps


@given(PLANS)
def test_no_minibatch_crosses_two_windows(plan):
    held = [k for window in range(plan.num_windows) for k in plan.window_minibatches(window)]
    assert held == list(range(plan.num_minibatches))
    for window in range(plan.num_windows):
        positions = sorted(blocks.frame_order(plan, window, 1, 2))
        assert positions == list(plan.window_frames(window))
        for k in plan.window_minibatches(window):
            assert plan.frames(k)[0] >= plan.window_frames(window)[0]
            assert plan.frames(k)[-1] <= plan.window_frames(window)[-1]


@given(PLANS, st.integers(1, 9), st.integers(1, 9))
def test_the_sequence_does_not_depend_on_replicas_or_period(plan, num_replicas, sync_period):
    other = plan._replace(num_replicas=num_replicas, sync_period=sync_period)
    np.testing.assert_array_equal(epoch_sequence(plan), epoch_sequence(other))


@random_examples(20)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_order_is_a_function_of_seed_and_epoch(seed, epoch):
    def orders(seed, epoch):
        plan = blocks.partition(90, minibatch=3, num_replicas=1, sync_period=1, shuffle_frames=30)
        order = blocks.utterance_order(50, seed, epoch)
        windows = [blocks.frame_order(plan, w, seed, epoch) % 30 for w in range(3)]
        return [order.tolist(), *[window.tolist() for window in windows]]

    assert orders(seed, epoch) == orders(seed, epoch)
    everything = orders(seed, epoch) + orders(seed + 1, epoch) + orders(seed, epoch + 1)
    assert len({tuple(order) for order in everything}) == len(everything)


def test_by_hand():
    plan = blocks.partition(23, minibatch=2, num_replicas=3, sync_period=2, shuffle_frames=5)
    assert (plan.window, plan.num_windows) == (6, 4)
    assert (plan.num_minibatches, plan.num_blocks, plan.num_steps) == (12, 2, 4)
    assert [list(plan.split(1, replica)) for replica in range(3)] == [[6, 9], [7, 10], [8, 11]]
    assert list(plan.frames(11)) == [22]
    assert list(plan.window_minibatches(3)) == [9, 10, 11]


@pytest.mark.parametrize(
    "name", ["num_frames", "minibatch", "num_replicas", "sync_period", "shuffle_frames"]
)
@pytest.mark.parametrize("value", [0, -1, 2.5, "4"])
def test_sizes_must_be_positive_integers(name, value):
    sizes = {
        "num_frames": 9,
        "minibatch": 2,
        "num_replicas": 1,
        "sync_period": 1,
        "shuffle_frames": 4,
    }
    sizes[name] = value
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1. Received"):
        blocks.partition(**sizes)


def test_there_is_no_replica_n():
    plan = blocks.partition(9, minibatch=2, num_replicas=2, sync_period=1, shuffle_frames=4)
    with pytest.raises(ValueError, match=r"\[0, 2\). Received: 2"):
        plan.minibatches(2)
