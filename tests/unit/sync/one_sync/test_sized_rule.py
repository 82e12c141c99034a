"""Rules whose hyper-parameters follow the number of replicas."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfpara
from tests.lib.random_examples import random_examples
from tfpara.sync.one_sync.sized_rule import SizedRule, check_sizes, sized_fields

pytestmark = pytest.mark.latest


def make(value, name):
    return tf.Variable(value, trainable=False, name=name)


def following(rule, number):
    return SizedRule(rule.resolve(number), rule, make)


@pytest.mark.one_version
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    zeta=st.sampled_from([0.5, 1.0]),
    nesterov=st.booleans(),
    warmup=st.booleans(),
)
@random_examples(60)
def test_block_momentum_that_follows_the_replicas(sizes, zeta, nesterov, warmup):
    """Against the equations of block momentum, with each block's own eta.

    A block begins at the point B that was broadcast; what it gives is measured from there.
    """
    draws = np.random.default_rng(1)
    asked = tfpara.BMUF(block_learning_rate=zeta, nesterov=nesterov, warmup=warmup)
    rule = following(asked, sizes[0])
    weights = np.float32([0.5, -1.0])
    state = rule.last().init(tf.constant(weights))
    model, delta, began = weights.astype(float), np.zeros(2), weights.astype(float)
    for blocks, size in enumerate(sizes):
        average = np.float32(began + draws.normal(size=2))
        rule.change(size)
        before = rule.carried(state)
        present = rule.present()
        state = present.update(before, tf.constant(average), float(size))
        sent = present.broadcast(before, state)
        rule.commit()

        eta = following_eta = 1.0 - 1.0 / size
        if warmup:
            eta = min(eta, 1.0 - 1.0 / (blocks + 1))
            following_eta = min(following_eta, 1.0 - 1.0 / (blocks + 2))
        learned = average - began
        former, delta = delta, eta * delta + zeta * learned
        if nesterov:
            # W is B less the momentum that the broadcast has taken ahead.
            model = began - eta * former + delta
            began = model + following_eta * delta
        else:
            began = model = model + delta
        np.testing.assert_allclose(state.global_model, model, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sent, began, rtol=1e-4, atol=1e-4)
        again = rule.last().broadcast(state, state)
        np.testing.assert_array_equal(again, sent)


def test_who_takes_over_the_state_has_the_point_that_was_broadcast():
    """A worker that joins has begun with another number of replicas."""
    rule, other = (following(tfpara.BMUF(), number) for number in (4, 1))
    state = rule.last().init(tf.constant([1.0]))
    state = rule.present().update(state, tf.constant([3.0]), 4)
    for own, theirs in zip(other.slots(), rule.slots(), strict=True):
        own.variable.assign(theirs.variable)
    other.change(5)
    sent = [each.last().broadcast(state, state).numpy() for each in (rule, other)]
    np.testing.assert_array_equal(*sent)


def test_the_centre_and_the_pull_of_easgd_follow_the_replicas():
    rule = following(tfpara.EASGD(), 2)
    state, local = rule.last().init(tf.constant([1.0])), 3.0
    rule.change(9)
    after = rule.present().update(state, tf.constant([2.0]), 9.0)
    np.testing.assert_allclose(after.global_model, [1.0 + 9 * 0.1 * (2.0 - 1.0)], rtol=1e-6)
    pulled = rule.present().restart(tf.constant([local]), state.global_model)
    np.testing.assert_allclose(pulled, [local - 0.1 * (local - 1.0)], rtol=1e-6)


@pytest.mark.parametrize(
    "rule,names",
    [
        (tfpara.BMUF(), ["block_momentum"]),
        (tfpara.BMUF(0.5), []),
        (tfpara.EASGD(), ["elasticity"]),
        (tfpara.EASGD(0.1), []),
        (tfpara.BSP(), []),
        (tfpara.DiLoCo(), []),
    ],
)
def test_which_hyperparameters_follow(rule, names):
    assert sized_fields(rule) == names
    sized = following(rule, 3)
    sized.change(7)
    for name in names:
        assert float(getattr(sized.present(), name)) == pytest.approx(
            getattr(rule.resolve(7), name)
        )
        assert float(getattr(sized.last(), name)) == pytest.approx(getattr(rule.resolve(3), name))


def test_a_value_that_cannot_follow_is_refused():
    class State(NamedTuple):
        global_model: Any

    @dataclasses.dataclass(frozen=True)
    class Worded(tfpara.Rule):
        size: str = ""

        def resolve(self, num_replicas):
            return dataclasses.replace(self, size="many" if num_replicas > 2 else "few")

        def init(self, weights):
            return State(weights)

        def update(self, state, average, num_replicas, share=1.0):
            return State(average)

    with pytest.raises(ValueError, match=r"gives size otherwise .*rule_follows=False"):
        sized_fields(Worded())


@pytest.mark.parametrize(
    "rule,most,devices,number",
    [
        (tfpara.EASGD(0.3), None, 1, 6),  # unstable from alpha = 2/(N+1) on
        (tfpara.EASGD(0.3), None, 2, 3),
        (tfpara.EASGD(0.3), 6, 1, 6),
        (tfpara.EASGD().resolve(2), 8, 1, 4),  # that of the first two workers
    ],
)
def test_a_rule_that_is_unstable_for_more_workers_is_refused(rule, most, devices, number):
    with pytest.raises(ValueError, match=rf"where {number} workers train.*max_workers="):
        check_sizes(rule, most, devices)


@pytest.mark.parametrize(
    "rule,most", [(tfpara.EASGD(), None), (tfpara.EASGD(0.3), 5), (tfpara.BMUF(), None)]
)
def test_a_rule_that_is_stable_for_all_that_may_come(rule, most):
    assert repr(check_sizes(rule, most, 1)) == repr(rule.resolve(most or 1024))
