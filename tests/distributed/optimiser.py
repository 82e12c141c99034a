"""TensorFlow's optimisers of graphs, which tests of tiny networks can do without."""

import os

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context


def turn_off() -> None:
    """Turns them off where `scripts/test.sh` wants it; before TensorFlow's first operation.

    They take a fifth of a training of two steps: the graph optimiser rewrites each function, and
    each device's part of it is then simplified once more.
    """
    if os.environ.get("TFPARA_TEST_GRAPPLER") != "0":
        return
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    options = config_pb2.OptimizerOptions(opt_level=config_pb2.OptimizerOptions.L0)
    graphs = config_pb2.GraphOptions(optimizer_options=options)
    context.context()._config = config_pb2.ConfigProto(graph_options=graphs)
