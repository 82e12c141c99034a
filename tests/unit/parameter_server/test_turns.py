"""Bounded staleness: the rule of turns, for any order of pulls and pushes."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.random_examples import random_examples
from tfpara.parameter_server.staleness import may_pull, may_push


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """Many calls: as graphs."""
    request.module.PULL = tf.function(may_pull)
    request.module.PUSH = tf.function(may_push)


def pull(outstanding, worker, bound):
    return bool(PULL(tf.constant(outstanding, tf.int64), tf.constant(worker, tf.int64), bound))  # noqa: F821


def push(outstanding, worker, version, bound):
    numbers = [tf.constant(n, tf.int64) for n in (worker, version)]
    return bool(PUSH(tf.constant(outstanding, tf.int64), *numbers, bound))  # noqa: F821


def can_all_push(pulls, version, bound):
    """Whether these pulls have an order of pushes that keeps to the bound: all orders are tried."""
    if not pulls:
        return True
    return any(
        version - p <= bound and can_all_push(pulls[:k] + pulls[k + 1 :], version + 1, bound)
        for k, p in enumerate(pulls)
    )


@random_examples(25)
@given(st.data(), st.integers(1, 5), st.sampled_from([0, 1, 2, 3]))
def test_nobody_waits_for_ever_and_no_push_is_too_stale(data, workers, bound):
    outstanding, version = [-1] * workers, 0
    for _ in range(15):
        computing = [k for k, p in enumerate(outstanding) if p >= 0]
        pushing = [k for k in computing if push(outstanding, k, version, bound)]
        pulling = [k for k, p in enumerate(outstanding) if p < 0 and pull(outstanding, k, bound)]
        if computing:  # the one with the oldest pull may always push
            oldest = min(outstanding[k] for k in computing)
            assert any(outstanding[k] == oldest for k in pushing)
        else:
            assert len(pulling) == workers
        choice = data.draw(
            st.sampled_from([*(("push", k) for k in pushing), *(("pull", k) for k in pulling)])
        )
        if choice[0] == "push":
            assert version - outstanding[choice[1]] <= bound
            outstanding[choice[1]] = -1
            version += 1
        else:
            outstanding[choice[1]] = version


@random_examples(60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 3))
def test_a_push_is_refused_only_if_the_others_could_not_keep_to_the_bound(ages, bound, extra):
    version = max(ages) + extra
    outstanding = [version - age for age in ages]
    others = outstanding[1:]
    assert push(outstanding, 0, version, bound) == can_all_push(others, version + 1, bound)
    assert pull([-1, *others], 0, bound) == (len(others) <= bound)


def test_by_hand():
    # Pulls at versions 0 and 1, now version 1, s = 1: if the second pushed, the first's staleness
    # would be 2.
    assert push([0, 1], 0, 1, 1)
    assert not push([0, 1], 1, 1, 1)
    assert not pull([-1, 0, 0], 0, 1)
    assert pull([-1, 0, 0], 0, 2)
