"""What TensorFlow's collectives are called; trainings over them: tests/distributed."""

import random
import zlib

import pytest
import tensorflow as tf

from tfpara.collectives import TensorFlowCollectives


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
        weights, reports = (TensorFlowCollectives(2, 0, "CPU:0", 0.0, group=g) for g in range(2))
        for _ in range(2):
            weights.all_gather(tf.zeros([]), first)
        reports.all_gather(tf.zeros([]), second)
        weights.all_gather(tf.zeros([]), "another")
        with pytest.raises(RuntimeError, match=f"'gather/{first}/.* and 'gather/{second}/.* share"):
            weights.all_gather(tf.zeros([]), second)
