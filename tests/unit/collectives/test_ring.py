"""What TensorFlow's collectives are called; trainings over them: tests/distributed."""

import random
import zlib

import pytest
import tensorflow as tf

from tfpara import cluster
from tfpara.collectives import TensorFlowCollectives
from tfpara.collectives.members import order_of

pytestmark = pytest.mark.latest

TASKS = cluster.Cluster(("a:1", "b:1"), "worker", 0).tasks


def two_names_of_one_checksum():
    """Names of all-gathers of numbers, of whose checksums the 31 bits of a key are the same."""
    seen, numbers = {}, random.Random(0)
    while True:
        name = f"{numbers.getrandbits(64):x}"
        key = zlib.crc32(f"gather/{name}/float32()".encode()) & 0x7FFFFFFF
        if key in seen:
            return seen[key], name
        seen[key] = name


def test_two_operations_that_tensorflow_could_not_tell_apart_are_refused():
    first, second = two_names_of_one_checksum()
    with tf.Graph().as_default():
        weights, reports = (
            TensorFlowCollectives(TASKS, 0, "CPU:0", 0.0, group=g) for g in range(2)
        )
        for _ in range(2):
            weights.all_gather(tf.zeros([]), first)
        reports.all_gather(tf.zeros([]), second)
        weights.all_gather(tf.zeros([]), "another")
        with pytest.raises(RuntimeError, match=f"'gather/{first}/.* and 'gather/{second}/.* share"):
            weights.all_gather(tf.zeros([]), second)


def test_a_tensor_without_elements_is_not_sent():
    """A worker that joins receives such a tensor if the model has no state."""
    with tf.Graph().as_default() as graph:
        for rank in range(2):
            got = TensorFlowCollectives(TASKS, rank, "CPU:0", 0.0).broadcast(tf.zeros([0]), "none")
            assert got.shape == [0]
    assert not any(op.type.startswith("Collective") for op in graph.get_operations())


def test_tensorflow_orders_tasks_by_their_names():
    """Twelve real workers show it: distributed/test_many_workers.py."""
    addresses = tuple(f"a:{port}" for port in range(4000, 4013))
    with_chief = cluster.Cluster(addresses, "chief", 0, has_chief_job=True).tasks
    assert with_chief[:2] == ("/job:chief/task:0", "/job:worker/task:0")
    assert with_chief[11:] == ("/job:worker/task:10", "/job:worker/task:11")
    assert order_of(with_chief) == [0, 1, 2, 11, 12, 3, 4, 5, 6, 7, 8, 9, 10]
    assert order_of(with_chief[:11]) == list(range(11))
    without = cluster.Cluster(addresses, "worker", 0).tasks
    assert order_of(without) == [0, 1, 10, 11, 12, 2, 3, 4, 5, 6, 7, 8, 9]
    # Of an elastic run, whose tasks have numbers of their own.
    assert order_of([f"/job:worker/task:{number}" for number in (8, 9, 10, 13)]) == [2, 3, 0, 1]


@pytest.mark.parametrize("communication", ["RING", "NCCL"])
def test_gpus_without_nccl_have_the_operations_of_cpus(communication):
    """TensorFlow has a reduce-scatter for NCCL alone, and NCCL alone needs an order."""
    gpu = "/job:worker/task:0/device:GPU:0"
    with tf.Graph().as_default() as graph:
        collectives = TensorFlowCollectives(TASKS, 0, gpu, 0.0, communication)
        collectives.reduce_scatter([tf.zeros([4]), tf.zeros([6])], "cut")
        collectives.all_reduce([tf.zeros([4]), tf.zeros([6])], "sum")
    made = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    tokens = {op.inputs[-1].name for op in made}
    assert {op.get_attr("communication_hint").decode() for op in made} == {communication.lower()}
    kinds = sorted({op.type for op in made})
    if communication == "NCCL":
        assert kinds == ["CollectiveReduceScatterV2", "CollectiveReduceV2"]
        assert len(tokens) == 1
    else:
        assert kinds == ["CollectiveAllToAllV2", "CollectiveReduceV2"]
        assert len(tokens) == len(made) == 4
