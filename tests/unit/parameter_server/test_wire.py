"""How tensors travel between a worker and a parameter server: all arrive unchanged."""

import numpy as np
import pytest
import tensorflow as tf

from tfpara.parameter_server import messages


def operations(graph, kind):
    return [op for op in graph.get_operations() if op.type == kind]


VALUES = {
    "weights": [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.float32(-0.0),
        np.asarray([np.nan, np.inf, 1e-45], "float32"),
    ],
    "half": np.asarray([1.5, -2.5], tf.bfloat16.as_numpy_dtype),
    "counts": (np.int64(2**62 + 1), np.int32([-7, 2**31 - 1])),
    "flags": np.asarray([True, False]),
    "none": np.zeros([0, 4], "float32"),
    "absent": None,
    "large": np.arange(1 << 17, dtype="float32"),
}


@pytest.mark.parametrize("in_graph", [False, True])
def test_all_arrive_unchanged(in_graph):
    given = tf.nest.map_structure(lambda v: None if v is None else tf.constant(v), VALUES)

    def through():
        return messages.sent(given, "CPU:1", "CPU:0")

    got = tf.function(through)() if in_graph else through()
    tf.nest.assert_same_structure(got, given)
    for there, here in zip(tf.nest.flatten(got), tf.nest.flatten(given), strict=True):
        if here is None:
            assert there is None
            continue
        assert there.dtype == here.dtype and there.shape == here.shape
        assert there.numpy().tobytes() == here.numpy().tobytes()
        assert there.device.endswith("CPU:0")


def test_small_tensors_travel_together_and_large_ones_alone():
    @tf.function
    def send(small, large, rows, counts, flags):
        return messages.sent((small, large, rows, counts, flags), "CPU:1", "CPU:0")

    graph = send.get_concrete_function(
        [tf.TensorSpec([3, n]) for n in range(1, 9)],
        [tf.TensorSpec([1 << 17])] * 2,
        tf.TensorSpec([None, 4]),
        [tf.TensorSpec([], tf.int64)] * 3,
        [tf.TensorSpec([], tf.bool)] * 2,
    ).graph
    crossing = {
        tensor.name
        for op in graph.get_operations()
        if op.device.endswith("CPU:0")
        for tensor in op.inputs
        if not tensor.device.endswith("CPU:0") and tensor.op.type != "Const"
    }
    vectors = {op.outputs[0].name for op in operations(graph, "ConcatV2")}
    assert len(vectors) == 2 and vectors < crossing  # of numbers with and without a fraction
    assert len(crossing) == 2 + 3  # and the large ones, and the one whose size is not known
