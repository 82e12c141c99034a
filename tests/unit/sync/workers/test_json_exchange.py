"""Tensors of all workers that are joined to one."""

import pytest
import tensorflow as tf

from tfpara.cluster.call_site import call
from tfpara.sync.workers import json_exchange

pytestmark = pytest.mark.latest


@pytest.mark.parametrize(("own", "other", "joined"), [([0, 3], 0, [0, 3]), ([2, 0], 1, [3, 0])])
def test_tensors_without_elements_are_joined_without_sending_them(own, other, joined, monkeypatch):
    def everyones(fact, control, purpose):
        return [fact, [*fact[:2], other]]

    monkeypatch.setattr(json_exchange, "everyones", everyones)
    got = json_exchange.joined(tf.zeros(own, tf.int32), 0, None, call("strategy.gather()"))
    assert got.shape == joined and got.dtype == tf.int32
