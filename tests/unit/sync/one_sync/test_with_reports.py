"""Weights that travel with the reports: for which models, and their mean."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfpara.collectives import Loopback, TensorFlowCollectives
from tfpara.sync.one_sync import placement, weight_exchange
from tfpara.sync.one_sync.buckets import Layout
from tfpara.sync.one_sync.weight_exchange import Shares, WithReports


def of(
    workers=3,
    elements=100,
    devices=("CPU:0",),
    changes=False,
    whole=True,
    sharded=False,
    unlike=(),
    kinds=("CPU",),
):
    tasks = [f"/job:worker/task:{rank}" for rank in range(workers)]
    collectives = TensorFlowCollectives(tasks, 0, "CPU:0", 0.0) if workers > 1 else Loopback()
    company = types.SimpleNamespace(changes=changes, unlike_devices=unlike, kinds=kinds)
    replicas = types.SimpleNamespace(
        layout=Layout([[elements - 30], [30]], 200),
        devices=devices,
        site=types.SimpleNamespace(collectives=collectives, company=company),
    )
    kind = placement.Sharded if sharded else placement.Replicated
    return WithReports.of(kind([elements], collectives, devices), replicas, whole)


MOST = weight_exchange.WITH_REPORTS_BYTES // 4  # of all workers


@pytest.mark.parametrize(
    ("given", "travel"),
    [
        ({"workers": 2, "elements": MOST // 2}, True),
        ({"workers": 2, "elements": MOST // 2 + 1}, False),  # with 15 zeros
        ({"elements": 24_576}, True),  # 3 workers: twice in place of 4/3 times, 64 KiB more
        ({"elements": 24_577}, False),
        ({"workers": 16, "elements": 1_248}, True),  # 15 times in place of 1.875 times
        ({"workers": 16, "elements": 1_249}, False),
        ({"workers": 1}, False),
        ({"devices": ("CPU:0", "CPU:1")}, False),
        ({"devices": ("/job:worker/task:0/device:GPU:0",)}, False),
        ({"unlike": (1, 2, 1)}, False),  # so that all workers decide alike
        ({"kinds": ("CPU", "GPU")}, False),
        ({"changes": True}, False),
        ({"whole": False}, False),
        ({"sharded": True}, False),
    ],
)
def test_small_models_of_workers_with_one_cpu(given, travel):
    assert (of(**given) is not None) == travel


def test_the_mean_is_by_the_shares_of_all_replicas():
    arrived = np.random.default_rng(1).normal(size=(3, 100)).astype(np.float32)
    made = of()
    vectors = [tf.concat(made.sent(tf.split(row, made.sizes[:-1])), 0) for row in arrived]
    portions = np.array([0.5, 0.125, 0.375], np.float32)
    for equal, expected in ((False, portions @ arrived), (True, arrived.mean(0))):
        divisor = tf.constant(3.0 if equal else 1.0)
        shares = Shares(tf.constant(portions[:1]), divisor, tf.constant(1.0))
        (buckets,) = made.mean(vectors, tf.constant(portions), shares)
        assert [len(bucket) for bucket in buckets] == made.sizes[:-1] and len(buckets) > 1
        np.testing.assert_allclose(np.concatenate(buckets), expected, rtol=1e-6, atol=1e-7)
    assert made.elements == 112 and made.bytes_sent == 4 * 112 * 2
